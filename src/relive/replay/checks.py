"""Checks of arguments before anything changes: sizes, whole numbers, steps of many rows, finite numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.words import COLUMNS, EPISODES, HEAD, NEXT
from ..errors import EpisodeEndWarning, FieldError, NotFiniteError, ParameterError, SchemaError, ShapeError
from ..parameters import is_count
from ..ring.ring import Ring
from ..steps.arrays import Bools, Ints, Leaf, as_host, numpy_view
from ..steps.checker import refuse_unreadable
from ..steps.ends import EndCheck, ReuseCheck, places_in
from ..steps.schema import FINITE, STEP_FIELDS, Field, Path, Schema, dotted

MOST_ROWS = 2**31 - 1
"""The most rows of a batch."""


def require_rows(batch_size: int) -> None:
    """Require a possible size of a batch.

    Raises:
        ParameterError: it is not a whole number from 1 to ``MOST_ROWS``.
    """
    if not is_count(batch_size, 1) or batch_size > MOST_ROWS:
        raise ParameterError(
            f"batch_size={batch_size!r}: ask for a whole number of rows, at least 1 and at most {MOST_ROWS}"
        )


def require_alike(buffer: Any, other: Any, envs: Mapping[int, int] | None) -> None:
    """Refuse another buffer whose rows do not fit into this one.

    Args:
        buffer: the buffer that gets the rows.
        other: the buffer that has the rows.
        envs: env of ``other`` -> env of ``buffer``; None keeps every env's number.

    Raises:
        SchemaError: the buffers differ in their schema, number of envs or order.
        ParameterError: there is no such env.
    """
    for name in ("schema", "num_envs", "ordered", "own_next_obs"):
        if getattr(other, name) != getattr(buffer, name) and not (name == "num_envs" and envs is not None):
            raise SchemaError(
                f"append: expected a buffer of {name}={getattr(buffer, name)!r}, got {getattr(other, name)!r}"
            )
    for env, to in (envs or {}).items():
        if not (is_count(env) and env < other.num_envs and is_count(to) and to < buffer.num_envs):
            raise ParameterError(
                f"append(envs={{{env!r}: {to!r}}}): expected an env of {other.num_envs} and one of {buffer.num_envs}"
            )


def row_mask(mask: object, count: int) -> Bools:
    """The rows that are kept, bool ``[count]``.

    Raises:
        ShapeError: the mask has another shape or dtype.
    """
    rows = as_host(mask, "mask")
    if count == 1 and not rows.ndim:  # with one env, the leading axis may be left out
        rows = rows.reshape(1)
    if rows.shape != (count,) or rows.dtype != np.bool_:
        raise ShapeError(f"mask: expected bool ({count},), got {rows.dtype} {rows.shape}")
    return rows


def flattened(steps: Mapping[str, object], width: tuple[int, ...]) -> tuple[dict[str, object], int]:
    """Fields ``[T, N, ...]`` as ``[T * N, ...]``, and T.

    Args:
        steps: the fields.
        width: (N,).

    Raises:
        FieldError: ``steps`` is not a mapping.
        ShapeError: the fields do not all have the same T, or do not have this N.
    """
    if not hasattr(steps, "items"):
        raise FieldError(f"extend: expected a mapping of fields, got {type(steps).__name__}; pass {{'obs': ..., ...}}")
    fronts: set[tuple[int, ...]] = set()
    try:
        values = {name: _flattened(value, fronts) for name, value in steps.items()}
    except ValueError as error:
        raise ShapeError(f"extend: expected arrays, got lists of several lengths ({error})") from error
    except RuntimeError:
        refuse_unreadable(steps)
        raise
    if len(fronts) != 1 or any(front[1:] != width for front in fronts):
        raise ShapeError(f"extend: expected (steps, {width[0]}) in front of every field, got {sorted(fronts)}")
    ((count, _),) = fronts
    return values, count


def _flattened(tree: object, fronts: set[tuple[int, ...]]) -> object:
    """Arrays ``[T, N, ...]`` as ``[T * N, ...]``; adds the (T, N) of each, nested or not, to ``fronts``."""
    given: Any = tree
    # the most common type first: isinstance of a tensor or a mapping is slow
    if type(tree) is not np.ndarray and not isinstance(tree, np.ndarray | Tensor):
        if isinstance(tree, Mapping) or hasattr(tree, "items"):
            return {name: _flattened(member, fronts) for name, member in given.items()}
        if isinstance(tree, tuple):
            return tuple(_flattened(member, fronts) for member in given)
        given = np.asarray(tree)
    front = tuple(given.shape[:2])
    fronts.add(front)
    return given.reshape((math.prod(front), *given.shape[2:]))


def refuse_not_finite(
    fields: Mapping[Path, Field],
    leaves: Sequence[Leaf],
    final: Sequence[Leaf] | None,
    envs: Ints,
    kept: Bools,
) -> None:
    """Refuse NaN and infinity in rewards, actions and observations, and in the final observations of ended episodes.

    Args:
        fields: the stored fields, in order.
        leaves: the checked leaves ``[K, ...]``.
        final: the leaves of the final observations, if they were passed separately.
        envs: int64 ``[K]``, the env of each row.
        kept: bool ``[K]``, the rows that are stored.

    Raises:
        NotFiniteError: names the field, the row and its env.
    """
    by_path = dict(zip(fields, leaves, strict=True))
    done = as_host(by_path["terminated",]) | as_host(by_path["truncated",])
    checked = [(path, value, kept) for path, value in by_path.items() if path[0] in FINITE]
    if final is not None:
        obs = [path for path in by_path if path[0] == "obs"]
        checked += [(("next_obs", *path[1:]), x, kept & done) for path, x in zip(obs, final, strict=True)]
    for path, value, rows in checked:
        dtype = fields[("obs", *path[1:]) if path[0] == "next_obs" else path].dtype
        bad = np.flatnonzero(rows & ~_finite_rows(value, dtype))
        if len(bad):
            raise NotFiniteError(
                f"field '{dotted(path)}': row {bad[0]}, of env {envs[bad[0]]}, is {value[bad[0]]}, not finite as "
                f"{dtype}; fix the env or the policy"
            )


def _finite_rows(value: Leaf, dtype: torch.dtype) -> Bools:
    """Which rows of a checked leaf are finite in the dtype that they are stored in: bool ``[K]``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return np.ones(len(value), np.bool_)
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    stored = tensor.to(dtype) if tensor.is_floating_point() or tensor.is_complex() else tensor.view(dtype)  # its bits
    return as_host(stored.isfinite().reshape(len(tensor), math.prod(tensor.shape[1:])).all(1))


RESERVED = frozenset(
    ("next_obs", "mask", "index", "next_index", "discount", "steps", "weight", "probability", "complete", "source")
)
"""Names that a schema must not use: further arguments of ``add``, and fields that batches add."""


def stored_fields(schema: Schema, own_next_obs: bool) -> Schema:
    """The fields that a replay stores, after a check of the schema.

    Raises:
        SchemaError: names the field that is missing, or that the buffer itself adds.
    """
    if not isinstance(cast("object", schema), Schema):
        raise SchemaError(
            f"schema: expected a relive.Schema, got {schema!r:.80}; make one with Schema.from_env(envs), or by hand: "
            "Schema({'obs': ..., 'reward': ..., ...})"
        )
    for name, dtype in STEP_FIELDS.items():
        if schema.leaves.get((name,)) != Field((), dtype):
            raise SchemaError(f"a replay's schema needs '{name}' as Field((), {dtype}), got {schema!r}")
    if "obs" not in schema:
        raise SchemaError(f"a replay's schema needs 'obs', got {schema!r}")
    for name in schema.names:
        if name in RESERVED or name.startswith("_"):
            raise SchemaError(
                f"field {name!r}: names in a replay's schema do not start with '_', and are none of those that the "
                f"buffer itself uses ({', '.join(sorted(RESERVED))}); give it another name"
            )
    return schema.extend(next_obs=schema["obs"]) if own_next_obs else schema


Bytes = NDArray[np.uint8]
Numbers = tuple[bytes, np.dtype]
"""The numbers of a field, and their dtype."""


ENOUGH = 8
"""So many steps must have begun where the step before led, and moved on, before one that does not counts."""


MOST_CALLS = 4096
"""The check stops after this many calls that add steps."""


NUMBERS = 64
"""At most this many numbers of each field of an observation are compared."""


# Between ends `next_obs` may hold anything. So it is believed only after 8 steps that began exactly where the step
# before had led, in the first 4,096 calls. It warns and does not raise, because goals that change within an episode
# look alike.
class ResetCheck:
    """Checks that a step begins with the ``next_obs`` of the step before, where that did not end its episode.

    If a loop resets an env in mid-episode and stores no end, as at a time limit of its own, the replay takes the reset
    observation for the next one. This shows if the loop passes ``next_obs`` with every step. But the replay reads
    ``next_obs`` only at ends, so elsewhere it may hold anything. If one of the first steps begins with another
    observation, the check therefore stops without a word.

    Args:
        leaves: the stored fields of a step, in order.
        all_envs: int64 ``[N]``, which most steps are of.
    """

    def __init__(self, leaves: Mapping[Path, Field], all_envs: Ints) -> None:
        self._all, num_envs = all_envs, len(all_envs)
        self._flags, self._obs, _, self._dtypes = places_in(leaves)
        numbers = [math.prod(field.shape) for path, field in leaves.items() if path[0] == "obs"]
        self._every = [max(number // NUMBERS, 1) for number in numbers]
        self._counts = [-(-number // every) for number, every in zip(numbers, self._every, strict=True)]
        self._left, self._agreed = MOST_CALLS, 0
        self._led_to: list[Bytes] = []
        """The observation after the newest step of each env, as far as it is compared: ``[N, M]`` for each field."""
        self._newest: list[Numbers] = []
        """These numbers before conversion, if the newest step was one of all envs; else empty."""
        self._moved = np.zeros(num_envs, np.bool_)
        """True where that differs from the observation before the step."""
        self._state = np.zeros((num_envs, COLUMNS), np.int64)
        """The ring's state after that step."""
        self.broken = -1
        """The first env that was reset in mid-episode, or -1."""

    def observe(
        self, ring: Ring, envs: Ints, leaves: Sequence[Leaf], final: Sequence[Leaf] | None, kept: Bools | None
    ) -> bool:
        """Check steps that were just stored, in the order of time. Returns whether to check the next ones, too.

        Args:
            ring: where they were stored.
            envs: int64 ``[K]``, the env of each step; where envs come again, all come again in the same order.
            leaves: the checked leaves ``[K, ...]``.
            final: the leaves of ``next_obs``; None if there are none. A loop that leaves it out once is not checked.
            kept: bool ``[K]``, False for steps that were left out.
        """
        self._left -= 1
        if final is None or not self._left:
            return False
        before, self._newest = self._newest, []
        if envs is self._all and kept is None and self._agreed >= ENOUGH:
            self._newest = self._numbers(final)
            if before == self._numbers([leaves[i] for i in self._obs]):  # as most often, and much quicker
                self._state[:] = ring.state
                return True
        if before:
            self._led_to = self._bytes(before, len(self._all))
        return self._compare(ring, envs, leaves, final, kept)

    def _compare(
        self, ring: Ring, envs: Ints, leaves: Sequence[Leaf], final: Sequence[Leaf], kept: Bools | None
    ) -> bool:
        """:meth:`observe`, env by env."""
        count, again = len(envs), np.flatnonzero(envs[1:] == envs[:1])
        width = int(again[0]) + 1 if len(again) else count  # of one vector step
        newest = envs[count - width :]
        obs, led_to = (self._bytes(self._numbers(x), len(envs)) for x in ([leaves[i] for i in self._obs], final))
        moved = self._moved[:0] if self._agreed >= ENOUGH else _differ(obs, led_to)
        state = ring.state[newest]
        if width < count:
            terminated, truncated = (as_host(leaves[i]) for i in self._flags)
            follows = ~(terminated | truncated)[:-width]
            follows = follows if kept is None else follows & kept[:-width] & kept[width:]
            agrees = self._agree(envs[width:], [x[:-width] for x in led_to], [x[width:] for x in obs], moved, follows)
        elif self._led_to:
            before = self._state[envs]
            follows = (before[:, NEXT] > 0) & (state[:, [HEAD, NEXT]] == before[:, [HEAD, NEXT]] + 1).all(1)
            agrees = self._agree(envs, [x[envs] for x in self._led_to], obs, self._moved[envs], follows)
        else:
            agrees, self._led_to = True, [np.zeros((len(self._state), x.shape[1]), x.dtype) for x in led_to]
        for led, x in zip(self._led_to, led_to, strict=False):
            led[newest] = x[count - width :]
        self._state[newest] = state
        if len(moved):
            self._moved[newest] = moved[count - width :]
        return agrees

    def _agree(self, envs: Ints, before: list[Bytes], obs: list[Bytes], moved: Bools, follows: Bools) -> bool:
        """True if the rows that follow begin with the observations that the rows before led to."""
        wrong = np.flatnonzero(follows & _differ(before, obs))
        if self._agreed < ENOUGH:
            until = int(wrong[0]) if len(wrong) else len(envs)
            self._agreed += int(np.count_nonzero(follows[:until] & moved[:until]))
        if len(wrong) and self._agreed >= ENOUGH:
            self.broken: int = int(envs[wrong[0]])
        return not len(wrong)

    def _numbers(self, values: Sequence[Leaf]) -> list[Numbers]:
        """Some numbers of each field of observations."""
        numbers: list[Numbers] = []
        for x, every in zip(values, self._every, strict=True):
            array = numpy_view(x.detach()) if isinstance(x, Tensor) else x
            if every > 1:
                array = array.reshape(len(array), math.prod(array.shape[1:]))[:, ::every]
            numbers.append((array.tobytes(), array.dtype))
        return numbers

    def _bytes(self, numbers: list[Numbers], rows: int) -> list[Bytes]:
        """The numbers of so many rows as the replay stores them: ``[K, M]`` for each field."""
        stored: list[Bytes] = []
        for (raw, dtype_given), dtype, count in zip(numbers, self._dtypes, self._counts, strict=True):
            stored.append(np.ndarray((rows, count), dtype_given, raw).astype(dtype).view(np.uint8))
        return stored

    def warn(self) -> None:
        """Warn if an env was reset in mid-episode."""
        if self.broken < 0:
            return
        warnings.warn(
            f"env {self.broken} went on with another observation than the next_obs of the step before, although that "
            "step did not end its episode. The replay takes the observation that follows for the next one, so it now "
            "holds a transition that never happened. Most often the env was reset in mid-episode: store its last step "
            "with truncated=True, or call interrupt() before you add the next one. Or several threads add steps of one "
            "env: give each its own env with add(..., envs=[k]), or a lane of relive.Lanes. If next_obs and the next "
            "obs do differ, create the buffer with own_next_obs=True. check_ends=False turns the check off. See "
            "docs/episode-ends.md",
            EpisodeEndWarning,
            stacklevel=5,
        )


def _differ(these: list[Bytes], those: list[Bytes]) -> Bools:
    """Which rows of two observations ``[K, M]`` differ, bool ``[K]``."""
    differs = (these[0] != those[0]).any(1)
    for a, b in zip(these[1:], those[1:], strict=True):
        differs |= (a != b).any(1)
    return differs


class FirstSteps:
    """The checks of the first steps and ends of episodes that a replay stores, each until it has seen enough.

    Args:
        ring: where the steps are stored.
        all_envs: int64 ``[N]``, which most steps are of.
        resets: True to look for resets in mid-episode, too.
    """

    def __init__(self, ring: Ring, all_envs: Ints, resets: bool) -> None:
        self._ring, leaves = ring, ring.leaves
        self.ends: EndCheck | None = EndCheck(leaves) if ring.ordered else None
        self.reuse: ReuseCheck | None = ReuseCheck(leaves, ring.own_next and ring.ordered)
        """Looks at steps before they are stored, which are not added in one call then."""
        self.resets: ResetCheck | None = ResetCheck(leaves, all_envs) if resets else None
        self._stopped: ReuseCheck | None = None
        """The check that has just stopped: what it found is told once the step is stored."""

    @property
    def is_done(self) -> bool:
        """True if none of them looks at further steps."""
        return self.ends is None and self.reuse is None and self.resets is None

    @property
    def waits(self) -> bool:
        """True if :meth:`after` has to look at the steps that were just stored."""
        return self.resets is not None or self._stopped is not None or self._sees_ends

    @property
    def _sees_ends(self) -> bool:
        ends = self.ends
        return ends is not None and (bool(ends.ended_on) or self._ring.counters.item(EPISODES) != ends.episodes)

    def before(
        self,
        step: Mapping[str, object],
        envs: Ints,
        leaves: Sequence[Leaf],
        final: Sequence[Leaf] | None,
        kept: Bools | None,
    ) -> None:
        """Look at steps that are about to be stored, as :meth:`ReuseCheck.observe` does.

        Raises:
            EnvError: the observations are certainly overwritten.
        """
        reuse, ring = self.reuse, self._ring
        if reuse is not None and not reuse.observe(
            step, envs, leaves, final, kept, ring.under_way if ring.ordered else None
        ):
            self.reuse, self._stopped = None, reuse

    def after(self, envs: Ints, leaves: Sequence[Leaf], final: Sequence[Leaf] | None, kept: Bools | None) -> None:
        """Look at steps that were just stored, and warn of what was found."""
        stopped, resets, ends = self._stopped, self.resets, self.ends
        if stopped is not None:
            self._stopped = None
            stopped.warn()
        if resets is not None and not resets.observe(self._ring, envs, leaves, final, kept):
            self.resets = None
            resets.warn()
        if ends is None or not self._sees_ends:
            return
        if not ends.observe(self._ring.counters.item(EPISODES), envs, leaves, final, kept):
            self.ends = None
            ends.warn()
