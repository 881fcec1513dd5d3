"""sb3-contrib's own algorithms on its rollout buffers and on ours."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from test_docs import blocks

ours: Any = import_module("relive.compat.sb3_contrib")
contrib: Any = import_module("sb3_contrib")
masking: Any = import_module("sb3_contrib.common.maskable.buffers")
vec_env: Any = import_module("stable_baselines3.common.vec_env")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parametrize("seed", range(2))]


class Turns(gym.Env[Any, Any]):
    """The number that was shown first is to be repeated; some actions are not allowed; episodes end in two ways."""

    observation_space: Any = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space: Any = gym.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left, self.number = int(self.np_random.integers(3, 9)), int(self.np_random.integers(5))
        self.first = True
        return self.seen(), {}

    def seen(self) -> Any:
        noise = self.np_random.uniform(-1, 1, 2)
        return np.array([self.number / 5 if self.first else -1, *noise], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.first = False
        self.left -= 1
        over, cut = self.left == 0, self.number > 2
        return self.seen(), float(action == self.number), over and not cut, over and cut, {}

    def action_masks(self) -> Any:
        allowed = np.arange(5) != self.left % 5
        allowed[self.number] = True
        return allowed


class Members(Turns):
    """The same with an observation in two members."""

    observation_space = gym.spaces.Dict(
        {"first": gym.spaces.Box(-1, 1, (1,), np.float32), "rest": gym.spaces.Box(-1, 1, (2,), np.float32)}
    )

    def seen(self) -> Any:
        found = super().seen()
        return {"first": found[:1], "rest": found[1:]}


def weights(model: Any) -> dict[str, Any]:
    return {name: x.clone() for name, x in model.policy.state_dict().items()}


def trained(kind: Any, env: Any, seed: int, batch_size: int = 32, **options: Any) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(seed)
    policy = {Turns: "MlpPolicy", Members: "MultiInputPolicy"}[env]
    if kind is not contrib.MaskablePPO:
        policy = policy.replace("Policy", "LstmPolicy")
    options |= {"policy_kwargs": {"net_arch": [16]} | ({} if kind is contrib.MaskablePPO else {"lstm_hidden_size": 8})}
    model = kind(
        policy, vec_env.DummyVecEnv([env] * 4), n_steps=16, batch_size=batch_size, n_epochs=3, seed=seed, device="cpu",
        **options,
    )  # fmt: skip
    before = weights(model)
    model.learn(64 * 4)
    after = weights(model)
    assert any(not torch.allclose(before[name], x, atol=1e-3) for name, x in after.items())
    return after, model


@pytest.mark.parametrize("batch_size", [64, 20, 24])
@pytest.mark.parametrize("env", [Turns, Members])
def test_recurrent_ppo_learns_the_same_weights(env: Any, batch_size: int, seed: int) -> None:
    """Its buffer draws one number for each pass, and so does ours: minibatches of any size are the same."""
    host, its = trained(contrib.RecurrentPPO, env, seed, batch_size)
    mine, own = trained(ours.RecurrentPPO, env, seed, batch_size)
    name = "RecurrentDictRolloutBuffer" if env is Members else "RecurrentRolloutBuffer"
    assert type(own.rollout_buffer) is getattr(ours, name)
    assert isinstance(own.rollout_buffer, type(its.rollout_buffer))
    for key, value in host.items():
        torch.testing.assert_close(mine[key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("env", [Turns, Members])
def test_maskable_ppo_by_whole_rollouts_learns_the_same_weights(env: Any, seed: int) -> None:
    """Then the order within a batch does not matter, which each draws in its own way."""
    name = "MaskableDictRolloutBuffer" if env is Members else "MaskableRolloutBuffer"
    found: list[dict[str, Any]] = []
    for source in (masking, ours):
        after, model = trained(contrib.MaskablePPO, env, seed, 64, rollout_buffer_class=getattr(source, name))
        assert type(model.rollout_buffer) is getattr(source, name)
        assert not model.rollout_buffer.action_masks.all()
        found.append(after)
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("env", [Turns, Members])
def test_maskable_ppo_learns_by_minibatches(env: Any, seed: int) -> None:
    name = "MaskableDictRolloutBuffer" if env is Members else "MaskableRolloutBuffer"
    kwargs = {"rollout_buffer_class": getattr(ours, name), "rollout_buffer_kwargs": {"seed": seed}}
    one, two = (trained(contrib.MaskablePPO, env, seed, **kwargs)[0] for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_saved_model_loads_with_our_buffer(seed: int, tmp_path: Any) -> None:
    _, model = trained(ours.RecurrentPPO, Turns, seed)
    model.save(tmp_path / "model")
    loaded = ours.RecurrentPPO.load(tmp_path / "model", vec_env.DummyVecEnv([Turns] * 4))
    assert type(loaded.rollout_buffer) is ours.RecurrentRolloutBuffer
    loaded.learn(64)


def test_every_block_of_the_page_runs(seed: int) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "migration" / "sb3_contrib.md"
    names: dict[str, Any] = {}
    code = [block.code for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]
    for part in code if seed == 0 else []:
        exec(part, names)
    assert len(code) == 2
