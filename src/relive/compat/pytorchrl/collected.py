"""The result of ``get_all_buffer_data``: steps that are read only when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from threading import Lock
from typing import Any

__all__ = ["Collected"]

Data = dict[str, Any]


class Collected(MutableMapping[str, Any]):
    """Steps by key at the time of the call, read from the buffer on first use.

    A PyTorchRL learner that collects by itself takes all steps out of its buffer, resets the buffer and puts them back
    in each round. If they come back unread, the buffer has nothing to do; otherwise it compares them. Before any other
    change the buffer reads them. It is pickled as a plain dictionary.

    Args:
        read: returns the steps.
    """

    def __init__(self, read: Callable[[], Data]) -> None:
        self._read: Callable[[], Data] | None = read
        self._found: Data = {}
        self._lock = Lock()

    @property
    def unread(self) -> bool:
        """Whether the steps have not been read yet."""
        return self._read is not None

    def content(self) -> Data:
        """The steps, float32 ``[T, N, ...]`` by key."""
        with self._lock:  # the collector and the learner may be threads
            if self._read is not None:
                self._found = self._read()
                self._read = None
        return self._found

    def __getitem__(self, key: str) -> Any:
        return self.content()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content())

    def __len__(self) -> int:
        return len(self.content())

    def __repr__(self) -> str:
        return repr(self.content())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.content(),)
