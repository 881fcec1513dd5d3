"""relive: the experience layer for reinforcement learning in PyTorch.

Everything between an environment's ``step()`` and the learner's ``loss.backward()``.
"""

from . import errors, returns
from .collect import Collector
from .errors import ReliveError
from .returns import GAE, GroupAdvantage, MonteCarlo, TDLambda, VTrace
from .rollout import RolloutBuffer
from .schema import Field, Schema

__all__ = [
    "GAE",
    "Collector",
    "Field",
    "GroupAdvantage",
    "MonteCarlo",
    "ReliveError",
    "RolloutBuffer",
    "Schema",
    "TDLambda",
    "VTrace",
    "__version__",
    "errors",
    "returns",
]

__version__ = "0.1.0"
