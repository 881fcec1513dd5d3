"""Samplers: they choose the transitions of a batch."""

from .contract import AnySampler, Sampler
from .fresh import Fresh
from .prioritized import Prioritized
from .recent import Recent
from .uniform import Uniform, WithoutReplacement

__all__ = ["AnySampler", "Fresh", "Prioritized", "Recent", "Sampler", "Uniform", "WithoutReplacement"]
