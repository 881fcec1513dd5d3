"""Ledger: which writer plays which envs of a shard, and how many of its steps have come. Each step counts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import LifecycleError

__all__ = ["Admission", "Ledger", "Origin", "Rank"]


class Rank(NamedTuple):
    """The rank of a writer. If two writers claim one env, the writer of the higher rank has it."""

    number: int
    """One more than the number of the writer before it."""
    token: str
    """Drawn at random. It decides between two writers of the same number, which a failed shard may give twice."""


class Origin(NamedTuple):
    """Where a chunk of steps comes from."""

    rank: Rank
    envs: tuple[int, ...]
    """The envs of the shard that stepped. They are always the same for one writer."""
    start: int
    """How many steps of each env the writer sent before."""
    steps: int
    """How many steps of each env it sends now."""
    sure: int
    """How many steps of each env the shard has confirmed to the writer."""


class Admission(NamedTuple):
    """What to do with a chunk."""

    store: bool
    """Whether to store the chunk: it is the next one of its writer."""
    interrupt: bool
    """Whether the running episodes of its envs are interrupted: its first steps do not follow the last stored ones."""
    received: int
    """How many steps of each env the shard will have had from this writer after that."""


class Ledger:
    """Decides whether a chunk is the next one of its writer, and counts the steps that a failed shard has lost.

    A writer sends a chunk again until it is confirmed. So a chunk may come twice, and a later one before an earlier
    one. A shard that came back from its last commit has forgotten all later steps. Those steps are lost. They are
    counted, and no episode goes on over the gap.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Rank] = {}
        self._received: dict[str, int] = {}
        self.stored = 0
        """Steps that were ever stored."""
        self.lost = 0
        """Steps that were confirmed and are lost: they came after the commit from which the shard came back."""
        self.repeated = 0
        """Steps that came again and were left out."""

    def claim(self, envs: Sequence[int], token: str) -> Rank:
        """The rank of a new writer for these envs. The writers that had them before are refused from now on."""
        numbers = [self._owners[env].number for env in envs if env in self._owners]
        rank = Rank(1 + max(numbers, default=0), token)
        self._hand_over(envs, rank)
        return rank

    def admit(self, origin: Origin) -> Admission:
        """What to do with a chunk. Call :meth:`confirm` once it is stored.

        Raises:
            LifecycleError: a newer writer has one of its envs.
        """
        new = self._takes_over(origin)
        received = self._received.get(origin.rank.token, 0)
        gap = max(origin.sure - received, 0)  # steps that the shard confirmed once, and has forgotten since
        if new:
            self._hand_over(origin.envs, origin.rank)
        if gap:
            self.lost += gap * len(origin.envs)
            received = self._received[origin.rank.token] = origin.sure
        if origin.start < received:
            self.repeated += origin.steps * len(origin.envs)
            return Admission(False, bool(gap) or new, received)
        if origin.start > received:  # an earlier chunk is still on its way, or failed: the writer sends both again
            return Admission(False, bool(gap) or new, received)
        return Admission(True, bool(gap) or new, received + origin.steps)

    def confirm(self, origin: Origin) -> None:
        """Note that the steps of this chunk are stored."""
        self._received[origin.rank.token] = origin.start + origin.steps
        self.stored += origin.steps * len(origin.envs)

    def counts_after(self, origin: Origin) -> list[int]:
        """What :attr:`stored`, :attr:`lost` and :attr:`repeated` will be once a chunk is stored."""
        return [self.stored + origin.steps * len(origin.envs), self.lost, self.repeated]

    def adopt(self, origin: Origin, counts: Sequence[int]) -> None:
        """Note a chunk that the ring turned out to have. :meth:`counts_after` gave the ``counts`` before the chunk."""
        if any(self._owners.get(env) != origin.rank for env in origin.envs):
            self._hand_over(origin.envs, origin.rank)
        self.confirm(origin)
        self.stored, self.lost, self.repeated = counts

    def state(self) -> dict[str, Any]:
        """The whole ledger, for a save."""
        return {
            "owners": [[env, *rank] for env, rank in self._owners.items()],
            "received": dict(self._received),
            "counts": [self.stored, self.lost, self.repeated],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Ledger:
        """The ledger of a save."""
        ledger = cls()
        ledger._owners = {env: Rank(number, token) for env, number, token in state["owners"]}
        ledger._received = dict(state["received"])
        ledger.stored, ledger.lost, ledger.repeated = state["counts"]
        return ledger

    def _takes_over(self, origin: Origin) -> bool:
        """Whether the writer of this chunk gets its envs only now, because the shard has forgotten its claim.

        Raises:
            LifecycleError: a writer of a higher rank has one of the envs.
        """
        owners = [self._owners.get(env) for env in origin.envs]
        for env, owner in zip(origin.envs, owners, strict=True):
            if owner is not None and owner > origin.rank:
                raise LifecycleError(
                    f"env {env} of the shard has a newer writer, so the steps of the old one are refused; stop it, or "
                    "give each writer envs of its own"
                )
        return any(owner != origin.rank for owner in owners)

    def _hand_over(self, envs: Sequence[int], rank: Rank) -> None:
        self._owners |= dict.fromkeys(envs, rank)
        live = {owner.token for owner in self._owners.values()}
        self._received = {token: count for token, count in self._received.items() if token in live}
