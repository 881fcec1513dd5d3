"""AgileRL's ``RolloutBuffer`` (``agilerl.components.rollout_buffer``, release 2.58), built on relive's.

Change the import to ``from relive.compat.agilerl import RolloutBuffer, BPTTSequenceType``. AgileRL is not needed.
``docs/migration/agilerl.md`` lists what is fixed, what is faster and what differs.
"""

from ..errors import StepError
from .buffer import RolloutBuffer
from .sequences import BPTTSequenceType

__all__ = ["BPTTSequenceType", "RolloutBuffer", "StepError"]
