"""Rollouts on a device: the same numbers as in RAM, few launches, and no waiting but where the answer decides.

The device is a stand-in (:mod:`elsewhere`) whose tensors refuse to meet those of the CPU, and CUDA where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import relive
from elsewhere import ELSEWHERE, far_device
from relive import GAE, RolloutBuffer, errors, returns

T, N = 6, 4
PLACES = ["stand-in", *(["cuda"] if torch.cuda.is_available() else [])]
ESTIMATORS = [
    GAE(0.9, 0.8),
    GAE(0.9, 0.8, normalize=True),
    returns.TDLambda(0.9, 0.8),
    returns.MonteCarlo(0.9),
    returns.MonteCarlo(0.9, critic=False),
    returns.VTrace(0.9, 0.8),
    returns.GroupAdvantage(2),
]
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
"""Operations that wait for their result."""
VIEWS = (
    "view", "select", "slice", "detach", "alias", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand",
    "as_strided", "_unsafe_view", "unflatten", "split", "unbind", "empty", "_to_copy", "narrow", "split_with_sizes",
    "view_as_real", "_reshape_alias", "unfold",
)  # fmt: skip
"""Operations that launch nothing; copies are counted apart."""


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "stand-in":
        with far_device():
            yield ELSEWHERE
    else:
        yield torch.empty(0, device=request.param).device


class Work(TorchDispatchMode):
    """Counts what a device is asked to do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.launches, self.waits = device, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not any(x.device == self.device for x in (*given, *made)):
            return result
        back = name in ("_to_copy", "copy_") and any(x.device == self.device for x in given) and made[0].is_cpu
        if back or name in WAITS or (name == "index" and any(x.dtype is torch.bool for x in given[1:])):
            self.waits[name] += 1
        elif name not in VIEWS:
            self.launches[name] += 1
        return result


def steps(seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Steps with terminals, truncations and steps that are not real."""
    rng = np.random.default_rng(seed)
    for _ in range(T):
        draw = rng.random(N)
        yield {
            **{name: rng.standard_normal(N).astype(np.float32) for name in ("reward", "value", "log_prob")},
            "obs": rng.standard_normal((N, 3)).astype(np.float32),
            "hidden": rng.standard_normal((N, 1, 5)).astype(np.float32),
            "terminated": draw < 0.15,
            "truncated": draw > 0.85,
            "final_value": rng.standard_normal(N).astype(np.float32),
            "mask": rng.random(N) > 0.1,
        }


def empty(device: torch.device | str, **options: Any) -> RolloutBuffer:
    flag = relive.Field((), torch.bool)
    schema = relive.Schema({
        "obs": (3,), "reward": (), "terminated": flag, "truncated": flag, "value": (), "log_prob": (), "hidden": (1, 5),
    })  # fmt: skip
    return RolloutBuffer(schema, T, N, device=device, seed=3, **options)


def filled(device: torch.device | str, real: bool = False) -> RolloutBuffer:
    """The same rollout on any device."""
    rollout = empty(device)
    for step in steps():
        if real:
            del step["mask"]
        rollout.add({name: torch.from_numpy(array).to(device) for name, array in step.items()})
    rollout.set_last(value=torch.ones(N).to(device))
    rollout["target_log_prob"] = rollout["log_prob"] * 0.5
    return rollout


def assert_same(ours: Any, theirs: Any) -> None:
    """Nested batches with the same numbers."""
    assert ours.keys() == theirs.keys()
    for name in ours.keys():
        if hasattr(ours[name], "keys"):
            assert_same(ours[name], theirs[name])
        else:
            torch.testing.assert_close(theirs[name].cpu(), ours[name], equal_nan=True, rtol=1e-5, atol=1e-6)


def counted(device: torch.device, act: Callable[[], Any]) -> tuple[Any, Work]:
    """What a call returns, and what the device had to do for it."""
    with Work(device) as work:
        return act(), work


@pytest.mark.parametrize("real", [True, False])
def test_a_rollout_on_a_device_holds_the_same(device: torch.device, real: bool) -> None:
    assert_same(filled("cpu", real).data(), filled(device, real).data())


def test_adding_a_step_copies_each_field_once_and_waits_for_nothing(device: torch.device) -> None:
    rollout = empty(device)
    for step in steps():
        given = {name: torch.from_numpy(array).to(device) for name, array in step.items()}
        _, work = counted(device, lambda given=given: rollout.add(given))
        assert not work.waits
        assert sum(work.launches.values()) <= len(given), work.launches


def test_writing_in_place_waits_for_nothing(device: torch.device) -> None:
    rollout = empty(device)

    def play() -> None:
        rows = rollout.reserve()
        for name in rows.keys():
            rows[name].fill_(1)
        rollout.commit(last=True)

    _, work = counted(device, play)
    assert not work.waits
    assert rollout.is_full


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize("real", [True, False])
def test_an_estimator_gives_the_same_and_waits_once(device: torch.device, estimator: Any, real: bool) -> None:
    ours, theirs = filled("cpu", real).finish(estimator), filled(device, real)
    _, work = counted(device, lambda: theirs.finish(estimator))
    assert_same(ours.data(), theirs.data())
    once = getattr(estimator, "critic", True) and not isinstance(estimator, returns.GroupAdvantage)
    assert sum(work.waits.values()) == once, work.waits  # for missing final values, which only a critic needs


def test_a_missing_final_value_is_found_on_a_device(device: torch.device) -> None:
    rollout = empty(device)
    for step in steps():
        rollout.add({**{name: x for name, x in step.items() if name != "final_value"}, "truncated": np.ones(N, bool)})
    rollout.set_last(value=np.zeros(N, np.float32))
    with pytest.raises(errors.FieldError, match="was truncated"):
        rollout.finish(GAE())


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("epochs", [1, 2])
def test_minibatches_wait_once_a_call_and_not_for_each_batch(device: torch.device, real: bool, epochs: int) -> None:
    ours, theirs = filled("cpu", real).finish(GAE()), filled(device, real).finish(GAE())
    options: dict[str, Any] = {"num_batches": 3, "epochs": epochs, "normalize_advantage": True}
    batches, work = counted(device, lambda: list(theirs.minibatches(**options)))
    for one, other in zip(ours.minibatches(**options), batches, strict=True):
        assert_same(one, other)
    assert sum(work.waits.values()) == (1 if real else 2), work.waits  # is any step not real, and which are


def test_a_minibatch_of_packed_fields_is_one_gather(device: torch.device) -> None:
    rollout = filled(device, real=True).finish(GAE())
    batches = rollout.minibatches(num_batches=3, epochs=2)
    next(batches)  # packs the fields, and draws a permutation
    _, work = counted(device, lambda: next(batches))
    assert work.launches == {"index_select": 1}


@pytest.mark.parametrize("length", [None, 2])
def test_sequences_wait_only_to_cut_episodes(device: torch.device, length: int | None) -> None:
    ours, theirs = filled("cpu").finish(GAE()), filled(device).finish(GAE())
    options: dict[str, Any] = {"num_batches": 2, "epochs": 2}
    batches, work = counted(device, lambda: list(theirs.sequences(length, **options)))
    for one, other in zip(ours.sequences(length, **options), batches, strict=True):
        assert_same(one, other)
    assert sum(work.waits.values()) == 1, work.waits


def test_batches_of_envs_wait_only_to_cut_episodes(device: torch.device) -> None:
    ours, theirs = filled("cpu").finish(GAE()), filled(device).finish(GAE())
    batches, work = counted(device, lambda: list(theirs.env_batches(num_batches=2, epochs=2)))
    for one, other in zip(ours.env_batches(num_batches=2, epochs=2), batches, strict=True):
        assert_same(one.steps, other.steps)
        assert_same(one.sequences, other.sequences)
    assert sum(work.waits.values()) == 1, work.waits


def test_chunks_are_the_same(device: torch.device) -> None:
    ours, theirs = filled("cpu").finish(GAE()), filled(device).finish(GAE())
    for one, other in zip(ours.chunks(4), theirs.chunks(4), strict=True):
        assert_same(one, other)


def test_other_calls_wait_as_often_as_their_page_says(device: torch.device) -> None:
    unvalued = empty(device)
    for step in steps():
        unvalued.add({**step, "terminated": np.ones(N, bool), "truncated": np.zeros(N, bool), "mask": np.ones(N, bool)})
    rollout = filled(device, real=True).finish(GAE())
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "finish": (lambda: unvalued.finish(GAE()), 3),
        "flat": (rollout.flat, 1),
        "sample": (lambda: rollout.sample(2), 1),
        "chunks": (lambda: list(rollout.chunks(2)), 1),
        "clear": (rollout.clear, 1),
    }
    for name, (call, waits) in calls.items():
        _, work = counted(device, call)
        assert sum(work.waits.values()) == waits, (name, work.waits)
