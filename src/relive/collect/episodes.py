"""EpisodeSums: the returns and lengths of a simulator's episodes, summed on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Ended = tuple[Tensor, Tensor]
"""Returns, and lengths (int64), of episodes that ended: ``[N]`` of a step. Where none ended, the length is 0."""


Episodes = tuple[list[float], list[int], list[int]]
"""The returns, the lengths and the envs of episodes, in the order in which they ended."""


FOLDED = 64
"""Steps after which only the newest episodes are kept."""


class EpisodeSums:
    """Sums the rewards of each env until its episode ends. Only :meth:`read` waits for the device.

    Args:
        num_envs: N.
        device: of the rewards and flags.
        kept: how many of the newest episodes are kept.
    """

    def __init__(self, num_envs: int, device: torch.device, kept: int) -> None:
        real = torch.float32 if device.type == "mps" else torch.float64
        self._reward, self._length = self._zeros(num_envs, real, device), self._zeros(num_envs, torch.int64, device)
        self._newest: Ended = self._zeros(kept, real, device), self._zeros(kept, torch.int64, device)
        self._total = self._zeros(1, torch.int64, device)
        self._steps: list[Ended] = []

    @staticmethod
    def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def restart(self) -> None:
        """All envs begin new episodes; those under way are forgotten."""
        self._reward.zero_()
        self._length.zero_()

    def add(self, reward: Tensor, done: Tensor) -> Ended:
        """Add one step of each env: its reward ``[N]``, and whether its episode ended, bool ``[N]``."""
        self._reward.add_(reward.detach())
        self._length.add_(1)
        ended = self._reward * done, self._length * done
        self._reward.masked_fill_(done, 0)
        self._length.masked_fill_(done, 0)
        self._steps.append(ended)
        if len(self._steps) == FOLDED:
            self._fold()
        return ended

    def _fold(self) -> None:
        """Keep only the newest episodes."""
        if not self._steps:
            return
        total, kept = self._total, len(self._newest[0])
        returns, lengths = (torch.cat(column) for column in zip(self._newest, *self._steps, strict=True))
        places = torch.arange(1, len(lengths) + 1, device=lengths.device)
        newest = (places * (lengths > 0)).topk(kept).indices.flip(0)
        # one line, so that Ctrl-C leaves nothing half
        self._newest, self._total, self._steps = (
            (returns[newest], lengths[newest]),
            total + (lengths[kept:] > 0).sum(),
            [],
        )

    def read(self) -> tuple[list[float], list[int], int]:
        """The returns and lengths of the newest episodes, in order, and how many have ended; waits for the device."""
        self._fold()
        returns, lengths, _ = read_ended([self._newest])
        return returns, lengths, int(self._total)


def read_ended(steps: Sequence[Ended]) -> Episodes:
    """The episodes that ended in some steps; waits for their device."""
    if not steps:
        return [], [], []
    returns, lengths = (torch.stack(column).cpu().numpy() for column in zip(*steps, strict=True))
    step, env = lengths.nonzero()
    return returns[step, env].tolist(), lengths[step, env].tolist(), env.tolist()
