"""What a power is, in plain Python: operations of which IEEE 754 defines every bit, in the order of the core."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def power(x: float, a: float) -> float:
    """x**a; x = m * 2**e, log2(m) by its series, and 2**rest by Taylor's."""
    x, a = float(x), float(a)
    if not 0.0 < x < math.inf:
        with np.errstate(all="ignore"):
            return float(np.float64(x) ** np.float64(a))
    if a == 1.0:
        return x
    m, e = math.frexp(x)  # m in [0.5, 1)
    m, e = (m, e) if m > math.sqrt(0.5) else (2.0 * m, e - 1)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = 0.0
    for k in range(21, 2, -2):
        total = total * z + 1.0 / k
    log = (s + s * z * total) * (2.0 / math.log(2.0))
    upper = float((np.float64(a).view(np.int64) & ~0x7FFFFFF).view(np.float64))
    n = float(np.rint(min(max(a * e + a * log, -1100.0), 1100.0)))
    rest = min(max((upper * e - n) + ((a - upper) * e + a * log), -1.0), 1.0)
    t, value = rest * math.log(2.0), 0.0
    for k in range(13, -1, -1):
        value = value * t + 1.0 / math.factorial(k)
    half = math.floor(n / 2)
    return value * 2.0**half * 2.0 ** (n - half)


def powers(errors: Any, alpha: float, eps: float) -> list[float]:
    """(error + eps)**alpha of float32 errors."""
    return [power(float(np.float64(error) + eps), alpha) for error in errors]
