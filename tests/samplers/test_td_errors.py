"""TD errors on their way to the priorities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from relive import FrameStack, Hindsight, NStep, Prioritized, Recent, ReturnsToGo, Sequence
from relive.errors import DTypeError, NotFiniteError, ParameterError, ShapeError
from support.replays import three
from support.twins import contents


@pytest.mark.parametrize(
    ("index", "errors", "mask", "error", "message"),
    [
        ([0, 1], [1.0], None, ShapeError, "expected an index"),
        ([0, 1], [1.0, 2.0, 3.0], None, ShapeError, "expected an index"),
        ([[0, 1]], [[1.0, 2.0]], None, ShapeError, "expected an index"),
        (3, 1.0, None, ShapeError, "expected an index"),
        ([0, 1], np.ones((2, 3, 4)), None, ShapeError, "expected an index"),
        ([0, 1], np.ones((2, 2)), None, ShapeError, r"errors \[B\], got \(2,\), \(2, 2\); .* value\.squeeze\(-1\)"),
        ([0, 1], np.ones((2, 1)), None, ShapeError, r"errors \[B\], got \(2,\), \(2, 1\); .* value\.squeeze\(-1\)"),
        ([0, 1], np.ones((2, 3)), np.ones((2, 3), bool), ShapeError, "belong to a view that reads sequences"),
        ([0, 1], np.ones(2), np.ones((2, 3), bool), ShapeError, "mask"),
        ([0, 1], np.ones(2), np.ones(2, bool), ShapeError, "mask"),
        ([0.5, 1.2], [1.0, 1.0], None, DTypeError, "index: expected integers"),
        ([True, False], [1.0, 1.0], None, DTypeError, "index: expected integers"),
        ([0, 1, 2], [1.0, math.nan, 1.0], None, NotFiniteError, "td_error: entry 1 is nan"),
        ([0, 1, 2], [1.0, 1.0, -math.inf], None, NotFiniteError, "td_error: entry 2 is -inf"),
        ([0, -1], [1.0, 1.0], None, ParameterError, "index: entry 1, -1, was never issued"),
        ([10**6, 0], [1.0, 1.0], None, ParameterError, "index: entry 0, 1000000, was never issued"),
    ],
)
def test_priorities_that_do_not_fit_are_refused_and_leave_everything_as_it_was(
    index: Any, errors: Any, mask: Any, error: type[Exception], message: str
) -> None:
    twin = three("box")
    twin.buffer.update_priorities([0, 1, 2], [3.0, 4.0, 5.0])
    before, chances = contents(twin.buffer), twin.buffer.sampler.priorities().tolist()
    for wrap in (np.asarray, torch.as_tensor):
        with pytest.raises(error, match=message):
            twin.buffer.update_priorities(wrap(index), wrap(errors), None if mask is None else wrap(mask))
    assert contents(twin.buffer) == before
    assert twin.buffer.sampler.priorities().tolist() == chances


class _SetsAlpha:
    """Errors during whose conversion the exponent of priorities changes, as another thread may change it."""

    def __init__(self, sampler: Any, errors: list[float]) -> None:
        self.sampler, self.errors = sampler, errors

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.sampler.alpha = 0.9
        return np.array(self.errors, dtype)


def test_errors_go_to_the_tree_of_an_exponent_that_is_set_while_they_are_converted() -> None:
    twin = three("box")
    sampler = twin.buffer.sampler
    assert sampler.alpha != 0.9
    twin.buffer.update_priorities(np.arange(3), _SetsAlpha(sampler, [3.0, 4.0, 5.0]))
    twin.buffer.check()
    expected = (np.array([3.0, 4.0, 5.0]) + sampler.eps) ** 0.9
    np.testing.assert_allclose(sampler.priorities_of(np.arange(3)), expected, rtol=1e-6)


def test_a_whole_batch_in_place_of_its_index_is_refused() -> None:
    buffer = three("box").buffer
    batch = buffer.sample(3)
    with pytest.raises(ParameterError, match=r"integers \[B\], got a Batch; pass batch\['index'\]"):
        buffer.update_priorities(batch, torch.ones(3))


def test_a_misspelt_parameter_of_a_part_is_refused() -> None:
    parts: list[Any] = [
        Prioritized(),
        Recent(),
        NStep(3),
        FrameStack(2),
        Sequence(4),
        ReturnsToGo(),
        Hindsight(np.equal),
    ]
    for part in parts:
        with pytest.raises(AttributeError, match=rf"{type(part).__name__} has no 'betta'; it has "):
            part.betta = 0.5
    view: Any = Hindsight(np.equal)
    with pytest.raises(ParameterError, match=r"Hindsight\(k=8\): .* set ratio = k / \(k \+ 1\)"):
        view.k = 8


def test_priorities_come_in_any_dtype_and_from_tensors_that_need_gradients() -> None:
    for wrap in (
        lambda x: torch.tensor(x, dtype=torch.bfloat16),
        lambda x: torch.tensor(x, dtype=torch.float16),
        lambda x: torch.tensor(x, dtype=torch.float64, requires_grad=True),
        lambda x: np.array(x, np.float16),
        lambda x: np.array(x, np.int64),
        list,
    ):
        twin = three("box")
        assert twin.buffer.update_priorities(torch.tensor([0, 3]), wrap([2, -4])) == 0
        assert twin.buffer.update_priorities(np.array([0, 3], np.int32), wrap([2, -4])) == 0
        chances = twin.buffer.sampler.state_dict()["errors"]
        assert sorted(chances[chances > 1].tolist()) == [2.0, 4.0]


def test_no_priorities_at_all_are_nothing() -> None:
    twin = three("box")
    before = contents(twin.buffer)
    assert twin.buffer.update_priorities(np.zeros(0, np.int64), np.zeros(0)) == 0
    assert twin.buffer.update_priorities([], []) == 0
    assert twin.buffer.update_priorities(torch.zeros(0, dtype=torch.int64), torch.zeros(0)) == 0
    assert contents(twin.buffer) == before
