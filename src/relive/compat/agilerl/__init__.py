"""AgileRL's ``RolloutBuffer`` (``agilerl.components.rollout_buffer``, release 2.58) over relive's.

``from relive.compat.agilerl import RolloutBuffer, BPTTSequenceType`` is all that changes; AgileRL is not needed for it.
``docs/migration/agilerl.md`` has what becomes right, what becomes faster and what differs.
"""

from ..errors import StepError
from .buffer import RolloutBuffer
from .sequences import BPTTSequenceType

__all__ = ["BPTTSequenceType", "RolloutBuffer", "StepError"]
