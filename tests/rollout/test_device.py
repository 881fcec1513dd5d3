"""Rollouts on a device: the same numbers as in RAM, few launches, and no waiting but where the answer is a shape.

The device is a stand-in (:mod:`support.other_device`) whose tensors refuse to meet those of the CPU, and CUDA
where there is one.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import relive
from relive import GAE, RolloutBuffer, errors, returns
from support.other_device import no_waiting, place

PRIVATE: Any = torch  # no public name writes to a tensor without counting it
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
MOST_LAUNCHES = {
    GAE: 24, returns.TDLambda: 26, returns.MonteCarlo: 30, returns.VTrace: 48, returns.GroupAdvantage: 60,
}  # fmt: skip
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
    with place(request.param) as chosen:
        yield chosen


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


@pytest.mark.parametrize("counts", [True, False])
def test_what_a_row_held_before_never_matters(device: torch.device, counts: bool) -> None:
    """Even if torch does not count a write to final values, as it counts none of a graph's."""
    rollout, (first, *rest) = empty(device, wrap=True), steps()
    for name in ("mask", "final_value"):
        del first[name]
    plain = {name: torch.from_numpy(array).to(device) for name, array in first.items()}
    for step in (first, *rest):
        rollout.add({name: torch.from_numpy(array).to(device) for name, array in step.items()})
    for _ in range(T):
        rollout.add(plain)
    assert rollout["mask"].cpu().all()
    assert rollout["final_value"].cpu().isnan().all()
    rollout.clear()
    final = rollout.reserve(1)["final_value"]
    with contextlib.nullcontext() if counts else PRIVATE.autograd._unsafe_preserve_version_counter(final):
        final.fill_(7)
    rollout.add(plain)  # the row that was reserved is given back
    assert rollout["final_value"].cpu().isnan().all()


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
def test_an_estimator_gives_the_same_and_waits_for_nothing(device: torch.device, estimator: Any, real: bool) -> None:
    ours, theirs = filled("cpu", real).finish(estimator), filled(device, real)
    with no_waiting() as watch:
        theirs.finish(estimator)
    assert_same(ours.data(), theirs.data())
    assert len(watch.launches) <= MOST_LAUNCHES[type(estimator)] + 24 * getattr(estimator, "normalize", False)


def test_a_missing_final_value_is_not_a_number_on_a_device_and_refused_in_debug_mode(device: torch.device) -> None:
    rollout = empty(device)
    for t, step in enumerate(steps()):
        del step["final_value"], step["mask"]
        flags = {"terminated": np.zeros(N, bool), "truncated": np.array([t == 3, False, False, False])}
        rollout.add({**step, **flags})
    rollout.set_last(value=np.zeros(N, np.float32))
    for estimator in (GAE(), returns.TDLambda(), returns.MonteCarlo()):
        rollout.finish(estimator)
        wrong = rollout["advantage"].isnan().cpu()
        assert wrong[:4, 0].all()
        assert wrong.sum() == 4
    rollout.debug = True
    with pytest.raises(errors.FieldError, match="step 3 of env 0 was truncated"):
        rollout.finish(GAE())


@pytest.mark.parametrize("steps", [1, 2, 3, 24, 100])
def test_launches_of_gae_grow_with_the_bits_of_the_number_of_steps(device: torch.device, steps: int) -> None:
    x, no = torch.zeros(steps, N).to(device), torch.zeros(steps, N, dtype=torch.bool).to(device)
    value, done = torch.zeros(steps + 1, N).to(device), no.clone()
    with no_waiting() as watch:
        returns.gae(x, value, done, no, final_value=x, mask=no)
    assert len(watch.launches) <= 10 + 3 * (steps - 1).bit_length()


def test_an_iteration_of_training_waits_for_nothing(device: torch.device) -> None:
    given = [{name: torch.from_numpy(x).to(device) for name, x in step.items() if name != "mask"} for step in steps()]
    ours, theirs = empty("cpu"), empty(device)
    for _ in range(2):
        for step in given:
            ours.add({name: x.cpu() for name, x in step.items()})
        ours.set_last(value=torch.ones(N))
        expected = list(ours.finish(GAE()).minibatches(5, epochs=2, normalize_advantage=True))
        with no_waiting():
            for step in given:
                theirs.add(step)
            theirs.set_last(value=torch.ones(N, device=device))
            batches = list(theirs.finish(GAE()).minibatches(5, epochs=2, normalize_advantage=True))
            theirs.clear()
        ours.clear()
        for one, other in zip(expected, batches, strict=True):
            assert_same(one, other)
    starts = [next(rollout.add(step) or rollout.chunks())["is_start"].cpu() for rollout in (ours, theirs)
              for step in [{name: x.to(rollout.device) for name, x in given[0].items()}]]  # fmt: skip
    assert torch.equal(*starts)  # clear knows where episodes ended


@pytest.mark.parametrize(
    "copied", [deepcopy, lambda rollout: pickle.loads(pickle.dumps(rollout))], ids=["copy", "pickle"]
)
def test_a_copy_knows_where_episodes_ended_and_which_steps_are_real(
    device: torch.device, copied: Callable[[RolloutBuffer], RolloutBuffer]
) -> None:
    rollout = filled(device)
    rollout.clear()
    again = copied(rollout)
    step = {name: torch.from_numpy(array).to(device) for name, array in next(steps(1)).items()}
    ours, theirs = (next((x.add(step), x.chunks())[1])["is_start"].cpu() for x in (rollout, again))
    assert torch.equal(ours, theirs)
    again["mask"][0, 1] = False
    assert len(again) == int(again["mask"].cpu().sum()) < N


@pytest.mark.parametrize("how", ["column", "view", "data", "reserved", "attached"])
def test_a_mask_that_is_written_anyhow_is_heeded(device: torch.device, how: str) -> None:
    rollout = filled(device, real=True)
    if how == "column":
        rollout["mask"] = rollout["mask"] & (rollout["reward"] > 0)
    elif how == "view":
        rollout["mask"].copy_(rollout["reward"] > 0)
    elif how == "data":
        rollout.data()["mask"][2] = False
    elif how == "reserved":
        rollout.clear()
        rows = rollout.reserve()
        rows["mask"][1] = False
        rollout.commit(last=True)
    else:
        rollout.finish(returns.GroupAdvantage(2))
    real = int(rollout["mask"].cpu().sum())
    assert 0 < real < T * N
    assert len(rollout) == real == sum(len(batch["reward"]) for batch in rollout.minibatches(5))


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("epochs", [1, 2])
def test_minibatches_wait_only_to_count_real_steps(device: torch.device, real: bool, epochs: int) -> None:
    ours, theirs = filled("cpu", real).finish(GAE()), filled(device, real).finish(GAE())
    options: dict[str, Any] = {"num_batches": 3, "epochs": epochs, "normalize_advantage": True}
    batches, work = counted(device, lambda: list(theirs.minibatches(**options)))
    for one, other in zip(ours.minibatches(**options), batches, strict=True):
        assert_same(one, other)
    assert sum(work.waits.values()) == (not real), work.waits  # how many steps are real


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


def test_a_batch_of_sequences_takes_few_launches(device: torch.device) -> None:
    rollout = empty(device)
    for step in steps():
        rollout.add({name: torch.from_numpy(array).to(device) for name, array in step.items()})
    rollout.set_last(value=torch.ones(N).to(device))
    batches = rollout.finish(GAE()).sequences(2, num_batches=4)
    next(batches)  # packs the fields
    with no_waiting() as watch:
        next(batches)
    assert len(watch.launches) <= 20, watch.launches


def test_batches_of_envs_wait_only_to_cut_episodes(device: torch.device) -> None:
    ours, theirs = filled("cpu").finish(GAE()), filled(device).finish(GAE())
    batches, work = counted(device, lambda: list(theirs.env_batches(num_batches=2, epochs=2)))
    for one, other in zip(ours.env_batches(num_batches=2, epochs=2), batches, strict=True):
        assert_same(one.steps, other.steps)
        assert_same(one.sequences, other.sequences)
    assert sum(work.waits.values()) == 1, work.waits


def test_chunks_are_the_same_and_wait_for_nothing(device: torch.device) -> None:
    ours, theirs = filled("cpu").finish(GAE()), filled(device).finish(GAE())
    with no_waiting():
        chunks = list(theirs.chunks(4))
    for one, other in zip(ours.chunks(4), chunks, strict=True):
        assert_same(one, other)


def test_other_calls_wait_as_often_as_their_page_says(device: torch.device) -> None:
    unvalued = empty(device)
    for step in steps():
        unvalued.add({**step, "terminated": np.ones(N, bool), "truncated": np.zeros(N, bool), "mask": np.ones(N, bool)})
    rollout = filled(device, real=True).finish(GAE())
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "finish": (lambda: unvalued.finish(GAE()), 2),
        "flat": (rollout.flat, 0),
        "sample": (lambda: rollout.sample(2), 0),
        "sequences": (lambda: list(rollout.sequences(2)), 1),
        "clear": (rollout.clear, 0),
    }
    for name, (call, waits) in calls.items():
        _, work = counted(device, call)
        assert sum(work.waits.values()) == waits, (name, work.waits)
