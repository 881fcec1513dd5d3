"""The replay buffer: adding, drawing, rating, clearing, in any order, beside a naive twin; and what it refuses."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relive import (
    Collector,
    Field,
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Sequence,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive.errors import EmptyError, NotFiniteError, ParameterError, SchemaError
from support import internals, oracle, tagged_envs
from support.cases import covering
from support.effort import often
from support.replays import FLAGS, PLAIN, random_plays
from support.twins import SAMPLERS, VIEWS, Twin, contents, same_batches

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
            index = internals.ring(self.buffer).index_of(internals.ring(self.buffer).anchors()).tolist()
            got = self.rated.priorities()
            total = got.sum()
            assert (got / total).tolist() == pytest.approx([want[i] for i in index], rel=1e-6)
            internals.tree(self.rated).check()
        stats = self.buffer.stats()
        assert stats["late_updates"] == self.late
        assert stats["sampled"] == self.drawn
        assert stats["batches"] == self.batches
        assert stats["size"] == len(self.twin.anchors())
        assert stats["completed"] == len(self.twin.truth.completed)


Walk.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=25)
test_a_random_walk_keeps_every_invariant_and_agrees_with_the_naive_twin = Walk.TestCase


@pytest.mark.slow
class TestALongWalk(Walk.TestCase):
    """The same with many more and longer walks."""

    settings = settings(max_examples=400, stateful_step_count=60)


# Through the collector, in all three autoreset modes.


class Blind(VectorWrapper):
    """A vector env that keeps its final observations to itself."""

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        hidden = ("final_obs", "_final_obs", "final_info", "_final_info")
        return obs, reward, terminated, truncated, {name: x for name, x in info.items() if name not in hidden}


def collected(
    mode: AutoresetMode,
    endings: tagged_envs.Endings,
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
    envs: VectorEnv = tagged_envs.make_tagged(num_envs, mode, endings, observations=observations)
    collector = Collector(
        Blind(envs) if blind else envs, tagged_envs.tagged_policy, twin.buffer, final_obs="mask" if blind else "require"
    )
    stats = [collector.collect(min(4, steps - done)) for done in range(0, steps, 4)]
    lives = [tagged_envs.Life(env, observations=observations) for env in range(num_envs)]
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
    "one step": tagged_envs.always(1, "truncated"),
    "ten steps": tagged_envs.always(10, "truncated"),
    "mixed": tagged_envs.cycle(
        [(1, "terminated"), (3, "truncated")], [(2, "both"), (5, "terminated")], [(4, "truncated")]
    ),
    "drawn": tagged_envs.drawn(3, 6),
    "endless": tagged_envs.always(10_000),
}


@pytest.mark.parametrize(("schedule", "mode"), covering(SCHEDULES, MODES, full=2, quick=1))
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


@pytest.mark.parametrize("kind", [ReplayBuffer, RolloutBuffer])
def test_a_device_that_torch_cannot_use_is_refused(kind: Any) -> None:
    assert kind(PLAIN, 10, 2, device="cpu:0").device == kind(PLAIN, 10, 2, device=torch.device("cpu")).device
    for device in ("gpu", "cuda:99", 1.5):
        message = rf"{kind.__name__}\(device={device!r}\): torch .* Pass device='cpu'"
        with pytest.raises(ParameterError, match=message):
            kind(PLAIN, 10, 2, device=device)


@pytest.mark.parametrize("dress", ["dict", "tuple"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_nested_observations_are_collected_right_in_every_mode(mode: AutoresetMode, dress: str) -> None:
    collected(mode, SCHEDULES["mixed"], 21, 9, dress=dress, sampler=Prioritized(), view=NStep(2, 0.5)).check()


def test_the_three_modes_store_the_same_experience_for_the_same_play() -> None:
    stored = []
    for mode in MODES:
        twin = collected(mode, tagged_envs.always(4, "truncated"), 40 if mode is AutoresetMode.NEXT_STEP else 32, 60)
        batch = twin.buffer.data()
        stored.append(batch.rows(batch["index"].argsort()))
    assert same_batches(stored[0], stored[1])
    assert same_batches(stored[0], stored[2])


def test_truncated_steps_whose_final_observation_is_hidden_are_never_drawn() -> None:
    for schedule in ("mixed", "ten steps", "one step", "drawn"):
        twin = collected(AutoresetMode.SAME_STEP, SCHEDULES[schedule], 25, 60, blind=True, view=NStep(3, 0.5))
        twin.check()
        batch = twin.buffer.data()
        assert not (batch["truncated"] & ~batch["terminated"]).any()


def test_warming_a_buffer_up_in_the_middle_of_a_run_joins_nothing() -> None:
    endings = tagged_envs.always(50)
    envs = tagged_envs.make_tagged(2, "NextStep", endings)
    buffer = ReplayBuffer(Schema.from_env(envs), 400, 2)
    collector = Collector(envs, tagged_envs.tagged_policy, buffer, seed=0)
    collector.collect(10)
    fresh = tagged_envs.make_tagged(2, "NextStep", endings)
    collector.warm(buffer, 5, envs=fresh, policy=tagged_envs.tagged_policy, seed=70)
    collector.collect(10)
    batch = buffer.data()
    before, after = tagged_envs.decode(batch["obs"]), tagged_envs.decode(batch["next_obs"])
    assert np.array_equal(before.seed, after.seed)
    assert np.array_equal(before.step + 1, after.step)
    assert len(buffer) == 2 * (9 + 4 + 9)


def test_a_collector_that_is_reset_joins_nothing() -> None:
    envs = tagged_envs.make_tagged(2, "SameStep", tagged_envs.always(50))
    buffer = ReplayBuffer(Schema.from_env(envs), 400, 2, view=NStep(3, 1.0))
    collector = Collector(envs, tagged_envs.tagged_policy, buffer, seed=0)
    for seed in (None, 5, None):
        collector.collect(6)
        collector.reset(seed=seed)
    collector.collect(6)
    batch = buffer.data()
    before, after = tagged_envs.decode(batch["obs"]), tagged_envs.decode(batch["next_obs"])
    assert np.array_equal(before.step + batch["steps"].numpy(), after.step)
    assert np.array_equal(before.episode, after.episode)
    assert np.array_equal(before.seed, after.seed)
    assert len(buffer) == 4 * 2 * 5


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
            new = got.rows(own < 2 if ordered else slice(had, None))
            fields = [n for n in new.keys() if n not in ("index", "next_index")]
            for env in (0, 1):
                mine, theirs = (x.rows(x["index"] % 2 == env) for x in (new, want))
                if isinstance(view, FrameStack):  # there, what came before the oldest row is not known any more
                    mine = mine.rows(slice(len(mine) - len(theirs), None))
                assert len(mine) == len(theirs)
            if not isinstance(view, FrameStack):  # in the order in which they were completed there, over all envs
                assert same_batches(*({name: x[name] for name in fields} for x in (new, want)))
        target.play("..", "T.", "..")
        target.buffer.check()


@pytest.mark.parametrize("own", [True, False])
def test_what_was_newest_in_an_appended_buffer_is_newest_after_it(own: bool) -> None:
    schema = Schema({"obs": Field((1,)), "reward": Field(), "terminated": Field((), torch.bool),
                     "truncated": Field((), torch.bool)})  # fmt: skip
    source = ReplayBuffer(schema, 3 * 40, 3, own_next_obs=own, check_ends=False)
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
        newest = source.data().rows(slice(-9, None))
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


@pytest.mark.parametrize("ordered", [True, False])
def test_some_envs_are_appended_to_others_with_their_errors(ordered: bool) -> None:
    source = Twin(3, 12, ordered=ordered, sampler=Prioritized(alpha=1.0)).play(*random_plays(1, 3, 30, "...TU")).buffer
    index = source.data()["index"]
    source.update_priorities(index, (index % 5 + 1).double())
    target = Twin(2, 8, ordered=ordered, sampler=Prioritized(alpha=1.0)).play("..", "..").buffer
    target.append(source, envs={2: 0})
    target.check()
    got, want = target.data(), source.data()
    got, want = got.rows(got["index"] % 2 == 0), want.rows(want["index"] % 3 == 2)
    count = min(len(got), len(want))
    got, want = (x.rows(slice(len(x) - count, None)) for x in (got, want))
    names = [name for name in got.keys() if name not in ("index", "next_index")]
    assert same_batches(*({name: x[name] for name in names} for x in (got, want)))
    assert target.priorities(got["index"]).tolist() == source.priorities(want["index"]).tolist()
    for wrong in ({3: 0}, {0: 2}, {-1: 0}, {0.5: 0}):
        with pytest.raises(ParameterError, match="append"):
            target.append(source, envs=wrong)


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
@settings(max_examples=settings.default.max_examples // 3)
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
        for _ in range(often(80, 300)):
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
