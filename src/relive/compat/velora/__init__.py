"""Velora's ``ReplayBuffer`` and ``BatchExperience`` (release 0.2) on relive, and the ``RolloutBuffer`` it removed.

Change the import to ``from relive.compat.velora import ReplayBuffer``. Velora itself is not needed.
``docs/migration/velora.md`` lists what is fixed, what is faster and what differs.
"""

from ..errors import StepError
from .experience import BatchExperience, RolloutBatch
from .replay import ReplayBuffer
from .rollout import RolloutBuffer

__all__ = ["BatchExperience", "ReplayBuffer", "RolloutBatch", "RolloutBuffer", "StepError"]
