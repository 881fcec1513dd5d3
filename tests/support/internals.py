"""The private parts that tests look into, each by one function: when a part moves, this module follows it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relive.core import _core


def add_checked(owner: Any) -> Any:
    return owner._add_checked


def adders(owner: Any) -> Any:
    return owner.adders


def adding(owner: Any) -> Any:
    return owner._adding


def address(owner: Any) -> Any:
    return owner._address


def aside(owner: Any) -> Any:
    return owner._aside


def ask(owner: Any) -> Any:
    return owner._ask


def bells(owner: Any) -> Any:
    return owner._bells


def binding(owner: Any) -> Any:
    return owner._binding


def bound(owner: Any) -> Any:
    return owner._bound


def calls(owner: Any) -> Any:
    return owner._calls


def check_draws(buffer: Any) -> Any:
    """Have draws made and checked before the view reads them, as those of a user's sampler."""
    buffer._reader._own_sampler = False
    return buffer


def close(owner: Any) -> Any:
    return owner._close


def columns(owner: Any) -> Any:
    return owner._columns


def copies(owner: Any) -> Any:
    return owner._copies


def core(owner: Any) -> Any:
    return owner._core


def counters(owner: Any) -> Any:
    return owner._counters


def descriptor(owner: Any) -> Any:
    return owner._descriptor


def draws_are_checked(buffer: Any) -> bool:
    return not buffer._reader._own_sampler


def durable(owner: Any) -> Any:
    return owner._durable


def end(owner: Any) -> Any:
    return owner._end


def ended_now(owner: Any) -> Any:
    return owner._ended_now


def errors(owner: Any) -> Any:
    return owner._errors


def filled(owner: Any) -> Any:
    return owner._filled


def flags(owner: Any) -> Any:
    return owner._flags


def free_in_groups(owner: Any) -> Any:
    return owner._free_in_groups


def futex(owner: Any) -> Any:
    return owner._futex


def group(owner: Any) -> Any:
    return owner._group


def has_last(owner: Any) -> Any:
    return owner._has_last


def held(owner: Any) -> Any:
    return owner._held


def holder(owner: Any) -> Any:
    return owner._holder


def home(owner: Any) -> Any:
    return owner._user_store


def in_torch(owner: Any, name: str) -> Any:
    """What computes an estimator in torch operations."""
    return getattr(owner, f"_{name}")


def inputs(owner: Any) -> Any:
    return owner._inputs


def lanes(owner: Any) -> Any:
    return owner._lanes


def largest(owner: Any) -> Any:
    return owner.noted_largest


def ledger(owner: Any) -> Any:
    return owner._ledger


def line(owner: Any) -> Any:
    return owner._line


def locks(owner: Any) -> Any:
    return owner._locks


def minibatches(owner: Any) -> Any:
    return owner._minibatches


def minima(owner: Any) -> Any:
    return owner.minima


def nodes(owner: Any) -> Any:
    return owner.nodes


def obs(owner: Any) -> Any:
    return owner._obs


def nbytes_on_device(buffer: Any) -> int:
    """Bytes of all tensors that a replay on a device keeps besides its rows."""
    there = buffer._mirror
    draws = there._draws
    holders = [part for part in (draws, getattr(draws, "windows", None)) if part is not None]
    trees = [part.tree for part in holders if hasattr(part, "tree")]
    parts = [there._rows, there._goals, *holders, *trees]
    return sum(x.nbytes for part in parts if part is not None for x in vars(part).values() if isinstance(x, Tensor))


def offsets(owner: Any) -> Any:
    return owner._offsets


def mend(buffer: Any) -> None:
    """Have the ring in RAM know all."""
    buffer._writer.mend()


def on_device(buffer: Any) -> Any:
    return buffer._mirror


def read_batch(owner: Any) -> Any:
    return owner._read_batch


def is_ahead(buffer: Any) -> bool:
    """True if the device knows what the host does not."""
    return type(buffer._ring.pending).__name__ == "DeviceIsNewer"


def parts(owner: Any) -> Any:
    return owner.parts


def permutations(owner: Any) -> Any:
    return owner._permutations


def pieces(owner: Any) -> Any:
    return owner._pieces


def prefetch(owner: Any) -> Any:
    return owner._reader.prefetch


def prioritized(owner: Any) -> Any:
    return owner._prioritized


def probe(owner: Any) -> Any:
    return owner._probe


def progress(owner: Any) -> Any:
    return owner._progress


def ranks(owner: Any) -> Any:
    return owner._ranks


def reader(owner: Any) -> Any:
    return owner._reader


def received(owner: Any) -> Any:
    return owner._received


def replay(owner: Any) -> Any:
    return owner._replay


def first(owner: Any, name: str) -> Any:
    """One of a writer's checks of first steps; None once it has seen enough."""
    return getattr(owner.first, name, None)


def ring(owner: Any) -> Any:
    return owner._ring


def sampler(owner: Any) -> Any:
    return owner._sampler


def saver(owner: Any) -> Any:
    return owner._saver


def seed(owner: Any) -> Any:
    return owner._seed


def size(owner: Any) -> Any:
    return owner._size


def snapshot(owner: Any) -> Any:
    return owner._snapshot


def space(owner: Any) -> Any:
    return owner._space


def summed(owner: Any) -> Any:
    return owner._summed


def take_rows(owner: Any) -> Any:
    return owner._take_rows


def text(owner: Any) -> Any:
    return owner._text


def tree(owner: Any) -> Any:
    return getattr(owner, "_tree", None) or owner.tree


def under_way(owner: Any) -> Any:
    return owner._under_way


def update_every(owner: Any) -> Any:
    return owner._update_every


def waker(owner: Any) -> Any:
    return owner._waker


def wanted(owner: Any) -> Any:
    return owner._wanted


def windows(owner: Any) -> Any:
    return owner.windows


def woken(owner: Any) -> Any:
    return owner._woken


def words(owner: Any) -> Any:
    return owner.words


def write_task(owner: Any) -> Any:
    return owner._write_task


def writer(owner: Any) -> Any:
    return owner._writer


def written(owner: Any) -> Any:
    return owner._written


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
