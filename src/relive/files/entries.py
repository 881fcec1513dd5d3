"""What a save says, tested before anything relies on it: whoever can write its files can write checksums, too.

Rings test their own rows and cursors (:meth:`relive.ring.Ring.check`); here is the rest that comes out of files.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FileFormatError, LifecycleError, ReliveError

__all__ = ["MOST", "contradictions", "entry", "fitting", "integers", "require_tensors", "whole"]


MOST = 2**62
"""No count in a save is larger: those that go on from it fit into 64 bits."""


def entry(content: Any, name: str, kind: type[Any]) -> Any:
    """One entry of a save's JSON, of the kind that belongs there.

    Raises:
        FileFormatError: it is missing, or of another kind.
    """
    value = content.get(name)
    if type(value) is not kind:
        raise FileFormatError(
            f"the save's entry {name!r} is {value!r:.80}; expected a {kind.__name__}, as relive writes it"
        )
    return value


def whole(content: Any, name: str) -> int:
    """One entry of a save's JSON that counts something.

    Raises:
        FileFormatError: it is missing, or no such number.
    """
    value: int = entry(content, name, int)
    if not 0 <= value <= MOST:
        raise FileFormatError(f"the save's entry {name!r} is {value!r:.80}; expected a number from 0 to {MOST}")
    return value


def integers(content: Any, name: str, *shape: int) -> NDArray[np.int64]:
    """One entry of a save's JSON that is a list, or a list of lists, of such numbers.

    Raises:
        FileFormatError: it is of another shape, or has other members.
    """
    found = np.array(entry(content, name, list))
    if found.shape != shape or found.dtype != np.int64 or (found < 0).any() or (found > MOST).any():
        raise FileFormatError(
            f"the save's entry {name!r} is {content[name]!r:.80}; expected numbers from 0 to {MOST}, of shape {shape}"
        )
    return found


def require_tensors(tensors: Mapping[str, Tensor], lengths: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a save that lacks one of these tensors, has another, or one that does not begin with these lengths.

    Raises:
        FileFormatError: naming it.
    """
    if wrong := sorted(tensors.keys() ^ lengths.keys()):
        raise FileFormatError(
            f"the save has the tensors {list(tensors)!r:.200}; {wrong[0]!r:.80} is missing or foreign"
        )
    for name, front in lengths.items():
        fitting(tensors, name, front)


def fitting(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """The tensor of a save that has this shape and dtype; without a dtype it only begins with that shape.

    Raises:
        FileFormatError: it is missing, or another.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise FileFormatError(f"the save has no tensor {name!r:.80}")
    found = tuple(tensor.shape if dtype is not None else tensor.shape[: len(shape)])
    if found != shape or (dtype is not None and tensor.dtype is not dtype):
        expected = f"{dtype} {shape}" if dtype is not None else f"{shape} in front"
        raise FileFormatError(f"tensor {name!r:.80}: expected {expected}, got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


_FAULTS = ReliveError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError


@contextmanager
def contradictions(path: str | os.PathLike[str]) -> Generator[None]:
    """Whatever goes wrong while a save is taken in, the save is at fault.

    Raises:
        FileFormatError: in place of the error.
        LifecycleError: a sampler or view to load it with is another buffer's, which is not the save's fault.
    """
    try:
        yield
    except (FileFormatError, LifecycleError):
        raise
    except MemoryError as error:
        raise FileFormatError(f"the save in '{path}' announces more than there is memory for") from error
    except (
        ReliveError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        OSError,
    ) as error:
        raise FileFormatError(f"the save in '{path}' contradicts itself: {error!s:.2000}") from error
