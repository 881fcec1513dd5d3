"""Monitor: the content of a replay and its use in training, as a flat dict of numbers for a log.

In order: the monitor; its state in a save; the counts of draws; the places of a batch in a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import FieldError, LifecycleError, ParameterError, ReliveError, ShapeError
from ..parameters import COUNT_RULE, FLAG_RULE, Rule, is_mapping, require
from ..printable import shown
from ..replay.buffer import ReplayBuffer
from ..ring.ring import Ring, Span
from ..samplers.prioritized import doubles
from ..steps.arrays import Array, Ints, as_host, whole_numbers

LOOKED_AT = 256
"""The most batches that are kept between two calls of ``scalars``. Older ones are dropped."""

TEXT_RULE: Rule = (lambda text: isinstance(text, str), "expected text")


class Monitor:
    """Ages, staleness, replay ratio, priorities and weights of a replay: numbers for TensorBoard, W&B or a console.

    Call :meth:`update` with each batch, and :meth:`scalars` when you write to the log. The first batch is looked at,
    and then batches 1, 2, 4, ... later, up to ``every``, so that an update takes next to no time and the figures of a
    short run are not those of its first batch alone. With ``counts=True`` every batch is counted, and the monitor knows
    exactly how often each stored transition was drawn.

    Args:
        replay: the buffer. It is only read, and its draws do not change.
        counts: count the draws of each transition. The counts take 4 bytes per row of the capacity. To count takes up
            to half of the time to sample a small batch.
        every: in the long run, look at the staleness and the weights of one batch in this many. One in 128 takes 2.5 to
            4 % of sampling; of one in 1,000 nothing can be measured.

    Raises:
        ParameterError: ``replay`` is not a :class:`relive.ReplayBuffer`, ``counts`` is not a bool, or ``every`` is not
            a positive whole number.

    Example:
        ``monitor = relive.Monitor(replay)``, then ``monitor.update(batch)`` and
        ``for name, value in monitor.scalars("replay/").items(): writer.add_scalar(name, value, step)``
    """

    replay: ReplayBuffer[Any, Any]
    every: int

    def __init__(self, replay: ReplayBuffer, *, counts: bool = False, every: int = 1000) -> None:
        if not isinstance(cast("object", replay), ReplayBuffer):
            raise ParameterError(f"Monitor: expected a relive.ReplayBuffer, got {type(replay).__name__}")
        require("Monitor", COUNT_RULE, every=every)
        require("Monitor", FLAG_RULE, counts=counts)
        self.replay, self.every = replay, every
        inside: Any = replay
        self._ring: Ring = inside._ring
        self._counts = DrawCounts(self._ring) if counts else None
        self._left = self._distance = 1
        self._staleness: deque[Array] = deque(maxlen=LOOKED_AT)
        self._weights: deque[Array] = deque(maxlen=LOOKED_AT)
        figures = replay.stats()
        self._since = figures["sampled"], figures["completed"]

    def __repr__(self) -> str:
        return f"Monitor({self.replay!r}, counts={self.counts}, every={self.every})"

    @property
    def counts(self) -> bool:
        """True if it counts the draws of each transition."""
        return self._counts is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the counts; 0 without them."""
        return 0 if self._counts is None else self._counts.nbytes

    def update(self, batch: Mapping[str, object]) -> None:
        """Take note of a batch that the replay drew. Call this before you add further steps.

        Args:
            batch: a batch with ``index``, and with ``weight`` if the sampler gives weights.

        Raises:
            FieldError: the batch has no ``index``.
            DTypeError, ShapeError: its ``index`` has no whole numbers, or its ``weight`` not one number for each row.
            ParameterError: an ``index`` was never issued by this replay. A monitor with counts may wait until it counts
                some batches at once, and then counts all other rows of them.
        """
        self._left -= 1
        if self._left > 0 and self._counts is None:
            return
        self._note(batch)

    def draws(self, index: object) -> Ints:
        """How often the transitions ``index`` ``[B]`` were drawn since the monitor was made, int64 ``[B]``.

        The number is exact for the batches that :meth:`update` was given. It is -1 if a transition can no longer be
        drawn.

        Raises:
            LifecycleError: the monitor does not count.
            DTypeError: the index has no whole numbers.
            ParameterError: an index was never issued.
        """
        if self._counts is None:
            raise LifecycleError("draws: this monitor does not count; create it with Monitor(replay, counts=True)")
        with self.replay.lock:
            len(self.replay)  # repairs what a call that was interrupted left half done
            return self._counts.of_index(whole_numbers(index, "index").reshape(-1))

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """The figures, by name. A figure that is not known, such as a weight without priorities, is left out.

        All figures of :meth:`relive.ReplayBuffer.stats`, and:

        - ``age_p50``, ``age_p90``: quantiles of the ages of stored transitions. An age is how many transitions were
          completed later;
        - ``batches_looked_at``: how many batches were looked at since the last call, the newest 256 at most;
        - ``staleness_mean``, ``staleness_p50``, ``staleness_p90``, ``staleness_max``: the ages of drawn transitions at
          the time of the draw, in the batches that were looked at;
        - ``replay_ratio_recent``: rows drawn per transition completed;
        - ``weight_min``, ``weight_mean``, ``weight_max``, ``weight_std``, and ``weight_effective``: (Σw)² / (B Σw²),
          the share of a batch that counts, 1 where all weights are equal; of the batches that were looked at;
        - ``priority_entropy``: -Σ p ln p of the probabilities of being drawn, in nats; ``priority_evenness``: the same
          as a share of the most there can be, ln n; ``effective_share``: ``effective_size`` per stored transition;
        - with counts: ``never_sampled``: the share of stored transitions that were not drawn since the monitor was
          made; ``draws_mean``, ``draws_max``: draws per stored transition. They are exact.

        Figures of batches that were looked at, and ``replay_ratio_recent``, are about the time since the last call. The
        call takes time in proportion to the number of stored steps, so make it once in some hundred batches.

        Args:
            prefix: put before each name, such as ``"replay/"``.

        Raises:
            ParameterError: ``prefix`` is not text.
        """
        require("scalars", TEXT_RULE, prefix=prefix)
        with self.replay.lock:
            figures = self.replay.stats()
            values = figures | self._recent(figures) | self._stored(figures)
        return {prefix + name: float(value) for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """The counts, for the ``extra`` of a save: ``replay.save(path, extra={"monitor": monitor.state_dict()})``.

        ``relive.inspect`` finds the counts in the save, and :meth:`load_state_dict` continues them. They take 16 bytes
        for each row that was drawn. A monitor without counts has none to save. Batches that were looked at since the
        last :meth:`scalars` are not kept.
        """
        if self._counts is None:
            return {"kind": KIND, "counts": None}
        with self.replay.lock:
            len(self.replay)  # repairs what a call that was interrupted left half done
            index, draws = self._counts.drawn()
        return {"kind": KIND, "counts": {"index": index, "draws": draws}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue the counts of a :meth:`state_dict`. If it has none, begin at 0. Rows that are gone are left out.

        Raises:
            LifecycleError: the state has counts, and this monitor does not count.
            ParameterError: this is not the state of a monitor, or it is that of another replay. Nothing is changed.
        """
        counts = counts_in(state)
        if self._counts is None:
            if counts is None:
                return
            raise LifecycleError("load_state_dict: the state has counts; create the monitor with counts=True")
        nothing = np.zeros(0, np.int64)
        index, draws = (nothing, nothing) if counts is None else (as_host(counts[name]) for name in COUNTED)
        with self.replay.lock:
            len(self.replay)
            self._counts.restore(index, draws)

    # -- inside -------------------------------------------------------------------------------------------------

    def _note(self, batch: Mapping[str, object]) -> None:
        """Count a batch, and look at it if its turn has come."""
        index, looked = index_of(batch), self._left <= 0
        weight = doubles(batch["weight"], "weight").reshape(-1) if looked and "weight" in batch.keys() else None
        if weight is not None and weight.size != index.size:
            raise ShapeError(f"weight: expected one for each of {index.size} rows, got {weight.size}")
        if self._counts is not None and self._counts.note(index):
            with self.replay.lock:
                self._counts.count_waiting()
        if not looked:
            return
        with self.replay.lock:
            len(self.replay)  # repairs what a call that was interrupted left half done
            self._staleness.append(self._ring.completed - 1 - self._ring.stamp[places_of(self._ring, index)])
        if weight is not None:
            self._weights.append(weight.copy())  # a batch's memory may be handed out again
        self._left = self._distance
        self._distance = min(2 * self._distance, self.every)

    def _recent(self, figures: dict[str, float]) -> dict[str, float]:
        """Figures about the time since the last call."""
        sampled, completed = figures["sampled"] - self._since[0], figures["completed"] - self._since[1]
        self._since = figures["sampled"], figures["completed"]
        recent: dict[str, float] = {"batches_looked_at": len(self._staleness)}
        if completed > 0:
            recent["replay_ratio_recent"] = sampled / completed
        staleness, weights = (np.concatenate([*pieces, np.empty(0)]) for pieces in (self._staleness, self._weights))
        self._staleness.clear()
        self._weights.clear()
        if len(staleness):
            low, high = np.quantile(staleness, (0.5, 0.9))
            recent |= {"staleness_mean": staleness.mean(), "staleness_p50": low, "staleness_p90": high,
                      "staleness_max": staleness.max()}  # fmt: skip
        if len(weights):
            recent |= {name: measure(weights) for name, measure in OF_WEIGHTS.items()}
        return recent

    def _stored(self, figures: dict[str, float]) -> dict[str, float]:
        """Figures about all stored transitions."""
        ring, count, stored = self._ring, figures["size"], dict[str, float]()
        if not count:
            return stored
        ages = ring.completed - 1 - ring.stamp[ring.anchors()]
        stored["age_p50"], stored["age_p90"] = np.quantile(ages, (0.5, 0.9))
        if "effective_size" in figures:
            inside: Any = self.replay
            entropy = entropy_of(inside._prioritized.priorities())
            stored |= {"priority_entropy": entropy, "effective_share": figures["effective_size"] / len(ages)}
            stored["priority_evenness"] = entropy / np.log(len(ages)) if len(ages) > 1 else 1.0
        if self._counts is not None:
            draws = self._counts.of_stored()
            stored |= {"never_sampled": np.mean(draws == 0), "draws_mean": draws.mean(), "draws_max": draws.max()}
        return stored


OF_WEIGHTS: dict[str, Callable[[Array], float]] = {
    "weight_min": np.min,
    "weight_mean": np.mean,
    "weight_max": np.max,
    "weight_std": np.std,
    "weight_effective": lambda w: w.sum() ** 2 / (len(w) * (w**2).sum()),
}
"""Figures of importance weights."""


def entropy_of(priorities: Array) -> float:
    """-Σ p ln p of draws in proportion to ``priorities`` ``[S]``, in nats. A priority of 0 adds nothing."""
    positive = priorities[priorities > 0]
    if not len(positive):
        return 0.0
    share = positive / positive.sum()
    return float(-(share * np.log(share)).sum())


def index_of(batch: Mapping[str, object]) -> Ints:
    """The ``index`` of a batch, int64 ``[B]``.

    Raises:
        FieldError: the batch has none.
    """
    try:
        index = batch["index"]
    except (KeyError, TypeError, IndexError, ValueError, ReliveError) as error:
        raise FieldError("Monitor.update: expected a batch with 'index', as the replay draws them") from error
    return whole_numbers(index, "index").reshape(-1)


# -- the state of a monitor --------------------------------------------------------------------------------------------

KIND = "relive.Monitor"
"""Marks the state of a monitor among the other values in the ``extra`` of a save."""

COUNTED = "index", "draws"
"""The arrays of counts in a state."""


def is_state(value: object) -> TypeGuard[Mapping[str, object]]:
    """True if a value is a state that :meth:`Monitor.state_dict` gave."""
    return is_mapping(value) and value.get("kind") == KIND


def counts_in(state: object) -> Mapping[str, object] | None:
    """The counts in a state; None if its monitor did not count.

    Raises:
        ParameterError: this is not the state of a monitor.
    """
    counts = state.get("counts", ()) if is_state(state) else ()
    if counts is None or (is_mapping(counts) and set(counts) == set(COUNTED)):
        return counts
    raise ParameterError(f"load_state_dict: expected what Monitor.state_dict() gave, got {shown(state, 200)}")


# -- counts of draws ---------------------------------------------------------------------------------------------------

MOST_WAITING = 2**15
"""How many rows wait to be counted together: one pass over many rows costs far less than one pass per batch."""

ONE = np.uint32(1)
"""A one of the counts' dtype. NumPy adds a one of another dtype a hundred times more slowly."""


class DrawCounts:
    """Counts the draws of each stored transition. When a row is overwritten, its count starts at 0 again.

    Args:
        ring: the rows. The counts take 4 bytes for each row of its capacity.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.by_place: NDArray[np.uint32] = np.zeros(ring.num_envs * ring.rows, np.uint32)
        """The draws of the row at each place of the ring, as far as they were counted. To overflow, one row would have
        to be drawn 2**32 times, which does not happen in practice."""
        self._heads: Ints = ring.heads.copy()
        """The number of each env's next row when rows were last counted: later rows start at 0."""
        self._waiting: list[Ints] = []
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return self.by_place.nbytes

    def note(self, index: Ints) -> bool:
        """Remember the rows ``[B]`` of a batch, by their public index. True if it is time to ``count_waiting``."""
        self._waiting.append(index.copy())  # a batch's memory may be handed out again
        self._rows += len(index)
        return self._rows >= MOST_WAITING

    def count_waiting(self) -> None:
        """Count the rows that wait. Rows that were overwritten meanwhile are left out.

        Raises:
            ParameterError: an index was never issued. All other rows are counted.
        """
        ring, heads = self.ring, self.ring.heads.copy()
        waiting = len(self._waiting)  # the training thread may add batches meanwhile; these go on waiting
        index = np.concatenate([*self._waiting[:waiting], np.empty(0, np.int64)])
        del self._waiting[:waiting]
        self._rows = 0
        self.by_place[Span(np.maximum(self._heads, ring.oldest), heads).places(ring.rows)] = 0
        self._heads = heads
        known = issued(ring, index)
        np.add.at(self.by_place, places_of(ring, index[known]), ONE)
        if not known.all():
            raise never_issued(index, int(np.argmin(known)))

    def of_index(self, index: Ints) -> Ints:
        """The draws of transitions by public index, int64 ``[B]``; -1 where one can no longer be drawn.

        Raises:
            ParameterError: an index was never issued.
        """
        self.count_waiting()
        places, unknown = self.ring.find(index)
        if unknown >= 0:
            raise never_issued(index, unknown)
        return np.where(places >= 0, self.by_place[places].astype(np.int64), -1)

    def of_stored(self) -> NDArray[np.uint32]:
        """The draws of all transitions that can be drawn, uint32 ``[len(replay)]``."""
        self.count_waiting()
        return self.by_place[self.ring.anchors()]

    def drawn(self) -> tuple[Ints, Ints]:
        """The stored rows that were drawn: their public index, int64 ``[K]``, and how often, int64 ``[K]``."""
        self.count_waiting()
        envs, numbers = self.ring.live_rows()
        draws = self.by_place[self.ring.places()]
        rows = np.flatnonzero(draws)
        return (numbers * self.ring.num_envs + envs)[rows], draws[rows].astype(np.int64)

    def restore(self, index: Array, draws: Array) -> None:
        """Continue the counts that :meth:`drawn` gave. Rows that were overwritten meanwhile are left out.

        They are saved by index, which stays; a place in memory does not.

        Raises:
            ParameterError: these are not whole numbers ``[K]``, a count is out of range, or an index was never issued.
                Nothing is changed.
        """
        if index.shape != draws.shape or index.ndim != 1 or index.dtype.kind != "i" or draws.dtype.kind != "i":
            raise ParameterError(
                "Monitor: expected an index and draws, whole numbers [K], as state_dict() gave them, got "
                f"{index.dtype}{list(index.shape)} and {draws.dtype}{list(draws.shape)}"
            )
        if len(draws) and not (draws.min() >= 0 and draws.max() < 2**32):
            raise ParameterError(f"Monitor: expected draws from 0 to 2**32 - 1, got {draws.min()} to {draws.max()}")
        places, stored = located(self.ring, index)
        self.count_waiting()
        self.by_place[:] = 0
        self.by_place[places[stored]] = draws[stored]


def issued(ring: Ring, index: Ints) -> NDArray[np.bool_]:
    """True where one of these ``[B]`` is the index of a row that this ring has, or had, bool ``[B]``."""
    return (index >= 0) & (index // ring.num_envs < ring.heads[index % ring.num_envs])


def located(ring: Ring, index: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """The places of a batch's rows ``[B]``, now or before, and a mask of the rows that are still stored.

    Raises:
        ParameterError: an index was never issued.
    """
    known = issued(ring, index)
    if not known.all():
        raise never_issued(index, int(np.argmin(known)))
    numbers, envs = index // ring.num_envs, index % ring.num_envs
    return envs * ring.rows + numbers % ring.rows, numbers >= ring.oldest[envs]


def places_of(ring: Ring, index: Ints) -> Ints:
    """The places of the rows of a batch ``[B]`` that are still stored.

    Raises:
        ParameterError: an index was never issued.
    """
    places, stored = located(ring, index)
    return places[stored]


def never_issued(index: Ints, entry: int) -> ParameterError:
    """The error for an index that is not this replay's."""
    return ParameterError(
        f"index: entry {entry}, {index[entry]}, was never issued by this replay; pass a batch that it drew"
    )
