"""Ctrl-C at any line of any call that writes: afterwards a buffer is what it was, or what the call would have made it.

A trace function raises KeyboardInterrupt at one line after another of the package; signals come at random instants. The
oracle is then told of the steps that are in, and everything the buffer hands out is held to it.
"""

from __future__ import annotations

import copy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import oracle
import relive
import relive.replay.buffer
import tagged
import twins
from attacks.tally import record
from covering import covering
from relive import Collector, Field, FrameStack, NStep, Prioritized, ReplayBuffer, RolloutBuffer, Schema, Transition
from relive import Sequence as SequenceView
from relive.errors import InvariantError
from relive.kernels.ring_state import NEXT
from relive.memory.device import DeviceRows
from relive.ring import Ring
from twins import KINDS as LETTERS
from twins import SAMPLERS, Twin

PACKAGE = str(Path(relive.__file__).parent)
KERNELS = str(Path(PACKAGE) / "kernels")


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

KINDS: dict[str, dict[str, Any]] = {
    "small": {"view": lambda: Transition(0.5)},
    "small, 3-step": {"view": lambda: NStep(3, 0.5)},
    "images, stacked": {"dress": "image", "view": lambda: FrameStack(3, NStep(2, 0.5))},
    "nested": {"dress": "mixed", "view": lambda: NStep(2, 0.5)},
    "tuples": {"dress": "tuple", "view": lambda: Transition(0.5)},
    "sequences": {"extras": twins.recurrent, "view": lambda: SequenceView(3, 2, "none", 2, 0.5)},
    "sequences that overlap": {"dress": "mixed", "view": lambda: SequenceView(2, 1, "max", 1, 0.5)},
    "unordered": {"dress": "mixed", "ordered": False, "view": lambda: Transition(0.5)},
    "own next_obs": {"dress": "image", "ordered": False, "linked": True, "view": lambda: Transition(0.5)},
    "device": {"dress": "mixed", "device": True, "view": lambda: NStep(3, 0.5)},
}
"""Kinds of fields, each read through a view."""


class Broken(Twin):
    """A twin whose calls may be broken off anywhere: the oracle is then told of the steps that are in."""

    def __init__(self, kind: str, sampler: str, rows: int = 9) -> None:
        facts = dict(KINDS[kind])
        view, linked, device = facts.pop("view"), facts.pop("linked", False), facts.pop("device", False)
        super().__init__(2, rows, view=view(), sampler=EVERY_SAMPLER[sampler](), **facts)
        kept = {**self.options, "view": view(), "sampler": EVERY_SAMPLER[sampler]()}
        if linked:  # a step knows its next observation: read one by one, that is the same as steps without order
            self.buffer = ReplayBuffer(self.schema, rows * 2, 2, **{**kept, "ordered": True, "own_next_obs": True})
        if device:
            with pytest.MonkeyPatch.context() as patch:
                cpu = torch.empty(0).device
                patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, cpu))
                self.buffer = ReplayBuffer(self.schema, rows * 2, 2, **kept)
        self.known, self.turn = oracle.Priorities(), 0
        self.see()

    @property
    def prioritized(self) -> Any:
        return self.buffer._ratings.prioritized

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
        ring = self.buffer._ring
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
        if self.buffer._ring.pending is not None or not self.buffer._ring.state[0 if envs is None else envs[0], NEXT]:
            self.cut([0, 1] if envs is None else envs)
        return True

    def clears(self, at: int) -> bool:
        """Everything is forgotten."""
        off = broken_off(self.buffer.clear, at)
        if not off or self.buffer._ring.pending is not None or not len(self.buffer._ring.live_places(0)):
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
        found = sampler._errors[self.places_of(index)].tolist()
        assert not off or found in ([self.known.errors[i] for i in index], [wanted.errors[i] for i in index])
        if found == [wanted.errors[i] for i in index]:
            self.known = wanted
        self.known.largest = sampler._largest
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

    # What the buffer has, against the oracle.

    @staticmethod
    def row_counts(truth: oracle.Replay) -> list[int]:
        return [len(truth.all_rows(env)) for env in (0, 1)]

    def places_of(self, index: Sequence[int]) -> Any:
        return self.buffer._ring.find(np.array(index, np.int64))[0]

    def drop(self, most: int) -> None:
        """Old rows in whose place new ones were being written are gone: no more than those."""
        len(self.buffer)  # mends
        ring = self.buffer._ring
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
            assert self.prioritized._errors[self.places_of(index)].tolist() == [self.known.errors[i] for i in index]
        for _ in range(batches):
            if len(self.buffer):
                count = min(5, len(self.buffer))
                self.check_batch(self.buffer.sample(count))


def broken_off(call: Callable[[], Any], at: int) -> bool:
    """Make a call, and raise KeyboardInterrupt at event ``at`` of it, counted from 0; False if it has fewer."""
    left = at

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(KERNELS)
        if code.co_name == "<genexpr>" or not (inside or code.co_qualname.startswith("Watcher.")):
            return None  # what is raised while a generator is thrown away goes nowhere
        if left == 0:
            raise KeyboardInterrupt
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
    if world.prioritized is not None:
        made |= {"update": world.updates, "reweigh": world.reweighs}
    return made


def attack(kind: str, sampler: str, events: Sequence[int] | None, batches: int) -> tuple[int, list[str]]:
    """Break off every call at these events (None: at each it has); how many were, and what was wrong afterwards."""
    tried, failed = 0, list[str]()
    for name in calls(prepared(kind, sampler)):
        world, at = prepared(kind, sampler), -1
        for turn in range(10**6 if events is None else len(events)):
            at = turn if events is None else events[turn]
            if turn % 8 == 7:  # the oracle takes longer the more there was
                world = prepared(kind, sampler)
            world.turn = turn
            try:
                off = calls(world)[name](at)
                tried += off
                world.verify(batches)
                for play in ("..", ".T", ".."):
                    world.add(play)
                    world.see()
                if turn % 2:
                    world.verify(0)
            except Exception as error:  # whatever comes of it is what this looks for
                failed.append(f"{name} at {at}: {type(error).__name__}: {str(error)[:200]}")
                world, off = prepared(kind, sampler), True
            if not off and events is None:
                break
    return tried, failed


def prepared(kind: str, sampler: str) -> Broken:
    """A world whose rings have come round."""
    world = Broken(kind, sampler)
    for play in ("..", ".T", "..", "..", "U.", "..", "..", ".."):
        world.add(play)
        world.see()
    if world.prioritized is not None:
        world.updates(10**9)
    if len(world.buffer):
        world.buffer.sample(1)
    return world


CELLS = [(kind, sampler) for kind in KINDS for sampler in EVERY_SAMPLER]


@pytest.mark.parametrize(("kind", "sampler"), covering(KINDS, EVERY_SAMPLER))
def test_a_call_broken_off_at_some_lines_is_made_whole_by_the_next(kind: str, sampler: str) -> None:
    tried, failed = attack(kind, sampler, range(CELLS.index((kind, sampler)) % 31, 200, 97), 1)
    record("an exception at a line of a call that writes, replay", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sampler"), CELLS)
def test_a_call_broken_off_at_any_line_is_made_whole_by_the_next(kind: str, sampler: str) -> None:
    at, of = list(KINDS).index(kind), list(EVERY_SAMPLER).index(sampler)
    # every line for each kind and each sampler, and one in thirty for every pair of them
    events = None if at % len(EVERY_SAMPLER) == of else range((3 * at + of) % 30, 900, 30)
    tried, failed = attack(kind, sampler, events, 2)
    record("an exception at a line of a call that writes, replay", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


# Rollouts.

STEPS = 4
ROLLOUTS: dict[str, dict[str, Any]] = {"filled once": {}, "wrapping": {"wrap": True}, "few states": {"hidden_every": 2}}
FIELDS = Schema({
    "obs": {"x": (3,)}, "action": Field((), torch.int64), "reward": (), "value": (), "hidden": (2,),
    "terminated": Field((), torch.bool), "truncated": Field((), torch.bool),
})  # fmt: skip
Op = Callable[[RolloutBuffer], Any]


def vector_step(number: int) -> dict[str, Any]:
    """The fields of a vector step, all different from those of any other."""
    x = number * 10 + np.arange(2, dtype=np.float32)
    flags = np.arange(2) + number
    return {
        "obs": {"x": x[:, None] + np.zeros(3, np.float32)}, "action": x.astype(np.int64), "reward": x, "value": x + 0.5,
        "hidden": np.stack([x, x], 1), "terminated": flags % 5 == 0, "truncated": flags % 7 == 3,
    }  # fmt: skip


def added(number: int, **apart: Any) -> Op:
    return lambda rollout: rollout.add(vector_step(number), **apart)


def committed(number: int, count: int) -> Op:
    def write(rollout: RolloutBuffer) -> None:
        if rollout.hidden_every > 1:
            added(number)(rollout)
            return
        rows = rollout.reserve(count)
        for k in range(count):
            for path, value in twins.leaves(vector_step(number + k)).items():
                rows[path][k] = torch.as_tensor(value)
        rollout.commit(count, last=False)

    return write


def finished(rollout: RolloutBuffer) -> None:
    rollout.finish(relive.GAE(), last_value=np.full(2, 7.0, np.float32), partial=True)


def valued(rollout: RolloutBuffer) -> None:
    rows = rollout["truncated"].nonzero()
    rollout.set_final_value(rows[:, 0], rows[:, 1], torch.arange(len(rows)) + 0.25)


def ended_on(number: int) -> Op:
    obs = {"x": np.full((2, 3), number, np.float32)}
    return lambda rollout: rollout.set_last(obs=obs, value=np.full(2, number, np.float32))


SCRIPT: dict[str, Op] = {
    "add": added(1),
    "add, masked": added(2, mask=np.array([True, False])),
    "set_last": ended_on(3),
    "finish": lambda rollout: (valued(rollout), finished(rollout)),
    "add after it": added(4, final_value=np.full(2, 0.5)),
    "commit": committed(5, 1),
    "set_last again": ended_on(6),
    "interrupt": lambda rollout: rollout.interrupt(),
    "finish again": lambda rollout: (valued(rollout), finished(rollout)),
    "and once more": lambda rollout: (valued(rollout), finished(rollout)),
    "clear": lambda rollout: rollout.clear(),
    "add to the next": added(7),
    "commit two": committed(8, 2),
    "interrupt that": lambda rollout: rollout.interrupt(),
    "clear that": lambda rollout: rollout.clear(),
    "add three": lambda rollout: [added(number)(rollout) for number in (10, 11, 12)],
    "fill": added(13),
    "add or wrap": lambda rollout: added(14)(rollout) if rollout.wrap else None,
    "commit or wrap": lambda rollout: committed(15, 1)(rollout) if rollout.wrap else None,
    "interrupt the full one": lambda rollout: rollout.interrupt(),
    "the end": lambda rollout: rollout.clear(),
}
"""A life of a rollout; each call is broken off after those before it."""


def lived(kind: str, calls: int) -> RolloutBuffer:
    """A rollout after the first of these calls."""
    rollout = RolloutBuffer(FIELDS, STEPS, 2, seed=0, **ROLLOUTS[kind])
    for op in list(SCRIPT.values())[:calls]:
        op(rollout)
    return rollout


def seen(rollout: RolloutBuffer) -> dict[Any, np.ndarray]:
    """What a rollout holds, by step: its columns, final values where they are read, and where episodes start."""
    columns = rollout._columns
    found: dict[Any, Any] = {path: columns.ordered(path).numpy().copy() for path in columns.live}
    if rollout.steps:
        found["starts"] = rollout._episodes.flags().starts
        found["final_value",][~found["truncated",]] = 0
    return found


def alike(got: dict[Any, np.ndarray], want: dict[Any, np.ndarray], gone: int = 0) -> bool:
    """Whether a rollout is another one, but for its ``gone`` oldest steps and for what was attached."""
    needed = {path for path in want if path not in (("advantage",), ("return",))}
    return needed <= got.keys() <= want.keys() and all(
        np.array_equal(got[path], want[path][gone:], equal_nan=got[path].dtype.kind == "f") for path in got
    )


class Whole(NamedTuple):
    """What is to be seen of a rollout that no call of was broken off."""

    seen: dict[Any, np.ndarray]
    last: list[float] | None
    """The bootstrap value, if it has one."""
    ended: list[bool]
    following: dict[Any, np.ndarray] | None
    """The same as ``seen`` after one more step, if there is room."""


def whole(rollout: RolloutBuffer) -> Whole:
    """Look at a rollout, and use it up."""
    found, last = seen(rollout), rollout.last["value"].tolist() if rollout._writer.has_last else None
    ended, room = rollout._episodes.ended_by_now().tolist(), rollout.wrap or not rollout.is_full
    if room:
        added(20)(rollout)
    return Whole(found, last, ended, seen(rollout) if room else None)


@cache
def states(kind: str, calls: int) -> list[Whole]:
    """What a rollout may be during a call: as before, as after, and between the calls that it consists of."""
    name = list(SCRIPT)[calls]
    found = [lived(kind, calls + 1), lived(kind, calls)]
    parts: list[list[Op]] = [[valued]] if "finish" in name or "once more" in name else []
    parts += [[added(10)], [added(10), added(11)]] if name == "add three" else []
    for part in parts:
        found.append(lived(kind, calls))
        for op in part:
            op(found[-1])
    return [whole(rollout) for rollout in found]


def wrong_with(kind: str, calls: int, at: int) -> tuple[bool, str]:
    """Break off a call; whether it was, and what is wrong then."""
    (name, op), rollout = list(SCRIPT.items())[calls], lived(kind, calls)
    if not broken_off(lambda: op(rollout), at):
        return False, ""
    may_be, got = states(kind, calls), whole(rollout)
    match = next((state for state in may_be if alike(got.seen, state.seen)), None)
    if match is None and rollout.wrap and alike(got.seen, may_be[1].seen, 1):
        match = may_be[1]
    wrong = ""
    if match is None:
        wrong = "is neither as before nor as after"
    elif got.last is not None and got.last not in [state.last for state in may_be]:
        wrong = "has half a bootstrap row"
    elif got.ended not in [state.ended for state in may_be]:
        wrong = "has other episodes under way"
    elif got.following is not None and match.following is not None and not alike(got.following, match.following):
        wrong = "goes on otherwise"
    return True, wrong and f"{name} at {at}: it {wrong}"


@pytest.mark.parametrize("kind", ROLLOUTS)
@pytest.mark.parametrize("stride", [47, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rollouts_call_broken_off_at_any_line_leaves_it_as_before_or_as_after(kind: str, stride: int) -> None:
    tried, failed = 0, list[str]()
    for calls in range(len(SCRIPT)):
        for at in range(calls % stride, 10**6, stride):
            off, wrong = wrong_with(kind, calls, at)
            tried += off
            failed += [wrong] if wrong else []
            if not off:
                break
    record("an exception at a line of a call that writes, rollout", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


# Collecting.


def playing(buffer: RolloutBuffer | ReplayBuffer | None, mode: AutoresetMode) -> Collector:
    """A collector of envs that say in every observation where it is from."""
    endings = tagged.cycle([(3, "truncated"), (2, "terminated")], [(4, "both")])
    return Collector(
        tagged.make_tagged(2, mode, endings), tagged.tagged_policy, buffer, seed=3, value_fn=tagged.tagged_value
    )


TAGGED = Schema({
    "obs": (4,), "action": Field((), torch.int64), "reward": (), "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def require_true(obs: Any, reward: Any, next_obs: Any) -> None:
    """Every transition happened: the reward is of its step, and the next observation is the one after it."""
    now, after = tagged.decode(obs), tagged.decode(next_obs)
    assert np.array_equal(after.step, now.step + 1)
    for name in ("env", "episode", "seed"):
        assert np.array_equal(getattr(now, name), getattr(after, name)), name
    assert np.array_equal(np.asarray(reward), np.asarray(tagged.reward_of(now.env, now.episode, now.step), np.float32))


def collected(kind: str, mode: AutoresetMode, at: int) -> bool:
    """Collect, be broken off, and collect again: everything in the buffer happened."""
    if kind == "rollout":
        rollout = RolloutBuffer(TAGGED.extend(value=()), 5, 2)
        collector = playing(rollout, mode)
        collector.policy = lambda obs: {"action": tagged.tagged_policy(obs), "value": tagged.tagged_value(obs)}
        collector.collect()
        off = broken_off(collector.collect, at)
        assert not off or rollout.steps in (0, 5)
        collector.collect()
        obs = rollout.block["obs"]
        goes_on = ~(rollout["terminated"] | rollout["truncated"]) & rollout["mask"]
        require_true(obs[:-1][goes_on], rollout["reward"][goes_on], obs[1:][goes_on])
        cut = rollout["truncated"] & ~rollout["terminated"] & rollout["mask"]
        after = tagged.decode(obs[:-1][cut])
        want = tagged.value_of(after._replace(step=after.step + 1))
        assert np.array_equal(rollout["final_value"][cut], np.asarray(want, np.float32))
        assert torch.equal(rollout.last["value"], tagged.tagged_value(rollout.last["obs"]))
        return off
    replay = ReplayBuffer(TAGGED, 24, 2, seed=0, sampler=Prioritized())
    collector = playing(None if kind == "steps" else replay, mode)
    chunks = list[Any]()
    collect = collector.collect if kind == "replay" else lambda count: chunks.append(collector.steps(count))
    collect(7)
    off = broken_off(lambda: collect(3), at)
    if kind == "steps" and off and collector._obs is not None and not collector._under_way:
        collector.reset()  # broken off at the return: the caller knows that a chunk is lost
    for steps in (1, 4, 9):
        while chunks:
            replay.extend(chunks.pop(0))
        replay.check()
        for batch in (replay.data(), replay.sample(16)):
            require_true(batch["obs"], batch["reward"], batch["next_obs"])
        collect(steps)
    return off


@pytest.mark.parametrize("kind", ["replay", "rollout", "steps"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("stride", [211, pytest.param(3, marks=pytest.mark.slow)])
def test_a_collection_broken_off_at_any_line_leaves_nothing_that_did_not_happen(
    kind: str, mode: AutoresetMode, stride: int
) -> None:
    tried, failed = 0, list[str]()
    for at in range(0, 10**6, stride):
        try:
            off = collected(kind, mode, at)
        except Exception as error:  # whatever comes of it is what this looks for
            failed.append(f"{at}: {type(error).__name__}: {error}")
            off = True
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            failed.append(f"{at}: gradients are off")
        tried += off
        if not off:
            break
    record("an exception at a line of a call that writes, collector", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


@pytest.mark.parametrize("stride", [89, pytest.param(1, marks=pytest.mark.slow)])
def test_appending_a_buffer_that_is_broken_off_joins_nothing_that_did_not_follow(stride: int) -> None:
    other = Twin(2, 12).play("..", ".T", "..", "|", "..", "U.", "..", "..").buffer
    tried, failed = 0, list[str]()
    for at in range(0, 10**6, stride):
        mine = Twin(2, 9, sampler=Prioritized()).play("..", "..", ".T", "..")
        off = broken_off(lambda mine=mine: mine.buffer.append(other), at)
        tried += off
        try:
            for _ in range(2):
                mine.buffer.check()
                for batch in (mine.buffer.data(), mine.buffer.sample(8)):
                    require_true(batch["obs"], batch["reward"], batch["next_obs"])
                mine.interrupt()
                mine.play("..", "..", "B.")
        except Exception as error:  # whatever comes of it is what this looks for
            failed.append(f"{at}: {type(error).__name__}: {error}")
        if not off:
            break
    record("an exception at a line of a call that writes, replay", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


# Signals.


@contextmanager
def armed(seconds: float) -> Iterator[None]:
    """SIGINT after so much time, unless this is over before."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, was)


def signalled(world: Broken, seconds: float, rng: np.random.Generator) -> float | None:
    """Add, extend and rate until a signal comes, and tell the oracle of the steps that are in; or how long it took."""
    before = copy.deepcopy((world.truth, world.lives))
    plays = ["".join(rng.choice(list("....TUB"), 2)) for _ in range(60)]
    steps = [world.step(kinds, final=True) for kinds in plays]
    pairs = [twins.stacked(steps[low : low + 2]) for low in range(0, 30, 2)]
    index, prioritized, began = list(world.known.errors), world.prioritized is not None, time.perf_counter()
    try:
        with armed(seconds):
            for pair in pairs:
                world.buffer.extend(pair)
                if prioritized and index:
                    world.buffer.update_priorities(index[:1], [2.0])
            for step in steps[30:]:
                world.buffer.add(step)
        return time.perf_counter() - began
    except KeyboardInterrupt:
        pass
    world.buffer.interrupt()  # as whoever stops a loop does
    world.truth, world.lives = before
    heads = world.buffer._ring.heads.tolist()
    for kinds in plays:
        for env, letter in enumerate(kinds):
            if len(world.truth.all_rows(env)) < heads[env]:
                world.truth.add(env, **world._dressed(world.lives[env].step(LETTERS[letter])))
    assert world.row_counts(world.truth) == heads, "a step is half in"
    world.cut([0, 1])
    world.drop(4 if world.buffer._ring.store.large else 0)
    return None


def interrupted(kind: str, sampler: str, times: int, seed: int) -> tuple[int, list[str]]:
    """So many signals at random instants; what was wrong afterwards."""
    rng, tried, failed = np.random.default_rng(seed), 0, list[str]()
    longest = min(signalled(prepared(kind, sampler), 1000.0, rng) or 0.0 for _ in range(2))
    for turn in range(20 * times):
        world = prepared(kind, sampler)
        try:
            if signalled(world, float(rng.uniform(1e-5, longest)), rng) is None:
                tried += 1
                world.buffer.check()
                world.check()
                for _ in range(2):
                    if len(world.buffer):
                        world.check_batch(world.buffer.sample(min(5, len(world.buffer))))
        except Exception as error:  # whatever comes of it is what this looks for
            failed.append(f"signal {turn}: {type(error).__name__}: {str(error)[:200]}")
        if tried == times:
            break
    return tried, failed


@pytest.mark.parametrize(("kind", "sampler"), CELLS[:: len(EVERY_SAMPLER) - 1])
@pytest.mark.parametrize("times", [3, pytest.param(400, marks=pytest.mark.slow)])
def test_a_signal_at_any_instant_leaves_every_step_in_or_out(kind: str, sampler: str, times: int) -> None:
    if "sequences" in kind and "prioritized" in sampler:
        sampler = "uniform"  # errors of sequences come in another shape
    tried, failed = interrupted(kind, sampler, times, times)
    record("SIGINT at a random instant", tried, len(failed))
    assert tried == times
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


def test_a_save_right_after_a_call_that_was_broken_off_is_whole(tmp_path: Path) -> None:
    fields = {"obs": Field((2000,), torch.uint8), "action": Field(()), "reward": Field(())}
    schema = Schema({**fields, "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})
    replay = ReplayBuffer(schema, 12, 2, sampler=Prioritized(), seed=0)
    none = np.zeros(2, np.bool_)

    def add(t: int) -> None:
        now = np.full(2, t, np.float32)
        image = np.full((2, 2000), t, np.uint8)  # a large field, which is written apart from the others
        replay.add(obs=image, action=now, reward=now, terminated=none, truncated=none)

    at = drawn = 0
    while True:
        for t in range(9):  # what a call that is broken off was about to overwrite can be drawn
            add(t)
        if not broken_off(partial(add, 9), at):
            break
        replay.save(tmp_path / "save")
        batch = ReplayBuffer.load(tmp_path / "save").data()
        assert torch.equal(batch["obs"][:, 0].float(), batch["reward"])
        at, drawn = at + 1, drawn + len(batch)
    assert drawn > at > 10
