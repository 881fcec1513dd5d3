"""The plain side of the matrix of pairs: which steps were stored, and what follows for all that a replay hands out.

The lists lie in memory that forked processes share. So a process may go on with them, and die, and this one knows what
it had stored by then.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive import Field, Hindsight, Schema

__all__ = ["CUT", "ENVS", "GAMMA", "ROWS", "SCHEMA", "Steps", "hindsight", "observed", "shared", "step"]

ENVS, ROWS, MOST = 2, 30, 1 << 15
GAMMA, GOAL = 0.5, 10_000.0
OUT, MAYBE, IN = range(3)
JOINED, CUT, EITHER = range(3)

SCHEMA = Schema({
    "obs": {"tag": (2,), "achieved_goal": (1,), "desired_goal": (1,)}, "action": Field((), torch.int64), "reward": (),
    "terminated": Field((), torch.bool), "truncated": Field((), torch.bool), "note": Field((), torch.int64),
})  # fmt: skip


def ends(env: int, number: int) -> bool:
    """Whether the step of this number ends its episode: by a terminal in env 0, by a truncation in env 1."""
    return number % 7 == (3, 6)[env]


def after(env: int, number: int) -> float:
    """The number in the observation after a step."""
    return number + 0.5 if ends(env, number) else number + 1.0


def observed(numbers: Sequence[float]) -> dict[str, Any]:
    """Observations of all envs, with these numbers."""
    tag = np.stack([np.arange(ENVS), np.asarray(numbers)], 1).astype(np.float32)
    return {"tag": tag, "achieved_goal": tag[:, 1:].copy(), "desired_goal": np.full((ENVS, 1), GOAL, np.float32)}


def step(number: int) -> dict[str, Any]:
    """The vector step of this number. Everything in it follows from the number and the env."""
    done = np.array([ends(env, number) for env in range(ENVS)])
    return {
        "obs": observed([number] * ENVS), "next_obs": observed([after(env, number) for env in range(ENVS)]),
        "action": np.full(ENVS, number), "reward": np.full(ENVS, number, np.float32), "note": np.full(ENVS, -number),
        "terminated": done & [True, False], "truncated": done & [False, True],
    }  # fmt: skip


def distance(achieved: Any, desired: Any) -> Any:
    """The reward of a goal."""
    return -np.abs(achieved - desired)[:, 0]


def hindsight() -> Hindsight:
    """A view that gives most rows a goal that was reached later."""
    return Hindsight(distance, k=2, gamma=GAMMA)


class Steps:
    """The steps of each env, as lists by their numbers."""

    def __init__(self) -> None:
        self.next = shared(1, np.int64)
        """The number of the next step."""
        self.state = shared((ENVS, MOST), np.int8)
        """OUT, IN; MAYBE while a call is under way, or if it was broken off and nobody has looked yet."""
        self.link = shared((ENVS, MOST), np.int8)
        """Whether the next step of the env follows on this one."""
        self.gone = shared(ENVS, np.int64)
        """Rows before this one may have been lost by calls that were broken off."""
        self.errors = shared((2, ENVS, MOST), np.float64)
        """The last TD error of each step, and the one that may be in its place; NaN if there is none."""
        self.errors[:] = np.nan

    def copy(self) -> Steps:
        """The lists as they are now, which nobody else sees."""
        other = Steps()
        other.read(self.lists())
        return other

    def lists(self) -> dict[str, Any]:
        """All of it."""
        return dict(vars(self))

    def read(self, lists: Any) -> Steps:
        """Take over what :meth:`lists` gave."""
        for name, own in self.lists().items():
            own[...] = lists[name]
        return self

    def write(self, path: Path) -> None:
        """Keep a copy in a file."""
        np.savez_compressed(path, **self.lists())

    def take(self, count: int) -> list[int]:
        """The numbers of the next vector steps, which may be in from now on."""
        first = int(self.next[0])
        self.state[:, first : first + count] = MAYBE
        self.next[0] = first + count
        return list(range(first, first + count))

    def came(self) -> None:
        """All that may be in is in."""
        self.state[self.state == MAYBE] = IN

    def stored(self, env: int) -> list[int]:
        """The numbers of an env's steps."""
        return np.flatnonzero(self.state[env] == IN).tolist()

    def interrupt(self) -> None:
        """No step that comes follows on one that is there."""
        for env in range(ENVS):
            known = np.flatnonzero(self.state[env])
            if len(known):
                self.link[env, known[-1]] = CUT

    def broken_off(self) -> None:
        """A call was broken off: steps that it may have stored hang on to others or not, and the oldest may be lost."""
        for env in range(ENVS):
            maybe = np.flatnonzero(self.state[env] == MAYBE)
            if len(maybe):
                self.link[env, [*(maybe - 1), *maybe]] = EITHER
            self.gone[env] = max(self.gone[env], len(self.rows(env, MAYBE)) + 2 - ROWS)

    def found(self, rows: list[list[int]]) -> None:
        """Somebody looked: these are the numbers of the rows of each env. Of what may be in, the first ones are."""
        for env in range(ENVS):
            maybe, there = np.flatnonzero(self.state[env] == MAYBE).tolist(), set(rows[env])
            seen = [number for number in maybe if number in there]
            came = [number for number in maybe if seen and number <= seen[-1]]
            overwritten = len(came) - len(seen)  # a chunk may be longer than the ring
            assert seen == came[overwritten:], f"env {env}: of {maybe} came {seen}"
            assert not overwritten or rows[env][0] == seen[0], f"env {env}: of {maybe} came {seen}, after older ones"
            self.state[env, maybe] = OUT
            self.state[env, came] = IN

    def rows(self, env: int, least: int = IN) -> list[int | None]:
        """What the rows of an env have in the order of time, if it never forgot one; None is a final observation."""
        rows = list[int | None]()
        for number in np.flatnonzero(self.state[env] >= least).tolist():
            rows += [number, None] if ends(env, number) else [number]
        return rows

    def live(self, env: int, capacity: int = ROWS) -> tuple[list[int], list[int]]:
        """The numbers of the steps that must be there, and of those that may be."""
        may, first = self.rows(env, MAYBE), int(self.gone[env])
        must = may[max(len(may) - capacity, first, 0) :]
        return [n for n in must if n is not None and self.state[env, n] == IN], [n for n in may if n is not None]

    def transitions(self, env: int, capacity: int, history: int) -> tuple[set[int], set[int]]:
        """The numbers of the transitions that must be drawable, and of those that may be.

        ``history`` is how many rows before a transition the view reads: those of the oldest may be overwritten.
        """
        must, _ = self.live(env, capacity - history)
        kept = [n for n in self.rows(env, MAYBE)[-capacity:] if n is not None]

        def known(number: int, links: Iterable[int], least: int) -> bool:
            followed = self.state[env, number + 1] >= least and self.link[env, number] in links
            return ends(env, number) or bool(followed)

        return (
            {n for n in must if known(n, (JOINED,), IN)},
            {n for n in kept if known(n, (JOINED, EITHER), MAYBE)},
        )

    # -- what was handed out ----------------------------------------------------------------------------------

    def check_rows(self, batch: Any) -> list[tuple[int, int]]:
        """Require that every row of a batch of transitions happened; (env, number) of each."""
        obs, later = (_numpy(batch["obs"]), _numpy(batch["next_obs"]))
        fields = {name: _numpy(batch[name]) for name in ("reward", "terminated", "discount", "steps")}
        relabelled = _numpy(batch["relabelled"]) if "relabelled" in batch.keys() else None
        found = list[tuple[int, int]]()
        for row in range(len(fields["reward"])):
            now, then = (_last(side["tag"][row]) for side in (obs, later))
            reward, terminated, discount, steps = (fields[name][row] for name in fields)
            env, number, steps = int(now[0]), int(now[1]), int(steps)
            newest = number + steps - 1
            what = f"env {env}, step {number}, {steps} steps"
            assert now.tolist() == [env, number], what
            assert (self.state[env, number : newest + 1] != OUT).all(), f"{what}: it was never stored"
            assert then.tolist() == [env, after(env, newest)], f"{what}: {then} came after it"
            assert not any(ends(env, n) for n in range(number, newest)), f"{what}: it goes beyond its end"
            assert (self.link[env, number:newest] != CUT).all(), f"{what}: it goes beyond a cut"
            ended = ends(env, newest) and env == 0
            assert bool(terminated) == ended, what
            assert discount == (0.0 if ended else GAMMA**steps), what
            goals = [float(_last(side["desired_goal"][row])[-1]) for side in (obs, later)]
            if relabelled is None or not relabelled[row]:
                assert goals == [GOAL] * 2, what
                assert reward == sum(GAMMA**k * (number + k) for k in range(steps)), f"{what}: reward {reward}"
            else:
                chosen = int(np.ceil(goals[0])) - 1  # the goal is what was reached after this step
                assert goals[0] == goals[1] == after(env, chosen), f"{what}: goals {goals}"
                assert number <= chosen, f"{what}: the goal was reached before"
                assert not any(ends(env, n) for n in range(number, chosen)), f"{what}: the goal is of another episode"
                assert (self.state[env, number : chosen + 1] != OUT).all(), f"{what}: nobody reached that goal"
                assert reward == -abs(after(env, number) - goals[0]), f"{what}: reward {reward}"
            found.append((env, number))
        return found

    def check_sequences(self, batch: Any) -> None:
        """Require that every sequence of a batch ``[L, B]`` is of consecutive steps."""
        tag, mask = _numpy(batch["obs"])["tag"], _numpy(batch["mask"]).astype(bool)
        for column in range(mask.shape[1]):
            own = tag[mask[:, column], column]
            for (env, number), (env_after, number_after) in zip(own[:-1].tolist(), own[1:].tolist(), strict=True):
                assert (env_after, number_after) == (env, number + 1), f"{own.tolist()} is no sequence"
                assert not ends(int(env), int(number)), f"{own.tolist()} goes beyond an end"
                assert self.link[int(env), int(number)] != CUT, f"{own.tolist()} goes beyond a cut"

    def check_all(self, batch: Any, capacity: int, history: int) -> None:
        """Require that a batch is all that can be drawn."""
        found = self.check_rows(batch)
        assert len(set(found)) == len(found), f"{found}: some come twice"
        for env in range(ENVS):
            must, may = self.transitions(env, capacity, history)
            own = {number for of, number in found if of == env}
            assert must <= own, f"env {env}: the steps {sorted(must - own)} are missing"
            assert own <= may, f"env {env}: the steps {sorted(own - may)} are too many"

    def check_priorities(self, pairs: list[tuple[int, int]], priorities: Any, sampler: Any) -> None:
        """Require the priorities of the steps (env, number) whose TD errors are known."""
        for (env, number), p in zip(pairs, _numpy(priorities).tolist(), strict=True):
            known = self.errors[:, env, number]
            if not np.isnan(known[0]):
                may = [(abs(error) + sampler.eps) ** sampler.alpha for error in known[~np.isnan(known)].tolist()]
                near = [abs(p - one) <= 1e-5 * one for one in may]
                assert any(near), f"env {env}, step {number}: priority {p} of error {known.tolist()}"


def shared(shape: Any, dtype: Any) -> Any:
    """Zeros that forked processes share."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def _numpy(value: Any) -> Any:
    if hasattr(value, "keys"):
        return {name: _numpy(value[name]) for name in value.keys()}
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _last(value: Any) -> Any:
    """The newest frame of a stack; a single observation itself."""
    return value[-1] if value.ndim > 1 else value
