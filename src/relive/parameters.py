"""Rules for parameters, checked at construction and at every later assignment."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import torch

from .errors import ParameterError

__all__ = [
    "GAMMA_RULE",
    "Rule",
    "checked",
    "is_count",
    "is_flag",
    "is_names",
    "is_number",
    "is_own",
    "refuse_class",
    "require_discounts",
    "seed_or_drawn",
]

T = TypeVar("T")
Rule = tuple[Callable[[Any], bool], str]


def checked(**rules: Rule) -> Callable[[type[T]], type[T]]:
    """Check attributes of a class whenever they are set, in the constructor or later.

    ``rules`` maps an attribute to its test and the rule in words. A refused value changes nothing.

    Raises:
        ParameterError: from the constructor or the assignment; names the attribute, the value and the rule.
    """

    def decorate(cls: type[T]) -> type[T]:
        def check_and_set(self: T, name: str, value: Any) -> None:
            rule = rules.get(name)
            if rule is not None and not rule[0](value):
                raise ParameterError(f"{cls.__name__}({name}={value!r}): {rule[1]}")
            object.__setattr__(self, name, value)

        cast("Any", cls).__setattr__ = check_and_set
        return cls

    return decorate


def is_count(value: Any, least: int = 0) -> bool:
    """Whether this is a whole number of at least ``least``."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether this is a finite number from ``least`` to ``most``. Bools and NaN are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    number = float(value)
    return math.isfinite(number) and least <= number <= most


def is_flag(value: Any) -> bool:
    """Whether this is True or False."""
    return isinstance(value, bool)


def is_names(value: Any) -> bool:
    """Whether this is a tuple or list of strings."""
    return isinstance(value, tuple | list) and all(isinstance(name, str) for name in cast("tuple[Any, ...]", value))


def is_own(part: object) -> bool:
    """Whether a part and its ``inner`` part are relive's own. What foreign parts return is checked before use."""
    parts = part, getattr(part, "inner", part)
    return all(type(part).__module__.partition(".")[0] == __name__.partition(".")[0] for part in parts)


def refuse_class(name: str, part: Any) -> None:
    """Refuse a class passed in place of an instance.

    Raises:
        ParameterError: ``part`` is a class; the message shows how to make an instance.
    """
    if isinstance(part, type):
        raise ParameterError(f"{name}={part.__name__}: expected an object, got its class; pass {part.__name__}(...)")


def seed_or_drawn(seed: Any) -> int:
    """The seed as an int, or one drawn from torch's default generator if it is None.

    So ``torch.manual_seed`` makes a script repeatable, as with ``torch.utils.data.RandomSampler``.

    Raises:
        ParameterError: the seed is neither a whole number nor None.
    """
    if seed is None:
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ParameterError(f"seed is an int, or None to draw one, got {seed!r}")
    return int(seed)


GAMMA_RULE: Rule = (lambda gamma: is_number(gamma, 0, 1), "gamma is a number from 0 to 1")
"""The rule for every discount."""

_CLIP: Rule = (lambda clip: clip == math.inf or (is_number(clip, 0) and clip > 0), "a clip is a number above 0")
_DISCOUNTS: dict[str, Rule] = {
    "gamma": GAMMA_RULE,
    "lam": (lambda lam: is_number(lam, 0, 1), "lam is a number from 0 to 1"),
    "rho_clip": _CLIP,
    "c_clip": _CLIP,
}


def require_discounts(estimator: Any) -> None:
    """Refuse a frozen dataclass with a discount, λ or clip out of range.

    Raises:
        ParameterError: names the parameter, the value and the rule.
    """
    for name in (field.name for field in fields(estimator)):
        value, rule = getattr(estimator, name), _DISCOUNTS.get(name)
        if rule is not None and not rule[0](value):
            raise ParameterError(f"{type(estimator).__name__}({name}={value!r}): {rule[1]}")
