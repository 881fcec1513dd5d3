"""Collector: plays a policy in vector envs, and stores the steps in a buffer or returns them."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ..batches import Batch, leaves_by_path, swap_layers
from ..errors import EnvError, FieldError, FullError, LifecycleError, ParameterError
from ..memory.layout import host_leaf
from ..parameters import COUNT_RULE, Rule, require, seed_or_drawn
from ..printable import add_note
from ..replay.buffer import ReplayBuffer
from ..replay.checks import stored_fields
from ..rollout.buffer import RolloutBuffer
from ..steps.arrays import Array, Bools, as_host, numpy_dtype, numpy_view
from ..steps.checker import StepChecker
from ..steps.schema import Path, Schema, descend, map_leaves
from ..steps.summary import Summary, html, text
from .envs import (
    FinalCheck,
    Flags,
    Info,
    VectorEnvs,
    attribute,
    final_info,
    inner,
    is_factory,
    require_start,
    seed_for,
    vectorized,
)
from .episodes import Ended, Episodes, EpisodeSums, read_ended
from .inputs import Inputs, Leaves, shaped_as
from .progress import progress_bar


class StepSink(Protocol):
    """A sink that takes steps as a replay does, such as a writer of :class:`relive.Lanes`."""

    schema: Schema
    """The fields of a step."""
    num_envs: int
    """N."""
    device: torch.device
    """Where the observations that the policy gets are."""
    own_next_obs: bool
    """True if every step needs its next observation."""

    def add(self, step: Mapping[str, object], /) -> None:
        """Store one step of every env, as :meth:`relive.ReplayBuffer.add` takes it."""
        ...

    def interrupt(self) -> None:
        """The next steps start new episodes."""
        ...


Sink: TypeAlias = "RolloutBuffer | StepSink | _Chunks"
"""An object that steps go to, one by one."""


FILLED_RULE: Rule = (
    lambda sink: all(hasattr(sink, name) for name in ("schema", "num_envs", "device", "interrupt")),
    "expected a RolloutBuffer, a ReplayBuffer, or a writer of Lanes such as lanes.writer(0)",
)
"""The rule for a buffer that is filled once."""

SINK_RULE: Rule = (
    lambda sink: sink is None or FILLED_RULE[0](sink),
    "expected a RolloutBuffer, a ReplayBuffer, a writer of Lanes such as lanes.writer(0), or None",
)
"""The rule for what a collector fills."""


Policy = Callable[..., Any]
"""A policy or a value function."""


EPISODE_HISTORY = 100
"""How many of the newest episodes a collector keeps."""


LOOKED = 4096
"""The check of final observations stops after this many steps of a simulator."""


class Collector:
    """Plays ``policy`` in ``envs``. :meth:`collect` fills ``buffer``; without one, :meth:`steps` returns the steps.

    All three autoreset modes of Gymnasium give the same data, and so do simulators that step all envs at once in
    tensors. These have ``num_envs``, ``device``, ``reset()`` and ``step(action)``, which returns observations, rewards,
    terminated, truncated and info, or what rsl_rl's ``VecEnv`` returns. See docs/collector.md.

    Args:
        envs: a ``gymnasium.vector.VectorEnv``, a single ``gymnasium.Env``, a simulator, or a function that makes one.
        policy: ``policy(obs, **inputs)`` returns the actions ``[N, ...]``, or a mapping with ``action`` and the other
            fields of the schema that it decides (``value``, ``log_prob``, ``hidden``, ...). ``obs`` is a tensor of
            the schema's dtype, on the buffer's device or else the CPU; a :class:`relive.Batch` of them if observations
            are nested. If the schema has these fields, the policy gets them as keywords, and they are stored with it:
            ``hidden``, the fields of ``from_info``, ``is_start`` (bool ``[N]``: the first observation of an episode),
            ``last_action`` and ``last_reward`` (of the step before; 0 at an episode's start). The policy gets the
            hidden state before the step and returns that after it: ``[layers, N, size]``, as torch.nn.LSTM has it, if
            the schema's shape is ``(layers, size)``, else ``[N, size]``. Episodes start with ``initial_hidden``.
        buffer: a rollout buffer, a replay, or a writer of :class:`relive.Lanes`; None to call :meth:`steps`.
        schema: without a buffer, the fields of a step. Default: ``Schema.from_env(envs)``.
        value_fn: ``value_fn(obs, **inputs)`` returns the values ``[B]``, or ``[B, K]`` of K heads, for any B. It is
            called once at the end of a collection, for the bootstrap row and the final observations of truncated
            episodes. Default: ``policy(...)["value"]``; the actions that the policy then draws are not used.
        seed: of the first reset of the envs.
        final_obs: what to do if an env hides the final observation of a truncated episode. "require" raises an
            EnvError, which names the switch of simulators that have one. "mask" leaves the truncated step out of every
            batch; in a rollout the step before it bootstraps from its observation.
        from_info: fields of the schema that are read from the ``info`` that comes with the observation.
        from_step_info: fields of the schema that are read from the ``info`` that the step returns, such as a cost or a
            success flag. An env may leave one out, which is 0 then, but not where an episode ends.
        initial_hidden: the state at an episode's start, nested as ``hidden``, without the axis of envs: such as
            ``[layers, size]``; or a function that returns it, for learned states, called at every episode start.
            Default: zeros.
        autoreset_mode: overrides ``envs.metadata["autoreset_mode"]`` of vector envs.

    Raises:
        EnvError: the envs do not report their autoreset mode, or their number is not the buffer's.
        ParameterError: an argument is not one of the choices, both a buffer and a schema are given, or a field is read
            from both infos, or from that of a step although the collector sets it.
        FieldError: the schema has no ``action``, or not a field of ``from_step_info``.
        SchemaError: there is no buffer, and a replay cannot have the schema; or a field of an info is nested.
        DTypeError: ``is_start`` is not declared as ``Field((), torch.bool)``, or ``last_action`` or ``last_reward``
            not like ``action`` or ``reward``.
    """

    policy: Policy
    buffer: RolloutBuffer | ReplayBuffer[Any, Any] | StepSink | None
    seed: int | None
    total_steps: int

    def __init__(
        self,
        envs: object,
        policy: Policy,
        buffer: RolloutBuffer | ReplayBuffer | StepSink | None = None,
        *,
        schema: Schema | None = None,
        value_fn: Policy | None = None,
        seed: int | None = None,
        final_obs: Literal["require", "mask"] = "require",
        from_info: tuple[str, ...] = ("action_mask",),
        from_step_info: tuple[str, ...] = (),
        initial_hidden: object = None,
        autoreset_mode: object = None,
    ) -> None:
        require("Collector", SINK_RULE, buffer=buffer)
        require("Collector", POLICY_RULE, policy=policy, value_fn=policy if value_fn is None else value_fn)
        self._vector = VectorEnvs(envs, final_obs, autoreset_mode)
        self.envs: Any = self._vector.envs
        self.policy, self.buffer, self.seed = policy, buffer, seed
        self.value_fn: Policy = _value_of(policy) if value_fn is None else value_fn
        n, device = self._vector.num_envs, torch.device("cpu") if buffer is None else buffer.device
        if buffer is not None and schema is not None:
            raise ParameterError("Collector: the schema is the buffer's; pass a buffer or a schema, not both")
        if buffer is not None and n != buffer.num_envs:
            raise EnvError(f"the buffer was made for {buffer.num_envs} envs, the vector env has {n}; give num_envs={n}")
        fields = (Schema.from_env(inner(self.envs)) if schema is None else schema) if buffer is None else buffer.schema
        self._chunks = _Chunks(fields, n, device) if buffer is None else None
        self._from_info, self._from_step_info = from_info, from_step_info
        self._inputs = Inputs(fields, n, device, from_info, from_step_info, initial_hidden)
        self._has_value = "value" in fields and isinstance(buffer, RolloutBuffer)
        self._returns: deque[float] = deque(maxlen=EPISODE_HISTORY)
        self._lengths: deque[int] = deque(maxlen=EPISODE_HISTORY)
        self._total_episodes = 0
        self._sums = None if self._vector.device is None else EpisodeSums(n, device, EPISODE_HISTORY)
        """Has the episodes of a simulator; the three above are then as old as the last look at them."""
        self._finals_check: FinalCheck | None = None
        """Checks the first final observations that come beside the reset observation; None once it has seen enough."""
        self._looked = 0  # how many steps of a simulator it has seen
        if self._vector.mode == "SameStep":
            space = attribute(self.envs, "single_observation_space")
            self._finals_check = self._inputs.final_check(space, self._vector.given)
        self.total_steps = 0
        self._obs: Leaves = {}  # none: the next call resets the envs
        self._was_reset = False  # True from the first reset on, which takes the seed
        self._under_way = False  # True while steps are played: still True at the next call, an exception ended them
        self._warmed = False  # True while the rollout of this collector has steps of a warm-up
        if isinstance(buffer, ReplayBuffer | RolloutBuffer):
            buffer.check_ends = False  # the collector stores episode ends correctly

    @property
    def _sink(self) -> Sink:
        """The sink of the steps."""
        return cast("_Chunks", self._chunks) if self.buffer is None else self.buffer

    # -- the public face ----------------------------------------------------------------------------------------

    @property
    def returns(self) -> deque[float]:
        """The undiscounted returns of the last 100 episodes. Those of a simulator are read when you ask for them.

        Raises:
            EnvError: a simulator has hidden a final observation, which is required.
        """
        self._read_episodes()
        return self._returns

    @property
    def lengths(self) -> deque[int]:
        """The lengths of the last 100 episodes, as :attr:`returns`."""
        self._read_episodes()
        return self._lengths

    @property
    def total_episodes(self) -> int:
        """How many episodes have ended, as :attr:`returns`."""
        self._read_episodes()
        return self._total_episodes

    def _read_episodes(self) -> None:
        """Read what a simulator's device knows of the episodes; waits for it."""
        if self._sums is not None and self._was_reset:
            self._vector.refuse_hidden()
            if self._finals_check is not None and not self._finals_check.warn():
                self._finals_check = None
            returns, lengths, self._total_episodes = self._sums.read()
            self._returns = deque(returns, maxlen=EPISODE_HISTORY)
            self._lengths = deque(lengths, maxlen=EPISODE_HISTORY)

    def reset(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start new episodes in all envs. The first :meth:`collect` or :meth:`steps` does it with the collector's seed.

        From now on the envs belong to this collector, until another collector resets them. Running episodes are cut:
        their newest steps are truncated in a rollout, and incomplete in a replay. To start a rollout over, clear the
        buffer as well.

        Args:
            seed: of the envs: one number, from which each env gets its own, or a list with one for each env.
            options: passed to the ``reset`` of the envs.
        """
        initial, n = self._inputs.initial_states(), self._vector.num_envs
        seeds = require_start("reset", n, seed, options)
        self._was_reset, self._obs = True, {}
        obs, info = self._vector.reset(seeds, options)
        self._sink.interrupt()
        start = self._vector.everywhere()
        self._last = self._inputs.no_last()
        self._info = self._inputs.info(info, start) | self._inputs.starts(start) | self._last
        self._hidden: Leaves = {path: x.expand(n, *x.shape).clone() for path, x in initial.items()}
        self._at_start = start
        if self._sums is not None:
            self._sums.restart()
        self._episode_return = np.zeros(n, np.float64)
        self._episode_length = np.zeros(n, np.int64)
        self._under_way = False
        self._vector.left = self._vector.shown()
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
            LifecycleError: there is no buffer, or somebody else has played in these envs since; call :meth:`reset`.
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
        count = _steps_to_play(buffer, num_steps) if isinstance(buffer, RolloutBuffer) else num_steps or 1
        self._begin()
        began, before = time.perf_counter(), self.total_steps
        self._play(count, progress)
        self._under_way = False
        seconds, steps = time.perf_counter() - began, self.total_steps - before
        if self._sums is not None:
            return CollectStats(steps, seconds, read=partial(self._read_ended, self._ended))
        return CollectStats(steps, seconds, *self._episodes)

    def _read_ended(self, ended: list[Ended]) -> Episodes:
        self._vector.refuse_hidden()
        return read_ended(ended)

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
            LifecycleError: there is a buffer, or somebody else has played in these envs since; call :meth:`reset`.
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
        # an exception interrupted the last collection, and perhaps this repair, too; or a warm-up filled the rollout
        if self._under_way or self._warmed:
            self._give_up()

    def _begin(self) -> None:
        """Reset the envs if that is due; else require that their episodes are still this collector's."""
        if not self._obs:
            self.reset(seed=None if self._was_reset else self.seed)
        else:
            self._vector.require_own()
            if self._hidden:  # a learned initial state may have changed since the last collection
                self._hidden = self._started(self._hidden, self._at_start)

    def _give_up(self) -> None:
        """Make the next collection reset the envs, which may be a step ahead of what is stored."""
        self._obs = {}
        if isinstance(self.buffer, RolloutBuffer):
            self.buffer.clear()
        self._under_way = self._warmed = False

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

        The rollout that this collector fills is not the place for them: its next collection starts new episodes, and
        clears it first, unless it wraps.

        Args:
            buffer: any buffer of the same number of envs.
            num_steps: vector steps to make.
            policy: default: uniformly random actions among those that ``action_mask`` allows. The other fields that a
                policy returns are then 0.
            envs: envs to play in, or a function that makes them; default: new ones like this collector's.
            seed: of the new envs, unless they are a simulator whose ``reset`` takes none, and of the random actions.

        Raises:
            EnvError: it is unknown how to make such envs (they may be wrapped); pass ``envs``.
        """
        require("warm", FILLED_RULE, buffer=buffer)
        fresh, made = envs, is_factory(envs)
        if envs is None:
            fresh, made = self._vector.remake(), True
        fresh, schema = vectorized(fresh() if is_factory(fresh) else fresh), buffer.schema
        if policy is None:
            space = getattr(inner(fresh), "single_action_space", None)
            if space is None:
                raise EnvError(
                    f"warm() draws random actions from the single_action_space of envs, and {fresh!r:.200} has none; "
                    "pass warm(..., policy=...)"
                )
            acting: Policy = _RandomPolicy(space, schema, buffer.num_envs, buffer.device, seed)
        else:
            acting = policy
        collector = None
        try:
            collector = Collector(
                fresh,
                acting,
                buffer,
                # the given policy's own value, where it is not the one that acts here
                value_fn=self.value_fn if policy is None and self._has_value else None,
                seed=seed_for(fresh, seed),
                final_obs=self._vector.final_obs,
                from_info=self._from_info,
                from_step_info=tuple(name for name in self._from_step_info if name in schema),
                initial_hidden=self._inputs.initial_hidden if "hidden" in schema else None,
                autoreset_mode=self._vector.mode if envs is None else None,
            )
            return collector.collect(num_steps)
        finally:
            if not isinstance(buffer, RolloutBuffer):
                buffer.interrupt()  # the next steps do not follow the last ones of these envs
            elif buffer is self.buffer and collector is not None and collector._was_reset:
                self._obs, self._warmed = {}, not buffer.wrap  # the next collection's reset interrupts it
            if made and hasattr(fresh, "close"):
                fresh.close()

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        with suppress(EnvError):  # which a look at the episodes raises, and this text does not
            self._read_episodes()
        returns = self._returns
        mean = f", mean return of the last {len(returns)}: {np.mean(returns):.4g}" if returns else ""
        facts = {
            "envs": f"{self._vector.num_envs} of {self._vector.given!r}, autoreset {self._vector.mode}",
            "policy": getattr(self.policy, "__qualname__", type(self.policy).__name__),
            "buffer": "none; steps() returns the steps" if self.buffer is None else str(self.buffer).partition("\n")[0],
            "episodes": f"{self._total_episodes:,} ended{mean}",
        }
        return f"Collector: {self.total_steps:,} steps", facts

    # -- the loop -----------------------------------------------------------------------------------------------

    @torch.no_grad()  # as a decorator: an exception on the line of a `with` could leave gradients off
    def _play(self, count: int, progress: bool | None) -> None:
        """Play ``count`` vector steps; the caller clears ``_under_way``. After an exception the next call resets."""
        self._episodes: Episodes = [], [], []
        self._ended: list[Ended] = []
        self._finals: list[_Final] = []
        sink = self._sink
        with progress_bar(count, progress) as counted:
            try:
                self._under_way = True
                for t in counted(range(count)):
                    self._step(t, sink)
                if isinstance(sink, RolloutBuffer):
                    self._bootstrap(sink, count)
            except BaseException:
                self._give_up()
                raise
        self._vector.left = self._vector.shown()

    def _step(self, t: int, sink: Sink) -> None:
        """Play step ``t`` of a collection, and store it: the policy acts, the envs answer, the episodes go on."""
        inputs, vector = self._inputs, self._vector
        seen = self._obs["obs",] if inputs.is_flat else inputs.as_given(self._obs)
        keywords = inputs.keywords(self._hidden, self._info) if inputs.has_keywords else {}
        # copies, both ways: the policy and the envs may write to what they are handed, and to what they have returned
        handed = seen.clone()
        try:
            answer = self.policy(handed, **keywords)
        except (RuntimeError, TypeError) as error:
            _explain(error, self.policy, handed, keywords)
            raise
        fields = answer if answer.__class__ is dict else _fields_of(answer)
        action = inputs.env_action(fields, vector.takes_tensors)
        step = {name: x.clone() if isinstance(x := fields[name], Tensor) else _copy(x) for name in inputs.from_policy}
        states = self._hidden
        if inputs.has_hidden:
            states = inputs.hidden(fields.get("hidden"), states)  # before the envs play: it may not fit
            step["hidden"] = inputs.schema.rebuild("hidden", self._hidden.__getitem__)
        obs, reward, terminated, truncated, info = vector.step(action)
        done, cut, played = terminated | truncated, truncated & ~terminated, ~vector.ignored

        step["obs"], step["reward"] = seen, reward
        if self._info:
            step |= inputs.named(self._info)
        if inputs.from_step_info:
            step |= inputs.step_info(info, done, vector.ignored)
        step["terminated"], step["truncated"] = terminated, truncated  # those of the envs, also if an info has the name
        for name, x in step.items():
            if isinstance(x, Tensor) and x.device != inputs.device:
                step[name] = x.to(inputs.device)
        if self._last:
            self._last = inputs.last(step, self._last)

        outcome = _Outcome(obs, inputs.obs(obs), info, states, done, cut)
        if self._sums is not None:
            self._add_of_simulator(self._sums, sink, step, outcome)
            return
        real = played
        if isinstance(sink, RolloutBuffer):
            if self._has_value and cut.any():
                real = self._note_finals(t, outcome, real)
        elif sink.own_next_obs or done.any():
            step["next_obs"], real = self._next_obs(sink.own_next_obs, outcome, real)
        if not real.all():
            step["mask"] = real
        sink.add(step)  # before anything goes on: a step that does not fit ends the collection here

        self._count_episodes(reward if type(reward) is np.ndarray else as_host(reward), played, done)
        self._carry_over(outcome)

    def _add_of_simulator(self, sums: EpisodeSums, sink: Sink, step: dict[str, Any], outcome: _Outcome) -> None:
        """Store a step of a simulator, whose fields are completed here, and let the episodes go on.

        No operation waits for its device. ``sums`` adds up the rewards of the episodes.

        Raises:
            EnvError: an env hides the final observation of a truncated episode, which is required.
        """
        inputs, info, after = self._inputs, outcome.info, outcome.after
        done, cut = outcome.done.to(inputs.device), outcome.cut.to(inputs.device)
        if self._has_value or not isinstance(sink, RolloutBuffer):
            final, hidden = self._vector.final_tensors(cut, info)
            true_next = inputs.true_next(final, done, after, self._obs)
            if final is not None and self._finals_check is not None:
                self._check_tensors(self._finals_check, cut, true_next, after)
            if hidden is not None:
                step["mask"] = ~hidden
            if not isinstance(sink, RolloutBuffer):
                step["next_obs"] = inputs.as_given(true_next)
            elif final is not None:
                known = inputs.final_info(final_info(info), self._last)
                value = _ask(self.value_fn, inputs.as_given(true_next), inputs.keywords(outcome.states, known))
                step["final_value"] = value.where(shaped_as(cut, value), torch.nan)
        sink.add(step)  # before anything goes on: a step that does not fit ends the collection here
        self._ended.append(sums.add(step["reward"], done))
        self.total_steps += inputs.num_envs
        self._carry_over(outcome._replace(done=done))

    def _check_tensors(self, check: FinalCheck, cut: Tensor, final: Leaves, after: Leaves) -> None:
        """Look at one of the first steps of a simulator. What another device has found is read with the episodes."""
        check.look(torch.arange(len(cut), device=cut.device), cut, self._obs, final, after)
        self._looked += 1
        if (cut.is_cpu and not check.warn()) or self._looked == LOOKED:
            self._finals_check = None

    def _note_finals(self, t: int, outcome: _Outcome, real: Bools) -> Bools:
        """Note the final observations of step ``t`` of this collection, to be valued at its end.

        Returns:
            the rows of ``real`` that do not hide their final observation.

        Raises:
            EnvError: an env hides the final observation of a truncated episode, which is required.
        """
        inputs, cut = self._inputs, outcome.cut
        final, details, present = self._vector.final_observations(cut, outcome.obs, outcome.info)
        envs = np.flatnonzero(cut & present)
        if len(envs):
            where, rows = inputs.rows(envs), inputs.obs_of(final, envs)
            if self._finals_check is not None:
                self._check_finals(self._finals_check, where, rows, outcome)
            memory = {path: x[where] for path, x in outcome.states.items()}
            known = {path: x[where] for path, x in inputs.final_info(details, self._last).items()}
            self._finals.append(_Final(t, where, _PolicyInputs(rows, memory, known)))
        return real & (~cut | present)

    def _next_obs(self, every: bool, outcome: _Outcome, real: Bools) -> tuple[Tensor | Batch, Bools]:
        """The next observations of a step as a replay takes them, and which of its rows are steps.

        Args:
            every: True if each row needs its next observation; False if only those that end an episode do.
            outcome: of the step.
            real: the envs that did not ignore their action, ``[N]``.

        Raises:
            EnvError: an env hides the final observation of a truncated episode, which is required. If it is not, the
                row of that env is left out.
        """
        inputs, before, done, cut = self._inputs, self._obs, outcome.done, outcome.cut
        after = dict(outcome.after if every else before)
        if done.any():
            final, _, present = self._vector.final_observations(cut, outcome.obs, outcome.info)
            real = real & (~cut | present)
            hidden, envs = inputs.rows(done & ~present), np.flatnonzero(done & present)
            where, rows = inputs.rows(envs), inputs.obs_of(final, envs) if len(envs) else {}
            if rows and self._finals_check is not None and cut.any():
                self._check_finals(self._finals_check, where, rows, outcome)
            for path, x in after.items():
                # a hidden row is a terminal or is masked, so it is never bootstrapped: any observation will do
                after[path] = torch.where(shaped_as(hidden, x), before[path], x)
                if rows:
                    after[path] = after[path].index_copy(0, where, rows[path])
        return inputs.as_given(after), real

    def _check_finals(self, check: FinalCheck, envs: Tensor, final: Leaves, outcome: _Outcome) -> None:
        """Look at the final observations ``[K, ...]`` of ``envs``, one of the first ends in envs that reset at once."""
        before, after = ({path: x[envs] for path, x in leaves.items()} for leaves in (self._obs, outcome.after))
        check.look(envs, self._inputs.rows(outcome.cut)[envs], before, final, after)
        if not check.warn():
            self._finals_check = None

    def _count_episodes(self, reward: Array, played: Bools, done: Bools) -> None:
        self.total_steps += int(played.sum())
        self._episode_return += reward * played
        self._episode_length += played
        for n in np.flatnonzero(done):
            returns, lengths, envs = self._episodes
            returns.append(float(self._episode_return[n]))
            lengths.append(int(self._episode_length[n]))
            envs.append(int(n))
            self._returns.append(returns[-1])
            self._lengths.append(lengths[-1])
            self._total_episodes += 1
            self._episode_return[n] = self._episode_length[n] = 0

    def _carry_over(self, outcome: _Outcome) -> None:
        """Keep what the policy gets next, and which envs are at the start of an episode."""
        inputs, vector, after, info, done = self._inputs, self._vector, outcome.after, outcome.info, outcome.done
        self._at_start = starts = vector.ignored if vector.mode == "NextStep" else done
        # after an episode's end no action follows, so its info may be missing
        known = inputs.info(info, vector.informed(done)) if inputs.from_info else {}
        if vector.mode == "Disabled" and done.any():
            obs, info = vector.restart(done)  # which this mode leaves to us
            fresh, rows, after = inputs.info(info, done), inputs.rows(done), inputs.obs(obs)
            known = {path: torch.where(shaped_as(rows, x), fresh[path], x) for path, x in known.items()}
        if self._last:
            begun = inputs.rows(starts)
            self._last = {path: x.masked_fill(shaped_as(begun, x), 0) for path, x in self._last.items()}
        if inputs.keyword_names:
            known |= inputs.starts(starts) | self._last
        self._info = known
        self._obs = after
        if outcome.states:
            self._hidden = self._started(outcome.states, starts)

    def _bootstrap(self, buffer: RolloutBuffer, count: int) -> None:
        """Set the values after a collection of ``count`` steps, in one call of the value function.

        They are those of each env's current observation, and of the final ones of truncated episodes.
        """
        inputs, n, finals = self._inputs, buffer.num_envs, self._finals
        now = _PolicyInputs(self._obs, self._hidden, self._info)
        if not self._has_value:
            buffer.set_last(obs=inputs.as_given(now.obs))
            return
        obs, hidden, info = map(_joined, zip(now, *(final.inputs for final in finals), strict=True))
        value = _ask(self.value_fn, inputs.as_given(obs), inputs.keywords(hidden, info))
        buffer.set_last(obs=inputs.as_given(now.obs), value=value[:n])
        if finals:
            first = buffer.steps - count  # below 0 in a rollout that wraps, where old steps may be dropped
            steps = torch.cat([torch.full_like(x.envs, first + x.step) for x in finals])
            envs, stored = torch.cat([final.envs for final in finals]), steps >= 0
            buffer.set_final_value(steps[stored], envs[stored], value[n:][stored])

    # -- hidden states ------------------------------------------------------------------------------------------

    def _started(self, states: Leaves, where: Flags) -> Leaves:
        """The states, with the initial state where an episode starts."""
        if not (isinstance(where, Tensor) or where.any()):
            return states
        initial, rows = self._inputs.initial_states(), self._inputs.rows(where)
        return {path: torch.where(shaped_as(rows, x), initial[path], x) for path, x in states.items()}


class _Outcome(NamedTuple):
    """The outcome of a step in all envs."""

    obs: object
    """The observations that it returned."""
    after: Leaves
    """Their leaves, ``[N, ...]``."""
    info: Info
    """The info that it returned."""
    states: Leaves
    """The hidden states after it, ``[N, ...]``."""
    done: Any
    """The envs whose episode ended, bool ``[N]``."""
    cut: Any
    """Those that were truncated and not terminated, bool ``[N]``."""


class _PolicyInputs(NamedTuple):
    """The inputs of a policy: observations, hidden states and the fields passed as keywords, rows ``[B, ...]``."""

    obs: Leaves
    hidden: Leaves
    info: Leaves


class _Final(NamedTuple):
    """The truncated episodes of a vector step, whose final observations have no value yet."""

    step: int
    """The place of the step in this collection."""
    envs: Tensor
    """The envs of those episodes, ``[K]``."""
    inputs: _PolicyInputs
    """The inputs of a policy at their final observations, rows ``[K, ...]``."""


def _joined(parts: Sequence[Leaves]) -> Leaves:
    return {path: torch.cat([leaves[path] for leaves in parts]) for path in parts[0]}


def _steps_to_play(buffer: RolloutBuffer, requested: int | None) -> int:
    """The number of vector steps to play. A full rollout is cleared first.

    Raises:
        FullError: the buffer has room for fewer steps than requested.
    """
    steps = buffer.steps
    is_full = steps == buffer.num_steps
    left = buffer.num_steps if is_full else buffer.num_steps - steps
    count = left if requested is None else requested
    if count > left and not buffer.wrap:
        raise FullError(f"collect({count!r}): the buffer has room for {left} more steps; collect 1 to {left}")
    if is_full and not buffer.wrap:
        buffer.clear()
    return count


class CollectStats:
    """The result of one call of :meth:`Collector.collect`.

    ``num_steps`` counts real transitions of all envs. ``seconds`` is wall time; a simulator's device may still be at
    work. ``episode_returns`` (undiscounted), ``episode_lengths`` and ``episode_envs`` describe the episodes that ended,
    in that order. Those of a simulator are read when you first ask for one of them, which waits for its device.

    Raises:
        EnvError: when you ask, a simulator has hidden a final observation, which is required.
    """

    num_steps: int
    seconds: float

    __slots__ = ("_episodes", "_read", "num_steps", "seconds")

    def __init__(
        self,
        num_steps: int,
        seconds: float,
        episode_returns: Sequence[float] = (),
        episode_lengths: Sequence[int] = (),
        episode_envs: Sequence[int] = (),
        *,
        read: Callable[[], Episodes] | None = None,
    ) -> None:
        self.num_steps, self.seconds = num_steps, seconds
        self._episodes: Episodes = list(episode_returns), list(episode_lengths), list(episode_envs)
        self._read = read

    def __reduce__(self) -> tuple[object, ...]:
        return CollectStats, (self.num_steps, self.seconds, *self._known())

    def __repr__(self) -> str:
        """One line without the lists: with thousands of envs, thousands of episodes may end in one call."""
        text = f"{self.num_steps:,} steps in {self.seconds:.3g} s, {self.num_episodes:,} episodes ended"
        if self.num_episodes:
            from statistics import fmean

            mean_return, mean_length = fmean(self.episode_returns), fmean(self.episode_lengths)
            text += f" with a mean return of {mean_return:.4g} and a mean length of {mean_length:.4g}"
        return f"CollectStats: {text}"

    @property
    def episode_returns(self) -> list[float]:
        """The undiscounted return of each episode that ended."""
        return self._known()[0]

    @property
    def episode_lengths(self) -> list[int]:
        """The number of its steps."""
        return self._known()[1]

    @property
    def episode_envs(self) -> list[int]:
        """The env that it was played in, from 0 to N - 1."""
        return self._known()[2]

    def _known(self) -> Episodes:
        if self._read is not None:
            self._episodes, self._read = self._read(), None
        return self._episodes

    @property
    def num_episodes(self) -> int:
        """Episodes that ended."""
        return len(self.episode_returns)

    @property
    def steps_per_second(self) -> float:
        """Real transitions per second of wall time."""
        return self.num_steps / max(self.seconds, 1e-9)


# The first chunk after a reset has a masked row in front: without it the observation after the reset would be the next
# observation of the step before. A masked row already interrupts, so no new field is needed. A truncated step whose
# final observation is hidden is passed so as well: chunks can say it only so, and one way makes collector and chunks
# equal to the bit.
class _Chunks:
    """Takes vector steps one by one, and returns them as :meth:`relive.ReplayBuffer.extend` takes them.

    Every step is checked as a replay would check it.

    Args:
        schema: the fields of a step.
        num_envs: N.
        device: of the tensors in the steps. The arrays of a chunk are always in RAM.

    Raises:
        SchemaError: a replay cannot have this schema.
    """

    own_next_obs = True
    """True: every step of a chunk has its next observation, so that it fits every kind of replay."""

    def __init__(self, schema: Schema, num_envs: int, device: torch.device) -> None:
        require("Collector", (lambda schema: isinstance(schema, Schema), "expected a relive.Schema"), schema=schema)
        self._fields = stored_fields(schema, own_next_obs=True)
        self._num_envs = num_envs
        self._check = StepChecker(self._fields, num_envs, device, upload=False)
        self._was_returned = self._interrupted = False
        self.begin(0)

    def interrupt(self) -> None:
        """The next chunk does not follow the last one."""
        self._interrupted = self._was_returned

    def begin(self, num_steps: int) -> None:
        """Forget the steps of an unfinished chunk, and start one of ``num_steps``."""
        self._count = int(self._interrupted)  # rows so far: a masked one in front interrupts all envs
        rows = self._count + num_steps, self._num_envs
        self._rows: dict[Path, Array] = {
            path: np.zeros((*rows, *field.shape), numpy_dtype(field.dtype))
            for path, field in self._fields.leaves.items()
        }
        self._mask = np.zeros(rows, np.bool_)

    def add(self, step: dict[str, Any]) -> None:
        """Check and copy one vector step ``[N, ...]``, with ``next_obs``; ``mask`` is optional.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema.
        """
        mask = step.pop("mask", True)
        for rows, leaf in zip(self._rows.values(), self._check(step), strict=True):
            rows[self._count] = numpy_view(leaf.detach().cpu()) if isinstance(leaf, Tensor) else leaf
        self._mask[self._count] = mask
        self._count += 1

    def end(self) -> dict[str, Any]:
        """The chunk: the fields of the schema, nested as it is, ``next_obs`` and ``mask``."""
        self._was_returned, self._interrupted = True, False
        leaves = {path: host_leaf(rows, self._fields.leaves[path].dtype) for path, rows in self._rows.items()}
        steps = {name: self._fields.rebuild(name, leaves.__getitem__) for name in self._fields.names}
        steps["mask"] = self._mask
        self.begin(0)  # the arrays belong to the caller now
        return steps


POLICY_RULE: Rule = callable, "expected a function of observations, such as a torch.nn.Module"


def _ask(policy: Policy, obs: Tensor | Batch, inputs: dict[str, object]) -> Any:
    """The result of a policy or value function."""
    try:
        return policy(obs, **inputs)
    except (RuntimeError, TypeError) as error:
        _explain(error, policy, obs, inputs)
        raise


def _explain(error: RuntimeError | TypeError, policy: Policy, obs: Tensor | Batch, inputs: dict[str, object]) -> None:
    """Say what is known of an error of a policy or value function; the caller raises it again.

    An error of torch about dtypes gets a note if observations are float64, as networks are float32 unless told.

    Raises:
        FieldError: the function's signature does not fit. It lists what the function is passed.
    """
    if isinstance(error, RuntimeError):
        if "ouble" in str(error) and _has_float64(obs):
            add_note(
                error,
                "The policy (or value_fn) got float64 observations, as the schema declares them. If the network is "
                "float32, make the buffer with Schema.from_env(envs).as_float32()",
            )
        return
    reason = _misfit(policy, inputs)
    if reason is None:
        return
    call = ", ".join(["obs", *(f"{name}=..." for name in inputs)])
    raise FieldError(
        f"the policy (or value_fn) is called as policy({call}), which fails: {reason}. 'hidden', 'is_start', "
        "'last_action', 'last_reward' and the fields of from_info are passed if the schema has a field of that "
        "name; add it to the schema, or to the policy's parameters"
    ) from error


def _misfit(policy: Policy, inputs: dict[str, object]) -> str | None:
    """The reason why a function cannot be called with these arguments, if its signature shows one."""
    try:
        signature = inspect.signature(getattr(policy, "forward", policy))  # a torch.nn.Module takes anything itself
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, **inputs)
    except TypeError as error:
        return str(error)
    return None


def _has_float64(obs: Tensor | Batch) -> bool:
    """True if a tensor, or a member of a batch, is float64."""
    leaves = [obs] if isinstance(obs, Tensor) else leaves_by_path(obs).values()
    return any(leaf.dtype is torch.float64 for leaf in leaves)


def _fields_of(answer: Any) -> dict[str, Any]:
    """The fields of a policy's answer, which is a mapping or the bare actions."""
    return dict(answer.items()) if hasattr(answer, "items") else {"action": answer}


def _copy(answer: Any) -> Any:
    """A copy of a field of a policy's answer, which may be nested."""
    if hasattr(answer, "clone"):  # a tensor or a TensorDict
        return answer.clone()
    return map_leaves(_copy, answer) if isinstance(answer, Mapping | tuple) else deepcopy(answer)


def _value_of(policy: Policy) -> Policy:
    """A value function that calls ``policy`` and returns only the value."""

    def value(obs: Tensor | Batch, **inputs: object) -> Any:
        fields = _fields_of(_ask(policy, obs, inputs))
        if "value" not in fields:
            raise FieldError("the schema has 'value', but the policy's answer does not; return it, or pass value_fn=")
        return fields["value"]

    return value


class _RandomPolicy:
    """Uniformly random actions among those that ``action_mask`` allows. All other fields of a policy are 0."""

    def __init__(self, space: Any, schema: Schema, num_envs: int, device: torch.device, seed: int | None) -> None:
        self._space, self._schema, self._num_envs, self._device = space, schema, num_envs, device
        self._rng = np.random.default_rng(seed_or_drawn(require_start("warm", 1, seed)))
        space.seed(int(self._rng.integers(2**31)))

    def __call__(self, obs: object, **inputs: object) -> dict[str, object]:
        """Every field of the schema that comes neither from the env nor from ``inputs``."""
        known = {"obs", "action", "reward", "terminated", "truncated", *inputs} - {"hidden"}
        answer = {name: self._schema.rebuild(name, self._zeros) for name in self._schema.names if name not in known}
        return answer | {"action": self._actions(inputs.get("action_mask"))}

    def _zeros(self, path: Path) -> Tensor:
        leaf = self._schema.leaves[path]
        zeros = torch.zeros((self._num_envs, *leaf.shape), dtype=leaf.dtype, device=self._device)
        return swap_layers(zeros) if path[0] == "hidden" else zeros

    def _actions(self, mask: object) -> object:
        if mask is None:
            rows = [self._space.sample() for _ in range(self._num_envs)]
            return self._schema.rebuild("action", lambda path: np.stack([descend(row, path[1:]) for row in rows]))
        legal: Bools = as_host(mask).astype(np.bool_)
        if legal.ndim != 2 or not hasattr(self._space, "start"):
            raise EnvError("random actions under an action mask need one Discrete action; pass warm(..., policy=...)")
        return np.where(legal, self._rng.random(legal.shape), -1.0).argmax(1) + int(self._space.start)
