"""Collector: a vector env and a policy play, and a buffer holds what really happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import vectors
from .errors import EnvError, FieldError, FullError, ShapeError
from .progress import progress_bar
from .random_policy import RandomPolicy
from .rollout import RolloutBuffer
from .schema import Path, descend, dotted
from .storage import as_host, as_tensordict
from .vectors import (
    Bools,
    address,
    final_observations,
    first_leaf,
    info_field,
    is_factory,
    made_again,
    nothing_known,
    pick,
    swap_layers,
    vectorized,
)

__all__ = ["CollectStats", "Collector"]

Policy = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class CollectStats:
    """What one call of :meth:`Collector.collect` did.

    ``num_steps`` counts real transitions over all envs, ``seconds`` is wall time; ``episode_returns`` (undiscounted)
    and ``episode_lengths`` are those of the episodes that ended, in the order they did.
    """

    num_steps: int
    seconds: float
    episode_returns: list[float] = field(default_factory=list[float])
    episode_lengths: list[int] = field(default_factory=list[int])

    @property
    def num_episodes(self) -> int:
        """Episodes that ended."""
        return len(self.episode_returns)

    @property
    def steps_per_second(self) -> float:
        """Real transitions per second of wall time."""
        return self.num_steps / max(self.seconds, 1e-9)


class Collector:
    """Plays ``policy`` in ``envs`` and fills ``buffer``, the same for all three autoreset modes of Gymnasium.

    Args:
        envs: a ``gymnasium.vector.VectorEnv``, a single ``gymnasium.Env``, or a function that makes either.
        policy: ``policy(obs, **inputs)`` returns the actions ``[N, ...]``, or a mapping with ``action`` and the other
            fields of the schema that it decides (``value``, ``log_prob``, ``hidden``, ...). ``obs`` is a tensor on the
            buffer's device, or a TensorDict if observations are nested. If the schema has them, ``hidden`` and the
            fields of ``from_info`` come as keywords. Hidden states are ``[layers, N, size]`` as torch.nn.LSTM takes
            them if the schema's shape is ``(layers, size)``, and ``[N, size]`` if it is ``(size,)``: the state before
            the step comes in, the state after it goes out. They are zero where an episode starts.
        buffer: a :class:`relive.RolloutBuffer`.
        value_fn: ``value_fn(obs, **inputs)`` returns ``[B]``, for any B: it values the bootstrap row and the final
            observations of truncated episodes, in one call at the end of a collection. Default:
            ``policy(...)["value"]``.
        seed: of the first reset of the envs.
        final_obs: what to do with an env that does not hand out its final observations: "require" them, or "mask" the
            truncated steps (they are then left out of every minibatch, and the steps before them bootstrap from there).
        from_info: fields of the schema that are read from the ``info`` that came with the observation.
        autoreset_mode: overrides ``envs.metadata["autoreset_mode"]``.

    Raises:
        EnvError: the autoreset mode is unknown, or the number of envs is not the buffer's.
    """

    def __init__(
        self,
        envs: Any,
        policy: Policy,
        buffer: RolloutBuffer,
        *,
        value_fn: Policy | None = None,
        seed: int | None = None,
        final_obs: Literal["require", "mask"] = "require",
        from_info: tuple[str, ...] = ("action_mask",),
        autoreset_mode: Any = None,
    ) -> None:
        self._factory: Callable[[], Any] | None = envs if is_factory(envs) else None
        self._given = envs if self._factory is None else self._factory()
        self.envs = vectorized(self._given)
        self.policy, self.buffer = policy, buffer
        self.value_fn = value_fn or _value_of(policy)
        self.seed = seed
        if final_obs not in ("require", "mask"):
            raise EnvError(f"final_obs is 'require' or 'mask', got {final_obs!r}")
        self._final_obs: Literal["require", "mask"] = final_obs
        self._mode = vectors.autoreset_mode(self.envs, autoreset_mode)
        if self.envs.num_envs != buffer.num_envs:
            raise EnvError(f"the buffer was made for {buffer.num_envs} envs, the vector env has {self.envs.num_envs}")
        schema = buffer.schema
        self._names = schema.names
        self._wanted_info, self._from_info = from_info, tuple(name for name in from_info if name in schema)
        self._has_hidden, self._has_value = "hidden" in schema, "value" in schema
        self._obs_paths = [path for path in schema.leaves if path[0] == "obs"]
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.total_steps = self.total_episodes = 0
        self._obs: dict[Path, Tensor] | None = None

    # -- the public face ----------------------------------------------------------------------------------------

    def reset(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start new episodes in all envs; called by the first :meth:`collect` with the collector's own seed."""
        obs, info = self.envs.reset(seed=seed, options=options)
        n = self.envs.num_envs
        self._torch_env = isinstance(first_leaf(obs), Tensor)  # it then takes tensors, too
        self._reuses_memory, self._address = False, address(obs)
        # copied, since an env that reuses its memory is only recognised at its second observation
        self._obs = {path: x.clone() for path, x in self._obs_leaves(obs).items()}
        self._info = self._info_fields(info, ~np.zeros(n, np.bool_))
        self._hidden: dict[Path, Tensor] = {
            path: torch.zeros((n, *leaf.shape), dtype=leaf.dtype, device=self.buffer.device)
            for path, leaf in self.buffer.schema.leaves.items()
            if path[0] == "hidden"
        }
        self._ignored: Bools = np.zeros(n, np.bool_)  # envs whose next action is ignored: NEXT_STEP resets them
        self._episode_return = np.zeros(n, np.float64)
        self._episode_length = np.zeros(n, np.int64)

    def collect(self, num_steps: int | None = None, *, progress: bool | None = None) -> CollectStats:
        """Play, by default until the buffer is full; a full buffer is cleared first.

        Afterwards the bootstrap row and the values of true final observations are set, and ``finish`` can be called.

        Args:
            num_steps: vector steps to make.
            progress: show a progress bar (needs Rich); None shows one on a terminal once it takes seconds.

        Raises:
            FullError: more steps than the buffer has room for.
            EnvError: a truncated episode whose final observation is hidden, or a field missing from ``info``.
            FieldError: the policy's answer lacks a field of the schema.
        """
        if self._obs is None:
            self.reset(seed=self.seed)
        buffer = self.buffer
        if buffer.is_full and not buffer.wrap:
            buffer.clear()
        room = buffer.num_steps if buffer.wrap and buffer.is_full else buffer.num_steps - buffer.steps
        count = room if num_steps is None else num_steps
        if count < 1 or (count > room and not buffer.wrap):
            raise FullError(f"collect({count}): the buffer has room for {room} more steps; collect 1 to {room}")
        began = time.perf_counter()
        stats = CollectStats(0, 0.0)
        finals: list[_Finals] = []
        real = 0
        with torch.no_grad(), progress_bar(count, progress) as tick:
            for t in range(count):
                real += self._step(t, finals, stats)
                tick()
            self._bootstrap(count, finals)
        self.total_steps += real
        self.total_episodes += stats.num_episodes
        return CollectStats(real, time.perf_counter() - began, stats.episode_returns, stats.episode_lengths)

    def warm(
        self,
        buffer: RolloutBuffer,
        num_steps: int,
        *,
        policy: Policy | None = None,
        envs: Any = None,
        seed: int | None = None,
    ) -> CollectStats:
        """Fill ``buffer`` with ``num_steps`` vector steps, leaving this collector's envs and counters alone.

        Args:
            buffer: any buffer of the same number of envs.
            num_steps: vector steps to make.
            policy: default: uniformly random actions (among those that ``action_mask`` allows); the other fields that
                a policy decides are then 0.
            envs: envs to play in, or a function that makes them; default: new ones, made as this collector's were.
            seed: of the new envs and of the random actions.

        Raises:
            EnvError: the envs cannot be made again (they are wrapped, say); pass ``envs``.
        """
        fresh, made = envs, is_factory(envs)
        if envs is None:
            fresh, made = self._factory or made_again(self._given, self._mode), True
            if fresh is None:
                raise EnvError(
                    "warm() needs envs of its own and cannot tell how these were made; pass warm(..., envs=function "
                    "that makes them), or give such a function to the Collector"
                )
        fresh = vectorized(fresh() if is_factory(fresh) else fresh)
        schema = buffer.schema
        if policy is None:
            acting: Policy = RandomPolicy(fresh.single_action_space, schema, fresh.num_envs, buffer.device, seed)
        else:
            acting = policy
        collector = Collector(
            fresh,
            acting,
            buffer,
            # the given policy's own value, where it is not the one that acts here
            value_fn=self.value_fn if policy is None and self._has_value else None,
            seed=seed,
            final_obs=self._final_obs,
            from_info=self._wanted_info,
            autoreset_mode=self._mode if envs is None else None,
        )
        try:
            return collector.collect(num_steps)
        finally:
            if made:
                fresh.close()

    # -- one step -----------------------------------------------------------------------------------------------

    def _step(self, t: int, finals: list[_Finals], stats: CollectStats) -> int:
        assert self._obs is not None
        fields = _fields(self.policy(self._as_input(self._obs), **self._inputs(self._hidden, self._info)))
        if "action" not in fields:
            raise FieldError(f"the policy's answer has no 'action'; it has {', '.join(map(repr, fields))}")
        obs, reward, terminated, truncated, info = self.envs.step(self._env_action(fields["action"]))
        terminated, truncated = as_host(terminated).astype(np.bool_), as_host(truncated).astype(np.bool_)
        done = terminated | truncated
        after = self._hidden_leaves(fields.get("hidden"))
        usable = self._note_finals(t, finals, truncated & ~terminated, obs, info, after)

        step = {name: self._to_device(fields[name]) for name in self._names if name in fields}
        step |= {"obs": self._as_input(self._obs), "reward": self._to_device(reward), **self._info}
        step |= {"terminated": terminated, "truncated": truncated}
        if self._has_hidden:
            step["hidden"] = self.buffer.schema.rebuild("hidden", self._hidden.__getitem__)
        real = ~self._ignored
        if not (real & usable).all():
            step["mask"] = real & usable
        self.buffer.add(step)

        self._count_episodes(as_host(reward), done, real, stats)
        starts = self._go_on(obs, info, done)
        self._hidden = _zeroed(after, starts)
        return int(real.sum())

    def _go_on(self, obs: Any, info: dict[str, Any], done: Bools) -> Bools:
        """Take over the next observation; which envs are at the start of an episode now."""
        starts = done
        if self._mode == "NextStep":
            starts, self._ignored = self._ignored, done
        if self._address is not None:
            self._reuses_memory, self._address = address(obs) == self._address, None
        # where an episode has just ended nothing may be known any more, and no action follows
        self._info = self._info_fields(info, np.ones_like(done) if self._mode == "SameStep" else ~done)
        if self._mode == "Disabled" and done.any():
            obs, info = self.envs.reset(options={"reset_mask": done})
            reset, rows = self._info_fields(info, done), self._rows(done)
            self._info = {name: torch.where(_as(rows, x), reset[name], x) for name, x in self._info.items()}
        leaves = self._obs_leaves(obs)
        self._obs = {path: x.clone() for path, x in leaves.items()} if self._reuses_memory else leaves
        return starts

    def _count_episodes(self, reward: NDArray[Any], done: Bools, real: Bools, stats: CollectStats) -> None:
        self._episode_return += reward * real
        self._episode_length += real
        for n in np.flatnonzero(done):
            stats.episode_returns.append(float(self._episode_return[n]))
            stats.episode_lengths.append(int(self._episode_length[n]))
            self._episode_return[n] = self._episode_length[n] = 0
        if done.any():
            ended = int(done.sum())
            self.returns.extend(stats.episode_returns[-ended:])
            self.lengths.extend(stats.episode_lengths[-ended:])

    # -- final observations -------------------------------------------------------------------------------------

    def _note_finals(
        self, t: int, finals: list[_Finals], cut: Bools, obs: Any, info: dict[str, Any], after: dict[Path, Tensor]
    ) -> Bools:
        """Keep what the truncated episodes ended on, to be valued later; False where that is hidden."""
        usable = np.ones_like(cut)
        # with NEXT_STEP the final observation is the next row's, which the policy values anyway
        if not self._has_value or self._mode == "NextStep" or not cut.any():
            return usable
        known, given, details = cut, obs, info
        if self._mode == "SameStep":
            given, present = final_observations(info, self.envs.num_envs)
            known, usable = cut & present, ~cut | present
            final_info = info.get("final_info")
            details = cast("dict[str, Any]", final_info if isinstance(final_info, dict) else {})
        if not usable.all() and self._final_obs == "require":
            raise EnvError(
                f"env {int(np.flatnonzero(~usable)[0])} was truncated and its final observation is hidden: neither "
                "info['final_obs'] nor info['final_observation'] has it, and the next observation belongs to "
                "another episode. Use an env that hands it out, or Collector(..., final_obs='mask')"
            )
        if known.any():
            envs, device = np.flatnonzero(known), self.buffer.device
            where = torch.as_tensor(envs, device=device)
            chosen = {path: pick(given, path[1:], envs).to(device) for path in self._obs_paths}
            states = {path: x[where] for path, x in after.items()}
            finals.append(_Finals(t, where, chosen, states, self._final_info(details, envs)))
        return usable

    def _final_info(self, details: dict[str, Any], envs: NDArray[np.intp]) -> dict[str, Tensor]:
        """The info fields that came with final observations, where the env tells them."""
        found: dict[str, Tensor] = {}
        for name, like in self._info.items():
            given, present = info_field(details, name, self.envs.num_envs)
            known = present[envs].all()
            found[name] = pick(given, (), envs).to(like) if known else nothing_known(name, like, len(envs))
        return found

    def _bootstrap(self, count: int, finals: list[_Finals]) -> None:
        """Value the observation that each env is at, and those that truncated episodes ended on, in one call."""
        assert self._obs is not None
        buffer = self.buffer
        if not self._has_value:
            buffer.set_last(obs=self._as_input(self._obs))
            return
        obs = {path: torch.cat([x, *(f.obs[path] for f in finals)]) for path, x in self._obs.items()}
        hidden = {path: torch.cat([x, *(f.hidden[path] for f in finals)]) for path, x in self._hidden.items()}
        info = {name: torch.cat([x, *(f.info[name] for f in finals)]) for name, x in self._info.items()}
        value = self.value_fn(self._as_input(obs), **self._inputs(hidden, info))
        n = buffer.num_envs
        buffer.set_last(obs=self._as_input(self._obs), value=value[:n])
        first = buffer.steps - count  # negative where a wrapping buffer has dropped the first of these steps
        if self._mode == "NextStep":
            self._finals_from_next_row(max(first, 0))
        elif finals:
            steps = torch.cat([torch.full_like(f.envs, first + f.t) for f in finals])
            envs = torch.cat([f.envs for f in finals])
            kept = steps >= 0
            buffer.set_final_value(steps[kept], envs[kept], value[n:][kept])

    def _finals_from_next_row(self, first: int) -> None:
        buffer = self.buffer
        cut = buffer["truncated"] & ~buffer["terminated"]
        steps, envs = cut[first:].nonzero(as_tuple=True)
        if len(steps):
            value = torch.cat([buffer["value"], buffer.last["value"].unsqueeze(0)])
            buffer.set_final_value(steps + first, envs, value[steps + first + 1, envs])

    # -- conversions --------------------------------------------------------------------------------------------

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device != self.buffer.device:
            return value.to(self.buffer.device)
        return value

    def _obs_leaves(self, obs: Any) -> dict[Path, Tensor]:
        device = self.buffer.device
        return {path: torch.as_tensor(descend(obs, path[1:]), device=device) for path in self._obs_paths}

    def _as_input(self, obs: dict[Path, Tensor]) -> Any:
        if len(obs) == 1 and ("obs",) in obs:
            return obs["obs",]
        some = next(iter(obs.values()))
        return as_tensordict({path[1:]: x for path, x in obs.items()}, (len(some),))

    def _inputs(self, hidden: dict[Path, Tensor], info: dict[str, Tensor]) -> dict[str, Any]:
        inputs: dict[str, Any] = dict(info)
        if self._has_hidden:
            inputs["hidden"] = self.buffer.schema.rebuild("hidden", lambda path: swap_layers(hidden[path]))
        return inputs

    def _hidden_leaves(self, hidden: Any) -> dict[Path, Tensor]:
        if not self._has_hidden:
            return {}
        if hidden is None:
            raise FieldError(
                "the schema has 'hidden', but the policy's answer does not: return the state after the step"
            )
        leaves = {path: swap_layers(descend(hidden, path[1:])) for path in self._hidden}
        for path, state in leaves.items():
            if state.shape != self._hidden[path].shape:
                expected = tuple(swap_layers(self._hidden[path]).shape)
                raise ShapeError(
                    f"field '{dotted(path)}': expected {expected}, as it was given to the policy, "
                    f"got {tuple(swap_layers(state).shape)}"
                )
        return leaves

    def _env_action(self, action: Any) -> Any:
        def convert(x: Any) -> Any:
            return x if self._torch_env else as_host(x)

        return self.buffer.schema.rebuild("action", lambda path: convert(descend(action, path[1:])))

    def _info_fields(self, info: dict[str, Any], required: Bools) -> dict[str, Tensor]:
        """The fields ``[N, ...]`` that come with an observation; those of ``required`` envs must be there."""
        found: dict[str, Tensor] = {}
        n = self.envs.num_envs
        for name in self._from_info:
            given, present = info_field(info, name, n)
            if (required & ~present).any():
                env = int(np.flatnonzero(required & ~present)[0])
                raise EnvError(
                    f"the schema has '{name}', but info['{name}'] is missing for env {env}; report it at every reset "
                    "and step, or leave it out of the schema"
                )
            leaf = self.buffer.schema.leaves[name,]
            rows = torch.empty((n, *leaf.shape), dtype=leaf.dtype, device=self.buffer.device)
            rows = nothing_known(name, rows, n)
            envs = np.flatnonzero(present)
            if len(envs):
                rows[torch.as_tensor(envs, device=rows.device)] = pick(given, (), envs).to(rows)
            found[name] = rows
        return found

    def _rows(self, which: Bools) -> Tensor:
        return torch.as_tensor(which, device=self.buffer.device)


@dataclass(frozen=True, slots=True)
class _Finals:
    """What the episodes truncated at one step ended on: rows ``[K, ...]``."""

    t: int
    envs: Tensor
    obs: dict[Path, Tensor]
    hidden: dict[Path, Tensor]
    info: dict[str, Tensor]


def _value_of(policy: Policy) -> Policy:
    def value(obs: Any, **inputs: Any) -> Any:
        fields = _fields(policy(obs, **inputs))
        if "value" not in fields:
            raise FieldError("the schema has 'value', but the policy's answer does not; return it, or pass value_fn=")
        return fields["value"]

    return value


def _fields(answer: Any) -> dict[str, Any]:
    """A policy's answer: a mapping of fields, or the bare actions."""
    return dict(answer.items()) if hasattr(answer, "items") else {"action": answer}


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """A flag per env, shaped to choose between rows of ``like``."""
    return rows.view(-1, *[1] * (like.dim() - 1))


def _zeroed(states: dict[Path, Tensor], where: Bools) -> dict[Path, Tensor]:
    if not states or not where.any():
        return states
    return {path: torch.where(_as(torch.as_tensor(where, device=x.device), x), 0, x) for path, x in states.items()}
