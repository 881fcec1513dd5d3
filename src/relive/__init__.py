"""relive: the experience layer for reinforcement learning in PyTorch.

Everything between an environment's ``step()`` and the learner's ``loss.backward()``.
"""

from typing import TYPE_CHECKING

from . import errors, returns
from .batches import Batch, SequenceBatch
from .collect.collector import Collector
from .errors import ReliveError
from .look.audit import audit
from .look.inspection import inspect
from .look.monitor import Monitor
from .names import MODULE_HINTS, lazy_modules
from .parameters import add_argument_hints
from .processes.lanes import Lanes
from .processes.limits import MinSize, SamplesPerInsert
from .processes.server import ReplayServer
from .processes.weights import Weights
from .replay.buffer import ReplayBuffer
from .replay.loading import load_extra
from .replay.mixture import Mixture
from .returns import GAE, GroupAdvantage, MonteCarlo, TDLambda, ValueHeads, VTrace
from .rollout.buffer import RolloutBuffer
from .samplers.fresh import Fresh
from .samplers.prioritized import Prioritized
from .samplers.recent import Recent
from .samplers.uniform import Uniform, WithoutReplacement
from .steps.changes import SchemaChanges
from .steps.schema import Field, Schema
from .views.chunks import Chunks
from .views.frames import FrameStack
from .views.hindsight import Hindsight
from .views.returns_to_go import ReturnsToGo
from .views.sequences import Sequence
from .views.transitions import NStep, Transition

if TYPE_CHECKING:
    from . import cluster as cluster
    from . import compat as compat
    from . import exchange as exchange
else:  # a type checker would take every name for one that is there
    __getattr__, __dir__ = lazy_modules(__name__, ("cluster", "compat", "exchange"), MODULE_HINTS)

__all__ = [
    "GAE",
    "Batch",
    "Chunks",
    "Collector",
    "Field",
    "FrameStack",
    "Fresh",
    "GroupAdvantage",
    "Hindsight",
    "Lanes",
    "MinSize",
    "Mixture",
    "Monitor",
    "MonteCarlo",
    "NStep",
    "Prioritized",
    "Recent",
    "ReliveError",
    "ReplayBuffer",
    "ReplayServer",
    "ReturnsToGo",
    "RolloutBuffer",
    "SamplesPerInsert",
    "Schema",
    "SchemaChanges",
    "Sequence",
    "SequenceBatch",
    "TDLambda",
    "Transition",
    "Uniform",
    "VTrace",
    "ValueHeads",
    "Weights",
    "WithoutReplacement",
    "__version__",
    "audit",
    "errors",
    "inspect",
    "load_extra",
    "returns",
]

__version__ = "0.1.0"

# Pickles, reprs and error messages name the public place of a class, in whichever module it is written.
for _part in [value for name, value in globals().items() if name in __all__ and name != "ReliveError"]:
    if getattr(_part, "__module__", "").startswith("relive."):
        _part.__module__ = __name__
        if isinstance(_part, type) and _part is not SequenceBatch:  # which every draw makes
            add_argument_hints(_part)
