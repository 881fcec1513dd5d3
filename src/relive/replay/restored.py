"""The work of :meth:`relive.ReplayBuffer.load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

from ..files.entries import contradictions
from ..files.nested import read_extra
from ..memory.blocks import small_pages
from ..memory.estimate import free_memory
from ..steps.changes import DoesNotFitError, SchemaChanges
from .dealing import dealt, require_unordered
from .loading import changed_arguments, open_save, saved_arguments
from .sources import Source

__all__ = ["loaded", "loaded_for"]


def loaded(
    kind: Any,
    path: str | os.PathLike[str],
    device: Any,
    capacity: int | None,
    parts: tuple[Any, Any],
    changes: SchemaChanges | None,
    store: Any,
) -> Any:
    """The saved replay, as a ``kind``; ``parts`` are a sampler and a view, or None for the saved ones.

    Raises:
        FileFormatError, SchemaError, ParameterError: as :meth:`relive.ReplayBuffer.load`.
    """
    with open_save(path) as save:
        source = Source.of_save(save)
        with contradictions(path):
            arguments = saved_arguments(source, device, *parts)
        if store is not None:
            arguments["store"] = store
        origins = changed_arguments(arguments, capacity, changes)
        sparse = 2 * source.row_count < arguments["capacity"]  # huge pages take a fifth of the time to write, but whole
        with contradictions(path, DoesNotFitError), small_pages() if sparse else nullcontext():
            buffer = kind(**arguments)
            buffer._saver.restore(source, origins)
        buffer.extra = read_extra(save, free_memory())
    if changes is None:
        buffer._saver.segments.note(path, source.segments[:-1])
    return buffer


def loaded_for(num_envs: int, kind: Any, path: str | os.PathLike[str], device: Any, capacity: int | None,
               parts: tuple[Any, Any], changes: SchemaChanges | None, store: Any) -> Any:  # fmt: skip
    """As :func:`loaded`, with another number of envs.

    Raises:
        ParameterError: the steps have an order; see :func:`relive.replay.dealing.require_unordered`.
        FileFormatError, SchemaError, ParameterError: as above.
    """
    with open_save(path) as save:
        content: Mapping[str, Any] = save.content
        require_unordered(content, num_envs, store)
    if num_envs == content["num_envs"]:
        return loaded(kind, path, device, capacity, parts, changes, store)
    saved = loaded(kind, path, "cpu", None, deepcopy(parts), changes, None)
    state: tuple[dict[str, Any], dict[str, Any]] = saved._saver.whole_state()
    arrays, content = dealt(*state, num_envs, capacity)
    buffer = kind._restored(arrays, content, device, *parts)
    buffer.extra = saved.extra
    return buffer
