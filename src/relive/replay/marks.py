"""Mark: the content of a journal's record about a replay. With it, the replay is restored after a power cut."""

from __future__ import annotations

import json
import struct
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from ..errors import FileFormatError
from ..kernels.ring_state import COLUMNS, COUNTERS, HEAD
from ..printable import shown
from ..ring.ring import Ring
from ..steps.arrays import Ints

__all__ = ["BOOKKEEPING", "Kind", "Mark", "bookkeeping", "mark_of"]


Kind = Literal["open", "flush", "close"]


BOOKKEEPING = 3
"""How many numbers the bookkeeping of a row has: stamp, step and order."""
_LENGTH = struct.Struct("<I")


class Mark(NamedTuple):
    """The cursors of a replay at a moment when all of its rows were on the disk."""

    state: Ints
    """``[N, 4]``, as :class:`relive.ring.Ring` has it."""
    counters: Ints
    """``[9]``."""
    newest: Ints
    """``[N, 3]``: stamp, step and order of each env's newest row, which the next step changes."""
    dead: Ints
    """``[N]``: rows of each env below this number may have been overwritten since."""
    small: dict[str, list[Any]]
    """Further arrays by name, of a few numbers each."""

    def encode(self, kind: Kind, where: list[Any]) -> bytes:
        """The mark as bytes, with the ``kind`` of event and with ``where``, which identifies the boot and the files."""
        facts = {"kind": kind, "where": where, "num_envs": len(self.state), "small": self.small}
        text = json.dumps(facts, allow_nan=False).encode()
        arrays = (self.state, self.counters, self.newest, self.dead)
        return b"".join([_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(x, "<i8").tobytes() for x in arrays)])

    @staticmethod
    def decode(payload: bytes, num_envs: int) -> tuple[Mark, str, list[Any]]:
        """The mark, the kind of event, and where it happened, as :meth:`encode` takes them.

        Raises:
            FileFormatError: these bytes are not a mark of a ring of ``num_envs`` envs.
        """
        try:
            (length,) = _LENGTH.unpack_from(payload)
            facts: Any = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
            if set(facts) != {"kind", "where", "num_envs", "small"} or facts["num_envs"] != num_envs:
                raise ValueError(shown(facts))
            small = cast("dict[str, Any]", facts["small"])
            if not all(isinstance(x, list) and len(cast("list[Any]", x)) <= 64 for x in small.values()):
                raise ValueError(shown(small))
            if facts["kind"] not in ("open", "flush", "close") or not isinstance(facts["where"], list):
                raise ValueError(shown(facts))
            words = np.frombuffer(payload, "<i8", offset=_LENGTH.size + length).astype(np.int64)
            sizes = num_envs * COLUMNS, COUNTERS, num_envs * BOOKKEEPING, num_envs
            if len(words) != sum(sizes):
                raise ValueError(f"{len(words)} numbers for {sum(sizes)}")
        except (ValueError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise FileFormatError(f"the journal's last record makes no sense ({error!s:.200})") from error
        state, counters, newest, dead = np.split(words, np.cumsum(sizes)[:-1])
        arrays = state.reshape(num_envs, COLUMNS), counters, newest.reshape(num_envs, BOOKKEEPING), dead
        return Mark(*arrays, small), facts["kind"], facts["where"]


def mark_of(ring: Ring, small: dict[str, list[Any]]) -> Mark:
    """The mark of a ring as it is. Only rows that are gone are declared dead."""
    return Mark(ring.state.copy(), ring.counters.copy(), bookkeeping(ring, ring.heads - 1), ring.oldest, small)


def bookkeeping(ring: Ring, numbers: Ints) -> Ints:
    """Stamp, step and order ``[N, 3]`` of the rows with these numbers, one of each env; zeros for numbers below 0."""
    places = np.arange(ring.num_envs) * ring.rows + numbers % ring.rows
    found = np.stack([ring.stamp[places], ring.step[places], ring.order[places]], axis=1).astype(np.int64)
    found[ring.state[:, HEAD] == 0] = 0
    return found
