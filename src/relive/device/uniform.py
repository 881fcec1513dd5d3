"""DeviceUniform: every row, or every window, with the same chance."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ..ring.ring import Ring
from ..steps.arrays import Array
from ..steps.schema import Path
from .contract import DeviceSampler
from .ring import AddPlan, Spots
from .windows import DeviceWindows


class DeviceUniform(DeviceSampler):
    """The draws of :class:`relive.Uniform`. Where the ring's rule leaves out most rows, windows are drawn by weight."""

    windows: DeviceWindows | None = None
    """The weights of windows; None where most rows can be drawn."""

    @staticmethod
    def count_bytes(num_rows: int) -> int:
        """The bytes of all tensors for so many rows, beside those of the ring; windows come as needed."""
        return 0

    def added(self, added: AddPlan) -> None:
        """See :class:`DeviceSampler`."""
        if self.windows is not None:
            self.windows.added(added)

    def draw(self, count: int, stream: Tensor, wanted: Tensor | None = None) -> tuple[Spots, dict[Path, Tensor]]:
        """See :class:`DeviceSampler`."""
        if self.windows is None:
            return super().draw(count, stream, wanted)
        return self.windows.draw(count, stream), {}  # each of them is drawn by a number of its own, whatever the size

    def relied_on(self) -> tuple[Hashable, ...]:
        """See :class:`DeviceSampler`."""
        return (self.windows,)

    @property
    def kept(self) -> object:
        """See :class:`DeviceSampler`."""
        return self.sampler.windows

    def arrays(self) -> list[tuple[Array, Tensor]]:
        """See :class:`DeviceSampler`."""
        return [] if self.windows is None else [(self.sampler.windows.tree.nodes, self.windows.tree.nodes)]

    def window_lifetime(self, ring: Ring) -> int | None:
        """See :class:`DeviceSampler`."""
        if self.windows is None:
            return None
        ends = ring.index_of(ring.anchors())
        number, env = ends // ring.num_envs, ends % ring.num_envs
        # a step overwrites two rows of an env at most, and a window goes with the first row of its history
        lifetime = (number - ring.rule.history + ring.rows - ring.heads[env]) // 2
        return int(lifetime.max(initial=-1))

    def send(self, ring: Ring) -> None:
        """See :class:`DeviceSampler`."""
        if not ring.rule.sparse:
            self.windows = None
        elif self.windows is None:
            self.windows = DeviceWindows(self.rows, self.rows.envs.device)
