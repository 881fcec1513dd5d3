"""EmbodiChain's own trainer on its own rollouts and on ours: what is learned on the one is on the other.

Its simulator is on no index, so the manager of the simulator's events, which the trainer imports, is a stand-in.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import relive.compat.embodichain as ours
from hosts.libraries import HOSTS

HOSTS["embodichain"].prepare()

algo: Any = import_module("embodichain.learning.rl.algo")
common: Any = import_module("embodichain.learning.rl.algo.common")
ppo: Any = import_module("embodichain.learning.rl.algo.ppo")
grpo: Any = import_module("embodichain.learning.rl.algo.grpo")
theirs: Any = import_module("embodichain.learning.rl.buffer")
policies: Any = import_module("embodichain.learning.rl.policies")
trainer: Any = import_module("embodichain.learning.rl.utils.trainer")

CPU = torch.device("cpu")
N, T, LIMIT, GAMMA = 32, 16, 5, 0.5


class Task:
    """Say the number that is shown. Every fifth step meets a time limit, and the critic also sees how far it is.

    It writes into the rollout what the env knows, as EmbodiChain's own environments do. The critic's value of the
    observation that an episode ended on is among that, where the rollout has a place for it.
    """

    num_envs = N

    def __init__(self, agent: Any) -> None:
        self.agent, self.generator = agent, torch.Generator().manual_seed(0)
        self.time, self.shown = 0, torch.zeros(N, 1)

    def set_rollout_buffer(self, rollout: TensorDict) -> None:
        self.rollout, self.row = rollout, 0

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return self.next(), {}

    def next(self) -> TensorDict:
        cues = torch.rand(N // 4, generator=self.generator).repeat_interleave(4)  # one for each of GRPO's groups
        self.shown = cues[:, None] * 2 - 1
        return self.seen()

    def seen(self) -> TensorDict:
        return TensorDict({"cue": self.shown, "time": torch.full((N, 1), self.time / LIMIT)}, [N])

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        reward = -(action - self.shown).square().sum(1)
        self.time += 1
        cut, never = torch.full((N,), self.time == LIMIT), torch.zeros(N, dtype=torch.bool)
        obs = self.next()
        flags = {"reward": reward, "done": cut, "terminated": never, "truncated": cut}
        if "final_value" in self.rollout.keys():
            flags["final_value"] = self.agent._value(torch.cat([obs["cue"], obs["time"]], 1))
        for name, value in flags.items():
            self.rollout[name][:, self.row] = value
        self.row += 1
        return self.reset()[0] if bool(cut[0]) else obs, reward, never, cut, {}


def policy() -> Any:
    torch.manual_seed(0)
    actor, critic = (nn.Sequential(nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, 1)) for size in (1, 2))
    groups = {"actor_obs_groups": ("cue",), "critic_obs_groups": ("cue", "time")}
    return policies.ActorCritic(1, 1, CPU, actor, critic, critic_obs_dim=2, **groups)


def trained(name: str, kind: Any, updates: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Any, Any]:
    """A trainer after so many updates with a class of rollouts, and the last of them."""
    monkeypatch.setattr(trainer, "RolloutBuffer", kind)
    options: dict[str, Any] = {"batch_size": 128, "gamma": GAMMA, "n_epochs": 5}
    options["optimizer"] = {"name": "adam", "learning_rate": 5e-3, "kwargs": {}}
    if name == "ppo":  # reads what the policy was when it acted
        options |= {"schedule": "adaptive", "desired_kl": 0.02}
    agent = policy()
    made = trainer.Trainer(
        agent, Task(agent), algo.build_algo(name, options, agent, CPU), T, 128, None, 0, 0, str(folder), "test",
        use_wandb=False,
    )  # fmt: skip
    assert type(made.buffer) is kind
    torch.manual_seed(1)
    made.train(updates * N * T)
    return made, made.buffer.buffer


def weights(made: Any) -> Tensor:
    return torch.cat([x.detach().flatten() for x in made.policy.parameters()])


def mean_of_last(made: Any) -> float:
    return made.train_history[-1]["charts/episode_reward_avg_100"] / LIMIT


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_trainer_does_to_the_bit_on_our_rollouts_what_it_does_on_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also at its time limits: it reads the value before them, and never the final values that are there."""
    (one, its), (other, mine) = (
        trained(name, module.RolloutBuffer, 6, monkeypatch, tmp_path) for module in (theirs, ours)
    )
    assert torch.equal(weights(one), weights(other))
    assert bool(its["truncated"].any())
    for field in its.keys():
        assert torch.equal(its[field], mine[field]), field
    assert bool(mine["final_value"][:, :-1].isfinite().all())


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_trainer_learns_on_our_rollouts_with_our_functions_as_well_as_with_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, its = (
        mean_of_last(trained(name, theirs.RolloutBuffer, count, monkeypatch, tmp_path)[0]) for count in (1, 40)
    )
    for module in (ppo, grpo):
        for function in ("transition_view", "iterate_minibatches", "compute_gae"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, getattr(ours, function))
    mine = mean_of_last(trained(name, ours.RolloutBuffer, 40, monkeypatch, tmp_path)[0])
    print(f"{name}: {first:.3f} at first, {its:.3f} its own, {mine:.3f} all ours")
    assert its > first / 2
    assert mine > its - 0.1


def test_its_bootstrap_at_time_limits_and_ours_do_not_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is added to the reward once, in a copy: neither finds what the other one did, in whichever order."""
    _, rollout = trained("ppo", ours.RolloutBuffer, 2, monkeypatch, tmp_path)
    cut = rollout["truncated"][:, :-1]
    reward, value = rollout["reward"].clone(), rollout["value"][:, :-1]
    calls = {
        "theirs": (lambda: common.compute_gae(rollout, GAMMA, 0.0), value),
        "ours": (lambda: ours.compute_gae(rollout, GAMMA, 0.0), rollout["final_value"][:, :-1]),
        "own_value": (lambda: ours.compute_gae(rollout, GAMMA, 0.0, truncation="own_value"), value),
    }
    assert not torch.allclose(value[cut], rollout["final_value"][:, :-1][cut])
    for order in (list(calls), list(calls)[::-1]):
        for name in order:
            call, worth = calls[name]
            returns = call()[1]
            torch.testing.assert_close(returns[cut], (reward[:, :-1] + GAMMA * worth)[cut], msg=name)
            assert torch.equal(rollout["reward"], reward)
    first, second = (calls[name][0]() for name in ("theirs", "own_value"))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
