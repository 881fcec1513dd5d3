"""What a buffer hands over to be stored elsewhere, or by itself again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from threading import Lock
from typing import Any

__all__ = ["Collected"]

Data = dict[str, Any]


class Collected(MutableMapping[str, Any]):
    """Steps by key, as they were when they were asked for, but read only when somebody looks at them.

    A learner that collects by itself takes all steps out of its buffer, resets it and puts them back, round after
    round; a buffer that gets them back unread has nothing to do, and has to compare those that were read. Any other
    change of it reads them first. Pickled it is a plain dictionary.

    Args:
        read: gives the steps.
    """

    def __init__(self, read: Callable[[], Data]) -> None:
        self._read: Callable[[], Data] | None = read
        self._found: Data = {}
        self._lock = Lock()

    @property
    def unread(self) -> bool:
        """Whether nobody has looked yet."""
        return self._read is not None

    def content(self) -> Data:
        """The steps, float32 ``[T, N, ...]`` by key."""
        with self._lock:  # whoever collects and whoever learns may be threads
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
