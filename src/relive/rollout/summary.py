"""How a rollout is printed: as the call that makes it, and as a summary."""

from __future__ import annotations

from ..memory.estimate import readable
from ..steps.summary import Summary, described
from .columns import Columns
from .fields import KEPT_APART, Fields
from .minibatches import Permutations
from .named import NamedColumns

__all__ = ["call", "summary"]


def call(fields: Fields, wrap: bool, debug: bool, seed: int) -> str:
    """The call that makes an empty buffer like this one."""
    further = f"columns={fields.further_by_name}, " if fields.further else ""
    return (
        f"RolloutBuffer({fields.schema!r}, num_steps={fields.num_steps}, num_envs={fields.num_envs}, "
        f"device='{fields.device}', wrap={wrap}, debug={debug}, "
        f"hidden_every={fields.every}, {further}seed={seed})"
    )


def summary(fields: Fields, columns: Columns, named: NamedColumns, permutations: Permutations) -> Summary:
    """How full a rollout is, what it holds, and how much memory that takes."""
    further = [name for name in named.keys() if name not in fields.schema and name not in KEPT_APART]
    size = readable(sum(fields.sizes(fields.all).values()))
    facts = {
        "fields": described(fields.schema.leaves),
        "attached": ", ".join(further) or "nothing; finish(...) attaches advantages",
        "memory": f"{size} {'in RAM' if columns.device.type == 'cpu' else f'on {columns.device}'}",
        "seed": f"{permutations.seed}, {permutations.draws:,} permutations drawn",
    }
    full = ", full" if columns.is_full else ""
    title = f"RolloutBuffer: {columns.count:,} of {columns.num_steps:,} steps, {columns.num_envs:,} envs{full}"
    return title, facts
