"""Rollouts of which every number tells its time and env, and the windows that they should have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from relive import Field, RolloutBuffer, Schema, SequenceBatch
from relive.batches import leaves_by_path
from support import oracle
from support.oracle import Stretch

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

FACTS = {"lengths", "burn_in", "env", "start"}

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

    @cached_property
    def mask(self) -> np.ndarray:
        return ~self._any_of("mM")

    @cached_property
    def terminated(self) -> np.ndarray:
        return self._any_of("TB")

    @cached_property
    def truncated(self) -> np.ndarray:
        return self._any_of("UBM")

    @cached_property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    def _any_of(self, letters: str) -> np.ndarray:
        return np.logical_or.reduce([self.letters == letter for letter in letters])

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


def check_batch(world: World, seq: SequenceBatch, rows: int | None, *, time_first: bool = True) -> None:
    """Everything in a batch is what the world has at those times, and nothing else is in it."""
    env, start = seq["env"], seq["start"]
    has_hidden = "hidden" in world.schema
    lengths = seq["lengths"]
    assert_same(seq["burn_in"], torch.zeros_like(start), "burn_in")
    for name in FACTS:
        assert seq[name].dtype is torch.int64, name
        assert seq[name].shape == (len(env),), name
    assert begins(seq).tolist() == [
        oracle.starts_episode(world.done, world.mask, world.ended, t, n)
        for t, n in zip(start.tolist(), env.tolist(), strict=True)
    ]
    high = int(lengths.max()) if rows is None else min(rows, len(world.letters))
    time = torch.arange(high)[:, None]
    inside = time < lengths
    at = torch.where(inside, start + time, 0)
    assert seq.time_first is time_first
    assert len(seq) == len(env)
    assert seq.num_steps == int(inside.sum())
    shape = (high, len(env)) if time_first else (len(env), high)
    assert tuple(seq.shape) == seq["is_start"].shape == shape
    got = {("mask",): seq["mask"]} | leaves_of(seq)
    wanted = {path for path in world.columns if path[0] != "hidden" and path[0] in seq}
    assert got.keys() == wanted | {("mask",)}
    for path, x in got.items():
        x = x if time_first else x.transpose(0, 1)
        if path == ("mask",):
            assert_same(x, inside, path)
            continue
        column = world.columns[path]
        want = column[at, env]
        want[~inside] = 1 if path == ("action_mask",) else 0
        assert_same(x, want, path)
    if has_hidden:
        check_hidden(world, seq, start, env)


def check_hidden(world: World, seq: SequenceBatch, start: Tensor, env: Tensor) -> None:
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
        want = column[start, env]
        if column.dim() == 4:
            want = want.transpose(0, 1)
        assert_same(state, want.contiguous(), path)
        assert state.is_contiguous(), path

    tree = world.schema.rebuild("hidden", leaf)
    assert type(got) is type(tree) or isinstance(got, Tensor)
    assert count == sum(path[0] == "hidden" for path in world.schema.leaves)


def leaves_of(seq: SequenceBatch) -> dict[Path, Tensor]:
    """The padded fields of a batch by path, but for its mask."""
    return {path: x for path, x in leaves_by_path(seq).items() if path[0] not in (*FACTS, "hidden", "mask", "is_start")}


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


def both_pasts(letters: np.ndarray) -> World:
    """Each pattern twice: as the start of a life, and as what follows a step that ended no episode."""
    envs = letters.shape[1]
    return world_of(np.concatenate([letters, letters], 1), ended=np.arange(2 * envs) < envs)


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
