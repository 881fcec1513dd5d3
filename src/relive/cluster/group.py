"""Group: the shards of a replay as the learner sees them: which ones answer, in which life, and with which totals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import LifecycleError
from .division import LIVES
from .homes import ShardPlan
from .shard import Totals

__all__ = ["Connect", "Failures", "Group", "Link"]


PAUSE = 0.05
"""Seconds between two questions to shards that do not answer."""


class Link(Protocol):
    """How messages travel to shards. If other processes are to send steps, the link can be pickled."""

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Send a message to a shard, and return what :meth:`answers` takes."""
        ...

    def answers(self, calls: Mapping[int, Any], timeout: float) -> tuple[dict[int, Any], set[int]]:
        """The answers that came within ``timeout`` seconds, by key, and the keys of the calls that failed.

        A call whose answer has not come is in neither of the two. An error that a shard raised is raised here.
        """
        ...

    def close(self) -> None:
        """End the shards."""
        ...


Connect = Callable[[list[ShardPlan]], Link]


class Failures(NamedTuple):
    """What a learner has seen of failures."""

    restarts: int
    """How often a shard came back in a new life."""
    unanswered: int
    """Calls that a shard did not answer, in time or at all."""


class Group:
    """Asks shards, and goes on without those that do not answer until they do.

    Args:
        link: to the shards.
        count: K.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, link: Link, count: int, timeout: float) -> None:
        self.link, self.count, self.timeout = link, count, timeout
        self.totals: list[Totals | None] = [None] * count
        """The totals that each shard last gave; None until it has given some."""
        self.largest = 0.0
        """The largest TD error that any shard has seen."""
        self.forgotten = [0] * count
        """How many steps each shard has lost: it had them in its last totals, and not when it came back."""
        self.allowances: Callable[[], Sequence[Any]] = lambda: [None] * count
        """How many steps each shard may store. The shard learns it with each question for its totals."""
        self.answered: Callable[[int, Totals], None] = lambda shard, totals: None
        """Called with the totals of a shard that has got its allowance."""
        self._lives: list[list[str]] = [[] for _ in range(count)]
        self._probes: dict[int, tuple[Any, float]] = {}
        """Calls to the shards that are down, and when they were made."""
        self._unanswered = 0

    @property
    def up(self) -> list[int]:
        """The shards that answered the last question that they were asked."""
        return [shard for shard in range(self.count) if shard not in self._probes]

    @property
    def failures(self) -> Failures:
        """What has failed so far."""
        return Failures(sum(max(len(lives) - 1, 0) for lives in self._lives), self._unanswered)

    def ask(self, calls: Mapping[int, tuple[Any, ...]], timeout: float | None = None) -> dict[int, Any]:
        """Call the shards in ``calls`` that are up, and return the answers that come in time."""
        sent = {k: self.link.call(k, *call) for k, call in calls.items() if k not in self._probes}
        found, _ = self.link.answers(sent, self.timeout if timeout is None else timeout)
        for shard in sent.keys() - found.keys():
            self.lose(shard)
        return found

    def start(self, timeout: float) -> None:
        """Wait until all shards have begun. A shard may have to load a save, or to compile.

        Raises:
            LifecycleError: a shard has not begun within ``timeout`` seconds.
            ReliveError: a shard cannot load its save.
        """
        found = self.ask(dict.fromkeys(range(self.count), ("totals",)), timeout)
        for shard, totals in found.items():
            self.note(shard, totals)
        if self._probes:
            raise LifecycleError(f"shards {sorted(self._probes)} did not start; look into the logs of their processes")

    def refresh(self) -> list[int]:
        """Read the totals of all shards that answer, and return these shards. Those that came back are among them.

        Raises:
            LifecycleError: none answers within the timeout.
        """
        end = time.monotonic() + self.timeout
        while True:
            self._revive()
            told = self.allowances()
            asked = {shard: ("totals", self.largest, told[shard]) for shard in self.up}
            for shard, totals in self.ask(asked).items():
                self.note(shard, totals)
                self.answered(shard, totals)
            if self.up:
                return self.up
            if time.monotonic() > end:
                raise LifecycleError(
                    f"none of the {self.count} shards has answered for {self.timeout:g} s; look into the logs of the "
                    "actors, or raise timeout"
                )
            time.sleep(PAUSE)

    def note(self, shard: int, totals: Totals) -> None:
        """Note the totals that a shard gave."""
        before = self.totals[shard]
        if before is not None and before.born != totals.born:
            self.forgotten[shard] += max(before.stored - totals.stored, 0)
        self.totals[shard], self.largest = totals, max(self.largest, totals.largest)
        lives = self._lives[shard]
        if totals.born not in lives:
            if len(lives) == LIVES:
                raise LifecycleError(f"shard {shard} was restarted {LIVES} times; find out why, and load the last save")
            lives.append(totals.born)

    def life(self, shard: int, born: str) -> int:
        """The number of a life of a shard. The life was noted before."""
        return self._lives[shard].index(born)

    def born(self, shard: int, life: int) -> str | None:
        """The life with this number, or None if there was none."""
        lives = self._lives[shard]
        return lives[life] if life < len(lives) else None

    def lives_in(self, shard: int, life: int) -> bool:
        """Whether a shard is still in this life, as far as is known here."""
        return life == len(self._lives[shard]) - 1 and shard not in self._probes

    def lose(self, shard: int) -> None:
        """Note that a shard did not answer, and ask it again from time to time."""
        self._unanswered += 1
        self._probe(shard)

    def _probe(self, shard: int) -> None:
        self._probes[shard] = self.link.call(shard, "totals", self.largest), time.monotonic()

    def _revive(self) -> None:
        """See which of the shards that were down have answered since."""
        for shard, (probe, since) in list(self._probes.items()):
            found, failed = self.link.answers({shard: probe}, 0.0)
            if shard in found:
                del self._probes[shard]
                self.note(shard, found[shard])
            elif shard in failed and time.monotonic() - since > PAUSE:
                self._probe(shard)
