"""Plays with goals, and what hindsight should make of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from relive import (
    Hindsight,
    NStep,
)
from support import oracle
from support.twins import Twin, batch_leaves


def plays(alphabet: str, longest: int) -> Iterator[tuple[str, ...]]:
    for length in range(2, longest + 1):
        yield from itertools.product(alphabet, repeat=length)


# What steps come to with a goal. Goals are tags (env, episode, step, seed), or images of them: each names its row.


def numbers(goals: Any) -> Any:
    """Goals ``[M, ...]`` as numbers ``[M]`` that tell them apart; exact in float32."""
    flat = np.asarray(goals).reshape(len(goals), -1)
    tag = flat[:, :16].reshape(len(goals), 4, -1)[..., 0] if flat.dtype == np.uint8 else flat
    return (tag[:, 0] * 64 + tag[:, 1] * 16 + tag[:, 2]).astype(np.float32)


def worth(achieved: Any, desired: Any) -> Any:
    """No two arguments that are mixed up, or of another row, give the same."""
    return (numbers(achieved) * 3 - numbers(desired)) / 8


def reached(achieved: Any, desired: Any) -> Any:
    """Of some steps of every goal: those that are 0 or 3 steps away from it."""
    return (numbers(achieved) - numbers(desired)) % 3 == 0


def stopped(achieved: Any, desired: Any) -> Any:
    return (numbers(achieved) + 2 * numbers(desired)) % 5 == 1


FUNCTIONS: dict[str, dict[str, Any]] = {
    "reward": {},
    "terminated": {"terminated_fn": reached},
    "both flags": {"terminated_fn": reached, "truncated_fn": stopped},
}


class HerTwin(Twin):
    """A twin that knows what hindsight may make of a row: one of several things, one for each goal."""

    def check_drawn(self, batch: Any, view: Hindsight) -> Counter[tuple[int, int | None]]:
        """Every item is as recorded, or as the list of episodes gives it for an allowed goal: which, by index."""
        found = batch_leaves(batch)
        rows = {self.truth.index(row): row for row in self.anchors()}
        drawn: Counter[tuple[int, int | None]] = Counter()
        plain = NStep(view.n, view.gamma)
        for b, index in enumerate(found["index",].tolist()):
            row = rows[index]
            item = {path: array[b] for path, array in found.items()}
            relabelled = bool(item.pop(("relabelled",)))
            want, goal = self.item(row, plain), None
            if relabelled:
                allowed = self.truth.goal_rows(row, view.strategy, view.finished_only)
                matches = [g for g in allowed if oracle.same(g.obs["achieved_goal"], item["obs", "desired_goal"])]
                assert len(matches) == 1, f"{index}: goal {item['obs', 'desired_goal']} is not of {allowed}"
                goal = self.truth.index(matches[0])
                want = self.relabelled_item(row, matches[0], view, want)
            assert item.keys() - {("weight",), ("probability",)} == want.keys()
            for path, value in want.items():
                assert item[path].dtype == value.dtype, path
                assert np.array_equal(item[path], value), (
                    f"{path} of {index} for goal {goal}: {item[path]}, not {value}"
                )
            drawn[index, goal] += 1
        return drawn

    def relabelled_item(self, row: Any, goal: Any, view: Hindsight, plain: dict[Any, Any]) -> dict[Any, Any]:
        """What a view makes of a transition with another goal, by hand."""
        desired = goal.obs["achieved_goal"]

        def judge(step: oracle.Step, after: Any) -> tuple[float, bool, bool]:
            pair = after["achieved_goal"][None], desired[None]
            flags = [
                bool(function(*pair)[0]) if function else recorded
                for function, recorded in ((view.terminated_fn, step.terminated), (view.truncated_fn, step.truncated))
            ]
            return float(worth(*pair)[0]), *flags

        window = self.truth.hindsight(row, view.n, view.gamma, judge)
        after = row.episode.next_obs(window.last.at - 1)
        found = {path: value for path, value in plain.items() if path[0] != "next_obs"}
        found |= {("next_obs", name): member for name, member in after.items()}
        found |= {(name, "desired_goal"): desired for name in ("obs", "next_obs")}
        results = {
            "reward": np.float32(window.reward),
            "discount": np.float32(window.discount),
            "terminated": np.bool_(window.terminated),
            "truncated": np.bool_(window.truncated),
            "steps": np.int32(window.steps),
            "next_index": np.int64(self.truth.index(window.last)),
        }
        return found | {(name,): np.asarray(value) for name, value in results.items()}


def view_of(strategy: str = "future", n: int = 1, functions: str = "terminated", **more: Any) -> Hindsight:
    return Hindsight(worth, strategy, n=n, gamma=0.5, ratio=0.8, **{**FUNCTIONS[functions], **more})


# Functions of whole steps.


def as_relabel(steps: Any, initial: Any, final: Any, chosen: Any) -> dict[str, Any]:
    """What the view does with goals, spelt out."""
    desired, achieved = chosen["achieved_goal"], steps["next_obs"]["achieved_goal"]
    return {
        "obs": {"desired_goal": desired},
        "next_obs": {"desired_goal": desired},
        "reward": worth(achieved, desired),
        "terminated": reached(achieved, desired),
    }
