"""``relive.RolloutBuffer``: filled, finished, read as permutations; against a naive list of steps and the oracle."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import relive
from relive import GAE, Field, RolloutBuffer, core, errors
from support import oracle
from support.rollouts import (
    NAN,
    SCHEMA,
    WITHOUT_VALUE,
    Step,
    all_ids,
    block_of,
    filled,
    holds,
    ids,
    play,
    same_data,
    stack,
    step,
    write_rows,
)

# Adding, and the columns


def test_added_steps_are_read_back_time_first_from_columns_with_a_row_more() -> None:
    steps = play(4, 3, masked=True)
    rollout = filled(steps)
    assert holds(rollout, steps)
    assert rollout.block["reward"].shape == (5, 3)
    assert rollout.data()["reward"].shape == (4, 3)
    assert rollout["obs"].shape == (4, 3, 2)
    assert same_data(rollout.data(), rollout.block.rows(slice(4)))


def test_a_step_may_come_as_a_mapping_as_keywords_or_as_both() -> None:
    rollout = RolloutBuffer(SCHEMA, 4, 2)
    given_ = step(3)
    rollout.add(given_)
    rollout.add(**given_)
    rollout.add({"obs": given_["obs"], "value": np.zeros(2)}, **{n: x for n, x in given_.items() if n != "obs"})
    rollout.add({name: torch.from_numpy(x) for name, x in given_.items()})
    assert holds(rollout, [given_] * 4)


def test_a_rollout_counts_its_steps_and_its_transitions() -> None:
    rollout = RolloutBuffer(SCHEMA, 3, 2)
    seen = []
    for t in range(3):
        seen.append((rollout.steps, len(rollout), rollout.is_full))
        rollout.add(step(t))
    seen.append((rollout.steps, len(rollout), rollout.is_full))
    assert seen == [(0, 0, False), (1, 2, False), (2, 4, False), (3, 6, True)]


def test_what_was_not_written_yet_is_not_read() -> None:
    rollout = filled([step(0), step(1)], num_steps=5)
    assert holds(rollout, [step(0), step(1)])
    assert ids(rollout.flat()) == all_ids(2)
    assert filled([step(0)], num_steps=5)["obs"].shape == (1, 2, 2)
    assert RolloutBuffer(SCHEMA, 5, 2)["obs"].shape == (0, 2, 2)


def test_columns_are_views_that_alias_the_storage_both_ways() -> None:
    rollout = filled([step(t) for t in range(3)])
    block, env_major, data = rollout.block, rollout.env_major, rollout.data()
    assert env_major["reward"].shape == (2, 4)
    assert env_major["obs"].shape == (2, 4, 2)
    env_major["reward"][1, 2] = 50
    assert rollout["reward"][2, 1] == block["reward"][2, 1] == data["reward"][2, 1] == 50
    rollout["obs"][0] = -1
    assert env_major["obs"][:, 0].tolist() == [[-1, -1], [-1, -1]]
    block["value"][3] = torch.tensor([7.0, 8.0])
    assert rollout.last["value"].tolist() == [7, 8]
    assert env_major["value"][:, 3].tolist() == [7, 8]
    data["action"][1] = 5
    assert rollout["action"][1].tolist() == [5, 5]


def test_the_keys_are_those_of_the_schema_the_bookkeeping_and_what_was_attached() -> None:
    rollout = filled([step(0)])
    assert rollout.keys() == (*SCHEMA.names, "mask", "final_value")
    rollout["advantage"] = torch.zeros(1, 2)
    assert rollout.keys() == (*SCHEMA.names, "mask", "final_value", "advantage")
    assert set(rollout.data().keys()) == set(rollout.keys()) == set(rollout.block.keys())
    assert "advantage" in rollout
    assert "advantages" not in rollout
    assert "final_value" not in RolloutBuffer(WITHOUT_VALUE, 1, 1).keys()
    with pytest.raises(errors.FieldError, match=r"did you mean 'advantage'.*log_prob"):
        _ = rollout["advantages"]


def test_a_full_rollout_refuses_a_step_and_says_what_to_do() -> None:
    rollout = filled([step(0), step(1)])
    for call in (lambda: rollout.add(step(2)), rollout.reserve, lambda: rollout.reserve(1)):
        with pytest.raises(errors.FullError, match=r"2 steps; call finish\(\) and clear\(\).*wrap=True"):
            call()
        assert holds(rollout, [step(0), step(1)])


@pytest.mark.parametrize(("steps", "envs"), [(0, 2), (2, 0), (-1, 2), (4.0, 2), (4, True)])
def test_a_rollout_without_room_is_refused(steps: int, envs: int) -> None:
    with pytest.raises(errors.ParameterError, match=r"RolloutBuffer\(num_(steps|envs)=.*at least 1"):
        RolloutBuffer(SCHEMA, steps, envs)


@pytest.mark.parametrize("name", ["mask", "final_value"])
def test_a_schema_that_uses_the_buffers_own_names_is_refused(name: str) -> None:
    with pytest.raises(errors.SchemaError, match=rf"'{name}'.*leave it out"):
        RolloutBuffer(SCHEMA.extend(**{name: ()}), 1, 1)


def test_the_repr_of_a_rollout_is_the_call_that_rebuilds_it() -> None:
    rollout = RolloutBuffer(SCHEMA, 3, 2, wrap=True, debug=True)
    again = eval(repr(rollout), vars(relive) | {"torch": torch})
    assert repr(again) == repr(rollout)
    for each in (rollout, again):
        each.add(step(0))
    assert ids(rollout.sample(2)) == ids(again.sample(2))


def test_lengths_beyond_all_episodes_are_whole_episodes() -> None:
    rollout = filled([step(0), step(1)])
    for length, overlap in ((2**70, "none"), (2**70, 2**69), (2**40, "half")):
        (seq,) = rollout.sequences(length, overlap=cast("Any", overlap), shuffle=False)
        (whole,) = rollout.sequences(shuffle=False)
        assert torch.equal(seq.flat(seq["value"]), whole.flat(whole["value"]))


def test_sizes_and_seeds_of_numpy_are_saved(tmp_path: Path) -> None:
    rollout = RolloutBuffer(SCHEMA, cast("Any", np.int64(2)), cast("Any", np.int32(2)), seed=cast("Any", np.uint8(3)))
    rollout.save(tmp_path / "rollout")
    assert (rollout.num_steps, rollout.num_envs, rollout.seed) == (2, 2, 3)
    assert repr(RolloutBuffer.load(tmp_path / "rollout")) == repr(rollout)


# Everything at once, beside a naive twin


BOOLS = st.lists(st.booleans(), min_size=2, max_size=2)
ROWS = st.tuples(BOOLS, BOOLS, st.none() | BOOLS)  # terminated, truncated, mask


class RolloutBesideAList(RuleBasedStateMachine):
    """Random operations on a rollout of two envs and on a list of steps; both must always read alike."""

    @initialize(num_steps=st.integers(1, 4), wrap=st.booleans(), seed=st.integers(0, 3))
    def start(self, num_steps: int, wrap: bool, seed: int) -> None:
        self.rollout = RolloutBuffer(SCHEMA, num_steps, 2, wrap=wrap, debug=True, seed=seed)
        self.capacity, self.wrap, self.seed = num_steps, wrap, seed
        self.steps: list[Step] = []
        self.attached: dict[str, np.ndarray] = {}
        self.last: np.ndarray | None = None
        self.played = self.draws = 0

    def next_step(self, terminated: list[bool], truncated: list[bool], mask: list[bool] | None, final: bool) -> Step:
        self.played += 1
        more: Step = {} if mask is None else {"mask": np.array(mask)}
        if final:
            cut = np.array(truncated) & ~np.array(terminated)
            more["final_value"] = np.where(cut, self.played + 0.25, np.nan)
        return step(self.played, terminated=np.array(terminated), truncated=np.array(truncated), **more)

    def took(self, steps: list[Step]) -> None:
        self.steps = (self.steps + steps)[-self.capacity :]
        self.attached, self.last = {}, None

    def room(self) -> bool:
        return self.wrap or len(self.steps) < self.capacity

    @rule(rows=st.lists(ROWS, min_size=1, max_size=6), final=st.booleans(), as_torch=st.booleans())
    def add(self, rows: list[Any], final: bool, as_torch: bool) -> None:
        for row in rows:
            new = self.next_step(*row, final)
            given_ = {name: torch.from_numpy(x) for name, x in new.items()} if as_torch else new
            if not self.room():
                with pytest.raises(errors.FullError):
                    self.rollout.add(given_)
                return
            self.rollout.add(given_)
            self.took([new])

    @rule(
        bad=st.sampled_from([
            {"reward": np.array([1, NAN])}, {"obs": np.zeros((2, 3))}, {"value": torch.zeros(2, device="meta")},
            {"action": np.zeros(2)}, {"extra": 1}, {"mask": np.zeros(3, bool)}, {"final_value": "x"},
        ]),
        mask=BOOLS,
    )  # fmt: skip
    def add_what_does_not_fit(self, bad: Step, mask: Any) -> None:
        with pytest.raises(errors.ReliveError):
            self.rollout.add(step(99, mask=np.array(mask), final_value=np.full(2, 99.0)) | bad)

    @rule(data=st.data(), final=st.booleans(), last=st.booleans())
    def write_in_place(self, data: st.DataObject, final: bool, last: bool) -> None:
        if not self.room():
            with pytest.raises(errors.FullError):
                self.rollout.reserve()
            return
        full = len(self.steps) == self.capacity
        views = self.rollout.reserve(None if full else data.draw(st.integers(1, self.capacity - len(self.steps))))
        count = len(views) if full else data.draw(st.integers(0, len(views)))
        new = [self.next_step(*data.draw(ROWS), final) for _ in range(count)]
        garbage = step(99, mask=np.zeros(2, bool), final_value=np.full(2, 99.0))
        write_rows(views, new + [garbage] * (len(views) - count))
        if not count:
            return  # the rows are given back by whatever comes next
        end = self.rollout.num_steps if full or len(self.steps) + count == self.capacity else len(self.steps) + count
        if last:
            self.rollout.block["value"][end] = torch.tensor([5.0, 6.0])
        self.rollout.commit(count, last=last)
        self.took(new)
        self.last = np.array([5.0, 6.0]) if last else None

    @rule(value=st.floats(-9, 9, width=32), obs=st.booleans())
    def set_last(self, value: float, obs: bool) -> None:
        self.rollout.set_last(value=[value, -value], **({"obs": np.full((2, 2), value)} if obs else {}))
        self.last = np.array([value, -value])

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), env=st.integers(0, 1), value=st.floats(-9, 9, width=32))
    def set_final_value(self, data: st.DataObject, env: int, value: float) -> None:
        t = data.draw(st.integers(0, len(self.steps) - 1))
        self.rollout.set_final_value([t], [env], [value])
        final = self.steps[t].get("final_value", np.full(2, np.nan)).copy()
        final[env] = value
        self.steps[t] = self.steps[t] | {"final_value": final}

    @rule(name=st.sampled_from(["extra", "reward"]), seed=st.integers(0, 99))
    def attach(self, name: str, seed: int) -> None:
        column = np.random.default_rng(seed).normal(size=(len(self.steps), 2)).astype(np.float32)
        self.rollout[name] = column
        if name == "extra":
            self.attached[name] = column
        else:
            self.steps = [each | {"reward": row} for each, row in zip(self.steps, column, strict=True)]

    @rule(masks=st.lists(BOOLS, min_size=4, max_size=4))
    def set_mask(self, masks: Any) -> None:
        masks = np.array(masks)[: len(self.steps)]
        self.rollout["mask"] = masks
        self.steps = [each | {"mask": row} for each, row in zip(self.steps, masks, strict=True)]

    @rule()
    def clear(self) -> None:
        self.rollout.clear()
        self.steps, self.attached, self.last = [], {}, None

    @rule(partial=st.booleans())
    def finish(self, partial: bool) -> None:
        if not self.steps:
            with pytest.raises(errors.EmptyError):
                self.rollout.finish(GAE(), partial=partial)
            return
        newest = self.steps[-1]
        real = stack(self.steps, "mask")
        missing = stack(self.steps, "truncated") & ~stack(self.steps, "terminated") & real
        missing &= np.isnan(stack(self.steps, "final_value"))
        if not (partial or self.wrap or len(self.steps) == self.capacity) or (
            self.last is None and (~(newest["terminated"] | newest["truncated"]) & real[-1]).any()
        ):
            with pytest.raises(errors.UnfinishedError):
                self.rollout.finish(GAE(), partial=partial)
        elif missing.any():
            with pytest.raises(errors.FieldError, match="final_value"):
                self.rollout.finish(GAE(), partial=partial)
        else:
            self.rollout.finish(GAE(), partial=partial)
            block = block_of(self.steps)
            block["value"][-1] = np.zeros(2) if self.last is None else self.last
            advantage, ret = oracle.gae(**block)
            np.testing.assert_allclose(self.rollout["advantage"], advantage, rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(self.rollout["return"], ret, rtol=1e-4, atol=1e-3)
            for name in ("advantage", "return"):
                self.attached[name] = self.rollout[name].numpy().copy()

    @rule(size=st.integers(1, 9), epochs=st.integers(1, 2))
    def minibatches(self, size: int, epochs: int) -> None:
        if not self.steps:
            with pytest.raises(errors.EmptyError):
                self.rollout.minibatches(size)
            return
        rows = stack(self.steps, "action")[stack(self.steps, "mask")].tolist()
        batches = list(self.rollout.minibatches(size, epochs=epochs))
        per_epoch = math.ceil(len(rows) / size)
        assert len(batches) == per_epoch * epochs
        for k in range(epochs):
            order = core.permutation(len(rows), self.seed, self.draws)
            assert ids(batches[k * per_epoch : (k + 1) * per_epoch]) == [rows[i] for i in order]
            self.draws += 1

    @invariant()
    def both_read_alike(self) -> None:
        if not hasattr(self, "rollout"):
            return
        rollout, steps = self.rollout, self.steps
        assert holds(rollout, steps)
        assert rollout.is_full == (len(steps) == self.capacity)
        assert sorted(rollout.keys()) == sorted([*SCHEMA.names, "mask", "final_value", *self.attached])
        for name, column in self.attached.items():
            assert np.array_equal(rollout[name], column)
        if steps:
            real = stack(steps, "mask")
            assert len(rollout) == real.sum()
            flat = rollout.flat()
            assert ids(flat) == stack(steps, "action")[real].tolist()
            for name, column in self.attached.items():
                assert flat[name].tolist() == column[real].tolist()
        else:
            assert len(rollout) == 0


RolloutBesideAList.TestCase.settings = settings(stateful_step_count=30)
TestRolloutBesideAList = RolloutBesideAList.TestCase


# -- fields that come later, and copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("before", [0, 2, 5])
def test_a_field_that_comes_later_is_zero_before_and_moves_nothing_else(before: int, wrap: bool) -> None:
    first, later = play(before, seed=1), play(5 - before + 3 * wrap, seed=2)
    rollout = RolloutBuffer(SCHEMA, 5, 2, wrap=wrap, seed=0)
    for each in first:
        rollout.add(each)
    if first:
        rollout["extra"] = torch.arange(2.0 * before).view(before, 2)
    where = rollout.block["obs"].data_ptr()
    rollout.add_fields(more={"a": (3,), "b": Field((), torch.int64)})
    assert rollout.block["obs"].data_ptr() == where
    assert not first or torch.equal(rollout["extra"], torch.arange(2.0 * before).view(before, 2))
    extended = [{**each, "more": {"a": np.full((2, 3), t + 1.0), "b": [t + 1, 0]}} for t, each in enumerate(later)]
    for each in extended:
        rollout.add(each)
    kept = [*first, *later][-5:]
    assert holds(rollout, kept)
    numbers = [*[0] * before, *range(1, len(later) + 1)][-5:]
    assert rollout["more", "b"][:, 0].tolist() == numbers
    assert rollout["more", "a"][:, 1, 2].tolist() == numbers
    assert rollout.schema.names[-1] == "more"
    if not rollout.is_full or wrap:
        with pytest.raises(errors.FieldError, match="lacks 'more'"):
            rollout.add(later[0])
    for taken in ("obs", "mask", "final_value", "more"):
        with pytest.raises(errors.SchemaError, match="such a column already"):
            rollout.add_fields(**{taken: ()})


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_pickled_rollout_is_one_of_its_own_that_goes_on_alike(count: int) -> None:
    rollout = RolloutBuffer(SCHEMA, 5, 2, wrap=True, seed=0)
    for each in play(count):
        rollout.add(each)
    if count:
        rollout["extra"] = torch.arange(2.0 * rollout.steps).view(-1, 2)
        list(rollout.minibatches(3))
    for again in (pickle.loads(pickle.dumps(rollout)), copy.deepcopy(rollout)):
        original = copy.deepcopy(rollout)
        assert same_data(again.block, original.block)
        for each in play(2, seed=7):
            again.add(each)
            original.add(each)
        assert same_data(again.data(), original.data())
        assert holds(again, [*play(count), *play(2, seed=7)][-5:])
        assert [ids(x) for x in again.minibatches(3)] == [ids(x) for x in original.minibatches(3)]
    assert holds(rollout, play(count)[-5:])


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_loaded_rollout_knows_whether_its_last_episodes_were_interrupted(interrupted: bool, tmp_path: Path) -> None:
    flags = {"terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
    rollout = RolloutBuffer(relive.Schema({"obs": (1,), "reward": (), **flags}), 2, 1)
    one = {"obs": [[0.0]], "reward": [0.0], "terminated": [False], "truncated": [False]}
    for _ in range(2):  # it is full then, so its rows stay as they are
        rollout.add(one)
    if interrupted:
        rollout.interrupt()
    rollout.save(tmp_path / "rollout")
    for each in (rollout, RolloutBuffer.load(tmp_path / "rollout")):
        each.clear()
        for _ in range(2):
            each.add(one)
        (seq,) = each.sequences(2)
        assert bool(seq["is_start"][0, 0]) == interrupted
