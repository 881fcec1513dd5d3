"""Sequence: windows of consecutive steps of one episode, read from a replay."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import ClassVar, Literal, get_args

from torch import Tensor

from ..batches import Overlap, stride_of
from ..core import Draw
from ..core.words import FINALS
from ..device.contract import LONGEST_WINDOW, DeviceRead
from ..device.ring import DeviceRing
from ..device.sequences import SequenceForm, read_sequences
from ..errors import ParameterError, SchemaError
from ..parameters import GAMMA_RULE, checked, is_count, is_flag, is_names, is_steps
from ..ring.ring import Ring, Weigh, WindowRule
from ..ring.sequences import Cut, Sequences
from ..steps.arrays import Ints
from ..steps.schema import Path


@cache
def _rule(length: int, burn_in: int, before: bool, overlap: Overlap, drop_tail: bool, weigh: Weigh) -> WindowRule:
    """The rule of windows that are read with ``burn_in`` rows, and with one more if the step ``before`` counts."""
    history = burn_in + length - 1 + before
    return WindowRule(int(history), int(length), int(stride_of(length, overlap)), not drop_tail, weigh)


@cache
def _cut(length: int, burn_in: int, n: int, time_first: bool, last: tuple[str, ...], timestep: bool) -> Cut:
    return Cut(burn_in + length + n, burn_in, n, time_first, last, timestep)


@checked(
    length=(is_steps, "length is a number of steps, at least 1 and below 2**30"),
    burn_in=(lambda burn_in: is_steps(burn_in, 0), "burn_in is a number of steps, at least 0 and below 2**30"),
    overlap=(
        lambda overlap: overlap in ("none", "half", "max") or is_count(overlap),
        "overlap is 'none', 'half', 'max' or a number of steps less than length",
    ),
    n=(is_steps, "n is a whole number of at least 1 and below 2**30"),
    gamma=GAMMA_RULE,
    drop_tail=(is_flag, "drop_tail is True or False"),
    time_first=(is_flag, "time_first is True or False"),
    weigh=(lambda weigh: weigh in get_args(Weigh), "weigh is 'windows', 'steps' or 'episodes'"),
    last=(is_names, "last is a tuple of names of fields, such as ('action', 'reward')"),
    timestep=(is_flag, "timestep is True or False"),
)
@dataclass(slots=True)
class Sequence:
    """Windows of consecutive steps of one episode, for recurrent networks (Kapturowski et al. 2019).

    The windows of an episode start at its steps 0, S, 2 S, ..., where S follows from ``overlap``. Each has ``length``
    steps. The last window of an ended or interrupted episode may be shorter. A window can be drawn once its last step
    is complete. The ``burn_in + length`` rows up to it, or all rows of the episode before it, must be in the buffer.
    Prioritized samplers give each window a priority, by the ``index`` of its last step.

    A batch is a :class:`relive.SequenceBatch` of T' = burn_in + length + n rows ``[T', B, ...]``. A sequence starts
    ``burn_in`` steps before its window, or at its episode's first step. Next come the window, where ``mask`` is True,
    then up to n rows for the n-step sums that reach beyond it, then padding. ``lengths`` counts the rows without
    padding. The row after an episode's last step holds its final observation and the fields of ``last``, nothing else.

    Each row of burn-in and window has the fields of a step and the n-step results of :class:`relive.NStep`:
    ``reward``, ``discount`` and ``steps`` (int32) of up to n rewards, even beyond the window. ``terminated`` and
    ``truncated`` are those of the last of these steps. ``next`` (int64) is the row of the batch with the observation
    after them. In all other rows ``next`` is -1 and the others are 0. The target is
    ``seq["reward"] + seq["discount"] * seq.bootstrap(value)``.

    Each sequence has ``index`` (int64 ``[B]``), ``lengths``, ``burn_in``, ``env``, ``start``, and ``hidden``, the
    recurrent state before its first row, if the schema has it: see :class:`relive.SequenceBatch`.

    Args:
        length: steps of a window, at least 1.
        burn_in: steps before the window, unrolled only for the state.
        overlap: steps that successive windows share: "none" (S = length), "half" (S = length // 2), "max" (S = 1), or
            a number.
        n: rewards per n-step sum.
        gamma: discount per step.
        drop_tail: leave out windows of less than ``length`` steps.
        time_first: rows as ``[T', B, ...]``, or else as ``[B, T', ...]``.
        weigh: the unit that :class:`relive.Uniform` draws with equal probability: "windows"; "steps", so that a
            window's chance grows with its steps; or "episodes", and then a window of the episode.
        last: fields of the previous step, such as ("action", "reward"), for agents that see them with the observation.
            Batches get ``last_action`` and ``last_reward`` (of one step, not of n). They are 0 at an episode's start;
            its final observation comes with those of its last step. One more row before the window must then be in the
            buffer. If steps have a field ``last_action`` declared like ``action``, the stored field is read. The row
            after an episode's last step gets the right one, even if ``last`` does not name it.
        timestep: add ``timestep``, int64 ``[T', B]``: the number of each row in its episode, from 0, and 0 in padding.
            All parameters may be changed at any time.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later; or the overlap does not fit the
            length, here or at the next batch.
    """

    length: int
    burn_in: int = 0
    overlap: Literal["none", "half", "max"] | int = "max"
    n: int = 1
    gamma: float = 0.99
    _: KW_ONLY
    drop_tail: bool = False
    time_first: bool = True
    weigh: Weigh = "windows"
    last: tuple[str, ...] = ()
    timestep: bool = False
    reads_draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _ = self.rule

    @property
    def history(self) -> int:
        """The number of rows before a window's last."""
        return self.rule.history

    @property
    def rows(self) -> int:
        """T', the number of rows of every sequence in a batch."""
        return self.burn_in + self.length + self.n

    @property
    def rule(self) -> WindowRule:
        """The rule that says which rows end a window.

        Raises:
            ParameterError: the overlap does not fit the length.
        """
        return _rule(self.length, self.burn_in, bool(self.last), self.overlap, self.drop_tail, self.weigh)

    def read(self, ring: Ring, places: Ints | Draw, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[T', B, ...]`` of the windows that end at ``places``, and facts about each window, ``[B, ...]``.

        Raises:
            ParameterError: the ring has the rule of another view.
            SchemaError: the schema has a field with a name that batches use, or lacks a field that ``last`` names.
        """
        if ring.rule is not (rule := self.rule) and ring.rule != rule:
            raise ParameterError(f"a view that reads through {self!r} must also have its `rule` and `time_first`")
        return self.reader(ring).read(ring, places, self.gamma)

    def on_device(self, ring: Ring, rows: DeviceRing) -> DeviceRead | None:
        """How a device reads these windows; None if the host has to."""
        rule = self.rule
        if rows.mode != FINALS or self.n > LONGEST_WINDOW or self.timestep:
            return None
        # with these, an env that has got some rows has a window: it ends in its episode that goes on, or with the last
        if rule.sparse and not (rule.tails and rows.rows >= rule.history + rule.length + rule.stride + 4):
            return None
        try:
            reader = self.reader(ring)
        except SchemaError:  # the host raises it, when it reads
            return None
        return DeviceRead("sequences", read_sequences, SequenceForm.of(ring, reader, float(self.gamma)))

    def reader(self, ring: Ring) -> Sequences:
        """The reader of the windows of a ring.

        Raises:
            SchemaError: as :meth:`read`.
        """
        cut = _cut(self.length, self.burn_in, self.n, self.time_first, tuple(self.last), self.timestep)
        try:
            return ring.sequences[cut]
        except KeyError:
            return ring.sequences.keep(cut, Sequences(ring, cut))
