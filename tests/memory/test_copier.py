"""Steps are copied in one compiled call where they can be, and field by field where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, ReplayBuffer, RolloutBuffer, Schema
from relive.errors import DTypeError, EpisodeEndWarning
from relive.memory.copier import COPY_AT_ONCE, LIMIT, BoundedCache, StepCopier, copy_all
from relive.steps.arrays import numpy_dtype
from relive.steps.checker import StepChecker
from support import internals

N = 3
FIELDS = {
    "obs": Field((4,)),
    "image": Field((2, 2), torch.uint8),
    "reward": Field(),
    "done": Field((), torch.bool),
    "half": Field((), torch.bfloat16),
    "none": Field((0,)),
}


def arrays(rows: int) -> list[np.ndarray]:
    """Where FIELDS are stored, columns ``[rows, N, ...]``."""
    return [np.zeros((rows, N, *field.shape), numpy_dtype(field.dtype)) for field in FIELDS.values()]


def copier(targets: list[Any]) -> StepCopier:
    """A copier of FIELDS."""
    return StepCopier({(name,): field for name, field in FIELDS.items()}, targets, N)


def step(seed: int = 0) -> dict[str, Any]:
    """A step of FIELDS."""
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(N, 4)).astype(np.float32),
        "image": rng.integers(0, 256, (N, 2, 2), np.uint8),
        "reward": rng.normal(size=N).astype(np.float32),
        "done": rng.random(N) < 0.5,
        "half": torch.arange(N).to(torch.bfloat16) + seed,
        "none": np.zeros((N, 0), np.float32),
    }


def stored(targets: list[np.ndarray]) -> list[bytes]:
    """The bytes of all targets."""
    return [target.tobytes() for target in targets]


def plainly(targets: list[np.ndarray], row: int, values: dict[str, Any]) -> None:
    """Store a step by assignment."""
    for target, value, field in zip(targets, values.values(), FIELDS.values(), strict=True):
        native = value.astype(value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value
        tensor = torch.as_tensor(native).detach().to(field.dtype)
        target[row] = tensor.view(torch.int16).numpy() if field.dtype is torch.bfloat16 else tensor.numpy()


CHANGES: dict[str, tuple[bool, dict[str, Any]]] = {
    "all fit": (True, {}),
    "every other number": (True, {"obs": np.ones((N, 8), np.float32)[:, ::2]}),
    "other floats": (True, {"obs": np.ones((N, 4), np.float16), "reward": np.ones(N, np.float16)}),
    "an array that is transposed": (True, {"image": np.arange(12, dtype=np.uint8).reshape(2, 2, N).T}),
    "a tensor with gaps": (True, {"half": torch.arange(2 * N).to(torch.bfloat16)[::2]}),
    "bytes the other way round": (True, {"obs": np.ones((N, 4), ">f4")}),
    "a parameter": (False, {"reward": torch.nn.Parameter(torch.ones(N))}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checked_step_is_written_whatever_its_fields_are(change: str) -> None:
    at_once, changed = CHANGES[change]
    targets, want, values = arrays(2), arrays(2), step(1) | changed
    made, check = copier(targets), StepChecker(Schema(FIELDS), N, torch.device("cpu"))
    checked = check(values, made)
    assert (type(checked) is tuple) == (made.leaves(values) is not None) == at_once
    made.write(1, checked)
    plainly(want, 1, values)
    assert stored(targets) == stored(want)


def test_a_field_without_a_target_is_checked_and_not_written() -> None:
    targets: list[Any] = [None, *arrays(1)[1:]]
    made = copier(targets)
    for values in (step(1), step(2) | {"obs": np.ones((N, 4), np.float16)}):
        made.write(0, list(values.values()))
        assert targets[1][0].tolist() == values["image"].tolist()


def test_steps_of_alternating_kinds_are_stored() -> None:
    rollout = RolloutBuffer(Schema({"x": (), "y": Field((), torch.int64)}), 64, N)
    for t in range(32):
        x = np.full(N, t, [np.float32, np.float64][t % 2])
        rollout.add(x=x, y=torch.full((N,), t) if t % 3 else np.full(N, t))
    assert rollout["x"].tolist() == [[t] * N for t in range(32)]
    assert rollout["y"].tolist() == [[t] * N for t in range(32)]


def test_steps_of_a_single_env_without_its_axis_are_stored_and_looked_at_as_with_it() -> None:
    schema = Schema(
        {"obs": (2,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
    )

    def filled(given_: Callable[[Any], Any]) -> ReplayBuffer:
        replay = ReplayBuffer(schema, 64, seed=0)
        for t in range(20):
            step = {"obs": np.full((1, 2), t), "reward": np.full(1, t), "next_obs": np.full((1, 2), t + 1)}
            step = {name: value.astype(np.float32) for name, value in step.items()}
            step |= {"terminated": np.array([t % 3 == 2]), "truncated": np.array([False])}
            replay.add({name: given_(value) for name, value in step.items()})
        return replay

    with pytest.warns(EpisodeEndWarning):  # each episode begins on what the last one ended on
        whole = filled(lambda x: x)
    with pytest.warns(EpisodeEndWarning):
        bare = filled(lambda x: x[0] if x.ndim == 2 else x.reshape(()))
    assert len(whole) == len(bare) == 19
    other = bare.sample(32)
    for name, column in whole.sample(32).items():
        assert torch.equal(column, other[name]), name


def test_a_float64_image_too_large_to_pack_takes_the_long_way_and_is_checked() -> None:
    schema = Schema(
        {"obs": (400,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
    )
    replay = ReplayBuffer(schema, 16, 2, seed=0)
    rest = {"reward": np.zeros(2), "terminated": np.zeros(2, np.bool_), "truncated": np.zeros(2, np.bool_)}
    for t in range(4):
        replay.add(obs=np.full((2, 400), float(t)), **rest)
    with pytest.raises(DTypeError, match="'obs'"):
        replay.add(obs=np.full((2, 400), 1e300), **rest)
    with pytest.raises(DTypeError, match="'reward'"):
        replay.add(obs=np.ones((2, 400), np.float32), **(rest | {"reward": np.full(2, -1e300)}))
    assert len(replay) == 6
    assert set(replay.sample(64)["obs"][:, 0].tolist()) == {0.0, 1.0, 2.0}


def test_a_step_is_taken_in_one_call_whatever_its_row_held_before() -> None:
    rollout = RolloutBuffer(Schema({"obs": (), "reward": (), "value": ()}), 4, N, wrap=True, seed=0)
    step_, taken = {name: np.zeros(N, np.float32) for name in ("obs", "reward", "value")}, list[tuple[int, int]]()
    copier_ = internals.columns(rollout).copier
    take = copier_.take

    def noted(row: int, values: Any, debug: bool) -> bool:
        done = take(row, values, debug)
        taken.extend([(t, row)] * (done and type(values) is dict))
        return done

    copier_.take = noted
    for t in range(6):
        if t == 3:
            rollout.set_last(value=np.ones(N, np.float32))
        rollout.add(step_ | {"obs": np.full(N, t, np.float32)})
    assert taken == [(t, t % 4) for t in range(6)]  # row 3 held bootstrap values, then come the oldest steps
    assert not internals.has_last(rollout)
    assert rollout["obs"].tolist() == [[t] * N for t in (2, 3, 4, 5)]


# The cache: what it keeps, and when it forgets


def test_a_kept_value_is_returned_and_found_again():
    made = BoundedCache[int, list[int]]()
    value = made.keep(3, [1])
    assert made[3] is value
    assert made.get(4) is None


def test_a_full_dictionary_starts_anew_with_the_newest():
    made = BoundedCache[int, int]()
    for key in range(LIMIT):
        made.keep(key, key)
    assert len(made) == LIMIT
    made.keep(LIMIT, 7)
    assert made == {LIMIT: 7}


def test_tensors_are_copied_one_by_one_by_a_torch_that_cannot_copy_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so by a name that is not public."""
    sources = [torch.arange(3), torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.arange(2.0)]
    for way in (COPY_AT_ONCE, None):
        monkeypatch.setattr("relive.memory.copier.COPY_AT_ONCE", way)
        targets = [torch.zeros_like(source) for source in (*sources, torch.ones(1))]
        copy_all(targets, sources)
        assert [target.tolist() for target in targets] == [*(source.tolist() for source in sources), [0.0]]
