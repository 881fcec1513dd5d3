"""Windows of a ring's episodes, in plain Python: which row ends one, where it starts, and what a batch of them holds.

The windows of an episode start at its steps 0, stride, 2 stride, ...; each has ``length`` steps but the last, which has
what is left. So a window is known by the index ``at``, within the episode, of the step it ends with. What can be drawn
of a ring is told behind its counters: the number of rows ``history`` that must be live before a row, the ``length`` and
``stride`` of windows, and whether (``tails``) a shorter last one counts. Every single row is a window of length 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HISTORY", "LENGTH", "STRIDE", "TAILS", "ends_full", "ends_window", "read_sequences", "window_start"]

Ints = NDArray[np.int64]
HISTORY, LENGTH, STRIDE, TAILS = 3, 4, 5, 6
"""Where a ring's counters tell what can be drawn."""


def window_start(at: Any, length: int, stride: int) -> Any:
    """The index of the first step of the window whose last is step ``at`` of an episode, which ends one."""
    beyond = at + 1 - length
    return (beyond + stride - 1) // stride * stride * (beyond > 0)


def ends_full(at: Any, length: int, stride: int) -> Any:
    """Whether step ``at`` of an episode is the last of a window of the whole ``length``."""
    return (at + 1 >= length) & ((at + 1 - length) % stride == 0)


def ends_window(place: int, rows: int, state: Ints, counters: Ints, step: Any, stamp: Any) -> bool:
    """Whether a complete row is the last of a window.

    It ends a full one, or, where tails count, it is the last complete row of an episode that ended or was interrupted:
    the next row is not complete, and the one after begins another episode, or will.
    """
    if ends_full(int(step[place]), int(counters[LENGTH]), int(counters[STRIDE])):
        return True
    e = place // rows
    head = int(state[e, 0])
    begin, newest = e * rows, (head - 1) % rows
    after = [begin + (place - begin + k) % rows for k in (1, 2)]
    if not counters[TAILS] or stamp[after[0]] >= 0:
        return False
    return bool(state[e, 2] == 0 if after[0] == begin + newest else step[after[1]] == 0)


def read_sequences(
    places: Ints, rows: int, burn_in: int, steps: int, gamma: float, state: Ints, counters: Ints, step: Any,
    source: Any, at: Ints, time_first: bool, out: Any, to: Ints, sizes: Ints, blank: Any, per: Ints, table: Ints,
) -> int:  # fmt: skip
    """The windows that end at anchors, as packed rows ``[T, B]``, or ``[B, T]`` unless ``time_first``, flattened.

    A window comes after up to ``burn_in`` steps before it, as far as its episode goes, and before as many rows as its
    n-step rewards (``steps`` at most, as :func:`relive.kernels.reference.ring.windows` has them) reach beyond it.

    ``at`` says at which byte of a row of ``source`` (uint8 ``[R, W]``) its reward, terminated, truncated and stamp are.
    The first ``sizes[0]`` bytes of each row are copied; of the observation that an episode ended on ``sizes[1]``, to
    ``blank`` (uint8), the row that stands wherever there is nothing. The bytes ``to`` get the reward, done bits,
    discount and number of rewards of the n-step window, and the row of the batch after it, 0 and -1 behind the last
    step; and whether the step belongs to the window. ``per`` ``[6, B]`` gets the public index of the anchor, the
    number of rows, how many of them are burn-in, the env, the number of the window's first step, and the place of row
    0. ``table``, if not empty, gets the place of each row; -1 where there is none, and -2 - place for an observation
    that an episode ended on.

    Returns -1; or the first of ``places`` that is none of the rows, or whose window would not be among them or not fit.
    """
    count, total = len(places), len(out) // max(len(places), 1)

    def read(place: int, field: int, dtype: Any) -> Any:
        return source[place, at[field] : at[field] + np.dtype(dtype).itemsize].view(dtype)[0]

    def write(row: int, values: list[tuple[Any, Any]]) -> None:
        for field, (value, dtype) in enumerate(values):
            out[row, to[field] : to[field] + np.dtype(dtype).itemsize].view(dtype)[0] = value

    for b, place in enumerate(places.tolist()):
        if not 0 <= place < len(source):
            return b
        e, index = place // rows, int(step[place])
        begin, head = e * rows, int(state[e, 0])
        number = next(n for n in range(head - rows, head) if n % rows == place - begin)
        start = int(window_start(index, int(counters[LENGTH]), int(counters[STRIDE])))
        first = max(start - burn_in, 0)
        if not 0 <= index - first < min(rows, total):
            return b
        episode = [begin + (place - begin - index + k) % rows for k in range(index + steps + 1)]
        known = index + 1  # steps of the episode whose rewards are read
        while known < index + steps and read(episode[known], 3, np.int64) >= 0:
            known += 1
        terminal, cut = (read(episode[known - 1], field, np.uint8) for field in (1, 2))
        powers = [1.0]
        for _ in range(steps):
            powers.append(powers[-1] * gamma)
        for t in range(total):
            row, i = (t * count + b if time_first else b * total + t), first + t
            bounds = i == known and bool(terminal or cut)
            if i > known or bounds:
                out[row] = blank
            if i <= known:
                nbytes = sizes[1] if bounds else sizes[0]
                out[row, :nbytes] = source[episode[i], :nbytes]
            if table.size:
                table[row] = -1 if i > known else -2 - episode[i] if bounds else episode[i]
            k = min(steps, known - i) if i <= index else 0
            value = 0.0
            for j in range(k):
                value += powers[j] * float(read(episode[i + j], 0, np.float32))
            last = k > 0 and i + k == known
            discount = 0.0 if k == 0 or (last and terminal) else powers[k]
            if i <= known:
                write(
                    row,
                    [
                        (value, np.float32),
                        (terminal if last else 0, np.uint8),
                        (cut if last else 0, np.uint8),
                        (discount, np.float32),
                        (k, np.int32),
                        (t + k if k else -1, np.int64),
                        (start <= i <= index, np.uint8),
                    ],
                )
        per[:, b] = [
            number * len(state) + e,
            known - first + 1,
            start - first,
            e,
            number - index + start,
            episode[first],
        ]
    return -1
