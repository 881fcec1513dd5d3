"""The private parts that tests look into, each by its name here: when a part moves, this module follows it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor

from relive.core import _core

PARTS = {
    "add_checked", "adding", "address", "aside", "ask", "bells", "binding", "bound", "calls", "close", "columns",
    "copies", "counters", "descriptor", "durable", "end", "ended_now", "errors", "filled", "flags",
    "free_in_groups", "futex", "group", "has_last", "held", "holder", "inputs", "joined", "lanes", "ledger", "line",
    "locks",
    "minibatches", "obs", "offsets", "permutations", "pieces", "prioritized", "probe", "progress", "ranks",
    "read_batch", "received", "replay", "ring", "sampler", "saver", "seed", "size", "snapshot", "space", "summed",
    "take_rows", "text", "under_way", "update_every", "waker", "wanted", "woken", "write_task", "writer", "written",
}  # fmt: skip
"""Each is a function of the object that has it: ``ring(buffer)`` is ``buffer._ring``."""

MOVED = {
    "adders": "adders",
    "checkpoint": "_state",
    "home": "_user_store",
    "largest": "noted_largest",
    "minima": "minima",
    "nodes": "nodes",
    "on_device": "_mirror",
    "parts": "parts",
    "windows": "windows",
    "words": "words",
}
"""Parts whose attribute has another name, or is private no more."""


def __getattr__(name: str) -> Callable[[Any], Any]:
    if name in PARTS or name in MOVED:
        return attrgetter(MOVED.get(name, f"_{name}"))
    raise AttributeError(f"no private part is listed as {name}")


def check_draws(buffer: Any) -> Any:
    """Have draws made and checked before the view reads them, as those of a user's sampler."""
    buffer._reader._own_sampler = False
    return buffer


def draws_are_checked(buffer: Any) -> bool:
    return not buffer._reader._own_sampler


def in_torch(owner: Any, name: str) -> Any:
    """What computes an estimator in torch operations."""
    return getattr(owner, f"_{name}")


def nbytes_on_device(buffer: Any) -> int:
    """Bytes of all tensors that a replay on a device keeps besides its rows."""
    there = buffer._mirror
    draws = there._draws
    draw_parts = [draws, getattr(draws, "inner", None)]
    draw_parts += [getattr(part, "windows", None) for part in draw_parts]
    holders = [part for part in draw_parts if part is not None]
    trees = [part.tree for part in holders if hasattr(part, "tree")]
    parts = [there._rows, there._goals, *holders, *trees]
    return sum(x.nbytes for part in parts if part is not None for x in vars(part).values() if isinstance(x, Tensor))


def draws_on_device(buffer: Any) -> Any:
    """The part of a replay on a device that draws."""
    return buffer._mirror._draws


def repair(buffer: Any) -> None:
    """Have the ring in RAM know all."""
    buffer._writer.repair()


def is_ahead(buffer: Any) -> bool:
    """True if the device knows what the host does not."""
    return type(buffer._ring.pending).__name__ == "DeviceIsNewer"


def prefetch(owner: Any) -> Any:
    return owner._reader.prefetch


def first(owner: Any, name: str) -> Any:
    """One of a writer's checks of first steps; None once it has seen enough."""
    return getattr(owner.first, name, None)


def tree(owner: Any) -> Any:
    return getattr(owner, "_tree", None) or owner.tree


def described(thing: Any) -> Any:
    """What compiled code reads of a tensor or an array, or None if it cannot."""
    tests: Any = _core
    return tests._tests.described(thing)


def use_exchange(wanted: bool) -> bool:
    """Whether compiled code uses torch's exchange from now on, if it has one; returns what was before."""
    tests: Any = _core
    return tests._tests.use_exchange(wanted)


def version(tensor: Any) -> int:
    """How often a tensor was written to, as autograd counts."""
    return tensor._version
