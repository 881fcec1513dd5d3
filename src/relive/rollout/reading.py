"""ReadableRollout: the methods that read a rollout, by column, as minibatches and as sequences."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from ..batches.sequences import EnvBatch, Overlap, SequenceBatch
from .minibatches import Minibatches
from .named import Name, NamedColumns
from .sequences import Sequences, splitter

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReadableRollout"]


class ReadableRollout(ABC):
    """The reading half of :class:`relive.RolloutBuffer`, its only subclass."""

    _named: NamedColumns
    _minibatches: Minibatches
    _sequences: Sequences

    # -- columns ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of real transitions, as an epoch of minibatches serves them."""
        return self._named.count(self._named.real_rows())

    def __contains__(self, name: Name) -> bool:
        return name in self._named

    def keys(self) -> tuple[str, ...]:
        """The top-level columns of this rollout: the schema's, ``mask``, ``final_value``, and the attached ones."""
        return self._named.keys()

    def __getitem__(self, name: Name) -> Any:
        """A column ``[T, N, ...]`` of the steps written so far, oldest first; a TensorDict if it is nested.

        It is a view into the storage, or a copy once the buffer has wrapped round.
        """
        return self._named[name]

    @property
    def block(self) -> TensorDict:
        """All columns with their bootstrap row as views ``[T + 1, N]``, written or not."""
        return self._named.block()

    @property
    def env_major(self) -> TensorDict:
        """:attr:`block` as ``[N, T + 1]``; still views of the same memory."""
        return cast("TensorDict", self.block.transpose(0, 1))

    @property
    def last(self) -> TensorDict:
        """The bootstrap row as views ``[N]``."""
        return self._named.last()

    def data(self) -> TensorDict:
        """All columns of the steps written so far, ``[T, N]``, each as ``r[name]`` gives it."""
        return self._named.data()

    # -- batches ------------------------------------------------------------------------------------------------------

    def flat(self, fields: tuple[str, ...] | None = None) -> TensorDict:
        """All real transitions as one batch ``[B]``, time first (row ``t * N + n``), copied.

        Args:
            fields: the columns wanted; default all but ``mask`` and ``final_value``.
        """
        return self._minibatches.flat(fields)

    def sample(self, batch_size: int, fields: tuple[str, ...] | None = None) -> TensorDict:
        """One random minibatch ``[batch_size]``, drawn without replacement.

        Raises:
            EmptyError: no step was added.
            ParameterError: there are fewer real transitions, or ``batch_size`` is not positive.
        """
        return self._minibatches.sample(batch_size, fields)

    def minibatches(
        self,
        batch_size: int | None = None,
        *,
        num_batches: int | None = None,
        epochs: int = 1,
        drop_last: bool = False,
        reshuffle: bool = True,
        fields: tuple[str, ...] | None = None,
        normalize_advantage: bool = False,
    ) -> Iterator[TensorDict]:
        """All real transitions in random order, in minibatches ``[B]``; a new permutation every epoch.

        Every transition comes exactly once an epoch, unless ``drop_last`` is set; each epoch then drops others. Do not
        change columns while the minibatches are being read.

        Args:
            batch_size: transitions of a minibatch; the last one takes what remains.
            num_batches: instead, the number of minibatches in an epoch; their sizes differ by at most one.
            epochs: passes over the rollout.
            drop_last: leave out what does not fill a whole minibatch.
            reshuffle: False repeats the minibatches of the first epoch in all others.
            fields: the columns wanted; default all but ``mask`` and ``final_value``. Fewer are faster.
            normalize_advantage: normalise ``advantage`` within each minibatch.

        Raises:
            EmptyError: no step was added.
            ParameterError: sizes that do not fit the rollout.
            FieldError: an unknown column.
        """
        return self._minibatches.minibatches(
            batch_size, num_batches, epochs, drop_last, reshuffle, fields, normalize_advantage
        )

    def sequences(
        self,
        length: int | None = None,
        *,
        overlap: Overlap = "none",
        complete: bool = False,
        drop_tail: bool = False,
        batch_size: int | None = None,
        num_batches: int | None = None,
        batch_steps: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        fields: tuple[str, ...] | None = None,
        time_first: bool = True,
        normalize_advantage: bool = False,
    ) -> Iterator[SequenceBatch]:
        """Windows of consecutive steps for truncated backpropagation through time, padded, with their first states.

        A window never holds steps of two episodes. The windows of an episode start at its steps 0, s, 2s, ... in this
        rollout, as long as each has a step that no window before it has; only the last may be shorter than ``length``.
        Without overlap every real step comes exactly once an epoch. Sequences come in random order, a new one every
        epoch. Do not change columns while they are being read.

        Args:
            length: steps of a window; None makes one window of each episode (whole trajectories, cut at dones).
            overlap: how many steps successive windows share: "none" (s = length), "half" (s = length // 2), "max"
                (s = 1), or a number.
            complete: only episodes that began and ended in this rollout. There may be none, and then no batch.
            drop_tail: leave out windows shorter than ``length``; this too may leave none.
            batch_size: sequences of a batch; the last one takes what remains.
            num_batches: instead, the number of batches in an epoch; their sizes differ by at most one.
            batch_steps: instead, the most steps of a batch; a longer sequence comes alone. Without any of the three an
                epoch is one batch.
            epochs: passes over the rollout.
            shuffle: False keeps the order: env by env, in time.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``, which comes anyway.
            time_first: batches are ``[L, B, ...]``; else ``[B, L, ...]``. L is ``length``, or the rollout's steps if
                those are fewer; without a length, the longest sequence of the batch sets it. ``hidden_every`` adds
                rows in front, which are unrolled only for the state.
            normalize_advantage: normalise ``advantage`` over each batch's steps.

        Raises:
            EmptyError: no step was added.
            ParameterError: a length, overlap or size that does not fit.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        windows = self._sequences.cut(length, overlap, complete, drop_tail, epochs)
        split = splitter(len(windows), batch_size, num_batches, batch_steps)
        return self._sequences.read(windows, split, length, epochs, shuffle, fields, time_first, normalize_advantage)

    def env_batches(
        self,
        batch_size: int | None = None,
        *,
        num_batches: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        sequences: tuple[str, ...] = ("obs",),
        fields: tuple[str, ...] | None = None,
    ) -> Iterator[EnvBatch]:
        """Batches of whole envs: their steps ``[T, B, ...]``, and some columns also as trajectories, cut at dones.

        This is for recurrent networks that take padded trajectories and put their outputs back into the order of time.
        Every env comes exactly once an epoch. Each call draws a new random order, and each epoch divides it from
        another place, so that its batches differ. Batches are views: of one copy in that order, or, without shuffling,
        ``steps`` of the storage. Do not change columns meanwhile.

        Args:
            batch_size: envs of a batch; the last one takes what remains.
            num_batches: instead, the number of batches in an epoch; their sizes differ by at most one.
            epochs: passes over the rollout.
            shuffle: False keeps the order of the envs.
            sequences: the columns wanted as trajectories, with ``hidden`` where there is one; padded to all T rows.
            fields: the columns wanted as they are; default all but those, ``mask``, ``final_value`` and ``hidden``.

        Raises:
            EmptyError: no step was added.
            ParameterError: sizes that do not fit the number of envs.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        return self._sequences.env_batches(batch_size, num_batches, epochs, shuffle, sequences, fields)

    def chunks(self, length: int | None = None, *, fields: tuple[str, ...] | None = None) -> Iterator[SequenceBatch]:
        """All envs in the order of time, ``length`` steps at a time: batches ``[L, N, ...]``, the last one shorter.

        Chunks run on over the ends of episodes, for distillation: ``seq["done"]`` is bool ``[L, N]``, and where
        ``seq["is_start"]``, bool ``[L, N]``, is set, the state before that step is an initial one. ``seq["hidden"]`` is
        the state before the chunk's first step. The columns are views.

        Args:
            length: steps of a chunk; by default one chunk holds all. 1 gives step after step.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``.

        Raises:
            EmptyError: no step was added.
            ParameterError: a length below 1, or one that is no multiple of ``hidden_every``.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        return self._sequences.chunks(length, fields)
