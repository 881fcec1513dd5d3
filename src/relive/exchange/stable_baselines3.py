"""Stable-Baselines3: the files that ``save_replay_buffer`` writes, read without unpickling them.

Such a file is a pickle, and unpickling runs what it says; a restricted unpickler still calls what it allows. So opcodes
are followed here: a name stays a name, a call is written down, and arrays are made from their bytes. Nothing is looked
up or called. In order: the buffer; arrays; the pickle.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ..errors import FileFormatError, NoSaveError, ParameterError
from ..files.disk import open_file, usable
from ..look.experience import ArrayTree
from ..look.readers import stable_baselines3_replay
from ..printable import shown
from ..steps.arrays import Array
from ..steps.schema import map_leaves
from .log import Log, log_of, require_memory

KNOWN = re.compile(
    r"(stable_baselines3|sb3_contrib)(\.\w+)*:\w+"
    r"|(gymnasium|gym)\.spaces(\.\w+)*:\w+"
    r"|(gymnasium|gym)\.utils\.seeding:(RandomNumberGenerator|RNG)"
    r"|numpy:(dtype|ndarray)"
    r"|numpy\.(core|_core)\.(multiarray:(_reconstruct|scalar)|numeric:_frombuffer)"
    r"|numpy\.random\._pickle:__(generator|bit_generator|randomstate)_ctor"
    r"|numpy\.random\._(pcg64:PCG64|mt19937:MT19937)"
    r"|numpy\.random\.bit_generator:(__pyx_unpickle_SeedSequence|SeedSequence)"
    r"|torch:device|collections:(OrderedDict|defaultdict)",
    re.ASCII,
)
"""The names that files of buffers have: buffers, their spaces, and the random generators of the spaces."""

CLASS = re.compile(r"(?:stable_baselines3|sb3_contrib)\..*\.(\w*ReplayBuffer)", re.ASCII)


def from_stable_baselines3(path: str | os.PathLike[str]) -> Log:
    """The steps of a replay buffer of Stable-Baselines3, from the ``.pkl`` file of ``save_replay_buffer``.

    The file is a pickle, and it is never unpickled. The plain, Dict, n-step
    and hindsight buffers are read. Observations after steps are kept. With ``optimize_memory_usage`` the buffer had
    only the newest one of each env: see :func:`relive.exchange.log_of`.

    Args:
        path: the file.

    Raises:
        NoSaveError: there is no such file.
        FileFormatError: the file is not a pickle of such a buffer, is damaged, or has names that no buffer needs.
        ParameterError: there is too little memory for the buffer.
        ShapeError: its arrays differ in their number of steps.
    """
    file = usable(path)
    try:
        with open_file(file) as stream:
            require_memory(2 * os.fstat(stream.fileno()).st_size, file)
            content = read_pickle(stream, file, KNOWN)
    except FileNotFoundError as error:
        raise NoSaveError(f"'{file}': expected a saved replay buffer, got nothing; give the .pkl file") from error
    if not isinstance(content, Made) or (kind := CLASS.fullmatch(content.name)) is None:
        got = content.name if isinstance(content, Made) else type(content).__name__
        raise FileFormatError(f"'{file}': expected a replay buffer of stable_baselines3, got a {got}")
    try:
        record = _record(content.state)
    except (ValueError, TypeError) as error:
        raise FileFormatError(f"'{file}': {error}; use another copy") from error
    trees: dict[str, ArrayTree] = {name: x for name, x in vars(record).items() if isinstance(x, dict | np.ndarray)}
    sizes = list[int]()

    def measure(array: Array) -> None:
        sizes.append(array.nbytes)

    def native(array: Array) -> Array:
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    map_leaves(measure, trees)
    require_memory(2 * sum(sizes), file)  # a pickle of one array can name it a thousand times
    vars(record).update(map_leaves(native, trees))
    found = stable_baselines3_replay(record)
    found.source = f"'{file}', stable_baselines3 {kind[1]}"
    if record.copy_info_dict:
        found.lacks += ("its infos were not read",)
    return log_of(found)


def _record(state: Value) -> SimpleNamespace:
    """The attributes of a buffer that hold its steps.

    Raises:
        ValueError: an attribute is missing, or has another type.
    """
    given = state.strings() if isinstance(state, Pairs) else {}

    def member(name: str, kind: type) -> Value:
        value = given.get(name)
        if type(value) is not kind:
            raise ValueError(f"'{name}': expected the type {kind.__name__}, got {shown(value)}")
        return value

    def tree(name: str) -> ArrayTree:
        value = given.get(name)
        if not isinstance(value, Pairs):
            return _array(name, value, size)
        return {key: _array(f"{name}.{key}", part, size) for key, part in value.strings().items()}

    rewards = _array("rewards", given.get("rewards"), None)
    size = rewards.shape
    found = SimpleNamespace(
        rewards=rewards,
        pos=member("pos", int),
        full=member("full", bool),
        optimize_memory_usage=given.get("optimize_memory_usage") is True,
        copy_info_dict=given.get("copy_info_dict") is True,
        # older releases had no timeouts
        handle_timeout_termination=given.get("handle_timeout_termination", True) is True and "timeouts" in given,
    )
    names = ["actions", "dones", "observations"]
    names += ["timeouts"] if found.handle_timeout_termination else []
    names += [] if found.optimize_memory_usage else ["next_observations"]
    for name in names:
        setattr(found, name, tree(name))
    if not 0 <= found.pos < max(size[0], 1) or not (found.full or found.pos):
        raise ValueError(
            f"expected 'pos' of a buffer with steps in {size[0]} rows, got {shown(found.pos)}, full={found.full}"
        )
    return found


def _array(name: str, value: Value, size: tuple[int, ...] | None) -> Array:
    """The array ``[R, N, ...]`` of an attribute.

    Raises:
        ValueError: it is not an array, or has another number of rows or envs than ``size``.
    """
    try:
        found = array_of(value)
    except ValueError as error:
        raise ValueError(f"'{name}': {error}") from error
    if found.ndim < 2 or (size is not None and found.shape[:2] != size):
        wanted = "[rows, envs, ...]" if size is None else f"{size} in front"
        raise ValueError(f"'{name}': expected an array {wanted}, got {found.shape}")
    return found


# -- arrays ------------------------------------------------------------------------------------------------------------

FROM_BYTES = ("numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer")

KINDS = re.compile(r"b1|[iu][1248]|f[248]")
"""NumPy's codes for bools, whole numbers and floats, with their size in bytes."""

REBUILT = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")


def array_of(value: Value) -> Array:
    """The array that a pickle would have made, as a view of its bytes: no memory is taken.

    The bytes are in the order of the machine that wrote them, and other arrays may have the same bytes.

    Raises:
        ValueError: it is not an array of numbers, or its bytes contradict its shape.
    """
    if isinstance(value, Made) and value.name in FROM_BYTES and len(value.args) == 4:
        data, kind, shape, order = value.args
    elif isinstance(value, Made) and value.name in REBUILT and len(_members(value.state)) == 5:
        _, shape, kind, fortran, data = _members(value.state)
        order = "F" if fortran is True else "C"
    else:
        raise ValueError(f"expected an array of numbers, got {getattr(value, 'name', type(value).__name__)}")
    dtype = _dtype(kind)
    sizes = tuple(n for n in _members(shape) if type(n) is int and 0 <= n < 2**48)
    if not isinstance(shape, tuple) or not len(sizes) == len(shape) <= 16:
        raise ValueError(f"expected the shape of an array, got {shown(shape)}")
    if not isinstance(data, bytes | bytearray):
        raise ValueError(f"expected the bytes of an array, got a {type(data).__name__}")
    if dtype.kind == "b" and data.translate(None, b"\0\1"):
        raise ValueError("expected bools, bytes of 0 and 1, got others")
    found = np.frombuffer(data, dtype)
    wanted = prod(sizes)
    if found.size != wanted or order not in ("C", "F", "A"):
        raise ValueError(f"expected {wanted} numbers for the shape {shown(shape)}, got {found.size}")
    return found.reshape(sizes, order="F" if order == "F" else "C")


def _dtype(value: Value) -> np.dtype:
    """The dtype that a pickle would have made.

    Raises:
        ValueError: it is not a dtype of numbers.
    """
    made = value if isinstance(value, Made) and value.name == "numpy.dtype" else None
    code = made.args[0] if made is not None and made.args else None
    if made is None or not isinstance(code, str) or not KINDS.fullmatch(code):
        raise ValueError(f"expected a dtype of numbers, got {shown(code)}")
    big = _members(made.state)[1:2] == (">",)
    return np.dtype(code).newbyteorder(">" if big else "<")


def _members(value: Value) -> tuple[Value, ...]:
    """A tuple's members; none if it is something else."""
    return value if isinstance(value, tuple) else ()


# -- the pickle --------------------------------------------------------------------------------------------------------

MOST_STEPS = 2**24
"""The most opcodes that are read, as a pickle of small objects takes up to a hundred times its size in memory."""

ASKED, STEP_BYTES = 2**16, 128
"""After how many opcodes memory is asked for, and the most bytes that an opcode takes for an object."""

OPCODES: dict[str, Any] = {opcode.code: opcode for opcode in pickletools.opcodes}


Value: TypeAlias = (
    "int | float | str | bytes | bytearray | list[Value] | tuple[Value, ...] | Name | Made | GroupStart | None"
)
"""The values that a pickle makes here: numbers, text, bytes, lists, tuples, and the classes below."""


class Pairs(list["Value"]):
    """The keys and values of a dict in turns. Nothing is hashed, as a file could choose keys that collide."""

    def strings(self) -> dict[str, Value]:
        """The members whose keys are strings."""
        return {key: value for key, value in zip(self[::2], self[1::2], strict=False) if type(key) is str}


@dataclass(frozen=True, eq=False, slots=True)
class Name:
    """A function or class that a pickle names, such as "numpy.dtype"."""

    text: str


@dataclass(eq=False, repr=False, slots=True)
class Made:
    """The object that a pickle would have made by a call. Its ``repr`` leaves out what it holds, which may be endless.

    Args:
        name: the name of the function or class that would have been called.
        args: the arguments.
        state: the state that the pickle would have set on the result; None if it sets none.
        items: the values that the pickle would have put into the result.
    """

    name: str
    args: tuple[Value, ...]
    state: Value = None
    items: list[Value] = field(default_factory=list["Value"])

    def __repr__(self) -> str:
        return f"{self.name}(...)"


class GroupStart:
    """Where a group of values on the stack begins: a MARK in the words of pickle."""


START = GroupStart()


class _Bounded:
    """A file of ``size`` bytes. It refuses to read beyond its end before memory is taken for the missing bytes."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        if not 0 <= size <= self._left:
            raise ValueError(f"{size} bytes are announced and {self._left} are left")
        self._left -= size
        return self._stream.read(size)

    def readline(self) -> bytes:
        """The next line, of up to 1,024 bytes."""
        line = self._stream.readline(1024)
        self._left -= len(line)
        return line


def read_pickle(stream: io.FileIO, path: Path, known: re.Pattern[str]) -> Value:
    """The content of a pickle: numbers, text, bytes, lists, tuples, :class:`Pairs` for dicts, and :class:`Made`.

    Args:
        stream: the open file.
        path: the path of the file, for errors.
        known: matches every name "module:name" that the pickle may have.

    Raises:
        FileFormatError: the file is not a pickle, is damaged, or has a name that is not known.
        ParameterError: there is too little memory for its objects.
    """
    size = os.fstat(stream.fileno()).st_size
    try:
        with io.BufferedReader(stream) as buffered:
            return _PickleMachine(known).run(_opcodes(_Bounded(buffered, size), path))
    except ParameterError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise FileFormatError(
            f"'{path}': expected the pickle of a buffer, got {error}; nothing of it was run"
        ) from error


def _opcodes(stream: _Bounded, path: Path) -> Iterator[tuple[str, Any]]:
    """The name and the argument of each opcode. An opcode outside :data:`READ` is refused before its argument is read.

    Raises:
        ValueError: an opcode is refused, or its argument is damaged.
        ParameterError: less memory is free than the objects so far take.
    """
    for step in range(MOST_STEPS):
        if step and not step % ASKED:
            require_memory(step * STEP_BYTES, path)
        code = stream.read(1)
        opcode = OPCODES.get(code.decode("latin-1"))
        if opcode is None or opcode.name not in READ:
            raise ValueError(f"the opcode {code!r}, which no buffer needs")
        yield opcode.name, None if opcode.arg is None else opcode.arg.reader(stream)
    raise ValueError(f"more than {MOST_STEPS:,} opcodes")


class _PickleMachine:
    """Follows the opcodes of one pickle with a stack and a memo, as an unpickler does."""

    def __init__(self, known: re.Pattern[str]) -> None:
        self.stack: list[Value] = []
        self.memo: list[Value] = []
        self._known = known

    def run(self, opcodes: Iterator[tuple[str, Any]]) -> Value:
        """The value on top of the stack at the end."""
        for name, argument in opcodes:
            if name in VALUES:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name]())
            elif name in ACTIONS:
                ACTIONS[name](self, argument)
            elif name == "STOP":
                break
        return self.stack.pop()

    def group(self) -> list[Value]:
        """The values above the newest mark. They leave the stack, and so does the mark."""
        at = next((i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is START), None)
        if at is None:
            raise ValueError("the end of a group without its beginning")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def last(self, count: int) -> list[Value]:
        """The newest ``count`` values, which leave the stack."""
        if len(self.stack) < count:
            raise ValueError("fewer values than an opcode takes")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def name(self, module: Value, name: Value) -> None:
        """Put a name on the stack.

        Raises:
            ValueError: it is not known.
        """
        if not (isinstance(module, str) and isinstance(name, str) and self._known.fullmatch(f"{module}:{name}")):
            raise ValueError(f"the name {shown(module)} {shown(name)}, which no buffer needs")
        self.stack.append(Name(f"{module}.{name}"))

    def call(self, args: Value) -> None:
        """Write down a call of the name on the stack."""
        called = self.stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise ValueError("a call of something that is no name")
        self.stack.append(Made(called.text, args))

    def build(self) -> None:
        """Write down the state of what was made."""
        made, state = self.last(2)
        if not isinstance(made, Made):
            raise ValueError("a state for something that was not made by a call")
        made.state = state
        self.stack.append(made)

    def fill(self, kind: type[list[Value]], values: list[Value]) -> None:
        """Add values to the list, dict or set on the stack. If a :class:`Made` is there, write them down in it."""
        target = self.stack[-1]
        if isinstance(target, Made):
            target.items += values
        elif isinstance(target, list) and type(target) is kind:
            target.extend(values)
        else:
            raise ValueError("values for something that holds none")

    def keep(self, place: int) -> None:
        """Remember the newest value under the number ``place``. Places count up from 0."""
        if place != len(self.memo):
            raise ValueError(f"place {place} of the memo after {len(self.memo)}")
        self.memo.append(self.stack[-1])

    def recall(self, place: int) -> None:
        """Put a remembered value on the stack."""
        self.stack.append(self.memo[place])


VALUES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
})  # fmt: skip
"""Opcodes whose argument is a value."""

CONSTANTS: dict[str, Callable[[], Value]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list, "EMPTY_DICT": Pairs, "EMPTY_SET": list, "MARK": lambda: START,
}  # fmt: skip
"""Opcodes that put a new value on the stack."""


def _new(machine: _PickleMachine, values: list[Value]) -> None:
    """A call of ``__new__`` with keywords: ``values`` are the class, its arguments and its keywords.

    The arguments are not copied, since a pickle can make thousands of calls with the same ones.
    """
    machine.stack.append(values[0])
    machine.call((values[1], values[2]))


ACTIONS: dict[str, Callable[[_PickleMachine, Any], object]] = {
    "GLOBAL": lambda m, argument: m.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*m.last(2)),
    "REDUCE": lambda m, _: m.call(m.stack.pop()),
    "NEWOBJ": lambda m, _: m.call(m.stack.pop()),
    "NEWOBJ_EX": lambda m, _: _new(m, m.last(3)),
    "BUILD": lambda m, _: m.build(),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.group())),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.last(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.last(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.last(3))),
    "FROZENSET": lambda m, _: m.stack.append(m.group()),
    "APPEND": lambda m, _: m.fill(list, m.last(1)),
    "APPENDS": lambda m, _: m.fill(list, m.group()),
    "ADDITEMS": lambda m, _: m.fill(list, m.group()),
    "SETITEM": lambda m, _: m.fill(Pairs, m.last(2)),
    "SETITEMS": lambda m, _: m.fill(Pairs, m.group()),
    "MEMOIZE": lambda m, _: m.keep(len(m.memo)),
    "BINPUT": lambda m, place: m.keep(place),
    "LONG_BINPUT": lambda m, place: m.keep(place),
    "BINGET": lambda m, place: m.recall(place),
    "LONG_BINGET": lambda m, place: m.recall(place),
    "POP": lambda m, _: m.last(1),
    "POP_MARK": lambda m, _: m.group(),
}
"""Opcode -> what it does to the stack and the memo."""

READ = frozenset({"PROTO", "FRAME", "STOP", *VALUES, *CONSTANTS, *ACTIONS})
"""The opcodes that are read: what Python writes from protocol 2 on, without instances, extensions and outer buffers."""
