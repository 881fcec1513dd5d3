"""Steps as PyTorchRL's collector passes them, and what becomes of them; for tests with the host and without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from relive.compat.pytorchrl import ACT, DONE, DONE2, OBS, OBS2, REW, RHS, RHS2

__all__ = [
    "GAMMA", "NAMES", "STEP", "assert_same", "check_hindsight", "check_windows", "errors_of", "fed", "hindsight_truth",
    "parts", "play", "reached", "rows", "truth",
]  # fmt: skip

NAMES = {"replay": "ReplayBuffer", "nstep": "NStepReplayBuffer", "per": "PERBuffer", "ere": "EREBuffer"}
STEP = (OBS, DONE, ACT, REW, OBS2, DONE2)
GAMMA = 0.9


def parts(recurrent: bool = False, overlap: float = 0.0, length: int = 4, gamma: float = GAMMA) -> tuple[Any, ...]:
    """What a factory's function is called with."""
    algorithm = SimpleNamespace(gamma=gamma, update_every=length, _update_every=length)
    return "cpu", SimpleNamespace(is_recurrent=recurrent, sequence_overlap=overlap), algorithm, None


def play(steps: int, num_envs: int, seed: int = 0, nested: bool = False, end: float = 0.2) -> list[dict[str, Any]]:
    """Transitions as the collector passes them: the env resets itself, and ``Done`` is the flag of the step before."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Any:
        return torch.randn(num_envs, *shape, generator=generator)

    def observed() -> Any:
        return {"a": drawn(3), "b": drawn(2, 2)} if nested else drawn(3)

    obs, state, done, found = observed(), drawn(5), torch.ones(num_envs, 1), []
    for _ in range(steps):
        obs2, state2 = observed(), drawn(5)
        done2 = (torch.rand(num_envs, 1, generator=generator) < end).float()
        found.append(
            {
                OBS: obs, RHS: {"rhs_act": state}, DONE: done, ACT: drawn(2), REW: drawn(1), OBS2: obs2,
                RHS2: {"rhs_act": state2}, DONE2: done2, "EnvironmentInformation": [],
            }
        )  # fmt: skip
        obs, state, done = obs2, state2, done2
    return found


def fed(buffer: Any, steps: list[dict[str, Any]]) -> Any:
    """The buffer, once it has these steps."""
    for step in steps:
        buffer.insert_transition(dict(step))
    return buffer


def assert_same(one: Any, other: Any) -> None:
    """Two dictionaries of arrays or tensors have the same keys, types, dtypes, shapes and numbers."""
    assert type(one) is type(other)
    if isinstance(other, dict):
        assert set(one) == set(other)
        for key in other:
            assert_same(one[key], other[key])
    elif other is not None:
        assert (one.dtype, tuple(one.shape)) == (other.dtype, tuple(other.shape))
        np.testing.assert_array_equal(one, other)


def rows(batch: dict[str, Any], per: int = 1) -> list[bytes]:
    """Each row of a batch, or each ``per`` of them, as bytes."""
    leaves: list[Any] = []
    for key in STEP:
        leaves += list(batch[key].values()) if isinstance(batch[key], dict) else [batch[key]]
    arrays = [np.asarray(leaf).reshape(len(leaf) // per, -1) for leaf in leaves]
    return [b"|".join(array[i].tobytes() for array in arrays) for i in range(len(arrays[0]))]


def truth(steps: list[dict[str, Any]], env: int, t: int, n: int) -> tuple[float, float, Any, int]:
    """Reward, terminal, next observation and length of a window."""
    reward, k = 0.0, 0
    while True:
        reward += GAMMA**k * float(steps[t + k][REW][env])
        k += 1
        if steps[t + k - 1][DONE2][env] or k == n or t + k == len(steps):
            return reward, float(steps[t + k - 1][DONE2][env]), steps[t + k - 1][OBS2][env], k


def check_windows(batch: dict[str, Any], plays: list[list[dict[str, Any]]], n: int) -> None:
    """All steps of these plays are in the batch, each with a window that ends with its play at the latest."""
    at = {
        step[OBS][env].numpy().tobytes(): (steps, env, t)
        for steps in plays
        for t, step in enumerate(steps)
        for env in range(len(step[OBS]))
    }
    seen = set()
    for i, row in enumerate(batch[OBS]):
        key = row.numpy().tobytes()
        steps, env, t = at[key]
        reward, terminal, obs2, k = truth(steps, env, t, n)
        assert batch[REW][i].item() == pytest.approx(reward, abs=1e-5)
        assert (batch[DONE2][i].item(), batch["n_step"][i].item()) == (terminal, k)
        assert torch.equal(batch[OBS2][i], obs2)
        assert batch[DONE][i].item() == steps[t][DONE][env].item()
        seen.add(key)
    assert seen == set(at)


def errors_of(batch: dict[str, Any], special: Any, large: float = 100.0) -> Any:
    """TD errors of a batch: 1, but for the step with that observation."""
    return torch.where((batch[OBS] == special).all(1, keepdim=True), large, 1.0)


def reached(obs: Any, rhs: Any, obs2: Any, rhs2: Any, rew: Any, initial_state: Any, final_state: Any) -> Any:
    """The goal, which is the last number of an observation, becomes the first number of the final one."""
    for seen in (obs, obs2):
        seen[:, 2] = final_state[:, 0]
    return obs, rhs, obs2, rhs2, (obs2[:, :1] == final_state[:, :1]).astype(np.float32)


def hindsight_truth(steps: list[dict[str, Any]], n: int) -> dict[bytes, tuple[float, float]]:
    """Reward and terminal of each observation that a buffer has, as it was or relabelled."""
    want: dict[bytes, tuple[float, float]] = {}
    for env in range(len(steps[0][DONE])):
        begin = 0
        for t in range(len(steps)):
            window = truth(steps, env, t, n)
            want[steps[t][OBS][env].numpy().tobytes()] = window[0], window[1]
            if not steps[t][DONE2][env]:
                continue
            goal = steps[t][OBS][env, 0]
            for at in range(begin, t):
                obs = steps[at][OBS][env].clone()
                obs[2] = goal
                k = t - 1 - at
                want[obs.numpy().tobytes()] = (GAMMA**k if k < n else 0.0), 0.0
            begin = t + 1
    return want


def check_hindsight(buffer: Any, want: dict[bytes, tuple[float, float]]) -> None:
    """A large batch has each of these observations, and no other, with its reward and terminal."""
    (batch,) = buffer.generate_batches(1, 8000)
    assert {row.numpy().tobytes() for row in batch[OBS]} == set(want)
    for row, reward, done in zip(batch[OBS], batch[REW], batch[DONE2], strict=True):
        expected = want[row.numpy().tobytes()]
        assert reward.item() == pytest.approx(expected[0], abs=1e-5)
        assert done.item() == expected[1]
