"""Collector: plays a policy in a vector env and stores the steps in a buffer."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import EnvError, FullError
from ..parameters import COUNT_RULE, require
from ..replay.buffer import ReplayBuffer
from ..rollout.buffer import RolloutBuffer
from ..steps.arrays import as_host
from ..steps.summary import Summary, html, text
from .envs import Bools, VectorEnvs, is_factory, pick, vectorized
from .finals import Finals, Given
from .inputs import Inputs, Leaves, shaped_as
from .policy import Policy, ask, fields_of, value_of
from .progress import progress_bar
from .random_policy import RandomPolicy
from .stats import CollectStats

__all__ = ["Collector"]


class Collector:
    """Plays ``policy`` in ``envs`` and fills ``buffer``. All three autoreset modes of Gymnasium give the same data.

    Args:
        envs: a ``gymnasium.vector.VectorEnv``, a single ``gymnasium.Env``, or a function that makes either.
        policy: ``policy(obs, **inputs)`` returns the actions ``[N, ...]``, or a mapping with ``action`` and the other
            fields of the schema that it decides (``value``, ``log_prob``, ``hidden``, ...). ``obs`` is a tensor on the
            buffer's device and of the schema's dtype, or a TensorDict if observations are nested. If the schema has
            these fields, the policy gets them as keywords, and they are stored with the step: ``hidden``, the fields of
            ``from_info``, ``is_start`` (bool ``[N]``: the first observation of an episode), ``last_action`` and
            ``last_reward`` (of the step before; 0 at an episode's start). The policy gets the hidden state before the
            step and returns the state after it: ``[layers, N, size]``, as torch.nn.LSTM has it, if the schema's shape
            is ``(layers, size)``, and ``[N, size]`` if it is ``(size,)``. Episodes start with ``initial_hidden``.
        buffer: a :class:`relive.RolloutBuffer` or :class:`relive.ReplayBuffer`.
        value_fn: ``value_fn(obs, **inputs)`` returns the values ``[B]``, for any B. It is called once at the end of a
            collection, for the bootstrap row and the final observations of truncated episodes. Default:
            ``policy(...)["value"]``; the actions that the policy then draws are not used.
        seed: of the first reset of the envs.
        final_obs: what to do if an env hides the final observation of a truncated episode. "require" raises an
            EnvError. "mask" leaves the truncated step out of every batch; in a rollout the step before it bootstraps
            from its observation.
        from_info: fields of the schema that are read from the ``info`` that comes with the observation.
        initial_hidden: the state at an episode's start, nested as ``hidden``, without the axis of envs: such as
            ``[layers, size]``; or a function that returns it, for learned states, called at every episode start.
            Default: zeros.
        autoreset_mode: overrides ``envs.metadata["autoreset_mode"]``.

    Raises:
        EnvError: the envs do not report their autoreset mode, or their number is not the buffer's.
        ParameterError: ``final_obs`` or ``autoreset_mode`` is not one of the choices.
        FieldError: the schema has no ``action``.
        DTypeError: ``is_start`` is not declared as ``Field((), torch.bool)``, or ``last_action`` or ``last_reward``
            not like ``action`` or ``reward``.
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
        self._vector = VectorEnvs(envs, final_obs, autoreset_mode)
        self.envs = self._vector.envs
        self.policy, self.buffer, self.seed = policy, buffer, seed
        self.value_fn = value_fn or value_of(policy)
        if self.envs.num_envs != buffer.num_envs:
            raise EnvError(f"the buffer was made for {buffer.num_envs} envs, the vector env has {self.envs.num_envs}")
        self._wanted_info = from_info
        self._inputs = Inputs(buffer.schema, buffer.num_envs, buffer.device, from_info, initial_hidden)
        self._has_value = "value" in buffer.schema and isinstance(buffer, RolloutBuffer)
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.total_steps = self.total_episodes = 0
        self._obs: Leaves | None = None
        self._was_reset = self._under_way = False
        if isinstance(buffer, ReplayBuffer):
            buffer.check_ends = False  # the collector stores episode ends correctly
        self._finals = Finals()

    # -- the public face ----------------------------------------------------------------------------------------

    def reset(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start new episodes in all envs; called by the first :meth:`collect` with the collector's own seed.

        From now on the envs belong to this collector, until another collector resets them. Running episodes are cut:
        their newest steps are truncated in a rollout, and incomplete in a replay. To start a rollout over, clear the
        buffer as well.
        """
        initial, n = self._initial_states(), self.envs.num_envs
        self._was_reset, self._obs = True, None
        obs, info = self._vector.reset(seed, options)
        self.buffer.interrupt()
        self._finals.clear()
        start = np.ones(n, np.bool_)
        self._last = self._inputs.no_last()
        self._info = self._inputs.info(info, start) | self._inputs.starts(start) | self._last
        self._hidden: Leaves = {path: x.expand(n, *x.shape).clone() for path, x in initial.items()}
        self._at_start = start
        self._episode_return = np.zeros(n, np.float64)
        self._episode_length = np.zeros(n, np.int64)
        self._under_way = False
        self._obs = self._inputs.obs(obs)  # last, so that an interrupted reset is done again

    def collect(self, num_steps: int | None = None, *, progress: bool | None = None) -> CollectStats:
        """Play some steps and store them.

        A full rollout is cleared first. Afterwards its bootstrap row and the values of true final observations are set,
        and ``finish`` can be called.

        Args:
            num_steps: vector steps to play; default: until the rollout is full, or 1 for a replay.
            progress: show a progress bar (needs Rich); None shows one on a terminal once it takes seconds.

        Raises:
            FullError: more steps than the buffer has room for.
            LifecycleError: another collector has played in these envs meanwhile; call :meth:`reset`.
            EnvError: a truncated episode's final observation is hidden, or a field is missing from ``info``.
            FieldError: the policy's answer lacks a field of the schema, or the policy takes or returns an unknown one.
            ParameterError: ``num_steps`` is not a whole number of at least 1.
            ShapeError, DTypeError: actions, or other fields, do not fit the schema. The envs have not seen such an
                action.
        """
        buffer = self.buffer
        if self._under_way:  # an exception interrupted the last collection, and perhaps this repair, too
            self._give_up()
        if num_steps is not None:
            require("collect", COUNT_RULE, num_steps=num_steps)
        count = _room(buffer, num_steps) if isinstance(buffer, RolloutBuffer) else num_steps or 1
        if self._obs is None:
            self.reset(seed=None if self._was_reset else self.seed)
        else:  # a learned initial state may have changed since the last collection
            self._vector.require_own()
            self._hidden = self._started(self._hidden, self._at_start)
        began, before = time.perf_counter(), self.total_steps
        self._ended: list[tuple[float, int]] = []
        self._under_way = True
        self._play(count, progress)
        self._under_way = False
        seconds = time.perf_counter() - began
        returns, lengths = [r for r, _ in self._ended], [n for _, n in self._ended]
        return CollectStats(self.total_steps - before, seconds, returns, lengths)

    def _give_up(self) -> None:
        """Make the next collection reset the envs, which may be a step ahead of what is stored."""
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
        """Fill ``buffer`` with ``num_steps`` vector steps of other envs; this collector's own do not change.

        Args:
            buffer: any buffer of the same number of envs.
            num_steps: vector steps to make.
            policy: default: uniformly random actions among those that ``action_mask`` allows. The other fields that a
                policy returns are then 0.
            envs: envs to play in, or a function that makes them; default: new ones like this collector's.
            seed: of the new envs and of the random actions.

        Raises:
            EnvError: it is unknown how to make such envs (they may be wrapped); pass ``envs``.
        """
        fresh, made = envs, is_factory(envs)
        if envs is None:
            fresh, made = self._vector.remake(), True
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
                final_obs=self._vector.final_obs,
                from_info=self._wanted_info,
                initial_hidden=self._inputs.initial_hidden if "hidden" in schema else None,
                autoreset_mode=self._vector.mode if envs is None else None,
            )
            return collector.collect(num_steps)
        finally:
            if isinstance(buffer, ReplayBuffer):
                buffer.interrupt()  # the next steps do not follow the last ones of these envs
            if made:
                fresh.close()

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        mean = f", mean return of the last {len(self.returns)}: {np.mean(self.returns):.4g}" if self.returns else ""
        facts = {
            "envs": f"{self.envs.num_envs} of {self._vector.given!r}, autoreset {self._vector.mode}",
            "policy": getattr(self.policy, "__qualname__", type(self.policy).__name__),
            "buffer": str(self.buffer).partition("\n")[0],
            "episodes": f"{self.total_episodes:,} ended{mean}",
        }
        return f"Collector: {self.total_steps:,} steps", facts

    # -- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()  # as a decorator: an exception on the line of a `with` could leave gradients off
    def _play(self, count: int, progress: bool | None) -> None:
        """Play ``count`` vector steps and store them."""
        with progress_bar(count, progress) as tick:
            try:
                for _ in range(count):
                    self._step()
                    tick()
                if isinstance(self.buffer, RolloutBuffer):
                    self._bootstrap(self.buffer)
            except BaseException:
                self._give_up()
                raise

    def _step(self) -> None:
        assert self._obs is not None
        inputs = self._inputs
        fields = fields_of(ask(self.policy, inputs.as_given(self._obs), inputs.inputs(self._hidden, self._info)))
        inputs.require_fields(fields)
        action = inputs.env_action(fields["action"], self._vector.takes_tensors)
        obs, reward, terminated, truncated, info = self.envs.step(action)
        terminated, truncated = as_host(terminated).astype(np.bool_), as_host(truncated).astype(np.bool_)
        done, real = terminated | truncated, ~self._vector.ignored
        after = inputs.hidden(fields.get("hidden"), self._hidden)

        step = {name: inputs.to_device(fields[name]) for name in inputs.names if name in fields}
        step |= {"obs": inputs.as_given(self._obs), "reward": inputs.to_device(reward), **inputs.named(self._info)}
        step |= {"terminated": terminated, "truncated": truncated}
        if inputs.has_hidden:
            step["hidden"] = self.buffer.schema.rebuild("hidden", self._hidden.__getitem__)
        if self._last:
            self._last = inputs.last({"action": fields["action"], "reward": reward}, self._last)
        if isinstance(self.buffer, RolloutBuffer):
            self._add_to_rollout(self.buffer, step, real, obs, info, after)
        else:
            self._add_to_replay(self.buffer, step, real, obs, info)

        self._count_episodes(as_host(reward), done)
        self._at_start = self._go_on(obs, info, done)
        self._hidden = self._started(after, self._at_start)

    def _add_to_rollout(
        self, buffer: RolloutBuffer, step: dict[str, Any], real: Bools, obs: Any, info: dict[str, Any], after: Leaves
    ) -> None:
        cut, ended, inputs = step["truncated"] & ~step["terminated"], None, self._inputs
        if self._has_value and cut.any():
            given, details, present = self._vector.final_observations(cut, obs, info)
            real &= ~cut | present
            envs = np.flatnonzero(cut & present)
            if len(envs):
                where = torch.as_tensor(envs, device=buffer.device)
                rows = {path: inputs.leaf(path, pick(given, path[1:], envs)) for path in inputs.obs_paths}
                states = {path: x[where] for path, x in after.items()}
                ended = where, Given(rows, states, inputs.final_info(details, envs, self._info, self._last))
        if not real.all():
            step["mask"] = real
        buffer.add(step)
        self._finals.note(ended)

    def _add_to_replay(
        self, buffer: ReplayBuffer, step: dict[str, Any], real: Bools, obs: Any, info: dict[str, Any]
    ) -> None:
        assert self._obs is not None
        done, lost = step["terminated"] | step["truncated"], np.zeros_like(real)
        own, ended, inputs = buffer.own_next_obs, done.any(), self._inputs
        following = inputs.obs(obs) if own else dict(self._obs)
        if ended:
            cut = step["truncated"] & ~step["terminated"]
            given, _, present = self._vector.final_observations(cut, obs, info)
            lost = cut & ~present
            hidden, envs = inputs.rows(done & ~present), np.flatnonzero(done & present)
            where = torch.as_tensor(envs, device=buffer.device)
            for path, x in following.items():
                # after a terminal nothing is bootstrapped, so a hidden observation does not matter
                kept = torch.where(shaped_as(hidden, x), self._obs[path], x)
                rows = inputs.leaf(path, pick(given, path[1:], envs)) if len(envs) else kept[:0]
                following[path] = kept.index_copy(0, where, rows)
            step["truncated"] = step["truncated"] & ~lost
        if own:
            real &= ~lost
        if own or ended:
            step["next_obs"] = inputs.as_given(following)
        if not real.all():
            step["mask"] = real
        buffer.add(step)
        if lost.any():
            buffer.interrupt(np.flatnonzero(lost))

    def _go_on(self, obs: Any, info: dict[str, Any], done: Bools) -> Bools:
        """Keep the next observation. Returns which envs are at the start of an episode."""
        inputs, vector = self._inputs, self._vector
        starts = vector.start(done)
        # after an episode's end no action follows, so its info may be missing
        self._info = inputs.info(info, vector.informed(done))
        reset = vector.reset_ended(done)
        if reset is not None:
            obs, info = reset
            fresh, rows = inputs.info(info, done), inputs.rows(done)
            self._info = {path: torch.where(shaped_as(rows, x), fresh[path], x) for path, x in self._info.items()}
        if self._last:
            begun = inputs.rows(starts)
            self._last = {path: x.masked_fill(shaped_as(begun, x), 0) for path, x in self._last.items()}
        self._info |= inputs.starts(starts) | self._last
        self._obs = inputs.obs(obs)
        return starts

    def _count_episodes(self, reward: NDArray[Any], done: Bools) -> None:
        self.total_steps += int((~self._vector.ignored).sum())
        self._episode_return += reward * ~self._vector.ignored
        self._episode_length += ~self._vector.ignored
        for n in np.flatnonzero(done):
            ended = float(self._episode_return[n]), int(self._episode_length[n])
            self._ended.append(ended)
            self.returns.append(ended[0])
            self.lengths.append(ended[1])
            self.total_episodes += 1
            self._episode_return[n] = self._episode_length[n] = 0

    # -- the end of a collection -----------------------------------------------------------------------------

    def _bootstrap(self, buffer: RolloutBuffer) -> None:
        """Set the values of each env's current observation and of the final ones of truncated episodes, in one call."""
        assert self._obs is not None
        if not self._has_value:
            buffer.set_last(obs=self._inputs.as_given(self._obs))
            return
        obs, hidden, info = self._finals.after(Given(self._obs, self._hidden, self._info))
        value = ask(self.value_fn, self._inputs.as_given(obs), self._inputs.inputs(hidden, info))
        n = buffer.num_envs
        buffer.set_last(obs=self._inputs.as_given(self._obs), value=value[:n])
        self._finals.set_values(buffer, value[n:])

    # -- hidden states ------------------------------------------------------------------------------------------

    def _initial_states(self) -> Leaves:
        """The hidden state at an episode's start, ``[...]`` of each leaf; a rollout is given it, too."""
        states = self._inputs.initial_states()
        if states and isinstance(self.buffer, RolloutBuffer):
            self.buffer.initial_hidden = self.buffer.schema.rebuild("hidden", states.__getitem__)
        return states

    def _started(self, states: Leaves, where: Bools) -> Leaves:
        """The states, with the initial state where an episode starts."""
        if not states or not where.any():
            return states
        initial, rows = self._initial_states(), self._inputs.rows(where)
        return {path: torch.where(shaped_as(rows, x), initial[path], x) for path, x in states.items()}


def _room(buffer: RolloutBuffer, wanted: int | None) -> int:
    """How many vector steps to play; clears a full rollout.

    Raises:
        FullError: more are wanted than the buffer can take.
    """
    room = buffer.num_steps if buffer.is_full else buffer.num_steps - buffer.steps
    count = room if wanted is None else wanted
    if count > room and not buffer.wrap:
        raise FullError(f"collect({count!r}): the buffer has room for {room} more steps; collect 1 to {room}")
    if buffer.is_full and not buffer.wrap:
        buffer.clear()
    return count
