"""DeviceGoals: which rows of a batch on a device get another goal, and what their windows are with it.

It does what ``goals.cpp`` does for a ring in RAM. Every function is as those of :class:`relive.device.ring.DeviceRing`:
fixed shapes, and no wait for the device.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.numbers import mix, stream_of, uniform
from ..core.words import EPISODE, FINAL, FUTURE, PAST, RANDOM
from ..errors import DTypeError
from ..memory.device import DeviceRows
from ..steps.schema import Path, nest
from .ring import AddPlan, DeviceRing, Spots, Windows, count_steps, sum_steps

FLOAT64, INT64, INT32 = torch.float64, torch.int64, torch.int32

GOALS = 2**32
"""The first number of a batch's stream that decides on goals."""

OTHERS = 2**32 + 1
"""The number of a batch's further stream, by which the goals of RANDOM are drawn."""


RESULTS: tuple[Path, ...] = (("reward",), ("terminated",), ("truncated",))
"""The fields that functions of goals judge."""


class Judge(Protocol):
    """A function of the user that judges steps with another goal."""

    path: Path
    """Which of :data:`RESULTS` it gives."""

    def judge(self, achieved: Tensor, desired: Tensor, info: object) -> object:
        """Its result, as it is."""
        ...

    def require(self, count: int, shape: tuple[int, ...], dtype: object, kind: str) -> None:
        """Refuse a result that is no ``[count]`` of its kind."""
        ...


class GoalForm(NamedTuple):
    """How batches with other goals are read: as the parameters of :class:`relive.Hindsight` say."""

    n: int
    gamma: float
    ratio: float
    strategy: int
    finished: bool
    achieved: Path
    desired: Path
    info: tuple[Path, ...]
    functions: tuple[Judge, ...]
    order: tuple[Path, ...]
    """The fields of a batch."""


class Choice(NamedTuple):
    """The rows of a batch ``[B]`` that get another goal, and the steps of their windows ``[B, n]``."""

    relabelled: Tensor
    aim: Tensor
    """The place of the new goal."""
    now: Tensor
    """The places of the steps. Those beyond a window are its last."""
    after: Tensor
    """The places of the rows that follow them."""


class DeviceGoals:
    """Where the episodes of a ring end.

    Args:
        ring: the rows.
        device: of all tensors.
    """

    def __init__(self, ring: DeviceRing, device: torch.device) -> None:
        self.ring = ring
        self.ends: Tensor = torch.zeros(ring.num_envs * ring.rows + 2, dtype=INT32, device=device)
        """The lower 32 bits of the number of the last row of each episode, by its ordinal in the env."""
        self.not_finite: Tensor = torch.zeros(1, dtype=INT64, device=device)
        """Rewards of new goals that were NaN or infinite."""

    def note_all(self) -> None:
        """Note all rows of the ring."""
        ring = self.ring
        spots = ring.spots_of(torch.arange(ring.dummy_row - 1, device=self.ends.device))
        entry = self._entry(spots)
        # a row is the last of its episode so far if it is the env's newest, or the next row belongs to another episode
        after = torch.clamp(spots.numbers + 1, min=0)
        following = Spots(ring.base[spots.envs] + after % ring.rows, spots.envs, after)
        last = (after == ring.head[spots.envs]) | (self._entry(following) != entry)
        live = (spots.numbers >= ring.oldest[spots.envs]) & (spots.numbers >= 0)
        # one row of each episode is noted, so no two writes meet
        self._note(torch.where(last & live, entry, ring.dummy_row), spots.numbers)

    def added(self, added: AddPlan) -> None:
        """Note the rows of a step: the newest of each env is the last of its episode so far."""
        ring = self.ring
        newest = ring.head - 1
        places = torch.where(added.finals == ring.dummy_row, added.places, added.finals)
        self._note(self._entry(Spots(places, ring.envs, newest)), newest)

    def _note(self, entry: Tensor, numbers: Tensor) -> None:
        self.ends.index_put_((entry,), numbers.to(INT32))

    def _entry(self, spots: Spots) -> Tensor:
        """Where the end of the episode of live rows is noted: each episode has one row that is no transition."""
        # so the ordinal of a row's episode is the row's number less the transitions of the env that are older. `order`
        # has the lower 32 bits of these; the newer ones are at most `rows`, so their number fits 32 bits
        count = self.ring.count[spots.envs]
        episode = spots.numbers - count + ((count - self.ring.order[spots.places]) & 0xFFFFFFFF)
        return self.ring.base[spots.envs] + episode % self.ring.rows

    def read(self, store: DeviceRows, spots: Spots, stream: Tensor, form: GoalForm) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows from these rows on, some with another goal.

        Raises:
            ShapeError, DTypeError: a function returned a wrong result.
        """
        count, n = len(spots.places), form.n
        windows = self.ring.windows(spots, n, form.gamma)
        choice = self.choose(spots, windows, stream, form)
        reached = store.read_rows(choice.after.reshape(-1), [form.achieved])[form.achieved]
        aimed = store.read_rows(choice.aim, [form.achieved])[form.achieved]
        wanted = aimed[:, None].expand(count, n, *aimed.shape[1:]).flatten(0, 1)
        info: object = {}
        if form.info:
            info = nest(store.read_rows(choice.now.reshape(-1), form.info))[form.info[0][0]]
        results: dict[Path, Tensor] = {}
        for function in form.functions:
            # a copy for each: a function may write to what it gets
            result = function.judge(reached.clone(), wanted.clone(), info)
            if not isinstance(result, Tensor):
                raise DTypeError(f"{function}: expected a tensor, got {type(result)}; pass tensors=False")
            kind = "b" if result.dtype is torch.bool else "c" if result.is_complex() else "f"
            function.require(count * n, tuple(result.shape), result.dtype, kind)
            results[function.path] = result.view(count, n)
        windows = self.relabel(windows, choice, [*map(results.get, RESULTS)], form.gamma)
        found = windows.fields
        found = store.read_planned(spots.places, windows.last, found, {}) | {("relabelled",): choice.relabelled}
        chosen = choice.relabelled.view(count, *[1] * (aimed.ndim - 1))
        for path in (form.desired, ("next_obs", *form.desired[1:])):
            found[path] = torch.where(chosen, aimed, found[path])
        return {path: found[path] for path in form.order}

    def choose(self, spots: Spots, windows: Windows, stream: Tensor, form: GoalForm) -> Choice:
        """Choose the rows that get another goal, and the goals.

        Row i decides by number ``GOALS`` + 2 i of the stream, and draws its goal by the number after that, so that no
        row depends on another.
        """
        ring, item = self.ring, torch.arange(len(spots.places), device=stream.device)
        number, begin, oldest = spots.numbers, ring.base[spots.envs], ring.oldest[spots.envs]
        # the end is noted by its lower 32 bits, and lies less than `rows` after the row
        end = number + ((self.ends[self._entry(spots)] - number) & 0xFFFFFFFF)
        # the first row of the episode that is still stored
        first = number - torch.minimum(ring.step[spots.places].to(INT64), number - oldest)
        # row r holds the goal that step r - 1 reached: from `low` to `high` are the rows that a goal may come from
        low, high = {
            FUTURE: (number + 1, end),
            FINAL: (end, end),
            EPISODE: (first + 1, end),
            PAST: (first + 1, number),
            RANDOM: (number, number),
        }[form.strategy]
        relabelled = (uniform(stream, GOALS + 2 * item, ring.golden) < form.ratio) & (high >= low)
        if form.finished:
            # the episode goes on if its last row is the env's newest, and the next step continues it
            goes_on = (end == ring.head[spots.envs] - 1) & (ring.following[spots.envs] > 0)
            relabelled = relabelled & ~goes_on
        if form.strategy == RANDOM:
            further = stream_of(mix(stream), torch.full_like(stream, OTHERS))
            others = ring.draw(len(item), further, ring.first_with_history())
            aim = ring.base[others.envs] + (others.numbers + 1) % ring.rows
        else:
            u = uniform(stream, GOALS + 1 + 2 * item, ring.golden)
            # with none to choose from it is any row, and `relabelled` is False
            aim = begin + (low + (u * (high - low + 1).to(FLOAT64)).to(INT64)) % ring.rows
        # a shorter window repeats its last step up to n, so that all have one shape
        k = torch.minimum(torch.arange(form.n, device=item.device), windows.steps[:, None] - 1)
        now, after = (begin[:, None] + (number[:, None] + k + more) % ring.rows for more in (0, 1))
        return Choice(relabelled, torch.where(relabelled, aim, spots.places), now, after)

    def relabel(self, windows: Windows, choice: Choice, judged: list[Tensor | None], gamma: float) -> Windows:
        """The windows of the chosen rows with the new rewards and flags, and the others as they are.

        ``judged`` are rewards, ``terminated`` and ``truncated`` ``[B, n]`` of the steps; None as recorded.
        """
        ring = self.ring
        recorded = ring.reward[choice.now], ring.terminated[choice.now] > 0, ring.truncated[choice.now] > 0
        reward, terminated, truncated = (
            old if new is None else new.to(old.dtype) for old, new in zip(recorded, judged, strict=True)
        )
        item = torch.arange(choice.now.shape[1], device=reward.device)
        within = item < windows.steps[:, None]
        # the recorded window ends where the episode or the stored rows do, and a new flag may end it sooner
        joins = within[:, 1:] & ~(terminated | truncated)[:, :-1]
        steps = count_steps(torch.ones_like(windows.indices), joins.T)
        terminal, cut, last = (x.gather(1, (steps - 1)[:, None])[:, 0] for x in (terminated, truncated, choice.after))
        used = item[:, None] < steps
        rewards = torch.where(used, reward.T.to(FLOAT64), 0.0)
        value, discount = sum_steps(zip(used, rewards, strict=True), terminal, gamma)
        if judged[0] is not None:
            self.not_finite.add_((within & choice.relabelled[:, None] & ~torch.isfinite(reward)).sum())
        index, next_index = windows.indices, windows.indices + steps * ring.num_envs
        made = Windows(index, next_index, value, discount, steps.to(INT32), terminal, cut, last)
        # the others keep their bits: they were summed by the view without goals
        pairs = zip(made, windows, strict=True)
        return Windows(*(torch.where(choice.relabelled, new, old) for new, old in pairs))


def read_goals(
    store: DeviceRows, ring: DeviceRing, goals: DeviceGoals, spots: Spots, stream: Tensor, form: GoalForm
) -> dict[Path, Tensor]:
    """The fields ``[B, ...]`` of the windows that start at ``spots``, some with another goal.

    Raises:
        ShapeError, DTypeError: a function returned a wrong result.
    """
    return goals.read(store, spots, stream, form)
