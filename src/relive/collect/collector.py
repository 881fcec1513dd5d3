"""Collector: a vector env and a policy play, and a buffer stores what happened."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches.states import swap_layers
from ..batches.tensordicts import as_tensordict
from ..errors import DTypeError, EnvError, FieldError, FullError, LifecycleError, SchemaError, ShapeError
from ..parameters import is_count
from ..replay.buffer import ReplayBuffer
from ..rollout.buffer import RolloutBuffer
from ..steps.arrays import as_host, check_castable
from ..steps.checker import StepChecker
from ..steps.schema import Field, Schema
from ..steps.summary import Summary, html, text
from ..steps.trees import Path, descend, dotted
from . import envs as vectors
from .envs import (
    Bools,
    copied,
    final_observations,
    first_leaf,
    info_field,
    is_factory,
    made_again,
    nothing_known,
    pick,
    vectorized,
)
from .progress import progress_bar
from .random_policy import RandomPolicy
from .stats import CollectStats

__all__ = ["Collector"]


Policy = Callable[..., Any]


Leaves = dict[Path, Tensor]


PLAYED_BY: WeakKeyDictionary[Any, object] = WeakKeyDictionary()
"""Envs -> the token of the collector whose episodes are under way in them."""


class Collector:
    """Plays ``policy`` in ``envs`` and fills ``buffer``, the same for all three autoreset modes of Gymnasium.

    Args:
        envs: a ``gymnasium.vector.VectorEnv``, a single ``gymnasium.Env``, or a function that makes either.
        policy: ``policy(obs, **inputs)`` returns the actions ``[N, ...]``, or a mapping with ``action`` and the other
            fields of the schema that it decides (``value``, ``log_prob``, ``hidden``, ...). ``obs`` is a tensor on the
            buffer's device and of the schema's dtype, or a TensorDict if observations are nested. Of what the schema
            has, ``hidden``, the fields of ``from_info``, ``is_start`` (bool ``[N]``: the observation is the first of an
            episode), and ``last_action`` and ``last_reward`` (of the step before, 0 where an episode starts) come as
            keywords, and are stored with the step. Hidden states are ``[layers, N, size]`` as torch.nn.LSTM takes them
            if the schema's shape is ``(layers, size)``, and ``[N, size]`` if it is ``(size,)``: the state before the
            step comes in, the state after it goes out. Where an episode starts they are ``initial_hidden``.
        buffer: a :class:`relive.RolloutBuffer` or :class:`relive.ReplayBuffer`.
        value_fn: ``value_fn(obs, **inputs)`` returns ``[B]``, for any B: it values the bootstrap row and the final
            observations of truncated episodes, in one call at the end of a collection. Default:
            ``policy(...)["value"]``, whose draws of actions that nobody plays then advance the policy's generator.
        seed: of the first reset of the envs.
        final_obs: what to do with an env that does not hand out its final observations: "require" them, or "mask" the
            truncated steps (they are then left out of every batch; in a rollout the steps before them bootstrap from
            there).
        from_info: fields of the schema that are read from the ``info`` that came with the observation.
        initial_hidden: the state that episodes start in, nested as ``hidden`` and without the axis of envs, such as
            ``[layers, size]``; or a function that returns it, so that a learned one is taken as it is by then. Default:
            zeros.
        autoreset_mode: overrides ``envs.metadata["autoreset_mode"]``.

    Raises:
        EnvError: the autoreset mode is unknown, or the number of envs is not the buffer's.
        FieldError: the schema has no ``action``.
        DTypeError: the schema has ``is_start``, and not as ``Field((), torch.bool)``, or ``last_action`` or
            ``last_reward``, and not as ``action`` and ``reward`` are.
    """

    def __init__(
        self,
        envs: Any,
        policy: Policy,
        buffer: RolloutBuffer | ReplayBuffer,
        *,
        value_fn: Policy | None = None,
        seed: int | None = None,
        final_obs: Literal["require", "mask"] = "require",
        from_info: tuple[str, ...] = ("action_mask",),
        initial_hidden: Any = None,
        autoreset_mode: Any = None,
    ) -> None:
        self._factory: Callable[[], Any] | None = envs if is_factory(envs) else None
        self._given = envs if self._factory is None else self._factory()
        self.envs = vectorized(self._given)
        self._unwrapped = getattr(self._given, "unwrapped", self._given)
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
        self._names, self._leaves = schema.names, schema.leaves
        # a check alone: what the policy gives is stored, and handed to the envs, as it is
        self._check_action = StepChecker(
            Schema({"action": schema["action"]}), buffer.num_envs, buffer.device, upload=False
        )
        self._wanted_info, self._from_info = from_info, tuple(name for name in from_info if name in schema)
        self._has_hidden, self._initial_hidden = "hidden" in schema, initial_hidden
        if initial_hidden is not None and not self._has_hidden:
            raise FieldError("initial_hidden: the schema has no 'hidden'; add the recurrent state to it")
        self._tells_start = "is_start" in schema and "is_start" not in from_info
        if self._tells_start and schema["is_start"] != Field((), torch.bool):
            raise DTypeError(
                "field 'is_start': the collector tells one bool per env; declare it as Field((), torch.bool), got "
                f"{schema['is_start']!r}"
            )
        self._from_last = tuple(
            name for name in ("action", "reward") if f"last_{name}" in schema and f"last_{name}" not in from_info
        )
        for name in self._from_last:
            if schema[f"last_{name}"] != schema[name]:
                raise DTypeError(
                    f"field 'last_{name}': the collector gives the {name} of the step before; declare it as "
                    f"{schema[name]!r}, or give a field of your own another name; got {schema[f'last_{name}']!r}"
                )
        starts = ("is_start",) if self._tells_start else ()
        self._told = (*self._from_info, *starts, *(f"last_{name}" for name in self._from_last))
        self._has_value = "value" in schema and isinstance(buffer, RolloutBuffer)
        self._obs_paths = [path for path in schema.leaves if path[0] == "obs"]
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.total_steps = self.total_episodes = 0
        self._obs: Leaves | None = None
        self._was_reset = self._under_way = False
        if isinstance(buffer, ReplayBuffer):
            buffer.check_ends = False  # this one knows where episodes end
        self._player = object()
        self._made = 0  # vector steps added to the buffer
        self._finals: list[_Finals] = []

    # -- the public face ----------------------------------------------------------------------------------------

    def reset(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start new episodes in all envs; called by the first :meth:`collect` with the collector's own seed.

        The envs are this collector's from here on, until another one that has them resets them. Episodes under way are
        cut: a rollout holds their newest steps as truncated, a replay as incomplete. To start a rollout over, clear the
        buffer as well.
        """
        initial, n = self._initial_states(), self.envs.num_envs
        self._was_reset, self._obs = True, None
        with suppress(TypeError):  # envs that cannot be referred to weakly
            PLAYED_BY[self._unwrapped] = self._player
        obs, info = self.envs.reset(seed=seed, options=options)
        self.buffer.interrupt()
        self._finals = []
        self._torch_env = isinstance(first_leaf(obs), Tensor)  # it then takes tensors, too
        self._info = self._info_fields(info, ~np.zeros(n, np.bool_)) | self._starts(np.ones(n, np.bool_))
        self._last: Leaves = {
            path: torch.zeros((n, *leaf.shape), dtype=leaf.dtype, device=self.buffer.device)
            for path, leaf in self._leaves.items()
            if path[0].removeprefix("last_") in self._from_last and path[0].startswith("last_")
        }
        self._info |= self._last
        self._hidden: Leaves = {path: x.expand(n, *x.shape).clone() for path, x in initial.items()}
        self._at_start: Bools = np.ones(n, np.bool_)
        self._ignored: Bools = np.zeros(n, np.bool_)  # envs whose next action is ignored: NEXT_STEP resets them
        self._episode_return = np.zeros(n, np.float64)
        self._episode_length = np.zeros(n, np.int64)
        self._under_way = False
        self._obs = self._obs_leaves(obs)  # last: until then it is to be done again

    def collect(self, num_steps: int | None = None, *, progress: bool | None = None) -> CollectStats:
        """Play.

        A rollout that is full is cleared first; afterwards its bootstrap row and the values of true final observations
        are set, and ``finish`` can be called. A replay just goes on.

        Args:
            num_steps: vector steps to make; default: until the rollout is full, or 1 for a replay.
            progress: show a progress bar (needs Rich); None shows one on a terminal once it takes seconds.

        Raises:
            FullError: more steps than the buffer has room for.
            LifecycleError: another collector has played in these envs meanwhile; :meth:`reset` takes them back.
            EnvError: a truncated episode whose final observation is hidden, or a field missing from ``info``.
            FieldError: the policy's answer lacks a field of the schema, or it takes or returns one that is not there.
            ShapeError, DTypeError: no whole number of steps; or actions, or other fields, that do not fit the schema.
                The envs have not seen such an action.
        """
        buffer = self.buffer
        if self._under_way:  # something broke off the last collection, and maybe what it does then
            self._give_up()
        count = _room(buffer, num_steps) if isinstance(buffer, RolloutBuffer) else 1 if num_steps is None else num_steps
        if not is_count(count, 1):
            raise ShapeError(f"collect({num_steps!r}): ask for a whole number of vector steps, at least 1")
        if self._obs is None:
            self.reset(seed=None if self._was_reset else self.seed)
        else:  # a learned initial state may have changed since the last collection
            self._require_envs()
            self._hidden = self._started(self._hidden, self._at_start)
        began, before = time.perf_counter(), self.total_steps
        self._ended: list[tuple[float, int]] = []
        self._under_way = True
        with torch.no_grad(), progress_bar(count, progress) as tick:
            try:
                for _ in range(count):
                    self._step()
                    tick()
                if isinstance(buffer, RolloutBuffer):
                    self._bootstrap(buffer)
            except BaseException:
                self._give_up()
                raise
        self._under_way = False
        seconds = time.perf_counter() - began
        returns, lengths = [r for r, _ in self._ended], [n for _, n in self._ended]
        return CollectStats(self.total_steps - before, seconds, returns, lengths)

    def _give_up(self) -> None:
        """Start over: the envs may be a step ahead of what is stored."""
        self._obs = None
        if isinstance(self.buffer, RolloutBuffer):
            self.buffer.clear()
        self._under_way = False

    def warm(
        self,
        buffer: RolloutBuffer | ReplayBuffer,
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
        try:
            collector = Collector(
                fresh,
                acting,
                buffer,
                # the given policy's own value, where it is not the one that acts here
                value_fn=self.value_fn if policy is None and self._has_value else None,
                seed=seed,
                final_obs=self._final_obs,
                from_info=self._wanted_info,
                initial_hidden=self._initial_hidden if "hidden" in schema else None,
                autoreset_mode=self._mode if envs is None else None,
            )
            return collector.collect(num_steps)
        finally:
            if isinstance(buffer, ReplayBuffer):
                buffer.interrupt()  # whoever adds next does not go on where these envs stopped
            if made:
                fresh.close()

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        mean = f", mean return of the last {len(self.returns)}: {np.mean(self.returns):.4g}" if self.returns else ""
        facts = {
            "envs": f"{self.envs.num_envs} of {self._given!r}, autoreset {self._mode}",
            "policy": getattr(self.policy, "__qualname__", type(self.policy).__name__),
            "buffer": str(self.buffer).partition("\n")[0],
            "episodes": f"{self.total_episodes:,} ended{mean}",
        }
        return f"Collector: {self.total_steps:,} steps", facts

    # -- one step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        assert self._obs is not None
        fields = _fields(_ask(self.policy, self._as_input(self._obs), self._inputs(self._hidden, self._info)))
        self._require_fields(fields)
        obs, reward, terminated, truncated, info = self.envs.step(self._env_action(fields["action"]))
        terminated, truncated = as_host(terminated).astype(np.bool_), as_host(truncated).astype(np.bool_)
        done, real = terminated | truncated, ~self._ignored
        after = self._hidden_leaves(fields.get("hidden"))

        step = {name: self._to_device(fields[name]) for name in self._names if name in fields}
        step |= {"obs": self._as_input(self._obs), "reward": self._to_device(reward), **self._named(self._info)}
        step |= {"terminated": terminated, "truncated": truncated}
        if self._has_hidden:
            step["hidden"] = self.buffer.schema.rebuild("hidden", self._hidden.__getitem__)
        if self._last:
            self._last = self._last_leaves({"action": fields["action"], "reward": reward})
        if isinstance(self.buffer, RolloutBuffer):
            self._add_to_rollout(self.buffer, step, real, obs, info, after)
        else:
            self._add_to_replay(self.buffer, step, real, obs, info)

        self._count_episodes(as_host(reward), done, real)
        self._at_start = self._go_on(obs, info, done)
        self._hidden = self._started(after, self._at_start)

    def _add_to_rollout(
        self, buffer: RolloutBuffer, step: dict[str, Any], real: Bools, obs: Any, info: dict[str, Any], after: Leaves
    ) -> None:
        cut, finals = step["truncated"] & ~step["terminated"], None
        if self._has_value and cut.any():
            given, details, present = self._final_observations(cut, obs, info)
            real &= ~cut | present
            envs = np.flatnonzero(cut & present)
            if len(envs):
                where = torch.as_tensor(envs, device=buffer.device)
                rows = {path: self._as_field(path, pick(given, path[1:], envs)) for path in self._obs_paths}
                states = {path: x[where] for path, x in after.items()}
                finals = _Finals(self._made, where, rows, states, self._final_info(details, envs))
        if not real.all():
            step["mask"] = real
        buffer.add(step)
        self._made += 1
        if finals is not None:
            self._finals.append(finals)

    def _add_to_replay(
        self, buffer: ReplayBuffer, step: dict[str, Any], real: Bools, obs: Any, info: dict[str, Any]
    ) -> None:
        assert self._obs is not None
        done, lost = step["terminated"] | step["truncated"], np.zeros_like(real)
        own, ended = buffer.own_next_obs, done.any()
        following = self._obs_leaves(obs) if own else dict(self._obs)
        if ended:
            cut = step["truncated"] & ~step["terminated"]
            given, _, present = self._final_observations(cut, obs, info)
            lost = cut & ~present
            hidden, envs = self._rows(done & ~present), np.flatnonzero(done & present)
            where = torch.as_tensor(envs, device=buffer.device)
            for path, x in following.items():
                # after a terminal nothing is bootstrapped, and what is hidden there is not missed
                kept = torch.where(_as(hidden, x), self._obs[path], x)
                rows = self._as_field(path, pick(given, path[1:], envs)) if len(envs) else kept[:0]
                following[path] = kept.index_copy(0, where, rows)
            step["truncated"] = step["truncated"] & ~lost
        if own:
            real &= ~lost
        if own or ended:
            step["next_obs"] = self._as_input(following)
        if not real.all():
            step["mask"] = real
        buffer.add(step)
        if lost.any():
            buffer.interrupt(np.flatnonzero(lost))

    def _go_on(self, obs: Any, info: dict[str, Any], done: Bools) -> Bools:
        """Take over the next observation; which envs are at the start of an episode now."""
        starts = done
        if self._mode == "NextStep":
            starts, self._ignored = self._ignored, done
        # where an episode has just ended nothing may be known any more, and no action follows
        self._info = self._info_fields(info, np.ones_like(done) if self._mode == "SameStep" else ~done)
        if self._mode == "Disabled" and done.any():
            obs, info = self.envs.reset(options={"reset_mask": done})
            reset, rows = self._info_fields(info, done), self._rows(done)
            self._info = {path: torch.where(_as(rows, x), reset[path], x) for path, x in self._info.items()}
        if self._last:
            begun = self._rows(starts)
            self._last = {path: x.masked_fill(_as(begun, x), 0) for path, x in self._last.items()}
        self._info |= self._starts(starts) | self._last
        self._obs = self._obs_leaves(obs)
        return starts

    def _count_episodes(self, reward: NDArray[Any], done: Bools, real: Bools) -> None:
        self.total_steps += int((~self._ignored).sum())
        self._episode_return += reward * ~self._ignored
        self._episode_length += ~self._ignored
        for n in np.flatnonzero(done):
            ended = float(self._episode_return[n]), int(self._episode_length[n])
            self._ended.append(ended)
            self.returns.append(ended[0])
            self.lengths.append(ended[1])
            self.total_episodes += 1
            self._episode_return[n] = self._episode_length[n] = 0

    # -- final observations -------------------------------------------------------------------------------------

    def _final_observations(self, cut: Bools, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any], Bools]:
        """What episodes ended on, with the info that came with it, and which envs tell; those ``cut`` have to."""
        if self._mode != "SameStep":
            return obs, info, np.ones_like(cut)
        given, present = final_observations(info, self.envs.num_envs)
        final_info = info.get("final_info")
        hidden = cut & ~present
        if hidden.any() and self._final_obs == "require":
            raise EnvError(
                f"env {int(np.flatnonzero(hidden)[0])} was truncated and its final observation is hidden: neither "
                "info['final_obs'] nor info['final_observation'] has it, and the next observation belongs to "
                "another episode. Use an env that hands it out, or Collector(..., final_obs='mask')"
            )
        return given, cast("dict[str, Any]", final_info if isinstance(final_info, dict) else {}), present

    def _final_info(self, details: dict[str, Any], envs: NDArray[np.intp]) -> Leaves:
        """The fields that came with final observations: the info, where the env gives it; no start; the last step."""
        where = torch.as_tensor(envs, device=self.buffer.device)
        found = self._starts(np.zeros(len(envs), np.bool_)) | {path: x[where] for path, x in self._last.items()}
        for name in self._from_info:
            like = self._info[name,]
            given, present = info_field(details, name, self.envs.num_envs)
            known = present[envs].all()
            found[name,] = pick(given, (), envs).to(like) if known else nothing_known(name, like, len(envs))
        return found

    def _bootstrap(self, buffer: RolloutBuffer) -> None:
        """Value the observation that each env is at, and those that truncated episodes ended on, in one call."""
        assert self._obs is not None
        if not self._has_value:
            buffer.set_last(obs=self._as_input(self._obs))
            return
        finals = self._finals
        obs = {path: torch.cat([x, *(f.obs[path] for f in finals)]) for path, x in self._obs.items()}
        hidden = {path: torch.cat([x, *(f.hidden[path] for f in finals)]) for path, x in self._hidden.items()}
        info = {path: torch.cat([x, *(f.info[path] for f in finals)]) for path, x in self._info.items()}
        value = _ask(self.value_fn, self._as_input(obs), self._inputs(hidden, info))
        n = buffer.num_envs
        buffer.set_last(obs=self._as_input(self._obs), value=value[:n])
        if finals:
            # counted from the newest step, so that it does not matter what has left the buffer meanwhile
            steps = torch.cat([torch.full_like(f.envs, buffer.steps - (self._made - f.made)) for f in finals])
            envs = torch.cat([f.envs for f in finals])
            kept = steps >= 0
            buffer.set_final_value(steps[kept], envs[kept], value[n:][kept])
        self._finals = []

    # -- conversions --------------------------------------------------------------------------------------------

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device != self.buffer.device:
            return value.to(self.buffer.device)
        return value

    def _obs_leaves(self, obs: Any) -> Leaves:
        """A copy, since many envs write their next observation where this one lies."""
        return {path: self._as_field(path, copied(descend(obs, path[1:]))) for path in self._obs_paths}

    def _as_field(self, path: Path, given: Tensor) -> Tensor:
        """Rows of a leaf in the schema's dtype, which is also what the policy gets, on the buffer's device."""
        dtype = self._leaves[path].dtype
        if given.dtype is not dtype:
            check_castable(given, dtype, dotted(path))
            given = given.to(dtype)
        return given.to(self.buffer.device)

    def _as_input(self, obs: Leaves) -> Any:
        if len(obs) == 1 and ("obs",) in obs:
            return obs["obs",]
        some = next(iter(obs.values()))
        return as_tensordict({path[1:]: x for path, x in obs.items()}, (len(some),))

    def _named(self, info: Leaves) -> dict[str, Any]:
        return {name: self.buffer.schema.rebuild(name, info.__getitem__) for name in self._told}

    def _inputs(self, hidden: Leaves, info: Leaves) -> dict[str, Any]:
        inputs = self._named(info)
        if self._has_hidden:
            inputs["hidden"] = self.buffer.schema.rebuild("hidden", lambda path: swap_layers(hidden[path]))
        return inputs

    def _hidden_leaves(self, hidden: Any) -> Leaves:
        if not self._has_hidden:
            return {}
        if hidden is None:
            raise FieldError(
                "the schema has 'hidden', but the policy's answer does not: return the state after the step"
            )
        leaves: Leaves = {}
        for path in self._hidden:
            try:  # copied, since many policies write their next state where this one lies
                leaves[path] = swap_layers(descend(hidden, path[1:])).clone()
            except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
                raise FieldError(
                    f"field '{dotted(path)}': missing from the hidden state the policy returned"
                ) from error
        for path, state in leaves.items():
            if state.shape != self._hidden[path].shape:
                expected = tuple(swap_layers(self._hidden[path]).shape)
                raise ShapeError(
                    f"field '{dotted(path)}': expected {expected}, as it was given to the policy, "
                    f"got {tuple(swap_layers(state).shape)}"
                )
        return leaves

    def _initial_states(self) -> Leaves:
        """What episodes start in, ``[...]`` of each leaf."""
        tree: Any = self._initial_hidden
        if callable(tree):
            tree = tree()
        states: Leaves = {}
        for path, leaf in self._leaves.items():
            if path[0] != "hidden":
                continue
            state = torch.zeros(leaf.shape) if tree is None else self._initial_leaf(tree, path)
            if state.shape != leaf.shape:
                raise ShapeError(
                    f"initial_hidden: expected {leaf.shape} for '{dotted(path)}', without the axis of envs, "
                    f"got {tuple(state.shape)}"
                )
            states[path] = state.to(self.buffer.device, leaf.dtype)
        if states and isinstance(self.buffer, RolloutBuffer):
            self.buffer.initial_hidden = self.buffer.schema.rebuild("hidden", states.__getitem__)
        return states

    def _initial_leaf(self, tree: Any, path: Path) -> Tensor:
        try:
            return torch.as_tensor(descend(tree, path[1:])).detach().clone()
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise FieldError(
                f"initial_hidden: '{dotted(path)}' is missing; nest it as the schema does: "
                f"{self.buffer.schema['hidden']!r}"
            ) from error

    def _started(self, states: Leaves, where: Bools) -> Leaves:
        """The states, initial ones where an episode starts."""
        if not states or not where.any():
            return states
        initial, rows = self._initial_states(), self._rows(where)
        return {path: torch.where(_as(rows, x), initial[path], x) for path, x in states.items()}

    def _require_fields(self, fields: dict[str, Any]) -> None:
        """Refuse a policy's answer before the envs see it."""
        if "action" not in fields:
            raise FieldError(f"the policy's answer has no 'action'; it has {', '.join(map(repr, fields))}")
        if "hidden" in fields and not self._has_hidden:
            raise FieldError(
                "the policy returns 'hidden', and the schema has no such field, so the state would be lost; add it, as "
                "in Schema.from_env(envs, hidden=(layers, size)), or leave it out of the answer"
            )
        try:
            self._check_action({"action": self._to_device(fields["action"])})
        except SchemaError as error:
            raise type(error)(
                f"the policy's answer does not fit: {error}. It returns the actions [N, ...], or a mapping of 'action' "
                "and the other fields that it decides"
            ) from error

    def _env_action(self, action: Any) -> Any:
        """The actions as the envs take them, checked already; that of a single env may lack its axis."""
        n = self.envs.num_envs

        def convert(path: Path) -> Any:
            given = descend(action, path[1:])
            rows: Any = torch.as_tensor(given) if self._torch_env else as_host(given)
            shape = n, *self._leaves[path].shape
            return rows if rows.shape == shape else rows.reshape(shape)

        return self.buffer.schema.rebuild("action", convert)

    def _last_leaves(self, step: dict[str, Any]) -> Leaves:
        """What the next observation's ``last_action`` and ``last_reward`` are, if the schema has them."""
        found: Leaves = {}
        for path, like in self._last.items():
            name = path[0].removeprefix("last_")
            rows = copied(descend(step[name], path[1:]))
            found[path] = self._as_field(path, rows.reshape(like.shape))
        return found

    def _require_envs(self) -> None:
        """Refuse to go on with episodes that another collector has ended."""
        with suppress(TypeError):
            if PLAYED_BY.get(self._unwrapped, self._player) is not self._player:
                raise LifecycleError(
                    "another Collector has reset and stepped these envs since, so that the episodes under way here are "
                    "gone; give each its own envs, or call reset() to start new episodes with this one"
                )

    def _info_fields(self, info: dict[str, Any], required: Bools) -> Leaves:
        """The fields ``[N, ...]`` that come with an observation; those of ``required`` envs must be there."""
        found: Leaves = {}
        n = self.envs.num_envs
        for name in self._from_info:
            given, present = info_field(info, name, n)
            if (required & ~present).any():
                env = int(np.flatnonzero(required & ~present)[0])
                raise EnvError(
                    f"the schema has '{name}', but info['{name}'] is missing for env {env}; report it at every reset "
                    "and step, or leave it out of the schema"
                )
            leaf = self._leaves[name,]
            rows = torch.empty((n, *leaf.shape), dtype=leaf.dtype, device=self.buffer.device)
            rows = nothing_known(name, rows, n)
            envs = np.flatnonzero(present)
            if len(envs):
                rows[torch.as_tensor(envs, device=rows.device)] = pick(given, (), envs).to(rows)
            found[name,] = rows
        return found

    def _starts(self, which: Any) -> Leaves:
        """The field that tells which observations are the first of an episode, if the schema has it."""
        return {("is_start",): self._rows(which)} if self._tells_start else {}

    def _rows(self, which: Bools) -> Tensor:
        return torch.as_tensor(which, device=self.buffer.device)


@dataclass(frozen=True, slots=True)
class _Finals:
    """What the episodes truncated at one step ended on: rows ``[K, ...]``."""

    made: int
    envs: Tensor
    obs: Leaves
    hidden: Leaves
    info: Leaves


def _room(buffer: RolloutBuffer, wanted: int | None) -> int:
    """How many vector steps to make; a full buffer is cleared first."""
    if buffer.is_full and not buffer.wrap:
        buffer.clear()
    room = buffer.num_steps - buffer.steps if not buffer.is_full else buffer.num_steps
    count = room if wanted is None else wanted
    if not is_count(count, 1) or (count > room and not buffer.wrap):
        raise FullError(f"collect({count!r}): the buffer has room for {room} more steps; collect 1 to {room}")
    return count


def _value_of(policy: Policy) -> Policy:
    def value(obs: Any, **inputs: Any) -> Any:
        fields = _fields(_ask(policy, obs, inputs))
        if "value" not in fields:
            raise FieldError("the schema has 'value', but the policy's answer does not; return it, or pass value_fn=")
        return fields["value"]

    return value


def _ask(policy: Policy, obs: Any, inputs: dict[str, Any]) -> Any:
    """What a policy or a value function says; one that takes other arguments is told which there are."""
    try:
        return policy(obs, **inputs)
    except TypeError as error:
        reason = _misfit(policy, inputs)
        if reason is None:
            raise
        call = ", ".join(["obs", *(f"{name}=..." for name in inputs)])
        raise FieldError(
            f"the policy (or value_fn) is called as policy({call}), and it cannot be: {reason}. 'hidden', 'is_start', "
            "'last_action', 'last_reward' and the fields of from_info are passed where the schema has a field of that "
            "name; add it to the schema, or to what the policy takes"
        ) from error


def _misfit(policy: Policy, inputs: dict[str, Any]) -> str | None:
    """Why a function cannot be called so, if its signature shows it."""
    try:
        signature = inspect.signature(getattr(policy, "forward", policy))  # a torch.nn.Module takes anything itself
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, **inputs)
    except TypeError as error:
        return str(error)
    return None


def _fields(answer: Any) -> dict[str, Any]:
    """A policy's answer: a mapping of fields, or the bare actions."""
    return dict(answer.items()) if hasattr(answer, "items") else {"action": answer}


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """A flag per env, shaped to choose between rows of ``like``."""
    return rows.view(-1, *[1] * (like.dim() - 1))
