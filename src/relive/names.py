"""Names that are not there: modules that are imported when they are first used, and hints for names of other libraries.

Python's own error for a missing attribute or an unknown argument says its name alone. A hint says what to write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import getattr_static, signature
from types import ModuleType
from typing import Any

MODULE_HINTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("Buffer", "Replay", "ReplayMemory", "ExperienceReplay", "DictReplayBuffer"), "use relive.ReplayBuffer"
    ),
    **dict.fromkeys(
        ("PrioritizedReplayBuffer", "PrioritizedReplay", "PERBuffer"),
        "use relive.ReplayBuffer(..., sampler=relive.Prioritized())",
    ),
    **dict.fromkeys(
        ("HerReplayBuffer", "HERReplayBuffer", "HERBuffer", "HindsightReplayBuffer"),
        "use relive.ReplayBuffer(..., view=relive.Hindsight(...))",
    ),
    "NStepReplayBuffer": "use relive.ReplayBuffer(..., view=relive.NStep(3, gamma=0.99))",
    "SequenceReplayBuffer": "use relive.ReplayBuffer(..., view=relive.Sequence(...))",
    **dict.fromkeys(
        ("RolloutStorage", "DictRolloutBuffer", "PPOBuffer", "TrajectoryBuffer"), "use relive.RolloutBuffer"
    ),
    "PrioritizedSampler": "use relive.Prioritized",
    "RandomSampler": "use relive.Uniform",
    **dict.fromkeys(
        ("RateLimiter", "SampleToInsertRatio"), "use relive.SamplesPerInsert, or relive.MinSize for a start alone"
    ),
    **dict.fromkeys(("gae", "compute_gae"), "call relive.returns.gae(...)"),
    "load": "call relive.ReplayBuffer.load(path) or relive.RolloutBuffer.load(path)",
}
"""Names that people look for in the package -> the text to write instead."""

BUFFER_HINTS: Mapping[str, Mapping[str, str]] = {
    "ReplayBuffer": {
        **dict.fromkeys(("push", "store", "put", "insert", "remember", "add_transition"), "call add(...)"),
        "add_batch": "call extend(...), which takes many steps",
        "sample_batch": "call sample(batch_size)",
        "update_priority": "call update_priorities(index, td_error)",
        "reset": "call clear()",
        "size": "len(replay) is the number of transitions that can be drawn",
        **dict.fromkeys(("full", "is_full"), "a full replay overwrites its oldest steps; see replay.stats()"),
        **dict.fromkeys(("buffer_size", "max_size"), "replay.capacity is its number of rows"),
        **dict.fromkeys(("buffer", "memory"), "call data() for all transitions, or read the rows in replay.block"),
    },
    "RolloutBuffer": {
        **dict.fromkeys(("push", "store", "put", "insert", "append", "add_transition"), "call add(...)"),
        **dict.fromkeys(
            ("compute_returns", "compute_returns_and_advantage", "compute_returns_and_advantages", "compute_gae"),
            "call finish(relive.GAE(gamma=0.99, lam=0.95))",
        ),
        **dict.fromkeys(("get", "mini_batch_generator", "iterate_minibatches"), "call minibatches(batch_size)"),
        "reset": "call clear()",
        **dict.fromkeys(("size", "pos", "step"), "rollout.steps is the number of steps that are there"),
        "full": "rollout.is_full says whether all steps are there",
        **dict.fromkeys(("buffer_size", "capacity"), "its sizes are rollout.num_steps and rollout.num_envs"),
        "buffer": "call data(), or read one field as rollout['obs']",
    },
}
"""Class of buffers -> names of attributes that people look for -> the text to write instead."""

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gae_lambda", "lambda_", "lmbda", "gae_lam"), ("lam",)),
    **dict.fromkeys(("discount", "discount_factor", "gamma_"), ("gamma",)),
    **dict.fromkeys(("buffer_size", "max_size", "size", "maxlen", "memory_size"), ("capacity", "num_steps")),
    **dict.fromkeys(("n_envs", "num_env", "num_workers", "n_workers"), ("num_envs", "writers")),
    **dict.fromkeys(("n_step", "n_steps", "nstep", "num_steps", "rollout_length"), ("n", "num_steps", "steps")),
    **dict.fromkeys(("num_epochs", "n_epochs", "num_learning_epochs"), ("epochs",)),
    **dict.fromkeys(("num_minibatches", "num_mini_batches", "n_minibatches"), ("num_batches", "count")),
    **dict.fromkeys(("num_batches", "n_batches"), ("count",)),
    **dict.fromkeys(("minibatch_size", "mini_batch_size"), ("batch_size",)),
    **dict.fromkeys(("seq_len", "sequence_length", "seq_length", "trajectory_length"), ("length",)),
    **dict.fromkeys(("num_stack", "n_stack", "stack_size", "num_frames"), ("depth",)),
    **dict.fromkeys(("goal_selection_strategy",), ("strategy",)),
    **dict.fromkeys(("n_sampled_goal",), ("k",)),
    **dict.fromkeys(("beta_start", "beta0"), ("beta",)),
    **dict.fromkeys(("estimator_fn", "advantage"), ("estimator",)),
    **dict.fromkeys(("env", "environment", "vec_env"), ("envs",)),
    **dict.fromkeys(("normalize_advantages", "norm_adv"), ("normalize_advantage",)),
    **dict.fromkeys(("last_values", "next_value", "bootstrap_value"), ("last_value",)),
}
"""Names of arguments in other libraries -> ours. The first one that a call has is its hint."""

_VIEW = "pass view=relive.NStep(3, gamma=0.99)"
_SAMPLER = "pass sampler=relive.Prioritized(alpha=0.6, beta=0.4)"
_FINISH = "call finish(relive.GAE(gamma=0.99, lam=0.95))"
_SAMPLE = "call sample(batch_size) of the replay"
_WINDOW = dict.fromkeys(("n", "n_step", "view", "inner"), "pass window=relive.NStep(3, gamma=0.99)")
_SPACES = "pass schema=relive.Schema.from_spaces(observation_space, action_space)"
ARGUMENT_HINTS: Mapping[str, Mapping[str, str]] = {
    "ReplayBuffer": {
        **dict.fromkeys(("n_step", "n_steps", "nstep", "n", "num_steps", "gamma", "discount"), _VIEW),
        **dict.fromkeys(("alpha", "beta", "eps"), _SAMPLER),
        **dict.fromkeys(("observation_space", "action_space", "obs_shape", "obs_dim", "action_dim"), _SPACES),
        "batch_size": "call sample(batch_size)",
        "sequence_length": "pass view=relive.Sequence(8)",
    },
    "RolloutBuffer": {
        **dict.fromkeys(("gamma", "lam", "gae_lambda", "discount"), _FINISH),
        **dict.fromkeys(("observation_space", "action_space", "obs_shape", "obs_dim", "action_dim"), _SPACES),
        "capacity": "its sizes are num_steps and num_envs",
        **dict.fromkeys(("batch_size", "num_batches", "num_epochs", "epochs"), "call minibatches(batch_size)"),
    },
    "RolloutBuffer.finish": dict.fromkeys(("gamma", "lam", "gae_lambda"), _FINISH),
    "Collector": {
        **dict.fromkeys(("num_steps", "n_steps"), "call collect(num_steps)"),
        **dict.fromkeys(("num_envs", "n_envs"), "the envs have it"),
        "gamma": "an estimator or a view has it, such as relive.GAE(gamma=0.99)",
    },
    "Prioritized": {
        **dict.fromkeys(("capacity", "buffer_size", "size"), "the replay has it"),
        "batch_size": _SAMPLE,
    },
    **{name: {"batch_size": _SAMPLE} for name in ("NStep", "Sequence", "Hindsight", "Recent", "Mixture")},
    **{name: {"batch_size": _SAMPLE, **_WINDOW} for name in ("FrameStack", "ReturnsToGo")},
}
"""Class or ``Class.method`` -> names of arguments that people pass -> the text to write instead."""

HINTED_METHODS: Mapping[str, tuple[str, ...]] = {
    "ReplayBuffer": ("plan", "batches", "serve", "save", "open"),
    "RolloutBuffer": ("minibatches", "sequences", "env_batches", "chunks", "finish", "save"),
    "Collector": ("warm", "reset"),
    "Mixture": ("batches",),
}
"""Class -> methods with hints. Methods that are called at each step have none, as a hint costs a call. ``collect`` has
none either: its warnings point to the line of its caller."""

_UNKNOWN = re.compile(r"got an unexpected keyword argument '(\w+)'")


def version() -> str:
    """The version of relive."""
    face = sys.modules[__name__.partition(".")[0]]  # it is above all modules, so none imports it
    return face.__version__


@contextmanager
def needed(otherwise: str) -> Generator[None]:
    """Import packages in it that only some calls need.

    Raises:
        ModuleNotFoundError: one is not installed; says ``otherwise``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(otherwise, name=error.name) from error


def lazy_modules(
    package: str, modules: tuple[str, ...], hints: Mapping[str, str] | None = None
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that imports some of its modules when they are first used.

    A module that cannot be imported, as its library is not installed, is an ``AttributeError`` with the reason.
    """

    def get(name: str) -> ModuleType:
        if name in modules:
            try:
                return import_module(f".{name}", package)
            except ImportError as error:
                raise AttributeError(f"module '{package}.{name}' cannot be imported: {error}") from error
        if hints and name in hints:
            raise _missing(f"module {package!r}", name, hints[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names


def add_hints(cls: Any) -> None:
    """Add hints to a class: its error for a name that it lacks says what to write instead.

    ``hasattr`` of such a name stays False.

    A ``__getattr__`` would do the same. But then CPython 3.11 looks up every attribute that is there in four times the
    time. The price is that ``dir`` of the class, and protocols that are checked at run time, see the names.
    """
    hints = BUFFER_HINTS[cls.__name__]
    for name, hint in hints.items():
        setattr(cls, name, _Hint(name, hint))

    def names(self: object) -> list[str]:
        hidden = {name for name in hints if isinstance(getattr_static(self, name), _Hint)}
        return [name for name in object.__dir__(self) if name not in hidden]

    cls.__dir__ = names


class _Hint:
    """A name that a class lacks. Instances and subclasses may have it, as this does not catch assignments."""

    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint

    def __get__(self, instance: object, owner: type) -> object:
        holder = next(i for i, cls in enumerate(owner.__mro__) if vars(cls).get(self._name) is self)
        for cls in owner.__mro__[holder + 1 :]:  # a class that stands behind the buffer may have the name
            if self._name in vars(cls):
                found = vars(cls)[self._name]
                return found.__get__(instance, owner) if hasattr(found, "__get__") else found
        raise _missing(owner.__name__, self._name, self._hint)


def _missing(owner: str, name: str, hint: str) -> AttributeError:
    # without an object, Python adds no guess of its own after the hint
    return AttributeError(f"{owner} has no attribute {name!r}; {hint}", name=name, obj=None)


def argument_hint(
    error: TypeError, function: Callable[..., object], name: str, given: Mapping[str, object]
) -> str | None:
    """A hint for an argument that the function lacks; None if the error is another one."""
    found = _UNKNOWN.search(str(error))
    known = signature(function).parameters
    if found is None or (foreign := found[1]) not in given or foreign in known or "; " in str(error):
        return None
    text = ARGUMENT_HINTS.get(name, {}).get(foreign)
    ours = next((ours for ours in SYNONYMS.get(foreign, ()) if ours in known), None)
    return text or (ours and f"it is called {ours} here") or f"it takes {', '.join(n for n in known if n != 'self')}"
