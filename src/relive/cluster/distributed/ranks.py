"""Ranks: the processes of a group, and the small tables of numbers that they exchange."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ...errors import LifecycleError, ParameterError
from ...steps.arrays import Doubles

__all__ = ["Ranks", "Report"]


FAILED = 0
"""The column of a report that is 1 where a rank raised an error, else 0."""
CALL = 1
"""The column with a number for the name of the call."""
FIRST = 2
"""The first column of the values."""

WIDTH = 18
"""How many values the first message of every exchange has room for: as many as `sample` reports.

It is the same for all calls. The messages of ranks that are at different calls then have one size, so that each rank
can read where the others are. Gloo ends the process if the sizes differ.
"""


class Report(NamedTuple):
    """What a rank reports to the others."""

    same: Mapping[str, float]
    """Names and values that must be equal on all ranks."""
    own: Sequence[float]
    """Numbers of this rank."""


class Ranks:
    """The ranks of a process group; one rank alone if torch.distributed was not initialized.

    Args:
        group: of torch.distributed; None is the default group.

    Raises:
        LifecycleError: this process does not belong to the group; or it was started as one of several ranks, and
            ``torch.distributed.init_process_group`` was not called.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank, self.count, self._device = 0, 1, torch.device("cpu")
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise LifecycleError(
                    "torch.distributed is not initialized; call torch.distributed.init_process_group(...) first"
                )
            return
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise LifecycleError("this process is not a rank of the group; call this in its ranks only")
        backend = dist.get_backend(group)
        if "nccl" in backend and "gloo" not in backend:
            self._device = torch.device("cuda", torch.cuda.current_device())

    def exchange(self, call: str, report: Callable[[], Report]) -> Doubles:
        """Exchange the reports of all ranks. Either all ranks go on, or all raise an error.

        This takes one all-reduce, or two if a report has more than :data:`WIDTH` numbers.

        Returns the ``own`` numbers of all ranks, float64 ``[R, own]``.

        Args:
            call: the name of the call that the user made.
            report: makes this rank's report. An error that it raises is raised again once the others know of it. Its
                ``same`` fits into the first message. All ranks at this call report equally many numbers if these do
                not fit.

        Raises:
            LifecycleError: another rank raised an error, is at another call, has died, or did not come in time.
            ParameterError: a value that must be equal differs; names it, and the first rank that differs from rank 0.
        """
        sent, names, values, failure = np.zeros((self.count, FIRST + WIDTH)), list[str](), np.empty(0), None
        mine = sent[self.rank]
        mine[CALL] = crc32(call.encode())  # the name as a number
        try:
            same, own = report()
            names, values = list(same), np.array([*same.values(), *own], np.float64)
            mine[FIRST : FIRST + len(values)] = values[:WIDTH]
        except Exception as error:
            mine[FAILED], failure = 1.0, error
        table = self._met(call, sent, failure)
        if failure is not None:
            raise failure
        self._require_no_failure(call, table)
        _require_equal(call, names, table[:, FIRST:])
        if len(values) > WIDTH:  # all ranks are at this call, so all of them send a rest, of one size
            rest = np.zeros((self.count, len(values) - WIDTH))
            rest[self.rank] = values[WIDTH:]
            table = np.concatenate([table, self._met(call, rest, None)], 1)
        return table[:, FIRST + len(names) : FIRST + len(values)]

    def _met(self, call: str, sent: Doubles, failure: Exception | None) -> Doubles:
        """The tables of all ranks in one, or an error if they cannot meet. ``failure`` is that of this rank."""
        try:
            return self._summed(sent)
        except RuntimeError as error:
            raise LifecycleError(
                f"{call}: the ranks cannot meet: one has died, or did not come within the timeout of the process group "
                f"({str(error).partition(chr(10))[0]:.200}); nothing happened here; start all ranks again"
            ) from (failure or error)

    def _summed(self, sent: Doubles) -> Doubles:
        """The sum of every rank's table. Each row is not 0 on one rank alone, so the sum is exact."""
        if self.count == 1:
            return sent
        table = torch.from_numpy(sent).to(self._device)
        dist.all_reduce(table, group=self._group)
        return table.cpu().numpy()

    def _require_no_failure(self, call: str, table: Doubles) -> None:
        if table[:, FAILED].any():
            raise LifecycleError(
                f"{call}: rank {table[:, FAILED].argmax()} raised an error, which its own traceback shows; nothing "
                "happened on any rank"
            )
        elsewhere = table[:, CALL] != table[self.rank, CALL]
        if elsewhere.any():
            raise LifecycleError(
                f"{call}: rank {self.rank} is here, and rank {elsewhere.argmax()} is at another call; all ranks make "
                "the same calls in the same order"
            )


def _require_equal(call: str, names: list[str], table: Doubles) -> None:
    different = table[:, : len(names)] != table[0, : len(names)]
    if different.any():
        other, column = np.argwhere(different)[0]
        raise ParameterError(
            f"{call}: {names[column]} is {table[0, column]:.17g} on rank 0 and {table[other, column]:.17g} on rank "
            f"{other}; it must be the same on all ranks"
        )
