"""EndCheck and ReuseCheck: find common mistakes in the first episodes and steps that a buffer stores."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from ..errors import EnvError, EpisodeEndWarning
from .arrays import Array, Ints, Leaf, as_host, numpy_dtype, numpy_view
from .schema import Field, Path, descend

EPISODES_TO_WARN = 3
"""The warning comes after this many episodes, if each began with the final observation of the one before."""


MOST = 16
"""The check stops after this many ends. If they have shown nothing, more would only cost time."""


CALLS_TO_RAISE = 3
"""An error comes after this many calls in which obs and next_obs were the same memory and it had changed."""


STEPS_TO_WARN = 8
"""A warning comes after this many steps of each env whose next_obs equalled their obs, though the env moved on."""


CALLS_CHECKED = 64
"""The check of reused arrays stops after this many calls that add steps, and looks at this many rows of each."""


ENVS_CHECKED = 16
"""It looks at this many envs."""


IGNORED = (
    "Under NEXT_STEP autoreset, Gymnasium's default, the env ignores the step after an end: leave it out with "
    "add(..., mask=~ended), ended being terminated | truncated of the step before."
)
"""The part that both warnings of :class:`EndCheck` share."""


# In loops over seven environments, the first three ends showed every wrong loop and no right one. While the check
# looks, an `add` takes 0.2 µs longer.
class EndCheck:
    """Checks that an episode does not begin with the final observation of the one before it in its env.

    Two mistakes make every episode begin so. Under ``NEXT_STEP`` autoreset the env ignores the step after an end; if
    that step is stored, the next episode seems to begin with the final observation. Under ``SAME_STEP`` autoreset
    ``step()`` returns the next episode's first observation; if that is passed as ``next_obs``, it becomes the final
    observation. One episode that begins with another observation rules both mistakes out, and the check stops. Episodes
    whose last step did not change the observation are skipped, such as those of a bandit. A rollout compares values in
    place of observations: it knows no more of what an episode ended on.

    Args:
        leaves: the stored fields of a step, in order.
    """

    def __init__(self, leaves: Mapping[Path, Field]) -> None:
        self._flags, self._obs, self._own, self._dtypes = places_in(leaves)
        self.ended_on: dict[int, bytes] = {}
        """Env -> the bytes of the final observation of its last episode, until its next one begins."""
        self.episodes = 0
        """The number of episodes that had ended when steps were last checked."""
        self._looked = self._alike = 0

    def observe(
        self, episodes: int, envs: Ints, leaves: Sequence[Leaf], final: Sequence[Leaf] | None, mask: Array | None
    ) -> bool:
        """Check steps that were just stored, in the order of time. Returns whether to check the next ones, too.

        There is nothing to check if :attr:`episodes` have ended as before and :attr:`ended_on` is empty.

        Args:
            episodes: how many episodes have ended so far.
            envs: int64 ``[K]``, the env of each step.
            leaves: the checked leaves ``[K, ...]``.
            final: the leaves of the final observations; None if no episode ended, or if each step has a next
                observation of its own.
            mask: bool ``[K]``, False for steps that were left out.
        """
        self.episodes: int = episodes
        terminated, truncated = (as_host(leaves[i]) for i in self._flags)
        ends = terminated | truncated if mask is None else (terminated | truncated) & mask
        obs = [leaves[i] for i in self._obs]
        after = [leaves[i] for i in self._own] if final is None else final

        def next_step(env: int, since: int) -> int | None:
            mine = np.flatnonzero(envs[since:] == env if mask is None else (envs[since:] == env) & mask[since:])
            return since + int(mine[0]) if len(mine) else None

        waiting = [(env, 0, ended_on) for env, ended_on in self.ended_on.items()]
        for row in np.flatnonzero(ends)[: MOST - self._looked].tolist():
            ended_on = _bytes(after, row, self._dtypes)
            self._looked += 1
            if ended_on != _bytes(obs, row, self._dtypes):
                waiting.append((int(envs[row]), row + 1, ended_on))
        for env, since, ended_on in waiting:
            row = next_step(env, since)
            if row is None:
                self.ended_on[env] = ended_on
                continue
            self.ended_on.pop(env, None)
            if _bytes(obs, row, self._dtypes) != ended_on:
                return False
            self._alike += 1
            if self._alike == EPISODES_TO_WARN:
                return False
        return self._looked < MOST or bool(self.ended_on)

    def warn(self, *, of_values: bool = False) -> None:
        """Warn if enough episodes began with the final observation, or in a rollout the final value, before them."""
        if self._alike < EPISODES_TO_WARN:
            return
        replay = (
            f"the first {EPISODES_TO_WARN} episodes all began on the very observation that the last one of their env "
            f"had ended on. Two mistakes do that. {IGNORED} Under SAME_STEP autoreset, step() returns the next "
            "episode's first observation: pass next_obs with info['final_obs'] where an episode ended. If these "
            "episodes do end where they start, create the buffer with check_ends=False. See docs/episode-ends.md"
        )
        rollout = (
            f"the first {EPISODES_TO_WARN} truncated episodes were all followed by a step whose value is the "
            f"final_value that they ended on. {IGNORED} If these episodes do end where the next ones start, set "
            "rollout.check_ends = False. See docs/episode-ends.md"
        )
        # to the caller of finish(), which is hinted, or of add()
        warnings.warn(rollout if of_values else replay, EpisodeEndWarning, stacklevel=5)


class ReuseCheck:
    """Checks that observations were not overwritten before they were added, by an env that fills one array each time.

    ``step()`` of such an env turns ``obs`` into the next observation. Added after that, each ``obs`` equals its
    ``next_obs``, and belongs to the action and reward of the step before. In a right loop ``next_obs`` may equal
    ``obs``, too: the env stood still, and the next step begins on the same observation. So a step in mid-episode
    counts if its ``next_obs`` equals its ``obs`` and the next step of its env begins on another. And a replay may read
    ``next_obs`` only at ends: a loop may then pass anything elsewhere, such as ``obs``. There, steps count only if
    ``obs`` is in the same memory as at the step before. One step that led to another observation, or that has no
    ``next_obs``, ends the check.

    Args:
        leaves: the stored fields of a step, in order.
        all_read: whether the replay reads the ``next_obs`` of every step, and has them in order.
    """

    def __init__(self, leaves: Mapping[Path, Field], all_read: bool) -> None:
        self._flags, self._obs, self._own, self._dtypes = places_in(leaves)
        self._inner = [path[1:] for path in leaves if path[0] == "obs"]
        self._all_read = all_read
        self._held: tuple[object, Sequence[object]] = None, ()
        """The observation of the call before, and its leaves as they were given. While they are held, no other array
        gets their memory."""
        self._shared = False
        """True if they were in the same memory as their next observations."""
        self._stood: dict[int, bytes] = {}
        """Env -> the bytes of its newest ``obs``, if the step ended no episode and its ``next_obs`` was equal."""
        self._left, self._sure, self._moved = CALLS_CHECKED, 0, 0.0
        self.found = False
        """True if there is a warning to give."""

    def observe(
        self,
        step: Mapping[str, object],
        envs: Ints,
        leaves: Sequence[Leaf],
        final: Sequence[Leaf] | None,
        mask: Array | None,
        under_way: Array | None,
    ) -> bool:
        """Check steps that are about to be stored, in the order of time. Returns whether to check the next ones, too.

        Args:
            step: the steps as they were given.
            envs: int64 ``[K]``, the env of each step.
            leaves: the checked leaves ``[K, ...]``.
            final: the leaves of ``next_obs``; None if the steps have none, or each stores its own.
            mask: bool ``[K]``, False for steps that are left out.
            under_way: bool ``[N]``, which episodes are under way before these steps; None if steps have no order.

        Raises:
            EnvError: the observations are certainly overwritten.
        """
        obs, after = [leaves[i] for i in self._obs], [leaves[i] for i in self._own] if final is None else final
        self._left -= 1
        if not after or not self._left:
            return False
        given, (held, before_obs), before_shared = step["obs"], self._held, self._shared
        given_obs, given_after = ([descend(step[x], path) for path in self._inner] for x in ("obs", "next_obs"))
        reused = given is held or (bool(before_obs) and all(map(_same_memory, before_obs, given_obs)))
        shared = given is step["next_obs"] or all(map(_same_memory, given_obs, given_after))
        self._held, self._shared = (given, given_obs), shared
        terminated, truncated = (as_host(leaves[i]) for i in self._flags)
        rows, moved = np.flatnonzero(envs < ENVS_CHECKED), 0
        for row in rows[:CALLS_CHECKED].tolist():
            env, now = int(envs[row]), _bytes(obs, row, self._dtypes)
            before = self._stood.pop(env, None)
            if before is not None and (reused or self._all_read) and (under_way is None or under_way[env]):
                moved += now != before
            if (mask is not None and not mask[row]) or terminated[row] or truncated[row]:
                continue
            if _bytes(after, row, self._dtypes) != now:
                return False
            self._stood[env] = now
        if len(rows) > CALLS_CHECKED:  # the next call does not follow the rows that were looked at
            self._stood.clear()
        self._sure += reused and shared and before_shared and moved > 0
        self._moved += moved / max(len(np.unique(envs[rows[:CALLS_CHECKED]])), 1)
        # where each step stores a next observation of its own, a bandit may pass any, so there is only a warning
        if self._sure >= CALLS_TO_RAISE and not self._own:
            raise EnvError(
                "obs and next_obs are the same memory, and what it holds changes from step to step: the env fills one "
                "array again and again, so obs had become the next observation before it was added. Copy it before "
                "step(): obs = obs.copy(); Gymnasium's vector envs do so with copy=True, their default. The steps "
                "before this one are stored wrongly: clear() them. If next_obs is a stand-in where no episode ends, "
                "leave it out there, or create the buffer with check_ends=False. See docs/episode-ends.md"
            )
        self.found: bool = self._moved >= STEPS_TO_WARN
        return not self.found

    def warn(self) -> None:
        """Warn if the observations seem to be overwritten."""
        if not self.found:
            return
        warnings.warn(
            f"the next_obs of the first {CALLS_CHECKED - self._left} steps equals their obs, and yet they begin on "
            "several observations. Most often the env fills one array again and again, so that obs has "
            "become the next observation before it is added: copy it before step(), obs = obs.copy(). Gymnasium's "
            "vector envs do so with copy=True, their default. Or obs was replaced before add(). The steps so far are "
            "stored wrongly: clear() them. If they are right, create the buffer with check_ends=False. See "
            "docs/episode-ends.md",
            EpisodeEndWarning,
            stacklevel=5,
        )


def places_in(leaves: Mapping[Path, Field]) -> tuple[list[int], list[int], list[int], list[np.dtype]]:
    """The places of flags, observation and next observation among the leaves of a step, and the stored dtypes."""
    paths = list(leaves)
    flags = [paths.index((name,)) for name in ("terminated", "truncated")]
    obs, own = ([i for i, path in enumerate(paths) if path[0] == name] for name in ("obs", "next_obs"))
    return flags, obs, own, [numpy_dtype(leaves[paths[i]].dtype) for i in obs]


def _bytes(values: Sequence[Leaf], row: int, dtypes: Sequence[np.dtype]) -> bytes:
    """The bytes of an observation, as the replay stores them."""
    rows = (numpy_view(x[row].detach().cpu()) if isinstance(x, Tensor) else x[row] for x in values)
    return b"".join(np.asarray(x, dtype).tobytes() for x, dtype in zip(rows, dtypes, strict=True))


def _same_memory(a: object, b: object) -> bool:
    """True if two arrays or tensors of one shape begin at the same address, and are not empty."""
    first, second = (
        x.data_ptr() if isinstance(x, Tensor) else x.ctypes.data if isinstance(x, np.ndarray) and x.size else 0
        for x in (a, b)
    )
    return first == second != 0
