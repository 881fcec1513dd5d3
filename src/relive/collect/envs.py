"""Vector envs: their owner, their autoreset mode, their final observations and their infos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import EnvError, LifecycleError, NotFiniteError, ParameterError
from ..parameters import Rule, is_count, one_of, require
from ..steps.arrays import Array, Bools, as_host
from ..steps.schema import Path, descend, map_leaves

__all__ = [
    "VectorEnvs",
    "copied",
    "info_field",
    "is_factory",
    "pick",
    "require_start",
    "unknown_info",
    "vectorized",
]


PLAYED_BY: WeakKeyDictionary[Any, object] = WeakKeyDictionary()
"""Envs -> the token of the collector that reset them last."""


class VectorEnvs:
    """The envs that a collector plays in. It hides the differences between Gymnasium's three autoreset modes.

    Args:
        given: a vector env, a single env, or a function that makes either.
        final_obs: "require" the final observation of truncated episodes, or "mask" the step where an env hides it.
        mode: the autoreset mode; None reads it from ``metadata``.

    Raises:
        ParameterError: ``final_obs`` or ``mode`` is not one of the choices.
        EnvError: the envs do not report their autoreset mode.
    """

    def __init__(self, given: Any, final_obs: Literal["require", "mask"], mode: Any) -> None:
        self._factory: Callable[[], Any] | None = given if is_factory(given) else None
        self.given = given if self._factory is None else self._factory()
        self.envs = vectorized(self.given)
        self._unwrapped = getattr(self.given, "unwrapped", self.given)
        require("Collector", one_of("require", "mask"), final_obs=final_obs)
        self.final_obs: Literal["require", "mask"] = final_obs
        self.mode = autoreset_mode(self.envs, mode)
        self._player = object()
        self.ignored: Bools = np.zeros(self.envs.num_envs, np.bool_)
        """The envs whose next action is ignored, because NEXT_STEP autoreset resets them."""
        self.takes_tensors = False
        """True if the envs return tensors, and so get their actions as tensors."""

    def reset(self, seed: int | list[int | None] | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in all envs, which belong to this player from now on. Returns observations and info."""
        with suppress(TypeError):  # envs without weak references
            PLAYED_BY[self._unwrapped] = self._player
        obs, info = self.envs.reset(seed=seed, options=options)
        self.takes_tensors = isinstance(_first_leaf(obs), Tensor)
        self.ignored = np.zeros(self.envs.num_envs, np.bool_)
        return obs, info

    def require_own(self) -> None:
        """Refuse to continue episodes that another collector has ended."""
        with suppress(TypeError):
            if PLAYED_BY.get(self._unwrapped, self._player) is not self._player:
                raise LifecycleError(
                    "another Collector has reset these envs since, which ended the episodes of this one; give each its "
                    "own envs, or call reset() to start new episodes with this one"
                )

    def step(self, action: Any) -> tuple[Any, Any, Bools, Bools, dict[str, Any]]:
        """Make one step in all envs. Returns observations, rewards, ``terminated``, ``truncated`` and info.

        Raises:
            NotFiniteError: the envs failed on an action outside its space.
        """
        try:
            obs, reward, terminated, truncated, info = self.envs.step(action)
        except Exception as error:
            self._refuse_outside(action, error)
            raise
        # copied: the envs may write the next flags into the same memory
        return obs, reward, as_host(terminated).astype(np.bool_), as_host(truncated).astype(np.bool_), info

    def start(self, done: Bools) -> Bools:
        """The envs that begin an episode with the next observation, bool ``[N]``, after those in ``done`` ended one."""
        if self.mode != "NextStep":
            return done
        starts, self.ignored = self.ignored, done
        return starts

    def informed(self, done: Bools) -> Bools:
        """The envs in which an action follows the next observation, so its info must be there."""
        return np.ones_like(done) if self.mode == "SameStep" else ~done

    def final_observations(self, cut: Bools, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any], Bools]:
        """The final observations, the info that came with them, and which envs have one.

        Args:
            cut: the envs whose episode was truncated, and whose final observation is needed.
            obs: the observations that the step returned.
            info: the info that the step returned.

        Raises:
            EnvError: an env of ``cut`` hides its final observation, which is required.
        """
        if self.mode != "SameStep":
            return obs, info, np.ones_like(cut)
        given, present = _final_observations(info, self.envs.num_envs)
        final_info = info.get("final_info")
        hidden = cut & ~present
        if hidden.any() and self.final_obs == "require":
            raise EnvError(
                f"env {int(np.flatnonzero(hidden)[0])} was truncated and its final observation is hidden: neither "
                "info['final_obs'] nor info['final_observation'] has it, and the next observation belongs to "
                "another episode. Use an env that reports it, or Collector(..., final_obs='mask')"
            )
        return given, cast("dict[str, Any]", final_info if isinstance(final_info, dict) else {}), present

    def _refuse_outside(self, action: Any, error: Exception) -> None:
        """Name the action outside its space, after the envs failed on it with an error that does not.

        Boxes are left out: many policies leave them, and the envs clip. Other errors of the envs stay theirs.

        Raises:
            NotFiniteError: an action lies outside.
        """
        from gymnasium.spaces import Box  # gymnasium is imported where it is used

        space: Any = getattr(self.envs, "single_action_space", None)
        by_action = isinstance(error, AssertionError | IndexError | KeyError) and hasattr(space, "contains")
        for env in range(self.envs.num_envs if by_action and not isinstance(space, Box) else 0):
            row = map_leaves(partial(_row_of, env), action)
            if not space.contains(row):
                raise NotFiniteError(
                    f"field 'action': the policy's action for env {env} is {row}, outside {space}, and the envs failed "
                    f"on it ({error!r:.200}); return actions within the space"
                ) from error

    def remake(self) -> Any:
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


SEED_RULE: Rule = (lambda seed: seed is None or is_count(seed), "expected a whole number of at least 0, or None")


def require_start(call: str, num_envs: int, seed: Any, options: Any = None) -> Any:
    """The seed of a reset as Gymnasium takes it: an int, or None, or a list of these, one for each env.

    Raises:
        ParameterError: the seed is something else, or the options are no dict.
    """
    require(call, (lambda options: options is None or isinstance(options, dict), "expected a dict"), options=options)
    if isinstance(seed, list | tuple):
        seeds = list(cast("Any", seed))
        if len(seeds) != num_envs:
            raise ParameterError(
                f"{call}(seed={seed!r:.200}): expected {num_envs} seeds, one for each env, or one seed"
            )
    else:
        seeds = [seed]
    for one in seeds:
        require(call, SEED_RULE, seed=one)
    checked = [None if one is None else int(one) for one in seeds]
    return checked if isinstance(seed, list | tuple) else checked[0]


def is_factory(envs: Any) -> bool:
    """True for a function that makes envs, False for envs."""
    return callable(envs) and not hasattr(envs, "step")


def vectorized(envs: Any) -> Any:
    """A vector env as it is; a single env as a vector of one.

    Raises:
        EnvError: it is neither.
    """
    if hasattr(envs, "num_envs"):
        return envs
    if not callable(getattr(envs, "step", None)):
        raise EnvError(
            f"envs: expected a gymnasium.vector.VectorEnv, a gymnasium.Env, or a function that makes either, got "
            f"{envs!r:.200}; make them first, such as gymnasium.make_vec('CartPole-v1', num_envs=8)"
        )
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv([lambda: envs], autoreset_mode=AutoresetMode.SAME_STEP)


def _remade(envs: Any, mode: str) -> Any:
    """New envs like these, or None if it is unknown how to make them."""
    makers: Any = cast("dict[str, Any]", vars(envs)).get("env_fns")
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


def autoreset_mode(envs: Any, given: Any) -> str:
    """The value of the gymnasium.vector.AutoresetMode: "NextStep", "SameStep" or "Disabled".

    Raises:
        ParameterError: ``given`` is not such a mode.
        EnvError: nothing is given, and the env does not report a mode, or not such a one.
    """
    metadata: dict[str, Any] = envs.metadata or {}
    reported = metadata.get("autoreset_mode") if given is None else given
    mode: Any = getattr(reported, "value", reported)
    if not isinstance(mode, str) or mode not in ("NextStep", "SameStep", "Disabled"):
        if given is not None:
            raise ParameterError(f"autoreset_mode is a gymnasium.vector.AutoresetMode or None, got {given!r:.200}")
        raise EnvError(
            f"the vector env's metadata['autoreset_mode'] is {mode!r}; expected a gymnasium.vector.AutoresetMode. "
            "Without it, episode ends are ambiguous: set it, or pass Collector(..., autoreset_mode=...)"
        )
    return mode


def _final_observations(info: Mapping[str, Any], num_envs: int) -> tuple[Any, Bools]:
    """The final observations by env, and the envs that have one. Each Gymnasium version has its own name for them."""
    return info_field(info, "final_obs" if "final_obs" in info else "final_observation", num_envs)


def info_field(info: Mapping[str, Any], name: str, num_envs: int) -> tuple[Any, Bools]:
    """One entry of a vector env's info, or None, and the envs that report it."""
    if name not in info:
        return None, np.zeros(num_envs, np.bool_)
    return info[name], _present(info, name, num_envs)


def _present(info: Mapping[str, Any], name: str, num_envs: int) -> Bools:
    """The envs that report an entry, bool ``[N]``: Gymnasium's mask ``_name`` beside it, or else those not None."""
    if f"_{name}" in info:
        return as_host(info[f"_{name}"]).astype(np.bool_)
    given = info[name]
    if isinstance(given, np.ndarray) and given.dtype == object:
        return np.array([row is not None for row in cast("Any", given)])
    return np.ones(num_envs, np.bool_)


def pick(given: Any, inner: Path, envs: NDArray[np.intp]) -> Tensor:
    """Rows of one leaf, out of an object array by env or out of a batch."""
    if isinstance(given, list) or (isinstance(given, np.ndarray) and given.dtype == object):
        by_env = cast("Any", given)
        return torch.stack([copied(descend(by_env[n], inner)) for n in envs])
    leaf = copied(descend(given, inner))
    return leaf[torch.as_tensor(envs, device=leaf.device)]


def copied(x: Any) -> Tensor:
    """A copy as a tensor. Many envs write the next observation into the memory of this one."""
    return x.clone() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))


def unknown_info(name: str, like: Tensor, count: int) -> Tensor:
    """Rows for an info field where no action follows: True for a mask, else 0."""
    fill = torch.ones if name == "action_mask" or like.dtype is torch.bool else torch.zeros
    return fill((count, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _first_leaf(tree: Any) -> Any:
    """The first leaf of nested mappings and tuples."""
    while isinstance(tree, Mapping | tuple):
        branches = cast("Any", tree.values() if isinstance(tree, Mapping) else tree)
        tree = next(iter(branches))
    return tree


def _row_of(env: int, rows: Any) -> Array:
    return np.asarray(as_host(rows)[env])
