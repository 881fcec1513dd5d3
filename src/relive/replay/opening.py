"""OpenedReplay: a replay that lives in files: opened, flushed and closed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Self, cast
from weakref import ReferenceType, ref

from ..errors import FieldError, FileFormatError, InvariantError, LifecycleError, ParameterError, SchemaError
from ..files.entries import contradictions, entry, whole
from ..memory.mapped import MappedKeeper
from ..parameters import is_count, observe
from ..printable import shown
from ..ring.adding import Ended
from ..ring.ring import Ring
from ..steps.schema import Schema
from .coming import coming_of
from .durable import Durable, FlushPolicy, recover, require_policy, whereabouts
from .locked import one_at_a_time
from .parts import describe, parts_of, rebuild
from .sampler_files import read_sampler, write_sampler
from .savable import SavableReplay
from .saving import KIND
from .typed import S_co, V_co
from .validate import require_reach

__all__ = ["OpenedReplay", "kept_arguments", "newer", "opened"]


class OpenedReplay(SavableReplay[S_co, V_co]):
    """The part of a replay buffer that keeps it in files while it is used."""

    _durable: Durable | None = None
    """What keeps the files safe; None if the replay is in private memory."""

    def _verify(self) -> None:
        """Read all files, and refuse files that contradict themselves.

        Raises:
            FileFormatError: names the first row or number that is wrong.
        """
        directory = self._require_files("verify").keeper.directory
        try:
            with contradictions(directory.path):
                self.check()
        except FileFormatError:
            self._ring.pending = Ended("this replay was found damaged when it was opened")
            directory.release()
            raise

    @one_at_a_time
    def flush(self) -> None:
        """Write everything that is stored through to the disk. All of it then survives a power cut.

        Raises:
            LifecycleError: this replay is not in files.
            FileFormatError: the directory is gone, or another one is at its path.
            OSError: the disk is full or fails.
        """
        self._require_files("flush")
        self._flush()

    def _flush(self) -> None:
        with self._progress.undone(self._sampler):  # batches drawn ahead that nobody took are drawn again
            self._commit()
            self._require_files("flush").flush()

    def close(self) -> None:
        """Flush, and let another process open the files. Every later call but this one is an error.

        A replay that is not in files has nothing to close.
        """
        with self.lock:
            if self._durable is None or isinstance(self._ring.pending, Ended):
                return
            self._prepare()
            if self._ahead is not None:
                self._ahead.close()
                self._end_serving(self._ahead)
            self._saver.saves.settle()
            self._commit()
            self._durable.flush("close")
            self._ring.pending = Ended("this replay was closed; open its directory again with ReplayBuffer.open")
            self._durable.keeper.directory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_files(self) -> None:
        """Refuse to append in another buffer's order of completion. A kill could leave half of it done.

        Raises:
            LifecycleError: this replay is in files.
        """
        if self._durable is not None:
            raise LifecycleError("append: a replay in files takes transitions env after env; pass envs={0: 0, ...}")

    def _require_files(self, what: str) -> Durable:
        if self._durable is None:
            raise LifecycleError(f"{what}: this replay is not in files; make it with ReplayBuffer.open, or call save")
        return self._durable

    def _commit(self) -> None:
        """Write the manifest, if anything in it has changed."""
        directory, content = self._require_files("flush").keeper.directory, self._content()
        directory.require_held()
        write_sampler(directory, self._ring, self._sampler)
        if content != directory.content:
            directory.commit(content)

    def _content(self) -> dict[str, Any]:
        """The manifest's JSON about this replay."""
        return {
            "kind": KIND,
            "schema": json.loads(self.schema.to_json()),
            "rows_per_env": self._ring.rows,
            "num_envs": self.num_envs,
            "ordered": self.ordered,
            "own_next_obs": self.own_next_obs,
            "seed": self._progress.seed,
            "first": self._progress.first,
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        """The parameters of sampler and view as JSON."""
        return {"sampler": describe(self._sampler), "view": describe(self._reader.view)}

    def part_changed(self, part: object) -> None:
        """A parameter of a sampler or a view was set: if it is one of this replay, keep it at once."""
        if any(part is own for own in self._parts()):
            self._keep_settings()

    def _parts(self) -> list[Any]:
        """The sampler and the view, and those inside of them."""
        return [*parts_of(self._sampler), *parts_of(self._reader.view)]

    def _keep_settings(self) -> None:
        """Keep the settings of a replay in files, and learn of later changes."""
        with self.lock:  # parameters are set by any thread, and the slots have one writer
            if self._durable is None or isinstance(self._ring.pending, Ended):
                return
            for part in self._parts():
                observe(part, self)
            if not self._durable.settings.keep(json.dumps(self._settings()).encode()):
                self._commit()  # they are too long for their place


def opened(
    cls: Any,
    path: str | os.PathLike[str],
    wanted: dict[str, Any],
    sampler: Any,
    view: Any,
    seed: int | None,
    flush: FlushPolicy,
) -> Any:
    """A replay of the class ``cls`` in the files of a directory; see :meth:`relive.ReplayBuffer.open`.

    ``wanted`` has arguments by name; None for an argument that was not given. If a replay is there already, the others
    must be equal to its own.
    """
    require_policy(flush)
    keeper = MappedKeeper(path)
    try:
        return _opened(cls, keeper, wanted, sampler, view, seed, flush)
    except BaseException:
        keeper.directory.discard()
        raise


def _opened(
    cls: Any, keeper: MappedKeeper, wanted: dict[str, Any], sampler: Any, view: Any, seed: int | None, flush: Any
) -> Any:
    """The replay in the memory of a keeper: the one that is kept there, or a new one."""
    directory, content = keeper.directory, keeper.directory.content
    if content is None:
        missing = [name for name in ("schema", "capacity") if wanted[name] is None]
        if missing:
            raise FieldError(
                f"'{directory.path}': expected {' and '.join(missing)}, as no replay is there yet; pass "
                "open(path, schema, capacity)"
            )
        given = {name: value for name, value in wanted.items() if value is not None}
        buffer = cls(**given, sampler=sampler, view=view, seed=seed, store=keeper)
        return _begun(buffer, keeper, flush, None)
    with contradictions(directory.path, ParameterError, SchemaError):
        _require_same(directory.path, kept_arguments(content, sampler, view), wanted)
    first = whole(content, "first")
    with contradictions(directory.path):
        mark, settings = recover(keeper, whole(content, "num_envs"), whole(content, "rows_per_env"))
    with contradictions(directory.path, ParameterError, SchemaError):
        arguments = kept_arguments(content | newer(settings), sampler, view)
    with contradictions(directory.path):
        keeper.directory.journal.append(mark.encode("open", whereabouts(keeper)))  # before anything changes
        buffer = cls(**arguments, store=keeper)
        buffer._progress.first = first
        begun = _begun(buffer, keeper, flush, mark)
    if seed is not None:
        buffer.seed = seed
        buffer._commit()
    return begun


def _begun(buffer: Any, keeper: MappedKeeper, flush: FlushPolicy, mark: Any) -> Any:
    """Start to use a replay that was made over a keeper."""
    buffer._durable = Durable(keeper, buffer._ring, buffer._progress, flush, mark)
    read_sampler(keeper.directory, buffer._ring, buffer._sampler)
    me = ref(buffer)
    buffer._writer.added = None if flush is None else partial(_flush_if_due, me)
    buffer._reader.replaced = lambda: (found := me()) is not None and found._keep_settings()
    buffer._progress.slots.on_seed = lambda: (found := me()) is not None and found._commit()
    buffer._coming = coming_of(buffer._ring, buffer._sampler, buffer._progress)
    keeper.on_fork = partial(_end_in_child, ref(buffer._ring))
    if mark is None:
        buffer._durable.begin()
    buffer._ring.settle()
    buffer._commit()
    buffer._keep_settings()
    return buffer


def _flush_if_due(buffer: Callable[[], Any], count: int) -> None:
    """Flush as the policy says, after so many rows were added."""
    found = buffer()
    if found is not None and found._durable.is_due(count):
        found._flush()


def _end_in_child(ring: ReferenceType[Ring]) -> None:
    """Make every further call in this process, a forked child, an error."""
    found = ring()
    if found is not None:
        found.pending = Ended(
            "this replay is in files that belong to the process that opened it, and a forked child may not use them; "
            "use it in the parent, or send the child batches"
        )


def newer(settings: bytes) -> dict[str, Any]:
    """Settings of a process that was killed, for the manifest's content, as :meth:`OpenedReplay._settings` wrote them.

    Raises:
        InvariantError: they make no sense.
    """
    found: Any = json.loads(settings or b"{}")
    if not isinstance(found, dict) or cast("dict[str, Any]", found).keys() - {"sampler", "view"}:
        raise InvariantError("settings: expected those of a sampler and a view")
    return cast("dict[str, Any]", found)


def kept_arguments(content: dict[str, Any], sampler: Any, view: Any) -> dict[str, Any]:
    """The constructor's arguments for the replay that is kept; ``sampler`` and ``view`` where they are not None."""
    if entry(content, "kind", str) != KIND:
        raise InvariantError(f"its kind is {shown(content['kind'])}")
    rows, num_envs = whole(content, "rows_per_env"), whole(content, "num_envs")
    if num_envs < 1 or rows < 2:
        raise InvariantError(f"{num_envs} envs of {rows} rows; expected at least 1 env and 2 rows")
    if view is None:
        view = rebuild(content.get("view"), "view")
        require_reach(view, rows * num_envs)
    return {
        "schema": Schema.from_json(json.dumps(content.get("schema"))),
        "capacity": rows * num_envs,
        "num_envs": num_envs,
        "sampler": sampler if sampler is not None else rebuild(content.get("sampler"), "sampler"),
        "view": view,
        "ordered": entry(content, "ordered", bool),
        "own_next_obs": entry(content, "own_next_obs", bool),
        "seed": entry(content, "seed", int),
    }


def _require_same(path: Any, kept: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse arguments that differ from those of the replay that is there.

    Raises:
        SchemaError, ParameterError: names the first argument that differs.
    """
    for name, value in wanted.items():
        got = kept[name]
        same = value == got
        if name == "capacity" and is_count(value):
            same = value // kept["num_envs"] * kept["num_envs"] == got
        if value is not None and not same:
            kind = SchemaError if name == "schema" else ParameterError
            raise kind(
                f"'{path}': the replay there has {name}={shown(got, 200)}, got {shown(value, 200)}; leave {name} out, "
                "or give another path"
            )
