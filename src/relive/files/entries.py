"""Checks of a save's entries and tensors, made before anything uses them.

Checksums alone are not enough: anyone who can write the files can write checksums, too. Rings check their own rows and
cursors in :meth:`relive.ring.Ring.check`.
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
from ..printable import shown

__all__ = ["MOST", "contradictions", "entry", "fitting", "integers", "whole"]


MOST = 2**62
"""The largest count in a save. Counting on from it still fits into 64 bits."""


def entry(content: Any, name: str, kind: type[Any]) -> Any:
    """One entry of a save's JSON, of the expected type.

    Raises:
        FileFormatError: the entry is missing, or of another type.
    """
    value = content.get(name)
    if type(value) is not kind:
        raise FileFormatError(
            f"the save's entry {name!r} is {shown(value)}; expected a {kind.__name__}, as relive writes it"
        )
    return value


def whole(content: Any, name: str) -> int:
    """One entry of a save's JSON, a count from 0 to ``MOST``.

    Raises:
        FileFormatError: the entry is missing, or not a count.
    """
    value: int = entry(content, name, int)
    if not 0 <= value <= MOST:
        raise FileFormatError(f"the save's entry {name!r} is {shown(value)}; expected a number from 0 to {MOST}")
    return value


def integers(content: Any, name: str, *shape: int) -> NDArray[np.int64]:
    """One entry of a save's JSON, a list (of lists) of counts, as an array of this shape.

    Raises:
        FileFormatError: the entry has another shape, or a member is not a count.
    """
    found = np.array(entry(content, name, list))
    if found.shape != shape or found.dtype != np.int64 or (found < 0).any() or (found > MOST).any():
        raise FileFormatError(
            f"the save's entry {name!r} is {shown(content[name])}; expected numbers from 0 to {MOST}, of shape {shape}"
        )
    return found


def fitting(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """The tensor ``name`` of a save, of this shape and dtype. Without a dtype, ``shape`` is its first axes.

    Raises:
        FileFormatError: the tensor is missing, or has another shape or dtype.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise FileFormatError(f"the save has no tensor {shown(name)}")
    found = tuple(tensor.shape if dtype is not None else tensor.shape[: len(shape)])
    if found != shape or (dtype is not None and tensor.dtype is not dtype):
        expected = f"{dtype} {shape}" if dtype is not None else f"{shape} in front"
        raise FileFormatError(f"tensor {shown(name)}: expected {expected}, got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


@contextmanager
def contradictions(path: str | os.PathLike[str], *innocent: type[ReliveError]) -> Generator[None]:
    """Turn any error while a save is loaded into an error of the save, except errors of the ``innocent`` kinds.

    Raises:
        FileFormatError: replaces any other error, and names the save.
        LifecycleError: the sampler or view given belongs to another buffer, which is not the save's fault.
    """
    try:
        yield
    except (LifecycleError, *innocent):
        raise
    except FileFormatError as error:
        if os.fspath(path) in str(error):
            raise
        raise FileFormatError(f"'{path}': {error}") from error
    except MemoryError as error:
        raise FileFormatError(f"the save in '{path}' needs more memory than there is") from error
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
