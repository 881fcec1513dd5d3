"""The bridge between NumPy and torch: dtypes, shared memory and safe conversions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike as NumpyLike
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from ..errors import DTypeError, ShapeError

Array = np.ndarray
Bools = NDArray[np.bool_]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

Leaf = Tensor | Array
"""The numbers of a leaf, on a device or in RAM."""


ArrayLike = Tensor | NumpyLike
"""An array, tensor, list or number, as users give them."""


L = TypeVar("L", bound=Leaf)


def apart(values: Iterable[L], memories: Sequence[Leaf]) -> list[L]:
    """Arrays and tensors, copied where they lie in ``memories``, which will be written before all of them are read."""
    arrays = [memory for memory in memories if not isinstance(memory, Tensor)]
    tensors = [memory for memory in memories if isinstance(memory, Tensor)]
    return [_copied(value) if _lies_in(value, arrays, tensors) else value for value in values]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value.copy()


def _lies_in(value: Leaf, arrays: Sequence[Array], tensors: Sequence[Tensor]) -> bool:
    """True if writing to some memory may change a value; tensors are asked whether they are of one storage."""
    array = value
    if isinstance(value, Tensor):
        if tensors and (address := value.untyped_storage().data_ptr()) != 0:
            for memory in tensors:
                if memory.device == value.device and memory.untyped_storage().data_ptr() == address:
                    return True
        if not arrays or not value.is_cpu:
            return False
        array = numpy_view(value.detach())
    return any(np.may_share_memory(array, memory) for memory in arrays)


def as_host(value: object, name: str = "values") -> Array:
    """An array, tensor, list or number, on any device, as a NumPy array; copied only if it has to be.

    NumPy lacks bfloat16 and float8: such numbers come as float32, which holds all of them.

    Raises:
        ShapeError: a list with rows of different lengths. The message says ``name``.
        DTypeError: a tensor that is sparse, nested or quantized, or has no numbers in memory; or a masked array.
    """
    if type(value) is np.ndarray:  # most often; isinstance(value, Tensor) takes longer
        return value
    refuse_masked(value, name)
    here = value
    try:
        if not isinstance(value, Tensor):
            return np.asarray(value)
        here = value if value.is_cpu and not value.requires_grad else value.detach().cpu()
        return in_memory(here, name).numpy()
    except DTypeError:
        raise
    except ValueError as error:
        raise ShapeError(f"{name}: expected an array or a tensor, got {_kind_of(value, error)}") from error
    except (TypeError, RuntimeError) as error:  # a NotImplementedError is a RuntimeError
        return _as_other_dtype(here, name, error)


def _as_other_dtype(value: object, name: str, error: Exception) -> Array:
    """A tensor of a dtype that NumPy lacks, or one whose conjugation or sign is still to be applied.

    Raises:
        DTypeError: NumPy cannot have it for another reason.
    """
    if isinstance(value, Tensor) and not (value.is_meta or value.is_quantized) and value.layout is torch.strided:
        plain = in_memory(value.detach().cpu(), name)
        return (plain if plain.dtype in NUMPY_DTYPES else plain.float()).numpy()
    what = f"{type(value).__name__} {getattr(value, 'dtype', '')}".rstrip()
    reason = str(error).partition("\n")[0]
    raise DTypeError(f"{name}: expected a dense array or tensor of numbers, got {what} ({reason:.200})") from error


# Tensors inside torch.func, fake tensors and those whose storage was freed have no numbers in memory. Compiled code
# reads memory, so they stored garbage or ended the process. A step inside vmap has no one value to store.
def in_memory(tensor: Tensor, name: str) -> Tensor:
    """A dense CPU tensor whose numbers lie at its address; a copy if they are negated, conjugated or zero lazily.

    Raises:
        DTypeError: there is no memory to read: a tensor inside ``torch.func.vmap`` or ``torch.compile``, a fake one,
            or one whose storage was freed.
    """
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    try:
        readable = not tensor.numel() or tensor.data_ptr() != 0
    except (RuntimeError, UserWarning):  # torch warns of the address of a fake tensor
        readable = False
    if readable:
        return tensor
    if not cast("Any", torch)._is_zerotensor(tensor):
        raise DTypeError(
            f"{name}: expected a tensor whose numbers lie in memory, got a {type(tensor).__name__} without, as inside "
            "torch.func.vmap, torch.func.grad or torch.compile; make the call outside of them"
        )
    return tensor.clone()


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor's numbers lie at its address, one after another.

    Some views are conjugated or negated lazily, and the zeros that forward-mode differentiation makes have no memory.
    """
    lazy = tensor.dtype.is_complex or tensor.is_neg() or (tensor.numel() and not tensor.data_ptr())
    return tensor.is_contiguous() and not lazy


def as_tensor(value: object, name: str) -> torch.Tensor:
    """Numbers, lists and arrays as a tensor; errors name the field ``name``."""
    refuse_masked(value, f"field '{name}'")
    try:
        array = np.asarray(value)
        if array.dtype == object:
            raise TypeError("an object array")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if not array.flags.writeable:
            array = array.copy()  # torch warns when a tensor wraps a read-only array
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except (TypeError, ValueError) as error:
        message = f"field '{name}': expected an array, a tensor or numbers, got {_kind_of(value, error)}"
        raise ShapeError(message) from error


def to_tensor(value: object) -> torch.Tensor:
    """A tensor as it is; numbers and arrays as a tensor in RAM, whatever ``torch.set_default_device`` says."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def refuse_masked(value: object, name: str) -> None:
    """Refuse a NumPy array with masked numbers: only the numbers would be stored, and nothing of the mask.

    Raises:
        DTypeError: names ``name``, how many numbers are masked, and the call that replaces them.
    """
    if type(value) is np.ndarray or not isinstance(value, np.ndarray):  # most often; np.ma is imported when it is read
        return
    masked: Any = np.ma
    hidden = masked.count_masked(value) if masked.is_masked(value) else 0
    if not hidden:
        return
    raise DTypeError(
        f"{name}: expected an array without a mask, got a masked one with {hidden} masked of {value.size} numbers; "
        "pass its .filled(...) with the number that stands for the masked ones, and the mask as a field of its own"
    )


def _kind_of(value: object, error: Exception) -> str:
    """The words of an error for a value that did not become an array."""
    if "inhomogeneous" in str(error):
        return f"{type(value).__name__} with rows of different lengths; pad them to one shape"
    return f"{type(value).__name__} ({error})"


# NumPy lacks bfloat16 and float8, so their bits travel as integers of the same size.
_BIT_DTYPES = {1: torch.uint8, 2: torch.int16}


NUMPY_DTYPES: dict[torch.dtype, np.dtype] = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


NO_DTYPE = np.dtype([("bits", np.int8)])  # equal to no array's dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy dtype that holds the same bits."""
    return NUMPY_DTYPES.get(dtype) or NUMPY_DTYPES[_BIT_DTYPES[dtype.itemsize]]


def torch_dtype(dtype: DTypeLike | None) -> torch.dtype:
    """The torch dtype of the same kind and size; a TypeError if there is none."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def numpy_view(tensor: Tensor) -> Array:
    """A CPU tensor's memory as NumPy, bit for bit, without a copy."""
    if tensor.dtype in NUMPY_DTYPES:
        return tensor.resolve_conj().resolve_neg().numpy()
    return tensor.view(_BIT_DTYPES[tensor.dtype.itemsize]).numpy()


SQUARES = {dtype: torch.finfo(dtype).max ** 2 for dtype in (torch.float16, torch.bfloat16, torch.float32)}

SQUARES[torch.float64] = torch.finfo(torch.float64).max
"""Float dtype -> the square of its largest number; for float64 its largest number, as the square overflows."""


# The sum of squares is at least the square of each number, so one product shows that all fit. Only conversions that
# narrow are checked: with 17 observations in float64 an `add` to a replay takes 5.0 µs instead of 4.0.
def fits(value: Array, square: float) -> bool:
    """A quick test that every number's square is at most ``square``.

    A False settles nothing: :func:`check_castable` then looks at each number.
    """
    flat = value if value.ndim == 1 else value.reshape(-1)
    try:
        # The sum of squares bounds each square. One dot product takes a quarter of the time of finding the maximum.
        return flat.dot(flat) <= square
    except RuntimeWarning:  # NumPy warns of an infinite sum, and warnings may be errors
        return False


FIXED = {"reward": "a replay's rewards are always float32, so scale them; in a rollout, "}
"""The first words of an error about a field whose dtype cannot be chosen everywhere."""


def check_castable(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse conversions that change a value's meaning: float to int, anything to bool, a number out of range.

    Floats may be rounded; whole numbers may not, as they are often ids, counts or times. Infinities are allowed and
    stay infinite.

    Raises:
        DTypeError: names the field, what was expected, what came, and the call that would convert it.
    """
    if tensor.dtype is dtype:
        return
    if torch.can_cast(tensor.dtype, dtype) and not (dtype is torch.bool and tensor.dtype is not torch.bool):
        if dtype.is_floating_point or dtype.is_complex:
            _refuse_overflow(tensor, dtype, name)
            _refuse_rounding(tensor, dtype, name)
            return
        if not tensor.numel() or tensor.dtype is torch.bool:
            return
        limits = torch.iinfo(dtype)
        # torch cannot take the minimum of its wider unsigned dtypes
        values = tensor.cpu().numpy() if tensor.dtype in _UNSIGNED else tensor
        low, high = int(values.min()), int(values.max())
        if limits.min <= low and high <= limits.max:
            return
        raise DTypeError(
            f"field '{name}': values from {low} to {high} do not fit into {dtype}; declare a wider dtype in the schema"
        )
    raise DTypeError(
        f"field '{name}': expected {dtype}, got {tensor.dtype}; convert it yourself if that is meant "
        f"(.to({dtype})), or declare the field as {tensor.dtype}"
    )


def _refuse_overflow(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse finite numbers that a float or complex dtype cannot hold."""
    given = tensor.dtype
    plain = tensor.is_cpu and (given is torch.float64 or given is torch.float32)
    if given is torch.bool or (plain and fits(numpy_view(tensor.detach()), SQUARES.get(dtype, 0.0))):
        return
    limits = torch.finfo(dtype)
    floats = given.is_floating_point or given.is_complex
    if (torch.finfo(given) if floats else torch.iinfo(given)).max <= limits.max:
        return
    # a comparison in bfloat16 would round the limit to a few bits
    numbers = torch.view_as_real(tensor.resolve_conj()) if given.is_complex else tensor
    sizes = numbers.to(torch.promote_types(numbers.dtype, torch.float32) if floats else torch.float64).abs()
    lost = (sizes > limits.max * (1 + limits.eps / 4)) & ~sizes.isinf()  # smaller excesses round down to the maximum
    if bool(lost.any()):
        raise DTypeError(
            f"field '{name}': {sizes[lost][0].item():g} is more than {dtype} holds, {limits.max:g} at most; "
            f"{FIXED.get(name, '')}declare a wider dtype in the schema, or correct the number"
        )


def _refuse_rounding(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse whole numbers that a float or complex dtype can only hold rounded."""
    given, exact = tensor.dtype, int(2 / torch.finfo(dtype).eps)  # it holds each whole number up to this one
    if given.is_floating_point or given.is_complex or given is torch.bool or torch.iinfo(given).max <= exact:
        return
    values: Array = (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    sizes = values.astype(np.float64).reshape(-1)
    if sizes.dot(sizes) < exact * exact:  # as in fits(); a number above ``exact`` may be rounded to it here
        return
    values = values.reshape(-1)
    whole = (np.abs(values.astype(np.int64)) if values.dtype.kind == "i" else values).astype(np.uint64)
    lowest = np.maximum(whole & (~whole + np.uint64(1)), 1)  # the lowest bit that is set
    lost = whole // lowest > exact  # more bits from the highest to the lowest than the dtype keeps
    if lost.any():
        raise DTypeError(
            f"field '{name}': {values[np.argmax(lost)]} is not a number of {dtype}, which holds whole numbers up to "
            f"{exact} exactly; {FIXED.get(name, '')}declare the field as {given}, or as a wider float, or convert it "
            f"yourself if rounding is meant (.to({dtype}), or .astype of an array)"
        )


def whole_numbers(values: object, name: str) -> Ints:
    """A vector of whole numbers as int64.

    Raises:
        DTypeError: the numbers are not integers. Bools and floats are refused, too.
    """
    given = as_host(values, name)
    if given.size and given.dtype.kind not in "iu":
        raise DTypeError(f"{name}: expected integers, got {given.dtype}")
    return np.ascontiguousarray(given, np.int64)
