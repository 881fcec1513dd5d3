"""What a host hands to a drop-in, or gets from it, may be overwritten afterwards, but for what the host shares, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from compat import stable_baselines3_stand_in as stand_in
from compat.pytorchrl_play import parts, play
from relive.compat import agilerl, embodichain, fasttd3, pytorchrl, rsl_rl, velora
from relive.compat.embodichain import transition_view
from support import agilerl_buffers
from support.overwrites import Hands, play_twice

pytestmark = pytest.mark.usefixtures("no_hosts")

BOX = spaces.Box(-9, 9, (2,), np.float32)
T, N = 6, 3


def play_agilerl(hands: Hands, keep: bool = False) -> None:
    buffer = agilerl.RolloutBuffer(T, BOX, spaces.Discrete(3), N, seed=0)
    for step in agilerl_buffers.steps(T, N):
        buffer.add(**hands.hold(step))
        hands.spoil()
    buffer.compute_returns_and_advantages(hands.hold(np.ones(N, np.float32)), hands.hold(np.zeros(N, np.bool_)))
    hands.spoil()
    for read in (buffer.get, lambda: buffer.get(5), buffer.get_tensor_batch, lambda: buffer.get_tensor_batch(5)):
        for _ in range(2):
            hands.take("batch", read())
            hands.spoil()
    if keep:
        hands.take("shared", buffer.get_tensor_batch(copy=False))
        hands.spoil()
        hands.take("batch", buffer.get())


def play_embodichain(hands: Hands, keep: bool = False) -> None:
    buffer = embodichain.RolloutBuffer(N, T, 3, 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        rollout = buffer.start_rollout()  # shared: the host writes to it in place
        for name, x in rollout.items():
            rollout[name].copy_(torch.rand(x.shape, generator=generator).to(x.dtype))
        buffer.add(rollout)
        if keep:
            hands.spoil(transition_view(rollout))
        hands.take("batch", buffer.get())
        hands.spoil()


def play_fasttd3(hands: Hands, keep: bool = False) -> None:
    buffer = fasttd3.SimpleReplayBuffer(N, 8, 3, 2, 3, n_steps=2, gamma=0.5, seed=0)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(N, *shape, generator=generator)

    for _ in range(12):
        after = {"observations": drawn(3), "rewards": drawn(), "dones": (drawn() < 0.2).long(),
                 "truncations": (drawn() < 0.2).long()}  # fmt: skip
        step = {"observations": drawn(3), "actions": drawn(2), "next": after}
        buffer.extend(hands.hold(TensorDict(step, [N])))
        hands.spoil()
    for _ in range(3):
        hands.take("batch", buffer.sample(4))
        hands.spoil()


def play_pytorchrl(hands: Hands, name: str = "PERBuffer", keep: bool = False) -> None:
    torch.manual_seed(0)  # as no seed is given
    np.random.seed(0)  # noqa: NPY002 - what the host seeds
    factory = getattr(pytorchrl, name).create_factory(40)
    buffer = factory(*parts())
    for step in play(20, N):
        buffer.insert_transition(dict(hands.hold(copy.deepcopy(step))))
        hands.spoil()
    for _ in range(2):
        for batch in buffer.generate_batches(3, 4):
            hands.take("batch", dict(batch))
            hands.spoil()


def play_velora(hands: Hands, keep: bool = False) -> None:
    buffer = velora.ReplayBuffer(20, 3, 2, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        buffer.add_multi(*(hands.hold(torch.rand(7, size, generator=generator)) for size in (3, 2, 1, 3, 1, 4)))
        hands.spoil()
    hands.take("state_dict", {name: x.clone() for name, x in buffer.state_dict().items()})
    torch.manual_seed(0)
    for _ in range(3):
        hands.take("batch", tuple(vars(buffer.sample(4)).values()))
        hands.spoil()


def play_rsl_rl(hands: Hands, keep: bool = False) -> None:
    def observed(t: int) -> TensorDict:
        return TensorDict({"policy": torch.arange(3.0 * N).view(N, 3) + t}, [N])

    storage = rsl_rl.RolloutStorage("rl", N, T, observed(0), (2,), seed=0)
    for t in range(T):
        made = rsl_rl.RolloutStorage.Transition()
        made.observations, made.actions = observed(t), torch.rand(N, 2, generator=torch.Generator().manual_seed(t))
        made.rewards, made.values = torch.arange(float(N)) + t, torch.ones(N, 1) * t
        made.actions_log_prob, made.dones = torch.ones(N), torch.arange(N) == t
        made.distribution_params = (made.actions + 4, made.actions + 5)
        made.hidden_states = (None, None)
        storage.add_transition(made)
        hands.spoil(vars(made))
    storage.compute_returns(hands.hold(torch.ones(N, 1)), 0.9, 0.8)
    hands.spoil()
    for _ in range(2):
        for batch in storage.mini_batch_generator(2, 2):
            hands.take("batch", vars(batch))
            hands.spoil()
    if keep:
        hands.spoil(storage.column("reward"))
        hands.note("batch", storage.rewards)


def play_stable_baselines3(ours: Any, hands: Hands, name: str) -> None:
    on_policy = name == "RolloutBuffer"
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - what the host seeds
    buffer = getattr(ours, name)(T if on_policy else 60, BOX, BOX, device="cpu", n_envs=N)
    for t in range(T):
        rng = np.random.default_rng(t)
        obs, after, action = rng.normal(size=(3, N, 2)).astype(np.float32)
        reward, done = rng.normal(size=N).astype(np.float32), rng.random(N) < 0.2
        if on_policy:
            step = (obs, action, reward, done, torch.as_tensor(reward + 1), torch.as_tensor(reward - 1))
        else:
            step = (obs, after, action, reward, done, [{} for _ in range(N)])
        buffer.add(*hands.hold(step))
        hands.spoil()
    if on_policy:
        buffer.compute_returns_and_advantage(hands.hold(torch.ones(N)), hands.hold(np.zeros(N, np.bool_)))
        hands.spoil()
    for _ in range(2):
        for batch in buffer.get(5) if on_policy else [buffer.sample(4)]:
            hands.take("batch", tuple(x for x in batch if x is not None))
            hands.spoil()


@pytest.mark.parametrize("name", ["ReplayBuffer", "NStepReplayBuffer", "PrioritizedReplayBuffer", "RolloutBuffer"])
def test_what_stable_baselines3_holds_is_its_own_to_overwrite(name: str) -> None:
    with stand_in.installed() as ours:
        play_twice(lambda hands: play_stable_baselines3(ours, hands, name))


PLAYS: dict[str, Callable[..., None]] = {
    "AgileRL": play_agilerl,
    "EmbodiChain": play_embodichain,
    "FastTD3": play_fasttd3,
    "PyTorchRL": play_pytorchrl,
    "PyTorchRL, uniform": lambda hands: play_pytorchrl(hands, "ReplayBuffer"),
    "PyTorchRL, n steps": lambda hands: play_pytorchrl(hands, "NStepReplayBuffer"),
    "Velora": play_velora,
    "rsl_rl": play_rsl_rl,
}

SHARED = {
    "AgileRL": "get_tensor_batch(copy=False)",
    "EmbodiChain": "transition_view(rollout)",
    "rsl_rl": "column(name)",
}
"""Host -> a call whose result is the storage, as it is with the host's own class."""


@pytest.mark.parametrize("host", PLAYS)
def test_what_a_host_holds_is_its_own_to_overwrite(host: str) -> None:
    play_twice(PLAYS[host])


@pytest.mark.parametrize("host", SHARED)
def test_what_a_drop_in_shares_is_found_by_the_same_play(host: str) -> None:
    with pytest.raises(AssertionError, match="has changed"):
        play_twice(lambda hands: PLAYS[host](hands, keep=True))
