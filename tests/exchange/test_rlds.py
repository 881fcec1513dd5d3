"""RLDS: episodes whose last step has only an observation come in, with every end; flags that contradict are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relive.errors import FieldError, ParameterError, ShapeError
from relive.exchange import from_rlds
from support.twins import Twin

LACK = "its discounts, and the metadata of its episodes, were not read"


class Served:
    """As tf.data serves what it has."""

    def __init__(self, items: Any) -> None:
        self._items = list(items)

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter(self._items)


def episodes_of(replay: Any) -> list[dict[str, Any]]:
    """The episodes of a replay as RLDS has them: the last action and reward are made up."""
    found: list[dict[str, Any]] = []
    for episode in replay.episodes():
        data = episode.steps
        size = len(data)
        steps = [
            {"observation": {"state": data["obs"][t].numpy(), "text": b"go"}, "action": data["action"][t].numpy(),
             "reward": data["reward"][t].numpy(), "discount": np.float32(1), "is_first": t == 0, "is_last": False,
             "is_terminal": False}
            for t in range(size)
        ]  # fmt: skip
        after = {"state": data["next_obs"][-1].numpy(), "text": b""}
        final = {"observation": after, "action": steps[0]["action"] * 0 + 9, "reward": np.float32(99),
                 "discount": np.float32(0), "is_first": False, "is_last": True,
                 "is_terminal": bool(data["terminated"][-1])}  # fmt: skip
        found.append({"steps": [*steps, final], "episode_metadata": {"file": b"x"}})
    return found


def stacked(episode: dict[str, Any]) -> dict[str, Any]:
    steps = episode["steps"]
    one = {name: np.stack([step[name] for step in steps]) for name in steps[0] if name != "observation"}
    return {"steps": one | {"observation": {"state": np.stack([step["observation"]["state"] for step in steps])}}}


@pytest.fixture(scope="module")
def played() -> tuple[Any, list[dict[str, Any]]]:
    twin = Twin(2, 40).play("..", ".T", "..", "U.", "T.", ".U")
    return twin.buffer, episodes_of(twin.buffer)


@pytest.mark.parametrize("form", ["lists", "arrays", "served"])
def test_episodes_come_in_with_every_end(played: Any, form: str) -> None:
    replay, episodes = played
    given: Any = episodes
    if form == "arrays":
        given = [stacked(episode) for episode in episodes]
    if form == "served":
        given = Served({"steps": Served(episode["steps"])} for episode in episodes)
    log = from_rlds(given)
    back = log.replay()
    want = [episode.steps for episode in replay.episodes()]
    got = [episode.steps for episode in back.episodes()]
    assert [len(steps) for steps in got] == [len(steps) for steps in want]
    for one, other in zip(got, want, strict=True):
        for name in ("obs", "next_obs"):
            np.testing.assert_array_equal(one[name]["state"], other[name])
        for name in ("action", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(one[name], other[name])
    assert log.lacks == (LACK,) if form == "arrays" else (LACK, "'observation.text' holds no numbers and was not read")


def test_an_episode_without_a_last_step_is_cut_off(played: Any) -> None:
    _, episodes = played
    cut = [*episodes[:-1], {"steps": episodes[-1]["steps"][:-1]}]
    log = from_rlds(cut)
    sizes = [len(episode["steps"]) - 1 for episode in cut]
    assert [len(episode.steps) for episode in log.replay().episodes()] == sizes
    ends = np.cumsum(sizes) - 1
    assert (log.fields["terminated"] | log.fields["truncated"])[ends].all()
    assert (log.fields["terminated"] | log.fields["truncated"]).sum() == len(cut)
    assert not log.fields["terminated"][ends[-1]]
    assert "1 episodes have no last step, first episode 3; they count as cut off" in log.lacks
    assert len(from_rlds([*episodes, {"steps": episodes[0]["steps"][:1]}])) == len(from_rlds(episodes))


def changed(step: int, **members: Any) -> Callable[[list[dict[str, Any]]], Any]:
    def change(steps: list[dict[str, Any]]) -> Any:
        steps[step] = {name: x for name, x in (steps[step] | members).items() if x is not ...}
        return {"steps": steps}

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (changed(1, is_first=True), FieldError, "is_first at its first step alone"),
        (changed(0, is_first=False), FieldError, "is_first at its first step alone"),
        (changed(1, is_last=True), FieldError, "is_last at its last step alone"),
        (changed(1, is_terminal=True), FieldError, "step 1 is terminal and not the last"),
        (changed(1, is_last=2), FieldError, "expected 5 flags in 'is_last'"),
        (changed(1, reward=...), FieldError, "differ in their members"),
        (changed(1, observation={"state": np.zeros(9)}), (ShapeError, FieldError), "differ in their"),
        (changed(1, action=np.zeros(9)), ShapeError, "differ in their shapes"),
        (lambda steps: {"steps": [{k: x for k, x in s.items() if k != "reward"} for s in steps]}, FieldError,
         "lacks reward"),
        (lambda steps: {"steps": [s | {"action": b"left"} for s in steps]}, FieldError, "expected numbers in"),
        (lambda steps: {"steps": stacked({"steps": steps})["steps"] | {"reward": np.zeros(3)}}, ShapeError, "'reward'"),
        (lambda steps: {"steps": stacked({"steps": steps})["steps"] | {"is_last": 3}}, ShapeError, "is_last has 1"),
        (lambda steps: {"steps": []}, FieldError, "lacks observation"),
        (lambda steps: steps, FieldError, "expected a dict with 'steps', got a list"),
        (lambda steps: {"steps": None}, FieldError, "a dict for each step.*got a NoneType"),
        (lambda steps: {"steps": np.zeros((5, 3))}, FieldError, "a dict for each step.*got a ndarray of ndarray"),
        (lambda steps: {"steps": [*steps, 7]}, FieldError, "a dict for each step.*got a list of int"),
        (lambda steps: {"steps": {"observation": np.broadcast_to(np.zeros(1), (5, 2**45))}}, ParameterError,
         "field 'observation' repeats its numbers"),
    ],
)  # fmt: skip
def test_steps_that_contradict_are_named(
    played: Any, change: Callable[[list[dict[str, Any]]], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_rlds([change(list(played[1][0]["steps"]))])


def test_a_path_is_read_by_tensorflow_datasets(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorflow"):
        from_rlds("some/where")
    fake: Any = ModuleType("tensorflow_datasets")
    splits = {"train": Served(played[1][:2]), "test": Served(played[1][2:])}
    fake.builder_from_directory = lambda path: SimpleNamespace(as_dataset=lambda: splits)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
    log = from_rlds("some/where")
    assert log.source == "the RLDS data set 'some/where'"
    assert len(log) == sum(len(episode["steps"]) - 1 for episode in played[1])


def test_no_episodes_are_refused() -> None:
    with pytest.raises(FieldError, match="has no steps"):
        from_rlds([])
