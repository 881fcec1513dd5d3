"""Text for messages: names that act on no terminal, and values in bounded time.

A file may be made up by somebody who wants to harm the reader of a message about it.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: colours, titles, cleared screens
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of text
    "\u2028\u2029"  # ends of lines and paragraphs
    "\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible ones
    "\ud800-\udfff]"  # halves of characters, which no file and no terminal takes
)
"""Characters that act on a terminal, or that nobody sees. U+200C and U+200D are not among them: some scripts and emoji
need them."""


def printable(text: str, keep: str = "") -> str:
    r"""Text for people, with each of the :data:`HIDDEN` characters as its code: ``\x1b``, ``\u202e``.

    Letters of all scripts stay as they are. Those in ``keep`` stay, too.
    """
    return HIDDEN.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``. Python 3.10 keeps the note as well, but does not show it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def brief(text: str, most: int) -> str:
    """Text for people without its middle, if it is longer than ``most``. A file may have thousands of long names."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ...({len(text) - most:,} characters)... {text[-most // 2 :]}"


class _Shown(reprlib.Repr):
    """``repr`` that looks at the first members of a few levels only. Members that share members cost no more time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxother = 4, 6, 200

    def repr1(self, x: object, level: int) -> str:
        for kind in (list, tuple, dict, set, frozenset):  # and classes derived from them
            if isinstance(x, kind):
                return getattr(self, f"repr_{kind.__name__}")(x, level)
        if isinstance(x, str | bytes | bytearray):
            return repr(x[: self.maxother])
        if isinstance(x, int) and x.bit_length() > 256:  # Python refuses to write thousands of digits
            return f"a whole number of {x.bit_length():,} bits"
        return self.repr_instance(x, level)


_SHOWN = _Shown()


def shown(value: Any, most: int = 80) -> str:
    """The beginning of a value's ``repr``, up to ``most`` characters, in bounded time.

    For values that come out of files. ``f"{value!r:.80}"`` makes the whole ``repr`` first, which never ends for a few
    tuples that share each other.
    """
    text = _SHOWN.repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
