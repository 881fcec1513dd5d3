"""How blocks of a rollout are divided into equally many minibatches, computed from their numbers of rows alone."""

from __future__ import annotations

import numpy as np

from ..errors import EmptyError, ParameterError
from ..parameters import is_count
from ..steps.arrays import Ints

__all__ = ["bounds_of_parts", "number_of_batches"]


def number_of_batches(rows: Ints, batch_size: int | None, num_batches: int | None) -> int:
    """How many minibatches an epoch has, the same for all blocks.

    Args:
        rows: int64 ``[S]``, the real transitions of each block.
        batch_size: the most rows of a minibatch, over all blocks.
        num_batches: the number of minibatches, instead of ``batch_size``.

    Raises:
        EmptyError: no block has a real transition.
        ParameterError: both or neither are given; or a minibatch would have no row, or more than ``batch_size``.
    """
    if not rows.sum():
        raise EmptyError("minibatches: no rank has a real transition in its rollout; collect steps first")
    if (batch_size is None) == (num_batches is None):
        raise ParameterError(f"pass either batch_size or num_batches, got {batch_size=}, {num_batches=}")
    most = int(rows.max())
    if num_batches is not None:
        if not (is_count(num_batches, 1) and num_batches <= most):
            raise ParameterError(
                f"num_batches={num_batches!r}: the largest block has {most} transitions; ask for 1 to {most}"
            )
        return num_batches
    assert batch_size is not None
    blocks = np.count_nonzero(rows)
    if not (is_count(batch_size, 1) and batch_size >= blocks):
        raise ParameterError(
            f"batch_size={batch_size!r}: a minibatch has at least one row of each of the {blocks} blocks; ask for "
            f"{blocks} or more"
        )
    found = -int(-rows.sum() // batch_size)
    while int((-(-rows // found)).sum()) > batch_size:  # the first minibatch is the largest
        found += 1
    return found


def bounds_of_parts(rows: Ints, batches: int) -> Ints:
    """Where each minibatch begins in each block, and where the last one ends: int64 ``[S, batches + 1]``.

    A block's parts differ by at most one row, and the first ones are the larger ones. So blocks of equally many rows
    have equal parts in every minibatch.
    """
    size, more = np.divmod(rows[:, None], batches)
    number = np.arange(batches + 1)
    return number * size + np.minimum(number, more)
