"""The heads of a stored value, each with the advantages and returns that were computed with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..steps.arrays import Array
from .experience import Experience
from .findings import Verdict


@dataclass(frozen=True)
class Head:
    """One number of each stored value, and what belongs to it: all float64 ``[S]``.

    Args:
        place: which of the value's numbers it is, and of how many.
        value: None if the source keeps no values.
        final: the value of final observations; None if the source keeps none.
        target: the column of rewards that it values; None if no stored column says so.
        reward: that column; without ``target`` the reward.
        total: the returns of these rewards; None if neither they nor advantages are stored.
    """

    place: tuple[int, int] = (0, 1)
    value: Array | None = None
    final: Array | None = None
    target: str | None = None
    reward: Array | None = None
    total: Array | None = None

    def named(self, verdict: Verdict) -> Verdict:
        """A verdict on this head that says which head it is, if the value has several."""
        k, count = self.place
        if count == 1:
            return verdict
        name = f"head {k} of 'value'" + (f", of '{self.target}'" if self.target is not None else "")
        check, findings = verdict
        check = replace(check, lack=None if check.lack is None else f"{name}: {check.lack}")
        return check, tuple(replace(x, what=f"{name}: {x.what}", field=f"value[{k}]") for x in findings)


def heads_of(steps: Experience) -> list[Head]:
    """The heads of the value, at least one.

    The columns of a rollout do not say which head a column of rewards has: it is the one whose values fit its returns.
    Of several that fit, as all do where returns hold no value but the last, it is the one at the place of the column
    among those that have returns, since :class:`relive.ValueHeads` writes them in the order of the heads.
    """
    values, finals = _numbers_of_heads(steps, "value"), _numbers_of_heads(steps, "final_value")
    if values is None:
        return [Head()]
    count = values.shape[1]
    finals = finals if finals is not None and finals.shape == values.shape else None
    named = list(_targets(steps))
    left = dict(enumerate(named))
    mine: dict[int, int] = {}
    for must_fit in (True, False):  # what fits nothing goes to the heads that are left, in their order
        for j, (_, reward, total, advantage) in list(left.items()):
            free = [k for k in sorted(range(count), key=lambda k, j=j: (k != j, k)) if k not in mine]
            fitting = (k for k in free if not must_fit or _fits(steps, values[:, k], reward, total, advantage))
            head = next(fitting, None)
            if head is not None:
                mine[head] = j
                del left[j]
    heads, plain = list[Head](), steps.reward.astype(np.float64)
    for k in range(count):
        name, reward, total, advantage = named[mine[k]] if k in mine else (None, plain, None, None)
        if total is None and advantage is not None:
            total = values[:, k] + advantage
        heads.append(Head((k, count), values[:, k], None if finals is None else finals[:, k], name, reward, total))
    return heads


Target = tuple[str, Array, Array | None, Array | None]
"""A column of rewards: its name, the rewards, their returns, and their advantages."""


def _targets(steps: Experience) -> Iterator[Target]:
    """The columns of rewards that have returns or advantages, in the order of these."""
    seen = set[str]()
    for path in steps.others:
        for kind in ("advantage", "return"):
            if len(path) != 1 or not (path[0] == kind or path[0].endswith(f"_{kind}")):
                continue
            prefix = path[0].removesuffix(kind)
            name = prefix.removesuffix("_") or "reward"
            reward = steps.reward.astype(np.float64) if name == "reward" else numbers_of(steps, name)
            if reward is not None and name not in seen:
                seen.add(name)
                yield name, reward, numbers_of(steps, f"{prefix}return"), numbers_of(steps, f"{prefix}advantage")


def _fits(steps: Experience, value: Array, reward: Array, total: Array | None, advantage: Array | None) -> bool:
    """True if returns inside episodes follow from these values, as in generalized advantage estimation."""
    total = value + advantage if total is None and advantage is not None else total
    return total is not None and weights_of(steps, value, reward, total) is not None


MOST = 0.9
"""The share of rows that must agree with one formula."""

EXACT = 1e-3
"""How far a number may differ from a formula, as a share of the spread of all returns, since columns are float32."""


def inside_of(steps: Experience) -> Array:
    """True where neither a row nor the following one ends an episode, bool ``[S]``."""
    return steps.follows & ~steps.ended & ~np.append(steps.ended[1:], False)


def weights_of(steps: Experience, value: Array, reward: Array, total: Array) -> tuple[Array, Array, float] | None:
    """The factors of the next row in these returns, γ and γλ; what follows from it, ``[S]``; how near is near enough.

    None if they do not follow: they are not those of generalized advantage estimation.
    """
    # nobody has to tell γ and λ: inside an episode, return less reward is linear in the next value and advantage
    inside, rest = inside_of(steps), total - reward
    if not np.isfinite(rest).all() or not np.isfinite(value).all() or inside.sum() < 2:
        return None
    known = np.stack([np.append(value[1:], 0.0), np.append((total - value)[1:], 0.0)], 1)
    weights = np.linalg.lstsq(known[inside], rest[inside])[0]
    near = EXACT * float(rest[inside].std()) + 1e-6 * float(np.abs(total).max())
    onward = known @ weights
    if (np.abs(rest - onward)[inside] < near).mean() < MOST or not 0.3 < weights[0] < 1.001:
        return None
    return weights, onward, near


def numbers_of(steps: Experience, name: str) -> Array | None:
    """A further column as float64 ``[S]``; None if it is missing, or does not have one number per step."""
    numbers = _numbers_of_heads(steps, name)
    return None if numbers is None or numbers.shape[1] != 1 else numbers[:, 0]


def _numbers_of_heads(steps: Experience, name: str) -> Array | None:
    """A further column as float64 ``[S, K]``, K numbers per step; None if it is missing, or has no numbers."""
    column = steps.others.get((name,))
    if column is None or not column.size or column.dtype.kind not in "biuf":
        return None
    return column.reshape(len(steps), -1).astype(np.float64)
