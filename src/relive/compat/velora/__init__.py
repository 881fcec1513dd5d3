"""Velora's ``ReplayBuffer`` and ``BatchExperience`` (release 0.2) over relive, and the ``RolloutBuffer`` it removed.

``from relive.compat.velora import ReplayBuffer`` is all that changes; Velora is not needed for it.
``docs/migration/velora.md`` has what becomes right, what becomes faster and what differs.
"""

from ..errors import StepError
from .experience import BatchExperience, RolloutBatch
from .replay import ReplayBuffer
from .rollout import RolloutBuffer

__all__ = ["BatchExperience", "ReplayBuffer", "RolloutBatch", "RolloutBuffer", "StepError"]
