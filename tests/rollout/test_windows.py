"""Sequences of a rollout: exactly the windows that a list of episodes has, with nothing of another episode in them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import oracle
import relive
import tagged
from oracle import Stretch
from relive import Collector, Field, RolloutBuffer, Schema, SequenceBatch, errors
from relive.kernels import cpu, reference

Path = tuple[str, ...]

FLAG = Field((), torch.bool)
SMALL = Schema({"obs": (2,), "reward": (), "terminated": FLAG, "truncated": FLAG, "hidden": (1, 2)})
RICH = Schema(
    {
        "obs": {"camera": Field((33, 32), torch.uint8), "body": ((3,), Field((), torch.int64)), "touch": FLAG},
        "action": (Field((), torch.int64), Field((2,), torch.float64)),
        "reward": (),
        "terminated": FLAG,
        "truncated": FLAG,
        "value": (),
        "log_prob": Field((), torch.bfloat16),
        "advantage": (),
        "action_mask": Field((5,), torch.int8),
        "hidden": {
            "actor": ((2, 3), (2, 3)),
            "critic": Field((4,), torch.float64),
            "half": (Field((1, 3), torch.bfloat16),),
        },
    }
)
assert RICH.leaves["obs", "camera"].nbytes > 1024  # read where it lies, never packed
LETTERS = ".TUBmM"
FACTS = {"lengths", "burn_in", "env", "start"}
OVERLAPS = ("none", "half", "max")


# Worlds: steps [T, N] of which every number tells its time and env.


@dataclass
class World:
    """What was added to a rollout: its columns ``[T, N, ...]``, and whose episode before it had ended, ``[N]``.

    ``letters`` ``[T, N]``: "." goes on, "T" terminates, "U" truncates, "B" is both, "m" is not real, and "M" is a
    truncation that is not (its final observation was hidden).
    """

    schema: Schema
    letters: np.ndarray
    columns: dict[Path, Tensor]
    ended: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        return ~np.isin(self.letters, ["m", "M"])

    @property
    def terminated(self) -> np.ndarray:
        return np.isin(self.letters, ["T", "B"])

    @property
    def truncated(self) -> np.ndarray:
        return np.isin(self.letters, ["U", "B", "M"])

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    def stretches(self, length: int | None, stride: int, **options: Any) -> list[Stretch]:
        flags = self.terminated, self.truncated, self.mask
        return oracle.stretches(*flags, length=length, stride=stride, ended=self.ended, **options)

    def newest(self, steps: int) -> World:
        """The last steps of it, as a rollout that wraps keeps them."""
        gone = self.letters[:-steps]
        ended = self.ended.copy()
        for row in gone:
            ended = np.isin(row, list("TUBM")) | (ended & (row == "m"))
        columns = {path: column[-steps:] for path, column in self.columns.items()}
        return World(self.schema, self.letters[-steps:], columns, ended)


def world_of(letters: Any, schema: Schema = SMALL, ended: Any = None) -> World:
    """``letters``: a string per env, or an array ``[T, N]``."""
    if not isinstance(letters, np.ndarray):
        letters = np.array([list(env) for env in letters]).T
    steps, envs = letters.shape
    code = 1 + torch.arange(steps * envs).view(steps, envs)
    columns = {path: numbered(field, code, i) for i, (path, field) in enumerate(schema.leaves.items())}
    world = World(schema, letters, columns, np.ones(envs, bool) if ended is None else np.asarray(ended))
    columns["terminated",] = torch.from_numpy(world.terminated)
    columns["truncated",] = torch.from_numpy(world.truncated)
    return world


def numbered(field: Field, code: Tensor, salt: int) -> Tensor:
    """A column ``[T, N, ...]`` that tells every step from every other, and its elements from each other."""
    numbers = code[..., None] * 8 + torch.arange(math.prod(field.shape)) + salt
    if field.dtype is torch.int64:
        numbers = numbers + 2**60  # no float holds it
    if field.dtype in (torch.bool, torch.int8):
        numbers = numbers // 8 % 2
    return numbers.to(field.dtype).view(*code.shape, *field.shape)


def add_all(rollout: RolloutBuffer, world: World, times: Iterable[int] | None = None) -> RolloutBuffer:
    """Add the steps of a world one by one."""
    for t in range(len(world.letters)) if times is None else times:
        step = {
            name: world.schema.rebuild(name, lambda path, t=t: world.columns[path][t]) for name in world.schema.names
        }
        rollout.add(step, mask=world.mask[t])
    return rollout


def filled(world: World, num_steps: int | None = None, *, seed: int = 0, **options: Any) -> RolloutBuffer:
    """A rollout that holds this world, and before it held a step that ended where the world says so."""
    steps, envs = world.letters.shape
    rollout = RolloutBuffer(world.schema, num_steps or steps, envs, seed=seed, **options)
    if not world.ended.all():
        before = world_of(np.where(world.ended, "T", ".")[None], world.schema)
        add_all(rollout, before).clear()
    return add_all(rollout, world)


def strides(length: int) -> Iterator[tuple[Any, int]]:
    """Every overlap of windows of that length, and how far their starts are then apart."""
    yield from [("none", length), ("half", max(length // 2, 1)), ("max", 1)]
    yield from ((overlap, length - overlap) for overlap in range(1, length - 1))


def patterns(letters: str, steps: int) -> np.ndarray:
    """All that may happen to one env in so many steps, each to an env of its own: ``[T, N]``."""
    return np.array(list(itertools.product(letters, repeat=steps))).T


# What sequences should be.


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that what is compared is all of it."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) if x.numel() else x.reshape(-1)


def assert_same(got: Tensor, want: Tensor, what: Any) -> None:
    assert got.dtype is want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    assert torch.equal(bits(got), bits(want)), f"{what}: {got}, not {want}"


def begins(seq: SequenceBatch) -> Tensor:
    """Which sequences begin with an episode, bool ``[B]``; no other row of theirs can."""
    rows = seq["is_start"] if seq.time_first else seq["is_start"].T
    assert rows.dtype is torch.bool
    assert not rows[1:].any()
    return rows[0]


def found_in(batches: Iterable[SequenceBatch]) -> list[Stretch]:
    """The windows of batches, in the order they came."""
    found: list[Stretch] = []
    for seq in batches:
        facts = seq["env"], seq["start"], seq["lengths"] - seq["burn_in"], begins(seq)
        found += [Stretch(*fact) for fact in zip(*(fact.tolist() for fact in facts), strict=True)]
    return found


def check_batch(
    world: World, seq: SequenceBatch, rows: int | None, *, time_first: bool = True, every: int = 1, initial: Any = None
) -> None:
    """Everything in a batch is what the world has at those times, and nothing else is in it."""
    env, start = seq["env"], seq["start"]
    has_hidden = "hidden" in world.schema
    known = [
        oracle.state_row(world.done, world.mask, world.ended, t, n, every if has_hidden else 1)
        for t, n in zip(start.tolist(), env.tolist(), strict=True)
    ]
    first = torch.tensor(known, dtype=torch.int64)
    lengths = seq["lengths"]
    assert_same(seq["burn_in"], start - first, "burn_in")
    for name in FACTS:
        assert seq[name].dtype is torch.int64, name
        assert seq[name].shape == (len(env),), name
    assert begins(seq).tolist() == [
        oracle.starts_episode(world.done, world.mask, world.ended, t, n)
        for t, n in zip(known, env.tolist(), strict=True)
    ]
    high = int(lengths.max()) if rows is None else min(rows, len(world.letters))
    time = torch.arange(high)[:, None]
    inside = time < lengths
    at = torch.where(inside, first + time, 0)
    mask = inside & (time >= seq["burn_in"])
    assert seq.time_first is time_first
    assert seq.num_sequences == len(env)
    assert seq.num_steps == int(mask.sum())
    shape = (high, len(env)) if time_first else (len(env), high)
    assert tuple(seq.data.batch_size) == seq["is_start"].shape == shape
    got = {("mask",): seq["mask"]} | leaves_of(seq)
    wanted = {path for path in world.columns if path[0] != "hidden" and path[0] in seq}
    assert got.keys() == wanted | {("mask",)}
    for path, x in got.items():
        x = x if time_first else x.transpose(0, 1)
        if path == ("mask",):
            assert_same(x, mask, path)
            continue
        column = world.columns[path]
        want = column[at, env]
        want[~inside] = 1 if path == ("action_mask",) else 0
        assert_same(x, want, path)
    if has_hidden:
        check_hidden(world, seq, first, env, every, initial)


def check_hidden(
    world: World, seq: SequenceBatch, first: Tensor, env: Tensor, every: int, initial: Mapping[Path, Tensor] | None
) -> None:
    """The state before the first row, as the schema nests it and the policy got it."""
    got = seq["hidden"]
    count = 0

    def leaf(path: Path) -> None:
        nonlocal count
        count += 1
        state: Any = got
        for key in path[1:]:
            state = state[int(key) if isinstance(state, tuple) else key]
        column = world.columns[path]
        want = column[first, env]
        given = torch.zeros_like(want[0]) if initial is None else initial[path]
        want[first % every != 0] = given
        if column.dim() == 4:
            want = want.transpose(0, 1)
        assert_same(state, want.contiguous(), path)
        assert state.is_contiguous(), path

    tree = world.schema.rebuild("hidden", leaf)
    assert type(got) is type(tree) or isinstance(got, Tensor)
    assert count == sum(path[0] == "hidden" for path in world.schema.leaves)


def leaves_of(seq: SequenceBatch) -> dict[Path, Tensor]:
    """The padded fields of a batch by path, but for its mask; ``seq[name]`` and ``seq.data`` give the same."""
    found: dict[Path, Tensor] = {}
    for name in seq:
        if name in FACTS or name in ("hidden", "mask", "is_start"):
            continue
        value = seq[name]
        if isinstance(value, Tensor):
            found[name,] = value
            assert seq.data[name] is value or torch.equal(bits(seq.data[name]), bits(value))
            continue
        for key, x in value.items(include_nested=True, leaves_only=True):
            found[name, *((key,) if isinstance(key, str) else key)] = x
    return found


def check_all(
    world: World, rollout: RolloutBuffer, length: int | None, overlap: Any, stride: int, **options: Any
) -> int:
    """A rollout has exactly the windows of the oracle, with what belongs in them; how many."""
    want = world.stretches(length, stride, **options)
    if not want:
        assert not list(rollout.sequences(length, overlap=overlap, **options))
        return 0
    (seq,) = rollout.sequences(length, overlap=overlap, **options)
    assert sorted(found_in([seq])) == sorted(want)
    if not options:
        check_batch(world, seq, length)
    return len(want)


# The oracle, and that everything is there


@pytest.mark.parametrize("length", range(1, 9))
def test_the_oracles_windows_are_those_of_both_definitions(length: int) -> None:
    """The definition by first steps, and the one by last steps that a replay goes by."""
    for count, stride in itertools.product(range(1, 20), range(1, length + 1)):
        found = oracle.windows(count, length, stride)
        firsts = [i for i in range(0, count, stride) if i == 0 or i + length - stride < count]
        assert found == [(i, min(length, count - i)) for i in firsts]
        ends = [j for j in range(count) if j >= length - 1 and (j - length + 1) % stride == 0]
        by_last = [(j - length + 1, length) for j in ends]
        if count - 1 not in ends:
            tail = 0 if count < length else stride * math.ceil((count - length) / stride)
            by_last.append((tail, count - tail))
        assert found == by_last
        assert oracle.windows(count, length, stride, drop_tail=True) == [w for w in found if w[1] == length]
        assert {t for first, steps in found for t in range(first, first + steps)} == set(range(count))


def both_pasts(letters: np.ndarray) -> World:
    """Each pattern twice: as the start of a life, and as what follows a step that ended no episode."""
    envs = letters.shape[1]
    return world_of(np.concatenate([letters, letters], 1), ended=np.arange(2 * envs) < envs)


def check_every_window(world: World) -> None:
    rollout = filled(world)
    for options in ({}, {"complete": True}, {"drop_tail": True}, {"complete": True, "drop_tail": True}):
        whole = check_all(world, rollout, None, "none", len(world.letters), **options)
        assert whole, "no pattern ends"
        for length in range(1, len(world.letters) + 3):
            for overlap, stride in strides(length):
                check_all(world, rollout, length, overlap, stride, **options)


@pytest.mark.parametrize(("letters", "steps"), [(LETTERS, 1), (LETTERS, 2), (LETTERS, 3), (".TmM", 4)])
def test_every_short_pattern_has_exactly_the_windows_of_its_episodes(letters: str, steps: int) -> None:
    check_every_window(both_pasts(patterns(letters, steps)))


@pytest.mark.slow
@pytest.mark.parametrize(("letters", "steps"), [(LETTERS, 4), (".TmM", 5), (".T", 8)])
def test_every_longer_pattern_has_exactly_the_windows_of_its_episodes(letters: str, steps: int) -> None:
    check_every_window(both_pasts(patterns(letters, steps)))


def check_two_envs(pattern: tuple[str, ...], steps: int) -> None:
    world = world_of(np.array(pattern).reshape(steps, 2))
    if not world.mask.any():
        return
    rollout = filled(world)
    for length, (overlap, stride) in ((None, ("none", steps)), *((n, s) for n in (1, 2, 3) for s in strides(n))):
        check_all(world, rollout, length, overlap, stride)


def test_every_pattern_of_two_envs_has_exactly_the_windows_of_its_episodes() -> None:
    for pattern in itertools.product(".Tm", repeat=4):
        check_two_envs(pattern, 2)
    every = list(itertools.product(".TmM", repeat=6))
    for i in np.random.default_rng(0).choice(len(every), 40, replace=False):
        check_two_envs(every[i], 3)


@pytest.mark.slow
def test_every_longer_pattern_of_two_envs_has_exactly_the_windows_of_its_episodes() -> None:
    for pattern in itertools.product(".TmM", repeat=6):
        check_two_envs(pattern, 3)


@st.composite
def worlds(draw: st.DrawFn, schema: Schema = SMALL, longest: int = 24) -> World:
    """A rollout that ends never to always, with resets and hidden ends in it or not."""
    steps, envs = draw(st.integers(1, longest)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ends, unreal = draw(st.sampled_from([0, 0.1, 0.4, 1])), draw(st.sampled_from([0, 0, 0.2]))
    going = np.where(rng.random((steps, envs)) < unreal, "m", ".")
    ending = np.where(rng.random((steps, envs)) < unreal, "M", rng.choice(list("TUB"), (steps, envs)))
    letters = np.where(rng.random((steps, envs)) < ends, ending, going)
    return world_of(letters, schema, rng.random(envs) < 0.5)


@given(
    world=worlds(),
    length=st.one_of(st.none(), st.integers(1, 30)),
    share=st.floats(0, 0.999),
    complete=st.booleans(),
    drop_tail=st.booleans(),
)
def test_any_rollout_has_exactly_the_windows_of_its_episodes(
    world: World, length: int | None, share: float, complete: bool, drop_tail: bool
) -> None:
    overlap = "none" if length is None else int(share * length)
    stride = len(world.letters) if length is None else length - int(overlap)
    options = {"complete": complete, "drop_tail": drop_tail} if complete or drop_tail else {}
    if world.mask.any():
        check_all(world, filled(world), length, overlap, stride, **options)


@given(
    world=worlds(RICH, longest=12),
    length=st.sampled_from([None, 1, 3, 5, 13]),
    overlap=st.sampled_from(OVERLAPS),
    time_first=st.booleans(),
    sizes=st.sampled_from([{}, {"batch_size": 3}, {"num_batches": 1}, {"batch_steps": 7}]),
    epochs=st.integers(1, 3),
    some=st.booleans(),
)
def test_fields_of_any_nesting_dtype_and_size_are_what_they_were(
    world: World, length: int | None, overlap: Any, time_first: bool, sizes: Any, epochs: int, some: bool
) -> None:
    if not world.mask.any():
        return
    overlap = "none" if length is None else overlap
    stride = len(world.letters) if length is None else dict(strides(length))[overlap]
    rollout = filled(world)
    fields = ("obs", "action_mask") if some else None
    want = sorted(world.stretches(length, stride) * epochs)
    batches = list(
        rollout.sequences(length, overlap=overlap, time_first=time_first, epochs=epochs, fields=fields, **sizes)
    )
    assert sorted(found_in(batches)) == want
    for seq in batches:
        names = set(fields or set(RICH.names) - {"hidden"})
        assert set(seq) == names | FACTS | {"mask", "is_start", "hidden"}
        check_batch(world, seq, length, time_first=time_first)


@pytest.mark.parametrize("length", [1, 2, 3, 7, None])
def test_without_overlap_every_real_step_comes_exactly_once_an_epoch(length: int | None) -> None:
    world = world_of(["..T.mU.....", "T.T..M....m", "mm........U"], RICH)
    rollout = filled(world)
    for epoch in range(3):
        steps: Counter[tuple[int, int]] = Counter()
        for seq in rollout.sequences(length, batch_size=2):
            steps.update((env, start + i) for env, start, count, _ in found_in([seq]) for i in range(count))
        assert steps == Counter((n, t) for t, n in np.argwhere(world.mask).tolist()), epoch


def test_with_overlap_a_step_comes_as_often_as_there_are_windows_over_it() -> None:
    rollout = filled(world_of(["." * 9]))
    counts = {}
    for overlap in OVERLAPS:
        steps = [start + i for _, start, n, _ in found_in(rollout.sequences(4, overlap=overlap)) for i in range(n)]
        counts[overlap] = [steps.count(t) for t in range(9)]
    assert counts == {
        "none": [1] * 9,
        "half": [1, 1, 2, 2, 2, 2, 2, 2, 1],
        "max": [1, 2, 3, 4, 4, 4, 3, 2, 1],
    }


# What a batch looks like


def test_a_batch_reads_as_its_documentation_says() -> None:
    world = world_of(["..T..", ".U..."], RICH)
    (seq,) = filled(world).sequences(3, shuffle=False)
    assert found_in([seq]) == [(0, 0, 3, True), (0, 3, 2, True), (1, 0, 2, True), (1, 2, 3, True)]
    assert seq["mask"].T.tolist() == [[True] * 3, [True, True, False], [True, True, False], [True] * 3]
    assert seq["lengths"].tolist() == [3, 2, 2, 3]
    assert seq["burn_in"].tolist() == [0, 0, 0, 0]
    assert seq["obs"]["camera"].shape == (3, 4, 33, 32)
    assert seq["obs"]["camera"].dtype is torch.uint8
    assert seq["action"]["0"].dtype is torch.int64
    assert seq["log_prob"].dtype is torch.bfloat16
    assert not seq["reward"][2, 1]
    assert not seq["obs"]["camera"][2, 1:3].any()
    assert seq["action_mask"][2, 1].tolist() == [1] * 5
    actor, critic = seq["hidden"]["actor"], seq["hidden"]["critic"]
    assert isinstance(actor, tuple)
    assert [x.shape for x in (*actor, critic)] == [(2, 4, 3), (2, 4, 3), (4, 4)]
    assert torch.equal(actor[0][:, 1], world.columns["hidden", "actor", "0"][3, 0])
    (seq,) = filled(world).sequences(3, shuffle=False, time_first=False)
    assert seq["obs"]["camera"].shape == (4, 3, 33, 32)
    assert seq["mask"].shape == (4, 3)
    assert seq["hidden"]["actor"][0].shape == (2, 4, 3)


def test_a_batch_is_a_mapping() -> None:
    (seq,) = filled(world_of(["..T", "..."])).sequences(2)
    names = {"obs", "reward", "terminated", "truncated", "mask", "is_start", "hidden"} | FACTS
    assert isinstance(seq, Mapping)
    assert set(seq) == set(seq.keys()) == {name for name, _ in seq.items()} == names
    assert len(seq) == len(list(seq)) == len(names)
    assert "obs" in seq
    assert "nope" not in seq
    assert seq.get("nope") is None
    assert seq.get("obs") is seq["obs"]
    assert {**seq}.keys() == names
    with pytest.raises(errors.FieldError, match=r"'rewrad'.*did you mean 'reward'"):
        _ = seq["rewrad"]
    assert "SequenceBatch" in repr(seq)
    assert "reward" in repr(seq)


def test_batches_are_copies() -> None:
    world = world_of(["..T..", ".U..."], RICH)
    rollout = filled(world)
    for epochs in (1, 2):
        for seq in rollout.sequences(3, epochs=epochs):
            for x in leaves_of(seq).values():
                x.zero_()
            seq["hidden"]["critic"].zero_()
            seq["mask"].zero_()
    (seq,) = rollout.sequences(3)
    check_batch(world, seq, 3)


def test_a_rollout_without_hidden_state_has_sequences_without_it() -> None:
    schema = Schema({"obs": (2,), "terminated": FLAG, "truncated": FLAG})
    world = world_of(["..T..", ".U..."], schema)
    (seq,) = filled(world).sequences(2)
    check_batch(world, seq, 2)
    assert "hidden" not in seq
    with pytest.raises(errors.FieldError, match="'hidden'"):
        _ = seq["hidden"]


def test_hidden_states_are_given_even_if_only_other_fields_are_wanted() -> None:
    world = world_of(["..T.."])
    (seq,) = filled(world).sequences(2, fields=("reward",))
    assert set(seq) == {"reward", "mask", "is_start", "hidden"} | FACTS
    check_batch(world, seq, 2)


def test_columns_that_were_attached_are_among_the_fields() -> None:
    world = world_of(["..T..", ".U..."], RICH)
    rollout = filled(world)
    rollout["extra"] = 5 + torch.arange(10.0).view(5, 2)
    for fields in (None, ("extra", "obs")):
        (seq,) = rollout.sequences(3, fields=fields, shuffle=False)
        assert seq["extra"].T.tolist() == [[5, 7, 9], [11, 13, 0], [6, 8, 0], [10, 12, 14]]


def test_final_values_and_masks_can_be_asked_for() -> None:
    world = world_of([".U.", "..."], RICH)
    rollout = filled(world)
    rollout.set_final_value([1], [0], [7.0])
    assert "final_value" not in next(rollout.sequences(2))
    (seq,) = rollout.sequences(3, fields=("final_value",), shuffle=False)
    assert seq["final_value"][:2, 0].isnan().tolist() == [True, False]
    assert seq["final_value"][1, 0] == 7
    (seq,) = rollout.sequences(3, fields=("obs", "mask"), shuffle=False)
    assert seq["mask"].T.tolist() == [[True, True, False], [True, False, False], [True] * 3]


def test_the_mask_alone_can_be_asked_for() -> None:
    (seq,) = filled(world_of(["..T.."])).sequences(3, fields=("mask",), shuffle=False)
    assert seq["mask"].T.tolist() == [[True] * 3, [True, True, False]]
    assert set(seq) == {"mask", "is_start", "hidden"} | FACTS


@pytest.mark.parametrize("name", ["env", "start", "lengths", "burn_in", "done"])
def test_a_field_whose_name_a_batch_needs_is_refused_unless_it_is_left_out(name: str) -> None:
    rollout = filled(world_of(["..T.."], SMALL.extend(**{name: (2,)})))
    for call in (rollout.sequences, rollout.chunks):
        with pytest.raises(errors.FieldError, match=rf"'{name}'.*fields="):
            call(3)
        assert "obs" in next(call(3, fields=("obs",)))


def test_a_field_without_elements_has_sequences_too() -> None:
    schema = SMALL.extend(nothing=(0,), hidden=(1, 2))
    world = world_of(["..T.."], schema)
    for epochs in (1, 2):
        for seq in filled(world).sequences(2, epochs=epochs):
            assert seq["nothing"].shape == (2, 3, 0)


# Flat, pad, packed, to


@pytest.mark.parametrize("time_first", [True, False])
def test_flat_gives_the_steps_to_learn_from_sequence_by_sequence_and_pad_puts_them_back(time_first: bool) -> None:
    world = world_of(["..T.m.", ".U....", "...M.."], RICH)
    (seq,) = filled(world).sequences(3, time_first=time_first)
    flat = seq.flat()
    where = [(start + i, env) for env, start, count, _ in found_in([seq]) for i in range(count)]
    assert tuple(flat.batch_size) == (len(where),) == (seq.num_steps,)
    paths = leaves_of(seq).keys()
    for path in paths:
        want = torch.stack([world.columns[path][place] for place in where])
        assert_same(flat[path], want, path)
        padded = seq.pad(flat[path])
        like = seq.data[path]
        assert padded.shape == like.shape
        assert padded.dtype is like.dtype
        assert_same(seq.flat(padded), want, path)
        assert not padded[~seq["mask"]].any()
    keys = {key if isinstance(key, tuple) else (key,) for key in flat.keys(True, True)}
    assert keys == {*paths, ("is_start",)}


@pytest.mark.parametrize("time_first", [True, False])
def test_flat_and_pad_take_a_networks_output_and_pass_its_gradient(time_first: bool) -> None:
    (seq,) = filled(world_of(["..T..", ".U..."])).sequences(3, time_first=time_first)
    out = torch.randn(*seq["mask"].shape, 2, 4, requires_grad=True)
    flat = seq.flat(out)
    assert flat.shape == (seq.num_steps, 2, 4)
    flat.sum().backward()
    assert torch.equal(out.grad, seq["mask"][..., None, None].expand_as(out).float())
    rows = torch.randn(seq.num_steps, requires_grad=True)
    seq.pad(rows * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full_like(rows, 2))
    assert torch.equal(seq.flat(seq["mask"]), torch.ones(seq.num_steps, dtype=torch.bool))


def test_shapes_that_do_not_fit_a_batch_are_refused() -> None:
    (seq,) = filled(world_of(["..T..", ".U..."])).sequences(3, shuffle=False)
    with pytest.raises(errors.ShapeError, match=r"\(3, 4\).*got \(4, 3, 2\)"):
        seq.flat(torch.zeros(4, 3, 2))
    with pytest.raises(errors.ShapeError, match=r"\[L, B, \.\.\.\].*got \(5,\)"):
        seq.flat(torch.zeros(5))
    with pytest.raises(errors.ShapeError, match=r"10 steps.*got \(9, 2\)"):
        seq.pad(torch.zeros(9, 2))
    with pytest.raises(errors.ShapeError, match=r"10 steps.*got \(\)"):
        seq.pad(torch.tensor(1.0))


@pytest.mark.parametrize("time_first", [True, False])
def test_a_packed_field_goes_through_an_lstm_like_a_padded_one(time_first: bool) -> None:
    torch.manual_seed(0)
    schema = SMALL.extend(hidden=((2, 5), (2, 5)))
    world = world_of(["..T.....", ".U...T..", "........"], schema)
    (seq,) = filled(world).sequences(4, time_first=time_first)
    lstm = nn.LSTM(2, 5, 2, batch_first=not time_first)
    states = tuple(x / 100 for x in seq["hidden"])
    padded, _ = lstm(seq["obs"] / 100, states)
    packed = seq.packed("obs")
    assert len(packed.data) == seq.num_steps
    out, last = lstm(packed._replace(data=packed.data / 100), states)
    unpacked, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=not time_first)
    assert torch.equal(lengths, seq["lengths"])
    torch.testing.assert_close(seq.flat(unpacked), seq.flat(padded))
    rows = (seq["lengths"] - 1, torch.arange(seq.num_sequences))
    torch.testing.assert_close(last[0][-1], padded[rows if time_first else rows[::-1]])


def test_a_batch_moves_to_another_device_with_all_that_is_in_it() -> None:
    (seq,) = filled(world_of(["..T..", ".U..."], RICH)).sequences(3)
    moved = seq.to("meta")
    assert set(moved) == set(seq)
    assert (moved.time_first, moved.num_sequences) == (True, 4)
    tensors = [*leaves_of(seq), *FACTS, "mask", "is_start"]
    for name in tensors:
        assert (moved.data[name] if isinstance(name, tuple) else moved[name]).device.type == "meta"
    hidden = moved["hidden"]
    assert isinstance(hidden["actor"], tuple)
    assert {x.device.type for x in (*hidden["actor"], hidden["critic"], *hidden["half"])} == {"meta"}
    assert seq["obs"]["touch"].device.type == "cpu"


# Batches of an epoch


WORLD = world_of(["..T.....", ".U...T..", "....m...", "T......."])


@pytest.mark.parametrize("size", range(1, 16))
def test_batches_have_so_many_sequences_and_the_last_one_takes_what_remains(size: int) -> None:
    rollout = filled(WORLD)
    total = len(WORLD.stretches(3, 3))
    sizes = [seq.num_sequences for seq in rollout.sequences(3, batch_size=size)]
    assert sum(sizes) == total
    assert sizes == [size] * (total // size) + [total % size] * (total % size > 0)


def test_a_number_of_batches_splits_the_sequences_evenly() -> None:
    rollout = filled(WORLD)
    total = len(WORLD.stretches(3, 3))
    for count in range(1, total + 1):
        sizes = [seq.num_sequences for seq in rollout.sequences(3, num_batches=count)]
        assert (len(sizes), sum(sizes)) == (count, total)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("steps", range(1, 34))
def test_batches_of_so_many_steps_are_as_full_as_the_order_allows(length: int | None, steps: int) -> None:
    rollout = filled(WORLD)
    batches = [[window.length for window in found_in([seq])] for seq in rollout.sequences(length, batch_steps=steps)]
    assert sum(map(sum, batches)) == WORLD.mask.sum()
    for mine, following in itertools.pairwise([*batches, [steps + 1]]):
        assert sum(mine) <= steps or len(mine) == 1
        assert sum(mine) + following[0] > steps


def test_without_a_size_an_epoch_is_one_batch() -> None:
    batches = list(filled(WORLD).sequences(3, epochs=4))
    assert [seq.num_sequences for seq in batches] == [len(WORLD.stretches(3, 3))] * 4


@pytest.mark.parametrize("sizes", [{"batch_size": 2}, {"num_batches": 3}, {"batch_steps": 6}])
def test_a_new_order_is_drawn_every_epoch_and_it_is_a_function_of_the_seed_and_the_draw(sizes: Any) -> None:
    def orders(seed: int, count: int, draws: int = 0) -> list[list[Stretch]]:
        rollout = filled(WORLD, seed=seed)
        for _ in range(draws):
            rollout.sample(1)
        return [found_in(rollout.sequences(2, **sizes)) for _ in range(count)]

    one = orders(0, 4)
    assert len(set(map(tuple, one))) == 4
    assert all(sorted(order) == sorted(one[0]) for order in one)
    assert orders(0, 4) == one
    assert orders(0, 2, draws=2) == one[2:]
    assert orders(1, 4)[0] != one[0]
    together = list(filled(WORLD).sequences(2, epochs=4, **sizes))
    assert found_in(together) == [window for order in one for window in order]


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    rollout = filled(WORLD)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    one = found_in(rollout.sequences(2, batch_size=2))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    torch.manual_seed(123)
    assert found_in(filled(WORLD).sequences(2, batch_size=2)) == one


def test_every_sequence_can_come_at_every_place_of_an_epoch() -> None:
    """A bias of 1 in 100 towards the place a sequence has in time would take a far larger sample to pass: see below."""
    world = world_of(["." * 10])
    rollout, draws = filled(world), 4000
    counts = np.zeros((10, 10))
    for _ in range(draws):
        (seq,) = rollout.sequences(1, fields=("reward",))
        counts[seq["start"].numpy(), np.arange(10)] += 1
    expected = draws / 10
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 81 + 6 * math.sqrt(2 * 81), chi2  # 81 degrees of freedom
    leaning = 0.99 * counts + 0.01 * draws * np.eye(10) * 10  # a tenth of a row more on the diagonal
    assert ((leaning - expected) ** 2 / expected).sum() > 81 + 6 * math.sqrt(2 * 81)


def test_shuffling_can_be_turned_off() -> None:
    rollout = filled(WORLD)
    want = WORLD.stretches(3, 3)
    assert found_in(rollout.sequences(3, shuffle=False, epochs=2)) == want * 2
    assert found_in(rollout.sequences(3, shuffle=False, batch_size=2)) == want


def test_a_rollout_that_was_loaded_goes_on_with_the_orders_of_the_one_that_was_saved(tmp_path: Any) -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "T......."], RICH, [True, False, True, False])
    rollout = filled(world)
    list(rollout.sequences(2, epochs=2))
    rollout.save(tmp_path / "rollout")
    again = RolloutBuffer.load(tmp_path / "rollout")
    for _ in range(2):
        batches = list(again.sequences(2, batch_size=3))
        assert found_in(batches) == found_in(rollout.sequences(2, batch_size=3))
        for seq in batches:
            check_batch(world, seq, 2)
    for each in (rollout, again):
        each.clear()
        add_all(each, world)
        assert sorted(found_in(each.sequences(2))) == sorted(
            World(world.schema, world.letters, world.columns, world.done[-1]).stretches(2, 2)
        )


# Advantages


@pytest.mark.parametrize("time_first", [True, False])
def test_advantages_are_normalised_over_the_steps_of_each_batch_and_padding_stays_zero(time_first: bool) -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "T......."], RICH)
    rollout = filled(world)
    plain = list(filled(world).sequences(3, batch_size=4, time_first=time_first))
    batches = list(rollout.sequences(3, batch_size=4, time_first=time_first, normalize_advantage=True))
    assert len(batches) == len(plain) > 2
    for seq, raw in zip(batches, plain, strict=True):
        assert torch.equal(seq["mask"], raw["mask"])
        want = oracle.normalize(raw["advantage"].double(), raw["mask"])
        assert seq["advantage"].dtype is torch.float32
        np.testing.assert_allclose(seq["advantage"], want, rtol=1e-4, atol=1e-5)
        assert not seq["advantage"][~seq["mask"]].any()
        for path, x in leaves_of(seq).items():
            if path != ("advantage",):
                assert_same(x, leaves_of(raw)[path], path)
    assert torch.equal(rollout["advantage"], world.columns["advantage",])


def test_normalising_leaves_a_single_step_finite() -> None:
    (seq,) = filled(world_of(["mm."], RICH)).sequences(3, normalize_advantage=True)
    assert seq["advantage"].tolist() == [[0], [0], [0]]


def test_normalising_needs_advantages() -> None:
    rollout = filled(WORLD)
    with pytest.raises(errors.FieldError, match=r"'advantage'.*finish"):
        rollout.sequences(3, normalize_advantage=True)
    rich = filled(world_of(["..T"], RICH))
    with pytest.raises(errors.FieldError, match="'advantage'"):
        rich.sequences(3, normalize_advantage=True, fields=("obs",))


# Calls that make no sense


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"length": 0}, errors.ParameterError, "length=0.*at least 1"),
        ({"length": -3}, errors.ParameterError, "length=-3"),
        ({"length": 2.5}, errors.ParameterError, "length=2.5"),
        ({"overlap": "half"}, errors.ParameterError, "'half'.*length"),
        ({"overlap": 1}, errors.ParameterError, "overlap=1.*length"),
        ({"length": 3, "overlap": 3}, errors.ParameterError, "overlap=3.*0 to 2"),
        ({"length": 3, "overlap": 7}, errors.ParameterError, "overlap=7.*0 to 2"),
        ({"length": 3, "overlap": -1}, errors.ParameterError, "overlap=-1.*0 to 2"),
        ({"length": 3, "overlap": 0.5}, errors.ParameterError, "overlap=0.5"),
        ({"length": 3, "overlap": "most"}, errors.ParameterError, "'most'.*'none', 'half', 'max'"),
        ({"length": 3, "overlap": None}, errors.ParameterError, "overlap=None"),
        ({"batch_size": 2, "num_batches": 2}, errors.ParameterError, "batch_size.*num_batches.*batch_steps"),
        ({"batch_size": 2, "batch_steps": 2}, errors.ParameterError, "batch_size.*num_batches.*batch_steps"),
        ({"num_batches": 2, "batch_steps": 2}, errors.ParameterError, "batch_size.*num_batches.*batch_steps"),
        ({"batch_size": 0}, errors.ParameterError, "batch_size=0"),
        ({"batch_size": -1}, errors.ParameterError, "batch_size=-1"),
        ({"num_batches": 0}, errors.ParameterError, "num_batches=0.*1 to 9"),
        ({"num_batches": 10}, errors.ParameterError, "num_batches=10.*9 sequences.*1 to 9"),
        ({"batch_steps": 0}, errors.ParameterError, "batch_steps=0"),
        ({"batch_steps": -2}, errors.ParameterError, "batch_steps=-2"),
        ({"fields": ("obs", "rewrad")}, errors.FieldError, "'rewrad'.*did you mean 'reward'"),
        ({"fields": "obs"}, errors.FieldError, "tuple of column names"),
        ({"fields": ()}, errors.FieldError, "tuple of column names"),
    ],
    ids=str,
)
def test_a_call_that_makes_no_sense_is_refused_at_once_and_draws_nothing(
    arguments: Any, error: type[Exception], match: str
) -> None:
    rollout = filled(WORLD)
    with pytest.raises(error, match=match):
        rollout.sequences(**arguments)
    assert found_in(rollout.sequences(3, batch_size=2)) == found_in(filled(WORLD).sequences(3, batch_size=2))


def test_an_empty_rollout_has_no_sequences() -> None:
    rollout = RolloutBuffer(SMALL, 4, 2)
    for call in (rollout.sequences, rollout.chunks):
        with pytest.raises(errors.EmptyError, match=r"no steps.*add"):
            call(3)
    add_all(rollout, world_of(["..", ".."])).clear()
    with pytest.raises(errors.EmptyError, match="no steps"):
        rollout.sequences(3)


@pytest.mark.parametrize(
    ("letters", "arguments"),
    [
        ("....", {"complete": True}),
        ("..T.", {"length": 4, "drop_tail": True}),
        ("m..T", {"length": 4, "drop_tail": True}),
        ("mmmm", {}),
    ],
)
def test_a_rollout_without_such_windows_has_no_batches(letters: str, arguments: Any) -> None:
    rollout = filled(world_of([letters]))
    for sizes in ({}, {"batch_size": 2}, {"num_batches": 1}, {"batch_steps": 3}):
        for shuffle in (True, False):
            assert not list(rollout.sequences(**arguments, **sizes, shuffle=shuffle, epochs=2))


def test_a_schema_that_does_not_say_where_episodes_end_has_no_sequences() -> None:
    for schema in (Schema({"obs": (2,)}), Schema({"obs": (2,), "terminated": FLAG})):
        rollout = RolloutBuffer(schema, 2, 1)
        rollout.add(**{name: np.zeros((1, *schema.leaves[name,].shape), bool) for name in schema.names})
        for call in (rollout.sequences, rollout.chunks):
            with pytest.raises(errors.FieldError, match=r"'truncated'|'terminated'"):
                call(2)


# Rollouts one after another


def test_a_partial_rollout_has_the_sequences_of_the_steps_so_far() -> None:
    world = world_of(["..T.....", ".U...T.."])
    rollout = RolloutBuffer(SMALL, 8, 2)
    for t in range(8):
        add_all(rollout, world, [t])
        so_far = World(SMALL, world.letters[: t + 1], {p: x[: t + 1] for p, x in world.columns.items()}, world.ended)
        for overlap, stride in strides(3):
            check_all(so_far, rollout, 3, overlap, stride)
        check_all(so_far, rollout, None, "none", 8)


@pytest.mark.parametrize("cuts", [(3, 3, 3), (1, 1, 7), (5, 2, 2), (9,)])
@pytest.mark.parametrize("partial", [False, True])
def test_an_episode_begins_where_the_last_one_ended_whatever_rollouts_they_lie_in(cuts: Any, partial: bool) -> None:
    """Every pattern of nine letters that a seed draws, cut into rollouts at these places."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list("...TTUmM"), (9, 64))
    world = world_of(letters)
    whole = {(w.start, w.env): w.is_start for w in world.stretches(1, 1)}
    rollout = RolloutBuffer(SMALL, max(cuts) + partial, 64)
    at = 0
    for count in cuts:
        add_all(rollout, world, range(at, at + count))
        if world.mask[at : at + count].any():
            (seq,) = rollout.sequences(1)
            found = {(at + w.start, w.env): w.is_start for w in found_in([seq])}
            assert found == {(t, n): whole[t, n] for t, n in whole if at <= t < at + count}
        at += count
        rollout.clear()


@pytest.mark.parametrize("schema", [SMALL, RICH], ids=["small", "rich"])
@pytest.mark.parametrize("total", range(1, 15))
def test_a_rollout_that_wraps_has_the_sequences_of_its_newest_steps_in_the_order_of_time(
    schema: Schema, total: int
) -> None:
    rng = np.random.default_rng(total)
    world = world_of(rng.choice(list("....TUmM"), (total, 6)), schema)
    rollout = RolloutBuffer(schema, 5, 6, wrap=True, seed=0)
    add_all(rollout, world)
    kept = world.newest(min(total, 5))
    if not kept.mask.any():
        return
    for length in (None, 1, 2, 3, 6):
        for overlap, stride in strides(length) if length else [("none", 5)]:
            check_all(kept, rollout, length, overlap, stride)
    check_all(kept, rollout, 2, "none", 2, complete=True)


def test_rows_written_in_place_have_sequences_like_added_ones() -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "T.......", "mM......"])
    for wrap in (False, True):
        rollout = RolloutBuffer(SMALL, 5, 5, wrap=wrap)
        for times in (range(5), range(3, 8)):
            views = rollout.reserve()
            for path, column in world.columns.items():
                views[path].copy_(column[times.start : times.stop])
            views["mask"].copy_(torch.from_numpy(world.mask[times.start : times.stop]))
            rollout.commit()
            now = World(
                SMALL,
                world.letters[times.start : times.stop],
                {path: column[times.start : times.stop] for path, column in world.columns.items()},
                world.ended if times.start == 0 else world.done[4],
            )
            check_all(now, rollout, 2, "half", 1)
            check_all(now, rollout, None, "none", 5)
            if not wrap:
                rollout.clear()


def test_columns_that_are_overwritten_cut_anew() -> None:
    world = world_of(["......", "......"])
    rollout = filled(world)
    truncated = torch.zeros(6, 2, dtype=torch.bool)
    truncated[3, 1] = True
    rollout["truncated"] = truncated
    assert sorted(found_in(rollout.sequences())) == [(0, 0, 6, True), (1, 0, 4, True), (1, 4, 2, True)]
    rollout.clear()
    add_all(rollout, world)
    assert [w.is_start for w in sorted(found_in(rollout.sequences()))] == [False, False]


def test_an_interrupted_episode_does_not_go_on() -> None:
    world = world_of(["...", "..T"])
    rollout = filled(world)
    rollout.interrupt()
    assert len(list(rollout.sequences(batch_size=1))) == 2
    rollout.clear()
    add_all(rollout, world)
    assert [w.is_start for w in found_in(rollout.sequences())] == [True, True]
    rollout.clear()
    rollout.interrupt()
    add_all(rollout, world)
    assert [w.is_start for w in found_in(rollout.sequences())] == [True, True]
    assert rollout.clear() is None
    add_all(rollout, world)
    assert [w.is_start for w in sorted(found_in(rollout.sequences()))] == [False, True]


@pytest.mark.parametrize("wrap", [False, True])
def test_an_episode_interrupted_within_a_rollout_ends_there(wrap: bool) -> None:
    """The last env's newest step is not real, but its episode is under way as well."""
    world = world_of(["......", "..U...", "..m..."])
    rollout = RolloutBuffer(SMALL, 6, 3, wrap=wrap)
    add_all(rollout, world, range(3))
    rollout.interrupt()
    add_all(rollout, world, range(3, 6))
    assert sorted(found_in(rollout.sequences())) == [
        (0, 0, 3, True),
        (0, 3, 3, True),
        (1, 0, 3, True),
        (1, 3, 3, True),
        (2, 0, 2, True),
        (2, 3, 3, True),
    ]


def counting(obs: Tensor, hidden: Tensor) -> dict[str, Any]:
    """A policy whose state counts the steps of the episode."""
    return {"action": tagged.tagged_policy(obs), "value": tagged.tagged_value(obs), "hidden": hidden + 1}


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name.lower())
def test_collected_episodes_begin_where_the_env_was_reset(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(4, mode, tagged.drawn(3, longest=6))
    rollout = RolloutBuffer(Schema.from_env(envs, value=(), hidden=(1, 2)), 7, 4, seed=0)
    collector = Collector(envs, counting, rollout, seed=5)
    begun = 0
    for i in range(8):
        if i == 4:
            collector.reset(seed=11)  # in the middle of episodes, with a full rollout
        if i == 6:
            rollout.clear()
            collector.reset()  # with an empty one
        collector.collect()
        (seq,) = rollout.sequences(3, overlap="half")
        step = torch.as_tensor(tagged.decode(seq["obs"]).step)
        assert begins(seq).tolist() == (step[0] == 0).tolist()
        assert torch.equal(seq["hidden"][0, :, 0], step[0].float())
        for b in range(seq.num_sequences):
            rows = step[:, b][seq["mask"][:, b]]
            assert torch.equal(rows, rows[0] + torch.arange(len(rows)))
        begun += int(begins(seq).sum())
    assert begun > 20


# Chunks, and states that are kept now and then


@pytest.mark.parametrize("length", [None, 1, 2, 3, 8, 20])
def test_chunks_are_all_envs_in_the_order_of_time(length: int | None) -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "TM......"], RICH, [True, False, True, False])
    rollout = filled(world, hidden_every=1)
    size = length or 8
    chunks = list(rollout.chunks(length))
    assert [len(seq["mask"]) for seq in chunks] == [min(size, 8 - t) for t in range(0, 8, size)]
    for i, seq in enumerate(chunks):
        times = slice(i * size, min((i + 1) * size, 8))
        assert tuple(seq.data.batch_size) == (times.stop - times.start, 4)
        assert_same(seq["mask"], torch.from_numpy(world.mask[times]), "mask")
        assert_same(seq["done"], torch.from_numpy(world.done[times]), "done")
        got = leaves_of(seq)
        for path, column in world.columns.items():
            if path[0] != "hidden":
                assert_same(got[path], column[times], path)
        actor, critic, half = (seq["hidden"][name] for name in ("actor", "critic", "half"))
        for place in (0, 1):
            want = world.columns["hidden", "actor", str(place)][times.start].transpose(0, 1).contiguous()
            assert_same(actor[place], want, "hidden")
        assert_same(critic, world.columns["hidden", "critic"][times.start], "hidden")
        assert_same(half[0], world.columns["hidden", "half", "0"][times.start].transpose(0, 1).contiguous(), "hidden")
        starts = [
            [oracle.starts_episode(world.done, world.mask, world.ended, t, n) for n in range(4)]
            for t in range(times.start, times.stop)
        ]
        assert seq["is_start"].tolist() == starts


def test_chunks_have_the_fields_that_are_wanted() -> None:
    rollout = filled(WORLD)
    chunks = list(rollout.chunks(3, fields=("reward",)))
    assert [len(seq["mask"]) for seq in chunks] == [3, 3, 2]
    assert all("obs" not in seq for seq in chunks)
    assert torch.equal(torch.cat([seq["reward"] for seq in chunks]), WORLD.columns["reward",])
    for length in (0, -1):
        with pytest.raises(errors.ParameterError, match=f"length={length}"):
            rollout.chunks(length)
    with pytest.raises(errors.FieldError, match="did you mean 'reward'"):
        rollout.chunks(3, fields=("rewrad",))


@pytest.mark.parametrize("every", [2, 3])
def test_chunks_start_where_a_state_is_kept(every: int) -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "TM......"], RICH)
    rollout, whole = filled(world, hidden_every=every), filled(world)
    for length in (every, 2 * every, 8, None):
        for seq, want in zip(rollout.chunks(length), whole.chunks(length), strict=True):
            assert torch.equal(seq["hidden"]["critic"], want["hidden"]["critic"])
            assert torch.equal(seq["hidden"]["actor"][1], want["hidden"]["actor"][1])
            assert torch.equal(seq["reward"], want["reward"])
    for length in (1, every + 1 + (every == 3)):
        with pytest.raises(errors.ParameterError, match=rf"chunks\({length}\).*every {every} steps"):
            rollout.chunks(length)


def test_chunks_of_a_partial_and_of_a_wrapped_rollout_are_in_the_order_of_time() -> None:
    world = world_of(["..T.....", ".U...T.."])
    rollout = RolloutBuffer(SMALL, 5, 2, wrap=True)
    for count in (3, 8):
        add_all(rollout, world, range(rollout.steps, count))
        low = max(count - 5, 0)
        chunks = list(rollout.chunks(2))
        for name in ("obs", "terminated"):
            assert torch.equal(torch.cat([seq[name] for seq in chunks]), world.columns[name,][low:count])
        assert torch.equal(chunks[1]["hidden"][0], world.columns["hidden",][low + 2, :, 0])


def check_sparse(
    world: World, rollout: RolloutBuffer, every: int, length: int | None, overlap: Any, stride: int
) -> None:
    """As ``check_all``, of a rollout that keeps every k-th state."""
    (seq,) = rollout.sequences(length, overlap=overlap)
    known = [(w.env, w.start, w.length) for w in world.stretches(length, stride)]
    assert sorted(w[:3] for w in found_in([seq])) == sorted(known)
    check_batch(world, seq, len(seq["mask"]), every=every)
    assert int(seq["lengths"].max()) <= len(seq["mask"])


def resets_alone(letters: np.ndarray) -> np.ndarray:
    """The patterns [T, N] of which what is not real follows an end, as a collector writes them."""
    kept = [all(x != "m" or t == 0 or column[t - 1] in "TUBM" for t, x in enumerate(column)) for column in letters.T]
    return letters[:, kept]


@pytest.mark.parametrize("every", [2, 3, 4, 7])
def test_with_states_kept_now_and_then_every_window_starts_where_one_is_known(every: int) -> None:
    for steps in (1, 3, 5):
        world = both_pasts(resets_alone(patterns(".TmM" if steps < 5 else ".Tm", steps)))
        rollout = filled(world, hidden_every=every)
        for length in (1, 2, 3, 6):
            for overlap, stride in [("none", length), ("half", max(length // 2, 1)), ("max", 1)]:
                check_sparse(world, rollout, every, length, overlap, stride)
        check_sparse(world, rollout, every, None, "none", steps)


@given(
    world=worlds(RICH, longest=12),
    every=st.integers(2, 13),
    length=st.sampled_from([None, 1, 3, 5, 13]),
    batch_size=st.integers(1, 9),
    time_first=st.booleans(),
)
def test_any_rollout_with_states_kept_now_and_then_has_the_right_ones(
    world: World, every: int, length: int | None, batch_size: int, time_first: bool
) -> None:
    world = world_of(np.where(world.letters == "m", ".", world.letters), RICH, world.ended)
    if not world.mask.any():
        return
    stride = len(world.letters) if length is None else length
    rollout = filled(world, hidden_every=every)
    batches = list(rollout.sequences(length, batch_size=batch_size, time_first=time_first))
    want = sorted((w.env, w.start, w.length) for w in world.stretches(length, stride))
    assert sorted(w[:3] for w in found_in(batches)) == want
    for seq in batches:
        check_batch(world, seq, seq["mask"].shape[0 if time_first else 1], time_first=time_first, every=every)


def test_burn_in_is_unrolled_but_not_learned_from() -> None:
    world = world_of(["......T...", ".........."], RICH)
    rollout = filled(world, hidden_every=4)
    (seq,) = rollout.sequences(3, shuffle=False, normalize_advantage=True)
    starts = [0, 3, 6, 7, 0, 3, 6, 9]
    burn_in = [0, 3, 2, 0, 0, 3, 2, 1]
    assert seq["start"].tolist() == starts
    assert seq["burn_in"].tolist() == burn_in
    assert seq["lengths"].tolist() == [3, 6, 3, 3, 3, 6, 5, 2]
    assert begins(seq).tolist() == [True, True, False, True, True, True, False, False]
    assert seq.num_steps == int(seq["mask"].sum()) == 20
    for b, (start, skip) in enumerate(zip(starts, burn_in, strict=True)):
        rows = seq["reward"][: seq["lengths"][b], b]
        at = torch.arange(start - skip, start - skip + len(rows))
        assert torch.equal(rows, world.columns["reward",][at, seq["env"][b]])
        assert not seq["mask"][:skip, b].any()
        assert not seq["advantage"][:skip, b].any()
    assert seq.flat(seq["reward"]).tolist() == seq.flat()["reward"].tolist()
    assert len(seq.flat()["reward"]) == 20
    np.testing.assert_allclose(seq.flat()["advantage"].mean(), 0, atol=1e-5)
    np.testing.assert_allclose(seq.flat()["advantage"].std(), 1, rtol=1e-4)
    assert len(seq.packed("reward").data) == int(seq["lengths"].sum())


def test_episodes_whose_first_state_is_not_kept_start_in_the_initial_one() -> None:
    world = world_of([".T...T..", "U......."], RICH)
    rollout = filled(world, hidden_every=4)
    generator = torch.Generator().manual_seed(0)
    initial = {
        path: torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        for path, leaf in RICH.leaves.items()
        if path[0] == "hidden"
    }
    rollout.initial_hidden = RICH.rebuild("hidden", initial.__getitem__)
    (seq,) = rollout.sequences(3)
    check_batch(world, seq, len(seq["mask"]), every=4, initial=initial)


def test_keeping_states_now_and_then_takes_so_much_less_memory() -> None:
    schema = SMALL.extend(hidden=((2, 64), (2, 64)))

    def bytes_of(rollout: RolloutBuffer) -> int:
        parts = [part for part in (rollout._columns, rollout._states.rows) if part is not None]
        return sum(part.view(path).nbytes for part in parts for path in part.own)

    whole = bytes_of(RolloutBuffer(schema, 128, 4))
    state = 4 * 2 * 2 * 64 * 4
    rest = whole - 129 * state
    for every in (2, 16, 128, 1000):
        assert bytes_of(RolloutBuffer(schema, 128, 4, hidden_every=every)) <= rest + (-(-128 // every) + 1) * state


def test_a_rollout_that_keeps_states_now_and_then_reads_and_saves_like_any_other(tmp_path: Any) -> None:
    world = world_of(["..T..T..", ".U......"], RICH)
    rollout = filled(world, hidden_every=3)
    assert "hidden" not in rollout.keys()
    assert rollout.flat()["reward"].shape == (16,)
    with pytest.raises(errors.FieldError, match=r"'hidden'.*every 3 steps"):
        _ = rollout["hidden"]
    with pytest.raises(errors.LifecycleError, match="hidden_every"):
        rollout.reserve()
    assert "hidden_every=3" in repr(rollout)
    assert repr(eval(repr(rollout), vars(relive) | {"torch": torch})) == repr(rollout)
    rollout.save(tmp_path / "rollout")
    again = RolloutBuffer.load(tmp_path / "rollout")
    for _ in range(2):
        for seq, other in zip(again.sequences(2, batch_size=3), rollout.sequences(2, batch_size=3), strict=True):
            check_batch(world, seq, len(seq["mask"]), every=3)
            assert found_in([seq]) == found_in([other])


@pytest.mark.parametrize(("every", "schema", "wrap"), [(0, SMALL, False), (-1, SMALL, False), (2, SMALL, True)])
def test_states_that_cannot_be_kept_now_and_then_are_refused(every: int, schema: Schema, wrap: bool) -> None:
    with pytest.raises(errors.ParameterError, match=f"hidden_every={every}"):
        RolloutBuffer(schema, 4, 2, hidden_every=every, wrap=wrap)
    without = Schema({"obs": (2,), "terminated": FLAG, "truncated": FLAG})
    with pytest.raises(errors.ParameterError, match=r"hidden_every=2.*'hidden'"):
        RolloutBuffer(without, 4, 2, hidden_every=2)


# The kernels


@pytest.mark.parametrize("seed", range(20))
def test_the_kernels_agree_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, envs = (int(n) for n in rng.integers(1, 20, 2))
    done, real = (rng.random((steps, envs)) < share for share in (0.2, 0.9))
    flags = []
    for kernels in (reference, cpu):
        ended = (np.random.default_rng(seed).random(envs) < 0.5).astype(np.uint8)
        starts = np.full((steps, envs), 9, np.uint8)
        kernels.episode_starts(done.view(np.uint8), real.view(np.uint8), ended, starts)
        flags.append((starts.tolist(), ended.tolist()))
    assert flags[0] == flags[1]
    starts = np.array(flags[0][0], np.uint8)
    for length, tails, complete in itertools.product((1, 3, 2**31), (True, False), (True, False)):
        stride = min(int(rng.integers(1, length + 1)), 2**31)
        tables = []
        for kernels in (reference, cpu):
            table = np.full((steps * envs // 2, 5), -9, np.int64)  # room may be too small
            arguments = done.view(np.uint8), real.view(np.uint8), starts, length, stride, tails, complete
            tables.append((kernels.plan_windows(*arguments, table), table.tolist()))
        assert tables[0] == tables[1]
    width, rows = int(rng.integers(0, 40)), int(rng.integers(1, 9))
    source = torch.from_numpy(rng.integers(0, 256, (steps * envs, width), np.uint8))
    pad = torch.from_numpy(rng.integers(0, 256, width, np.uint8))
    for step in (1, envs):
        room = 1 + (steps * envs - 1) // step
        lengths = torch.from_numpy(rng.integers(0, min(rows, room) + 1, 6))
        last = steps * envs - 1 - (lengths - 1).clamp(min=0) * step
        first = (torch.rand(6, generator=torch.Generator().manual_seed(seed)) * (last + 1)).long()
        marks = [kernels.mark_windows(lengths, lengths // 2, first % 2, rows) for kernels in (reference, cpu)]
        assert all(a.dtype is torch.bool and torch.equal(a, b) for a, b in zip(*marks, strict=True))
        outs = [kernels.gather_windows(source, first, step, lengths, pad, rows) for kernels in (reference, cpu)]
        assert outs[0].shape == (6, rows, width)
        assert torch.equal(outs[0], outs[1])
