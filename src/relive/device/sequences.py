"""The rows of sequences of a ring on a device, as ``sequences.cpp`` finds and computes them in RAM.

Fixed shapes, and no wait for the device, as in :class:`relive.device.ring.DeviceRing`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..batches import padding
from ..memory.device import DeviceRows
from ..ring.ring import Ring
from ..ring.sequences import Cut, Sequences, lasts_of
from ..steps.schema import Path
from .ring import DeviceRing, Spots, sum_steps

FLOAT64, INT64 = torch.float64, torch.int64


class SequenceForm(NamedTuple):
    """The parameters by which batches of sequences are read."""

    cut: Cut
    gamma: float
    stored: tuple[tuple[Path, Path], ...]
    """``last_<name>`` that steps have, and ``<name>``."""
    derived: tuple[tuple[Path, Path], ...]
    """``last_<name>`` that they do not have."""
    order: tuple[Path, ...]
    """The fields of a batch."""

    @classmethod
    def of(cls, ring: Ring, reader: Sequences, gamma: float) -> SequenceForm:
        """How a reader of a ring in RAM reads it."""
        stored, derived = lasts_of(ring.leaves, reader.cut.last, "Sequence")
        return cls(reader.cut, gamma, tuple(stored.items()), tuple(derived.items()), tuple(reader.order))


class Rows(NamedTuple):
    """The rows of a batch, int64 ``[T, B]`` or ``[B, T]``; ``zeros``, the row of zeros, where there is none."""

    steps: Tensor
    """The rows of steps."""
    shown: Tensor
    """The rows of observations: those of steps, and of final observations."""
    before: Tensor
    """The row before each row of ``shown``."""
    ended: Tensor
    """Bool: True for final observations."""
    first: Tensor
    """``[B]``: row 0."""
    found: dict[Path, Tensor]
    """The fields of a batch that are computed, and facts ``[B]``."""


def rows_of(ring: DeviceRing, spots: Spots, cut: Cut, gamma: float) -> Rows:
    """The rows of the sequences whose windows end at ``spots``."""
    time, batch = (0, 1) if cut.time_first else (1, 0)

    def each(x: Tensor) -> Tensor:
        """One for each sequence, for all of its rows."""
        return x.unsqueeze(time)

    zeros = ring.dummy_row - 1
    t = torch.arange(cut.rows, device=ring.envs.device).unsqueeze(batch)
    # steps count from the start of the episode: the window is `start` to `at`, and its burn-in begins at `skipped`
    at, begin = ring.step[spots.places].to(INT64), ring.base[spots.envs]
    start = ring.window_start(at)
    skipped = torch.clamp(start - cut.burn_in, min=0)
    own = at - skipped + 1  # rows up to the window's last
    # `before` is the row before row 0, counted from the env's first place; a negative one counts back round the ring
    burn_in, before = start - skipped, spots.places - begin - own
    first = begin + (before + 1) % ring.rows
    places = each(begin) + (each(before + 1) + t) % ring.rows
    # rewards beyond the window count only while rows are complete
    reached = (t < each(own)) | ((t < each(own) + (min(cut.n, ring.rows) - 1)) & (ring.stamp[places] >= 0))
    # so many rows from row 0 on are steps of one episode, whose rewards may be read
    known = torch.cumprod(reached.to(INT64), time).sum(time)
    last = begin + (before + known) % ring.rows
    terminated, truncated = ring.terminated[last] > 0, ring.truncated[last] > 0
    opens = ring.step[first] == 0
    # the row after the last known step: a final observation if that step ended the episode
    ended = (t == each(known)) & each(terminated | truncated)
    shown = torch.where(t <= each(known), places, zeros)
    previous = each(begin) + (each(before) + t) % ring.rows
    # nothing came before the first step of an episode
    lacks = (t > each(known)) | ((t == 0) & each(opens))

    # row t sums k rewards, up to n and none beyond the last known step; rows beyond the window have no target
    k = torch.where(t < each(own), torch.clamp(each(known) - t, max=cut.n), 0)
    rewards = ring.reward[places].to(FLOAT64)
    # a sum that reaches the last known step ends as that step did; if it ended nothing, both flags are False
    ends = (k > 0) & (t + k == each(known))
    terminal = ends & each(terminated)
    # step j of every row at once; what `roll` brings round is beyond all that count
    has = ((j, j < k) for j in range(min(cut.n, cut.rows)))
    later = ((goes, torch.where(goes, rewards.roll(-j, time), 0.0)) for j, goes in has)
    value, discount = sum_steps(later, (k == 0) | terminal, gamma)
    found = {
        ("reward",): value,
        ("terminated",): terminal,
        ("truncated",): ends & each(truncated),
        ("discount",): discount,
        ("steps",): k.to(torch.int32),
        ("next",): torch.where(k > 0, t + k, -1),
        ("mask",): (each(burn_in) <= t) & (t < each(own)),
        ("is_start",): (t == 0) & each(opens),
        ("index",): spots.numbers * ring.num_envs + spots.envs,
        ("lengths",): known + 1,
        ("burn_in",): burn_in,
        ("env",): spots.envs,
        ("start",): spots.numbers - at + start,
    }
    return Rows(torch.where(ended, zeros, shown), shown, torch.where(lacks, zeros, previous), ended, first, found)


def read_sequences(
    store: DeviceRows, ring: DeviceRing, goals: object, spots: Spots, stream: Tensor, form: SequenceForm
) -> dict[Path, Tensor]:
    """The fields ``[T, B, ...]``, or ``[B, T, ...]``, of the sequences whose windows end at ``spots``, and facts."""
    rows = rows_of(ring, spots, form.cut, form.gamma)
    found = dict(rows.found)
    found |= store.read_rows(rows.shown, [path for path in store.leaves if path[0] == "obs"])
    found |= store.read_rows(rows.first, [path for path in store.leaves if path[0] == "hidden"])
    found |= store.read_rows(rows.steps, [path for path in store.leaves if path[0] not in ("obs", "hidden")])
    for path in [path for path in found if padding(path)]:
        field, blank = found[path], rows.steps == ring.dummy_row - 1
        found[path] = torch.where(blank.view(*blank.shape, *[1] * (field.ndim - blank.ndim)), True, field)
    lasts = (*form.stored, *form.derived)
    read = store.read_rows(rows.before, [of for _, of in lasts]) | {("reward",): ring.reward[rows.before]}
    found |= {name: read[of] for name, of in form.derived}
    for name, of in form.stored:  # the row after an episode's end has none of its own
        stored = found[name]
        ended = rows.ended.view(*rows.ended.shape, *[1] * (stored.ndim - rows.ended.ndim))
        found[name] = torch.where(ended, read[of], stored)
    return {path: found[path] for path in form.order}
