"""Collector: plays a policy in a vector env, and stores the steps in a buffer or returns them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import EnvError, LifecycleError, ParameterError
from ..parameters import COUNT_RULE, require
from ..replay.buffer import ReplayBuffer
from ..rollout.buffer import RolloutBuffer
from ..steps.arrays import Bools, as_host
from ..steps.schema import Schema
from ..steps.summary import Summary, html, text
from .chunks import FILLED_RULE, SINK_RULE, Chunks, StepSink
from .envs import VectorEnvs, is_factory, vectorized
from .finals import Finals, Given, room
from .inputs import Inputs, Leaves, shaped_as
from .policy import Policy, ask, fields_of, require_functions, value_of
from .progress import progress_bar
from .random_policy import RandomPolicy
from .stats import CollectStats
from .transitions import following, truncated_rows

__all__ = ["Collector"]


class Collector:
    """Plays ``policy`` in ``envs``. :meth:`collect` fills ``buffer``; without one, :meth:`steps` returns the steps.

    All three autoreset modes of Gymnasium give the same data.

    Args:
        envs: a ``gymnasium.vector.VectorEnv``, a single ``gymnasium.Env``, or a function that makes either.
        policy: ``policy(obs, **inputs)`` returns the actions ``[N, ...]``, or a mapping with ``action`` and the other
            fields of the schema that it decides (``value``, ``log_prob``, ``hidden``, ...). ``obs`` is a tensor of
            the schema's dtype, on the buffer's device or else the CPU; or a TensorDict if observations are nested. If
            the schema has these fields, the policy gets them as keywords, and they are stored with the step:
            ``hidden``, the fields of ``from_info``, ``is_start`` (bool ``[N]``: the first observation of an episode),
            ``last_action`` and ``last_reward`` (of the step before; 0 at an episode's start). The policy gets the
            hidden state before the step and returns that after it: ``[layers, N, size]``, as torch.nn.LSTM has it, if
            the schema's shape is ``(layers, size)``, else ``[N, size]``. Episodes start with ``initial_hidden``.
        buffer: a rollout buffer, a replay, or a writer of :class:`relive.Lanes`; None to call :meth:`steps`.
        schema: without a buffer, the fields of a step. Default: ``Schema.from_env(envs)``.
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
        ParameterError: an argument is not one of the choices, or both a buffer and a schema are given.
        FieldError: the schema has no ``action``.
        SchemaError: there is no buffer, and a replay cannot have the schema.
        DTypeError: ``is_start`` is not declared as ``Field((), torch.bool)``, or ``last_action`` or ``last_reward``
            not like ``action`` or ``reward``.
    """

    def __init__(
        self,
        envs: Any,
        policy: Policy,
        buffer: RolloutBuffer | ReplayBuffer | StepSink | None = None,
        *,
        schema: Schema | None = None,
        value_fn: Policy | None = None,
        seed: int | None = None,
        final_obs: Literal["require", "mask"] = "require",
        from_info: tuple[str, ...] = ("action_mask",),
        initial_hidden: Any = None,
        autoreset_mode: Any = None,
    ) -> None:
        require("Collector", SINK_RULE, buffer=buffer)
        require_functions(policy, value_fn)
        self._vector = VectorEnvs(envs, final_obs, autoreset_mode)
        self.envs = self._vector.envs
        self.policy, self.buffer, self.seed = policy, buffer, seed
        self.value_fn = value_of(policy) if value_fn is None else value_fn
        n, device = self.envs.num_envs, torch.device("cpu") if buffer is None else buffer.device
        if buffer is not None and schema is not None:
            raise ParameterError("Collector: the schema is the buffer's; pass a buffer or a schema, not both")
        if buffer is not None and n != buffer.num_envs:
            raise EnvError(f"the buffer was made for {buffer.num_envs} envs, the vector env has {n}; give num_envs={n}")
        fields = (Schema.from_env(self.envs) if schema is None else schema) if buffer is None else buffer.schema
        self._chunks = Chunks(fields, n, device) if buffer is None else None
        self._wanted_info = from_info
        self._inputs = Inputs(fields, n, device, from_info, initial_hidden)
        self._has_value = "value" in fields and isinstance(buffer, RolloutBuffer)
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.total_steps = self.total_episodes = 0
        self._obs: Leaves | None = None
        self._was_reset = self._under_way = False
        if isinstance(buffer, ReplayBuffer | RolloutBuffer):
            buffer.check_ends = False  # the collector stores episode ends correctly
        self._finals = Finals()

    @property
    def _into(self) -> RolloutBuffer | StepSink:
        """What takes the steps."""
        return cast("StepSink", self._chunks) if self.buffer is None else self.buffer

    # -- the public face ----------------------------------------------------------------------------------------

    def reset(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start new episodes in all envs. The first :meth:`collect` or :meth:`steps` does it with the collector's seed.

        From now on the envs belong to this collector, until another collector resets them. Running episodes are cut:
        their newest steps are truncated in a rollout, and incomplete in a replay. To start a rollout over, clear the
        buffer as well.
        """
        initial, n, seed = self._initial_states(), self.envs.num_envs, self._vector.checked_seed(seed, options)
        self._was_reset, self._obs = True, None
        obs, info = self._vector.reset(seed, options)
        self._into.interrupt()
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
            LifecycleError: there is no buffer, or another collector has reset these envs since; call :meth:`reset`.
            EnvError: a truncated episode's final observation is hidden, or a field is missing from ``info``.
            FieldError: the policy's answer lacks a field of the schema, or the policy takes or returns an unknown one.
            ParameterError: ``num_steps`` is not a whole number of at least 1.
            ShapeError, DTypeError: actions, or other fields, do not fit the schema. The envs have not seen such an
                action.
        """
        buffer = self.buffer
        if buffer is None:
            raise LifecycleError("collect(): this Collector has no buffer to fill; give it one, or call steps(k)")
        if num_steps is not None:
            require("collect", COUNT_RULE, num_steps=num_steps)
        self._recover()
        count = room(buffer, num_steps) if isinstance(buffer, RolloutBuffer) else num_steps or 1
        self._begin()
        began, before = time.perf_counter(), self.total_steps
        self._play(count, progress)
        self._under_way = False
        seconds, ended = time.perf_counter() - began, self._ended
        return CollectStats(self.total_steps - before, seconds, [r for r, _ in ended], [n for _, n in ended])

    def steps(self, num_steps: int = 1, *, progress: bool | None = None) -> dict[str, Any]:
        """Play some steps and return them, for :meth:`relive.ReplayBuffer.extend`, here or in another process.

        Successive chunks join: a replay that is extended by each, in their order, holds what :meth:`collect` would have
        stored in it, bit for bit. The arrays are in RAM, can be pickled, and are yours.

        Args:
            num_steps: vector steps to play, k.
            progress: as for :meth:`collect`.

        Returns:
            every field of the schema, nested as it is, ``next_obs`` and ``mask`` (bool): NumPy arrays ``[k, N, ...]``,
            and tensors for dtypes that NumPy lacks. ``next_obs`` is the true next observation of every step. ``mask``
            is False where a row is no step, such as the reset step of ``NEXT_STEP`` autoreset. If the envs were reset
            since the last chunk, by :meth:`reset` or after an exception, there is one row more, ``[k + 1, N, ...]``:
            the first row is all masked, which interrupts the episodes under way in the replay.

        Raises:
            LifecycleError: there is a buffer, or another collector has reset these envs since; call :meth:`reset`.
            EnvError, FieldError, ParameterError, ShapeError, DTypeError: as :meth:`collect`. A chunk that an exception
                breaks off is not returned; the next one starts new episodes.
        """
        if self._chunks is None:
            raise LifecycleError("steps(): this Collector fills its buffer; call collect(k), or make one without")
        require("steps", COUNT_RULE, num_steps=num_steps)
        self._recover()
        self._begin()
        self._chunks.begin(num_steps)
        self._play(num_steps, progress)
        chunk = self._chunks.end()
        self._under_way = False  # not before: the next chunk must not follow one that Ctrl-C loses
        return chunk

    def _recover(self) -> None:
        if self._under_way:  # an exception interrupted the last collection, and perhaps this repair, too
            self._give_up()

    def _begin(self) -> None:
        """Reset the envs if that is due; else require that their episodes are still this collector's."""
        if self._obs is None:
            self.reset(seed=None if self._was_reset else self.seed)
        else:  # a learned initial state may have changed since the last collection
            self._vector.require_own()
            self._hidden = self._started(self._hidden, self._at_start)

    def _give_up(self) -> None:
        """Make the next collection reset the envs, which may be a step ahead of what is stored."""
        self._obs = None
        if isinstance(self.buffer, RolloutBuffer):
            self.buffer.clear()
        self._under_way = False

    def warm(
        self,
        buffer: RolloutBuffer | ReplayBuffer | StepSink,
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
        require("warm", FILLED_RULE, buffer=buffer)
        fresh, made = envs, is_factory(envs)
        if envs is None:
            fresh, made = self._vector.remake(), True
        fresh, schema = vectorized(fresh() if is_factory(fresh) else fresh), buffer.schema
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
            if not isinstance(buffer, RolloutBuffer):
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
            "buffer": "none; steps() returns the steps" if self.buffer is None else str(self.buffer).partition("\n")[0],
            "episodes": f"{self.total_episodes:,} ended{mean}",
        }
        return f"Collector: {self.total_steps:,} steps", facts

    # -- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()  # as a decorator: an exception on the line of a `with` could leave gradients off
    def _play(self, count: int, progress: bool | None) -> None:
        """Play ``count`` vector steps; the caller clears ``_under_way``. After an exception the next call resets."""
        self._ended: list[tuple[float, int]] = []
        with progress_bar(count, progress) as tick:
            try:
                self._under_way = True
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
        try:
            obs, reward, terminated, truncated, info = self.envs.step(action)
        except Exception as error:
            self._vector.refuse_outside(action, error)
            raise
        terminated, truncated = as_host(terminated).astype(np.bool_), as_host(truncated).astype(np.bool_)
        done, real = terminated | truncated, ~self._vector.ignored
        after = inputs.hidden(fields.get("hidden"), self._hidden)

        step = {name: inputs.to_device(fields[name]) for name in inputs.names if name in fields}
        step |= {"obs": inputs.as_given(self._obs), "reward": inputs.to_device(reward), **inputs.named(self._info)}
        step |= {"terminated": terminated, "truncated": truncated}
        if inputs.has_hidden:
            step["hidden"] = inputs.schema.rebuild("hidden", self._hidden.__getitem__)
        if self._last:
            self._last = inputs.last({"action": fields["action"], "reward": reward}, self._last)
        into, answer = self._into, (obs, info)
        if isinstance(into, RolloutBuffer):
            ended = None
            if self._has_value:
                real, ended = truncated_rows(inputs, self._vector, step, real, answer, after, self._info, self._last)
            into.add(step if real.all() else step | {"mask": real})
            self._finals.note(ended)
        else:
            into.add(step | following(inputs, self._vector, self._obs, step, real, answer, into.own_next_obs))

        self._count_episodes(as_host(reward), done)
        self._at_start = self._go_on(obs, info, done)
        self._hidden = self._started(after, self._at_start)

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
