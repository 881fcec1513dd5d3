"""Vector envs: their owner, their autoreset mode, their final observations and their infos.

The last part names what an env returned that its vector env could not hold, after the vector env has failed on it.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, TypeGuard, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import EnvError, EpisodeEndWarning, LifecycleError, NotFiniteError, ParameterError, ReliveError
from ..parameters import Rule, is_count, one_of, require, torch_device
from ..printable import shown
from ..steps.arrays import Array, Bools, as_host, to_tensor
from ..steps.ends import EPISODES_TO_WARN, MOST
from ..steps.schema import Path, Schema, descend, dotted, map_leaves

Info = Mapping[str, object]
"""The info of a reset or a step, by name."""

Seeds = int | list[int | None] | tuple[int | None, ...] | None
"""The seed of all envs, or one for each of them."""

Flags = Bools | Tensor
"""A flag for each env, bool ``[N]``."""

PLAYED_BY: WeakKeyDictionary[object, object] = WeakKeyDictionary()
"""Envs -> the token of the collector that reset them last."""


SAMPLED = 1024
"""How many numbers of an observation are compared, to see whether somebody else has played in the envs."""


FINAL_NAMES = ("final_obs", "final_observation", "AutoResetWrapper_final_obs")
"""The names of final observations in the info of a step: by Gymnasium and Isaac Lab; by Gymnasium before 1.0 and
ManiSkill; by Brax-style autoreset, as in MuJoCo Playground."""


class Finals(NamedTuple):
    """The final observations in the info of a step."""

    given: object
    """Nested as the observations are. The leaves are rows ``[N, ...]``, one for each env, or ``[K, ...]`` of ``envs``;
    or it is an object array or a list, by env."""
    envs: Tensor | None
    """The envs of the rows, int64 ``[K]``; None: all envs."""
    present: Flags | None
    """Which envs have one; None: all that ended an episode."""

    def where(self, num_envs: int) -> Bools:
        """Which envs have one, bool ``[N]``, in RAM."""
        return np.ones(num_envs, np.bool_) if self.present is None else as_host(self.present).astype(np.bool_)


def final_observations(info: Info, num_envs: int) -> Finals | None:
    """The final observations in the info of a step, under any of their names; None if there are none.

    No operation waits for a device.

    Args:
        info: as the step returned it. mjlab's ``info["terminal"]`` holds rows and the envs that they are of. All others
            hold rows by env, in some versions beside a mask, ``_final_obs``, of the envs that have one.
        num_envs: N.
    """
    for name in FINAL_NAMES:
        if info.get(name) is not None:
            return Finals(info[name], None, _present(info, name))
    given = info.get("terminal")
    if not isinstance(given, Mapping) or not {"env_ids", "observations"} <= given.keys():
        return None
    terminal = cast("Info", given)
    envs = to_tensor(terminal["env_ids"]).to(torch.int64)
    present = torch.zeros(num_envs, dtype=torch.bool, device=envs.device).index_fill(0, envs, True)
    return Finals(terminal["observations"], envs, present)


# What the envs return around an end, by the mode. Step 3 ends an episode on the final observation f; the next one
# begins on r, and its first action leads to s:
#
#     mode        step 3 returns               step 4 returns         step 5 returns
#     SAME_STEP   r, and f in the info         s
#     DISABLED    f; `restart` returns r       s
#     NEXT_STEP   f                            r, action ignored      s
#
# In all modes step 3 leads to f, and an episode begins at r. Under NEXT_STEP step 4 is no step, and its row is masked.
# Only under SAME_STEP is f elsewhere than the observation; there it may be missing.
class VectorEnvs:
    """The envs that a collector plays in. It hides the differences between their kinds.

    There are vector envs of Gymnasium, in three autoreset modes, and simulators, which have a ``device``. These step
    all envs at once in tensors and reset those that ended in the same step. A step returns what one of Gymnasium
    returns, or, as rsl_rl's ``VecEnv``, observations, rewards, ``dones`` and extras with ``time_outs``.

    Args:
        given: a vector env, a simulator, a single env, or a function that makes one of them.
        final_obs: "require" the final observation of truncated episodes, or "mask" the step where an env hides it.
        mode: the autoreset mode; None reads it from ``metadata``.

    Raises:
        ParameterError: ``final_obs`` or ``mode`` is not one of the choices.
        EnvError: the envs do not report their autoreset mode.
    """

    takes_tensors: bool

    def __init__(self, given: object, final_obs: Literal["require", "mask"], mode: object) -> None:
        self._factory: Callable[[], object] | None = given if is_factory(given) else None
        self.given: object = given if self._factory is None else self._factory()
        self.envs: Any = vectorized(self.given)
        self._unwrapped = getattr(self.given, "unwrapped", self.given)
        require("Collector", one_of("require", "mask"), final_obs=final_obs)
        self.final_obs: Literal["require", "mask"] = final_obs
        named = attribute(self.envs, "device")
        self.mode: str = autoreset_mode(self.envs, mode, "SameStep" if named is not None else None)
        if self.envs is not self.given:  # it has the mode in which it was wrapped
            self.mode = autoreset_mode(self.envs, None)
        self.device: torch.device | None = (
            torch_device("Collector", named) if named is not None and self.mode == "SameStep" else None
        )
        """Of all tensors of a simulator; None for vector envs of Gymnasium, whose flags come to RAM."""
        self.num_envs: int = int(attribute(self.envs, "num_envs"))
        self._player = object()
        self._watched: tuple[object, str, list[Any]] | None = None
        """The vector env, the name of its newest observations, and the time limits in it; None: not yet known."""
        self.left: list[object] = []
        """The state that the envs showed when the last collection ended."""
        self.ignored: Bools = np.zeros(self.num_envs, np.bool_)
        """The envs that ignored the last action, because NEXT_STEP autoreset made them begin an episode instead."""
        self._ended = self.ignored
        """Under NEXT_STEP, the envs whose episode ended with the last step; they ignore the next action."""
        self.takes_tensors = False
        """True if the envs return tensors, and so get their actions as tensors."""
        self._cuts = self._shows = False
        """Of a simulator: whether the last step can have truncated envs; whether one has shown final observations."""
        self._hidden: Tensor | None = None
        """True, on a device, if a simulator has hidden a final observation since, though it has shown others."""

    def reset(self, seed: Seeds, options: dict[str, Any] | None) -> tuple[object, Info]:
        """Start new episodes in all envs, which belong to this player from now on. Returns observations and info."""
        with suppress(TypeError):  # envs without weak references
            PLAYED_BY[self._unwrapped] = self._player
        if self.device is not None:
            return self._reset_simulator(seed, options)
        try:
            obs, info = self.envs.reset(seed=seed, options=options)
        except Exception as error:
            refuse_misfit(error)
            raise
        self.takes_tensors = isinstance(_first_leaf(obs), Tensor)
        self.ignored = self._ended = np.zeros(self.num_envs, np.bool_)
        return obs, info

    def _reset_simulator(self, seed: Seeds, options: dict[str, Any] | None) -> tuple[object, Info]:
        """Start new episodes, or, if the simulator has no ``reset``, go on from its current observations."""
        reset = getattr(self.envs, "reset", None)
        wanted = {name: value for name, value in (("seed", seed), ("options", options)) if value is not None}
        unknown = [name for name in wanted if not _resets_with(self.envs, name)]
        if unknown:
            raise EnvError(
                f"reset({unknown[0]}={wanted[unknown[0]]!r:.200}): this simulator's reset() does not take it; give it "
                "to the simulator itself, and leave it out here"
            )
        obs = self.envs.get_observations() if reset is None else reset(**wanted)
        info: Info = {}
        if _has_info(obs):
            obs, info = obs
        if not isinstance(_first_leaf(obs), Tensor):
            raise EnvError(
                f"the envs have a device, {self.device}, and return observations of type "
                f"{type(_first_leaf(obs)).__name__}; expected tensors [N, ...] on it"
            )
        self.takes_tensors, self._shows = True, False
        self._hidden = None
        return obs, info

    def require_own(self) -> None:
        """Refuse to continue episodes that somebody else has ended, or gone on with, since :attr:`left` was set."""
        with suppress(TypeError):
            if PLAYED_BY.get(self._unwrapped, self._player) is not self._player:
                raise LifecycleError(
                    "another Collector has reset these envs since, which ended the episodes of this one; give each its "
                    "own envs, or call reset() to start new episodes with this one"
                )
        if self.shown() != self.left:
            raise LifecycleError(
                "somebody has reset or stepped these envs since the last collection, such as an evaluation, so their "
                "episodes are not those of this Collector any more; evaluate in envs of their own, or call reset() to "
                "start new episodes"
            )

    def shown(self) -> list[object]:
        """The state that Gymnasium's own vector envs and time limits show; nothing of all other envs.

        It changes with a reset or a step, and with nothing else. Of observations it is a sample of their numbers.
        """
        if self._watched is None:
            self._watched = _watched(self.envs)
        envs, name, clocks = self._watched
        state: list[object] = [clock._elapsed_steps for clock in clocks]
        trees: list[Any] = [getattr(envs, name)] if name else []
        while trees:
            tree = trees.pop()
            branch = tree
            if isinstance(tree, np.ndarray):
                flat = branch.reshape(-1)
                state.append(flat[:: len(flat) // SAMPLED + 1].tobytes())
            elif isinstance(tree, dict | tuple):
                trees += tree.values() if isinstance(tree, dict) else tree
        return state

    def step(self, action: object) -> tuple[object, object, Any, Any, Info]:
        """Make one step in all envs. Returns observations, rewards, ``terminated``, ``truncated`` and info.

        The flags of a simulator are tensors on its device, all others are arrays.

        Raises:
            NotFiniteError: the envs failed on an action outside its space.
        """
        if self.device is not None:
            return self._step_simulator(map_leaves(partial(torch.Tensor.to, device=self.device), action))
        try:
            obs, reward, terminated, truncated, info = self.envs.step(action)
        except Exception as error:
            self._refuse_outside(action, error)
            refuse_misfit(error)
            raise
        if not (terminated.__class__ is truncated.__class__ is np.ndarray):
            terminated, truncated = as_host(terminated), as_host(truncated)
        # copied: the envs may write the next flags into the same memory
        terminated, truncated = terminated.astype(np.bool_), truncated.astype(np.bool_)
        if self.mode == "NextStep":
            self.ignored, self._ended = self._ended, terminated | truncated
        return obs, reward, terminated, truncated, info

    def _step_simulator(self, action: object) -> tuple[object, Tensor, Tensor, Tensor, Info]:
        answer = self.envs.step(action)
        if len(answer) == 4:  # of rsl_rl: it has one flag for both ends, and another for time limits, if it has any
            obs, reward, dones, info = answer
            done, late = dones.bool(), info.get("time_outs")
            truncated = None if late is None else late.bool() & done
            terminated = done if truncated is None else done & ~truncated
        else:
            obs, reward, terminated, truncated, info = answer
            terminated, truncated = terminated.bool(), None if truncated is None else truncated.bool()
        self._cuts = truncated is not None
        return obs, reward, terminated, torch.zeros_like(terminated) if truncated is None else truncated, info

    def restart(self, done: Bools) -> tuple[object, Info]:
        """Reset the envs of ``done``, ``[N]``, where no autoreset does it. Returns observations and info of all."""
        if self.num_envs == 1:  # no options: an env of its own may take any for a request
            return self.envs.reset()
        return self.envs.reset(options={"reset_mask": done})

    def everywhere(self) -> Flags:
        """True for each env, as the flags of a step are."""
        n = self.num_envs
        return np.ones(n, np.bool_) if self.device is None else torch.ones(n, dtype=torch.bool, device=self.device)

    def informed(self, done: Bools) -> Bools:
        """The envs in which an action follows the next observation, so its info must be there."""
        return np.ones_like(done) if self.mode == "SameStep" else ~done

    def final_observations(self, cut: Bools, obs: object, info: Info) -> tuple[Finals, Info, Bools]:
        """The final observations, the info that came with them, and which envs have one.

        Args:
            cut: the envs whose episode was truncated, and whose final observation is needed.
            obs: the observations that the step returned.
            info: the info that the step returned.

        Raises:
            EnvError: an env of ``cut`` hides its final observation, which is required.
        """
        if self.mode != "SameStep":
            return Finals(obs, None, None), info, np.ones_like(cut)
        found = final_observations(info, self.num_envs)
        present = np.zeros_like(cut) if found is None else found.where(self.num_envs)
        hidden = cut & ~present
        if hidden.any() and self.final_obs == "require":
            raise EnvError(_hides(int(np.flatnonzero(hidden)[0])))
        return found or Finals(None, None, present), final_info(info), present

    def final_tensors(self, cut: Tensor, info: Info) -> tuple[Finals | None, Tensor | None]:
        """The final observations of a simulator's step, and which truncated envs hide theirs, bool ``[N]``.

        None stands for no final observations, and for no envs. The host waits for the device only until a simulator has
        shown its first final observations, or if hidden ones are left out.

        Args:
            cut: the envs whose episode was truncated, and whose final observation is needed.
            info: the info that the step returned.

        Raises:
            EnvError: an env of ``cut`` hides its final observation, which is required, and so did all before it. If
                others have shown theirs, :meth:`refuse_hidden` raises it.
        """
        found = final_observations(info, self.num_envs)
        self._shows |= found is not None
        if not self._cuts or (found is not None and found.present is None):
            return found, None
        hidden = cut if found is None else cut & ~torch.as_tensor(found.present, device=cut.device)
        if self.final_obs == "require" and self._shows:
            self._hidden = hidden.any() if self._hidden is None else self._hidden | hidden.any()
        elif bool(hidden.any()):
            if self.final_obs == "mask":
                return found, hidden
            raise EnvError(_hides(int(hidden.nonzero()[0])))
        return found, None

    def refuse_hidden(self) -> None:
        """Refuse what a simulator has hidden since its reset; waits for its device.

        Raises:
            EnvError: an env was truncated and hid its final observation, which is required.
        """
        if self._hidden is not None and bool(self._hidden):
            raise EnvError(_hides(None))

    def _refuse_outside(self, action: object, error: Exception) -> None:
        """Name the action outside its space, after the envs failed on it with an error that does not.

        Boxes are left out: many policies leave them, and the envs clip. Other errors of the envs stay theirs.

        Raises:
            NotFiniteError: an action lies outside.
        """
        from gymnasium.spaces import Box  # gymnasium is imported where it is used

        space: Any = getattr(self.envs, "single_action_space", None)
        by_action = isinstance(error, AssertionError | IndexError | KeyError) and hasattr(space, "contains")
        for env in range(self.num_envs if by_action and not isinstance(space, Box) else 0):
            row = map_leaves(partial(_row_of, env), action)
            if not space.contains(row):
                raise NotFiniteError(
                    f"field 'action': the policy's action for env {env} is {row}, outside {space}, and the envs failed "
                    f"on it ({error!r:.200}); return actions within the space"
                ) from error

    def remake(self) -> object:
        """New envs like these.

        Raises:
            EnvError: it is unknown how to make them (they may be wrapped).
        """
        fresh = self._factory or _remade(self.given, self.mode)
        if fresh is None:
            raise EnvError(
                "warm() needs new envs, and it is unknown how these were made; pass warm(..., envs=function that "
                "makes them), or give such a function to the Collector"
            )
        return fresh


class FinalCheck:
    """Checks the first final observations that come beside the reset observation, as under SAME_STEP autoreset.

    An env that returns its own array has filled it again with the reset observation before anybody reads it. And a
    wrapper may scale observations, but not those in ``info``: they are outside the bounds of the space then, though
    the observations around them are inside. Episodes whose last step did not change the observation show nothing of
    the former. The counts are on the device of the observations, so that only :meth:`warn` waits for it.

    Args:
        bounds: the lowest and highest numbers of the observation space, ``[...]`` of each leaf that has some.
        device: of the observations.
        envs: the envs, which the warnings name.
    """

    def __init__(self, bounds: Mapping[Path, tuple[Tensor, Tensor]], device: torch.device, envs: object) -> None:
        self._envs = envs
        margin = 1e-5  # for numbers that were rounded
        self._bounds = {
            path: (low - margin * (1 + low.abs()), high + margin * (1 + high.abs()))
            for path, (low, high) in bounds.items()
        }
        self._counts = torch.zeros(4, dtype=torch.int64, device=device)
        """Of truncated episodes, of those whose last step changed the observation, of final observations among these
        that equal the reset, and of those that are outside."""
        self._env = torch.zeros(1, dtype=torch.int64, device=device)
        """An env that showed either mistake."""

    def look(
        self,
        envs: Tensor,
        cut: Tensor,
        before: Mapping[Path, Tensor],
        final: Mapping[Path, Tensor],
        after: Mapping[Path, Tensor],
    ) -> None:
        """Note some rows of one step. No operation waits for a device.

        Args:
            envs: int64 ``[K]``, the env of each row.
            cut: bool ``[K]``, True where an episode was truncated and not terminated. The others say nothing: some
                tasks are over where they began.
            before: the observations of the step ``[K, ...]``.
            final: those that it ended on.
            after: those of the next episode.
        """
        stood, restarted = (
            torch.stack([(x == other[path]).reshape(len(x), x[0].numel()).all(1) for path, x in final.items()]).all(0)
            for other in (before, after)
        )
        changed = cut & ~stood
        reset = changed & restarted
        beyond, *inside = self._outside(final, before, after)
        outside = cut & beyond & ~(inside[0] | inside[1])
        self._counts += torch.stack([x.sum() for x in (cut, changed, reset, outside)])
        wrong = reset | outside
        self._env = torch.where(wrong.any(), envs.index_select(0, wrong.long().argmax().reshape(1)), self._env)

    def _outside(self, *observations: Mapping[Path, Tensor]) -> list[Tensor]:
        """Which rows of each have a number outside the bounds, bool ``[K]``."""
        found: list[Tensor] = []
        for obs in observations:
            some = next(iter(obs.values()))
            rows = torch.zeros(len(some), dtype=torch.bool, device=some.device)
            for path, (low, high) in self._bounds.items():
                rows |= ((obs[path] < low) | (obs[path] > high)).reshape(len(rows), low.numel()).any(1)
            found.append(rows)
        return found

    def warn(self) -> bool:
        """Warn if all final observations so far are wrong, and they are enough. Returns whether to look at the next."""
        cuts, changed, reset, outside = (int(count) for count in self._counts.cpu())
        are_resets, are_outside = reset == changed >= EPISODES_TO_WARN, outside == cuts >= EPISODES_TO_WARN
        if not are_resets and not are_outside:
            return cuts < MOST and changed < EPISODES_TO_WARN
        envs, env = repr(self._envs)[:200], int(self._env)  # only now: it may take long, or need a reset before
        if are_resets:
            warnings.warn(
                f"the first {changed} final observations that {envs} handed out under SAME_STEP autoreset all equal "
                f"the reset observation of the next episode, such as that of env {env}. Most often the env returns its "
                "own array, which its reset() fills again: return a copy (obs.copy()), or make the vector env with "
                "autoreset_mode=NEXT_STEP or DISABLED. Until then values after time limits are those of a reset. If "
                "these episodes do end where the next ones start, all is well. See docs/episode-ends.md",
                EpisodeEndWarning,
                stacklevel=6,
            )
        else:
            warnings.warn(
                f"the first {cuts} final observations of truncated episodes that {envs} handed out under SAME_STEP "
                f"autoreset are all outside its observation space, such as that of env {env}, and the observations "
                "around them are inside. Most often a wrapper changes the observations that step() returns, and not "
                "info['final_obs']: change both, or wrap each single env instead. See docs/episode-ends.md",
                EpisodeEndWarning,
                stacklevel=6,
            )
        return False


SEED_RULE: Rule = (lambda seed: seed is None or is_count(seed), "expected a whole number of at least 0, or None")


def require_start(call: str, num_envs: int, seed: Seeds, options: object = None) -> Seeds:
    """The seed of a reset as Gymnasium takes it: an int, or None, or a list of these, one for each env.

    Raises:
        ParameterError: the seed is something else, or the options are no dict.
    """
    require(call, (lambda options: options is None or isinstance(options, dict), "expected a dict"), options=options)
    seeds = list(seed) if isinstance(seed, list | tuple) else [seed]
    if isinstance(seed, list | tuple) and len(seeds) != num_envs:
        raise ParameterError(f"{call}(seed={seed!r:.200}): expected {num_envs} seeds, one for each env, or one seed")
    for one in seeds:
        require(call, SEED_RULE, seed=one)
    checked = [None if one is None else int(one) for one in seeds]
    return checked if isinstance(seed, list | tuple) else checked[0]


def is_factory(envs: object) -> TypeGuard[Callable[[], object]]:
    """True for a function that makes envs, False for envs."""
    return callable(envs) and not hasattr(envs, "step")


def vectorized(envs: Any) -> Any:
    """A vector env or a simulator as it is, also in wrappers of a single env; a single env as a vector of one.

    Raises:
        EnvError: it is neither.
    """
    if attribute(envs, "num_envs") is not None:
        return envs
    if not callable(getattr(envs, "step", None)):
        raise EnvError(
            f"envs: expected a gymnasium.vector.VectorEnv, a gymnasium.Env, or a function that makes either, got "
            f"{envs!r:.200}; make them first, such as gymnasium.make_vec('CartPole-v1', num_envs=8). A simulator of "
            "tensors needs num_envs, device, reset and step"
        )
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    # the other modes reset an env that returns its own array before anybody has read what the episode ended on
    return SyncVectorEnv([lambda: envs], autoreset_mode=AutoresetMode.DISABLED)


def _remade(envs: Any, mode: str) -> object:
    """New envs like these, or None if it is unknown how to make them."""
    makers = _attributes(envs).get("env_fns")
    if makers is not None:
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        fresh = SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
        if not any(a.unwrapped is b.unwrapped for a, b in zip(fresh.envs, getattr(envs, "envs", ()), strict=False)):
            return fresh
    elif getattr(envs, "spec", None) is not None:
        import gymnasium

        try:
            if not hasattr(envs, "num_envs"):
                return gymnasium.make(envs.spec)
            if envs.unwrapped is envs:
                return gymnasium.make_vec(envs.spec)
        except (ValueError, gymnasium.error.Error):  # a wrapper that does not say how it was made
            return None
    return None


def inner(envs: Any) -> Any:
    """The envs whose spaces are those of one env: those in the wrappers, if these are of a single env."""
    return envs if hasattr(envs, "num_envs") else envs.unwrapped


def member(space: object, inner: Path) -> object:
    """The space of a leaf of nested observations; None if it is unknown."""
    for name in inner:
        spaces: Any = getattr(space, "spaces", None)
        try:
            space = spaces[name] if hasattr(spaces, "keys") else spaces[int(name)]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return space


def _watched(envs: object) -> tuple[object, str, list[Any]]:
    """The vector env inside, the name of its newest observations or "", and the time limits of its single envs."""
    base: Any = getattr(envs, "unwrapped", envs)
    kinds = {kind.__name__ for kind in type(base).__mro__ if kind.__module__.startswith("gymnasium.vector.")}
    name = "_observations" if "SyncVectorEnv" in kinds else "observations" if "AsyncVectorEnv" in kinds else ""
    clocks: list[object] = []
    for env in base.envs if "SyncVectorEnv" in kinds else ():
        layers: list[object] = [env]
        while layers[-1] is not None:
            layers.append(_attributes(layers[-1]).get("env"))
        clocks += [layer for layer in layers[:-1] if "_elapsed_steps" in _attributes(layer)]
    return base, name if hasattr(base, name or "_") else "", clocks


def _attributes(env: object) -> dict[str, Any]:
    """The attributes of an env itself, without those that a wrapper passes on; an env with slots has none here."""
    return getattr(env, "__dict__", {})


def attribute(envs: object, name: str) -> Any:
    """An attribute of envs, or of the envs in their wrappers; None if neither has it."""
    found = getattr(envs, name, None)
    return getattr(getattr(envs, "unwrapped", None), name, None) if found is None else found


def _has_info(answer: object) -> TypeGuard[tuple[object, Info]]:
    """True if a reset returned observations and info, and not the observations alone, which may be a tuple as well."""
    pair: Any = answer
    return isinstance(answer, tuple) and len(pair) == 2 and isinstance(pair[1], Mapping)


def seed_for(envs: object, seed: int | None) -> int | None:
    """The seed for the reset of some envs, or None for a simulator that takes none."""
    return seed if attribute(envs, "device") is None or _resets_with(envs, "seed") else None


def _resets_with(envs: object, name: str) -> bool:
    """True if the envs have a ``reset`` that takes a keyword of this name, or any."""
    reset = getattr(envs, "reset", None)
    if reset is None:
        return False
    parameters = inspect.signature(reset).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def autoreset_mode(envs: object, given: object, default: str | None = None) -> str:
    """The value of the gymnasium.vector.AutoresetMode: "NextStep", "SameStep" or "Disabled".

    Args:
        envs: which report it.
        given: the mode instead; None reads what the envs report.
        default: the mode of envs that report none.

    Raises:
        ParameterError: ``given`` is not such a mode.
        EnvError: nothing is given, and the env does not report a mode, or not such a one.
    """
    metadata: Info = getattr(envs, "metadata", None) or {}
    reported = metadata.get("autoreset_mode", default) if given is None else given
    mode = getattr(reported, "value", reported)
    if not isinstance(mode, str) or mode not in ("NextStep", "SameStep", "Disabled"):
        if given is not None:
            raise ParameterError(f"autoreset_mode is a gymnasium.vector.AutoresetMode or None, got {given!r:.200}")
        raise EnvError(
            f"the vector env's metadata['autoreset_mode'] is {mode!r}; expected a gymnasium.vector.AutoresetMode. "
            "Without it, episode ends are ambiguous: set it, or pass Collector(..., autoreset_mode=...)"
        )
    return mode


def final_info(info: Info) -> Info:
    """The info that came with the final observations, as far as the step returned it."""
    found = info.get("final_info")
    return cast("Info", found) if isinstance(found, dict) else {}


def _hides(env: int | None) -> str:
    """The message for an env, or some env, that hides its final observation."""
    some, known = "an env" if env is None else f"env {env}", ", ".join((*FINAL_NAMES, "terminal"))
    return (
        f"{some} was truncated and its final observation is hidden: info has it under none of the names {known}, "
        "and the next observation belongs to another episode. Turn it on in the simulator's configuration "
        "(Isaac Lab: compute_final_obs = True; mjlab: capture_terminal_observations = True), use an env that reports "
        "it, or leave such steps out: Collector(..., final_obs='mask')"
    )


def info_field(info: Info, name: str, num_envs: int) -> tuple[object, Bools]:
    """One entry of a vector env's info, or None, and the envs that report it."""
    if name not in info:
        return None, np.zeros(num_envs, np.bool_)
    return info[name], Finals(None, None, _present(info, name)).where(num_envs)


def _present(info: Mapping[str, Any], name: str) -> Flags | None:
    """The envs that report an entry, bool ``[N]``: Gymnasium's mask ``_name`` beside it, or else those not None.

    None stands for all of them.
    """
    if f"_{name}" in info:
        return info[f"_{name}"]
    given = info[name]
    if is_by_env(given):
        return np.array([row is not None for row in given])
    return None


def is_by_env(given: object) -> bool:
    """True for one object an env, in an object array or a list."""
    array: Any = given
    return isinstance(given, list) or (isinstance(given, np.ndarray) and array.dtype == object)


def pick(given: Any, inner: Path, envs: NDArray[np.intp]) -> Tensor:
    """Rows of one leaf, out of an object array by env or out of a batch."""
    if is_by_env(given):
        return torch.stack([copied(descend(given[n], inner)) for n in envs])
    leaf = copied(descend(given, inner))
    return leaf[torch.as_tensor(envs, device=leaf.device)]


def copied(x: object) -> Tensor:
    """A copy as a tensor. Many envs write the next observation into the memory of this one."""
    return x.clone() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))


def _first_leaf(tree: Any) -> object:
    """The first leaf of nested mappings and tuples."""
    while isinstance(tree, tuple) or hasattr(tree, "keys"):  # a TensorDict is no Mapping
        branches = cast("Any", tree if isinstance(tree, tuple) else tree.values())
        tree = next(iter(branches))
    return tree


def _row_of(env: int, rows: object) -> Array:
    return np.asarray(as_host(rows)[env])


# -- misfits ----------------------------------------------------------------------------------------------------

COLUMNS = {"_rewards": "reward", "_terminations": "terminated", "_truncations": "truncated"}
"""The name of a column in Gymnasium's vector env -> the field."""


def refuse_misfit(error: Exception) -> None:
    """Name the field and the space, after a vector env of Gymnasium failed in this process on what an env returned.

    It is read from where the error was raised, so that steps cost nothing. Other errors stay the envs' own.

    Raises:
        EnvError: a reward or a flag is not one value, or an observation is not as the space says.
    """
    if isinstance(error, ReliveError):
        return
    walked = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in walked]
    held = [k for k, file in enumerate(files) if file.endswith("gymnasium/vector/sync_vector_env.py")]
    if not held:
        return
    frame = walked[held[-1]][0]
    vector: Any = frame.f_locals.get("self")
    if held[-1] == len(walked) - 1:  # the vector env itself failed, as it took one env's answer apart
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        field = next((field for name, field in COLUMNS.items() if f"{name}[" in line), None)
        if field is not None and isinstance(error, ValueError | TypeError):
            kind = "float" if field == "reward" else "bool"
            raise EnvError(
                f"field '{field}': step() of env {frame.f_locals.get('i')} returned something else than one {kind} "
                f"({error!s:.200}); return one without a shape, such as {kind}({field}[0]) of an array of shape (1,)"
            ) from error
    elif any("gymnasium/vector/utils/" in file for file in files[held[-1] :]):
        for env, obs in enumerate(getattr(vector, "_env_obs", ())):
            found = _misfit(vector.single_observation_space, obs, ("obs",))
            if found is not None:
                path, space, given = found
                raise EnvError(
                    f"field '{dotted(path)}': env {env} returned {given}, but its observation_space has {space!s:.200} "
                    "there; set observation_space in the env, or in the wrapper that changes the observation, to what "
                    "reset() and step() return"
                ) from error


def refuse_unlike(obs: object, schema: Schema, error: Exception) -> NoReturn:
    """Name the first field of an observation of the envs that is not nested as the schema, or is no array.

    Raises:
        EnvError: with what came; or the error itself, if it is another one.
    """
    for path, leaf in schema.leaves.items():
        if path[0] != "obs":
            continue
        try:
            given: Any = descend(obs, path[1:])
            fits = not isinstance(given, Mapping) and np.asarray(given).dtype != object
        except (KeyError, IndexError, ValueError, TypeError):
            given, fits = obs, False
        if not fits:
            raise EnvError(
                f"field '{dotted(path)}': the envs returned {_kind(given)}, but the schema, which follows their "
                f"observation_space, has {leaf!r} there; set observation_space to what reset() and step() return, and "
                "make the schema again"
            ) from error
    raise error


def _misfit(space: object, obs: Any, path: Path) -> tuple[Path, object, str] | None:
    """The first leaf that is not as its space, with the space and what came; None if all are."""
    members: Any = obs
    spaces: Any = getattr(space, "spaces", None)
    if spaces is not None:
        by_name = hasattr(spaces, "keys")
        if not isinstance(obs, Mapping if by_name else tuple | list):
            return path, space, _kind(obs)
        for key, inner in spaces.items() if by_name else enumerate(spaces):
            try:
                member = members[key]
            except (KeyError, IndexError):
                return (*path, str(key)), inner, f"none in {_kind(obs)}"
            found = _misfit(inner, member, (*path, str(key)))
            if found is not None:
                return found
        return None
    shape = getattr(space, "shape", None)
    same = shape is None or (not isinstance(obs, Mapping) and np.shape(obs) == shape)
    return None if same else (path, space, _kind(obs))


def _kind(given: Any) -> str:
    """A value in words."""
    names: Any = given
    if isinstance(given, Mapping):
        return f"a {given.__class__.__name__} of {shown(list(names), 200)}"
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"an array of shape {tuple(shape)}"
