"""Limits of the replay ratio, SamplesPerInsert and MinSize, as in Reverb (Cassirer et al. 2021).

A limit is a few counts in shared memory. Atomic instructions change them, so no process holds a lock that its death
could leave locked. Inserts only make room for samples, and samples for inserts. So a count that has become old by the
time it is used refuses too much, and never too little.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import core
from ..core.words import INSERTS, OTHERS, SAMPLES
from ..errors import ParameterError, WaitTimeoutError
from ..parameters import TIMEOUT_RULE, Rule, an_instance, is_count, is_number, require
from .shared import Bell, SharedBlock

WAITS, WAITED = 4, 6
"""Places of the number of waits and of the nanoseconds waited, both for inserts. Those for samples are one further."""

SHARES = 8
"""The place of the number of processes that share the room for inserts; 0 means one process."""

WORDS = 10
"""Numbers of 64 bits: four counts, two numbers of waits, two times, shares, and two bells of half the size."""

BELLS = 18
"""The place of the first bell among numbers of 32 bits."""

MOST = 2**53
"""Counts and sizes stay below this number. Up to it, doubles hold every whole number."""

NUMBER_RULE: Rule = (lambda count: is_count(count, 1) and count < MOST, "expected a whole number of at least 1")
NONE_RULE: Rule = (lambda count: is_count(count) and count < MOST, "expected a whole number of at least 0")


def allows(side: int, count: int, inserts: int, samples: int, rule: tuple[float, int, float, float]) -> bool:
    """True if ``count`` more inserts or samples may pass: the rule of ``core.admit``, for numbers of any size.

    Args:
        side: ``INSERTS`` or ``SAMPLES``.
        count: how many, all or none.
        inserts: so far.
        samples: so far.
        rule: samples per insert, inserts before the first sample, and the least and the largest difference.
    """
    ratio, min_size, low, high = rule
    if side == SAMPLES:
        return inserts >= min_size and inserts * ratio - (samples + count) >= low
    return inserts + count <= min_size or (inserts + count) * ratio - samples <= high


class RateLimit(ABC):
    """Holds back those who add and those who draw, so that neither gets too far ahead.

    Call ``wait_to_insert(k)`` before you add k steps, and ``wait_to_sample(n)`` before you draw n rows. Both sleep
    until the limit allows the number, and then count it. ``may_insert`` and ``may_sample`` ask, and count nothing.
    :meth:`relive.Lanes.drain` and everything that draws batches ahead count for you. Threads, forked children and, by
    pickle, spawned ones share one limit. A process that is killed leaves nothing locked.

    Args:
        ratio: samples per insert.
        min_size: inserts before the first sample.
        error_buffer: in samples, how far one side may get ahead; infinity if either side may get ahead as it likes.
    """

    def __init__(self, ratio: float, min_size: int, error_buffer: float) -> None:
        middle = ratio * min_size
        self._rule, self._most_ahead = (ratio, min_size, middle - error_buffer, middle + error_buffer), error_buffer
        self._share(SharedBlock.create(8 * WORDS))

    def _share(self, block: SharedBlock) -> None:
        words = block.array.view(np.int64)
        self._block, self._counts = block, words[: WORDS - 1]
        bells = block.array.view(np.int32)
        # each side sleeps on a bell of its own; what one side counts may let the other side pass
        self._bells = [Bell(bells[BELLS + side : BELLS + side + 1]) for side in (INSERTS, SAMPLES)]

    def __getstate__(self) -> dict[str, object]:
        """For pickle: the same limit. A process that is spawned must get it while this one lives."""
        state = dict(vars(self))
        del state["_counts"], state["_bells"]  # which lie in the block
        return state

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)
        self._share(self._block)

    @abstractmethod
    def __repr__(self) -> str: ...

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait_to_insert(self, count: int = 1, timeout: float | None = None) -> None:
        """Wait until ``count`` steps may be added, and count them.

        Args:
            count: K, the number of steps. All of them are counted, or none.
            timeout: seconds; None is for ever.

        Raises:
            WaitTimeoutError: the time is over. Nothing was counted.
            ParameterError: an argument is out of range, or so large that it would wait for ever.
        """
        if not self.try_to_insert(count, timeout):
            raise self._timed_out("insert", "step", count, timeout, "does anybody sample?")

    def wait_to_sample(self, count: int, timeout: float | None = None) -> None:
        """Wait until ``count`` rows may be drawn, and count them. Arguments and errors as :meth:`wait_to_insert`."""
        if not self.try_to_sample(count, timeout):
            raise self.late_sample(count, timeout)

    def try_to_insert(self, count: int = 1, timeout: float | None = 0.0) -> bool:
        """As :meth:`wait_to_insert`, but returns False when the time is over. By default it does not wait.

        Args:
            count: K, the number of steps.
            timeout: seconds; None is for ever.
        """
        return self._try(INSERTS, count, timeout)

    def try_to_sample(self, count: int, timeout: float | None = 0.0) -> bool:
        """As :meth:`wait_to_sample`, but returns False when the time is over. By default it does not wait.

        Args:
            count: B, the number of rows.
            timeout: seconds; None is for ever.
        """
        return self._try(SAMPLES, count, timeout)

    def may_insert(self, count: int = 1) -> bool:
        """True if ``count`` steps may be added now. Nothing is counted, so another process can still be quicker.

        Raises:
            ParameterError: as :meth:`wait_to_insert`.
        """
        return self._is_allowed_now(INSERTS, count)

    def may_sample(self, count: int) -> bool:
        """True if ``count`` rows may be drawn now. Nothing is counted, so another process can still be quicker.

        Raises:
            ParameterError: as :meth:`wait_to_sample`.
        """
        return self._is_allowed_now(SAMPLES, count)

    def uncount(self, *, inserts: int = 0, samples: int = 0) -> None:
        """Take back what was counted and did not happen, such as a step that the replay refused.

        Args:
            inserts: how many steps.
            samples: how many rows.

        Raises:
            ParameterError: a number is negative, or more than was counted.
        """
        require(type(self).__name__ + ".uncount", NONE_RULE, inserts=inserts, samples=samples)
        counted = self._counts[:2].tolist()
        if inserts > counted[INSERTS] or samples > counted[SAMPLES]:
            raise ParameterError(
                f"{type(self).__name__}.uncount(inserts={inserts}, samples={samples}): only {counted[INSERTS]} and "
                f"{counted[SAMPLES]} were counted"
            )
        self.count(inserts=-inserts, samples=-samples)

    def note_sample_wait(self, seconds: float) -> None:
        """Add a wait for samples to :meth:`stats`, for a caller that called :meth:`try_to_sample` again and again."""
        self._note_wait(SAMPLES, int(seconds * 1e9))

    def note_insert_wait(self, seconds: float) -> None:
        """Add a wait for inserts to :meth:`stats`, for a caller that tried again and again."""
        self._note_wait(INSERTS, int(seconds * 1e9))

    def reset(self) -> None:
        """Start over, as after ``replay.clear()``: nothing was inserted or sampled. Call it while nobody counts."""
        shares = int(self._counts[SHARES])
        self._counts[:] = 0  # not in one instant, hence while nobody counts
        self._counts[SHARES] = shares
        self._ring_bells()

    # -- for owners of rings ------------------------------------------------------------------------------------

    def admit_inserts(self, count: int, note: NDArray[np.int64]) -> bool:
        """Count ``count`` inserts if they may be made now, and add them to ``note``, int64 ``[1]``; returns whether.

        Both numbers change in one instant. The inserts let no sample pass before :meth:`confirm`. If the owner is
        broken off before the steps are in the replay, it calls :meth:`take_back`.
        """
        return core.admit_noted(self._counts, note, count, *self._rule)

    def confirm(self, note: NDArray[np.int64]) -> None:
        """Confirm that the inserts in ``note`` are in the replay, so they may let samples pass. Sets ``note`` to 0."""
        core.confirm(self._counts, note)
        self._bells[SAMPLES].ring()  # after the count, so that who wakes up sees it

    def take_back(self, note: NDArray[np.int64]) -> None:
        """Uncount the inserts in ``note``, which do not go into the replay. Sets ``note`` to 0."""
        core.take_back(self._counts, note)
        self._ring_bells()

    def wait_for_room(self, count: int, timeout: float | None = None) -> bool:
        """Sleep until ``count`` inserts may be made, without counting them; False if the time is over before."""
        return self._bells[INSERTS].wait(lambda: self._allows(INSERTS, count), timeout)

    def require_inserts(self, count: int) -> None:
        """Refuse so many inserts at a time that both sides could wait for ever.

        Raises:
            ParameterError: they are too many.
        """
        self._require_possible(INSERTS, count)

    # -- for several rings with one limit -----------------------------------------------------------------------

    def share(self, shares: int) -> None:
        """Set how many processes share the room for inserts. :meth:`grant` keeps the limit of each one up to date."""
        self._counts[SHARES] = shares

    def counted(self) -> tuple[int, int, int]:
        """Three counts: the inserts counted here, the inserts that are in the replay already, and the samples."""
        inserts, samples, pending, _ = self._counts[: OTHERS + 1].tolist()
        return inserts, inserts - pending, samples

    def allows_samples(self, count: int, inserts: int, samples: int) -> bool:
        """True if ``count`` rows may be drawn after these inserts and samples of all rings. Nothing is counted."""
        return allows(SAMPLES, count, inserts, samples, self._rule)

    def room(self, inserts: int, samples: int) -> int | None:
        """How many more inserts all rings together may make after these; None if there is no bound."""
        ratio, _, _, high = self._rule
        if math.isinf(high):
            return None
        most = int((high + samples) / ratio) + 1
        while not allows(INSERTS, most, 0, samples, self._rule):  # twice at most: only the division is rounded
            most -= 1
        return max(most - inserts, 0)

    @property
    def most_at_once(self) -> int | None:
        """The most inserts at a time with which both sides never wait for ever; None if any number will do."""
        if math.isinf(self._most_ahead):
            return None
        ratio = self._rule[0]
        most = int(self._most_ahead / ratio)
        return most - (most * ratio > self._most_ahead)  # the rounded division can be one too large

    def grant(self, inserts: int, samples: int, most: int) -> None:
        """Allow this ring to insert until it has made ``most`` inserts.

        Args:
            inserts: the inserts of all rings so far.
            samples: the samples of all rings so far.
            most: counts the inserts of this ring alone, from the start.
        """
        room = self.room(inserts, samples)
        # inserts of others first: between the two lines this ring may insert fewer than before or after, never more
        self._counts[OTHERS] = 0 if room is None else inserts + room - most
        self._counts[SAMPLES] = samples
        self._ring_bells()

    def count(self, *, inserts: int = 0, samples: int = 0) -> None:
        """Count what was inserted or drawn, whether the limit allows it or not."""
        core.add_count(self._counts, INSERTS, inserts)
        core.add_count(self._counts, SAMPLES, samples)
        self._ring_bells()  # both: what a side takes back is room for that side

    def wait_for_steps(self, ready: int, timeout: float) -> None:
        """Sleep until the number of steps in the replay is no longer ``ready``, for ``timeout`` seconds at most."""

        def changed() -> bool:
            return self.counted()[1] != ready

        self._bells[SAMPLES].wait(changed, timeout)

    def require_samples(self, count: int) -> None:
        """Refuse so many samples at a time that both sides could wait for ever. Raises ``ParameterError``."""
        self._require_possible(SAMPLES, count)

    def late_sample(self, count: int, timeout: float | None) -> WaitTimeoutError:
        """The error for a caller that waited too long to draw ``count`` rows."""
        return self._timed_out("sample", "row", count, timeout, "does anybody insert?")

    # -- figures ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Figures that show which side waits for the other.

        - ``inserts``, ``samples``: how many were counted;
        - ``samples_per_insert``: samples for each insert after the first ``min_size``; 0 before that;
        - ``insert_waits``, ``sample_waits``: how many calls had to wait, those that timed out included;
        - ``insert_waited``, ``sample_waited``: seconds that they waited in all.
        """
        counts = self._counts.tolist()
        since = counts[INSERTS] - self._rule[1]
        return {
            "inserts": float(counts[INSERTS]),
            "samples": float(counts[SAMPLES]),
            "samples_per_insert": counts[SAMPLES] / since if since > 0 else 0.0,
            "insert_waits": float(counts[WAITS + INSERTS]),
            "sample_waits": float(counts[WAITS + SAMPLES]),
            "insert_waited": counts[WAITED + INSERTS] / 1e9,
            "sample_waited": counts[WAITED + SAMPLES] / 1e9,
        }

    def state_dict(self) -> dict[str, int]:
        """The counts, to save beside the replay."""
        inserts, samples = self._counts[:2].tolist()
        return {"inserts": inserts, "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the counts of ``state``, which :meth:`state_dict` gave.

        Raises:
            ParameterError: they are not what :meth:`state_dict` gives; nothing is changed.
        """
        is_state: Rule = lambda state: isinstance(state, Mapping), "expected what state_dict() gave"
        require(type(self).__name__ + ".load_state_dict", is_state, state=state)
        counts: dict[str, Any] = {name: state.get(name) for name in ("inserts", "samples")}
        require(type(self).__name__ + ".load_state_dict", NONE_RULE, **counts)
        self._counts[INSERTS], self._counts[SAMPLES] = counts["inserts"], counts["samples"]
        self._ring_bells()

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_allowed_now(self, side: int, count: int) -> bool:
        require(type(self).__name__, NUMBER_RULE, count=count)
        self._require_possible(side, count)
        return self._allows(side, count)

    def _require_possible(self, side: int, count: int) -> None:
        """Refuse a count that would wait for ever."""
        shares = 1 if side == SAMPLES else max(int(self._counts[SHARES]), 1)
        samples = shares * (count if side == SAMPLES else count * self._rule[0])
        if samples > self._most_ahead:
            of = f" of {shares} rings" if shares > 1 else ""
            what = (
                f"{count} rows at a time" if side == SAMPLES else f"{count} steps at a time{of}, {samples:g} samples,"
            )
            raise ParameterError(
                f"{self!r}: {what} are more than error_buffer, so both sides could wait for ever; make error_buffer at "
                f"least {samples:g}"
            )

    def _allows(self, side: int, count: int) -> bool:
        """The answer that :meth:`_admit` would give now, by its rule. Nothing is counted."""
        # the four are not of one instant: only ``core.admit``, which counts in the same instant, may let anybody pass
        inserts, samples, pending, others = self._counts[: OTHERS + 1].tolist()
        return allows(side, count, inserts + others if side == INSERTS else inserts - pending, samples, self._rule)

    def _try(self, side: int, count: int, timeout: float | None) -> bool:
        require(type(self).__name__, NUMBER_RULE, count=count)
        require(type(self).__name__, TIMEOUT_RULE, timeout=timeout)
        self._require_possible(side, count)
        if not self._admit(side, count) and (timeout == 0 or not self._wait(side, count, timeout)):
            return False
        self._bells[INSERTS + SAMPLES - side].ring()  # the other side's: an insert lets samples pass, and back
        return True

    def _admit(self, side: int, count: int) -> bool:
        return core.admit(self._counts, side, count, *self._rule)

    def _wait(self, side: int, count: int, timeout: float | None) -> bool:
        start = time.monotonic_ns()
        try:
            return self._bells[side].wait(lambda: self._admit(side, count), timeout)
        finally:
            self._note_wait(side, time.monotonic_ns() - start)

    def _note_wait(self, side: int, nanoseconds: int) -> None:
        core.add_count(self._counts, WAITS + side, 1)
        core.add_count(self._counts, WAITED + side, nanoseconds)

    def _ring_bells(self) -> None:
        for bell in self._bells:
            bell.ring()

    def _timed_out(self, verb: str, item: str, count: int, timeout: float | None, question: str) -> WaitTimeoutError:
        stats = self.stats()
        return WaitTimeoutError(
            f"{self!r}: waited {timeout} s to {verb} {count} {item}{'s' * (count != 1)} after {stats['inserts']:.0f} "
            f"inserts and {stats['samples']:.0f} samples; {question}"
        )


LIMIT_RULE: Rule = an_instance(RateLimit, "a limit, such as relive.SamplesPerInsert(...)")
"""The rule for the argument ``limit`` of everything that adds or draws."""


class SamplesPerInsert(RateLimit):
    """About ``ratio`` rows are drawn for each step that is added (Cassirer et al. 2021: Reverb's SampleToInsertRatio).

    Until ``min_size`` steps are there, all inserts pass and no sample does. From then on, the error is
    (inserts - min_size) · ratio - samples. Inserts wait while they would bring it above ``error_buffer``, samples while
    they would bring it below -``error_buffer``.

    Args:
        ratio: samples per insert: how often a step is drawn on average. Above 0.
        min_size: steps before the first sample; at least 1, and not more than the replay holds.
        error_buffer: in samples: how far one side may get ahead. At least the rows of one call to sample, and ratio
            times the steps of one call to insert: with less, both sides could wait for ever.

    Raises:
        ParameterError: an argument is out of range.
    """

    ratio: float
    min_size: int
    error_buffer: float

    def __init__(self, ratio: float, min_size: int, error_buffer: float) -> None:
        name = type(self).__name__
        positive: Rule = (lambda value: is_number(value) and value > 0, "expected a number above 0")
        require(name, positive, ratio=ratio, error_buffer=error_buffer)
        require(name, NUMBER_RULE, min_size=min_size)
        if error_buffer < max(1.0, ratio):
            raise ParameterError(
                f"{name}(ratio={ratio!r}, error_buffer={error_buffer!r}): error_buffer is at least max(1, ratio); with "
                "less, both sides could wait for ever"
            )
        self.ratio, self.min_size, self.error_buffer = float(ratio), int(min_size), float(error_buffer)
        super().__init__(self.ratio, self.min_size, self.error_buffer)

    def __repr__(self) -> str:
        return f"SamplesPerInsert({self.ratio:g}, min_size={self.min_size}, error_buffer={self.error_buffer:g})"


class MinSize(RateLimit):
    """No sample before ``min_size`` steps are there, and no other limit, as Reverb's MinSize.

    Args:
        min_size: steps before the first sample; at least 1, and not more than the replay holds.

    Raises:
        ParameterError: it is not a whole number of at least 1.
    """

    def __init__(self, min_size: int) -> None:
        require(type(self).__name__, NUMBER_RULE, min_size=min_size)
        self.min_size: int = int(min_size)
        super().__init__(1.0, self.min_size, math.inf)

    def __repr__(self) -> str:
        return f"MinSize({self.min_size})"
