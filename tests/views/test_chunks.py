"""Chunks: each is what the env's rows, written down one after another, say, and all are drawn equally often."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from definitions.chunks import Step, chunks, columns
from relive import (
    Chunks,
    Collector,
    Field,
    Fresh,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Sequence,
    Uniform,
    WithoutReplacement,
)
from relive.batches import SequenceBatch
from relive.errors import EmptyError, ParameterError, SchemaError
from relive.steps.arrays import numpy_dtype
from support import internals, tagged_envs
from support.effort import first_of
from support.other_device import ELSEWHERE, far_device
from support.twins import leaves, mapped, same_batches, stacked

FLAG = Field((), torch.bool)
HIDDEN: Any = (Field((2, 3)), Field((4,)))
SMALL = Schema({"obs": (3,), "reward": (), "terminated": FLAG, "truncated": FLAG})
FURTHER: dict[str, Any] = {"hidden": HIDDEN, "action_mask": Field((5,), torch.bool)}
DRESSES: dict[str, dict[str, Any]] = {
    "plain": {"obs": (3,), "action": Field((), torch.int64)},
    "states and masks": {"obs": (3,), "action": (2,), **FURTHER},
    "nested and large": {
        "obs": {"camera": Field((20, 20, 3), torch.uint8), "arm": ((2,), Field((), torch.float64))},
        "action": {"a": (2,), "b": Field((), torch.int64)},
        "action_mask": Field((1100,), torch.bool),
        "hidden": (6,),
    },
    "with what was before": {"obs": (3,), "action": (2,), "last_reward": (), "last_action": (2,)},
}


class Play:
    """A replay, and its steps in lists.

    Args:
        dress: the fields of a step, of DRESSES.
        own: each step has its next observation.
        rows: of each env.
        options: of the replay.
    """

    def __init__(self, dress: str, own: bool, num_envs: int, rows: int, seed: int, **options: Any) -> None:
        fields = {**DRESSES[dress], "reward": (), "terminated": FLAG, "truncated": FLAG}
        self.schema, self.own, self.rows = Schema(fields), own, rows
        self.rng, self.num_envs = np.random.default_rng(seed), num_envs
        self.steps: list[list[Step]] = [[] for _ in range(num_envs)]
        self.cleared, self.now = [0] * num_envs, [self.value("obs") for _ in range(num_envs)]
        options = {"seed": 0, "check_ends": False, "own_next_obs": own} | options
        self.replay = ReplayBuffer(self.schema, num_envs * rows, num_envs, **options)

    def value(self, name: str) -> Any:
        """A random value of a field, nested as the schema has it."""

        def of(leaf: Any) -> Any:
            shape, dtype = leaf.shape, torch.zeros((), dtype=leaf.dtype).numpy().dtype
            if leaf.dtype is torch.bool:
                return self.rng.random(shape) < 0.5
            return (self.rng.normal(size=shape) * 50).astype(dtype) if dtype.kind == "f" else self.rng.integers(
                0, 100, shape).astype(dtype)  # fmt: skip

        return self.schema.rebuild(name, lambda path: of(self.schema.leaves[path]))

    def add(self, ends: float = 0.2) -> None:
        """One step of each env."""
        names = [name for name in dict.fromkeys(path[0] for path in self.schema.leaves) if name != "obs"]
        given: list[dict[str, Any]] = []
        for e in range(self.num_envs):
            step = {name: self.value(name) for name in names}
            step |= {name: np.bool_(self.rng.random() < ends / 2) for name in ("terminated", "truncated")}
            after, done = self.value("obs"), step["terminated"] or step["truncated"]
            rest = {path: x for name in names for path, x in leaves(step[name], (name,)).items()}
            self.steps[e].append(Step(leaves(self.now[e], ("obs",)), rest, leaves(after, ("obs",)),
                                      bool(step["terminated"]), bool(step["truncated"])))  # fmt: skip
            given.append({"obs": self.now[e], **step, "next_obs": after})
            self.now[e] = self.value("obs") if done else after
        self.replay.add(stacked(given))

    def interrupt(self, envs: list[int]) -> None:
        """The episodes of these envs do not go on."""
        self.replay.interrupt(np.array(envs))
        for e in envs:
            self.cut(e)

    def cut(self, e: int) -> None:
        if self.steps[e]:
            self.steps[e][-1] = self.steps[e][-1]._replace(cut=True)
            self.now[e] = self.value("obs")

    def clear(self) -> None:
        """No row is there any more."""
        self.replay.clear()
        for e in range(self.num_envs):
            self.cut(e)
            self.cleared[e] = self.head(e)

    def head(self, e: int) -> int:
        """How many rows an env has had."""
        done = sum(step.terminated or step.truncated for step in self.steps[e])
        return len(self.steps[e]) + (0 if self.own else done)

    def at_random(self, turns: int) -> Play:
        """Steps, and now and then an interruption; rarely nothing is left."""
        for _ in range(turns):
            chance = self.rng.random()
            if chance < 0.02:
                self.clear()
            elif chance < 0.1:
                self.interrupt([e for e in range(self.num_envs) if self.rng.random() < 0.5])
            else:
                self.add()
        return self

    def known(self, length: int) -> dict[int, list[Any]]:
        """The rows of each chunk that can be drawn, by its index."""
        found: dict[int, list[Any]] = {}
        for e, steps in enumerate(self.steps):
            oldest = max(self.cleared[e], self.head(e) - self.rows, 0)
            for number, rows in chunks(steps, length, self.own, oldest):
                found[number * self.num_envs + e] = rows
        return found

    def check(self, batch: Any = None) -> None:
        """Every chunk of a batch, or all that can be drawn, are those of the lists, to the bit."""
        view, whole = self.replay.view, batch is None
        known = self.known(view.length)
        if whole:
            self.replay.check()
            assert len(self.replay) == len(known)
            batch = self.replay.data()
            assert sorted(batch["index"].tolist()) == sorted(known)
        assert isinstance(batch, SequenceBatch)
        assert batch.time_first is view.time_first
        names = {path[0] for path in self.schema.leaves}
        last = {name for name in view.last if f"last_{name}" not in names}
        stored = {name.removeprefix("last_") for name in names if name.startswith("last_")}
        example = self.steps[0][0]
        derived, fixed = ({(f"last_{path[0]}", *path[1:]): path for path in example.rest if path[0] in some}
                          for some in (last, stored))  # fmt: skip
        found, facts, _ = batch.parts
        for b, index in enumerate(batch["index"].tolist()):
            rows = known[index]
            want = columns(rows, example, derived, fixed)
            if not view.timestep:
                del want["timestep",]
            assert want.keys() == found.keys()
            for path, values in want.items():
                got = (found[path][:, b] if view.time_first else found[path][b]).cpu().numpy()
                assert got.dtype == values.dtype, f"{path}: {got.dtype}, not {values.dtype}"
                assert got.tobytes() == values.tobytes(), f"{path} of {index}: {got}, not {values}"
            one = {name: int(fact[b]) for name, fact in facts.items() if name not in ADDED}
            assert one == {"index": index, "lengths": view.length, "burn_in": 0, "env": index % self.num_envs,
                           "start": rows[0].number}  # fmt: skip
            self.check_state(batch, b, rows[0].step)

    def check_state(self, batch: Any, b: int, step: Step | None) -> None:
        """The state is that of the first row's step."""
        if "hidden" not in batch:
            return
        want = {path: x for path, x in self.steps[0][0].rest.items() if path[0] == "hidden"}
        want = mapped(np.zeros_like, want) if step is None else {path: step.rest[path] for path in want}
        for path, values in want.items():
            state = batch["hidden"] if len(path) == 1 else batch["hidden"][int(path[1])]
            assert state.is_contiguous()
            assert (state[:, b] if values.ndim > 1 else state[b]).cpu().numpy().tobytes() == values.tobytes()


ADDED = ("weight", "probability", "source")
"""Facts that others add."""

OWN = pytest.mark.parametrize("own", [False, True], ids=["shared", "own next_obs"])


@OWN
@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("seed", first_of(3, range(40)))
def test_every_chunk_is_what_the_rows_of_its_env_say_through_all_that_happens(seed: int, dress: str, own: bool) -> None:
    rng = np.random.default_rng([seed, own])
    last = [(), ("action", "reward"), ("reward",)][int(rng.integers(3))]
    view = Chunks(int(rng.integers(2, 8)), last=last, timestep=bool(rng.integers(2)), time_first=bool(rng.integers(2)))
    play = Play(dress, own, int(rng.integers(1, 4)), int(rng.integers(2, 22)), seed, view=view)
    play.add()
    for _ in range(5):
        play.at_random(9).check()
        if len(play.replay):
            play.check(play.replay.sample(7))
        view.length = int(rng.integers(2, 8))


@pytest.mark.slow
@OWN
@pytest.mark.parametrize("seed", range(60))
def test_so_is_every_chunk_of_long_plays(seed: int, own: bool) -> None:
    play = Play("states and masks", own, 3, 40, seed, view=Chunks(9, last=("action", "reward"), timestep=True))
    play.add()
    for _ in range(40):
        play.at_random(10).check()


@OWN
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name.lower())
def test_every_autoreset_mode_gives_the_same_rows(mode: AutoresetMode, own: bool) -> None:
    endings = tagged_envs.drawn(5, 6)
    envs = tagged_envs.make_tagged(2, mode, endings)
    schema = Schema.from_env(envs)
    replay = ReplayBuffer(schema, 40, 2, view=Chunks(5, last=("reward",), timestep=True), own_next_obs=own, seed=0)
    Collector(envs, tagged_envs.tagged_policy, replay, seed=0).collect(60)
    batch = replay.data()
    tags = tagged_envs.decode(batch["obs"])
    assert len(batch) > 20
    for b in range(len(batch)):
        env, episode, step = (getattr(tags, name)[:, b].tolist() for name in ("env", "episode", "step"))
        assert set(env) == {int(batch["env"][b])}
        for t in range(5):
            length, kind = endings(env[t], episode[t])
            over = step[t] == length
            assert batch["timestep"][t, b] == step[t]
            assert batch["is_first"][t, b] == (step[t] == 0)
            assert batch["is_last"][t, b] == over
            assert batch["is_terminal"][t, b] == (over and kind in ("terminated", "both"))
            paid = tagged_envs.reward_of(env[t], episode[t], step[t] - 1) if step[t] else 0
            assert batch["last_reward"][t, b] == np.float32(paid)
            if t:
                assert (episode[t], step[t]) == ((episode[t - 1] + 1, 0) if batch["is_last"][t - 1, b] else
                                                 (episode[t - 1], step[t - 1] + 1))  # fmt: skip


def test_all_chunks_are_drawn_equally_often() -> None:
    play = Play("plain", False, 3, 30, 4, view=Chunks(6)).at_random(80)
    known, draws = play.known(6), 400
    count = draws * len(known)
    counts = Counter(play.replay.sample(count)["index"].tolist())
    assert counts.keys() == known.keys()
    spread = sum((counts[i] - draws) ** 2 / draws for i in known)
    assert spread < len(known) + 6 * np.sqrt(2 * len(known))


SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform, "epochs": WithoutReplacement, "by priority": Prioritized, "recent": lambda: Recent(0.9, 5),
    "recent, by priority": lambda: Recent(0.9, 5, inner=Prioritized()),
}  # fmt: skip


@OWN
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_draws_chunks_as_the_ring_comes_round(sampler: str, own: bool) -> None:
    play = Play("plain", own, 2, 17, 3, sampler=SAMPLERS[sampler](), view=Chunks(4, last=("reward",)))
    for _ in range(12):
        play.at_random(6).replay.check()
        if not len(play.replay):
            continue
        (seq,) = play.replay.batches(1, min(len(play.replay), 6))
        play.check(seq)
        if "priority" in sampler:
            play.replay.update_priorities(seq["index"], torch.rand(seq.shape), mask=seq["mask"])
            assert {"weight", "probability"} <= seq.keys()


@OWN
def test_fresh_serves_each_new_chunk_once_and_counts_none_that_never_was_as_lost(own: bool) -> None:
    sampler, served = Fresh(), Counter[int]()
    play = Play("plain", own, 2, 60, 3, sampler=sampler, view=Chunks(5))
    for _ in range(40):
        play.add()
        known, waiting = play.known(5), sampler.waiting
        assert waiting == len(known.keys() - served.keys())
        if known:
            served.update(play.replay.sample(4)["index"][: min(waiting, 4)].tolist())
        assert (sampler.lost, sampler.served) == (0, len(served))
    assert set(served.values()) == {1}


@OWN
def test_a_save_and_files_go_on_with_the_same_chunks(own: bool, tmp_path: Path) -> None:
    view = Chunks(4, last=("action",), timestep=True)
    play = Play("nested and large", own, 2, 15, 6, view=view).at_random(60)
    play.replay.save(tmp_path / "save")
    again = ReplayBuffer.load(tmp_path / "save")
    assert again.view == play.replay.view
    assert same_batches(again.data(), play.replay.data())
    assert same_batches(again.sample(5), play.replay.sample(5))
    options: dict[str, Any] = {"num_envs": 2, "own_next_obs": own, "check_ends": False, "seed": 0}
    files = ReplayBuffer.open(tmp_path / "files", play.schema, 30, view=copy.copy(view), **options)
    before = play.replay
    play = Play("nested and large", own, 2, 15, 6, view=copy.copy(view))
    play.replay = files
    play.at_random(60).check()
    assert same_batches(files.data(), before.data())
    files.close()
    opened = ReplayBuffer.open(tmp_path / "files")
    assert opened.view == view
    play.replay = opened
    play.check()
    opened.close()


def test_copies_pickles_mixtures_and_kept_memory_give_the_same_chunks() -> None:
    play = Play("states and masks", False, 2, 20, 1, view=Chunks(5, timestep=True)).at_random(60)
    for other in (copy.deepcopy(play.replay), pickle.loads(pickle.dumps(play.replay))):
        assert other.view == play.replay.view
        assert same_batches(other.data(), play.replay.data())
    assert repr(play.replay.view) == "Chunks(length=5, last=(), timestep=True, time_first=True)"
    for batch in play.replay.batches(3, 6, reuse=True):
        play.check(batch)
    mixture = Mixture({"a": play.replay, "b": copy.deepcopy(play.replay)}, {"a": 1, "b": 1})
    play.check(mixture.sample(8))


@pytest.mark.parametrize("dress", ["states and masks", "nested and large", "with what was before"])
def test_on_a_device_they_are_the_same_by_way_of_the_host(dress: str) -> None:
    def view() -> Chunks:
        return Chunks(4, last=("action", "reward"), timestep=True)

    here = Play(dress, False, 2, 15, 6, view=view()).at_random(40)
    with far_device():
        there = Play(dress, False, 2, 15, 6, view=view(), device=ELSEWHERE).at_random(40)
        batch = there.replay.sample(5)
        assert batch["is_first"].device == torch.device(ELSEWHERE)
        assert same_batches(batch.to("cpu"), here.replay.sample(5))


class Columns:
    """A store of one's own: an array for each field."""

    def __init__(self, fields: Any, rows: int) -> None:
        self.arrays = {path: np.zeros((rows, *field.shape), numpy_dtype(field.dtype)) for path, field in fields.items()}

    def write(self, path: Any, rows: Any, values: Any) -> None:
        self.arrays[path][rows] = values

    def read(self, path: Any, rows: Any) -> Any:
        return self.arrays[path][rows]


@OWN
@pytest.mark.parametrize("dress", DRESSES)
def test_out_of_a_store_of_ones_own_they_are_the_same_and_so_are_sequences(dress: str, own: bool) -> None:
    views: list[Callable[[], Any]] = [lambda: Chunks(4, last=("action", "reward"), timestep=True)]
    if not own:
        views.append(lambda: Sequence(3, 1, last=("action", "reward"), timestep=True))
    for view in views:
        here, there = (Play(dress, own, 2, 15, 6, view=view(), **store) for store in ({}, {"store": Columns}))
        for play in (here, there):
            play.at_random(50)
            for _ in range(9):
                play.add()
        assert same_batches(there.replay.data(), here.replay.data())
        assert same_batches(there.replay.sample(5), here.replay.sample(5))


def test_a_device_that_was_ahead_of_its_host_gives_the_same_chunks() -> None:
    def filled(device: Any) -> Any:
        replay = ReplayBuffer(SMALL, 40, 2, view=NStep(2), seed=0, device=device, check_ends=False)
        for t in range(30):
            ends = {"terminated": torch.tensor([t % 5 == 4, t % 7 == 6]), "truncated": torch.zeros(2).bool()}
            now, after = (torch.full((2, 3), float(number)) for number in (t, -t - 1))
            step = {"obs": now, "reward": torch.ones(2), "next_obs": after, **ends}
            replay.add({name: x.to(device) for name, x in step.items()})
            if t > 20:
                replay.sample(4)
        replay.view = Chunks(6, last=("reward",), timestep=True)
        return replay

    here = filled("cpu")
    with far_device():
        there = filled(ELSEWHERE)
        assert same_batches(there.data().to("cpu"), here.data())
        there.view = NStep(2)
        there.sample(4)
        there.view = Sequence(4, timestep=True)
        here.view = Sequence(4, timestep=True)
        assert same_batches(there.data().to("cpu"), here.data())


# What is refused


def test_what_cannot_be_read_in_chunks_is_refused_with_what_to_do() -> None:
    flags = {"reward": (), "terminated": FLAG, "truncated": FLAG}
    plain = Schema({"obs": (2,), **flags})
    with pytest.raises(SchemaError, match="Chunks needs steps in the order of time"):
        ReplayBuffer(plain, 20, ordered=False, view=Chunks(4))
    with pytest.raises(SchemaError, match="'is_first': Chunks gives batches a field of that name"):
        ReplayBuffer(Schema({"obs": (2,), "is_first": FLAG, **flags}), 20, view=Chunks(4))
    named = Schema({"obs": (2,), "timestep": (), **flags})
    ReplayBuffer(named, 20, view=Chunks(4))
    with pytest.raises(SchemaError, match="field 'timestep'"):
        ReplayBuffer(named, 20, view=Chunks(4, timestep=True))
    replay = ReplayBuffer(named, 20, view=Sequence(4, timestep=True), seed=0)
    final: dict[str, Any] = {"terminated": [True], "truncated": [False], "next_obs": np.zeros((1, 2))}
    replay.add(obs=np.zeros((1, 2)), timestep=[0], reward=[0], **final)
    with pytest.raises(SchemaError, match="field 'timestep'"):
        replay.data()
    with pytest.raises(SchemaError, match=r"Chunks\(last=\('action',\)\): 'action' is not one of the fields"):
        ReplayBuffer(plain, 20, view=Chunks(4, last=("action",)))
    for length in (1, 0, 2.5, True):
        with pytest.raises(ParameterError, match="length is a number of rows, at least 2"):
            Chunks(length)  # pyright: ignore[reportArgumentType]


def test_a_replay_that_has_no_chunk_says_how_many_rows_one_needs() -> None:
    play = Play("plain", False, 1, 6, 0, view=Chunks(9))
    for _ in range(20):
        play.add()
    with pytest.raises(EmptyError, match=r"one has 9 successive rows of an env.*newest 6 rows"):
        play.replay.sample(2)


def test_places_that_are_no_ends_of_chunks_are_refused() -> None:
    play = Play("plain", False, 1, 12, 0, view=Chunks(4)).at_random(30)
    ring, view = internals.ring(play.replay), play.replay.view
    wrong = next(place for place in ring.places().tolist() if place not in ring.anchors())
    with pytest.raises(ParameterError, match=f"entry 1 is {wrong}"):
        view.read(ring, np.array([int(ring.anchors()[0]), wrong]))
    view.length = 5
    with pytest.raises(ParameterError, match="must also have its `rule`"):
        view.read(ring, ring.anchors())


# The number of a row in its episode


@pytest.mark.parametrize("time_first", [True, False])
@pytest.mark.parametrize("dress", ["plain", "nested and large"])
def test_sequences_say_which_step_of_its_episode_each_row_is(dress: str, time_first: bool) -> None:
    view = Sequence(3, 2, n=2, timestep=True, time_first=time_first)
    play = Play(dress, False, 2, 20, 3, view=view).at_random(70)
    seq = play.replay.data()
    assert seq["timestep"].dtype is torch.int64
    steps, starts = seq["timestep"], seq["start"] - seq["burn_in"]
    steps = steps if time_first else steps.T
    for b in range(len(seq)):
        rows = int(seq["lengths"][b])
        first = timesteps_of(play, int(seq["env"][b]))[int(starts[b])]
        assert steps[:rows, b].tolist() == list(range(first, first + rows))
        assert (steps[rows:, b] == 0).all()


def timesteps_of(play: Play, e: int) -> list[int]:
    """The number in its episode of each row of an env, of all that it has had."""
    found, t = list[int](), 0
    for step in play.steps[e]:
        found.append(t)
        t += 1
        if step.terminated or step.truncated:
            found.append(t)
        if step.terminated or step.truncated or step.cut:
            t = 0
    return found
