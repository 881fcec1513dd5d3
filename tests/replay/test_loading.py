"""Loading a save with another capacity, seed, device, sampler, view or schema; and the state of the learner."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import relive
from attacks import forger
from relive import NStep, Prioritized, ReplayBuffer, RolloutBuffer, SchemaChanges, Sequence, Transition, Uniform
from relive import files as persist
from relive.errors import DTypeError, FieldError, FileFormatError, ParameterError, SchemaError
from relive.ring.ring import Ring
from relive.samplers.contract import Drawn
from relive.steps.schema import Field
from support import internals
from support.cases import covering
from support.effort import often
from support.other_device import ELSEWHERE, far_device
from support.twins import SAMPLERS, Twin, same_batches

PLAYS = ["..", ".T", "..", "U.", ".B", "..", "|", "..", "T.", "..", ".U", "..", "..", "TT", "..", "..", ".."]


def feed(twin: Twin, *plays: str) -> Twin:
    """As :meth:`Twin.play`, with a next observation in every step."""
    for kinds in plays:
        twin.interrupt() if kinds == "|" else twin.buffer.add(twin.step(kinds, final=True))
    return twin


# Another capacity.


@pytest.mark.parametrize(("rows", "mode"), covering([2, 3, 5, 8, 11, 30], ["shared", "own", "alone"]))
def test_a_buffer_of_another_capacity_is_one_that_held_no_more(rows: int, mode: str, tmp_path: Path) -> None:
    """It holds the newest rows: those that a buffer of that size holds, as far as the saved one has them."""
    options: dict[str, Any] = {"ordered": mode != "alone"} | ({"own_next_obs": True} if mode == "own" else {})
    saved = Twin(2, 8, dress="mixed", **options)
    small = Twin(2, min(rows, 8), dress="mixed", **options)
    for turn, play in enumerate(PLAYS):
        feed(saved, play)
        feed(small, play)
        if turn % often(3, 1):
            continue
        saved.buffer.save(tmp_path / "save")
        loaded = ReplayBuffer.load(tmp_path / "save", capacity=2 * rows)
        loaded.check()
        assert len(loaded.block) == 2 * rows
        assert same_batches(loaded.data(), small.buffer.data())
        if len(loaded) and rows <= 8:
            loaded.seed = small.buffer.seed = 5
            assert loaded.sample(6)["index"].tolist() == small.buffer.sample(6)["index"].tolist()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_loaded_buffer_of_another_capacity_takes_further_steps(sampler: str, tmp_path: Path) -> None:
    for rows in (4, 20):
        twin = Twin(2, 8, sampler=SAMPLERS[sampler](), view=NStep(2, 0.5)).play(*PLAYS)
        twin.buffer.sample(3)
        twin.buffer.save(tmp_path / "save")
        twin.buffer = ReplayBuffer.load(tmp_path / "save", capacity=2 * rows)
        twin.truth.rows = rows
        for play in PLAYS:
            if rows == 4:
                twin.check()
            twin.buffer.check()
            twin.buffer.sample(2)
            twin.play(play)
        twin.buffer.check()


def test_priorities_follow_their_rows_into_another_capacity(tmp_path: Path) -> None:
    twin = Twin(2, 8, sampler=Prioritized(alpha=1.0)).play(*PLAYS)
    index = twin.buffer.data()["index"]
    twin.buffer.update_priorities(index, index.double() + 0.5)
    twin.buffer.save(tmp_path / "save")
    for rows in (3, 5, 8, 13):
        loaded = ReplayBuffer.load(tmp_path / "save", capacity=2 * rows)
        batch = loaded.sample(100)
        errors = loaded.data()["index"].double() + 0.5 + 1e-6
        expected = (batch["index"].double() + 0.5 + 1e-6) / errors.sum()
        assert torch.allclose(batch["probability"], expected, rtol=1e-6)


@pytest.mark.parametrize("capacity", [0, 1, 3, -4, 2.5, True, "10", 2**62])
def test_a_capacity_that_cannot_be_is_refused_as_the_constructor_does(capacity: Any, tmp_path: Path) -> None:
    Twin(2, 8).play("..").buffer.save(tmp_path / "save")
    with pytest.raises((ParameterError, SchemaError)) as caught:
        ReplayBuffer.load(tmp_path / "save", capacity=capacity)
    assert not isinstance(caught.value, FileFormatError)


# Another seed, device, sampler or view.


def test_ranks_that_load_one_save_draw_batches_of_their_own(tmp_path: Path) -> None:
    twin = Twin(2, 30).play(*PLAYS)
    twin.buffer.sample(4)
    twin.buffer.save(tmp_path / "save")
    ranks = [ReplayBuffer.load(tmp_path / "save", seed=rank) for rank in range(3)]
    drawn = [rank.sample(20)["index"].tolist() for rank in ranks]
    assert len({tuple(batch) for batch in drawn}) == 3
    again = ReplayBuffer.load(tmp_path / "save", seed=1)
    assert again.seed == 1
    assert again.sample(20)["index"].tolist() == drawn[1]
    assert ReplayBuffer.load(tmp_path / "save").sample(9)["index"].tolist() == twin.buffer.sample(9)["index"].tolist()
    with pytest.raises((ParameterError, SchemaError), match="seed"):
        ReplayBuffer.load(tmp_path / "save", seed="1")  # type: ignore[arg-type]


def test_a_save_goes_to_a_device_of_another_capacity_and_back(tmp_path: Path) -> None:
    twin = Twin(2, 8, dress="mixed").play(*PLAYS)
    twin.buffer.save(tmp_path / "here")
    with far_device():
        there = ReplayBuffer.load(tmp_path / "here", device=ELSEWHERE, capacity=12)
        assert there.device == ELSEWHERE
        there.save(tmp_path / "there")
    back = ReplayBuffer.load(tmp_path / "there", device="cpu")
    assert same_batches(back.data(), ReplayBuffer.load(tmp_path / "here", capacity=12).data())


def test_another_sampler_and_view_and_capacity_at_once(tmp_path: Path) -> None:
    twin = Twin(2, 8, sampler=Uniform()).play(*PLAYS)
    twin.buffer.save(tmp_path / "save")
    loaded = ReplayBuffer.load(tmp_path / "save", capacity=12, sampler=Prioritized(), view=Sequence(2))
    loaded.check()
    assert "probability" in loaded.sample(2).keys()
    loaded.view = Transition(0.5)
    twin.truth.rows = 6
    twin.buffer = loaded
    twin.check()


# Another schema.


class Newest:
    """A sampler of a user, with no more than its two methods: it draws the newest transition alone."""

    def attach(self, ring: Ring) -> None:
        self.ring = ring

    def draw(self, count: int, key: int, update: int, of: int) -> Drawn:
        return self.ring.anchors()[np.full(count, -1)], {}


def test_a_sampler_of_two_methods_goes_with_another_capacity(tmp_path: Path) -> None:
    Twin(2, 8).play(*PLAYS).buffer.save(tmp_path / "save")
    loaded = ReplayBuffer.load(tmp_path / "save", capacity=8, sampler=Newest())
    assert loaded.capacity == 8
    assert len(set(loaded.sample(4)["index"].tolist())) == 1


@pytest.mark.parametrize("part", ["sampler", "view"])
def test_what_is_no_part_is_refused_by_name_and_not_as_a_damaged_save(part: str, tmp_path: Path) -> None:
    twin = Twin(2, 8).play(*PLAYS)
    twin.buffer.save(tmp_path / "save")
    ReplayBuffer.open(tmp_path / "files", twin.buffer.schema, 16).close()
    for wrong in (Prioritized if part == "sampler" else NStep, "newest", 3):
        given: Any = {part: wrong}
        calls: list[Callable[[], object]] = [
            partial(ReplayBuffer.load, tmp_path / "save", **given),
            partial(ReplayBuffer.load, tmp_path / "save", capacity=8, **given),
            partial(ReplayBuffer.open, tmp_path / "files", **given),
        ]
        if part == "sampler":
            calls.append(partial(ReplayBuffer.plan, twin.buffer.schema, 16, **given))
        for call in calls:
            with pytest.raises(ParameterError, match=part) as caught:
                call()
            assert not isinstance(caught.value, FileFormatError)
    assert ReplayBuffer.open(tmp_path / "files").num_envs == 1


def test_fields_are_dropped_renamed_cast_and_added(tmp_path: Path) -> None:
    twin = Twin(2, 8, dress="mixed", extras=lambda step: {"info": step["obs"] * 2, "hint": step["obs"][:1]})
    twin.play(*PLAYS).buffer.save(tmp_path / "save")
    changes = SchemaChanges(
        drop=["info"],
        rename={"hint": "aux.hint", "obs.camera": "obs.eye"},
        cast={"obs.state": torch.float64, "aux": torch.float16},
        add={"log_prob": 0.25, "goal": np.arange(3, dtype=np.int16), "aux.flag": True, "obs.clock": 7},
    )
    loaded = ReplayBuffer.load(tmp_path / "save", changes=changes)
    loaded.check()
    before, now = twin.buffer.data(), loaded.data()
    assert set(loaded.schema["obs"]) == {"state", "eye", "clock"}
    assert loaded.schema["goal"] == Field((3,), torch.int16)
    assert now["index"].tolist() == before["index"].tolist()
    for name in ("obs", "next_obs"):
        assert torch.equal(now[name, "eye"], before[name, "camera"])
        assert torch.equal(now[name, "state"], before[name, "state"].double())
        assert now[name, "clock"].tolist() == [7] * len(before)
    assert now["aux", "hint"].dtype is torch.float16
    assert torch.equal(now["aux", "hint"].float(), before["hint"])
    assert now["aux", "flag"].tolist() == [True] * len(before)
    assert torch.equal(now["goal"], torch.arange(3).short().expand(len(before), 3))
    assert now["log_prob"].tolist() == [0.25] * len(before)
    assert "info" not in now.keys()
    assert loaded.sample(9)["index"].tolist() == twin.buffer.sample(9)["index"].tolist()
    step = twin.step("..")
    step["aux"] = {"hint": step.pop("hint"), "flag": np.ones(2, np.bool_)}
    step |= {"log_prob": np.zeros(2), "goal": np.zeros((2, 3), np.int16)}
    for name in ("obs", "next_obs"):
        if name in step:
            step[name] = {**step[name], "eye": step[name]["camera"], "clock": np.zeros(2, np.int64)}
            del step[name]["camera"]
    del step["info"]
    loaded.add(step)
    loaded.check()
    loaded.save(tmp_path / "save")
    assert same_batches(ReplayBuffer.load(tmp_path / "save").data(), loaded.data())


@pytest.mark.parametrize("mode", ["own", "alone"])
def test_given_next_observations_change_as_observations_do(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"ordered": mode != "alone"} | ({"own_next_obs": True} if mode == "own" else {})
    twin = feed(Twin(2, 8, dress="mixed", **options), *PLAYS)
    twin.buffer.save(tmp_path / "save")
    changes = SchemaChanges(rename={"obs.state": "obs.joints"}, cast={"obs.joints": torch.float64}, add={"obs.t": 1.5})
    loaded, before = ReplayBuffer.load(tmp_path / "save", changes=changes, capacity=10).data(), twin.buffer.data()
    some = [before["index"].tolist().index(i) for i in loaded["index"].tolist()]
    for name in ("obs", "next_obs"):
        assert torch.equal(loaded[name, "joints"], before[name, "state"][some].double())
        assert torch.equal(loaded[name, "camera"], before[name, "camera"][some])
        assert loaded[name, "t"].tolist() == [1.5] * len(some)


def test_a_cast_can_move_a_field_between_packed_rows_and_blocks(tmp_path: Path) -> None:
    twin = Twin(2, 8, dress="large").play(*PLAYS)
    twin.buffer.save(tmp_path / "save")
    wide = ReplayBuffer.load(tmp_path / "save", changes=SchemaChanges(cast={"obs": torch.float64}))
    wide.save(tmp_path / "wide")
    back = ReplayBuffer.load(tmp_path / "wide", changes=SchemaChanges(cast={"obs": torch.float16}))
    before = twin.buffer.data()
    assert torch.equal(wide.data()["obs"], before["obs"].double())
    assert torch.equal(back.data()["next_obs"], before["next_obs"].half())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (SchemaChanges(drop=["nothing"]), FieldError, "nothing"),
        (SchemaChanges(drop="action_"), FieldError, "did you mean 'action'"),
        (SchemaChanges(drop=["reward"]), SchemaError, "needs 'reward'"),
        (SchemaChanges(drop=[""]), FieldError, "name"),
        (SchemaChanges(drop=["pair.0"]), FieldError, "member of a tuple"),
        (SchemaChanges(rename={"hidden": "action"}), FieldError, "there already"),
        (SchemaChanges(rename={"hidden": "action.x"}), FieldError, "no further fields"),
        (SchemaChanges(rename={"hidden": "obs.hidden"}), FieldError, "drop the one and add the other"),
        (SchemaChanges(rename={"hidden": "_hidden"}), SchemaError, "start with '_'"),
        (SchemaChanges(cast={"hidden": "float16"}), DTypeError, "float16"),  # type: ignore[dict-item]
        (SchemaChanges(cast={"reward": torch.float64}), SchemaError, "needs 'reward'"),
        (SchemaChanges(cast={"hidden": torch.int8}), ParameterError, "hidden"),
        (SchemaChanges(add={"reward": 0.0}), FieldError, "there already"),
        (SchemaChanges(add={"weight": 0.0}), SchemaError, "weight"),
        (SchemaChanges(add={"text": "abc"}), SchemaError, "text"),
    ],
)
def test_changes_that_cannot_be_made_are_refused_by_name(
    changes: SchemaChanges, error: type[Exception], words: str, tmp_path: Path
) -> None:
    twin = Twin(2, 8, extras=lambda step: {"pair": (step["obs"][:1], step["obs"]), "hidden": step["obs"] * 100 + 0.5})
    twin.play(*PLAYS).buffer.save(tmp_path / "save")
    with pytest.raises(error, match=words) as caught:
        ReplayBuffer.load(tmp_path / "save", changes=changes)
    assert not isinstance(caught.value, FileFormatError)


def test_arguments_of_the_constructor_that_a_save_has_already_are_refused_with_those_that_change_them(
    tmp_path: Path,
) -> None:
    twin = Twin(2, 8).play(*PLAYS)
    twin.buffer.save(tmp_path / "save")
    with pytest.raises(ParameterError, match=r"load\(schema=\.\.\.\): unknown; .*changes=relive\.SchemaChanges"):
        ReplayBuffer.load(tmp_path / "save", schema=twin.buffer.schema)  # pyright: ignore[reportArgumentType]


def test_a_number_that_a_cast_cannot_hold_is_refused_and_a_final_observation_has_no_other_numbers(
    tmp_path: Path,
) -> None:
    buffer = ReplayBuffer(relive.Schema({"obs": (), "x": (), "reward": (), "terminated": Field((), torch.bool),
                          "truncated": Field((), torch.bool)}), 6, seed=0)  # fmt: skip
    for t in range(9):
        buffer.add(obs=t, x=1e9 if t < 4 else t, reward=0.0, terminated=t % 3 == 2, truncated=False, next_obs=-t)
    with_stale = SchemaChanges(cast={"x": torch.float16})
    buffer.save(tmp_path / "save")
    loaded = ReplayBuffer.load(tmp_path / "save", changes=with_stale)
    assert loaded.data()["x"].dtype is torch.float16
    buffer.add(obs=9, x=7e4, reward=0.0, terminated=False, truncated=False)
    buffer.save(tmp_path / "save")
    with pytest.raises(ParameterError, match=r"'x': 70000.*float16"):
        ReplayBuffer.load(tmp_path / "save", changes=with_stale)
    for dtype in (torch.int8, torch.uint8, torch.bool):
        with pytest.raises(ParameterError, match=f"'x': .* is not a {dtype}"):
            ReplayBuffer.load(tmp_path / "save", changes=SchemaChanges(cast={"x": dtype}))
    assert ReplayBuffer.load(tmp_path / "save", changes=SchemaChanges(cast={"x": torch.int64})).schema["x"]


def test_a_save_of_an_earlier_release_takes_all_of_it(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "fixtures" / "saves-1" / "replay"
    changes = SchemaChanges(drop=["obs.camera"], add={"log_prob": 0.0})
    loaded = ReplayBuffer.load(path, capacity=16, seed=3, changes=changes)
    loaded.check()
    assert loaded.data()["index"].tolist() == [27, 28, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39]
    assert loaded.extra is None
    assert relive.load_extra(path) is None


# The learner's state.


def learner() -> dict[str, Any]:
    """What a training loop has besides its experience."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        schedule.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "numpy": np.random.default_rng(3).bit_generator.state,
        "legacy": np.random.RandomState(3).get_state(),
        "torch": torch.get_rng_state(),
        "best": -float("inf"),
        "nothing": {"none": None, "dict": {}, "list": [], "tuple": (), "bytes": b"\x00a", "text": "\ud800ä"},
        "numbers": [1, 2**70, True, 0.1, -0.0, np.float32(0.5), np.int64(7), np.bool_(True)],
        "a.b": {"c": torch.ones(2)},
        "a": {"b.c": torch.zeros(2, dtype=torch.bfloat16), 3: nn.Parameter(torch.ones(1)), "3": 4},
    }


def assert_equal(found: Any, expected: Any) -> None:
    """The same value, of the same types but for kinds of dicts and parameters."""
    if isinstance(expected, Mapping):
        assert type(found) is dict
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert type(found) is type(expected)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)


@pytest.mark.parametrize("kind", ["uniform, transition, shared", "rollout, states"])
def test_the_state_of_the_learner_comes_back_with_the_experience(kind: str, tmp_path: Path) -> None:
    buffer, state = forger.KINDS[kind](), learner()
    assert buffer.extra is None
    buffer.save(tmp_path / "save", extra=state)
    loaded = type(buffer).load(tmp_path / "save")
    for found in (loaded.extra, relive.load_extra(tmp_path / "save")):
        assert_equal(found, state)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.load_state_dict(OrderedDict(loaded.extra["model"]))
    torch.optim.Adam(model.parameters()).load_state_dict(loaded.extra["optimizer"])
    buffer.save(tmp_path / "save")
    assert relive.load_extra(tmp_path / "save") is None


def test_load_extra_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forger.KINDS["prioritized, transition, shared"]().save(tmp_path / "save", extra={"x": torch.ones(3)})
    read = list[str]()
    genuine = persist.Save.read
    monkeypatch.setattr(
        persist.Save, "read", lambda *args, **more: read.extend(genuine(*args, **more)) or genuine(*args, **more)
    )
    assert relive.load_extra(tmp_path / "save")["x"].tolist() == [1.0] * 3
    assert read == [".extra.x"]


class Own(dict[str, Any]):
    """A dict of a kind that no save could rebuild."""


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
UNSTORABLE = [
    ({"a": {"b": object()}}, r"extra\['a'\]\['b'\]: .*object"),
    ({"a": [1, {2, 3}]}, r"extra\['a'\]\[1\]: .*set"),
    ({"a": {(1, 2): 3}}, r"extra\['a'\]: .*keys.*\(1, 2\)"),
    ({"a": {True: 3}}, r"extra\['a'\]: .*keys.*True"),
    ({"a": Own(b=1)}, r"extra\['a'\]: .*Own"),
    ({"a": torch.float32}, r"extra\['a'\]: .*dtype"),
    ({"a": lambda: 0}, r"extra\['a'\]: .*function"),
    ({"a": 1 + 2j}, r"extra\['a'\]: .*complex"),
    (CYCLE, "extra: .*nested too deep"),
    ({"a": torch.zeros(2, dtype=torch.complex128)}, r"extra\.a"),
    ({"a": np.array(["x"])}, r"extra\.a"),
    ({"a": torch.zeros(2).to_sparse()}, r"extra\.a"),
]


@pytest.mark.parametrize(("extra", "words"), UNSTORABLE)
def test_a_value_that_cannot_be_stored_is_refused_by_its_keys(extra: Any, words: str, tmp_path: Path) -> None:
    buffer = forger.KINDS["uniform, transition, shared"]()
    buffer.save(tmp_path / "save", extra={"k": 1})
    for path in (tmp_path / "save", tmp_path / "new"):
        with pytest.raises(ValueError, match=words):
            buffer.save(path, extra=extra)
    assert relive.load_extra(tmp_path / "save") == {"k": 1}
    assert not (tmp_path / "new").exists()


BAD_EXTRAS = [
    {"dict": 3}, {"dict": [[1]]}, {"dict": [["a", 1], ["a", 2]]}, {"dict": [[[1], 2]]}, {"dict": [[None, 2]]}, {},
    {"dict": [], "tuple": []}, {"tensor": "rows"}, {"tensor": []}, {"tensor": ".extra.y"}, {"float": "1e5"},
    {"float": []}, {"code": "import os"}, [{"tensor": ".extra.x"}, {"tensor": ".extra.x"}], {"scalar": ".extra.x"},
    {"bytes": ".extra.x"}, {"tuple": 5}, None,
]  # fmt: skip


@pytest.mark.parametrize("extra", BAD_EXTRAS)
def test_a_forged_state_of_the_learner_is_refused(extra: Any, tmp_path: Path) -> None:
    buffer = forger.KINDS["uniform, transition, shared"]()
    buffer.save(tmp_path / "good", extra={"x": torch.ones(3)})
    tensors, content = persist.read(tmp_path / "good")
    forger.write(tmp_path / "forged", tensors, json.dumps({**content, "extra": extra}))
    for load in (relive.load_extra, ReplayBuffer.load):
        with pytest.raises(FileFormatError):
            load(tmp_path / "forged")


def test_a_rollout_is_loaded_with_its_state_whatever_its_fields_are_called(tmp_path: Path) -> None:
    schema = relive.Schema({"extra": {"x": ()}, "obs": (), "reward": ()})
    rollout = RolloutBuffer(schema, 2, 1, seed=0)
    rollout.add(extra={"x": [3.0]}, obs=[1.0], reward=[0.0])
    rollout.save(tmp_path / "save", extra={"x": torch.ones(1)})
    loaded = RolloutBuffer.load(tmp_path / "save")
    assert loaded["extra", "x"].tolist() == [[3.0]]
    assert loaded.extra["x"].tolist() == [1.0]


# Another number of envs.


@pytest.mark.parametrize(("sampler", "num_envs"), covering(SAMPLERS, [1, 3, 7], full=2, quick=1))
def test_transitions_without_an_order_are_dealt_to_another_number_of_envs(
    num_envs: int, sampler: str, tmp_path: Path
) -> None:
    twin = feed(Twin(2, 20, dress="mixed", ordered=False, sampler=SAMPLERS[sampler]()), *PLAYS, *PLAYS)
    saved = twin.buffer
    if saved.has_priorities:
        index = saved.data()["index"]
        saved.update_priorities(index, torch.arange(len(index)) + 1.0)
    saved.save(tmp_path / "save", extra="learner")
    loaded = ReplayBuffer.load(tmp_path / "save", num_envs=num_envs)
    loaded.check()
    assert loaded.num_envs == num_envs
    assert loaded.extra == "learner"
    room = 40 // num_envs * num_envs
    found, expected = loaded.data(), saved.data().rows(slice(-room, None))
    for name in ("reward", "action", "terminated"):
        assert torch.equal(found[name], expected[name])
    assert torch.equal(found["obs", "camera"], expected["obs", "camera"])
    assert torch.equal(found["next_obs", "state"], expected["next_obs", "state"])
    if saved.has_priorities:
        sizes = [internals.errors(internals.prioritized(buffer)) for buffer in (loaded, saved)]
        places = [
            internals.ring(buffer).find(x["index"].numpy())[0] for buffer, x in ((loaded, found), (saved, expected))
        ]
        assert sizes[0][places[0]].tolist() == sizes[1][places[1]].tolist()
    step = expected.rows(slice(1)).apply(lambda value: value.expand(num_envs, *value.shape[1:]))
    step = {name: step[name] for name in (*saved.schema.names, "next_obs")}
    for _ in range(50):
        loaded.add(step)
        loaded.sample(4)
    loaded.check()
    loaded.save(tmp_path / "save")
    assert ReplayBuffer.load(tmp_path / "save").data()["index"].tolist() == loaded.data()["index"].tolist()


def test_another_number_of_envs_goes_with_a_capacity_and_changes(tmp_path: Path) -> None:
    saved = feed(Twin(2, 20, ordered=False), *PLAYS).buffer
    saved.save(tmp_path / "save")
    changes = SchemaChanges(add={"more": 1.0})
    loaded = ReplayBuffer.load(tmp_path / "save", num_envs=4, capacity=9, changes=changes, seed=5)
    loaded.check()
    assert len(loaded) == 8
    assert loaded.data()["reward"].tolist() == saved.data()["reward"][-8:].tolist()
    assert loaded.seed == 5
    assert len(ReplayBuffer.load(tmp_path / "save", num_envs=2)) == len(saved)
    for wrong in ({"num_envs": 0}, {"num_envs": 2.0}, {"num_envs": True}, {"num_envs": 8, "capacity": 15}):
        with pytest.raises(ParameterError, match=r"num_envs|capacity"):
            ReplayBuffer.load(tmp_path / "save", **wrong)


@pytest.mark.parametrize("mode", ["shared", "own"])
def test_steps_in_order_keep_their_number_of_envs(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"own_next_obs": True} if mode == "own" else {}
    feed(Twin(2, 20, **options), *PLAYS).buffer.save(tmp_path / "save")
    with pytest.raises(ParameterError, match="Mixture"):
        ReplayBuffer.load(tmp_path / "save", num_envs=3)
    assert ReplayBuffer.load(tmp_path / "save", num_envs=2).num_envs == 2
