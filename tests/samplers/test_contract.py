"""A sampler in two methods: what it lacks has a default, whether it inherits from Sampler or not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relive import Mixture, ReplayBuffer
from relive.errors import FieldError, InvariantError, ParameterError
from relive.samplers import Sampler
from support.twins import Twin


class Newest:
    """A plain object with the two methods."""

    def attach(self, ring: Any) -> None:
        self.ring = ring

    def draw(self, count: int, key: int, update: int, of: int) -> Any:
        return np.repeat(self.ring.anchors()[-1:], count), {}


class Inherits(Sampler):
    """One that inherits."""

    def attach(self, ring: Any) -> None:
        self.ring = ring

    def draw(self, count: int, key: int, update: int, of: int) -> Any:
        return np.repeat(self.ring.anchors()[-1:], count), {}


class Whole(Newest):
    """A plain object with every member."""

    def __init__(self) -> None:
        self.seen, self.sound = np.zeros(20), True

    def changed(self, places: Any, drawable: Any) -> None:
        self.seen[places] += 1

    def draw(self, count: int, key: int, update: int, of: int) -> Any:
        return super().draw(count, key, update, of)[0], {"one": np.ones(count)}

    def nbytes(self, rows: int) -> int:
        return 8 * rows

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = np.array(state["seen"])

    def check(self) -> None:
        if not self.sound:
            raise InvariantError("sampler: it is not sound")


@pytest.mark.parametrize("make", [Newest, Inherits])
def test_two_methods_are_enough_for_everything_that_a_replay_does(make: Callable[[], Any], tmp_path: Any) -> None:
    sampler = make()
    twin = Twin(1, 20, sampler=sampler)
    twin.play(*"....T......")
    replay = twin.buffer
    assert replay.sampler is sampler
    assert set(replay.sample(4)["index"].tolist()) == {10}
    assert "weight" not in replay.batch_fields
    assert replay.nbytes == ReplayBuffer.plan(twin.schema, 20, sampler=make()).total_bytes
    assert repr(sampler) in repr(replay)
    replay.view.n = 3
    replay.check()
    Mixture({"a": replay}, {"a": 1.0}).sample(2)
    replay.save(tmp_path / "saved")
    for other in (ReplayBuffer.load(tmp_path / "saved", sampler=make()), pickle.loads(pickle.dumps(replay))):
        assert type(other.sampler) is make
        assert other.sample(4)["index"].tolist() == [10] * 4
    assert type(copy.deepcopy(replay).sampler) is make


def test_a_plain_object_keeps_the_members_that_it_has(tmp_path: Any) -> None:
    sampler = Whole()
    twin = Twin(1, 20, sampler=sampler)
    twin.play(*"....T......")
    replay = twin.buffer
    assert sampler.seen.sum() == len(replay)
    assert replay.sample(3)["one"].tolist() == [1.0] * 3
    assert replay.batch_fields[-1] == "one"
    assert ReplayBuffer.plan(twin.schema, 20, sampler=sampler).sampler_bytes == 160
    replay.save(tmp_path / "saved")
    assert ReplayBuffer.load(tmp_path / "saved", sampler=Whole()).sampler.seen.tolist() == sampler.seen.tolist()
    sampler.sound = False
    with pytest.raises(InvariantError, match="it is not sound"):
        replay.check()


@pytest.mark.parametrize(
    ("given", "lacks"), [(object(), "attach and draw"), ({"a": 1}, "attach and draw"), ("uniform", "attach and draw")]
)
def test_what_lacks_one_of_the_two_methods_is_refused_by_name(given: Any, lacks: str) -> None:
    with pytest.raises(ParameterError, match=rf"sampler=.*attach\(ring\) and draw\(.*lacks {lacks}"):
        ReplayBuffer(Twin().schema, 20, sampler=given)


def test_a_class_that_inherits_and_lacks_a_method_cannot_be_made() -> None:
    class Half(Sampler):
        def attach(self, ring: Any) -> None: ...

    with pytest.raises(TypeError, match="draw"):
        Half()  # pyright: ignore[reportAbstractUsage]


def test_a_field_of_a_draw_that_the_view_reads_too_is_refused() -> None:
    class Shadowing(Newest):
        def draw(self, count: int, key: int, update: int, of: int) -> Any:
            return super().draw(count, key, update, of)[0], {"reward": np.zeros(count)}

    twin = Twin(1, 8, sampler=Shadowing()).play(*"....")
    with pytest.raises(FieldError, match=r"draw\(2\): its field 'reward' is one that the view reads, too"):
        twin.buffer.sample(2)
