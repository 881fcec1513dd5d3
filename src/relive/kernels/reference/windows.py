"""Reading rings, in plain Python: n-step windows, rows, stacks of frames, sequences, and windows with other goals.

:mod:`relive.kernels.tables` describes the memory of a ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tables import HEAD, LENGTH, NEXT, STRIDE, RingArrays
from .priorities import uniform
from .ring import Ints, oldest, place_after, place_of, row_at, window_start

__all__ = [
    "CUT",
    "DISCOUNT",
    "EPISODE",
    "FINAL",
    "FINISHED",
    "FUTURE",
    "GOAL_AT",
    "GOAL_BYTES",
    "INDEX",
    "INTO_NEXT",
    "INTO_OBS",
    "LAYOUT",
    "MARK",
    "NEXT_AT",
    "NEXT_BYTES",
    "NEXT_INDEX",
    "OTHERS",
    "OWN_AT",
    "OWN_BYTES",
    "PAST",
    "RANDOM",
    "STEPS",
    "STEP_BYTES",
    "STRATEGY",
    "SUM",
    "TERMINAL",
    "RelabelledSteps",
    "Results",
    "add_reward",
    "bootstrap",
    "column",
    "gather_pairs",
    "gather_rows",
    "plan_goals",
    "read_sequences",
    "relabel_windows",
    "results",
    "stack_places",
    "windows",
    "write_window",
]


INDEX, NEXT_INDEX, DISCOUNT, STEPS, SUM, TERMINAL, CUT = range(7)
"""The first entries of ``batch``, the layout of a row of a batch of n-step windows: the bytes of its results, int64,
int64, float32, int32, float32, uint8 and uint8. Each is a multiple of the size of its type."""
STEP_BYTES, NEXT_AT, NEXT_BYTES, OWN_AT, OWN_BYTES = range(7, 12)
"""The others, in bytes: the step at the start of the row; where the next observation goes; how much of the row that
has it is copied there, or -1 if each row of the ring has a next observation of its own; where that lies in a row of
the ring, and its size."""
LAYOUT = 12
"""How many entries these are. The entries of a view may follow."""


class Results(NamedTuple):
    """The results of n-step windows, each a column ``[B]`` over the packed rows of a batch."""

    index: Any
    """int64: the public index of the anchor."""
    next_index: Any
    """int64: that of the row with the next observation."""
    discount: Any
    """float32: γᵏ, or 0 after a terminal."""
    steps: Any
    """int32: k, the number of rewards."""
    reward: Any
    """float32: their discounted sum."""
    terminated: Any
    """uint8: whether the last step terminated."""
    truncated: Any
    """uint8: whether it was truncated."""


def column(rows: NDArray[np.uint8], byte: int, dtype: Any) -> Any:
    """The field at a byte of packed rows ``[B, W]``, as a column ``[B]`` over the same memory."""
    return rows[:, byte : byte + np.dtype(dtype).itemsize].view(dtype)[:, 0]


def results(rows: NDArray[np.uint8], batch: Any) -> Results:
    """The columns of a batch's packed rows ``[B, W]``."""
    dtypes = np.int64, np.int64, np.float32, np.int32, np.float32, np.uint8, np.uint8
    return Results(*(column(rows, int(byte), dtype) for byte, dtype in zip(batch, dtypes, strict=False)))


# numba compiles the three below as they are


def add_reward(value: Any, discount: Any, reward: Any, gamma: float) -> tuple[Any, Any]:
    """One more reward of a window: its sum and γᵏ, from those before. They start at 0.0 and 1.0."""
    return value + discount * float(reward), discount * gamma


def bootstrap(discount: Any, terminal: Any) -> Any:
    """The factor of the value that follows a window: γᵏ, or 0 if its last step terminated."""
    return 0.0 if terminal else discount


def write_window(
    out: Results, i: int, next_index: Any, k: int, value: Any, discount: Any, terminal: Any, cut: Any
) -> None:
    """Write all that is known of the window of row i of a batch, but the anchor's index.

    ``discount`` is what :func:`bootstrap` makes of it.
    """
    out.next_index[i] = next_index
    out.discount[i] = discount
    out.steps[i] = k
    out.reward[i] = value
    out.terminated[i] = terminal
    out.truncated[i] = cut


def windows(ring: RingArrays, batch: Ints, places: Ints, steps: int, gamma: float, out: Any, last: Ints) -> int:
    """The n-step windows that start at anchors, rₜ + γrₜ₊₁ + ... with up to ``steps`` rewards, as packed rows.

    A window stops at a done, at the newest row, and where the next row is not complete or does not go on from it.
    ``last`` is the place of the row that holds the observation it bootstraps from. If rows have next observations of
    their own, that is the row of the last transition; it is copied unless it is the anchor, whose bytes are there.

    ``batch`` is the layout of the rows ``out``, as :mod:`relive.kernels.reference.windows` lists its entries.

    Returns the first of ``places`` that is not a row's, or -1.
    """
    own, envs, written = batch[NEXT_BYTES] < 0, len(ring.state), results(out, batch)
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(ring.memory):
            return i
        out[i, : batch[STEP_BYTES]] = ring.memory[place, : batch[STEP_BYTES]]
        env, begin, number = row_at(place, ring)
        newest = place_of(int(ring.state[env, HEAD]) - 1, env, ring.rows)
        here, value, discount, k = place, 0.0, 1.0, 0
        while True:
            value, discount = add_reward(value, discount, ring.reward[here], gamma)
            terminal, cut = ring.terminated[here], ring.truncated[here]
            k += 1
            before, here = here, place_after(here, begin, ring.rows)
            if terminal or cut or k == steps or before == newest or ring.stamp[here] < 0:
                break
            if own and ring.step[here] == 0:
                break
        last[i] = before if own else here
        _, _, following = row_at(int(last[i]), ring)
        written.index[i] = number * envs + env
        next_index, factor = following * envs + env, bootstrap(discount, terminal)
        write_window(written, i, next_index, k, value, factor, terminal, cut)
        if not own:
            out[i, batch[NEXT_AT] : batch[NEXT_AT] + batch[NEXT_BYTES]] = ring.memory[here, : batch[NEXT_BYTES]]
        elif before != place:
            source = ring.memory[before, batch[OWN_AT] : batch[OWN_AT] + batch[OWN_BYTES]]
            out[i, batch[NEXT_AT] : batch[NEXT_AT] + batch[OWN_BYTES]] = source
    return -1


def gather_rows(source: Any, places: Ints, out: Any, start: int, nbytes: int) -> int:
    """The first ``nbytes`` bytes of rows of ``source`` (uint8 ``[R, W]``) to successive rows of ``out``, at ``start``.

    A negative place gives zeros. Returns the first place beyond the last row, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if place >= len(source):
            return i
        out[i, start : start + nbytes] = source[place, :nbytes] if place >= 0 else 0
    return -1


def gather_pairs(source: Any, places: Ints, out: Any) -> int:
    """:func:`gather_rows` of whole rows for places ``[2 B, depth]``, item B + i right after item i; a bad item, or -1.

    Stacks of frames before and after a step share all but one, which are still in the cache the second time.
    """
    count, depth = len(places) // 2, places.shape[1]
    for i in range(count):
        for j in (i, count + i):
            if gather_rows(source, places[j], out[j * depth : (j + 1) * depth], 0, source.shape[1]) >= 0:
                return j
    return -1


def stack_places(ring: RingArrays, places: Ints, depth: int, repeat: bool, out: NDArray[Any]) -> int:
    """Places ``[B, depth]`` of the frames that end at ``places``, oldest first, within their episode.

    Frames from before the episode are its first one if ``repeat``, else -1. Returns the first of ``places`` that is
    not a row's, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(ring.step):
            return i
        begin = place // ring.rows * ring.rows
        for j in range(depth):
            back = depth - 1 - j
            reach = min(back, int(ring.step[place]))
            out[i, j] = begin + (place - begin - reach) % ring.rows if reach == back or repeat else -1
    return -1


PER_INDEX, LENGTHS, BURN_IN, ENV, START, FIRST = range(6)
"""The rows of ``per``, an entry a window: the public index of its anchor, its number of rows, how many of them
are burn-in, its env, the number of its first step within the env, and the place of row 0."""

ROW_SUM, ROW_TERMINAL, ROW_CUT, ROW_DISCOUNT, ROW_STEPS, NEXT_ROW, MASK, IS_START = range(8)
"""The first entries of ``batch``, the layout of a row of a batch of sequences: the bytes of what is written for each
step, float32, uint8, uint8, float32, int32, int64, uint8 and uint8. Each is a multiple of the size of its type."""
ROW_STEP_BYTES, OBS_BYTES, BURN, REACH, TIME_FIRST = range(8, 13)
"""The others: the bytes at the start of a row that are copied of a step, and of an observation that an episode ended
on, multiples of 16; the steps of burn-in; the rewards of an n-step sum; 1 if the rows are ``[T, B]``, 0 if
``[B, T]``."""


def read_sequences(
    ring: RingArrays, batch: Ints, gamma: float, places: Ints, out: Any, blank: Any, per: Ints, table: Ints
) -> int:
    """The windows that end at anchors, as packed rows ``[T, B]``, or ``[B, T]``, flattened: uint8 ``[T * B, W]``.

    A window comes after up to ``batch[BURN]`` steps before it, as far as its episode goes, and before as many rows as
    its n-step rewards (as :func:`relive.kernels.reference.windows.windows` has them) reach beyond it.

    The row after an episode's last step is ``blank`` with the observation that it ended on; ``blank`` (uint8 ``[W]``)
    is the row that stands where there is nothing. Each step gets the reward, done bits, discount and number of rewards
    of its n-step window, and the row of the batch after that, 0 and -1 behind the last step; whether it belongs to the
    window; and whether it begins its episode. ``per`` ``[6, B]`` gets what is known of each window. ``table``, if not
    empty, gets the place of each row; -1 where there is none, and -2 - place for an observation that an episode ended
    on.

    Returns -1; or the first of ``places`` that is not a row's, or whose window would not be among the rows or not fit.
    """
    count, total = len(places), len(out) // max(len(places), 1)
    for b, place in enumerate(places.tolist()):
        window = _window_of(ring, batch, place, total)
        if window is None:
            return b
        for t in range(total):
            row = t * count + b if batch[TIME_FIRST] else b * total + t
            at = _copy_row(ring, batch, window, window.first + t, out[row], blank)
            if table.size:
                table[row] = at
            if window.first + t <= window.known:
                _write_step(ring, batch, gamma, window, t, out[row])
        per[:, b] = [
            window.number * len(ring.state) + window.env,
            window.known - window.first + 1,
            window.start - window.first,
            window.env,
            window.number - window.anchor + window.start,
            window.episode[window.first],
        ]
    return -1


class _Window(NamedTuple):
    """A window. Its steps are counted from its episode's first one."""

    env: int
    number: int
    """The number of the anchor's row in its env."""
    anchor: int
    """The last step of the window."""
    start: int
    """The window's first step."""
    first: int
    """The first step of burn-in."""
    known: int
    """How many steps of the episode have rewards that are read; row ``known`` has the last observation."""
    episode: list[int]
    """The places of the episode's steps."""

    def ended(self, ring: RingArrays) -> tuple[int, int]:
        """The terminated and the truncated flag of the last known step."""
        last = self.episode[self.known - 1]
        return ring.terminated[last], ring.truncated[last]


def _window_of(ring: RingArrays, batch: Ints, place: int, total: int) -> _Window | None:
    """The window whose anchor lies at a place; None if there is no such row, or more than ``total`` rows before it."""
    if not 0 <= place < len(ring.memory):
        return None
    (env, _, number), index = row_at(place, ring), int(ring.step[place])
    start = int(window_start(index, int(ring.counters[LENGTH]), int(ring.counters[STRIDE])))
    first = max(start - int(batch[BURN]), 0)
    if not 0 <= index - first < min(ring.rows, total):
        return None
    reach = index + int(batch[REACH])
    episode = [place_of(number - index + k, env, ring.rows) for k in range(reach + 1)]
    known = index + 1
    while known < reach and ring.stamp[episode[known]] >= 0:
        known += 1
    return _Window(env, number, index, start, first, known, episode)


def _copy_row(ring: RingArrays, batch: Ints, window: _Window, i: int, row: Any, blank: Any) -> int:
    """Copy what the ring has of step ``i``, or of the observation after the last one; gives the entry of ``table``."""
    beyond, bounds = i > window.known, i == window.known and any(window.ended(ring))
    if beyond or bounds:
        row[:] = blank
    if beyond:
        return -1
    place = window.episode[i]
    nbytes = batch[OBS_BYTES] if bounds else batch[ROW_STEP_BYTES]
    row[:nbytes] = ring.memory[place, :nbytes]
    return -2 - place if bounds else place


def _write_step(ring: RingArrays, batch: Ints, gamma: float, window: _Window, t: int, row: Any) -> None:
    """Write what is computed for row ``t`` of a window: its n-step sum and what goes with it."""
    i, (terminal, cut) = window.first + t, window.ended(ring)
    k = min(int(batch[REACH]), window.known - i) if i <= window.anchor else 0
    value, discount = 0.0, 1.0
    for j in range(k):
        value, discount = add_reward(value, discount, ring.reward[window.episode[i + j]], gamma)
    last = k > 0 and i + k == window.known
    values: list[tuple[Any, Any]] = [
        (value, np.float32),
        (terminal if last else 0, np.uint8),
        (cut if last else 0, np.uint8),
        (bootstrap(discount, k == 0 or (last and terminal)), np.float32),
        (k, np.int32),
        (t + k if k else -1, np.int64),
        (window.start <= i <= window.anchor, np.uint8),
        (i == 0, np.uint8),
    ]
    for field, (entry, dtype) in enumerate(values):
        row[batch[field] : batch[field] + np.dtype(dtype).itemsize].view(dtype)[0] = entry


FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
"""The strategies, which say where a goal may come from: the steps from the anchor on, the last, all of the episode,
those before the anchor; or any step of the whole replay."""
GOAL_AT, GOAL_BYTES, INTO_OBS, INTO_NEXT, MARK, STRATEGY, FINISHED = range(LAYOUT, LAYOUT + 7)
"""The entries of ``batch`` after those of n-step windows: the byte of a ring's row at which the
achieved goal is, and its bytes (0: kernels cannot read it); the bytes of a batch's row at which the desired goals of
both observations are, and the flag that marks relabelled rows; the strategy; and 1 if only episodes that are over
count."""
GOALS = 2**32
"""The first number of a batch's stream that decides on goals; samplers stay below."""
OTHERS = 2**32 + 1
"""The number of a batch's further stream, by which the goals of RANDOM are drawn."""


class RelabelledSteps(NamedTuple):
    """The steps in the windows of relabelled rows: of a batch of B rows at most B rows, and M = B * n steps.

    The steps of the m-th such row are entries ``begin[m]`` to ``begin[m + 1]`` of all that is ``[M]``.
    """

    which: Ints
    """int64 ``[B]``: the rows of the batch."""
    begin: Ints
    """int64 ``[B + 1]``."""
    now: Ints
    """int64 ``[M]``: the places of the steps."""
    after: Ints
    """int64 ``[M]``: the places of the rows that follow them."""
    spans: Ints
    """int64 ``[3, B]``: the places of the episode's first and last live rows, and of the goal."""
    rewards: Any
    """float32 ``[M]``: the recorded rewards."""
    flags: Any
    """uint8 ``[2, M]``: terminated and truncated, as recorded and then with the new goal."""
    used: Ints
    """int64 ``[B]``: the last step of each window with its new goal."""
    places: Ints
    """int64 ``[B]``: the anchors of a batch that is drawn and read in one call."""
    last: Ints
    """int64 ``[B]``: the places of the rows after its windows."""


def plan_goals(
    ring: RingArrays, batch: Ints, places: Ints, n: int, gamma: float, key: int, ratio: float, others: Ints, out: Any,
    last: Ints, steps: RelabelledSteps, pairs: Any,
) -> int:  # fmt: skip
    """A batch of windows, which of its rows get another goal, which goal, and the steps of these rows' windows.

    Returns the number of rows with another goal, or -1 - i if ``places[i]`` is not that of a row.

    ``out`` and ``last`` become those of :func:`relive.kernels.reference.windows.windows`, with no row marked. Row
    i of the batch is relabelled if number GOALS + 2i of the stream ``key`` is below ``ratio``, it has a step to
    choose from, and, if only episodes that are over count, its own is over. The next number of the stream chooses among
    these steps. ``others`` are the places of transitions drawn for RANDOM. The new goals are written into ``out``.

    ``pairs``, uint8 ``[2, M, GOAL_BYTES]``, become the goals that were achieved after the steps, and the new goals.
    """
    bad = windows(ring, batch, places, n, gamma, out, last)
    if bad >= 0:
        return -1 - bad
    out[:, batch[MARK]] = 0
    rows, at, size = ring.rows, batch[GOAL_AT], batch[GOAL_BYTES]
    counts = results(out, batch).steps

    def following(place: int) -> int:
        return place_after(place, place // rows * rows, rows)

    found = steps.begin[0] = 0
    for i, place in enumerate(places.tolist()):
        e, _, number = row_at(place, ring)
        least, head = oldest(e, ring), int(ring.state[e, HEAD])
        if number < least:  # there is no such row any more, or not yet
            continue
        first = number - min(int(ring.step[place]), number - least)
        end = number
        while end + 1 < head and ring.step[place_of(end + 1, e, rows)] == ring.step[place_of(end, e, rows)] + 1:
            end += 1
        low, high = {
            FUTURE: (number + 1, end),
            FINAL: (end, end),
            EPISODE: (first + 1, end),
            PAST: (first + 1, number),
            RANDOM: (0, 0),
        }[int(batch[STRATEGY])]
        under_way = end == head - 1 and ring.state[e, NEXT] > 0
        if uniform(key, GOALS + 2 * i) >= ratio or high < low or (batch[FINISHED] and under_way):
            continue
        chosen = low + int(uniform(key, GOALS + 2 * i + 1) * (high - low + 1))
        aim = following(int(others[i])) if batch[STRATEGY] == RANDOM else place_of(chosen, e, rows)
        steps.which[found] = i
        steps.spans[:, found] = place_of(first, e, rows), place_of(end, e, rows), aim
        entry, here = int(steps.begin[found]), place
        for _ in range(counts[i]):
            steps.now[entry], steps.after[entry] = here, following(here)
            steps.rewards[entry] = ring.reward[here]
            steps.flags[:, entry] = ring.terminated[here], ring.truncated[here]
            for goals, row in zip(pairs, (steps.after[entry], aim), strict=True):
                goals[entry] = ring.memory[row, at : at + size]
            here, entry = following(here), entry + 1
        for byte in (batch[INTO_OBS], batch[INTO_NEXT]):
            out[i, byte : byte + size] = ring.memory[aim, at : at + size]
        found += 1
        steps.begin[found] = entry
    return found


def relabel_windows(
    ring: RingArrays, batch: Ints, gamma: float, found: int, judged: bool, out: Any, last: Ints, steps: RelabelledSteps,
    rewards: Any,
) -> int:  # fmt: skip
    """Rewrite the windows of relabelled rows: they end where a step terminates or is truncated, or with the last.

    ``out``, ``last`` and ``steps`` are as :func:`plan_goals` left them, with ``found`` rows; but ``steps`` has the
    flags of the new goals. ``rewards``, float32 ``[M]`` or more, are those of the new goals. These rows are marked.

    If the rewards were ``judged`` by the new goals, they have to be finite. Returns -1, or the first step with another
    reward; then nothing is written.
    """
    rewards = rewards[: steps.begin[found]]
    if judged and not np.isfinite(rewards).all():
        return int(np.argmin(np.isfinite(rewards)))
    written, size = results(out, batch), batch[GOAL_BYTES]
    for m, i in enumerate(steps.which[:found].tolist()):
        value, discount, k, entry = 0.0, 1.0, 0, int(steps.begin[m])
        for entry in range(steps.begin[m], steps.begin[m + 1]):
            value, discount = add_reward(value, discount, rewards[entry], gamma)
            k += 1
            if steps.flags[:, entry].any():
                break
        steps.used[m], last[i], out[i, batch[MARK]] = entry, steps.after[entry], 1
        following = written.index[i] + k * len(ring.state)  # the row k later in the same env
        terminal, cut = steps.flags[:, entry]
        write_window(written, i, following, k, value, bootstrap(discount, terminal), terminal, cut)
        if batch[NEXT_BYTES] > 0:
            out[i, batch[NEXT_AT] : batch[NEXT_AT] + batch[NEXT_BYTES]] = ring.memory[last[i], : batch[NEXT_BYTES]]
        out[i, batch[INTO_NEXT] : batch[INTO_NEXT] + size] = out[i, batch[INTO_OBS] : batch[INTO_OBS] + size]
    return -1
