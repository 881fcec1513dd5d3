"""convert: experience from one format into another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ..errors import ParameterError
from ..files.disk import usable
from ..files.format import MANIFEST
from ..look.experience import read_npz
from ..parameters import FLAG_RULE, Rule, require
from ..replay.buffer import ReplayBuffer
from ..steps.schema import Schema
from .hub import is_address
from .lerobot import features_of, from_lerobot, to_lerobot
from .log import Log, log_of
from .minari import from_minari, infos_of, to_minari
from .rlds import from_rlds
from .stable_baselines3 import from_stable_baselines3
from .torchrl import from_torchrl
from .velora import from_velora

READERS: dict[str, Callable[[str], Log]] = {
    "lerobot": from_lerobot,
    "minari": from_minari,
    "npz": lambda path: log_of(read_npz(Path(path))),
    "relive": lambda path: log_of(Path(path)),
    "rlds": from_rlds,
    "stable_baselines3": from_stable_baselines3,
    "torchrl": from_torchrl,
    "velora": from_velora,
}
"""Format -> the function that reads it from a path or an id."""


WRITERS: dict[str, Callable[[ReplayBuffer, str], object]] = {
    "lerobot": to_lerobot,
    "minari": to_minari,
    "relive": lambda replay, path: replay.save(path),
}
"""Format -> the function that writes it."""

FITS: dict[str, Callable[[Schema], object]] = {"lerobot": features_of, "minari": infos_of}
"""Format -> a function that raises an error for a schema with a field that the format has no place for."""


SIGNS = {
    "lerobot": "meta/info.json",
    "relive": MANIFEST,
    "torchrl": "storage/storage_metadata.json",
    "velora": "buffer_state.safetensors",
}
"""Format -> a file in its directory that no other format has."""

ENDINGS = {".pkl": "stable_baselines3", ".npz": "npz", ".safetensors": "velora"}
"""The ending of a file's name -> its format."""


def format_of(path: str | Path) -> str | None:
    """The format of what is at a path, by its ending or by the files in it; None if no format is known."""
    where = usable(path)
    if where.is_file():
        return ENDINGS.get(where.suffix)
    return next((name for name, sign in SIGNS.items() if (where / sign).is_file()), None)


Function = TypeVar("Function")


def source_of(text: str) -> object:
    """The source that an audit or an inspection takes for ``FORMAT:WHERE``, an address of the hub, or a path.

    A path to a file is what it was: an audit says how to read those of other libraries.

    Raises:
        FieldError, ShapeError, FileFormatError: the source cannot be read.
    """
    path = Path(text)
    name, where = (format_of(path) if path.is_dir() else None, text) if path.exists() else _named(text)
    if name in ("relive", "npz"):
        return where
    return READERS[name](where).experience() if name in READERS else text


def _named(text: str) -> tuple[str, str]:
    """The format and the path or id that a text names; the format is empty if it names none."""
    if is_address(text):
        return "lerobot", text
    before, colon, after = text.partition(":")
    return (before, after) if colon else ("", text)


def convert(
    source: str,
    target: str,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    images: bool = False,
    drop_incomplete: bool = False,
) -> Log:
    """Read experience in one format and write it in another.

    Args:
        source: ``FORMAT:WHERE``, such as ``minari:my/set-v0``; or a path, whose files show the format; or
            ``hf://user/set``, a LeRobot data set on the hub.
        target: ``FORMAT:WHERE``; or a path for a save of relive.
        source_format: the format of ``source``. If it is given, ``source`` is only a path or an id.
        target_format: the same for ``target``.
        images: True to read the pictures and videos of a LeRobot data set, too, and to write pictures into one as image
            files instead of numbers.
        drop_incomplete: True to leave out episodes that still ran, were interrupted, or lack their first steps, as far
            as the source says so.

    All fields of a step go along. What the target has no place for is left out, and named in ``lacks`` as well.

    Returns:
        the steps that were read, with what the source and the target lack.

    Raises:
        ParameterError: there is no such format; or source and target are one path; or ``images`` is given for another
            format.
        FieldError, ShapeError, FileFormatError: the source cannot be read, or has no complete episode.
    """
    require("convert", FLAG_RULE, drop_incomplete=drop_incomplete)
    read, origin = _side(source, READERS, source_format, "source")
    write, destination = _side(target, WRITERS, target_format, "target")
    if write is WRITERS["relive"] and Path(origin).exists() and Path(origin).resolve() == Path(destination).resolve():
        raise ParameterError(
            f"convert: '{destination}' is the source; give another path, as nothing else has its steps"
        )
    if images and read is not from_lerobot and write is not to_lerobot:
        raise ParameterError("convert: images is for data sets of lerobot alone; leave it out")
    log = from_lerobot(origin, images=True) if images and read is from_lerobot else read(origin)
    if drop_incomplete:
        log = log.without_incomplete()
    name = next(name for name, known in WRITERS.items() if known is write)
    if name in FITS:
        log = log.fitting(FITS[name], f"a data set of {name}")
    if images and write is to_lerobot:
        to_lerobot(log.replay(), destination, images="image")
    else:
        write(log.replay(), destination)
    return log


def _side(text: str, known: Mapping[str, Function], given: str | None, side: str) -> tuple[Function, str]:
    """The function that reads or writes one side, and its path or id.

    Raises:
        ParameterError: the format is not known.
    """
    known_text: Rule = lambda text: isinstance(text, str) and text != "", "expected FORMAT:WHERE or a path"
    require("convert", known_text, **{side: text})
    known_format: Rule = lambda name: name is None or isinstance(name, str), "expected the name of a format, or None"
    require("convert", known_format, **{f"{side}_format": given})
    name, where = given or "", text
    if not name and not Path(text).exists():
        name, where = _named(text)
    if not name:
        name = (format_of(text) if side == "source" else None) or "relive"
    if name not in known:
        raise ParameterError(f"convert: '{name}' is no format of a {side} here; expected one of {', '.join(known)}")
    return known[name], where
