"""skrl's ``RandomMemory`` on relive's core, compared with skrl 2.1.1. skrl must be installed.

skrl's agents read and write the tensors of a memory by their names, so these stay skrl's own. What goes in, what is
drawn, and files are relive's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from operator import is_
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor

from ..core import key as stream
from ..errors import EmptyError, FieldError, FileFormatError, ParameterError, ShapeError
from ..memory.allocator import Recycled
from ..memory.copier import COPY_AT_ONCE, BoundedCache
from ..parameters import COUNT_RULE, is_count, require, seed_or_drawn
from ..rollout.minibatches import ArrayRows, TensorRows, rows_of
from .base import DropIn

__all__ = ["RandomMemory"]

Host: Any = import_module("skrl.memories.torch").RandomMemory  # its module may have ours in its place later

CURSOR = "relive.cursor"
"""The name in a file of ``memory_index``, ``env_index`` and ``filled``. skrl does not read it."""
MANY = 2**14
"""To put so many rows in random order costs more than to draw some, and to see which of them are equal."""
SPARSE = 8
"""Drawing some is tried for batches of at most this part of the rows, most of which then differ."""

Batches = list[list[Any]]
"""For each minibatch the tensors of the names that were asked for; None for a name that the memory does not have."""


class RandomMemory(DropIn, Host):
    """``skrl.memories.torch.RandomMemory`` with its arguments, and ``seed``.

    A step is stored whole or not at all. Sequences never hold both the newest and the oldest steps of a full memory.
    They run over the ends of episodes, as in skrl: its models reset their states there. Minibatches leave no row out.

    Args:
        memory_size: T, rows of each tensor.
        num_envs: N.
        device: of the tensors and the batches.
        export: write a file each time the last row is written.
        export_format: "pt", "npz" or "csv".
        export_directory: where files go.
        replacement: draw with replacement; else the rows of a batch differ.
        seed: batch t is a function of (seed, t), on one kind of device. None draws from torch's default generator, as
            skrl does.
    """

    memory_size: int
    num_envs: int
    device: torch.device
    tensors: dict[str, Tensor]
    tensors_view: dict[str, Tensor]
    """The tensors as ``[T * N, ...]``: row ``t * N + n`` is row t of env n."""
    memory_index: int
    env_index: int
    filled: bool
    sampling_indexes: Tensor | None

    _own_attribute = "_draws"
    _renamed: ClassVar = {"replacement": "_replacement"}

    def __init__(
        self,
        memory_size: int,
        *,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        export: bool = False,
        export_format: Literal["pt", "npz", "csv"] = "pt",
        export_directory: str = "",
        replacement: bool = False,
        seed: int | None = None,
    ) -> None:
        require("RandomMemory", COUNT_RULE, memory_size=memory_size, num_envs=num_envs)
        Host.__init__(
            self, memory_size=memory_size, num_envs=num_envs, device=device, export=export,
            export_format=export_format, export_directory=export_directory, replacement=replacement,
        )  # fmt: skip
        self._replacement = replacement
        self._seed = None if seed is None else seed_or_drawn(seed)
        self._draws = 0
        self._memory = Recycled()
        self._readers = BoundedCache[tuple[str, ...], tuple[list[int], list[Tensor], ArrayRows | TensorRows]]()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_readers": BoundedCache[object, object]()}

    def _take_over(self, original: Any) -> None:
        for name, tensor in original.tensors.items():
            self._create_like(name, tensor)
            self.tensors[name].copy_(tensor)
        self._set_cursor(original.memory_index, original.env_index, original.filled)

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        for name, tensor in self.tensors.items():  # a pickle may have made three tensors of one
            self._bind(name, tensor)

    # -- writing ------------------------------------------------------------------------------------------------

    def create_tensor(
        self, name: str, *, size: Any, dtype: torch.dtype | None = None, keep_dimensions: bool = False
    ) -> bool:
        """Create a tensor, if there is none of this name. Floats are NaN until they are written.

        Args:
            name: of the tensor.
            size: numbers of a row: a count or a space; with ``keep_dimensions`` the shape of a row. None creates none.
            dtype: torch's default dtype, if None.
            keep_dimensions: rows have the shape ``size``.

        Returns:
            True if the tensor was created.

        Raises:
            ValueError: there is one of another size or dtype.
        """
        known = self.tensors.get(name)
        if known is None or not keep_dimensions or not isinstance(size, list | tuple):
            return Host.create_tensor(self, name, size=size, dtype=dtype, keep_dimensions=keep_dimensions)
        shape, own = tuple(cast("Sequence[int]", size)), tuple(known.shape[2:])
        if shape != own:
            raise ValueError(f"Tensor size ({shape}) doesn't match the existing one ({own}): '{name}'")
        if dtype is not None and known.dtype != dtype:
            raise ValueError(f"Tensor dtype ({dtype}) doesn't match the existing one ({known.dtype}): '{name}'")
        return False

    def add_samples(self, **tensors: Any) -> None:
        """Append the next rows, given by the names of tensors; names without a tensor, and None, are passed over.

        With N envs these are ``[N, ...]`` of one step, or ``[K, ...]`` of the next K envs of a step; with one env also
        K steps; and without the first axis the row of one env. What the first of them, or ``observations``, is decides.

        Raises:
            ValueError: no tensors; or K rows do not fit into what is left of the step.
            ShapeError: a tensor does not have these rows. Nothing is written in either case.
        """
        leading = tensors.get("observations")
        if leading is None:
            leading = next((tensor for tensor in tensors.values() if tensor is not None), None)
        if leading is None:
            raise ValueError(
                "There are no samples. Provide samples as key-value arguments, where keys are the tensor names"
            )
        count, first = self._count(leading), self._cursor
        total = self.memory_size * self.num_envs
        more = min(count, total - first)
        held, where = self.tensors_view, slice(first, first + more)
        if count == self.num_envs:  # a whole step: torch finds it sooner by its number
            held, where = self.tensors, self.memory_index
        columns: list[Tensor] = []
        parts: list[Tensor] = []
        given: list[Tensor] = []
        for name, tensor in tensors.items():
            rows = held.get(name)
            if rows is not None and tensor is not None:
                part = rows[where]
                fits = more == count and tensor.shape == part.shape and not tensor.requires_grad
                columns.append(rows)
                parts.append(part)
                given.append(tensor if fits else _fitted(name, tensor, (count, *part.shape[1:])))
        while more < count:  # several steps go over the end of the memory
            _copy(parts, [tensor[:more] for tensor in given])
            self._advance(first + more)
            count, first, given = count - more, 0, [tensor[more:] for tensor in given]
            more = min(count, total)
            parts = [rows[:more] for rows in columns]
        _copy(parts, given)
        self._advance(first + more)

    def _count(self, leading: Any) -> int:
        """How many rows are added, by the first of their tensors.

        Raises:
            ValueError: they do not fit into what is left of the step.
        """
        left = self.num_envs - self.env_index
        count = 1 if leading.ndim == 1 else leading.shape[0] if leading.ndim == 2 else 0
        if count < 1 or (count > left and self.num_envs > 1):
            under_way = f", since {self.env_index} envs of this step are stored" if self.env_index else ""
            raise ValueError(
                f"Expected shape (current_num_envs, data_size) where current_num_envs <= {left}{under_way}, "
                f"got {tuple(leading.shape)}"
            )
        return count

    @property
    def _cursor(self) -> int:
        """The flat row that is written next."""
        return self.memory_index * self.num_envs + self.env_index

    def _advance(self, row: int) -> None:
        """Count the rows before this flat row as written."""
        self.memory_index, self.env_index = divmod(row, self.num_envs)
        if self.memory_index < self.memory_size:
            return
        self._set_cursor(0, 0, True)
        if self.export:
            self.save(directory=self.export_directory, format=self.export_format)

    def _set_cursor(self, memory_index: int, env_index: int, filled: bool) -> None:
        self.memory_index, self.env_index, self.filled = memory_index, env_index, filled

    # -- reading ------------------------------------------------------------------------------------------------

    def sample(
        self, names: Sequence[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> Batches:
        """Random rows, ``[B, ...]`` in each list of tensors, or ``[B * L, ...]``: sequences, one after another.

        A sequence is L consecutive rows of one env, each as likely as any other. Minibatches hold whole sequences, and
        their numbers differ by at most one.

        Args:
            names: of the tensors.
            batch_size: B over all minibatches. There are fewer if fewer are stored, and ``replacement`` is not set.
            mini_batches: lists of tensors.
            sequence_length: L.

        Raises:
            EmptyError: no row, or no sequence, is stored.
            ParameterError: there would be an empty minibatch.
        """
        if not (is_count(batch_size, 1) and is_count(sequence_length, 1)):
            require("sample", COUNT_RULE, batch_size=batch_size, sequence_length=sequence_length)
        stored, envs = len(self), self.num_envs
        span = (sequence_length - 1) * envs
        if stored <= span:
            wanted = "row" if sequence_length == 1 else f"sequence of {sequence_length} rows"
            raise EmptyError(
                f"no {wanted} is stored: the memory holds {stored} rows of {envs} envs; add more before the first "
                "update (learning_starts)"
            )
        rows = self._drawn(stored - span, batch_size)
        if sequence_length > 1:
            rows = rows.unsqueeze(1) + torch.arange(0, span + 1, envs, device=self.device)
            if self.filled:  # counted from the oldest, so that none holds the newest and the oldest
                rows = (rows + self._cursor) % stored
        parts = _parts(rows, mini_batches)
        self.sampling_indexes = rows if rows.ndim == 1 else rows.flatten()
        return self._read(names, parts)

    def _drawn(self, count: int, batch_size: int) -> Tensor:
        """``batch_size`` random numbers below ``count``."""
        source = None
        if self._seed is not None:
            source = torch.Generator(self.device).manual_seed(stream(self._seed, self._draws))
        self._draws += 1
        device = self.device
        if self._replacement:
            return torch.randint(count, (batch_size,), generator=source, device=device)
        # a device puts all rows in random order sooner than it answers which numbers are equal
        while device.type == "cpu" and count >= MANY and batch_size <= count // SPARSE:
            some = torch.randint(count, (batch_size + batch_size // 4 + 4,), generator=source, device=device)
            first = np.unique(some.numpy(), return_index=True)[1]
            if len(first) >= batch_size:
                first.sort()
                return some[torch.from_numpy(first[:batch_size])]
        return torch.randperm(count, generator=source, device=device)[:batch_size]

    def sample_by_index(self, names: Sequence[str], *, indexes: Any, mini_batches: int = 1) -> Batches:
        """The rows of flat indexes ``t * N + n``, in their order.

        Args:
            names: of the tensors.
            indexes: whole numbers, as a tensor, an array or a list.
            mini_batches: lists of tensors; their sizes differ by at most one.

        Raises:
            IndexError: there is no such row.
            ParameterError: there would be an empty minibatch.
        """
        rows = torch.as_tensor(indexes, device=self.device).long().flatten()
        rows = torch.where(rows < 0, rows + self.memory_size * self.num_envs, rows)
        return self._read(names, _parts(rows, mini_batches))

    def sample_all(self, names: Sequence[str], *, mini_batches: int = 1, sequence_length: int = 1) -> Batches:
        """All stored rows, in their order; minibatches leave none out.

        Without sequences these are views of the storage, step by step. With a length L they are copies, env by env and
        oldest first, and each minibatch holds whole sequences.

        Args:
            names: of the tensors.
            mini_batches: lists of tensors.
            sequence_length: L.

        Raises:
            EmptyError: no row is stored.
            ParameterError: the steps of an env do not divide into sequences; or there would be an empty minibatch.
        """
        require("sample_all", COUNT_RULE, sequence_length=sequence_length)
        stored, envs = len(self), self.num_envs
        if not stored:
            raise EmptyError("no row is stored: add some; if you wrote all rows in place, set memory.filled = True")
        if sequence_length == 1:
            rows = torch.arange(stored, device="cpu")
            bounds = [(int(part[0]), int(part[-1]) + 1) for part in _parts(rows, mini_batches)]
            views = [self.tensors_view.get(name) for name in names]
            return [[None if view is None else view[low:high] for view in views] for low, high in bounds]
        steps, more = divmod(stored, envs)
        if more or steps % sequence_length:
            raise ParameterError(
                f"sample_all(sequence_length={sequence_length}): {stored} rows of {envs} envs do not divide into "
                "sequences of one env each; choose a length that divides the steps"
            )
        rows = torch.arange(stored, device=self.device)
        if self.filled:
            rows = (rows + self._cursor) % stored
        in_order = rows.view(steps, envs).T.reshape(-1, sequence_length)
        return self._read(names, _parts(in_order, mini_batches))

    def _read(self, names: Sequence[str], parts: Sequence[Tensor]) -> Batches:
        """The rows of each part, flat indexes."""
        rows: Any = self._rows(tuple(names))
        found = [rows.at(rows.places(part))[0] for part in parts]
        return [[batch.get(name) for name in names] for batch in found]

    def _rows(self, names: tuple[str, ...]) -> ArrayRows | TensorRows:
        """Reads rows of these tensors. Made once, and again where a tensor is another or has moved, as when shared."""
        held = [self.tensors[name] for name in names if name in self.tensors]
        lies = [tensor.data_ptr() for tensor in held]
        known = self._readers.get(names)
        if known is None or known[0] != lies or not all(map(is_, known[1], held)):
            columns = {(name,): self.tensors[name] for name in names if name in self.tensors}
            known = self._readers.keep(names, (lies, held, rows_of(columns, False, self._memory)))
        return known[2]

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, directory: str = "", *, format: Literal["pt", "npz", "csv"] = "pt") -> None:
        """Write a file of all tensors to ``directory/memories``. skrl reads it, too.

        Args:
            directory: ``export_directory``, if empty.
            format: "pt", "npz", or "csv", which cannot be loaded.

        Raises:
            ValueError: another format.
        """
        if format not in ("pt", "npz"):
            Host.save(self, directory, format=format)
            return
        folder = Path(directory or self.export_directory, "memories")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{datetime.now().strftime('%y-%m-%d_%H-%M-%S-%f')}_memory_{hex(id(self))}.{format}"
        cursor = torch.tensor([self.memory_index, self.env_index, int(self.filled)], device="cpu")
        held = {name: self.tensors[name] for name in self.get_tensor_names()} | {CURSOR: cursor}
        if format == "pt":
            torch.save(held, path)
        else:
            arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in held.items()}
            np.savez(path, **arrays)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file that this class or skrl wrote. Tensors that the memory lacks are created.

        skrl's files do not say which row was written next. There the rows count up to the last in which any number of a
        float tensor is not NaN, and the oldest is the first.

        Raises:
            FileFormatError: a file of another kind.
            FieldError: it lacks one of the tensors.
            ShapeError: a tensor has another shape or dtype. Nothing is changed in any of these cases.
        """
        kind = Path(path).suffix
        if kind == ".csv":
            raise NotImplementedError("Loading from csv is not supported yet")
        if kind == ".pt":
            # skrl's format; it runs no code of the file
            held: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
        elif kind == ".npz":
            with np.load(path) as file:
                held = {name: torch.from_numpy(file[name]) for name in file.files}
        else:
            raise FileFormatError(f"File at path '{path}' has an unsupported format; expected .pt or .npz")
        cursor = held.pop(CURSOR, None)
        self._require_fit(path, held)
        for name, tensor in held.items():
            self._create_like(name, tensor)
            self.tensors[name].copy_(tensor)
        if cursor is not None:
            self._set_cursor(int(cursor[0]), int(cursor[1]), bool(cursor[2]))
        else:
            self._set_cursor(0, 0, False)
            self._advance(_written(held, self.memory_size * self.num_envs))

    def _require_fit(self, path: Any, held: dict[str, Tensor]) -> None:
        """Require the tensors of a file to have the shapes and dtypes of the memory's."""
        for name in self.tensors:
            if name not in held:
                raise FieldError(f"{path}: no tensor '{name}'; it has {', '.join(sorted(held))}")
        for name, tensor in held.items():
            own = self.tensors.get(name)
            size = (self.memory_size, self.num_envs) if own is None else tuple(own.shape)
            if tuple(tensor.shape[: len(size)]) != size or (own is not None and tensor.ndim != own.ndim):
                raise ShapeError(
                    f"{path}: tensor '{name}' is {tuple(tensor.shape)}, expected {size}; create the memory with the "
                    "memory_size and num_envs of the one that was saved"
                )
            if own is not None and own.dtype != tensor.dtype:
                raise ShapeError(f"{path}: tensor '{name}' is {tensor.dtype}, expected {own.dtype}")

    def _create_like(self, name: str, tensor: Tensor) -> None:
        """Create a tensor of this shape and dtype, if there is none of this name."""
        if name not in self.tensors:
            self.create_tensor(name, size=tuple(tensor.shape[2:]), dtype=tensor.dtype, keep_dimensions=True)

    def _bind(self, name: str, tensor: Tensor) -> None:
        """Make a tensor the one of this name."""
        self.tensors[name], self.tensors_view[name] = tensor, tensor.flatten(0, 1)
        setattr(self, f"_tensor_{name}", tensor)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to others of the same shapes. One call of torch takes half as long as one for each of them."""
    if targets:
        COPY_AT_ONCE(targets, sources)


def _fitted(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor without its gradient, of this shape; one that has one row for all envs is repeated, as ``copy_`` does.

    Raises:
        ShapeError: it does not have these rows.
    """
    try:
        return tensor.detach().expand(shape)
    except RuntimeError as error:
        raise ShapeError(f"{name}: expected rows of shape {shape}, got {tuple(tensor.shape)}") from error


def _parts(rows: Tensor, mini_batches: int) -> list[Tensor]:
    """Rows ``[K]``, or sequences of rows ``[K, L]``, as flat parts; the first ones may have one item more.

    Raises:
        ParameterError: there would be an empty part.
    """
    if mini_batches == 1 and rows.ndim == 1:
        return [rows]
    require("sample", COUNT_RULE, mini_batches=mini_batches)
    if mini_batches > len(rows):
        raise ParameterError(f"mini_batches={mini_batches}: there are only {len(rows)} rows or sequences to divide")
    return [part.flatten() for part in rows.tensor_split(mini_batches)]


def _written(held: dict[str, Tensor], total: int) -> int:
    """How many flat rows of a file of skrl's were written, at least."""
    floats = [tensor.reshape(total, -1) for tensor in held.values() if tensor.is_floating_point()]
    if not floats:
        return total
    known = torch.stack([~rows.isnan().all(1) for rows in floats]).any(0).nonzero()
    return int(known[-1]) + 1 if len(known) else 0
