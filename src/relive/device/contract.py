"""DeviceSampler and DeviceRead: what a sampler and a view give a replay, so that batches are made on its device.

A sampler answers ``on_device(rows)`` and a view ``on_device(ring, rows)``. None leaves the batch to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..ring.ring import Ring
from ..steps.arrays import Array
from ..steps.schema import Path
from .ring import AddPlan, DeviceRing, Spots

LONGEST_WINDOW = 64
"""The most steps of a window that is read on a device: each takes operations of its own."""


Kind = Literal["windows", "stacks", "sequences", "goals"]
"""The kinds of batches that views read. A sampler says which of them it draws for."""


class DeviceRead(NamedTuple):
    """How a view's batches are read on a device."""

    kind: Kind
    read: Callable[..., dict[Path, Tensor]]
    """Called with the rows' memory, the ring, the drawn rows, the batch's stream and :attr:`form`; with goals, first
    with the ends of episodes. It runs the same operations whatever the tensors hold."""
    form: Any
    """The view's parameters, as values that can be hashed: a graph is kept for each."""


class SamplerReport(NamedTuple):
    """Facts that a sampler learned on the device since it was last asked."""

    late: int = 0
    """TD errors for rows that were overwritten."""
    warnings: tuple[str, ...] = ()


class DeviceSampler:
    """Draws rows of a ring on a device: the rows that the sampler draws in RAM, to the bit.

    :meth:`added`, :meth:`draw` and what :attr:`set_errors` gives run operations of fixed shapes on the device, which
    may be compiled or captured. All other members are the host's.

    Args:
        rows: the ring on the device.
        sampler: the sampler in RAM, whose parameters count.
    """

    def __init__(self, rows: DeviceRing, sampler: Any) -> None:
        self.rows = rows
        self.sampler = sampler

    # -- on the device ------------------------------------------------------------------------------------------

    def added(self, added: AddPlan) -> None:
        """Note a step that was stored."""

    def draw(self, count: int, stream: Tensor, wanted: Tensor | None = None) -> tuple[Spots, dict[Path, Tensor]]:
        """Rows ``[count]``, and the fields that the sampler adds to a batch.

        With ``wanted``, int64 ``[1]``, the first so many are those of a batch of that size, and the others any rows.
        """
        return self.rows.draw(count, stream, self.rows.first_with_history(), wanted), {}

    @property
    def set_errors(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Sets the errors of a batch, given its index, and returns how many of its rows are gone; None without any."""
        return None

    # -- on the host --------------------------------------------------------------------------------------------

    def draws_for(self, kind: Kind) -> bool:
        """True if batches of this kind are drawn here, with the parameters of now."""
        return True

    def relied_on(self) -> tuple[Hashable, ...]:
        """The values, all of which can be hashed, that decide which operations there are."""
        return ()

    @property
    def kept(self) -> object:
        """The arrays of all rows that the sampler in RAM keeps, as one object: another one when they were made anew."""
        return None

    def arrays(self) -> list[tuple[Array, Tensor]]:
        """Arrays with an entry for each row: in RAM, and here."""
        return []

    def window_lifetime(self, ring: Ring) -> int | None:
        """For so many steps one of its windows can be drawn, whatever comes; None if it keeps no windows."""
        return None

    def send(self, ring: Ring) -> None:
        """The ring in RAM is about to be sent: whatever was sent before is out of date. The arrays follow."""

    def send_parameters(self) -> None:
        """Send the sampler's parameters, if they have changed."""

    def before_batch(self, count: int, steps: int, update: int, of: int, certain: bool = True) -> None:
        """Count a batch ``[count]``, number ``update`` of the ``of`` batches of its round, as the device is about to
        do.

        Args:
            count: B.
            steps: how many steps of all envs were stored since the ring was sent.
            update: its number, from 1.
            of: how many there are.
            certain: False if the device alone knows whether the batch has any row of this sampler.
        """

    def batch_failed(self) -> None:
        """The batch is used up, and it is not known how far the device came with it."""

    def bring_back(self) -> SamplerReport:
        """Give the sampler in RAM, whose arrays are up to date, all else that is known here. Waits for the device."""
        return SamplerReport()
