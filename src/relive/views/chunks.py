"""Chunks: consecutive rows of one env, whatever ends in between, read from a replay."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import ClassVar

from torch import Tensor

from ..core import Draw
from ..errors import ParameterError, SchemaError
from ..parameters import checked, is_flag, is_names, is_steps
from ..ring.ring import Ring, WindowRule
from ..ring.sequences import Cut, Sequences
from ..steps.arrays import Ints
from ..steps.schema import Path


@cache
def _rule(length: int) -> WindowRule:
    """The rows of a chunk up to its last transition, and the one before them, if it is of the first row's episode."""
    return WindowRule(int(length) - 1, across=True)


@cache
def _cut(length: int, time_first: bool, last: tuple[str, ...], timestep: bool) -> Cut:
    return Cut(length, 0, 1, time_first, last, timestep, across=True)


@checked(
    length=(lambda length: is_steps(length, 2), "length is a number of rows, at least 2 and below 2**30"),
    last=(is_names, "last is a tuple of names of fields, such as ('action', 'reward')"),
    timestep=(is_flag, "timestep is True or False"),
    time_first=(is_flag, "time_first is True or False"),
)
@dataclass(slots=True)
class Chunks:
    """Consecutive rows of one env, over the ends of its episodes, for world models (Hafner et al. 2023, DreamerV3).

    An episode of k steps has k + 1 rows: one for each observation. The first k have the fields of the step that was
    taken there. The last has the final observation, and 0 in these fields. After it comes the first row of the env's
    next episode. Every chunk has ``length`` rows, so there is no padding. All rows of a chunk are stored, and so is the
    row before it if that is of the same episode. A chunk ends with the observation after a step, so it never ends with
    the first row of an episode. All such chunks are drawn equally often by :class:`relive.Uniform`.

    A batch is a :class:`relive.SequenceBatch` ``[L, B, ...]`` with the fields of a step as they are stored, and:

    ==================== ==============================================================================================
    ``is_first``         bool ``[L, B]``: rows that begin an episode; reset the recurrent state before them.
    ``is_last``          bool ``[L, B]``: rows with the last observation of an episode, which ended or was interrupted.
    ``is_terminal``      bool ``[L, B]``: those after a step that terminated; nothing is worth anything after them.
    ``last_reward``, ... with ``last=("action", "reward")``: what led to each observation; 0 where ``is_first``.
    ``mask``             bool ``[L, B]``: all True.
    ``hidden``           the state stored with the first row; 0 where that is the last of its episode.
    ``index``            int64 ``[B]``: of the chunk's last step, for ``update_priorities``.
    ``env``, ``start``   int64 ``[B]``: the env, and the number in it of the step of the first row; of a final
                         observation that is stored with its step (``own_next_obs=True``), of that step.
    ==================== ==============================================================================================

    ``reward`` is that of the step out of a row, and Dreamer's reward is the one that came with the observation:
    ``last_reward``.

    Args:
        length: L, rows of a chunk, at least 2.
        last: fields of the step before each row, such as ("action", "reward"), which batches get as ``last_action`` and
            ``last_reward``. If steps have a field ``last_action`` declared like ``action``, the stored field is read,
            and the last row of an episode gets the right one, even if ``last`` does not name it.
        timestep: add ``timestep``, int64 ``[L, B]``: the number of each row in its episode, from 0.
        time_first: rows as ``[L, B, ...]``, or else as ``[B, L, ...]``. All parameters may be changed at any time.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
    """

    length: int
    _: KW_ONLY
    last: tuple[str, ...] = ()
    timestep: bool = False
    time_first: bool = True

    reads_draws: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        """L, the number of rows of every chunk."""
        return self.length

    @property
    def history(self) -> int:
        """The number of rows before a chunk's last step."""
        return self.length - 1

    @property
    def rule(self) -> WindowRule:
        """The rule that says which steps are the last of a chunk."""
        return _rule(self.length)

    def require(self, ring: Ring) -> None:
        """Refuse steps without an order.

        Raises:
            SchemaError: the steps have no order; or the schema has a field with a name that batches use, or lacks a
                field that ``last`` names.
        """
        if not ring.ordered:
            raise SchemaError("Chunks needs steps in the order of time; here they are stored without order")
        self.reader(ring)

    def read(self, ring: Ring, places: Ints | Draw, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[L, B, ...]`` of the chunks whose last steps are at ``places``, and facts ``[B]`` about each.

        Places are those of anchors, or a draw; one by priority gives its ``weight`` and ``probability`` as well.

        Raises:
            ParameterError: the ring has the rule of another view, or a place is not that of an anchor.
            SchemaError: as :meth:`require`.
        """
        if ring.rule is not (rule := self.rule) and ring.rule != rule:
            raise ParameterError(f"a view that reads through {self!r} must also have its `rule` and `time_first`")
        return self.reader(ring).read(ring, places)

    def reader(self, ring: Ring) -> Sequences:
        """The reader of the chunks of a ring.

        Raises:
            SchemaError: as :meth:`require`.
        """
        cut = _cut(self.length, self.time_first, tuple(self.last), self.timestep)
        try:
            return ring.sequences[cut]
        except KeyError:
            return ring.sequences.keep(cut, Sequences(ring, cut))
