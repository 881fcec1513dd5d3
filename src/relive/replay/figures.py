"""Figures about a replay for a log, and its printed summary."""

from __future__ import annotations

from ..memory.estimate import StoragePlan, readable
from ..ring.ring import Ring
from ..samplers.contract import Sampler
from ..samplers.prioritized import Prioritized
from ..steps.arrays import Ints
from ..steps.summary import Summary, described
from ..views.contract import View
from .progress import Progress

__all__ = ["figures", "summary"]


def figures(
    ring: Ring, places: Ints, size: int, progress: Progress, prioritized: Prioritized | None
) -> dict[str, float]:
    """The figures that :meth:`relive.ReplayBuffer.stats` describes.

    Args:
        ring: the rows.
        places: the places of the transitions that can be drawn.
        size: how many can be drawn.
        progress: counts of what was drawn.
        prioritized: the sampler with their priorities, or None.
    """
    ages = ring.completed - 1 - ring.stamp[places]
    found = {
        "size": float(size),
        "completed": float(ring.completed),
        "episodes": float(ring.episodes),
        "age_mean": float(ages.mean()) if len(ages) else 0.0,
        "age_max": float(ages.max(initial=0)),
        "batches": float(progress.draws_taken),
        "sampled": float(progress.rows_taken),
        "replay_ratio": progress.rows_taken / max(ring.completed, 1),
        "late_updates": float(progress.late),
        "not_finite_rewards": float(ring.not_finite),
    }
    if prioritized is not None and len(places):
        p = prioritized.priorities()
        found |= {
            "priority_min": float(p.min()),
            "priority_mean": float(p.mean()),
            "priority_max": float(p.max()),
            "effective_size": float(p.sum() ** 2 / (p**2).sum()),
        }
    return found


def summary(
    ring: Ring, sampler: Sampler, view: View, progress: Progress, plan: StoragePlan, nbytes: int, device: str
) -> Summary:
    """The facts that printing a replay shows.

    Args:
        ring: the rows.
        sampler: draws the batches.
        view: reads the batches.
        progress: counts of what was drawn.
        plan: the planned memory.
        nbytes: bytes of rows and sampler.
        device: where rows live.
    """
    near = "in files" if ring.store.keeper.durable else "in RAM"
    memory = f"{readable(nbytes - plan.device_bytes)} {near}"
    facts = {
        "fields": described(ring.store.leaves),
        "to draw": f"{ring.drawable:,} of {ring.completed:,} ever completed, {ring.episodes:,} episodes ended",
        "memory": memory if not plan.device_bytes else f"{memory}, {readable(plan.device_bytes)} on {device}",
        "sampler": repr(sampler),
        "view": repr(view),
        "seed": f"{progress.seed}, {progress.draws_taken:,} batches drawn",
    }
    return f"ReplayBuffer: {ring.rows_live:,} of {plan.rows:,} rows, {ring.num_envs:,} envs", facts
