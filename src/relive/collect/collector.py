"""Collector: a vector env and a policy play, and a buffer stores what happened."""

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
    """Plays ``policy`` in ``envs`` and fills ``buffer``, the same for all three autoreset modes of Gymnasium.

    Args:
        envs: a ``gymnasium.vector.VectorEnv``, a single ``gymnasium.Env``, or a function that makes either.
        policy: ``policy(obs, **inputs)`` returns the actions ``[N, ...]``, or a mapping with ``action`` and the other
            fields of the schema that it decides (``value``, ``log_prob``, ``hidden``, ...). ``obs`` is a tensor on the
            buffer's device and of the schema's dtype, or a TensorDict if observations are nested. Where the schema has
            them, ``hidden``, the fields of ``from_info``, ``is_start`` (bool ``[N]``: the observation is the first of
            an episode), and ``last_action`` and ``last_reward`` (of the step before, 0 where an episode starts) come
            as keywords, and are stored with the step. Hidden states are ``[layers, N, size]`` as torch.nn.LSTM takes
            them if the schema's shape is ``(layers, size)``, and ``[N, size]`` if it is ``(size,)``: the state before
            the step comes in, the state after it goes out. Where an episode starts they are ``initial_hidden``.
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
            ``[layers, size]``; or a function that returns it, called at every episode start, for learned states.
            Default: zeros.
        autoreset_mode: overrides ``envs.metadata["autoreset_mode"]``.

    Raises:
        EnvError: the envs do not report their autoreset mode, or their number is not the buffer's.
        ParameterError: ``final_obs`` or ``autoreset_mode`` is not one of the choices.
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
            buffer.check_ends = False  # this one knows where episodes end
        self._finals = Finals()

    # -- the public face ----------------------------------------------------------------------------------------

    def reset(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start new episodes in all envs; called by the first :meth:`collect` with the collector's own seed.

        The envs are this collector's from here on, until another one that has them resets them. Episodes under way are
        cut: a rollout holds their newest steps as truncated, a replay as incomplete. To start a rollout over, clear the
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
        self._obs = self._inputs.obs(obs)  # last: until then it is to be done again

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
            ParameterError: ``num_steps`` is not a whole number of at least 1.
            ShapeError, DTypeError: actions, or other fields, do not fit the schema. The envs have not seen such an
                action.
        """
        buffer = self.buffer
        if self._under_way:  # something broke off the last collection, and maybe what it does then
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
                buffer.interrupt()  # the next to add does not go on where these envs stopped
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
                # after a terminal nothing is bootstrapped, and what is hidden there is not missed
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
        """Take over the next observation; which envs are at the start of an episode now."""
        inputs, vector = self._inputs, self._vector
        starts = vector.start(done)
        # where an episode has just ended nothing may be known any more, and no action follows
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
        """Value the observation that each env is at, and those that truncated episodes ended on, in one call."""
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
        """What episodes start in, ``[...]`` of each leaf; a rollout notes it, too."""
        states = self._inputs.initial_states()
        if states and isinstance(self.buffer, RolloutBuffer):
            self.buffer.initial_hidden = self.buffer.schema.rebuild("hidden", states.__getitem__)
        return states

    def _started(self, states: Leaves, where: Bools) -> Leaves:
        """The states, initial ones where an episode starts."""
        if not states or not where.any():
            return states
        initial, rows = self._initial_states(), self._inputs.rows(where)
        return {path: torch.where(shaped_as(rows, x), initial[path], x) for path, x in states.items()}


def _room(buffer: RolloutBuffer, wanted: int | None) -> int:
    """How many vector steps to make; makes room in a full buffer.

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
