"""Group: the shards of a replay as the learner sees them: which ones answer, in which life, and with which totals."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import LifecycleError
from ..parameters import TIMEOUT_RULE, require
from ..processes.limits import RateLimit
from .plan import LIVES
from .shard import Allowance, Block, ShardPlan, Totals

__all__ = ["Connect", "Failures", "Fetched", "Group", "Label", "Link", "Pace", "RolloutQueue"]


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


PACE_PAUSE = 0.02
"""Seconds between two checks whether the shards have enough steps."""


class Pace:
    """Holds the learner back, and gives each shard an allowance of steps, so that all together keep the limit.

    A shard stores steps up to its allowance. Allowances travel with the questions for totals. All allowances together
    stay within the limit. If a shard does not use its part, the part is taken away, and goes to other shards once that
    shard has answered. The allowance of a shard that does not answer any more is not counted, since the others would
    wait for it.

    Args:
        limit: counts the steps and rows of all shards.
        group: the shards.
        timeout: seconds that a batch may wait; None is for ever.
    """

    def __init__(self, limit: RateLimit, group: Group, timeout: float | None) -> None:
        require("Replay", TIMEOUT_RULE, limit_timeout=timeout)
        self.limit, self._group, self._timeout = limit, group, timeout
        self._before = limit.counted()[0]
        """Steps that the limit had counted when this began."""
        self._begun: list[int] | None = None
        self._bounds = [0] * group.count
        """The most steps that each shard may have stored by now, as the shard counts them."""
        self._told: list[Allowance | None] = [None] * group.count
        group.allowances, group.answered = self.allowances, self.answered

    @staticmethod
    def most_of_a_chunk(limit: RateLimit | None, shards: int) -> int | None:
        """The most steps that a shard may get at once, so that nobody waits for ever; None without a bound."""
        most = None if limit is None else limit.most_at_once
        return None if most is None else most // shards

    def allowances(self) -> list[Allowance | None]:
        """The allowance that each shard gets with the next question for its totals; None if the limit has no bound."""
        totals = [total for total in self._group.totals if total is not None]
        stored, up = [total.stored for total in totals], self._group.up
        room = self.limit.room(self._inserted(stored), self.limit.counted()[2])
        if room is None:
            return self._told
        bounds = [max(bound, have) for bound, have in zip(self._bounds, stored, strict=True)]
        free = room - sum(bounds[shard] - stored[shard] for shard in up)
        for shard in up:
            granted = min(stored[shard] + room // len(up), bounds[shard] + max(free, 0))
            free -= max(granted - bounds[shard], 0)
            self._told[shard] = Allowance(totals[shard].born, granted)
            bounds[shard] = max(bounds[shard], granted)
        self._bounds = bounds
        return self._told

    def answered(self, shard: int, totals: Totals) -> None:
        """Note the totals of a shard that has got its allowance."""
        told = self._told[shard]
        alive = told is not None and told.born == totals.born  # otherwise it was restarted, and may store nothing yet
        self._bounds[shard] = max(totals.stored, told.steps) if alive and told is not None else totals.stored

    def await_batch(self, batch_size: int) -> None:
        """Wait until the limit allows a batch, and count it. The caller has just read the totals.

        Raises:
            WaitTimeoutError: the wait takes longer than the timeout.
            ParameterError: batches of this size could make both sides wait for ever.
            LifecycleError: no shard answers.
        """
        limit, begin = self.limit, time.monotonic()
        limit.require_samples(batch_size)
        waited = False
        while not self._allows(batch_size):
            waited = True
            if self._timeout is not None and time.monotonic() - begin > self._timeout:
                limit.note_sample_wait(time.monotonic() - begin)
                raise limit.late_sample(batch_size, self._timeout)
            time.sleep(PACE_PAUSE)
            self._group.refresh()
        if waited:
            limit.note_sample_wait(time.monotonic() - begin)
        limit.count(samples=batch_size)

    def _allows(self, batch_size: int) -> bool:
        """Whether a batch may be drawn. First brings the limit's count of steps up to date."""
        limit, group = self.limit, self._group
        stored = [0 if total is None else total.stored for total in group.totals]
        inserts = self._inserted(stored)
        limit.count(inserts=inserts - limit.counted()[0])
        return limit.allows_samples(batch_size, inserts, limit.counted()[2])

    def _inserted(self, stored: Sequence[int]) -> int:
        """How many steps all shards have ever stored, with those that a shard has lost since."""
        if self._begun is None:
            self._begun = list(stored)
        return self._before + int(np.sum(stored)) + sum(self._group.forgotten) - sum(self._begun)


class Label(NamedTuple):
    """The label that identifies a rollout."""

    worker: str
    life: str
    """The life of the sender: another one after every restart of the worker."""
    number: int
    """The number of the rollout in this life, from 1."""
    version: int
    """The version of the policy that played it."""


class Fetched(NamedTuple):
    """The queue's answer to the learner."""

    born: str
    """The life of the queue."""
    place: int
    """The place in line of the last rollout that was given or dropped."""
    label: Label | None
    block: Block | None
    """The rollout, or None if there is none yet."""
    dropped: list[Label]
    """Rollouts before this one that were too old."""


class RolloutQueue:
    """The rollouts on their way, in the order in which they came. The queue runs in a process of its own.

    Args:
        capacity: the most rollouts kept. Those that were fetched and not settled count, too.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._born = capacity, os.urandom(8).hex()
        self._kept = deque[tuple[int, Label, Block]]()
        self._came = 0
        self._last: dict[str, tuple[str, int]] = {}
        self._repeated = 0

    def begin(self, worker: str, life: str) -> None:
        """Note that a sender begins. Earlier senders of the same worker are refused from now on."""
        self._last[worker] = life, 0

    def room(self) -> bool:
        """Whether there is room for another rollout."""
        return len(self._kept) < self._capacity

    def put(self, label: Label, block: Block) -> bool:
        """Keep a rollout; False if there is no room. A rollout that came before is not kept again.

        Raises:
            LifecycleError: the worker has a newer sender.
        """
        life, number = self._last.get(label.worker, (label.life, 0))
        if life != label.life:
            raise LifecycleError(f"worker {label.worker!r} has a newer sender; give each worker a name of its own")
        if label.number <= number:
            self._repeated += 1
            return True
        if not self.room():
            return False
        self._came += 1
        self._kept.append((self._came, label, block))
        self._last[label.worker] = label.life, label.number
        return True

    def fetch(self, born: str, place: int, oldest: int) -> Fetched:
        """The first rollout behind this place in line whose version is at least ``oldest``. Older ones are dropped.

        The place belongs to the life ``born`` of the queue. If the queue is in another life, the line begins anew.
        """
        place, dropped = place if born == self._born else 0, list[Label]()
        for entry in [kept for kept in self._kept if kept[0] > place]:
            place, label, block = entry
            if label.version >= oldest:
                return Fetched(self._born, place, label, block, dropped)
            dropped.append(label)
            self._kept.remove(entry)
        return Fetched(self._born, place, None, None, dropped)

    def settle(self, born: str, place: int) -> None:
        """Remove the rollouts up to this place in line: the learner does not need them again."""
        while born == self._born and self._kept and self._kept[0][0] <= place:
            self._kept.popleft()

    def stats(self) -> dict[str, float]:
        """``came``, ``kept``, ``repeated``: how many rollouts came, how many are kept, and how many came again."""
        return {"came": float(self._came), "kept": float(len(self._kept)), "repeated": float(self._repeated)}
