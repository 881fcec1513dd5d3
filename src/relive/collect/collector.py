"""Collector: plays a policy in a vector env, and stores the steps in a buffer or returns them."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches import swap_layers
from ..errors import EnvError, FieldError, FullError, LifecycleError, ParameterError
from ..parameters import COUNT_RULE, Rule, is_flag, require, seed_or_drawn
from ..replay.buffer import ReplayBuffer
from ..replay.checks import stored_fields
from ..rollout.buffer import RolloutBuffer
from ..steps.arrays import NUMPY_DTYPES, Bools, as_host, numpy_dtype, numpy_view
from ..steps.checker import StepChecker
from ..steps.schema import Path, Schema, descend
from ..steps.summary import Summary, html, text
from .envs import VectorEnvs, is_factory, pick, require_start, vectorized
from .inputs import Inputs, Leaves, shaped_as

__all__ = [
    "FILLED_RULE",
    "SINK_RULE",
    "Chunks",
    "CollectStats",
    "Collector",
    "Finals",
    "Given",
    "Policy",
    "RandomPolicy",
    "StepSink",
    "ask",
    "fields_of",
    "following",
    "progress_bar",
    "require_functions",
    "room",
    "truncated_rows",
    "value_of",
]


class Given(NamedTuple):
    """The inputs of a policy: observations, hidden states and the fields passed as keywords, rows ``[B, ...]``."""

    obs: Leaves
    hidden: Leaves
    info: Leaves


class _Ended(NamedTuple):
    made: int
    """How many vector steps were played before the one that ended the episodes."""
    envs: Tensor
    """The envs of those episodes, ``[K]``."""
    given: Given
    """The inputs of a policy at their final observations, rows ``[K, ...]``."""


class Finals:
    """The ends of truncated episodes of a rollout that have no value yet."""

    def __init__(self) -> None:
        self._made = 0
        self._waiting: list[_Ended] = []

    def clear(self) -> None:
        """Forget them."""
        self._waiting = []

    def note(self, ended: tuple[Tensor, Given] | None) -> None:
        """Note a vector step that was added to the rollout, with the envs that it truncated and their final inputs."""
        if ended is not None:
            self._waiting.append(_Ended(self._made, *ended))
        self._made += 1

    def after(self, now: Given) -> Given:
        """The rows ``now``, followed by those of all ends."""
        ends = [ended.given for ended in self._waiting]
        return Given(*(_joined(leaves, [given[i] for given in ends]) for i, leaves in enumerate(now)))

    def set_values(self, buffer: RolloutBuffer, values: Tensor) -> None:
        """Pass the values of all ends, in the order of :meth:`after`, to the rollout."""
        if self._waiting:
            # counted from the newest step, since a rollout that wraps may have dropped old steps
            steps = torch.cat([torch.full_like(e.envs, buffer.steps - (self._made - e.made)) for e in self._waiting])
            envs = torch.cat([ended.envs for ended in self._waiting])
            kept = steps >= 0
            buffer.set_final_value(steps[kept], envs[kept], values[kept])
        self.clear()


def _joined(first: Leaves, others: list[Leaves]) -> Leaves:
    return {path: torch.cat([x, *(leaves[path] for leaves in others)]) for path, x in first.items()}


def room(buffer: RolloutBuffer, wanted: int | None) -> int:
    """How many vector steps to play; clears a full rollout.

    Raises:
        FullError: more are wanted than the buffer can take.
    """
    left = buffer.num_steps if buffer.is_full else buffer.num_steps - buffer.steps
    count = left if wanted is None else wanted
    if count > left and not buffer.wrap:
        raise FullError(f"collect({count!r}): the buffer has room for {left} more steps; collect 1 to {left}")
    if buffer.is_full and not buffer.wrap:
        buffer.clear()
    return count


Answer = tuple[Any, dict[str, Any]]
"""The observations and the info that a step of the envs returned."""


def following(
    inputs: Inputs,
    vector: VectorEnvs,
    before: Leaves,
    step: dict[str, Any],
    real: Bools,
    answer: Answer,
    every: bool,
) -> dict[str, Any]:
    """``next_obs`` and ``mask`` of a vector step, for a replay; each only if it is needed.

    Args:
        inputs: converts observations.
        vector: the envs.
        before: the observations that the policy acted on, ``[N, ...]``.
        step: has ``terminated`` and ``truncated``, ``[N]``.
        real: the envs that did not ignore their action, ``[N]``.
        answer: the observations and the info that the step returned.
        every: whether each row needs its next observation, or only those that end an episode.

    Raises:
        EnvError: an env hides the final observation of a truncated episode, which is required. If it is not, the mask
            leaves that row out.
    """
    obs, info = answer
    done, needed = step["terminated"] | step["truncated"], dict[str, Any]()
    after = inputs.obs(obs) if every else dict(before)
    ended = done.any()
    if ended:
        cut = step["truncated"] & ~step["terminated"]
        given, _, present = vector.final_observations(cut, obs, info)
        real = real & (~cut | present)
        hidden, envs = inputs.rows(done & ~present), np.flatnonzero(done & present)
        where = torch.as_tensor(envs, device=inputs.device)
        for path, x in after.items():
            # after a terminal nothing is bootstrapped, so a hidden observation does not matter
            kept = torch.where(shaped_as(hidden, x), before[path], x)
            rows = inputs.leaf(path, pick(given, path[1:], envs)) if len(envs) else kept[:0]
            after[path] = kept.index_copy(0, where, rows)
    if every or ended:
        needed["next_obs"] = inputs.as_given(after)
    if not real.all():
        needed["mask"] = real
    return needed


def truncated_rows(
    inputs: Inputs,
    vector: VectorEnvs,
    step: dict[str, Any],
    real: Bools,
    answer: Answer,
    after: Leaves,
    info: Leaves,
    last: Leaves,
) -> tuple[Bools, tuple[Tensor, Given] | None]:
    """The final observations of a vector step that a rollout with values must value.

    Args:
        inputs: converts observations.
        vector: the envs.
        step: has ``terminated`` and ``truncated``, ``[N]``.
        real: the envs that did not ignore their action, ``[N]``.
        answer: the observations and the info that the step returned.
        after: the hidden states after the step, ``[N, ...]``.
        info: the fields that came with the observations before, ``[N, ...]``.
        last: the actions and rewards of the step, ``[N, ...]``.

    Returns:
        the rows that are left after those with a hidden final observation, bool ``[N]``; and the envs of the others
        that were truncated with the policy's inputs there, or None if there are none.

    Raises:
        EnvError: an env hides the final observation of a truncated episode, which is required.
    """
    cut = step["truncated"] & ~step["terminated"]
    if not cut.any():
        return real, None
    given, details, present = vector.final_observations(cut, *answer)
    real, envs = real & (~cut | present), np.flatnonzero(cut & present)
    if not len(envs):
        return real, None
    where = torch.as_tensor(envs, device=inputs.device)
    rows = {path: inputs.leaf(path, pick(given, path[1:], envs)) for path in inputs.obs_paths}
    states = {path: x[where] for path, x in after.items()}
    return real, (where, Given(rows, states, inputs.final_info(details, envs, info, last)))


class StepSink(Protocol):
    """What takes steps as a replay does, such as a writer of :class:`relive.Lanes`."""

    schema: Schema
    """The fields of a step."""
    num_envs: int
    """N."""
    device: torch.device
    """Where the observations that the policy gets are."""
    own_next_obs: bool
    """Whether every step needs its next observation."""

    def add(self, step: Mapping[str, Any], /) -> None:
        """Store one step of every env, as :meth:`relive.ReplayBuffer.add` takes it."""
        ...

    def interrupt(self) -> None:
        """The next steps start new episodes."""
        ...


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


class Chunks:
    """Takes vector steps one by one, and returns them as :meth:`relive.ReplayBuffer.extend` takes them.

    Every step is checked as a replay would check it. Every row has a next observation, so a chunk fits every kind of
    replay.

    Args:
        schema: the fields of a step.
        num_envs: N.
        device: of the tensors in the steps. The arrays of a chunk are always in RAM.

    Raises:
        SchemaError: a replay cannot have this schema.
    """

    own_next_obs = True
    """Whether every step needs its next observation, as for a replay."""

    def __init__(self, schema: Schema, num_envs: int, device: torch.device) -> None:
        require("Collector", (lambda schema: isinstance(schema, Schema), "expected a relive.Schema"), schema=schema)
        self._fields = stored_fields(schema, own_next_obs=True)
        self._num_envs = num_envs
        self._check = StepChecker(self._fields, num_envs, device, upload=False)
        self._given = self._cut = False
        self.begin(0)

    def interrupt(self) -> None:
        """The next chunk does not follow the last one."""
        self._cut = self._given

    def begin(self, num_steps: int) -> None:
        """Forget the steps of an unfinished chunk, and start one of ``num_steps``."""
        self._count = int(self._cut)  # the rows so far; the one in front is left out, which interrupts all envs
        front = self._count + num_steps, self._num_envs
        self._rows: dict[Path, NDArray[Any]] = {
            path: np.zeros((*front, *field.shape), numpy_dtype(field.dtype))
            for path, field in self._fields.leaves.items()
        }
        self._mask = np.zeros(front, np.bool_)

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
        self._given, self._cut = True, False
        steps = {name: self._fields.rebuild(name, self._leaf) for name in self._fields.names}
        steps["mask"] = self._mask
        self.begin(0)  # the arrays belong to the caller now
        return steps

    def _leaf(self, path: Path) -> Any:
        """One leaf as an array, or as a tensor if NumPy lacks its dtype."""
        rows, dtype = self._rows[path], self._fields.leaves[path].dtype
        return rows if dtype in NUMPY_DTYPES else torch.from_numpy(rows).view(dtype)


@dataclass(frozen=True, slots=True, repr=False)
class CollectStats:
    """What one call of :meth:`Collector.collect` did.

    ``num_steps`` counts real transitions of all envs; ``seconds`` is wall time. ``episode_returns`` (undiscounted) and
    ``episode_lengths`` describe the episodes that ended, in that order.
    """

    num_steps: int
    seconds: float
    episode_returns: list[float] = field(default_factory=list[float])
    episode_lengths: list[int] = field(default_factory=list[int])

    def __repr__(self) -> str:
        """One line without the lists: with thousands of envs, thousands of episodes may end in one call."""
        text = f"{self.num_steps:,} steps in {self.seconds:.3g} s, {self.num_episodes:,} episodes ended"
        if self.num_episodes:
            mean_return, mean_length = fmean(self.episode_returns), fmean(self.episode_lengths)
            text += f" with a mean return of {mean_return:.4g} and a mean length of {mean_length:.4g}"
        return f"CollectStats: {text}"

    @property
    def num_episodes(self) -> int:
        """Episodes that ended."""
        return len(self.episode_returns)

    @property
    def steps_per_second(self) -> float:
        """Real transitions per second of wall time."""
        return self.num_steps / max(self.seconds, 1e-9)


PROGRESS_RULE: Rule = (lambda wanted: wanted is None or is_flag(wanted), "expected True, False or None")
"""The rule for every argument that asks for a bar."""


LONG = 2.0
"""Seconds after which work shows its progress on a terminal."""


@contextmanager
def progress_bar(
    total: int | None, wanted: bool | None, doing: str = "collecting", unit: str = "steps"
) -> Generator[Callable[[], None]]:
    """A Rich progress bar, which goes on by one for each call of what it yields.

    Args:
        total: how many calls there will be; None if that is not known.
        wanted: True shows it, False does not; None shows it only on a terminal, after LONG seconds.
        doing: the word before the bar.
        unit: what is counted.

    Raises:
        ParameterError: ``wanted`` is something else.
    """
    require("progress bar", PROGRESS_RULE, progress=wanted)
    if wanted is False:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        if wanted:
            raise ImportError("a progress bar needs Rich: pip install 'relive[progress]'") from error
        yield lambda: None
        return
    console = Console(stderr=True)
    if wanted is None and not console.is_terminal:
        yield lambda: None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=console.is_terminal)
    task = bar.add_task(doing, total=total)
    began = time.perf_counter()

    def tick() -> None:
        if not bar.live.is_started and (wanted or time.perf_counter() - began > LONG):
            bar.start()
        bar.advance(task)

    try:
        yield tick
    finally:
        bar.stop()


Policy = Callable[..., Any]


POLICY_RULE: Rule = callable, "expected a function of observations, such as a torch.nn.Module"


def require_functions(policy: Any, value_fn: Any) -> None:
    """Require a policy that can be called, and a value function that can, or None.

    Raises:
        ParameterError: names the one that cannot.
    """
    require("Collector", POLICY_RULE, policy=policy, value_fn=policy if value_fn is None else value_fn)


def ask(policy: Policy, obs: Any, inputs: dict[str, Any]) -> Any:
    """The result of a policy or value function. If its signature does not fit, the error lists what it is passed.

    An error of torch about dtypes gets a note if observations are float64, as networks are float32 unless told.
    """
    try:
        return policy(obs, **inputs)
    except RuntimeError as error:
        if "ouble" in str(error) and _has_float64(obs):
            error.add_note(
                "The policy (or value_fn) got float64 observations, as the schema declares them. If the network is "
                "float32, make the buffer with Schema.from_env(envs).as_float32()"
            )
        raise
    except TypeError as error:
        reason = _misfit(policy, inputs)
        if reason is None:
            raise
        call = ", ".join(["obs", *(f"{name}=..." for name in inputs)])
        raise FieldError(
            f"the policy (or value_fn) is called as policy({call}), which fails: {reason}. 'hidden', 'is_start', "
            "'last_action', 'last_reward' and the fields of from_info are passed if the schema has a field of that "
            "name; add it to the schema, or to the policy's parameters"
        ) from error


def _misfit(policy: Policy, inputs: dict[str, Any]) -> str | None:
    """Why a function cannot be called with these arguments, if its signature shows it."""
    try:
        signature = inspect.signature(getattr(policy, "forward", policy))  # a torch.nn.Module takes anything itself
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, **inputs)
    except TypeError as error:
        return str(error)
    return None


def _has_float64(obs: Any) -> bool:
    """Whether a tensor, or a member of a TensorDict, is float64."""
    leaves = [obs] if isinstance(obs, torch.Tensor) else obs.values(include_nested=True, leaves_only=True)
    return any(leaf.dtype is torch.float64 for leaf in leaves)


def fields_of(answer: Any) -> dict[str, Any]:
    """The fields of a policy's answer, which is a mapping or the bare actions."""
    return dict(answer.items()) if hasattr(answer, "items") else {"action": answer}


def value_of(policy: Policy) -> Policy:
    """A value function that calls ``policy`` and returns only the value."""

    def value(obs: Any, **inputs: Any) -> Any:
        fields = fields_of(ask(policy, obs, inputs))
        if "value" not in fields:
            raise FieldError("the schema has 'value', but the policy's answer does not; return it, or pass value_fn=")
        return fields["value"]

    return value


class RandomPolicy:
    """Uniformly random actions among those that ``action_mask`` allows. All other fields of a policy are 0."""

    def __init__(self, space: Any, schema: Schema, num_envs: int, device: torch.device, seed: int | None) -> None:
        self._space, self._schema, self._num_envs, self._device = space, schema, num_envs, device
        self._rng = np.random.default_rng(seed_or_drawn(require_start("warm", 1, seed)))
        space.seed(int(self._rng.integers(2**31)))

    def __call__(self, obs: Any, **inputs: Any) -> dict[str, Any]:
        """Every field of the schema that comes neither from the env nor from ``inputs``."""
        given = {"obs", "action", "reward", "terminated", "truncated", *inputs} - {"hidden"}
        answer = {name: self._schema.rebuild(name, self._zeros) for name in self._schema.names if name not in given}
        return answer | {"action": self._actions(inputs.get("action_mask"))}

    def _zeros(self, path: Path) -> Tensor:
        leaf = self._schema.leaves[path]
        zeros = torch.zeros((self._num_envs, *leaf.shape), dtype=leaf.dtype, device=self._device)
        return swap_layers(zeros) if path[0] == "hidden" else zeros

    def _actions(self, mask: Any) -> Any:
        if mask is None:
            rows = [self._space.sample() for _ in range(self._num_envs)]
            return self._schema.rebuild("action", lambda path: np.stack([descend(row, path[1:]) for row in rows]))
        legal: Bools = as_host(mask).astype(np.bool_)
        if legal.ndim != 2 or not hasattr(self._space, "start"):
            raise EnvError("random actions under an action mask need one Discrete action; pass warm(..., policy=...)")
        return np.where(legal, self._rng.random(legal.shape), -1.0).argmax(1) + int(self._space.start)


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
