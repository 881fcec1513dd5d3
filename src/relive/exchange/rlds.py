"""RLDS: reads episodes of steps, as TensorFlow Datasets serves them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ..errors import FieldError, ShapeError
from ..files.disk import usable
from ..look.experience import ArrayTree
from ..memory.estimate import require_whole
from ..names import needed
from ..parameters import is_mapping
from ..steps.arrays import Array, Bools
from ..steps.schema import Path, dotted, map_leaves
from .log import BUT_LAST, EpisodeArrays, Log, log_of_episodes

OWN = ("observation", "action", "reward", "discount", "is_first", "is_last", "is_terminal")
"""The members of a step that RLDS defines."""


class Known(NamedTuple):
    """Facts about all episodes together."""

    texts: set[str]
    """The members that are not numbers."""
    cut: list[int]
    """The numbers of the episodes without a last step."""


def from_rlds(episodes: Iterable[Any] | str | os.PathLike[str]) -> Log:
    """The episodes of an RLDS data set.

    The last step of an RLDS episode has only an observation, the final one: its action and reward are not defined. If
    it is terminal, the step before it terminated; if not, that step was truncated. Every episode keeps its final
    observation. An episode without a last step was cut off there, and its newest action and reward are left out.

    Args:
        episodes: any iterable of episodes, each with ``steps``: an iterable of dicts with ``observation``, ``action``,
            ``reward``, ``is_first``, ``is_last`` and ``is_terminal``, or one such dict of arrays ``[k + 1, ...]``.
            Objects with ``as_numpy_iterator``, such as those of TensorFlow Datasets, are iterated by it. A path must
            lead to a data set that TensorFlow Datasets prepared on this machine; all of its splits are read.

    Raises:
        ModuleNotFoundError: a path was given, and tensorflow_datasets is not installed.
        FieldError: ``episodes`` is no iterable, a step lacks a member, the flags of an episode contradict each other,
            or there are no steps.
        ShapeError: the members of an episode have different numbers of steps.
        Source: Ramos et al., RLDS: an Ecosystem to Generate, Share and Use Datasets in Reinforcement Learning, 2021.
    """
    source = "the RLDS data set"
    if isinstance(episodes, str | os.PathLike):
        path = usable(episodes)
        source, episodes = f"the RLDS data set '{path}'", _prepared(str(path))
    try:
        items = _items(episodes)
    except TypeError as error:
        kind = type(episodes).__name__
        raise FieldError(f"from_rlds: expected an iterable of episodes, or a path, got a {kind}") from error
    known = Known(set(), [])
    log = log_of_episodes((_episode(number, one, known) for number, one in enumerate(items)), source)
    lacks = ["its discounts, and the metadata of its episodes, were not read"]
    lacks += [f"'{name}' holds no numbers and was not read" for name in sorted(known.texts)]
    if known.cut:
        lacks.append(
            f"{len(known.cut)} episodes have no last step, first episode {known.cut[0]}; they count as cut off"
        )
    return Log(log.source, log.fields, tuple(lacks))


def _prepared(path: str) -> Iterator[Any]:
    """The episodes of a data set that TensorFlow Datasets prepared.

    Raises:
        ModuleNotFoundError: TensorFlow Datasets is not installed.
    """
    with needed("RLDS files need their package: pip install tensorflow tensorflow_datasets"):
        tfds = import_module("tensorflow_datasets")
    for split in tfds.builder_from_directory(path).as_dataset().values():
        yield from _items(split)


def _items(source: Any) -> Iterator[Any]:
    """The members of an iterable, as NumPy arrays if it can serve them so."""
    serve = getattr(source, "as_numpy_iterator", None)
    return iter(source if serve is None else serve())


def _episode(number: int, episode: object, known: Known) -> EpisodeArrays:
    """One episode of k + 1 steps as k transitions.

    Raises:
        FieldError, ShapeError: see :func:`from_rlds`.
    """
    where = f"episode {number} of the RLDS data set"
    if not is_mapping(episode) or "steps" not in episode:
        raise FieldError(f"{where}: expected a dict with 'steps', got a {type(episode).__name__}")
    steps = _columns(episode["steps"], where)
    missing = [name for name in ("observation", "action", "reward", "is_last", "is_terminal") if name not in steps]
    if missing:
        raise FieldError(f"{where} lacks {', '.join(missing)}; its steps have {', '.join(steps) or 'nothing'}")
    size = np.asarray(steps["is_last"]).size
    numbers = {name: _numbers(value, name, size, where, known) for name, value in steps.items() if name != "discount"}
    columns = {name: tree for name, tree in numbers.items() if tree is not None}
    if not {"observation", "action", "reward"} <= columns.keys():
        raise FieldError(f"{where}: expected numbers in observation, action and reward, got none")
    last, terminal = _ends(columns, size, where)
    if not last[-1:].all():
        known.cut.append(number)
    terminated, truncated = (np.zeros(max(size - 1, 0), np.bool_) for _ in range(2))
    if size > 1:
        terminated[-1], truncated[-1] = terminal[-1], not terminal[-1]
    kept = {name: map_leaves(BUT_LAST, tree) for name, tree in columns.items()}
    others = {name: value for name, value in kept.items() if name not in OWN}
    return EpisodeArrays(columns["observation"], kept["action"], kept["reward"], terminated, truncated, others)


def _ends(steps: Mapping[str, object], size: int, where: str) -> tuple[Array, Array]:
    """Which steps are last and which are terminal, bool ``[k + 1]`` each.

    Raises:
        FieldError: the flags contradict each other.
    """
    last, terminal = (_flags(steps.get(name), name, size, where) for name in ("is_last", "is_terminal"))
    first = None if steps.get("is_first") is None else _flags(steps["is_first"], "is_first", size, where)
    if last[:-1].any() or (first is not None and (first[1:].any() or not first[:1].all())):
        raise FieldError(f"{where}: expected is_first at its first step alone, and is_last at its last step alone")
    if (terminal & ~last).any():
        raise FieldError(f"{where}: step {int(np.argmax(terminal & ~last))} is terminal and not the last one")
    return last, terminal


def _columns(steps: object, where: str) -> dict[str, object]:
    """Steps by member, each ``[k + 1, ...]``.

    Raises:
        FieldError: steps are no dicts, or the members of a step differ from those of the first one.
        ShapeError: a member has other shapes in other steps.
        ParameterError: arrays that repeat their numbers would not fit into memory as a whole.
    """
    if is_mapping(steps):
        columns = dict[str, object](steps)
        require_whole(columns)
        return columns
    wanted = "'steps' with a dict for each step, or one dict of arrays"
    try:
        rows = list(_items(steps))
    except TypeError as error:
        raise FieldError(f"{where}: expected {wanted}, got a {type(steps).__name__}") from error
    others = [type(row).__name__ for row in rows if not isinstance(row, Mapping)]
    if others:
        raise FieldError(
            f"{where}: expected {wanted}, got a {type(steps).__name__} of {others[0]}; name the members: observation, "
            "action, ..."
        )
    try:
        return map_leaves(lambda *values: np.stack(values), rows[0], *rows[1:]) if rows else {}
    except (KeyError, TypeError, AttributeError) as error:
        raise FieldError(f"{where}: its steps differ in their members ({error})") from error
    except ValueError as error:
        raise ShapeError(f"{where}: its steps differ in their shapes ({error})") from error


def _numbers(tree: object, name: str, size: int, where: str, known: Known, inner: Path = ()) -> ArrayTree | None:
    """The arrays of numbers in a member of steps; None if there are none.

    Raises:
        ShapeError: an array has another number of steps.
    """
    if is_mapping(tree):
        parts = {k: _numbers(part, name, size, where, known, (*inner, str(k))) for k, part in tree.items()}
        return {k: part for k, part in parts.items() if part is not None} or None
    array = np.asarray(tree)
    if array.dtype.kind not in "biuf":
        known.texts.add(dotted((name, *inner)))
        return None
    if array.shape[:1] != (size,):
        raise ShapeError(f"{where}: '{dotted((name, *inner))}' has the shape {array.shape}, is_last has {size} steps")
    return array


def _flags(values: object, name: str, size: int, where: str) -> Bools:
    """Flags, bool ``[k + 1]``.

    Raises:
        FieldError: the values are not flags.
    """
    found = np.asarray(values)
    if found.shape != (size,) or not np.isin(found, (0, 1)).all():
        raise FieldError(f"{where}: expected {size} flags in '{name}', got {found.dtype} {found.shape}")
    return found.astype(np.bool_)
