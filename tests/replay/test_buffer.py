"""The replay buffer: adding, drawing, rating, clearing, in any order, beside a naive twin; and what it refuses."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

import oracle
import tagged
from relive import (
    Collector,
    Field,
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Sequence,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive.errors import DTypeError, EmptyError, FieldError, NotFiniteError, ParameterError, SchemaError, ShapeError
from twins import DRESSES, POISON, SAMPLERS, UNEVEN, VIEWS, Twin, contents, mapped, same_batches, stacked, uneven

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
PLAIN = Schema({"obs": (2,), "action": Field((), torch.int64), "reward": (), **FLAGS})


def random_plays(seed: int, num_envs: int, count: int, letters: str = ".....TUB") -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(letters), num_envs)) for _ in range(count)]


# A random walk.


class Walk(RuleBasedStateMachine):
    """Any calls in any order; after each, the invariants and everything the twin can tell."""

    @initialize(
        num_envs=st.integers(1, 3),
        rows=st.integers(2, 9),
        sampler=st.sampled_from(sorted(SAMPLERS)),
        view=st.sampled_from(sorted(VIEWS)),
        dress=st.sampled_from(["box", "dict", "mixed"]),
    )
    def create(self, num_envs: int, rows: int, sampler: str, view: str, dress: str) -> None:
        self.twin = Twin(num_envs, rows, dress=dress, sampler=SAMPLERS[sampler](), view=VIEWS[view]())
        self.buffer = self.twin.buffer
        inner = getattr(self.buffer.sampler, "inner", self.buffer.sampler)
        self.rated = inner if isinstance(inner, Prioritized) else None
        self.known = oracle.Priorities()
        self.issued: list[int] = []
        self.late = self.drawn = self.batches = 0

    def see(self) -> None:
        self.known.see([self.twin.truth.index(row) for row in self.twin.anchors()])

    def letters(self, data: st.DataObject, count: int) -> str:
        return data.draw(st.text("....TUB", min_size=count, max_size=count))

    @rule(data=st.data())
    def step_all(self, data: st.DataObject) -> None:
        self.twin.add(self.letters(data, self.twin.num_envs))

    @rule(data=st.data())
    def step_some(self, data: st.DataObject) -> None:
        envs = data.draw(st.lists(st.integers(0, self.twin.num_envs - 1), unique=True))
        self.twin.add(self.letters(data, len(envs)), envs)

    @rule(data=st.data())
    def step_with_a_mask(self, data: st.DataObject) -> None:
        envs = data.draw(st.permutations(range(self.twin.num_envs)))
        mask = data.draw(st.lists(st.booleans(), min_size=len(envs), max_size=len(envs)))
        self.twin.add(self.letters(data, len(envs)), envs, mask)

    @rule(data=st.data(), count=st.integers(1, 12), masked=st.booleans())
    def step_many(self, data: st.DataObject, count: int, masked: bool) -> None:
        plays = [self.letters(data, self.twin.num_envs) for _ in range(count)]
        masks = None
        if masked:
            row = st.lists(st.integers(0, 4).map(bool), min_size=self.twin.num_envs, max_size=self.twin.num_envs)
            masks = [data.draw(row) for _ in range(count)]
        self.twin.extend(plays, masks)

    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        envs = data.draw(st.none() | st.lists(st.integers(0, self.twin.num_envs - 1), unique=True))
        self.twin.interrupt(envs)

    @rule(maybe=st.integers(0, 3))
    def clear(self, maybe: int) -> None:
        if not maybe:
            self.twin.clear()

    @rule(size=st.integers(1, 9), of=st.integers(1, 3))
    def sample(self, size: int, of: int) -> None:
        anchors = self.twin.anchors()
        too_many = isinstance(self.buffer.sampler, WithoutReplacement) and size > len(anchors)
        if not anchors or too_many:
            with pytest.raises(ParameterError if anchors else EmptyError):
                self.buffer.sample(size)
            return
        for k, batch in enumerate(self.buffer.batches(of, size), start=1):
            among = None
            if isinstance(self.buffer.sampler, Recent):
                eta, c_min = self.buffer.sampler.eta, self.buffer.sampler.c_min
                among = anchors[-oracle.recent_count(len(anchors), eta, c_min, k, of) :]
            assert len(batch) == size
            self.twin.check_batch(batch, among=among)
            if self.rated is not None:
                chosen = None if among is None else [self.twin.truth.index(row) for row in among]
                chances = self.known.probabilities(self.rated.alpha, self.rated.eps, chosen)
                want = [chances[i] for i in batch["index"].tolist()]
                assert batch["probability"].tolist() == pytest.approx(want, rel=1e-6)
            self.issued += batch["index"].tolist()
            self.drawn, self.batches = self.drawn + size, self.batches + 1

    @precondition(lambda self: self.rated is not None and self.issued)
    @rule(data=st.data())
    def rate(self, data: st.DataObject) -> None:
        index = data.draw(st.lists(st.sampled_from(self.issued), max_size=8))
        errors = data.draw(st.lists(st.floats(-50, 50, width=32), min_size=len(index), max_size=len(index)))
        late = self.buffer.update_priorities(np.array(index, np.int64), np.array(errors))
        assert late == self.known.update(index, errors)
        self.late += late

    @rule(view=st.sampled_from(sorted(VIEWS)))
    def look_otherwise(self, view: str) -> None:
        self.buffer.view = VIEWS[view]()

    @rule(n=st.integers(1, 6), gamma=st.sampled_from([0.0, 0.5, 1.0]))
    def change_the_window(self, n: int, gamma: float) -> None:
        window = getattr(self.buffer.view, "window", self.buffer.view)
        window.n, window.gamma = n, gamma

    @precondition(lambda self: isinstance(self.buffer.view, FrameStack))
    @rule(depth=st.integers(1, 6))
    def change_the_depth(self, depth: int) -> None:
        self.buffer.view.depth = depth

    @precondition(lambda self: self.rated is not None)
    @rule(alpha=st.sampled_from([0.0, 0.6, 1.0, 1.5]), beta=st.sampled_from([0.0, 0.4, 1.0]))
    def change_the_exponents(self, alpha: float, beta: float) -> None:
        self.rated.alpha, self.rated.beta = alpha, beta

    @rule()
    def ask_for_what_is_not_there(self) -> None:
        before = contents(self.buffer)
        with pytest.raises(ParameterError):
            self.buffer.sample(0)
        for wrong in (lambda: self.buffer.add(reward=[1.0]), lambda: self.buffer.extend({})):
            with pytest.raises(SchemaError):
                wrong()
        if self.rated is not None:
            with pytest.raises(ParameterError):
                self.buffer.update_priorities([10**9], [1.0])
            with pytest.raises(NotFiniteError):
                self.buffer.update_priorities([0], [math.nan])
        assert contents(self.buffer) == before

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "twin"):
            return
        self.twin.check()
        self.see()
        if self.rated is not None:
            want = self.known.probabilities(self.rated.alpha, self.rated.eps)
            index = self.buffer._ring.index_of(self.buffer._ring.anchors()).tolist()
            got = self.rated.priorities()
            total = got.sum()
            assert (got / total).tolist() == pytest.approx([want[i] for i in index], rel=1e-6)
            self.rated._tree.check()
        stats = self.buffer.stats()
        assert stats["late_updates"] == self.late
        assert stats["sampled"] == self.drawn
        assert stats["batches"] == self.batches
        assert stats["size"] == len(self.twin.anchors())
        assert stats["completed"] == len(self.twin.truth.completed)


Walk.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_a_random_walk_keeps_every_invariant_and_agrees_with_the_naive_twin = Walk.TestCase


@pytest.mark.slow
class TestALongWalk(Walk.TestCase):
    """The same with many more and longer walks."""

    settings = settings(max_examples=400, stateful_step_count=60)


# Adding.


def test_steps_are_taken_as_mappings_keywords_arrays_tensors_lists_and_tensordicts() -> None:
    play = ["..", ".T", "U.", ".."]
    twin = Twin(2, 8).play(*play)

    def nested(step: dict[str, Any]) -> TensorDict:
        return TensorDict(mapped(torch.as_tensor, step), batch_size=[2])

    ways: list[Callable[[ReplayBuffer, dict[str, Any]], None]] = [
        lambda buffer, step: buffer.add(**step),
        lambda buffer, step: buffer.add({"obs": step["obs"]}, **{n: x for n, x in step.items() if n != "obs"}),
        lambda buffer, step: buffer.add(mapped(torch.as_tensor, step)),
        lambda buffer, step: buffer.add(mapped(lambda x: torch.as_tensor(x.tolist(), dtype=torch.float64).to(
            torch.bool if x.dtype == bool else torch.int64 if x.dtype == np.int64 else torch.float32), step)),
        lambda buffer, step: buffer.add(nested(step)),
        lambda buffer, step: buffer.add({n: x if "obs" in n else x.tolist() for n, x in step.items()}),
        lambda buffer, step: buffer.add(mapped(np.asfortranarray, step)),
        lambda buffer, step: buffer.add({**step, "reward": step["reward"].astype(np.float64)}),
    ]  # fmt: skip
    for way in ways:
        other = Twin(2, 8)
        for kinds in play:
            way(other.buffer, other.step(kinds))
        other.check()
        assert same_batches(other.buffer.data(), twin.buffer.data())


def test_a_step_is_not_changed_by_adding_it_and_is_not_kept() -> None:
    twin = Twin(2, 8, dress="mixed")
    step = twin.step("T.")
    step["mask"] = np.array([True, True])
    before = mapped(np.copy, step)
    twin.buffer.add(step)
    assert mapped(np.array_equal, step, before) == mapped(lambda _: True, step)
    mapped(lambda x: x.fill(POISON), step)
    twin.add("..")
    twin.check()


def test_with_one_env_the_leading_axis_may_be_left_out() -> None:
    for dress in DRESSES:
        twin, other = Twin(1, 8, dress=dress), Twin(1, 8, dress=dress)
        for kinds in "..T.U..":
            twin.add(kinds)
            step = other.step(kinds)
            other.buffer.add(mapped(lambda x: x[0], step))
        other.check()
        assert same_batches(twin.buffer.data(), other.buffer.data())


@pytest.mark.parametrize("dress", DRESSES)
def test_asynchronous_envs_step_at_any_pace_and_in_any_order(dress: str) -> None:
    rng = np.random.default_rng(0)
    twin = Twin(4, 6, dress=dress, sampler=Prioritized())
    for t in range(50):
        envs = rng.permutation(4)[: int(rng.integers(0, 5))].tolist()
        twin.add("".join(rng.choice(list("....TUB"), len(envs))), envs)
        if t % 10 == 9:
            twin.check()
            twin.check_batch(twin.buffer.sample(16))


def test_a_masked_row_is_not_stored_and_nothing_is_joined_across_it() -> None:
    twin = Twin(3, 8).play("...", "...")
    heads = twin.buffer._ring.heads.copy()
    twin.add("...", mask=[True, False, True])
    assert (twin.buffer._ring.heads - heads).tolist() == [1, 0, 1]
    twin.add("...")
    twin.check()
    assert len(twin.buffer) == 3 + 1 + 3
    twin.add("TUB", mask=[False, False, False])
    twin.check()
    assert POISON not in twin.buffer.data()["obs"]


@pytest.mark.parametrize("at_once", [False, True])
def test_the_step_before_a_masked_time_limit_is_kept_with_the_observation_it_led_to(at_once: bool) -> None:
    twin = Twin(2, 20, view=NStep(2, 0.5), sampler=Prioritized())
    plays = ["..", "..", "U.", "..", ".U", "..", "..", "..", "UU", "..", ".."]
    masks = [[letter != "U" for letter in kinds] for kinds in plays]
    if at_once:
        twin.extend(plays, masks)
    else:
        for kinds, mask in zip(plays, masks, strict=True):
            twin.add(kinds, mask=mask)
    twin.check()
    # of each env's eleven steps two are masked, and the newest is not known to lead anywhere yet
    assert len(twin.buffer) == 2 * (11 - 2 - 1)
    data = twin.buffer.data()
    assert not (data["truncated"] | data["terminated"]).any()
    twin.check_batch(twin.buffer.sample(32))


def test_a_masked_time_limit_after_no_step_is_left_out_whole() -> None:
    twin = Twin(1, 9)
    twin.add("U", mask=[False])
    twin.play("T")
    twin.add("U", mask=[False])
    twin.extend([".", "U", "U", "U"], [[True], [False], [False], [False]])
    assert twin.buffer._ring.heads.tolist() == [4]  # a step and what it ended on; a step and what it led to
    twin.check()
    assert len(twin.buffer) == 2


def test_a_masked_time_limit_is_found_among_steps_of_own_next_observations() -> None:
    step = {"obs": np.zeros((1, 2)), "action": [0], "reward": [1.0], "terminated": [False], "next_obs": np.ones((1, 2))}
    for options in ({"own_next_obs": True}, {"ordered": False}):
        buffer = ReplayBuffer(PLAIN, 9, **options)
        buffer.add(step, truncated=[False])
        buffer.add(step, truncated=[True], mask=np.array([False]))
        assert len(buffer) == 1  # what the first led to it told itself
        assert buffer._ring.heads.tolist() == [1]


@pytest.mark.parametrize("wrap", [lambda x: x, np.bool_, torch.tensor, lambda x: [x], lambda x: np.array([x])])
def test_with_one_env_a_mask_may_be_a_single_bool(wrap: Callable[[bool], Any]) -> None:
    buffer = ReplayBuffer(PLAIN, 9)
    step = {"obs": [0.0, 1.0], "action": 0, "reward": 1.0, "terminated": False, "truncated": False}
    for kept in (True, True, False, True):
        buffer.add(step, mask=wrap(kept))
    assert buffer._ring.heads.tolist() == [3]
    assert len(buffer) == 1
    several = ReplayBuffer(PLAIN, 18, 2)
    with pytest.raises(ShapeError, match=r"mask: expected bool \(2,\), got bool \(\)"):
        several.add({name: np.stack([value, value]) for name, value in step.items()}, mask=True)


def test_a_mask_may_leave_rows_out_of_fields_of_every_dtype_and_size() -> None:
    schema = Schema({"obs": (2,), "reward": (), **FLAGS, "half": Field((3,), torch.bfloat16), "large": (400,)})
    buffer = ReplayBuffer(schema, 12, 3)
    for t in range(3):
        buffer.add(
            obs=torch.full((3, 2), float(t)),
            reward=torch.arange(3.0),
            terminated=torch.tensor([False, t == 2, False]),
            truncated=torch.zeros(3, dtype=torch.bool),
            half=torch.arange(9).reshape(3, 3).to(torch.bfloat16),
            large=torch.arange(1200.0).reshape(3, 400),
            next_obs=torch.full((3, 2), 50.0 + t),
            mask=torch.tensor([True, True, False]),
        )
    batch = buffer.data()
    assert sorted((batch["index"] % 3).tolist()) == [0, 0, 1, 1, 1]
    for item in batch:
        env = int(item["index"]) % 3
        assert item["half"].tolist() == [3.0 * env, 3.0 * env + 1, 3.0 * env + 2]
        assert item["large"][0] == 400 * env


@pytest.mark.parametrize("seed", range(6))
def test_extend_is_a_loop_of_add(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rows = int(rng.integers(1, 4)), int(rng.integers(2, 9))
    for dress in ("box", "mixed"):
        one, other = (
            Twin(num_envs, rows, dress=dress, sampler=Prioritized(), view=FrameStack(2, NStep(2, 0.5)))
            for _ in range(2)
        )
        for round_ in range(4):
            plays = random_plays(seed * 10 + round_, num_envs, int(rng.integers(1, 40)))
            masks = (rng.random((len(plays), num_envs)) < 0.8).tolist() if round_ % 2 else None
            for t, kinds in enumerate(plays):
                one.add(kinds, mask=None if masks is None else masks[t])
            other.extend(plays, masks)
            one.check()
            other.check()
            # the bytes of boundary rows that mean nothing may differ; the batches may not
            assert same_batches(one.buffer.data(), other.buffer.data())
            if len(one.buffer):
                assert same_batches(one.buffer.sample(9), other.buffer.sample(9))
                index = one.buffer.sample(5)["index"]
                errors = torch.linspace(0, 3, 5)
                assert one.buffer.update_priorities(index, errors) == other.buffer.update_priorities(index, errors)
                other.buffer.sample(5)


def test_extend_takes_some_envs_tensors_and_many_more_steps_than_there_are_rows() -> None:
    one, other = Twin(3, 5), Twin(3, 5)
    plays = random_plays(0, 2, 200)
    steps = []
    for kinds in plays:
        one.add(kinds, [2, 0])
        steps.append(other.step(kinds, [2, 0], final=True))
    other.buffer.extend(mapped(torch.as_tensor, stacked(steps)), envs=[2, 0])
    one.check()
    other.check()
    assert same_batches(one.buffer.data(), other.buffer.data())


@pytest.mark.parametrize("masked", [False, True])
def test_a_few_steps_of_one_env_among_many_are_stored_one_after_another(masked: bool) -> None:
    one, other = (Twin(4, 2, view=NStep(2, 0.5)) for _ in range(2))
    for kinds in (["U", ".", "T"], [".", ".", "."], [".", "B", "."]):
        steps = [one.step(kind, [2], final=True) for kind in kinds]
        masks = [[True], [not masked], [True]]
        for step, mask in zip(steps, masks, strict=True):
            one.buffer.add(step, envs=[2], mask=np.array(mask))
        other.buffer.extend(mapped(torch.as_tensor, stacked(steps)) | {"mask": np.array(masks)}, envs=[2])
        other.buffer.check()
        assert same_batches(one.buffer.slice(2), other.buffer.slice(2))
        assert same_batches(one.buffer.data(), other.buffer.data())


@pytest.mark.parametrize("as_given", [torch.zeros, np.zeros])
def test_extend_takes_fields_that_have_no_elements(as_given: Callable[[tuple[int, ...]], Any]) -> None:
    replay = ReplayBuffer(PLAIN.extend(obs={"place": (2,), "nothing": (0, 3)}), 100, num_envs=2)
    replay.extend(
        {
            "obs": {"place": as_given((5, 2, 2)), "nothing": as_given((5, 2, 0, 3))},
            "action": np.zeros((5, 2), np.int64),
            "reward": as_given((5, 2)),
            "terminated": np.zeros((5, 2), np.bool_),
            "truncated": np.zeros((5, 2), np.bool_),
        }
    )
    assert replay.data()["obs", "nothing"].shape == (8, 0, 3)


def test_extending_by_nothing_is_nothing() -> None:
    twin = Twin(2, 5).play("..", "..")
    step = twin.step("..", final=True)
    before = contents(twin.buffer)
    twin.buffer.extend(mapped(lambda x: x[None][:0], step))
    assert contents(twin.buffer) == before


def test_what_an_interruption_leaves_behind_is_never_drawn() -> None:
    twin = Twin(2, 9).play("..", "..", "|", "..", "..")
    twin.check()
    assert len(twin.buffer) == 4
    twin.interrupt([1])
    twin.add("..")
    twin.add("..")
    twin.check()
    assert len(twin.buffer) == 4 + 2 + 1
    twin.interrupt([])
    twin.interrupt()
    twin.interrupt()
    twin.play("T.", "|", "..")  # after an end there is nothing to interrupt
    twin.check()


def test_after_a_clear_it_is_as_good_as_new_but_for_its_numbers() -> None:
    for sampler in SAMPLERS.values():
        twin = Twin(2, 6, sampler=sampler()).play(*random_plays(1, 2, 15))
        twin.buffer.sample(2)
        numbers = twin.buffer._ring.heads.copy()
        twin.clear()
        assert len(twin.buffer) == 0
        assert len(twin.buffer.data()) == 0
        assert twin.buffer.stats()["size"] == 0
        with pytest.raises(EmptyError):
            twin.buffer.sample(1)
        twin.clear()
        twin.play("..", ".T", "..")
        twin.check()
        assert twin.buffer.data()["index"].min() // 2 >= numbers.min()
        twin.check_batch(twin.buffer.sample(3))


# Steps without order.


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_steps_without_order_are_drawn_as_they_were_given(sampler: str, dress: str) -> None:
    twin = Twin(2, 6, dress=dress, ordered=False, sampler=SAMPLERS[sampler](), view=Transition(0.5))
    for t, kinds in enumerate(random_plays(0, 2, 20)):
        twin.add(kinds)
        assert len(twin.buffer) == min(2 * (t + 1), 12)  # complete at once, a row each
        twin.check()
        batch = twin.buffer.sample(2)
        among = None
        if isinstance(twin.buffer.sampler, Recent):
            anchors = twin.anchors()
            among = anchors[-oracle.recent_count(len(anchors), 0.9, 2, 1, 1) :]
        twin.check_batch(batch, among=among)
        assert torch.equal(batch["next_index"], batch["index"])


def test_steps_without_order_need_no_successor_and_each_a_next_obs() -> None:
    buffer = ReplayBuffer(PLAIN, 4, ordered=False, seed=0)
    step = {"obs": [[1, 2]], "action": [3], "reward": [4], "terminated": [False], "truncated": [False]}
    with pytest.raises(FieldError, match="next_obs"):
        buffer.add(step)
    buffer.add({**step, "next_obs": [[5, 6]]})
    batch = buffer.sample(2)
    assert batch["next_obs"].tolist() == [[5, 6]] * 2
    assert batch["discount"].tolist() == pytest.approx([0.99] * 2)
    buffer.add({**step, "next_obs": [[7, 8]]}, mask=np.array([False]))
    assert len(buffer) == 1
    for _ in range(9):
        buffer.add({**step, "terminated": [True], "next_obs": [[7, 8]]})
    assert len(buffer) == 4
    assert buffer.data()["index"].tolist() == [6, 7, 8, 9]
    assert buffer.data()["discount"].tolist() == [0.0] * 4
    buffer.interrupt()
    buffer.check()
    buffer.clear()
    buffer.check()
    assert len(buffer) == 0


def test_many_steps_without_order_are_added_at_once() -> None:
    one, other = (Twin(2, 7, ordered=False, sampler=Prioritized()) for _ in range(2))
    plays = random_plays(5, 2, 23)
    for kinds in plays:
        one.add(kinds)
    other.extend(plays)
    one.check()
    other.check()
    assert contents(one.buffer) == contents(other.buffer)


# Through the collector, in all three autoreset modes.


class Blind(VectorWrapper):
    """A vector env that keeps its final observations to itself."""

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        hidden = ("final_obs", "_final_obs", "final_info", "_final_info")
        return obs, reward, terminated, truncated, {name: x for name, x in info.items() if name not in hidden}


def collected(
    mode: AutoresetMode,
    endings: tagged.Endings,
    steps: int,
    rows: int,
    num_envs: int = 3,
    dress: str = "box",
    blind: bool = False,
    **options: Any,
) -> Twin:
    """A buffer that a collector filled with vector steps, and an oracle told what the envs really did."""
    twin = Twin(num_envs, rows, dress=dress, **options)
    observations: Any = dress
    envs: VectorEnv = tagged.make_tagged(num_envs, mode, endings, observations=observations)
    collector = Collector(
        Blind(envs) if blind else envs, tagged.tagged_policy, twin.buffer, final_obs="mask" if blind else "require"
    )
    stats = [collector.collect(min(4, steps - done)) for done in range(0, steps, 4)]
    lives = [tagged.Life(env, observations=observations) for env in range(num_envs)]
    episode, at, resets, real = [0] * num_envs, [0] * num_envs, [False] * num_envs, 0
    for _ in range(steps):
        for env in range(num_envs):
            if resets[env]:
                resets[env] = False
                continue
            length, kind = endings(env, episode[env])
            at[env] += 1
            ended = at[env] == length
            step = lives[env].step(kind if ended else None)
            lost = blind and ended
            if lost and kind == "truncated":  # it ends nobody knows where, and is never drawn
                twin.truth.add(env, **{**step, "truncated": False, "next_obs": None})
                twin.truth.interrupt(env)
            else:  # what comes after a terminal is not missed: anything may stand there
                twin.truth.add(env, **{**step, "next_obs": step["obs"] if lost else step["next_obs"]})
            real += 1
            if ended:
                episode[env], at[env], resets[env] = episode[env] + 1, 0, mode is AutoresetMode.NEXT_STEP
    assert sum(s.num_steps for s in stats) == real
    return twin


MODES = tuple(AutoresetMode)
SCHEDULES = {
    "one step": tagged.always(1, "truncated"),
    "ten steps": tagged.always(10, "truncated"),
    "mixed": tagged.cycle([(1, "terminated"), (3, "truncated")], [(2, "both"), (5, "terminated")], [(4, "truncated")]),
    "drawn": tagged.drawn(3, 6),
    "endless": tagged.always(10_000),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_traps_e5_and_e6_in_every_autoreset_mode_what_is_stored_is_what_happened(
    mode: AutoresetMode, schedule: str
) -> None:
    # E5: the step of NEXT_STEP whose action is ignored; E6: the next observation of SAME_STEP, of another episode.
    for rows, steps in ((60, 25), (7, 25)):
        for view in (Transition(0.5), NStep(3, 0.5), FrameStack(3, NStep(2, 0.5))):
            twin = collected(mode, SCHEDULES[schedule], steps, rows, view=view)
            twin.check()
            if len(twin.buffer):
                twin.check_batch(twin.buffer.sample(64))


@pytest.mark.parametrize("dress", ["dict", "tuple"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_nested_observations_are_collected_right_in_every_mode(mode: AutoresetMode, dress: str) -> None:
    collected(mode, SCHEDULES["mixed"], 21, 9, dress=dress, sampler=Prioritized(), view=NStep(2, 0.5)).check()


def test_the_three_modes_store_the_same_experience_for_the_same_play() -> None:
    stored = []
    for mode in MODES:
        twin = collected(mode, tagged.always(4, "truncated"), 40 if mode is AutoresetMode.NEXT_STEP else 32, 60)
        batch = twin.buffer.data()
        stored.append(batch[batch["index"].argsort()])
    assert same_batches(stored[0], stored[1])
    assert same_batches(stored[0], stored[2])


def test_truncated_steps_whose_final_observation_is_hidden_are_never_drawn() -> None:
    for schedule in ("mixed", "ten steps", "one step", "drawn"):
        twin = collected(AutoresetMode.SAME_STEP, SCHEDULES[schedule], 25, 60, blind=True, view=NStep(3, 0.5))
        twin.check()
        batch = twin.buffer.data()
        assert not (batch["truncated"] & ~batch["terminated"]).any()


def test_warming_a_buffer_up_in_the_middle_of_a_run_joins_nothing() -> None:
    endings = tagged.always(50)
    envs = tagged.make_tagged(2, "NextStep", endings)
    buffer = ReplayBuffer(Schema.from_env(envs), 400, 2)
    collector = Collector(envs, tagged.tagged_policy, buffer, seed=0)
    collector.collect(10)
    fresh = tagged.make_tagged(2, "NextStep", endings)
    collector.warm(buffer, 5, envs=fresh, policy=tagged.tagged_policy, seed=70)
    collector.collect(10)
    batch = buffer.data()
    before, after = tagged.decode(batch["obs"]), tagged.decode(batch["next_obs"])
    assert np.array_equal(before.seed, after.seed)
    assert np.array_equal(before.step + 1, after.step)
    assert len(buffer) == 2 * (9 + 4 + 9)


def test_a_collector_that_is_reset_joins_nothing() -> None:
    envs = tagged.make_tagged(2, "SameStep", tagged.always(50))
    buffer = ReplayBuffer(Schema.from_env(envs), 400, 2, view=NStep(3, 1.0))
    collector = Collector(envs, tagged.tagged_policy, buffer, seed=0)
    for seed in (None, 5, None):
        collector.collect(6)
        collector.reset(seed=seed)
    collector.collect(6)
    batch = buffer.data()
    before, after = tagged.decode(batch["obs"]), tagged.decode(batch["next_obs"])
    assert np.array_equal(before.step + batch["steps"].numpy(), after.step)
    assert np.array_equal(before.episode, after.episode)
    assert np.array_equal(before.seed, after.seed)
    assert len(buffer) == 4 * 2 * 5


# What is refused: the error says what and where, and nothing has changed.


def three(dress: str = "dict", **options: Any) -> Twin:
    return Twin(3, 8, dress=dress, sampler=Prioritized(), **options).play("...", ".T.", "..U")


def without(step: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name not in names}


BAD_STEPS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "a field is missing": (lambda s: without(s, "action"), FieldError, "lacks 'action'"),
    "a field is unknown": (
        lambda s: {**s, "rewards": s["reward"]},
        FieldError,
        "unknown field 'rewards'.*did you mean",
    ),
    "one env too few": (lambda s: mapped(lambda x: x[:2], s), ShapeError, r"expected shape \(3"),
    "one env too few in one field": (lambda s: {**s, "reward": s["reward"][:2]}, ShapeError, "field 'reward'.*3 envs"),
    "no leading axis": (lambda s: {**s, "action": np.int64(3)}, ShapeError, "field 'action'.*num_envs"),
    "an axis too many": (lambda s: {**s, "reward": s["reward"][:, None]}, ShapeError, r"field 'reward'.*squeeze"),
    "a float action": (lambda s: {**s, "action": np.full(3, 0.5)}, DTypeError, "field 'action'.*int64"),
    "an integer flag": (lambda s: {**s, "truncated": np.zeros(3, np.int64)}, DTypeError, "field 'truncated'.*bool"),
    "a string": (lambda s: {**s, "reward": "much"}, ShapeError, "field 'reward'"),
    "ragged lists": (lambda s: {**s, "reward": [[1], [1, 2], 3]}, ShapeError, "field 'reward'"),
    "a wrong inner shape": (
        lambda s: {**s, "obs": {**s["obs"], "state": np.zeros((3, 5), np.float32)}},
        ShapeError,
        r"field 'obs.state'.*\(3, 4\).*\(3, 5\)",
    ),
    "a member is missing": (
        lambda s: {**s, "obs": without(s["obs"], "camera")},
        FieldError,
        "field 'obs.camera.image': missing",
    ),
    "a member is unknown": (
        lambda s: {**s, "obs": {**s["obs"], "stat": np.zeros(3)}},
        FieldError,
        "unknown field 'obs.stat'",
    ),
    "next_obs is missing at an end": (lambda s: without(s, "next_obs"), FieldError, "env 1 ended.*next_obs"),
    "next_obs has a wrong shape": (
        lambda s: {**s, "next_obs": {**s["next_obs"], "count": np.zeros((3, 2), np.int64)}},
        ShapeError,
        "field 'next_obs.count'",
    ),
    "next_obs lacks a member": (
        lambda s: {**s, "next_obs": without(s["next_obs"], "phase")},
        FieldError,
        "field 'next_obs.phase'",
    ),
    "next_obs of one env too few": (
        lambda s: {**s, "next_obs": mapped(lambda x: x[:2], s["next_obs"])},
        ShapeError,
        r"field 'next_obs.*\(3",
    ),
    "a mask of numbers": (lambda s: {**s, "mask": np.ones(3)}, ShapeError, r"mask: expected bool \(3,\)"),
    "a mask of another length": (lambda s: {**s, "mask": np.ones(2, bool)}, ShapeError, r"mask.*\(3,\).*\(2,\)"),
    "a mask, and next_obs is missing": (
        lambda s: {**without(s, "next_obs"), "mask": np.array([False, True, True])},
        FieldError,
        "env 1 ended",
    ),
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_step_that_does_not_fit_is_refused_by_name_and_leaves_everything_as_it_was(what: str) -> None:
    spoil, error, message = BAD_STEPS[what]
    twin, other = three(), three()
    step = other.step(".TU")
    before = contents(twin.buffer)
    with pytest.raises(error, match=message):
        twin.buffer.add(spoil(step))
    assert contents(twin.buffer) == before
    with pytest.raises(error):
        twin.buffer.extend(mapped(lambda x: np.stack([x, x]) if isinstance(x, np.ndarray) else x, spoil(step)))
    assert contents(twin.buffer) == before
    twin.add(".TU")
    twin.check()
    other.buffer.add(step)
    assert contents(twin.buffer) == contents(other.buffer)


@pytest.mark.parametrize(
    ("envs", "error", "message"),
    [
        ([0, 0], ParameterError, "each env once"),
        ([0, 3], ParameterError, "numbers from 0 to 2"),
        ([-1, 1], ParameterError, "numbers from 0 to 2"),
        ([[0, 1]], ShapeError, "envs: expected one axis"),
        (np.array([True, False]), DTypeError, "envs: expected integers"),
        ([0.0, 1.0], DTypeError, "envs: expected integers"),
        ([0], ShapeError, r"expected shape \(1"),
        ([0, 1, 2], ShapeError, r"expected shape \(3"),
    ],
)
def test_envs_that_are_not_there_or_do_not_fit_the_rows_are_refused(
    envs: Any, error: type[Exception], message: str
) -> None:
    twin, other = three(), three()
    step = other.step("..", [0, 1], final=True)
    before = contents(twin.buffer)
    with pytest.raises(error, match=message):
        twin.buffer.add(step, envs=envs)
    with pytest.raises(error):
        twin.buffer.extend(mapped(lambda x: x[None], step), envs=envs)
    if "shape" not in message:
        with pytest.raises(error, match=message):
            twin.buffer.interrupt(envs)
    assert contents(twin.buffer) == before


def test_many_steps_of_which_one_does_not_fit_are_refused_as_a_whole() -> None:
    for wide in (False, True):
        rows = 2 if wide else 12
        twin, other = (Twin(4, rows, sampler=Prioritized()).play("....", ".T.U") for _ in range(2))
        steps = stacked([other.step(kinds, final=True) for kinds in ("....", "....", "..T.", "....", "....")])
        before = contents(twin.buffer)
        for name, value in steps.items():
            with pytest.raises(ShapeError, match="expected"):
                twin.buffer.extend({**steps, name: value[:4]})
            with pytest.raises(ShapeError, match="expected"):
                twin.buffer.extend({**steps, name: value[:, :3]})
        with pytest.raises(ShapeError, match="expected"):
            twin.buffer.extend({})
        with pytest.raises(FieldError, match="env 2 ended"):
            twin.buffer.extend(without(steps, "next_obs"))
        mask = np.zeros((5, 4), bool)
        mask[[0, 1, 2], [0, 1, 2]] = True  # fewer rows than envs are left
        with pytest.raises(FieldError, match="env 2 ended"):
            twin.buffer.extend({**without(steps, "next_obs"), "mask": mask})
        assert contents(twin.buffer) == before
        mask[2, 2] = False
        twin.buffer.extend({**without(steps, "next_obs"), "mask": mask})
        twin.buffer.check()


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", None])
def test_batches_of_no_rows_are_refused(size: Any) -> None:
    twin = three()
    before = contents(twin.buffer)
    with pytest.raises(ParameterError, match="at least 1"):
        twin.buffer.sample(size)
    with pytest.raises(ParameterError, match="at least 1"):
        twin.buffer.batches(3, size)
    with pytest.raises(ParameterError, match="at least 1"):
        twin.buffer.batches(size, 4)
    assert contents(twin.buffer) == before


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_is_drawn_before_a_transition_is_complete(name: str) -> None:
    twin = Twin(2, 6, sampler=SAMPLERS[name]())
    for kinds in (None, "..", "|", "..", "x", ".."):
        if kinds:
            twin.play(kinds)
        before = contents(twin.buffer)
        with pytest.raises(EmptyError, match="no complete transition to draw; add steps"):
            twin.buffer.sample(3)
        with pytest.raises(EmptyError, match="no complete transition to draw; add steps"):
            twin.buffer.batches(2, 3)  # at the call, not at the first batch
        assert contents(twin.buffer) == before
        assert len(twin.buffer) == len(twin.buffer.data()) == 0
        twin.check()
    twin.add("..")
    twin.check_batch(twin.buffer.sample(1))


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": None}, "'reward'"),
        ({"terminated": None}, "'terminated'"),
        ({"truncated": Field((), torch.float32)}, "'truncated'"),
        ({"reward": Field((), torch.float64)}, "'reward'"),
        ({"reward": Field((1,))}, "'reward'"),
        ({"obs": None}, "'obs'"),
        *(({name: Field()}, name) for name in ("next_obs", "mask", "index", "next_index", "discount", "steps")),
        *(({name: Field()}, name) for name in ("weight", "probability", "source", "_stamp", "_x")),
    ],
)
def test_a_schema_that_makes_no_replay_is_refused(fields: dict[str, Any], message: str) -> None:
    tree = {**{name: PLAIN[name] for name in PLAIN.names}, **fields}
    schema = Schema({name: field for name, field in tree.items() if field is not None})
    with pytest.raises(SchemaError, match=message):
        ReplayBuffer(schema, 10)


@pytest.mark.parametrize(
    ("capacity", "num_envs"), [(0, 1), (1, 1), (5, 3), (-4, 1), (10, 0), (10, -1), (1e6, 1), (10, 2.0)]
)
def test_a_capacity_of_less_than_two_rows_per_env_is_refused(capacity: int, num_envs: int) -> None:
    with pytest.raises(ParameterError, match=r"capacity|2 rows|env"):
        ReplayBuffer(PLAIN, capacity, num_envs)


@pytest.mark.parametrize("seed", [True, 1.5, "7"], ids=repr)
def test_a_seed_that_is_none_is_refused_at_once(seed: Any) -> None:
    with pytest.raises(ParameterError, match="seed is an int"):
        ReplayBuffer(PLAIN, 10, seed=seed)


def test_a_seed_that_is_not_given_follows_torchs_and_batch_t_follows_the_seed() -> None:
    rows: list[tuple[int, list[float]]] = []
    for _ in range(2):
        torch.manual_seed(42)
        replay = ReplayBuffer(PLAIN, 40, 2)
        torch.rand(5)  # what others draw meanwhile changes nothing
        for t in range(10):
            replay.add(
                obs=np.full((2, 2), t), action=[t, t], reward=[t, -t], terminated=[False] * 2, truncated=[False] * 2
            )
        replay.sample(4)
        rows.append((replay.seed, replay.sample(8)["reward"].tolist()))
    assert rows[0] == rows[1]


@pytest.mark.parametrize("given", [np.zeros((2, 2)), torch.zeros(2), [("obs", 1)], "obs", 5])
@pytest.mark.parametrize("more", [(), (np.zeros(2), [True, False])])
def test_a_step_that_is_not_given_by_name_is_refused_with_the_call_that_does(given: Any, more: Any) -> None:
    replay: Any = ReplayBuffer(PLAIN, 40, 2)
    for arguments in ((given, *more), (None, given)):
        with pytest.raises(FieldError, match=r"names of its fields.*add\(obs=\.\.\., action="):
            replay.add(*arguments)
    with pytest.raises(FieldError, match="extend: expected a mapping"):
        replay.extend(given)
    assert len(replay) == 0


@pytest.mark.parametrize("kind", UNEVEN)
def test_what_has_no_one_shape_is_refused_by_the_name_of_its_field(kind: str) -> None:
    value, message = uneven(kind, (2, 2))
    replay = ReplayBuffer(PLAIN, 40, 2)
    step = {
        "obs": np.zeros((2, 2)),
        "action": [1, 1],
        "reward": [0, 0],
        "terminated": [True] * 2,
        "truncated": [False] * 2,
    }
    for wrong in ({**step, "obs": value}, {**step, "obs": value, "next_obs": step["obs"]}):
        with pytest.raises(SchemaError, match=rf"'obs'.*{message}"):
            replay.add(wrong)
    with pytest.raises(SchemaError, match=rf"'next_obs'.*{message}"):
        replay.add(step, next_obs=value)
    with pytest.raises(SchemaError):
        replay.extend({name: np.asarray(x)[None] for name, x in step.items()} | {"obs": value})
    assert len(replay) == 0
    replay.check()


@pytest.mark.parametrize("count", [2**31, 2**63, 2**70])
@pytest.mark.parametrize("sampler", [Uniform, Prioritized, WithoutReplacement, Recent])
def test_batches_beyond_all_memory_are_refused_in_our_own_words(count: int, sampler: Any) -> None:
    replay = ReplayBuffer(PLAIN, 40, 2, sampler=sampler())
    for call in (lambda: replay.sample(count), lambda: replay.batches(2, count)):
        with pytest.raises(ParameterError, match=rf"batch_size={count}.*at most"):
            call()


def test_a_class_in_place_of_a_part_is_refused() -> None:
    for part in ({"sampler": Prioritized}, {"view": NStep}):
        with pytest.raises(ParameterError, match=r"expected an object, got its class; pass \w+\(\.\.\.\)"):
            ReplayBuffer(PLAIN, 10, **cast("Any", part))


PARTS_OF_NUMPY: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (
        lambda: Prioritized(np.float32(0.5), (np.float64(0.4), 1.0, np.int64(9))),
        lambda: NStep(np.int64(3), np.float32(1)),
    ),
    (lambda: Recent(np.float32(0.9), np.int64(3)), lambda: FrameStack(np.int32(2))),
    (Uniform, lambda: Sequence(np.int64(3), np.int32(1), np.int64(1), n=np.int8(2))),
]


@pytest.mark.parametrize(("sampler", "view"), PARTS_OF_NUMPY)
def test_parameters_that_are_numbers_of_numpy_are_saved(sampler: Any, view: Any, tmp_path: Path) -> None:
    numbers: Any = {"capacity": np.int64(40), "num_envs": np.int32(2), "seed": np.int64(3)}
    buffer = ReplayBuffer(PLAIN, sampler=sampler(), view=view(), **numbers)
    for _ in range(9):
        flags = np.zeros(2, np.bool_)
        buffer.add(
            obs=np.ones((2, 2)), action=np.ones(2, np.int64), reward=np.ones(2), terminated=flags, truncated=flags
        )
    buffer.save(tmp_path / "replay")
    again = ReplayBuffer.load(tmp_path / "replay")
    assert again.view == buffer.view
    assert torch.equal(again.sample(5)["index"], buffer.sample(5)["index"])


ERRORS_SAVED = [5.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("saved", "given_", "rated"),
    [
        (lambda: Recent(0.9, 2), lambda: Recent(0.5, 3, inner=Prioritized()), False),
        (lambda: Recent(0.9, 2, inner=Prioritized()), lambda: Recent(0.5, 3), False),
        (lambda: Recent(0.9, 2, inner=Prioritized()), lambda: Recent(0.5, 3, inner=Prioritized(0.1)), True),
        (lambda: Recent(0.9, 2, inner=Prioritized()), Prioritized, False),
        (Prioritized, lambda: Recent(0.9, 2, inner=Prioritized()), False),
        (Uniform, Prioritized, False),
        (Prioritized, WithoutReplacement, False),
    ],
)
def test_a_save_is_loaded_with_another_sampler_which_goes_on_as_far_as_it_is_alike(
    saved: Any, given_: Any, rated: bool, tmp_path: Path
) -> None:
    twin = Twin(2, 12, sampler=saved(), seed=4).play("..", "..", ".T", "..", "..")
    if twin.buffer.has_priorities:
        twin.buffer.update_priorities([0, 1, 2, 3], ERRORS_SAVED)
    if isinstance(twin.buffer.sampler, Recent):
        twin.buffer.sampler.observe(3.0)
    twin.buffer.save(tmp_path / "replay")
    loaded = ReplayBuffer.load(tmp_path / "replay", sampler=given_())
    sampler, state = loaded.sampler, loaded.sampler.state_dict()
    if isinstance(sampler, Recent) and isinstance(twin.buffer.sampler, Recent):
        assert (sampler.eta, state["returns"].tolist()) == (0.9, [3.0])
    if loaded.has_priorities:
        inner = getattr(sampler, "inner", sampler)
        places, _ = loaded._ring.find(np.arange(4))
        assert inner.state_dict()["errors"][places].tolist() == (ERRORS_SAVED if rated else [1.0] * 4)
        assert inner.state_dict()["largest"] == (5.0 if rated else 1.0)
        assert (inner.priorities() > 0).all()
        inner._tree.check()
    assert same_batches(loaded.data(), twin.buffer.data())
    for _ in range(3):
        twin.check_batch(loaded.sample(3))


def test_a_schedule_of_beta_goes_on_after_a_load(tmp_path: Path) -> None:
    twin = Twin(2, 12, sampler=Prioritized(alpha=1.0, beta=(0.1, 1.0, 10))).play("..", "..", ".T", "..", "..")
    index = twin.buffer.data()["index"]
    twin.buffer.update_priorities(index, 1 + index % 3)
    for _ in range(4):
        twin.buffer.sample(8)
    twin.buffer.save(tmp_path / "replay")
    loaded = ReplayBuffer.load(tmp_path / "replay")
    for draws in range(4, 8):
        batch = loaded.sample(8)
        assert same_batches(batch, twin.buffer.sample(8))
        probability = batch["probability"].numpy()
        want = (probability / probability.min()) ** -(0.1 + 0.9 * draws / 10)
        assert batch["weight"].tolist() == pytest.approx(want.tolist())
        assert want.min() < 0.9  # with equal priorities all weights are 1, whatever beta is


@pytest.mark.parametrize("sampler", ["prioritized, stratified", "recent, prioritized", "without replacement"])
@pytest.mark.parametrize("weigh", ["steps", "episodes"])
def test_a_save_of_weighed_sequences_is_loaded_with_a_sampler_and_a_view_that_know_no_weights(
    sampler: str, weigh: Any, tmp_path: Path
) -> None:
    for kind in (Uniform, lambda: Recent(0.9, 2)):
        twin = Twin(2, 12, sampler=kind(), view=Sequence(2, 1, weigh=weigh)).play("..", "..", ".T", "..", "..", "U.")
        twin.buffer.save(tmp_path / "replay")
        view = NStep(2, 0.5)
        loaded = ReplayBuffer.load(tmp_path / "replay", sampler=SAMPLERS[sampler](), view=view)
        loaded.check()
        for _ in range(3):
            twin.check_batch(loaded.sample(3), view, twin.truth.anchors())
        assert len(loaded) == len(twin.truth.anchors())


# What it takes.


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dress", DRESSES)
def test_the_plan_is_what_the_buffer_takes_to_the_byte(dress: str, ordered: bool) -> None:
    twin = Twin(3, 7, dress=dress, ordered=ordered)
    store = twin.buffer._ring.store
    taken = store.target.nbytes + sum(block.nbytes for block in store.blocks.values())
    plan = ReplayBuffer.plan(twin.schema, 23, 3, ordered=ordered)
    assert plan.rows == store.num_rows == 21
    assert plan.total_bytes == taken == 21 * plan.row_bytes
    assert sum(plan.fields.values()) == plan.row_bytes
    assert all(size >= 0 for size in plan.fields.values())
    for path, field in store.leaves.items():
        assert plan.fields[".".join(path)] == field.nbytes
    text = str(plan)
    assert "21 rows, 7 for each of 3 envs" in text
    assert all(name in text for name in plan.fields)
    by_bytes = ReplayBuffer(twin.schema, num_envs=3, capacity_bytes=taken + 2, ordered=ordered)
    assert by_bytes._ring.store.num_rows == 21
    assert ReplayBuffer.plan(twin.schema, None, 3, capacity_bytes=taken - 1, ordered=ordered).rows == 18


KEEPING: dict[str, Any] = {
    "uniform": Uniform,
    "without replacement": WithoutReplacement,
    "prioritized": Prioritized,
    "prioritized by the buffer": lambda: Prioritized(normalize="buffer"),
    "recent": Recent,
    "recent and prioritized": lambda: Recent(inner=Prioritized()),
}


def kept(sampler: Any) -> int:
    """Bytes of all arrays that a sampler holds."""
    inner = getattr(sampler, "inner", sampler)
    tree = getattr(inner, "_tree", None)
    arrays = [getattr(inner, name) for name in ("_errors", "_rest") if hasattr(inner, name)]
    arrays += [] if tree is None else [tree._nodes.base, tree._minima]
    return sum((array if array.base is None else array.base).nbytes for array in arrays)


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("rows", [2, 7, 8, 9, 63, 64, 65, 700])
def test_the_plan_and_nbytes_count_what_the_sampler_keeps_to_the_byte(name: str, rows: int) -> None:
    sampler = KEEPING[name]()
    plan = ReplayBuffer.plan(PLAIN, rows * 3, 3, sampler=sampler)
    buffer = ReplayBuffer(PLAIN, rows * 3, 3, sampler=sampler, seed=0)
    everything = np.arange(rows * 3 + 3).reshape(-1, 3)
    flags = np.zeros(everything.shape, bool)
    obs = np.stack([everything, everything], 2)
    buffer.extend({"obs": obs, "action": everything, "reward": everything, "terminated": flags, "truncated": flags})
    buffer.sample(3)
    store, per_row = buffer._ring.store, 8 * 3 if name == "without replacement" else 0
    # an epoch's order holds what can be drawn: all but each env's newest row
    assert plan.sampler_bytes == kept(sampler) + per_row
    assert plan.total_bytes == buffer.nbytes == store.target.nbytes + kept(sampler) + per_row
    assert plan.total_bytes == plan.rows * plan.row_bytes + plan.sampler_bytes
    assert ("sampler" in str(plan)) == ("in all" in str(plan)) == (plan.sampler_bytes > 0)


@pytest.mark.parametrize("name", KEEPING)
def test_a_capacity_in_bytes_is_for_rows_and_sampler_together_and_nothing_more_would_fit(name: str) -> None:
    sampler = KEEPING[name]()
    for size in (1_000, 12_345, 99_999, 1_000_000):
        plan = ReplayBuffer.plan(PLAIN, capacity_bytes=size, sampler=sampler)
        assert plan.total_bytes <= size < ReplayBuffer.plan(PLAIN, plan.rows + 1, sampler=sampler).total_bytes
    buffer = ReplayBuffer(PLAIN, capacity_bytes=12_345, sampler=sampler)
    assert buffer.nbytes == ReplayBuffer.plan(PLAIN, capacity_bytes=12_345, sampler=KEEPING[name]()).total_bytes


def test_what_the_sampler_keeps_counts_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ReplayBuffer.plan(PLAIN, 10_000).total_bytes
    monkeypatch.setattr("relive.memory.estimate.free_memory", lambda: rows + 100)
    ReplayBuffer(PLAIN, 10_000)
    with pytest.raises(ParameterError, match=r"would take [\d,]+ bytes and [\d,]+ are free(.|\n)*sampler(.|\n)*in all"):
        ReplayBuffer(PLAIN, 10_000, sampler=Prioritized())


def test_the_weights_of_sequences_are_counted_once_there_are_any() -> None:
    buffer = ReplayBuffer(PLAIN, 1_000, view=Sequence(4))
    tree = cast("Any", buffer.sampler)._windows._tree
    assert buffer.nbytes - ReplayBuffer.plan(PLAIN, 1_000).total_bytes == tree._nodes.base.nbytes
    buffer.view = Transition()
    assert buffer.nbytes == ReplayBuffer.plan(PLAIN, 1_000).total_bytes


def test_minima_are_counted_once_they_are_asked_for() -> None:
    buffer = ReplayBuffer(PLAIN, 1_000, sampler=Prioritized())
    before = buffer.nbytes
    cast("Prioritized", buffer.sampler).normalize = "buffer"
    assert buffer.nbytes > before


def test_a_capacity_is_given_in_rows_or_in_bytes_and_has_to_fit_into_memory() -> None:
    for wrong in ({}, {"capacity": 10, "capacity_bytes": 10_000}, {"capacity_bytes": 50}, {"capacity_bytes": -1}):
        with pytest.raises(ParameterError, match="capacity"):
            ReplayBuffer(PLAIN, **wrong)
        with pytest.raises(ParameterError, match="capacity"):
            ReplayBuffer.plan(PLAIN, **wrong)
    with pytest.raises(
        ParameterError, match=r"would take [\d,]+ bytes and [\d,]+ are free; lower the capacity:\n.*rows"
    ):
        ReplayBuffer(PLAIN, 10**15)
    assert ReplayBuffer.plan(PLAIN, 10**15).rows == 10**15  # to plan costs nothing


# What it tells.


def test_stats_are_those_worked_out_by_hand_and_change_nothing() -> None:
    twin = Twin(2, 5, sampler=Prioritized(alpha=1.0, eps=1e-9))
    twin.play("..", ".T", "..", "U.", "..", "..")
    # env 0: steps 0 to 3, the boundary row 4, steps 5 and 6: rows 2 to 6 live, 2, 3 and 5 can be drawn.
    # env 1: 0, 1, boundary 2, 3, 4, 5, 6: rows 2 to 6 live, 3, 4 and 5 can be drawn.
    # Completed, in order: 0a 0b 1b | 1a | 2a 3a 3b | 4b | 5a 5b: ten.
    batch = twin.buffer.sample(4)
    twin.buffer.sample(8)
    index = twin.buffer.data()["index"].tolist()
    assert index == [4, 6, 7, 9, 10, 11]
    twin.buffer.update_priorities(index, [1.0, 2.0, 3.0, 4.0, 5.0, 0.0])
    before = contents(twin.buffer)
    stats = twin.buffer.stats()
    assert contents(twin.buffer) == before
    assert twin.buffer.stats() == stats
    completed = [twin.truth.completed.index((row.env, row.number)) for row in twin.anchors()]
    assert completed == [4, 5, 6, 7, 8, 9]
    assert stats == {
        "size": 6.0,
        "completed": 10.0,
        "episodes": 2.0,
        "age_mean": 2.5,
        "age_max": 5.0,
        "batches": 2.0,
        "sampled": 12.0,
        "replay_ratio": 1.2,
        "late_updates": 0.0,
        "not_finite_rewards": 0.0,
        "priority_min": pytest.approx(0.0, abs=1e-6),
        "priority_mean": pytest.approx(2.5),
        "priority_max": pytest.approx(5.0),
        "effective_size": pytest.approx(15**2 / 55),
    }
    twin.play("..", "..")
    late = twin.buffer.update_priorities(batch["index"], torch.zeros(4))
    assert twin.buffer.stats()["late_updates"] == late


def test_stats_of_a_buffer_without_priorities_and_of_an_empty_one_have_no_gaps() -> None:
    for sampler in SAMPLERS.values():
        twin = Twin(2, 5, sampler=sampler())
        empty = twin.buffer.stats()
        assert set(empty.values()) == {0.0}
        twin.play("..", "..", "..")
        twin.buffer.sample(2)
        stats = twin.buffer.stats()
        assert all(math.isfinite(value) for value in stats.values())
        assert ("effective_size" in stats) == twin.buffer.has_priorities
        if twin.buffer.has_priorities:
            assert stats["effective_size"] == pytest.approx(4)


@pytest.mark.parametrize("options", [{}, {"ordered": False}, {"dress": "image"}])
def test_rewards_that_are_no_numbers_are_counted_and_the_count_is_saved(options: Any, tmp_path: Path) -> None:
    twin = Twin(2, 6, **options)
    for rewards in ([np.nan, 1.0], [-np.inf, np.inf], [0.0, 2.0]):
        twin.buffer.add({**twin.step("..", final=True), "reward": np.array(rewards)})
    steps = stacked([twin.step(".T", final=True) for _ in range(3)])
    twin.buffer.extend({**steps, "reward": np.full((3, 2), np.nan, np.float32)})
    assert twin.buffer.stats()["not_finite_rewards"] == 9
    twin.buffer.check()
    twin.buffer.save(tmp_path / "replay")
    assert ReplayBuffer.load(tmp_path / "replay").stats()["not_finite_rewards"] == 9


NOT_FINITE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a reward": (lambda step: step["reward"].__setitem__(1, np.nan), "'reward': row 1, of env 1, is nan"),
    "an observation": (lambda step: step["obs"]["x"].__setitem__((0, 1), np.inf), "'obs.x': row 0, of env 0"),
    "an observation of a dtype that NumPy lacks": (
        lambda step: step["obs"].__setitem__("half", torch.tensor([[0.0], [torch.nan]], dtype=torch.bfloat16)),
        "'obs.half': row 1",
    ),
    "an action": (lambda step: step["action"].__setitem__(0, -np.inf), "'action': row 0"),
    "a final observation": (lambda step: step["next_obs"]["x"].__setitem__((1, 0), np.nan), "'next_obs.x': row 1"),
}


def numbers() -> dict[str, Any]:
    """A step of two envs, the second of which ended, of float fields; what is not read is NaN."""
    obs = {"x": np.zeros((2, 3), np.float32), "half": torch.zeros(2, 1, dtype=torch.bfloat16)}
    after = {"x": np.full((2, 3), np.nan, np.float32), "half": torch.full((2, 1), torch.nan, dtype=torch.bfloat16)}
    after["x"][1], after["half"][1] = 0.0, 0.0
    flags = np.array([False, True])
    return {"obs": obs, "action": np.zeros(2), "reward": np.zeros(2, np.float32), "terminated": flags,
            "truncated": ~flags & False, "log_prob": np.full(2, -np.inf), "next_obs": after}  # fmt: skip


FLOATS = Schema({
    "obs": {"x": (3,), "half": Field((1,), torch.bfloat16)}, "action": Field((), torch.float64), "log_prob": (),
    "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool),
})  # fmt: skip


@pytest.mark.parametrize("what", NOT_FINITE)
def test_in_debug_mode_a_step_with_a_number_that_is_none_is_refused_and_nothing_is_stored(what: str) -> None:
    spoil, message = NOT_FINITE[what]
    buffer = ReplayBuffer(FLOATS, 20, 2, debug=True, sampler=Prioritized(), seed=0)
    buffer.add(numbers())
    before, step = contents(buffer), numbers()
    spoil(step)
    with pytest.raises(NotFiniteError, match=message):
        buffer.add(step)
    with pytest.raises(NotFiniteError, match=message.split(":")[0]):
        buffer.extend(stacked([plain(numbers()), plain(step)]))
    assert contents(buffer) == before
    buffer.add({**step, "mask": np.zeros(2, bool)})
    assert contents(buffer)[0] == before[0]
    calm = ReplayBuffer(FLOATS, 20, 2, seed=0)
    with np.errstate(over="ignore"):
        calm.add(step)
    assert calm.stats()["not_finite_rewards"] == ("reward" in message)


def plain(step: dict[str, Any]) -> Any:
    """Tensors of a dtype that NumPy lacks as ones it has."""
    return mapped(lambda x: x.float().numpy() if isinstance(x, torch.Tensor) else x, step)


def test_debug_mode_is_saved(tmp_path: Path) -> None:
    ReplayBuffer(FLOATS, 20, 2, debug=True, seed=0).save(tmp_path / "replay")
    assert ReplayBuffer.load(tmp_path / "replay").debug


def test_the_effective_size_is_of_the_weights_in_the_window_of_nothing_but_the_buffer() -> None:
    twin = Twin(1, 40, sampler=Recent(0.5, 2, inner=Prioritized(alpha=1.0)))
    for _ in range(31):
        twin.add(".")
    assert twin.buffer.stats()["effective_size"] == pytest.approx(30)


def test_data_is_everything_that_can_be_drawn_in_the_order_of_completion() -> None:
    twin = Twin(3, 7).play("...", "T..", ".U.", "...")
    twin.add("..", [2, 1])
    twin.add("T", [0])
    rows = twin.anchors()
    order = [(row.env, row.number) for row in rows]
    assert order == [pair for pair in twin.truth.completed if pair in order]
    batch = twin.buffer.data()
    assert batch["index"].tolist() == [number * 3 + env for env, number in order]
    drawn, size = twin.buffer.stats()["sampled"], len(twin.buffer)
    assert (drawn, len(batch)) == (0, size)


def test_a_slice_is_every_row_of_an_env_in_the_order_of_time() -> None:
    for dress in DRESSES:
        twin = Twin(2, 9, dress=dress).play(*random_plays(4, 2, 30))
        for env in (0, 1):
            live = twin.truth.live(env)
            rows = twin.buffer.slice(env)
            assert rows["index"].tolist() == [twin.truth.index(row) for row in live]
            assert rows["complete"].tolist() == [row.complete for row in live]
            for start, stop in ((2, 5), (-3, None), (0, 0), (-100, 100), (4, -1)):
                part = twin.buffer.slice(env, start, stop)
                assert same_batches(part, rows[slice(start, stop)])
            for row, got in zip(live, rows, strict=True):
                want = mapped(np.asarray, row.obs)
                given_ = got["obs"].to_dict() if isinstance(got["obs"], TensorDict) else got["obs"]
                if isinstance(want, tuple):
                    want = {str(i): member for i, member in enumerate(want)}
                assert oracle.same(mapped(lambda x: x.numpy(), given_), want)
                if row.at < len(row.episode):
                    step = row.episode.steps[row.at]
                    assert got["reward"] == step.reward
                    assert (got["terminated"].item(), got["truncated"].item()) == (step.terminated, step.truncated)
    for env in (-1, 2):
        with pytest.raises(ParameterError, match="slice"):
            twin.buffer.slice(env)


@pytest.mark.parametrize("ordered", [True, False])
def test_appending_another_buffer_adds_its_transitions_as_they_were(ordered: bool) -> None:
    for seed in range(6):
        source = Twin(2, 8, dress="mixed", ordered=ordered).play(*random_plays(seed, 2, 25, "...TU"))
        if seed % 2:
            source.play("..", "|", "..", "..")
        target = Twin(2, 40, dress="mixed", ordered=ordered, sampler=Prioritized()).play("..", "..")
        had = len(target.buffer)
        target.buffer.append(source.buffer)
        target.buffer.check()
        for view in (Transition(0.5), NStep(3, 0.5), FrameStack(2, NStep(2, 0.5))) if ordered else (Transition(0.5),):
            source.buffer.view, target.buffer.view = view, deepcopy(view)
            got, want = target.buffer.data(), source.buffer.data()
            own = got["index"] % 2 + 2 * (got["index"] // 2 < 2)
            new = got[own < 2] if ordered else got[had:]
            fields = [n for n in new.keys() if n not in ("index", "next_index")]
            for env in (0, 1):
                mine, theirs = new[new["index"] % 2 == env], want[want["index"] % 2 == env]
                if isinstance(view, FrameStack):  # there, what came before the oldest row is not known any more
                    mine = mine[len(mine) - len(theirs) :]
                assert len(mine) == len(theirs)
            if not isinstance(view, FrameStack):  # in the order in which they were completed there, over all envs
                assert same_batches(new.select(*fields), want.select(*fields))
        target.play("..", "T.", "..")
        target.buffer.check()


@pytest.mark.parametrize("own", [True, False])
def test_what_was_newest_in_an_appended_buffer_is_newest_after_it(own: bool) -> None:
    schema = Schema({"obs": Field((1,)), "reward": Field(), "terminated": Field((), torch.bool),
                     "truncated": Field((), torch.bool)})  # fmt: skip
    source = ReplayBuffer(schema, 3 * 40, 3, own_next_obs=own)
    for t in range(30):
        done = np.array([t % 5 == 4, t % 7 == 6, False])
        obs = np.full((3, 1), t, np.float32)
        source.add(obs=obs, reward=obs[:, 0], terminated=done, truncated=~done & (t == 3), next_obs=obs)
    for rows in (40, 12):  # with room for all, and for the newest alone
        target = ReplayBuffer(
            schema, 3 * rows, 3, own_next_obs=own, sampler=Recent(0.9, 9, inner=Prioritized()), seed=0
        )
        target.add(obs=np.zeros((3, 1)), reward=np.zeros(3), terminated=np.zeros(3, bool), truncated=np.zeros(3, bool),
                   next_obs=np.zeros((3, 1)))  # fmt: skip
        target.append(source)
        target.check()
        drawn = list(target.batches(4, 500))[-1]
        newest = source.data()[-9:]
        assert {(int(i) % 3, float(o)) for i, o in zip(drawn["index"], drawn["obs"], strict=True)} == {
            (int(i) % 3, float(o)) for i, o in zip(newest["index"], newest["obs"], strict=True)
        }


def test_only_a_buffer_of_the_same_schema_envs_and_order_can_be_appended() -> None:
    twin = Twin(2, 8).play("..", "..")
    before = contents(twin.buffer)
    for other in (Twin(3, 8), Twin(2, 8, dress="mixed"), Twin(2, 8, ordered=False)):
        with pytest.raises(SchemaError, match="append"):
            twin.buffer.append(other.buffer)
    assert contents(twin.buffer) == before


# The same seed and the same adds give the same batches, whatever else happens.


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_saved_buffer_goes_on_with_exactly_the_batches_it_would_have_drawn(name: str, tmp_path: Path) -> None:
    for view in (NStep(3, 0.5), FrameStack(3)):
        twin = Twin(2, 9, dress="mixed", sampler=SAMPLERS[name](), view=view).play(*random_plays(8, 2, 30))
        rng = np.random.default_rng(0)
        for _ in range(3):
            batch = twin.buffer.sample(3)
            if twin.buffer.has_priorities:
                twin.buffer.update_priorities(batch["index"], rng.exponential(size=3))
        twin.buffer.save(tmp_path / "replay")
        other = ReplayBuffer.load(tmp_path / "replay")
        assert other.stats() == twin.buffer.stats()
        for kinds in random_plays(9, 2, 6):
            a, b = twin.buffer.sample(3), other.sample(3)
            assert same_batches(a, b)
            if other.has_priorities:
                errors = rng.exponential(size=3)
                twin.buffer.update_priorities(a["index"], errors)
                other.update_priorities(b["index"], errors)
            step = twin.step(kinds, final=True)
            twin.buffer.add(step)
            other.add(step)
            assert same_batches(twin.buffer.data(), other.data())


@given(st.integers(0, 2**32), st.sampled_from(sorted(SAMPLERS)))
@settings(max_examples=15)
def test_batches_depend_on_the_seed_and_the_steps_and_not_on_how_these_were_handed_over(seed: int, name: str) -> None:
    plays = random_plays(seed, 2, 30)
    one, other = (Twin(2, 8, sampler=SAMPLERS[name](), seed=seed) for _ in range(2))
    for kinds in plays:
        one.add(kinds)
    other.extend(plays[:13])
    for kinds in plays[13:20]:
        other.add(kinds[0], [0])
        other.add(kinds[1], [1])
    other.extend(plays[20:])
    for _ in range(3):
        size = min(5, len(one.buffer))
        if size:
            assert same_batches(one.buffer.sample(size), other.buffer.sample(size))


def test_steps_of_one_env_do_not_disturb_the_windows_of_another_that_is_far_behind() -> None:
    twin = Twin(2, 6, view=NStep(3, 0.5)).play("..", "..", "..")
    for kinds in "....T....":
        twin.add(kinds, [0])
        twin.check()
    twin.add(".", [1])
    twin.check()


# Several threads.


@pytest.mark.parametrize("name", ["uniform", "prioritized", "sequences"])
def test_what_one_thread_draws_while_another_adds_is_whole(name: str) -> None:
    sampler = Prioritized() if name == "prioritized" else Uniform()
    view = Sequence(3) if name == "sequences" else NStep(2, 1.0)
    schema = Schema({"obs": (200,), "reward": (), **FLAGS})
    buffer = ReplayBuffer(schema, 64, 2, sampler=sampler, view=view, seed=0)
    failures: list[BaseException] = []
    filled, drawn = threading.Event(), threading.Event()

    def play() -> None:
        try:
            for t in itertools.count():
                done = np.array([t % 7 == 6, t % 5 == 4])
                time_now = np.full((2, 200), 2 * t, np.float32)
                buffer.add(obs=time_now, reward=time_now[:, 0], terminated=done, truncated=np.zeros(2, np.bool_),
                           next_obs=time_now + 1)  # fmt: skip
                if t > 100:
                    filled.set()
                if drawn.is_set():
                    return
        except BaseException as error:
            failures.append(error)
            filled.set()

    interval, player = sys.getswitchinterval(), threading.Thread(target=play)
    sys.setswitchinterval(1e-5)
    player.start()
    try:
        filled.wait(60)
        for _ in range(300):
            batch: Any = buffer.sample(256)
            obs = batch["obs"].flatten(0, -2)
            assert (obs == obs[:, :1]).all()
            if name == "sequences":
                real = batch["mask"]
                assert torch.equal(batch["reward"][real], batch["obs"][..., 0][real])
                continue
            later = batch["next_obs"][:, 0] - batch["obs"][:, 0]
            assert torch.equal(later, 2.0 * batch["steps"] - batch["terminated"].float())
            if name == "prioritized":
                buffer.update_priorities(batch["index"], torch.rand(256))
            assert len(buffer) <= 62
            assert buffer.stats()["size"] > 0
    finally:
        drawn.set()
        player.join()
        sys.setswitchinterval(interval)
    assert not failures
    buffer.check()
