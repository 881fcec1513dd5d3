"""Samplers: they choose the transitions of a batch."""

from .contract import AnySampler, Sampler
from .prioritized import Prioritized
from .recent import Recent
from .uniform import Uniform, WithoutReplacement

__all__ = ["AnySampler", "Prioritized", "Recent", "Sampler", "Uniform", "WithoutReplacement"]
