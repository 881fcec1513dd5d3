"""Episodes: the stored episodes of a replay, one by one, and its steps as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ..batches.tensordicts import as_tensordict
from ..errors import SchemaError
from ..ring.ring import Ring
from ..steps.arrays import Array, Ints, numpy_view
from ..steps.trees import Path
from ..views.transitions import NStep

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Episode", "Run", "read_run", "runs_of", "table"]


class Episode(NamedTuple):
    """The stored transitions of one episode."""

    env: int
    """The env that played it."""
    steps: TensorDict
    """The transitions ``[k]`` in the order of time: the fields of a step, ``next_obs`` and ``index``."""
    begins: bool
    """Whether the first of them is the first step of the episode. A full ring overwrites the oldest steps."""
    ended: bool
    """Whether the last of them terminated or was truncated. A running or interrupted episode has not ended."""

    @property
    def whole(self) -> bool:
        """Whether all of the episode is here."""
        return self.begins and self.ended

    @property
    def final_obs(self) -> Any:
        """The observation after the last step, ``[...]``, as the schema nests it."""
        return cast("Any", self.steps)[-1]["next_obs"]


class Run(NamedTuple):
    """Successive transitions of one episode: the rows ``first`` up to ``until`` of an env."""

    env: int
    first: int
    until: int


def runs_of(ring: Ring) -> list[Run]:
    """The episodes of the live rows, env by env in the order of time.

    Raises:
        SchemaError: the transitions have no order.
    """
    if ring.alone and not ring.linked:
        raise SchemaError("episodes: the transitions of this replay have no order; read data() instead")
    found: list[Run] = []
    for env in range(ring.num_envs):
        places = ring.live_places(env)
        step, complete = ring.step[places], ring.stamp[places] >= 0
        goes_on = np.zeros(len(places), np.bool_)
        goes_on[1:] = complete[1:] & complete[:-1] & (step[1:] == step[:-1] + 1)
        oldest = int(ring.oldest[env])
        starts, ends = complete & ~goes_on, complete & ~np.append(goes_on[1:], False)
        for low, high in zip(np.flatnonzero(starts).tolist(), np.flatnonzero(ends).tolist(), strict=True):
            found.append(Run(env, oldest + low, oldest + high + 1))
    return found


def read_run(ring: Ring, run: Run) -> Episode | None:
    """The part of an episode that is still stored; None if no step is."""
    first = max(run.first, int(ring.oldest[run.env]))
    if first >= run.until:
        return None
    places: Ints = run.env * ring.rows + np.arange(first, run.until, dtype=np.int64) % ring.rows
    fields = _transitions(ring, places)
    ended = bool(fields["terminated",][-1] | fields["truncated",][-1])
    return Episode(run.env, as_tensordict(fields, (len(places),)), int(ring.step[places[0]]) == 0, ended)


def table(ring: Ring, next_obs: bool) -> dict[Path, Array]:
    """All complete transitions as columns ``[S, ...]``, env by env in the order of time.

    ``env``, ``episode``, ``step`` and ``index`` come first. ``episode`` is the number of the episode in this table, and
    ``step`` counts within the episode. Transitions without an order come in the order of completion, and have neither.
    """
    if ring.alone and not ring.linked:
        anchors = ring.anchors()
        places = anchors[np.argsort(ring.stamp[anchors], kind="stable")]
        order: dict[Path, Array] = {("env",): places // ring.rows}
    else:
        runs = runs_of(ring)
        sizes = np.array([run.until - run.first for run in runs], np.int64)
        parts = [run.env * ring.rows + np.arange(run.first, run.until, dtype=np.int64) % ring.rows for run in runs]
        places = np.concatenate([np.zeros(0, np.int64), *parts])
        episode = np.repeat(np.arange(len(runs)), sizes)
        order = {("env",): places // ring.rows, ("episode",): episode, ("step",): ring.step[places]}
    fields = {path: numpy_view(field.cpu()) for path, field in _transitions(ring, places).items()}
    order["index",] = fields.pop(("index",))
    return order | {path: field for path, field in fields.items() if next_obs or path[0] != "next_obs"}


def _transitions(ring: Ring, places: Ints) -> dict[Path, Any]:
    """The fields of the steps at these places, their next observations and indices."""
    fields = NStep(1, 1.0).read(ring, places)
    return {path: fields[path] for path in fields if path[0] not in ("discount", "steps", "next_index")}
