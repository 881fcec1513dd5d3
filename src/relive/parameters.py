"""Rules for parameters: :func:`checked` applies them to the attributes of a class, :func:`require` to one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError
from functools import wraps
from inspect import isfunction, signature
from numbers import Integral, Real
from typing import Any, ParamSpec, Protocol, TypeGuard, TypeVar
from weakref import WeakValueDictionary

import torch

from .errors import ParameterError
from .names import HINTED_METHODS, argument_hint
from .printable import shown

T = TypeVar("T")
P = ParamSpec("P")
Rule = tuple[Callable[[Any], bool], str]
"""A test of a value, and the same rule in words."""


# A rule that fails on a value refuses the value. The truth of an array, or a foreign `__eq__` that raises, would
# otherwise come out as an error of NumPy or torch.
def require(call: str, rule: Rule, **values: object) -> None:
    """Require arguments of ``call`` to follow the rule. A value that the test fails on, such as an array, does not.

    Raises:
        ParameterError: names the call, the argument, its value and the rule.
    """
    test, words = rule
    for name, value in values.items():
        try:
            follows = bool(test(value))
        except Exception:  # the truth of an array, a comparison that is not defined, a foreign __eq__ that fails
            follows = False
        if not follows:
            raise ParameterError(f"{call}({name}={shown(value, 200)}): {words}")


class Observer(Protocol):
    """An object that is told when a parameter has changed."""

    def part_changed(self, part: object) -> object:
        """A parameter of this part has changed. It may be a part that the observer does not know."""


_OBSERVERS: WeakValueDictionary[int, Observer] = WeakValueDictionary()
"""The observers of parts, by the ``id`` of the part: some parts can neither be hashed nor referred to weakly. When such
a part is gone, another one may have its ``id``, so observers look which part it is."""


def observe(part: object, observer: Observer) -> None:
    """Have ``observer.part_changed(part)`` called whenever a parameter of a :func:`checked` part has changed.

    A part has one observer, which is not kept alive by this.
    """
    _OBSERVERS[id(part)] = observer


# The rules apply at construction and at every later assignment. Public attributes that a part does not have are
# refused, because schedules set parameters of samplers in use: a misspelt one changed nothing and raised nothing.
def checked(**rules: Rule) -> Callable[[type[T]], type[T]]:
    """Check attributes of a class whenever they are set, in the constructor or later.

    ``rules`` maps an attribute to its rule. A refused value changes nothing. The attributes of a frozen dataclass are
    checked once they are all set, and none can be set later. A misspelt attribute is refused, since it would have no
    effect.

    Raises:
        ParameterError: from the constructor or the assignment; names the attribute, the value and the rule.
        AttributeError: a public attribute is set that is neither an argument of the constructor nor one of the class.
            FrozenInstanceError, which is one, if the class is frozen.
    """

    def decorate(cls: type[T]) -> type[T]:
        name_of = cls.__name__
        changed: Any = cls
        known = {*rules, *signature(cls.__init__).parameters}

        def check_and_set(self: T, name: str, value: object) -> None:
            rule = rules.get(name)
            if rule is not None:
                require(name_of, rule, **{name: value})
            elif name[0] != "_" and name not in known and type(self) is cls and not hasattr(cls, name):
                raise AttributeError(f"{name_of} has no {name!r}; it has {', '.join(sorted(known - {'self'}))}")
            observer = None if rule is None else _OBSERVERS.get(id(self))
            before = None if observer is None else getattr(self, name, None)  # it may be under construction
            object.__setattr__(self, name, value)
            if observer is not None and getattr(self, name) != before:
                observer.part_changed(self)

        if not _is_frozen(cls):
            changed.__setattr__ = check_and_set
            return cls
        construct = cls.__init__

        @wraps(construct)
        def construct_and_check(self: T, *args: object, **kwargs: object) -> None:
            construct(self, *args, **kwargs)
            for name, rule in rules.items():
                require(name_of, rule, **{name: getattr(self, name)})

        def refuse(self: T, name: str, value: object) -> None:
            raise FrozenInstanceError(f"{name_of}.{name} cannot be set; make another {name_of}")

        changed.__init__, changed.__setattr__ = construct_and_check, refuse
        return cls

    return decorate


def hinted(function: Callable[P, T], name: str) -> Callable[P, T]:
    """The function, whose error for an argument of another library says what to write instead. It is a TypeError still.

    Args:
        function: each call of it costs one more.
        name: as in ``ARGUMENT_HINTS``.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            hint = argument_hint(error, function, name, kwargs)
            if hint is None:
                raise
            raise TypeError(f"{error}; {hint}") from None

    return call


def add_argument_hints(cls: type) -> None:
    """Add hints to the constructor of a class, and to its methods that are not called at each step."""
    own = vars(cls)
    names = {name: f"{cls.__name__}.{name}" for name in HINTED_METHODS.get(cls.__name__, ())}
    if isfunction(own.get("__init__")):
        names["__init__"] = cls.__name__
    for name, full in names.items():
        method = own[name]
        wrapped = hinted(method, full) if isfunction(method) else type(method)(hinted(method.__func__, full))
        setattr(cls, name, wrapped)


def _is_frozen(cls: type) -> bool:
    """True for a frozen dataclass, whose constructor sets attributes without ``__setattr__``."""
    options = getattr(cls, "__dataclass_params__", None)
    return options is not None and options.frozen


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """True for a whole number of at least ``least``."""
    if type(value) is int:  # most often; whether something is an Integral takes ten times as long
        return value >= least
    return is_whole(value) and int(value) >= least


def is_whole(value: object) -> TypeGuard[int]:
    """True for a whole number of either sign, Python's or NumPy's. Bools are not."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_steps(value: object, least: int = 1) -> TypeGuard[int]:
    """True for a number of steps that a view may ask for: below 2³⁰, so that compiled code can add two of them."""
    return is_count(value, least) and value < 2**30


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[float]:
    """True for a finite number from ``least`` to ``most``. Bools and NaN are not."""
    if type(value) is float:  # most often; whether something is a Real takes longer
        return least <= value <= most and math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        number = float(value)
    except OverflowError:  # a whole number that no float can hold
        return False
    return math.isfinite(number) and least <= number <= most


# `debug="false"` would count as True. NumPy's bools are refused as well, because flags are saved as JSON.
def is_flag(value: object) -> TypeGuard[bool]:
    """True for the values True and False."""
    return isinstance(value, bool)


def is_names(value: object) -> bool:
    """True for a tuple or list of strings."""
    return is_listing(value) and all(isinstance(name, str) for name in value)


def is_listing(value: object) -> TypeGuard[Sequence[object]]:
    """True for a tuple or a list."""
    return isinstance(value, tuple | list)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, object]]:
    """True for a dict and the like, by the name of each member."""
    return isinstance(value, Mapping)


def is_own(part: object) -> bool:
    """True if a part and those inside of it are relive's own. What foreign parts return is checked before use."""
    return all(map(_is_of_here, parts_of(part)))


def parts_of(part: object) -> list[Any]:
    """A sampler or a view, and the one inside of it, its ``inner``, if there is one, and so on."""
    inner = getattr(part, "inner", None) if _is_of_here(part) else None
    return [part] if inner is None else [part, *parts_of(inner)]


def _is_of_here(part: object) -> bool:
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def one_of(*choices: str) -> Rule:
    """The rule for an argument that has a few possible values."""
    return (lambda value: isinstance(value, str) and value in choices), f"expected {' or '.join(map(repr, choices))}"


def an_instance(kind: type, example: str) -> Rule:
    """The rule for an argument that is an object of a class, or None; ``example`` shows how to make one."""
    return (lambda value: value is None or isinstance(value, kind)), f"expected {example}, or None"


def refuse_class(name: str, part: object) -> None:
    """Refuse a class passed in place of an instance.

    Raises:
        ParameterError: ``part`` is a class; the message shows how to make an instance.
    """
    if isinstance(part, type):
        raise ParameterError(f"{name}={part.__name__}: expected an object, got its class; pass {part.__name__}(...)")


# As torch's RandomSampler does. Seeds from the system would make a script with `torch.manual_seed` differ from run to
# run.
def seed_or_drawn(seed: object) -> int:
    """The seed as an int, or one drawn from torch's default generator if it is None.

    So ``torch.manual_seed`` makes a script repeatable, as with ``torch.utils.data.RandomSampler``.

    Raises:
        ParameterError: the seed is neither a whole number nor None.
    """
    if seed is None:
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    if not is_whole(seed):
        raise ParameterError(f"seed is an int, or None to draw one, got {shown(seed, 200)}")
    return int(seed)


def torch_device(call: str, device: str | torch.device | int, *, here: bool = True) -> torch.device:
    """The device of this name, with its number, such as ``cuda:0`` for "cuda".

    Args:
        call: named in the error.
        device: a name, or a ``torch.device``.
        here: True if this torch must be able to allocate on it.

    Raises:
        ParameterError: there is no such device, or it cannot be used here.
    """
    try:
        return torch.empty(0, device=device).device if here else torch.device(device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises each of them, by the kind of device
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ParameterError(
            f"{call}(device={device!r}): torch {torch.__version__} cannot use this device here: {why}. "
            "Pass device='cpu', or another that torch.empty(0, device=...) accepts"
        ) from error


SECONDS_RULE: Rule = (lambda value: is_number(value, 0) and value > 0, "expected a number of seconds above 0")
"""The rule for times that cannot be 0."""

TIMEOUT_RULE: Rule = (
    lambda timeout: timeout is None or is_number(timeout, 0),
    "timeout is a number of seconds of at least 0, or None to wait for ever",
)
"""The rule for every wait."""

COUNT_RULE: Rule = (lambda count: is_count(count, 1), "expected a whole number of at least 1")
"""The rule for sizes and numbers of items."""

FLAG_RULE: Rule = (is_flag, "expected True or False")
"""The rule for every flag. Text such as "false" would count as True."""

EPS_RULE: Rule = (lambda eps: is_number(eps, 0), "eps is a number of at least 0")
"""The rule for the number that is added to a standard deviation."""

GAMMA_RULE: Rule = (lambda gamma: is_number(gamma, 0, 1), "gamma is a number from 0 to 1")
"""The rule for every discount."""

LAM_RULE: Rule = (lambda lam: is_number(lam, 0, 1), "lam is a number from 0 to 1")
"""The rule for every λ."""

CLIP_RULE: Rule = (lambda clip: clip == math.inf or (is_number(clip, 0) and clip > 0), "a clip is a number above 0")
"""The rule for the clips of V-trace."""
