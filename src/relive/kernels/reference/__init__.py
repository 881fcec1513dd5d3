"""The hot loops spelt out: the definition that the fast twins must agree with, and the path for other devices."""

from .random import permutation
from .returns import discounted_return, gae, refuse_missing, vtrace
from .rows import copy_row

__all__ = ["copy_row", "discounted_return", "gae", "permutation", "refuse_missing", "vtrace"]
