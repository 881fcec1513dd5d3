"""The batches of a seed are those of every version: digests of plays, for each sampler, view and kind of steps.

A play uses no random numbers but those of the replay itself, and numbers that every machine computes alike. Who changes
what a seed draws, on purpose, says so in the changelog and writes the digests anew::

    PYTHONPATH=tests python tests/replay/test_seeds.py
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from relive import (
    Field,
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    ReturnsToGo,
    Schema,
    Sequence,
    SequenceBatch,
    Transition,
    Uniform,
)
from relive.steps.schema import dotted
from support.effort import in_ci
from support.fields import bits
from support.random_draws import EVERY_SAMPLER, GOALS, KINDS
from support.replays import FLAGS

FILE = Path(__file__).parents[1] / "fixtures" / "seeds.json"

Case = tuple[str, dict[str, Any]]

SAMPLERS: dict[str, Callable[[], Any]] = {
    **EVERY_SAMPLER,
    "recent, uniform": lambda: Recent(0.998, 9),
    "recent, prioritized": lambda: Recent(0.998, 9, inner=Prioritized()),
    "recent, adapting": lambda: Recent(0.998, 9, adapt=True, inner=Prioritized(beta=(0.2, 1.0, 7), normalize="buffer")),
}

SEQUENCES: dict[str, Callable[[], Sequence]] = {
    "one step": lambda: Sequence(1),
    "whole": lambda: Sequence(3, drop_tail=True),
    "burn-in": lambda: Sequence(3, 2, "none", n=2),
    "halves": lambda: Sequence(4, 1, "half", n=3, gamma=0.5, time_first=False),
    "last": lambda: Sequence(3, 1, last=("action", "reward")),
    "by steps": lambda: Sequence(4, overlap="half", weigh="steps"),
    "by episodes": lambda: Sequence(4, overlap="half", weigh="episodes"),
}
SEQUENCE_SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "prioritized": lambda: Prioritized(beta=(0.2, 1.0, 7)),
    "prioritized, buffer": lambda: Prioritized(normalize="buffer", stratified=False),
    "recent": SAMPLERS["recent, uniform"],
    "recent, prioritized": SAMPLERS["recent, prioritized"],
}
STACKS: dict[str, Callable[[], FrameStack]] = {
    "one frame": lambda: FrameStack(1),
    "repeat": lambda: FrameStack(3, NStep(2, 0.5)),
    "zeros": lambda: FrameStack(4, Transition(), "zeros"),
}
RETURNS: dict[str, Callable[[], ReturnsToGo]] = {
    "transitions": lambda: ReturnsToGo(0.5),
    "stacks": lambda: ReturnsToGo(1.0, FrameStack(2)),
    "sequences": lambda: ReturnsToGo(0.5, Sequence(3, 1)),
}


def cases() -> dict[str, Case]:
    """Each a kind of steps and options of the replay, which are called."""
    found: dict[str, Case] = {}
    for name, sampler in SAMPLERS.items():
        found[f"transitions, {name}"] = "flat", {"sampler": sampler}
    for kind in KINDS:
        found[f"2-step, {kind}"] = kind, {"view": lambda: NStep(2, 0.5)}
    found["2-step, own next_obs"] = "nested", {"own_next_obs": lambda: True, "view": lambda: NStep(2, 0.5)}
    found["transitions, unordered"] = "nested", {"ordered": lambda: False}
    rewards: Any = lambda: NStep(3, 0.5, each_reward=lambda rewards: rewards * 2)  # noqa: E731
    found["3-step, each_reward"] = "flat", {"view": rewards}
    samplers = cycle([item for item in SAMPLERS.items() if item[0] != "fresh"])  # it came later: their cases stay
    for name, view in GOALS.items():
        which, sampler = next(samplers)
        found[f"goals, {name}, {which}"] = "goals", {"view": view, "sampler": sampler}
    samplers = cycle(SEQUENCE_SAMPLERS.items())
    for name, view in STACKS.items():
        for kind in ("large", "cameras", "nested"):
            which, sampler = next(samplers)
            found[f"stacks, {name}, {kind}, {which}"] = kind, {"view": view, "sampler": sampler}
    kinds = cycle(["states", "recurrent", "flat", "odd", "deep", "large", "nested"])
    for name, view in SEQUENCES.items():
        for _ in range(1 if name.startswith("by") else 2):
            which, sampler = ("uniform", Uniform) if name.startswith("by") else next(samplers)
            kind = next(kinds)
            found[f"sequences, {name}, {kind}, {which}"] = kind, {"view": view, "sampler": sampler}
    for name, view in RETURNS.items():
        found[f"returns to go, {name}"] = "recurrent", {"view": view}
    return found


CASES = cases()


def numbers(field: Field, seed: int) -> Tensor:
    """Numbers of two envs for a field, which every dtype holds exactly."""
    count = 2 * math.prod(field.shape)
    found = (torch.arange(count) * 29 + seed * 37) % 61
    return (found / 8 if field.dtype.is_floating_point else found).to(field.dtype).reshape(2, *field.shape)


def play(buffer: Any, schema: Schema, steps: range) -> None:
    """Add these steps."""
    leaves = schema.leaves
    for t in steps:
        seeds = {path: 13 * t + k for k, path in enumerate(leaves)}
        given = {path: numbers(field, seeds[path]) for path, field in leaves.items()}
        given["reward",] = torch.tensor([t * 5 % 9 - 4.0, t * 7 % 9 - 4.0])
        given["terminated",] = torch.tensor([t % 11 == 7, t % 11 == 10])
        given["truncated",] = torch.tensor([t % 13 == 12, t % 13 == 7])
        step = {name: schema.rebuild(name, given.__getitem__) for name in schema.names}
        after = {path: numbers(leaves[path], seeds[path] + 13) for path in leaves if path[0] == "obs"}
        buffer.add(step, next_obs=schema.rebuild("obs", after.__getitem__))
        if isinstance(buffer.sampler, Recent) and t % 3 == 0:
            buffer.sampler.observe(t % 4 / 2)


def rate(buffer: Any, batch: Any) -> None:
    """Give the items of a batch TD errors that are functions of their indices."""
    if not buffer.has_priorities:
        return
    index, sequences = batch["index"], isinstance(batch, SequenceBatch)
    if not sequences:
        buffer.update_priorities(index, (index % 5 + 1) / 2)
        return
    times = torch.arange(max(batch.shape))
    times = times[: batch.shape[0], None] if batch.time_first else times[None, : batch.shape[1]]
    errors = (times + (index[None] if batch.time_first else index[:, None])) % 5 / 2
    buffer.update_priorities(index, errors, mask=batch["mask"])


def batches(case: str) -> Iterator[Any]:
    """The batches of a play, and all that is stored at its end."""
    kind, options = CASES[case]
    schema = Schema({**KINDS[kind], "reward": (), **FLAGS})
    made = {name: make() for name, make in options.items()}
    buffer: Any = ReplayBuffer(schema, 40, 2, seed=11, check_ends=False, **made)
    play(buffer, schema, range(31))
    for count in (7, 12):
        yield (batch := buffer.sample(count))
        rate(buffer, batch)
    play(buffer, schema, range(31, 47))
    for count in (1, 20):
        yield (batch := buffer.sample(count))
        rate(buffer, batch)
    buffer.interrupt()
    play(buffer, schema, range(47, 51))
    yield from buffer.batches(3, 5)
    buffer.seed = -7
    yield buffer.sample(9)
    yield buffer.data()


def leaves_of(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a batch by name, in order."""
    if isinstance(batch, SequenceBatch):
        columns, known, hidden = batch.parts
        for path, leaf in (*columns.items(), *known.items()):
            yield path if isinstance(path, str) else dotted(path), leaf
        batch = hidden
    if isinstance(batch, tuple):
        batch = {str(i): member for i, member in enumerate(batch)}
    if isinstance(batch, Tensor):
        yield "", batch
    elif batch is not None:
        for name in batch.keys():
            for inner, leaf in leaves_of(batch[name]):
                yield f"{name}.{inner}", leaf


def digest(batch: Any) -> str:
    """Of the names, dtypes, shapes and bytes of a batch.

    Powers may be rounded in other ways elsewhere, and probabilities follow from powers: they count as float32.
    """
    found = hashlib.sha256()
    for name, leaf in leaves_of(batch):
        x = leaf.float() if name.startswith("probability") else leaf
        found.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        found.update(bits(x))
    return found.hexdigest()[:8]


def digests(case: str) -> str:
    return " ".join(map(digest, batches(case)))


@pytest.mark.parametrize("case", [in_ci(x) if k % 2 else x for k, x in enumerate(CASES)])
def test_a_seed_draws_the_batches_of_every_version(case: str) -> None:
    assert digests(case) == json.loads(FILE.read_text(encoding="utf-8"))[case]


def test_no_two_cases_are_the_same_and_each_has_its_digests() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    assert stored.keys() == CASES.keys()
    assert len({*stored.values()}) == len(stored)


if __name__ == "__main__":
    FILE.write_text(json.dumps({case: digests(case) for case in CASES}, indent=1) + "\n", encoding="utf-8")
