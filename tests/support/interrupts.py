"""Calls that are broken off at a line, and samplers that watch what comes of it."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import relive
import relive.replay.buffer
from relive import FrameStack, NStep, ReplayBuffer, Transition
from relive import Sequence as SequenceView
from relive.core.words import NEXT
from relive.errors import InvariantError
from relive.memory.device import DeviceRows
from relive.ring import Ring, Rule
from support import internals, oracle, twins
from support.twins import KINDS as LETTERS
from support.twins import SAMPLERS, Twin

PACKAGE = str(Path(relive.__file__).parent)


class Watcher:
    """A user's sampler that keeps the places that can be drawn, and refuses to be told of one twice."""

    watches = True
    per_row = ()

    def attach(self, ring: Ring) -> None:
        self.ring = ring
        self.drawable = set(ring.anchors().tolist())

    def nbytes(self, rows: int) -> int:
        return 0

    def changed(self, places: Any, drawable: Any) -> None:
        for place, opened in zip(places.tolist(), drawable.tolist(), strict=True):
            assert (place in self.drawable) != bool(opened), f"place {place} is told of twice"
            if opened:
                self.drawable.add(place)
            else:
                self.drawable.remove(place)

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Any, dict[str, Any]]:
        random = np.random.Generator(np.random.Philox(key=key))
        return random.choice(np.array(sorted(self.drawable), np.int64), count), {}

    def check(self) -> None:
        if self.drawable != set(self.ring.anchors().tolist()):
            raise InvariantError(f"sampler: {self.drawable} noted, {set(self.ring.anchors().tolist())} can be drawn")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


EVERY_SAMPLER: dict[str, Callable[[], Any]] = {**SAMPLERS, "a user's": Watcher}


class OverEnds:
    """Transitions that can be drawn while the two rows before them are there, of whichever episode."""

    rule, n, gamma = Rule(3, across=True), 1, 0.5

    def read(self, ring: Ring, places: Any, key: int | None = None) -> Any:
        return Transition(0.5).read(ring, places)


KINDS: dict[str, dict[str, Any]] = {
    "small": {"view": lambda: Transition(0.5)},
    "small, 3-step": {"view": lambda: NStep(3, 0.5)},
    "images, stacked": {"dress": "image", "view": lambda: FrameStack(3, NStep(2, 0.5))},
    "nested": {"dress": "mixed", "view": lambda: NStep(2, 0.5)},
    "tuples": {"dress": "tuple", "view": lambda: Transition(0.5)},
    "sequences": {"extras": twins.recurrent, "view": lambda: SequenceView(3, 2, "none", 2, 0.5)},
    "sequences that overlap": {"dress": "mixed", "view": lambda: SequenceView(2, 1, "max", 1, 0.5)},
    "rows over ends": {"view": OverEnds},
    "unordered": {"dress": "mixed", "ordered": False, "view": lambda: Transition(0.5)},
    "own next_obs": {"dress": "image", "ordered": False, "linked": True, "view": lambda: Transition(0.5)},
    "device": {"dress": "mixed", "device": True, "view": lambda: NStep(3, 0.5)},
    "in files": {"dress": "mixed", "files": True, "view": lambda: NStep(3, 0.5)},
    "sequences in files": {"files": True, "view": lambda: SequenceView(3, 1, "none", 1, 0.5)},
}
"""Kinds of fields, each read through a view."""


class Broken(Twin):
    """A twin whose calls may be broken off anywhere: the oracle is then told of the steps that are in."""

    def __init__(self, kind: str, sampler: str, rows: int = 9) -> None:
        facts = dict(KINDS[kind])
        view, linked, device = facts.pop("view"), facts.pop("linked", False), facts.pop("device", False)
        files = facts.pop("files", False)
        super().__init__(2, rows, view=view(), sampler=EVERY_SAMPLER[sampler](), **facts)
        kept = {**self.options, "view": view(), "sampler": EVERY_SAMPLER[sampler]()}
        if linked:  # a step knows its next observation: read one by one, that is the same as steps without order
            self.buffer = ReplayBuffer(self.schema, rows * 2, 2, **{**kept, "ordered": True, "own_next_obs": True})
        if device:
            with pytest.MonkeyPatch.context() as patch:
                cpu = torch.empty(0).device
                patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, cpu))
                self.buffer = ReplayBuffer(self.schema, rows * 2, 2, **kept)
        self.folder, self.make_sampler = None, EVERY_SAMPLER[sampler]
        if files:
            self.folder = tempfile.TemporaryDirectory()
            self.buffer = self.opened(schema=self.schema, capacity=rows * 2, num_envs=2, view=view(), seed=0)
        self.known, self.turn = oracle.Priorities(), 0
        self.see()

    def opened(self, **options: Any) -> ReplayBuffer:
        """The replay in files, opened again."""
        assert self.folder is not None
        return ReplayBuffer.open(self.folder.name, check_ends=False, sampler=self.make_sampler(), **options)

    @property
    def prioritized(self) -> Any:
        return internals.prioritized(self.buffer)

    def see(self) -> None:
        """Priorities follow what can be drawn."""
        self.known.see([self.truth.index(row) for row in self.anchors()])

    def cut(self, envs: Sequence[int]) -> None:
        """What is under way does not go on."""
        for env in envs:
            self.truth.interrupt(env)
            self.lives[env].restart()

    # Calls that may be broken off: each does it, tells the oracle what the buffer has of it, and says whether it was.

    def adds(
        self,
        at: int,
        plays: Sequence[str],
        masks: Sequence[Sequence[bool]] | None = None,
        envs: Sequence[int] | None = None,
    ) -> bool:
        """Steps of ``envs``, in one call."""
        chosen, before = [0, 1] if envs is None else list(envs), copy.deepcopy((self.truth, self.lives))
        real = [[True] * len(chosen)] * len(plays) if masks is None else masks
        steps = [
            self.step(row, envs, mask if masks else None, final=True) for row, mask in zip(plays, real, strict=True)
        ]
        many = len(steps) > 1
        call = partial(self.buffer.extend, twins.stacked(steps)) if many else partial(self.buffer.add, steps[0])
        if not broken_off(partial(call, envs=None if envs is None else np.array(envs)), at):
            return False
        ring = internals.ring(self.buffer)
        heads = ring.heads.tolist()
        if ring.pending is None:  # then nothing of it is in, or all
            if heads == self.row_counts(before[0]):
                self.truth, self.lives = before
            return True
        self.truth, self.lives = before
        script = [
            (env, *fact)
            for row, mask in zip(plays, real, strict=True)
            for env, *fact in zip(chosen, row, mask, strict=True)
        ]
        for env, letter, counts in script:
            if not counts:
                self.cut([env])
            elif len(self.truth.all_rows(env)) < heads[env]:
                self.truth.add(env, **self._dressed(self.lives[env].step(LETTERS[letter])))
            else:
                break
        assert self.row_counts(self.truth) == heads, "a step is half in"
        self.cut(chosen)
        apart = bool(ring.store.large) or isinstance(ring.store, DeviceRows)
        self.drop(2 * len(plays) if apart else 0)
        return True

    def interrupts(self, at: int, envs: Sequence[int] | None = None) -> bool:
        """Episodes under way do not go on."""
        if not broken_off(partial(self.buffer.interrupt, None if envs is None else np.array(envs)), at):
            self.cut([0, 1] if envs is None else envs)
            return False
        if (
            internals.ring(self.buffer).pending is not None
            or not internals.ring(self.buffer).state[0 if envs is None else envs[0], NEXT]
        ):
            self.cut([0, 1] if envs is None else envs)
        return True

    def clears(self, at: int) -> bool:
        """Everything is forgotten."""
        off = broken_off(self.buffer.clear, at)
        if (
            not off
            or internals.ring(self.buffer).pending is not None
            or not len(internals.ring(self.buffer).live_places(0))
        ):
            self.truth.clear()
            self.cut([0, 1])
        return off

    def updates(self, at: int) -> bool:
        """TD errors of everything that can be drawn, some of it twice."""
        index = [*self.known.errors, *list(self.known.errors)[:2]]
        errors = [float((self.turn * 7 + i) % 11) for i in range(len(index))]
        wanted = copy.deepcopy(self.known)
        wanted.update(index, errors)
        given: dict[str, Any] = {}
        if len(self.anchors()) and isinstance(self.buffer.view, SequenceView):
            shape = (len(index), 1) if not self.buffer.view.time_first else (1, len(index))
            given = {"mask": np.ones(shape, bool)}
        off = broken_off(
            lambda: self.buffer.update_priorities(
                index, np.reshape(errors, given["mask"].shape if given else -1), **given
            ),
            at,
        )
        len(self.buffer)  # mends
        sampler = self.prioritized
        found = internals.errors(sampler)[self.places_of(index)].tolist()
        assert not off or found in ([self.known.errors[i] for i in index], [wanted.errors[i] for i in index])
        if found == [wanted.errors[i] for i in index]:
            self.known = wanted
        self.known.largest = internals.largest(sampler)
        return off

    def reweighs(self, at: int) -> bool:
        """Another exponent of priorities, and another eps."""
        sampler = self.prioritized
        off = broken_off(partial(setattr, sampler, "alpha", 0.3 + self.turn % 5 / 10), at)
        return broken_off(partial(setattr, sampler, "eps", 10.0 ** -(self.turn % 7)), at) or off

    def looks(self, at: int) -> bool:
        """Another view, or another parameter of it."""
        view = self.buffer.view
        if isinstance(view, SequenceView):
            view.burn_in = self.turn % 3
            off = broken_off(lambda: len(self.buffer), at)
        else:
            other = NStep(2, 0.5) if self.ordered else Transition(0.5)
            if self.ordered and isinstance(view, NStep):
                other = FrameStack(3, NStep(1, 0.5))
            off = broken_off(partial(setattr, self.buffer, "view", other), at)
        self.see()
        return off

    def flushes(self, at: int) -> bool:
        """Everything is written through to the disk."""
        return broken_off(self.buffer.flush, at)

    def reopens(self, at: int) -> bool:
        """The files are closed, and opened again; either may be broken off."""
        off = broken_off(self.buffer.close, at)
        self.buffer.close()
        found = list[ReplayBuffer]()
        if broken_off(lambda: found.append(self.opened()), at) and not found:
            off = True
            gc.collect()  # what was made of the replay lets its directory go
        self.buffer = found[0] if found else self.opened()
        if not internals.ring(self.buffer).under_way.any():  # as after a kill, since the envs may be gone
            self.cut([0, 1])
        self.see()
        return off

    # What the buffer has, against the oracle.

    @staticmethod
    def row_counts(truth: oracle.Replay) -> list[int]:
        return [len(truth.all_rows(env)) for env in (0, 1)]

    def places_of(self, index: Sequence[int]) -> Any:
        return internals.ring(self.buffer).find(np.array(index, np.int64))[0]

    def drop(self, most: int) -> None:
        """Old rows in whose place new ones were being written are gone: no more than those."""
        len(self.buffer)  # mends
        ring = internals.ring(self.buffer)
        for env in (0, 1):
            live, oldest = self.truth.live(env), int(ring.oldest[env])
            due = live[0].number if live else int(ring.heads[env])
            assert 0 <= oldest - due <= most, f"rows {due} to {oldest} of env {env} are gone"
            self.truth._cleared[env] = max(self.truth._cleared[env], oldest)

    def verify(self, batches: int) -> None:
        """Everything that can be drawn is right, and so are priorities and batches."""
        self.buffer.check()
        self.see()
        self.check()
        if self.prioritized is not None and self.known.errors:
            index = list(self.known.errors)
            assert internals.errors(self.prioritized)[self.places_of(index)].tolist() == [
                self.known.errors[i] for i in index
            ]
        for _ in range(batches):
            if len(self.buffer):
                count = min(5, len(self.buffer))
                self.check_batch(self.buffer.sample(count))


def interrupt() -> None:
    """As Ctrl-C does."""
    raise KeyboardInterrupt


def die() -> None:
    """As a process that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def broken_off(call: Callable[[], Any], at: int, by: Callable[[], None] = interrupt) -> bool:
    """Make a call, and interrupt it at event ``at`` of it, counted from 0; False if it has fewer."""
    left = at

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGE) or isinstance(frame.f_locals.get("self"), Watcher)
        if code.co_name == "<genexpr>" or not ours:
            return None  # what is raised while a generator is thrown away goes nowhere
        if left == 0:
            by()
        left -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert left == 0
        return True
    finally:
        sys.settrace(before)
    return False


def calls(world: Broken) -> dict[str, Callable[[int], bool]]:
    """What is broken off."""
    made: dict[str, Callable[[int], bool]] = {
        "add": lambda at: world.adds(at, [".."]),
        "add, an end": lambda at: world.adds(at, [".T"]),
        "add, ends": lambda at: world.adds(at, ["UB"]),
        "add, masked": lambda at: world.adds(at, [".."], [[True, False]]),
        "add, one env": lambda at: world.adds(at, ["."], envs=[1]),
        "extend": lambda at: world.adds(at, ["..", "T.", "..", ".U", ".."]),
        "extend, masked": lambda at: world.adds(at, ["..", "..", ".."], [[True, True], [False, True], [True, True]]),
        "interrupt": world.interrupts,
        "interrupt one": lambda at: world.interrupts(at, [1]),
        "view": world.looks,
        "clear": world.clears,
    }
    if world.folder is not None:
        made |= {"flush": world.flushes, "reopen": world.reopens}
    if world.prioritized is not None:
        made |= {"update": world.updates, "reweigh": world.reweighs}
    return made
