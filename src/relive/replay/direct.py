"""DirectAdd: adds a step that can be copied as it is, in one compiled call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import kernels
from ..kernels.ring_state import ALONE, COMPLETED, FINALS, LINKED, NO_FINALS, DirectStep
from ..memory.copier import SHORT, Plan
from ..memory.store import Staging
from ..ring.ring import Ring
from ..ring.rule import Rule
from ..samplers.contract import Sampler
from ..steps.arrays import Ints
from ..steps.checker import StepChecker

__all__ = ["DirectAdd"]


class DirectAdd:
    """Adds steps of the same envs that can be copied as they are: one compiled call checks, stages and adds them.

    Only steps like the one that the copier has learned from are added. It is for rings in RAM: rows in files may have
    to come from the disk first, and the call keeps all other threads of Python waiting.

    Args:
        ring: gets the rows.
        sampler: informed of each row that becomes drawable or stops being so.
        check: what checks such steps field by field.
        staging: where they are staged.
        envs: int64 ``[K]``, their envs.
        follows: whether they have final observations.
    """

    def __init__(
        self, ring: Ring, sampler: Sampler, check: StepChecker, staging: Staging, envs: Ints, follows: bool
    ) -> None:
        self._ring, self._sampler, self._staging, self._envs = ring, sampler, staging, envs
        self._copier, self._pick, self._size = staging.copier, check.pick, check.size
        self._mode = LINKED if ring.linked else ALONE if ring.alone else FINALS if follows else NO_FINALS
        self._plan: Plan | None = None
        self._rule: Rule | None = None
        self._watches = False
        self._add = kernels.fast().add_step

    @staticmethod
    def suits(ring: Ring, staging: Staging | None) -> bool:
        """Whether steps that are staged so can be added in one call."""
        return staging is not None and staging.nbytes <= SHORT and ring.undo is None

    def add(self, step: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Add a step and return its leaves; or change nothing and return None, if it takes more than that.

        A step with an error is one that takes more.
        """
        plan, ring, sampler = self._copier.plan, self._ring, self._sampler
        if plan is None or len(step) != self._size or ring.before_overwriting is not None:
            return None
        watches = sampler.watches
        if plan is not self._plan or watches is not self._watches or (watches and ring.rule is not self._rule):
            self._prepare(plan, watches)
        adding = self._adding
        try:
            leaves = self._pick(step)
            if plan.asked is not None and not plan.asked.fit(leaves):
                return None
            if watches:
                adding.since = ring.counters.item(COMPLETED)
            ring.pending = adding
            found = self._add(id(leaves), self._handle)
        except Exception:  # the caller finds out what is wrong
            ring.pending = None
            return None
        if found < 0:
            ring.pending = None
            return None
        if found:
            sampler.changed(adding.where[:found], adding.opens[:found])
        ring.pending = None
        return leaves

    def _prepare(self, plan: Plan, watches: bool) -> None:
        """Make ready for steps of this plan, for what the sampler watches, and for the ring's rule."""
        ring, (rows, final, _, large, _) = self._ring, self._staging
        self._plan = None  # an interrupt on the way leaves the handle and what it points to apart
        self._adding = ring.new_adding(self._envs, rows, final, watches)
        self._step = DirectStep(plan.table, ring.handle, self._adding.handle, large, self._mode)
        self._handle = kernels.fast().handle_of(self._step)
        self._rule, self._watches, self._plan = ring.rule, watches, plan
