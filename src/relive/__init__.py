"""relive: the experience layer for reinforcement learning in PyTorch.

Everything between an environment's ``step()`` and the learner's ``loss.backward()``.
"""

from . import errors, returns
from .collect import Collector
from .errors import ReliveError
from .hindsight import Hindsight
from .mixture import Mixture
from .replay import ReplayBuffer
from .returns import GAE, GroupAdvantage, MonteCarlo, TDLambda, VTrace
from .rollout import RolloutBuffer
from .samplers import Prioritized, Recent, Uniform, WithoutReplacement
from .schema import Field, Schema
from .sequence_view import Sequence
from .sequences import SequenceBatch
from .views import FrameStack, NStep, Transition

__all__ = [
    "GAE",
    "Collector",
    "Field",
    "FrameStack",
    "GroupAdvantage",
    "Hindsight",
    "Mixture",
    "MonteCarlo",
    "NStep",
    "Prioritized",
    "Recent",
    "ReliveError",
    "ReplayBuffer",
    "RolloutBuffer",
    "Schema",
    "Sequence",
    "SequenceBatch",
    "TDLambda",
    "Transition",
    "Uniform",
    "VTrace",
    "WithoutReplacement",
    "__version__",
    "errors",
    "returns",
]

__version__ = "0.1.0"
