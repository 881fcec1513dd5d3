"""DeviceRing: the cursors, flags and bookkeeping of a ring as tensors, with what it draws and reads.

Every function runs the same operations of fixed shapes whatever the tensors hold, so none waits for the device, and all
of them can be compiled with ``fullgraph=True`` or captured in a CUDA graph. They do what ``adding.cpp``, ``draws.cpp``
and ``windows.cpp`` do for a ring in RAM, row by row the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.numbers import GOLDEN, stream_of, uniform
from ..core.words import FINALS, LINKED, LONGEST, MOST_ATTEMPTS
from ..ring.ring import EVERY_ROW
from ..steps.schema import Path

INT32, INT64, FLOAT64 = torch.int32, torch.int64, torch.float64

# Rejection takes two rounds of fixed shapes, so that no shape depends on what was drawn. Drawing again for as long as
# something misses would have to ask the device whether anything does.

AT_ONCE = 16
"""Attempts that are made for all rows of a batch."""


class AddPlan(NamedTuple):
    """Where a step of each env goes, int64 ``[N]`` each; ``DeviceRing.dummy_row`` where there is nothing."""

    places: Tensor
    finals: Tensor
    """Of the final observations."""
    before: Tensor
    """Of the rows that the step completes."""
    completed_now: Tensor
    """Of the step's rows that are complete at once."""
    bookkeeping: tuple[Tensor, Tensor, Tensor]
    """Rows whose bookkeeping changes, their stamps and their orders."""
    steps: Tensor
    """The indices within episodes of the last of these rows."""
    cursors: Tensor
    """The ring's cursors afterwards."""


class Spots(NamedTuple):
    """Rows, int64 ``[B]`` each."""

    places: Tensor
    envs: Tensor
    numbers: Tensor


class Windows(NamedTuple):
    """n-step windows, ``[B]`` each."""

    indices: Tensor
    next_indices: Tensor
    reward: Tensor
    discount: Tensor
    steps: Tensor
    terminated: Tensor
    truncated: Tensor
    last: Tensor
    """The rows that hold their next observations."""

    @property
    def fields(self) -> dict[Path, Tensor]:
        """Their fields in a batch, by path."""
        known = self.reward, self.discount, self.steps, self.terminated, self.truncated
        names = "index", "next_index", "reward", "discount", "steps", "terminated", "truncated"
        return {(name,): x for name, x in zip(names, (self.indices, self.next_indices, *known), strict=True)}


def count_steps(steps: Tensor, joins: Tensor) -> Tensor:
    """The steps of windows, int64 ``[B]``: their first, and each that follows the one before, bool ``[n - 1, B]``."""
    going = torch.ones_like(steps, dtype=torch.bool)
    for each in joins:  # once a window has stopped, nothing that follows counts
        going = going & each
        steps = steps + going
    return steps


def sum_steps(steps: Iterable[tuple[Tensor, Tensor]], ended: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The rewards and the discounts of n-step windows, float32, as ``sum_window`` of ``windows.hpp`` sums them.

    Args:
        steps: two tensors for each step. The first is True for the windows that have this step. The second has its
            rewards, float64, and 0.0 for all other windows: an infinity times 0 would be NaN.
        ended: windows after which nothing is bootstrapped.
        gamma: discount per step.
    """
    value, discount = torch.zeros_like(ended, dtype=FLOAT64), torch.ones_like(ended, dtype=FLOAT64)
    factor = 1.0
    # each name is read once a step: a compiler writes the whole expression anew wherever one is read
    for goes, reward in steps:
        value = value + factor * reward  # 0.0 changes no bit, for no sum is -0.0
        factor *= gamma
        discount = torch.where(goes, factor, discount)
    return value.to(torch.float32), torch.where(ended, 0.0, discount).to(torch.float32)


class DeviceRing:
    """The bookkeeping of :class:`relive.ring.Ring` as tensors of one device.

    The arrays of rows have two entries more than there are rows. The first stands for the row of zeros that negative
    places read, and is never written; :attr:`dummy_row`, the second, takes writes that are not wanted.

    Args:
        num_envs: N.
        rows: rows per env, at least 4.
        mode: ``FINALS``, or for rows with a next observation of their own ``ALONE`` or ``LINKED``.
        device: of all tensors.
    """

    def __init__(self, num_envs: int, rows: int, mode: int, device: torch.device) -> None:
        self.num_envs = num_envs
        self.rows = rows
        self.mode = mode
        self.rule = EVERY_ROW
        """The rule of what can be drawn."""
        self.dummy_row: int = num_envs * rows + 1

        def zeros(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        size = num_envs * rows + 2
        self.cursors: Tensor = zeros(4 * num_envs + 3, INT64)
        """Of all envs ``head``, ``tail``, ``following`` and ``count``; then ``completed``, ``episodes`` and
        ``not_finite``. One operation changes them all, so that they always fit each other."""
        self.step: Tensor = zeros(size, INT32)
        self.stamp: Tensor = zeros(size, INT64)
        self.order: Tensor = zeros(size, INT32)
        self.reward: Tensor = zeros(size, torch.float32)
        self.terminated: Tensor = zeros(size, torch.uint8)
        self.truncated: Tensor = zeros(size, torch.uint8)
        self.mixed: Tensor = zeros(1, INT64)
        """The seed of the batches, as :func:`relive.core.numbers.mix` gives it."""
        self.draws: Tensor = zeros(1, INT64)
        """The number of batches drawn with that seed.

        It is a tensor of one entry, as all numbers are that a call changes: torch.compile takes a float64 tensor
        without axes for a Python number, and loses what is written to it.
        """
        self.golden: Tensor = torch.full((1,), GOLDEN, dtype=INT64, device=device)
        self.envs: Tensor = torch.arange(num_envs, device=device)
        self.base: Tensor = self.envs * rows
        """The first place of each env."""

    @staticmethod
    def count_bytes(num_envs: int, num_rows: int) -> int:
        """The bytes of all tensors for so many envs and rows over all of them."""
        return 22 * (num_rows + 2) + 8 * (6 * num_envs + 6)

    @property
    def head(self) -> Tensor:
        """The number of the row that each env gets next, ``[N]``."""
        return self.cursors[: self.num_envs]

    @property
    def tail(self) -> Tensor:
        """The number of the first row of each env that was not cleared, ``[N]``."""
        return self.cursors[self.num_envs : 2 * self.num_envs]

    @property
    def following(self) -> Tensor:
        """The index within its episode of the row that each env gets next, ``[N]``."""
        return self.cursors[2 * self.num_envs : 3 * self.num_envs]

    @property
    def count(self) -> Tensor:
        """How many transitions of each env were completed, ``[N]``."""
        return self.cursors[3 * self.num_envs : 4 * self.num_envs]

    @property
    def counters(self) -> Tensor:
        """How many transitions were completed, how many episodes have ended, how many rewards were not finite."""
        return self.cursors[4 * self.num_envs :]

    # -- writing ------------------------------------------------------------------------------------------------

    def plan(self, reward: Tensor, terminated: Tensor, truncated: Tensor) -> AddPlan:
        """Where one more step of each env goes, its reward float32 ``[N]``, its flags bool ``[N]``. Writes nothing."""
        done = terminated | truncated
        number, count, base = self.head, self.count, self.base
        counts = self.counters
        # an episode of LONGEST steps starts anew, so that `index` + 1 still fits the int32 of `step`
        index = torch.where(self.following < LONGEST, self.following, 0)
        # row `number` of an env lies at its number modulo `rows`, counted from the env's first place
        place = base + number % self.rows
        dummy_row = torch.full_like(place, self.dummy_row)
        if self.mode == FINALS:
            completes = index > 0  # the row before is of the same episode, and is complete now
            # an env takes up to two stamps: for the row before, and for its own row if that ends the episode
            each = completes.to(INT64) + done.to(INT64)
            issued = counts[:1] + torch.cumsum(each, 0) - each  # stamps that the envs before this one have taken
            # the row before completes first, so the step's own row has the next stamp
            stamp = issued + completes
            before = torch.where(completes, base + (number - 1) % self.rows, dummy_row)
            # a final observation takes a row of its own, the one after the step
            final = torch.where(done, base + (number + 1) % self.rows, dummy_row)
            own = torch.where(done, place, dummy_row)
            where = torch.cat([before, place, final])
            # a row that is not complete has -1 - the stamps issued before it, a boundary row one more
            stamps = torch.cat([issued, torch.where(done, stamp, -1 - issued), -2 - stamp])
            # `order` counts the env's own transitions that are older: the row before is one more for the step's row,
            # and the step's row one more for the boundary row
            orders = torch.cat([count, count + completes, count + completes + 1])
            # the row before keeps its index, so these are for the last 2 N of `where` alone; a boundary row has the
            # length of its episode
            steps = torch.cat([index, index + 1])
            following = torch.where(done | (index + 1 >= LONGEST), 0, index + 1)
            ended = done.to(INT64)
            head = number + 1 + ended  # a boundary row has a number, too
        else:
            # each row brings its next observation, so it is complete at once: no row waits, and there is no boundary
            each = torch.ones_like(number)
            issued = counts[:1] + self.envs  # one stamp for each env, in their order
            before, final, own, where = dummy_row, dummy_row, place, place
            stamps, orders, steps = issued, count, index
            # a row ALONE is an episode of one step, which nothing counts as an end
            goes_on = ~done & (index + 1 < LONGEST) if self.mode == LINKED else torch.zeros_like(done)
            following = torch.where(goes_on, index + 1, 0)
            ended = done.to(INT64) if self.mode == LINKED else torch.zeros_like(number)
            head = number + 1
        # all is put into one tensor: one write changes the cursors of all envs and the counters at once
        more = torch.stack([each.sum(), ended.sum(), (~torch.isfinite(reward)).sum()])
        cursors = torch.cat([head, self.tail, following, count + each, counts + more])
        bookkeeping = where, stamps, orders.to(INT32)  # the lower 32 bits
        return AddPlan(place, final, before, own, bookkeeping, steps.to(INT32), cursors)

    def write(self, added: AddPlan, reward: Tensor, terminated: Tensor, truncated: Tensor) -> None:
        """Add a planned step. The cursors come last: before that, no row counts that is not all there."""
        where, stamps, orders = added.bookkeeping
        self.stamp.index_put_((where,), stamps)
        self.order.index_put_((where,), orders)
        # unwanted entries go to `dummy_row`, several to one place: nobody reads it, so their order does not matter
        self.step.index_put_((where[-len(added.steps) :],), added.steps)
        self.reward.index_put_((added.places,), reward)
        self.terminated.index_put_((added.places,), terminated.to(torch.uint8))
        self.truncated.index_put_((added.places,), truncated.to(torch.uint8))
        self.cursors.copy_(added.cursors)

    # -- which rows can be drawn --------------------------------------------------------------------------------

    @property
    def oldest(self) -> Tensor:
        """The number of the oldest live row of each env, ``[N]``."""
        return torch.maximum(self.tail, self.head - self.rows)

    def can_draw(self, spots: Spots) -> Tensor:
        """True for rows, live ones, that can be drawn; bool of their shape."""
        able, rule = self.stamp[spots.places] >= 0, self.rule  # a row that is not complete has a negative stamp
        if rule.history:
            # so many rows of its episode lie before it, of those that the rule asks for; the oldest has to be live
            behind = torch.clamp(self.step[spots.places], max=rule.history)
            able = able & (spots.numbers - behind >= self.oldest[spots.envs])
        return able & self._end_windows(spots) if rule.length > 1 else able

    def _end_windows(self, spots: Spots) -> Tensor:
        """True for complete rows that end a window: a full one or, where tails count, the last of an episode."""
        rule, begin = self.rule, self.base[spots.envs]
        # windows start at steps 0, stride, 2 stride, ... of an episode: a full one ends `length` - 1 steps later
        beyond = self.step[spots.places].to(INT64) + 1 - rule.length
        full = (beyond >= 0) & (beyond % rule.stride == 0)
        if not rule.tails:
            return full
        # a tail is the last transition of an episode. The row after it is no transition, so that one has a negative
        # stamp; and then an episode begins, at the row after that or at the next step of the env
        next_row, one_more = (begin + (spots.places - begin + k) % self.rows for k in (1, 2))
        newest = spots.numbers + 2 == self.head[spots.envs]  # the row after it is the env's newest
        over = torch.where(newest, self.following[spots.envs] == 0, self.step[one_more] == 0)
        return full | (over & (self.stamp[next_row] < 0))

    def window_start(self, at: Tensor) -> Tensor:
        """The first step of the window whose last is step ``at`` (int64) of an episode: a full window, or a tail.

        It is the smallest multiple of ``stride`` whose full window does not end before ``at``.
        """
        beyond, stride = at + 1 - self.rule.length, self.rule.stride
        return torch.where(beyond > 0, ((beyond - 1) // stride + 1) * stride, 0)

    def count_drawable(self) -> Tensor:
        """How many rows can be drawn, int64 without axes; reads the bookkeeping of all rows."""
        spots = self.spots_of(torch.arange(self.dummy_row - 1, device=self.envs.device))
        # a place of a ring that is not full yet, or was cleared, holds no live row
        live = (spots.numbers >= self.oldest[spots.envs]) & (spots.numbers >= 0)
        return (live & self.can_draw(spots)).sum()

    def spots_of(self, places: Tensor) -> Spots:
        """The env and the number of the newest row that was written at each place, ``[B]``."""
        envs = places // self.rows
        newest = self.head[envs] - 1
        # so many places behind the newest row, taken round the ring; an env without rows has its newest at the last
        # place, so that each number is negative
        back = torch.where(newest < 0, self.rows - 1, newest % self.rows) - places % self.rows
        return Spots(places, envs, newest - torch.where(back >= 0, back, back + self.rows))

    def find(self, index: Tensor) -> tuple[Spots, Tensor]:
        """The rows of public indices ``[B]``, and True for those that can be drawn. Others have any place."""
        number, env = index // self.num_envs, index % self.num_envs  # a public index is number * N + env
        live = (index >= 0) & (number < self.head[env]) & (number >= self.oldest[env])
        number = torch.where(live, number, 0)  # any row of the env; `live` says that it does not count
        spots = Spots(env * self.rows + number % self.rows, env, number)
        return spots, live & self.can_draw(spots)

    # -- drawing ------------------------------------------------------------------------------------------------

    def next_stream(self) -> Tensor:
        """The stream of random numbers of the next batch, int64 without axes; counts the batch."""
        stream = stream_of(self.mixed, self.draws)
        self.draws.add_(1)
        return stream

    def draw(self, count: int, stream: Tensor, first: Tensor, wanted: Tensor | None = None) -> Spots:
        """Rows ``[count]`` that can be drawn, of those from row ``first`` (``[N]``) of each env on.

        Each comes equally often, and with replacement. With ``wanted``, int64 ``[1]``, the first so many are those of a
        batch of that size.

        A row that cannot be drawn is drawn again, at most ``MOST_ATTEMPTS`` times. It is for rings of which a third of
        the rows or more can be drawn: then one of a batch misses so often once in 10**12 batches.
        """
        # the rows of all envs lie on one line, env after env: attempt x is row x of that line
        rows = self.head - first
        line = first, torch.cumsum(rows, 0), rows
        item = torch.arange(count, device=self.envs.device)
        size = count if wanted is None else wanted
        spots, found = self._attempts(line, stream, item, size, range(AT_ONCE))
        # the few that have missed are put together, as far as there is room, and try on
        room = min(count, max(64, count // 64))
        missed = ~found
        # `turn` numbers those that missed from 0 on, and `slot` is where each waits; `room` is one slot too many, for
        # those that have found a row, and for what is beyond the room
        turn = torch.cumsum(missed.to(INT64), 0) - 1
        slot = torch.where(missed & (turn < room), turn, room)
        waiting = torch.zeros(room + 1, dtype=INT64, device=item.device).index_put_((slot,), item)[:room]
        later, _ = self._attempts(line, stream, waiting, size, range(AT_ONCE, MOST_ATTEMPTS))
        again = torch.clamp(slot, max=room - 1)  # any slot, where nothing is taken from it
        taken = slot < room
        return Spots(*(torch.where(taken, late[again], soon) for soon, late in zip(spots, later, strict=True)))

    def first_with_history(self) -> Tensor:
        """The first row of each env that draws point at: the oldest that has its history, ``[N]``."""
        oldest, history = self.oldest, self.rule.history
        if not history:
            return oldest
        # a row lacks history only if its episode began before the oldest row, so of the oldest `history` + 1 rows the
        # first that has it settles the matter
        numbers = oldest[:, None] + torch.arange(history + 1, device=oldest.device)
        behind = torch.clamp(self.step[self.base[:, None] + numbers % self.rows], max=history)
        lacks = numbers - behind < oldest[:, None]
        # the first that does not lack it, and none beyond the newest row
        return torch.minimum(oldest + torch.cumprod(lacks.to(INT64), 1).sum(1), self.head)

    def transitions_since(self, first: Tensor) -> Tensor:
        """The number of transitions of each env that begin at these rows, ``[N, K]``, or later.

        The rows are live ones, or the env's next.
        """
        order = self.order[self.base[:, None] + first % self.rows]
        # at most `rows` lie between, so the difference of two counts fits 32 bits
        since = (self.count[:, None] - order) & 0xFFFFFFFF
        return torch.where(first < self.head[:, None], since, 0)

    def _attempts(
        self, line: tuple[Tensor, Tensor, Tensor], stream: Tensor, item: Tensor, count: int | Tensor, numbers: range
    ) -> tuple[Spots, Tensor]:
        """The first of several attempts at each item of a batch of ``count`` that can be drawn; True if there is one.

        Where there is none it is the first attempt.
        """
        first, until, rows = line  # of each env: its first row, where it ends on the line, how long it is there
        tries = torch.arange(numbers.start, numbers.stop, device=item.device)
        # item i takes numbers 1 + i, 1 + i + count, ... of the stream, as in RAM, and each names a row of the line.
        # [attempts, B]
        at = (uniform(stream, 1 + item + count * tries[:, None], self.golden) * until[-1].to(FLOAT64)).to(INT64)
        # the env whose piece holds it: the first that ends beyond it. A ring without rows has none; an index beyond the
        # end would stop a CUDA context for good
        env = torch.searchsorted(until, at, right=True).clamp(max=self.num_envs - 1)
        # so far into the piece, so many rows after the env's first
        number = torch.clamp(first[env] + at - (until - rows)[env], min=0)
        spots = Spots(env * self.rows + number % self.rows, env, number)
        able = self.can_draw(spots)
        # the first attempt that may be drawn, for each item; 0 where there is none
        which = able.to(torch.uint8).argmax(0, keepdim=True)
        return Spots(*(x.gather(0, which)[0] for x in spots)), able.any(0)

    # -- reading ------------------------------------------------------------------------------------------------

    def windows(self, spots: Spots, n: int, gamma: float) -> Windows:
        """The windows of up to ``n`` steps from these rows on."""
        own = self.mode != FINALS  # each row has its next observation; else the row after it holds that
        begin, ahead = self.base[spots.envs], torch.arange(n + 1, device=spots.places.device)[:, None]
        places = begin + (spots.places - begin + ahead) % self.rows  # [n + 1, B]
        steps = torch.ones_like(begin)
        if n > 1:
            # a window goes on over a row that ended nothing to one that is a complete transition. Where rows have
            # their own next observation there is no boundary row to stop it, so the next row also has to be there,
            # and must not be the first of an episode
            here, after = places[: n - 1], places[1:n]
            joins = ~((self.terminated[here] > 0) | (self.truncated[here] > 0)) & (self.stamp[after] >= 0)
            if own:
                joins = joins & (spots.numbers + ahead[1:n] < self.head[spots.envs]) & (self.step[after] != 0)
            steps = count_steps(steps, joins)
        newest = places.gather(0, (steps - 1)[None])[0]
        terminal, cut = self.terminated[newest] > 0, self.truncated[newest] > 0
        used = ahead[:n] < steps
        rewards = torch.where(used, self.reward[places[:n]].to(FLOAT64), 0.0)
        value, discount = sum_steps(zip(used, rewards, strict=True), terminal, gamma)
        last = newest if own else places.gather(0, steps[None])[0]
        # the number of the row that holds the next observation
        following = spots.numbers + steps - (1 if own else 0)
        index, next_index = (numbers * self.num_envs + spots.envs for numbers in (spots.numbers, following))
        return Windows(index, next_index, value, discount, steps.to(INT32), terminal, cut, last)

    def frames(self, places: Tensor, depth: int, repeat: bool) -> Tensor:
        """The rows ``[B, depth]`` of the frames that end at places, oldest first, none of another episode.

        Before an episode's first frame that one is repeated, or it is the row of zeros.
        """
        back = torch.arange(depth - 1, -1, -1, device=places.device)
        index = self.step[places].to(INT64)[:, None]  # so many frames of its episode lie before it
        begin = (places // self.rows * self.rows)[:, None]
        frames = begin + (places[:, None] - begin - torch.minimum(back, index)) % self.rows
        return frames if repeat else torch.where(back <= index, frames, self.dummy_row - 1)
