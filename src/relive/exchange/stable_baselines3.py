"""Stable-Baselines3: the files that ``save_replay_buffer`` writes, read without unpickling them."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import FileFormatError, NoSaveError
from ..files.disk import open_file, usable
from ..look.hosts.replays import stable_baselines3_replay
from ..printable import shown
from ..steps.arrays import Array
from ..steps.trees import map_leaves
from .checked import require_memory
from .live import log_of
from .log import Log
from .pickles import Made, Pairs, array_of, read_pickle

__all__ = ["from_stable_baselines3"]

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

    The file is a pickle, and it is never unpickled: see :mod:`relive.exchange.pickles`. The plain, Dict, n-step and
    hindsight buffers are read. Observations after steps are kept. With ``optimize_memory_usage`` the buffer had only
    the newest one of each env: see :func:`relive.exchange.log_of`.

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
    kind = CLASS.fullmatch(content.name) if isinstance(content, Made) else None
    if kind is None:
        got = content.name if isinstance(content, Made) else type(content).__name__
        raise FileFormatError(f"'{file}': expected a replay buffer of stable_baselines3, got a {got}")
    try:
        record = _record(content.state)
    except (ValueError, TypeError) as error:
        raise FileFormatError(f"'{file}': {error}; use another copy") from error
    trees: dict[str, Any] = {name: x for name, x in vars(record).items() if isinstance(x, dict | np.ndarray)}
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


def _record(state: Any) -> SimpleNamespace:
    """The attributes of a buffer that hold its steps.

    Raises:
        ValueError: an attribute is missing, or has another type.
    """
    given = state.strings() if isinstance(state, Pairs) else {}

    def member(name: str, kind: type) -> Any:
        if type(given.get(name)) is not kind:
            raise ValueError(f"'{name}': expected the type {kind.__name__}, got {shown(given.get(name))}")
        return given[name]

    def tree(name: str) -> Any:
        value = given.get(name)
        if not isinstance(value, Pairs):
            return _array(name, value, size)
        return {key: _array(f"{name}.{key}", part, size) for key, part in value.strings().items()}

    rewards = _array("rewards", given.get("rewards"), None)
    size = rewards.shape
    names = ("actions", "dones", "observations", "timeouts")
    slim = given.get("optimize_memory_usage") is True
    found = SimpleNamespace(
        rewards=rewards,
        pos=member("pos", int),
        full=member("full", bool),
        optimize_memory_usage=slim,
        copy_info_dict=given.get("copy_info_dict") is True,
        handle_timeout_termination=given.get("handle_timeout_termination", True) is True and "timeouts" in given,
    )
    given.setdefault("timeouts", given.get("dones"))  # older releases had no timeouts; the stand-in is not used
    for name in names if slim else (*names, "next_observations"):
        setattr(found, name, tree(name))
    if not found.handle_timeout_termination:
        found.timeouts = np.zeros(size, np.bool_)
    if not 0 <= found.pos < max(size[0], 1) or not (found.full or found.pos):
        raise ValueError(
            f"expected 'pos' of a buffer with steps in {size[0]} rows, got {shown(found.pos)}, full={found.full}"
        )
    return found


def _array(name: str, value: Any, size: tuple[int, ...] | None) -> Any:
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
