"""A rollout's call that is broken off at any line leaves it as before or as after."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import relive
import relive.replay.buffer
from attacks.tally import record
from relive import Field, RolloutBuffer, Schema
from support import internals, twins
from support.effort import often
from support.interrupts import broken_off

# Rollouts.

STEPS = 4
ROLLOUTS: dict[str, dict[str, Any]] = {"filled once": {}, "wrapping": {"wrap": True}}
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
    columns = internals.columns(rollout)
    found: dict[Any, Any] = {path: columns.ordered(path).numpy().copy() for path in columns.present}
    if rollout.steps:
        found["starts"] = internals.flags(rollout)().starts
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
    found, last = seen(rollout), rollout.last["value"].tolist() if internals.has_last(rollout) else None
    ended, room = internals.ended_now(rollout)().tolist(), rollout.wrap or not rollout.is_full
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
@pytest.mark.parametrize("stride", [often(389, 47), pytest.param(1, marks=pytest.mark.slow)])
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
