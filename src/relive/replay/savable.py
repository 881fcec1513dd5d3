"""SavableReplay: how a replay is saved, pickled and copied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

from ..batches.tensordicts import as_tensordict
from ..files import SaveHandle
from ..files.disk import usable
from ..parameters import FLAG_RULE, require
from .loading import saved_arguments
from .locked import one_at_a_time
from .reading import ReadableReplay
from .saving import Saver, typed_tensors
from .sources import Source
from .typed import S_co, V_co

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["SavableReplay"]


class SavableReplay(ReadableReplay[S_co, V_co]):
    """The part of a replay buffer that saves, pickles and copies it. ``load`` is in :class:`relive.ReplayBuffer`."""

    extra: Any
    """In a buffer that was loaded, the value that was passed to :meth:`save` as ``extra``; otherwise None."""
    _saver: Saver

    def save(self, path: str | os.PathLike[str], *, extra: Any = None, background: bool = False) -> SaveHandle:
        """Write everything stored, and the number of the next batch, to the directory ``path``.

        An earlier save there is replaced as a whole or not at all. If this buffer wrote or loaded that save, only new
        rows are written. ``docs/files.md`` describes the format.

        Args:
            path: the directory.
            extra: further values of the same instant, such as the ``state_dict`` of the model and the optimizer: nested
                dicts, lists and tuples of tensors, arrays, numbers, bools, text and bytes. They come back as
                :attr:`extra` of the loaded buffer, and from :func:`relive.load_extra`. Do not change them before this
                call returns.
            background: return at once, and write the present state in another thread. ``extra`` is copied. You may add,
                sample and train meanwhile, and change everything. A buffer has one such save at a time: the next call
                waits for it. If that save failed and :meth:`~relive.files.SaveHandle.wait` has not raised its error,
                the next call raises it.

        Returns:
            the save. ``save(path, background=True).wait()`` raises its error. Without ``background`` it is done.

        Raises:
            FileFormatError: ``path`` holds something else, or ``extra`` a value that cannot be stored; names its keys.
            OSError: the disk is full, or fails.
        """
        require("save", FLAG_RULE, background=background)
        saver, path = self._saver, usable(path)
        saver.saves.settle()
        with ExitStack() as held:
            held.enter_context(self.lock)  # others wait until the rows are on their way, not for the disk
            saver.saves.settle()  # another thread may have begun one
            if self._ring.pending is not None or self._ahead is not None:
                self._prepare()
            return saver.start(path, extra) if background else saver.write(path, extra, held.close)

    @property
    @one_at_a_time
    def block(self) -> TensorDict:
        """The schema's fields of all rows ``[rows]``, without a copy, in the order of memory.

        Row k of env e is at ``e * R + k % R``; each env has R rows. Rows that were never written are included, and so
        are those of final observations. Reward and flags are always in RAM.

        You can write to the rows, and :meth:`save` cannot see that. So once this was read, every save writes all rows.
        """
        self._saver.segments.give_up()
        self._saver.await_rows()
        return as_tensordict(self._ring.store.views(), (self._plan.rows,))

    @one_at_a_time
    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: the content of a save, and parts that are not relive's own."""
        return type(self)._unpickled, self._saver.pickled(self._given_sampler)

    @classmethod
    def _unpickled(cls, arrays: Mapping[str, Any], *rest: Any) -> Self:
        return cls._restored(typed_tensors(arrays), *rest)

    def __copy__(self) -> Self:
        """A deep copy, since two buffers cannot share memory, a sampler or a view."""
        return deepcopy(self)

    @classmethod
    def _restored(cls, tensors: Mapping[str, Any], content: Mapping[str, Any], device: Any, *parts: Any) -> Self:
        """The buffer whose state this is; ``parts`` are a sampler and a view, or None for the saved ones."""
        source = Source.of_tensors(tensors, content)
        buffer = cls(**saved_arguments(source, device, *parts))
        buffer._saver.restore(source)
        return buffer
