"""The hot loops in numba: one module for each of reference's, with the same names and results."""

from .random import permutation
from .returns import discounted_return, gae, vtrace
from .rows import copy_row

__all__ = ["copy_row", "discounted_return", "gae", "permutation", "vtrace"]
