"""ClusterSave: a checkpoint of all shards that is done, or under way while the learner goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ..errors import LifecycleError
from ..files import detached
from ..files.nested import to_json
from ..parameters import TIMEOUT_RULE, require
from .checkpoints import Checkpoint, write_checkpoint
from .group import PAUSE, Group
from .outbox import Outbox

__all__ = ["ClusterSave", "Saver"]


SAVE_TIMEOUT = 3600.0
"""Seconds that a shard may take to write its part of a checkpoint, or to begin it."""


class ClusterSave:
    """A checkpoint. The shards write their parts, and then one rename makes the whole checkpoint count.

    :meth:`relive.cluster.Replay.save` returns it. The later calls of the learner bring it to its end; so does
    :meth:`wait`. If the process ends earlier, the last checkpoint counts.
    """

    def __init__(
        self,
        group: Group,
        path: str | os.PathLike[str],
        state: Checkpoint,
        extra: tuple[Any, dict[str, Any]],
        counts: Callable[[int], object],
    ) -> None:
        """Watch the commits that all shards have begun.

        ``counts`` is called with the number of the checkpoint once the checkpoint counts.
        """
        self.path = os.fspath(path)
        """The directory."""
        self._group, self._state, self._extra, self._counts = group, state, extra, counts
        self._calls = {shard: self._ask(shard) for shard in range(group.count)}
        self._error: BaseException | None = None
        self._seen = False

    @property
    def done(self) -> bool:
        """Whether the save is over: the checkpoint counts, or the save failed."""
        self.look()
        return not self._calls

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint counts.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            LifecycleError: a shard does not answer, or died while it wrote. The last checkpoint still counts.
            FileFormatError, OSError: a shard or the learner could not write its part.
            TimeoutError: the save is not done yet. It goes on.
        """
        require("wait", TIMEOUT_RULE, timeout=timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the save into '{self.path}' is not done after {timeout} seconds; wait again")
            time.sleep(PAUSE)
        if self._error is not None:
            self._seen = True
            raise self._error

    def look(self) -> None:
        """See whether the shards are done. If all are, the checkpoint counts from now on."""
        if not self._calls:
            return
        try:
            found, failed = self._group.link.answers(self._calls, 0.0)
            if failed:
                raise LifecycleError(f"shards {sorted(failed)} died while they wrote; the last checkpoint still counts")
            for shard, is_done in found.items():
                del self._calls[shard]
                if not is_done:
                    self._calls[shard] = self._ask(shard)
            if not self._calls:
                write_checkpoint(self.path, self._state, self._extra)
                self._counts(self._state.cut)
        except Exception as error:
            self._error, self._calls = error, {}

    def raise_unseen(self) -> None:
        """Raise the error of a save that failed, unless :meth:`wait` has raised it."""
        if self._error is not None and not self._seen:
            self._seen = True
            self._error.add_note("this is the error of the save before, in the background; now nothing was saved")
            raise self._error

    def _ask(self, shard: int) -> Any:
        return self._group.link.call(shard, "committed", self._state.cut)

    def __repr__(self) -> str:
        state = "under way" if self._calls else "failed" if self._error else "done"
        return f"<save into {self.path!r}: {state}>"


class Saver:
    """Makes the shards commit: from time to time, and for checkpoints.

    Args:
        group: the shards.
        outbox: carries commits that nobody waits for.
        path: the directory; None for none.
        every: seconds between commits; None for none.
        cut: the number of the last checkpoint.
    """

    def __init__(
        self, group: Group, outbox: Outbox, path: str | os.PathLike[str] | None, every: float | None, cut: int
    ) -> None:
        self._group, self._outbox, self._path, self._every, self._cut = group, outbox, path, every, cut
        self._committed, self._last = time.monotonic(), None

    _last: ClusterSave | None
    """The last save in the background, until its end was seen."""

    def save(self, state: Checkpoint, extra: Any, background: bool) -> ClusterSave:
        """Write a checkpoint; see :meth:`relive.cluster.Replay.save`."""
        if self._path is None:
            raise LifecycleError("save(): this replay has no directory; create it with path=...")
        self.settle()
        described, tensors = to_json(extra)
        tensors, group, cut = detached(tensors), self._group, self._cut + 1
        group.refresh()
        begun = group.ask(dict.fromkeys(group.up, ("commit", cut, background)), SAVE_TIMEOUT)
        missing = sorted(set(range(group.count)) - begun.keys())
        if missing:
            raise LifecycleError(f"save(): shards {missing} do not answer; the last checkpoint still counts, try again")
        saving = ClusterSave(group, self._path, state._replace(cut=cut), (described, tensors), self._note)
        if background:
            self._last = saving
        else:
            saving.wait()
        return saving

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one, and raise its error once."""
        saving, self._last = self._last, None
        if saving is not None:
            while not saving.done:
                time.sleep(PAUSE)
            saving.raise_unseen()

    def look(self) -> None:
        """Bring the save that is under way further, and start a commit if it is time."""
        if self._last is not None:
            self._last.look()
        now = time.monotonic()
        if self._every is not None and self._path is not None and now - self._committed > self._every:
            self._committed = now
            for shard in self._group.up:
                self._outbox.send(shard, 0, "commit", None)

    def _note(self, cut: int) -> None:
        self._cut, self._committed = cut, time.monotonic()
