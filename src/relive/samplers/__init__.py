"""Samplers: they choose the transitions of a batch."""

from .contract import Sampler
from .prioritized import Prioritized
from .recent import Recent
from .uniform import Uniform, WithoutReplacement

__all__ = ["Prioritized", "Recent", "Sampler", "Uniform", "WithoutReplacement"]
