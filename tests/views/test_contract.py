"""A view of one's own: what it needs, and what it may write into a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relive import NStep, Transition
from relive.errors import DTypeError, FieldError, ParameterError, ShapeError
from relive.ring import Rule
from support import internals
from support.twins import Twin, same_batches

# A view of one's own.


class Bare:
    """A view with one method."""

    def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
        return ring.read(ring.plan(places, 2, 0.5))


def test_a_view_needs_no_more_than_read() -> None:
    own, same = Twin(2, 20, view=Bare()), Twin(2, 20, view=NStep(2, 0.5))
    for twin in (own, same):
        twin.play("..", ".T", "..", "U.", "..")
    assert internals.ring(own.buffer).rule == Rule()
    assert same_batches(own.buffer.data(), same.buffer.data())
    assert same_batches(own.buffer.sample(16), same.buffer.sample(16))


def test_an_object_without_read_is_no_view() -> None:
    with pytest.raises(ParameterError, match="expected a view"):
        Twin(1, 8, view=object())


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda plan, fields: plan, FieldError, "expected a dict from paths to tensors, got Plan"),
        (lambda plan, fields: {"obs": fields["obs",]}, FieldError, r"tuples of names such as \('obs',\), got 'obs'"),
        (lambda plan, fields: {("obs",): fields["obs",].numpy()}, DTypeError, "'obs': expected a tensor, got ndarray"),
        (lambda plan, fields: {("obs",): fields["obs",][:3]}, ShapeError, r"'obs': expected 4 rows.*, got shape \(3,"),
        (lambda plan, fields: {("a", "b"): torch.tensor(1)}, ShapeError, r"'a.b': expected 4 rows.*, got shape \(\)"),
    ],
    ids=["a plan", "a name", "an array", "fewer rows", "a number"],
)
def test_what_a_view_of_ones_own_reads_is_checked(change: Any, error: type[Exception], said: str) -> None:
    class Wrong:
        def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
            plan = ring.plan(places)
            return change(plan, ring.read(plan))

    twin = Twin(1, 8).play(*"....")
    twin.buffer.view = Wrong()
    with pytest.raises(error, match=rf"Wrong.*\.read: .*{said}"):
        twin.buffer.sample(4)


def test_what_a_view_writes_into_a_plan_is_what_the_batch_holds() -> None:
    class Edited:
        def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
            plan = ring.plan(places)
            plan.column("reward")[...] = 7
            plan.last[:] = plan.places  # the large fields of the next observation are read from there
            return ring.read(plan)

    twin = Twin(1, 12, dress="large", view=Edited()).play(*"....T...")
    batch = twin.buffer.data()
    assert (batch["reward"] == 7).all()
    assert torch.equal(batch["next_obs"], batch["obs"])
    twin.buffer.view = Transition()
    assert (twin.buffer.data()["reward"] != 7).any()
