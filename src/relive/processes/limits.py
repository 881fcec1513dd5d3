"""The two limits that relive has, SamplesPerInsert and MinSize, as in Reverb (Cassirer et al. 2021)."""

from __future__ import annotations

import math

from ..errors import ParameterError
from ..kernels.reference.limits import SAMPLES
from ..parameters import Rule, is_number, require
from .rate import NUMBER_RULE, SHARES, RateLimit

__all__ = ["MinSize", "SamplesPerInsert"]


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
        super().__init__()

    def _bounds(self) -> tuple[float, int, float, float]:
        middle = self.ratio * self.min_size
        return self.ratio, self.min_size, middle - self.error_buffer, middle + self.error_buffer

    def _require_possible(self, side: int, count: int) -> None:
        shares = 1 if side == SAMPLES else max(int(self._counts[SHARES]), 1)
        samples = shares * (count if side == SAMPLES else count * self.ratio)
        if samples > self.error_buffer:
            of = f" of {shares} rings" if shares > 1 else ""
            what = (
                f"{count} rows at a time" if side == SAMPLES else f"{count} steps at a time{of}, {samples:g} samples,"
            )
            raise ParameterError(
                f"{self!r}: {what} are more than error_buffer, so both sides could wait for ever; make error_buffer at "
                f"least {samples:g}"
            )

    @property
    def most_at_once(self) -> int:
        """The largest number of inserts that stands for at most ``error_buffer`` samples."""
        most = int(self.error_buffer / self.ratio)
        return most - (most * self.ratio > self.error_buffer)  # the rounded division can be one too large

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
        self.min_size = int(min_size)
        super().__init__()

    def _bounds(self) -> tuple[float, int, float, float]:
        return 1.0, self.min_size, -math.inf, math.inf

    def _require_possible(self, side: int, count: int) -> None:
        """Every count is possible, as inserts never wait."""

    @property
    def most_at_once(self) -> None:
        """None: inserts may be of any number."""

    def __repr__(self) -> str:
        return f"MinSize({self.min_size})"
