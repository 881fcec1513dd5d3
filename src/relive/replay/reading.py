"""ReadableReplay: all that reads a replay: batches, statistics, stored rows, and its printed summary."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..batches.dataframes import as_dataframe
from ..errors import LifecycleError
from ..kernels.reference.random import key as stream
from ..memory.estimate import StoragePlan
from ..parameters import COUNT_RULE, TIMEOUT_RULE, an_instance, require, seed_or_drawn
from ..ring.ring import Ring
from ..samplers.sequence_weights import nothing_to_draw
from ..steps.schema import Schema
from ..steps.summary import Summary, html, text
from ..views.contract import View
from .arguments import require_rows, whole_numbers
from .coming import Coming
from .direct import DirectSample
from .episodes import Episode, Run, read_run, runs_of, table
from .figures import figures, summary
from .locked import one_at_a_time
from .progress import Drawn, Progress, stream_of
from .ratings import Ratings
from .reader import Reader, readable_draw
from .serving import Ahead, Limit, Served
from .typed import S_co, V_co, gives_batch, gives_batches, gives_served
from .writer import Writer

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReadableReplay"]


class ReadableReplay(ABC, Generic[S_co, V_co]):
    """The half of a replay buffer that reads. Only :class:`relive.ReplayBuffer` is made from it."""

    schema: Schema
    num_envs: int
    ordered: bool
    own_next_obs: bool
    device: torch.device
    lock: Any
    _ahead: Ahead | None = None
    _coming: Coming | None = None
    """Asks for the rows of the next batch of a replay in files; None for any other replay."""
    _direct: DirectSample | None
    """Draws and reads a batch in one call, where that can be done."""
    _given_sampler: Any
    _own_sampler: bool
    _plan: StoragePlan
    _progress: Progress
    _ratings: Ratings
    _reader: Reader
    _ring: Ring
    _sampler: Any
    _writer: Writer

    # -- what draws, and what reads -----------------------------------------------------------------------------

    @property
    def view(self) -> V_co:
        """What reads the batches. You may replace it, or change it (``replay.view.n = 5``), at any time.

        Raises:
            ParameterError: the new value is not a view.
            SchemaError: the view cannot read what is stored.
            LifecycleError: it is the view of another buffer.
        """
        return cast("V_co", self._reader.view)

    @view.setter
    @one_at_a_time
    def view(self, view: View) -> None:
        self._reader.read_through(view)

    @property
    def sampler(self) -> S_co:
        """What draws the batches. You may change its parameters at any time."""
        return cast("S_co", self._given_sampler)

    @property
    def seed(self) -> int:
        """The seed of the batches: batch number t is a function of (seed, t) and of what is stored.

        You may set it at any time (None draws one); the next batch is then number 0.
        """
        return self._progress.seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        come = self._progress
        come.seed, come.first = seed_or_drawn(seed), come.draws
        if come.slots is not None:
            come.slots.on_seed()

    @property
    def capacity(self) -> int:
        """Rows of all envs together, the same number for each env; an episode of k transitions takes k + 1."""
        return self._plan.rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of the full buffer's sampler, as :meth:`plan` computes them."""
        return replace(self._plan, sampler_bytes=self._sampler.nbytes(self._plan.rows)).total_bytes

    @property
    def has_priorities(self) -> bool:
        """Whether :meth:`update_priorities` can be called."""
        return self._ratings.prioritized is not None

    @one_at_a_time
    def __len__(self) -> int:
        """The number of transitions that can be drawn, or of sequences if the view reads sequences."""
        self._reader.keep_rule()
        return self._ring.drawable

    @property
    @one_at_a_time
    def batch_fields(self) -> tuple[str, ...]:
        """The names of a batch's fields with the current view and sampler, even if nothing is stored."""
        self._reader.keep_rule()
        return (*self._reader.read(np.empty(0, np.int64), {}, None).keys(), *self._sampler.extras)

    @gives_batch
    def sample(self, batch_size: int) -> Any:
        """One batch ``[batch_size]``: the fields that :attr:`view` reads, and those that the sampler adds (``weight``).

        Raises:
            EmptyError: there is no complete transition.
            ParameterError: ``batch_size`` is not positive.
        """
        return self._batch(batch_size, 1, 1)

    @gives_batches
    def batches(self, count: int, batch_size: int) -> Any:
        """``count`` batches. :class:`relive.Recent` counts them as one round of updates.

        Raises:
            EmptyError: there is no complete transition. This call raises it, not the first batch.
            ParameterError: ``count`` or ``batch_size`` is not positive. This call raises it, too.
        """
        require("batches", COUNT_RULE, count=count)
        require_rows(batch_size)
        if not len(self):
            raise nothing_to_draw(self._ring)
        return (self._batch(batch_size, k, count) for k in range(1, count + 1))

    @gives_served
    def serve(
        self,
        batch_size: int,
        depth: int = 2,
        *,
        count: int | None = None,
        limit: Limit | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Batches ``[batch_size]`` that a thread draws while you learn: ``for batch in replay.serve(256): ...``.

        They are the batches that :meth:`sample` gives, in the same order. Batch t is drawn when the learner is done
        with batch t - depth, that is, when it asks for the batch after that one. So batch t has all steps and
        priorities that came before that moment, and none that came after: every other call of this replay waits for the
        draws that are due.

        Args:
            batch_size: B.
            depth: how many batches there are at most, the one in use included. 1 draws each when you ask for it.
            count: how many batches; they are one round of updates, as in :meth:`batches`. None is without end.
            limit: a :class:`relive.SamplesPerInsert` or :class:`relive.MinSize`; a batch is drawn when the limit
                allows it.
            timeout: seconds to wait for the limit; None is for ever.

        Returns:
            an iterator, with ``close()``, ``stats()`` and ``completed``; see :class:`relive.replay.serving.Served`. Its
            ``next`` raises what the draw raised, such as EmptyError, and WaitTimeoutError.

        Raises:
            ParameterError: an argument is out of range.
            LifecycleError: the replay is served already.
        """
        require_rows(batch_size)
        require("serve", COUNT_RULE, depth=depth, **({} if count is None else {"count": count}))
        require("serve", TIMEOUT_RULE, timeout=timeout)
        require("serve", an_instance(Limit, "a limit, such as relive.SamplesPerInsert(...)"), limit=limit)
        with self.lock:
            self._prepare()
            if self._ahead is not None:
                raise LifecycleError("serve: this replay is served already; close() that first, or take its batches")
            batch_size, of = int(batch_size), 1 if count is None else count
            draw, undo = partial(self._draw_ahead, batch_size, of), self._end_serving
            ahead = Ahead(self._progress, draw, undo, self.lock, batch_size, depth, count, limit)
            served = Served[Any](ahead, timeout)
            self._ahead = ahead  # last: if this call breaks off, the iterator is dropped, which ends the serving
        return served

    @one_at_a_time
    def stats(self) -> dict[str, float]:
        """Figures about what is stored and how it is used.

        - ``size``: transitions that can be drawn; ``completed``: all transitions that ever could be drawn;
        - ``episodes``: episodes that have ended;
        - ``age_mean``, ``age_max``: the age of a transition is how many transitions were completed later;
        - ``batches``, ``sampled``: batches and rows drawn; ``replay_ratio``: rows drawn per completed transition;
        - ``late_updates``: priorities that came after their transition was overwritten;
        - ``not_finite_rewards``: NaN or infinite rewards ever added;
        - with priorities also ``priority_min``, ``priority_mean``, ``priority_max`` and ``effective_size``, which is
          (Σp)² / Σp²: the number of equal priorities that would spread draws as evenly.
        """
        ring, places = self._ring, self._ring.anchors()
        return figures(ring, places, len(self), self._progress, self._ratings.prioritized)

    @gives_batch
    @one_at_a_time
    def data(self) -> Any:
        """All transitions that can be drawn, in the order of completion, as :attr:`view` reads them."""
        return self._reader.data()

    @one_at_a_time
    def slice(self, env: int, start: int = 0, stop: int | None = None) -> TensorDict:
        """Rows of one env in the order of time, ``[K]``, as they are stored; 0 is the oldest, -1 the newest.

        The fields are those of a step, ``index``, and ``complete`` (bool). ``complete`` is False for the newest step,
        whose next observation is unknown, and for the row of a final observation, where only ``obs`` is valid.

        Raises:
            ParameterError: there is no such env.
        """
        return self._reader.slice(env, start, stop)

    @one_at_a_time
    def at(self, rows: Any) -> TensorDict:
        """The transitions at ``rows`` of :attr:`block`, int64 ``[B]``, as :attr:`view` reads them.

        Raises:
            ParameterError: a row is out of range, or cannot be drawn.
        """
        return self._reader.at(rows)

    @one_at_a_time
    def episodes(self) -> Iterator[Episode]:
        """The stored episodes one by one, env by env in the order of time, whatever :attr:`view` is.

        Each episode is read when its turn comes. The replay may change meanwhile: steps that were overwritten by then
        are left out, and steps that were added after this call are not read.

        Raises:
            SchemaError: the transitions have no order.
        """
        return self._read_each(runs_of(self._ring))

    def _read_each(self, runs: Iterable[Run]) -> Iterator[Episode]:
        for run in runs:
            with self.lock:
                self._writer.mend()
                episode = read_run(self._ring, run)
            if episode is not None:
                yield episode

    @one_at_a_time
    def priorities(self, index: Any) -> Any:
        """The priorities p = (abs(TD error) + eps)^alpha of transitions, float64 ``[B]``; draws are in proportion to p.

        Args:
            index: int64 ``[B]``, ``batch["index"]``. A transition that can no longer be drawn has priority 0.

        Raises:
            LifecycleError: the sampler has no priorities.
            ParameterError: an index was never issued.
        """
        self._reader.keep_rule()
        return torch.from_numpy(self._ratings.of(whole_numbers(index, "index")))

    @one_at_a_time
    def to_pandas(self, *, next_obs: bool = False) -> Any:
        """All complete transitions as a ``pandas.DataFrame``, one row a step, env by env in the order of time.

        ``env``, ``episode`` (counted in this table), ``step`` (within the episode) and ``index`` come first, then the
        fields. A field of several numbers is a column for each: ``obs.0``, ``obs.1``. One of more than 64 is a column
        of arrays.

        Args:
            next_obs: add the observations after each step.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        return as_dataframe(table(self._ring, next_obs))

    @one_at_a_time
    def check(self) -> None:
        """Test the invariants of the ring (:class:`relive.ring.Ring`) and of the sampler.

        Raises:
            InvariantError: names the first that does not hold.
        """
        self._ring.check()
        self._sampler.check()

    # -- printing -----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"ReplayBuffer({self.schema!r}, capacity={self._plan.rows}, num_envs={self.num_envs}, "
            f"sampler={self._sampler!r}, view={self._reader.view!r}, ordered={self.ordered}, "
            f"own_next_obs={self.own_next_obs}, device='{self.device}', seed={self.seed})"
        )

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        ring, view, progress = self._ring, self._reader.view, self._progress
        return summary(ring, self._sampler, view, progress, self._plan, self.nbytes, str(self.device))

    # -- inside -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Mend what an earlier call left half done, and draw the served batches that are due."""
        if self._ring.pending is not None:
            self._writer.mend()
        if self._ahead is not None and not self._ahead.is_drawing:
            self._ahead.settle()

    def _draw_ahead(self, batch_size: int, of: int, update: int) -> None:
        """Draw a batch that waits for its learner. The caller holds the lock. A draw that fails does not count."""
        progress, draw_state = self._progress, self._sampler.draw_state()
        number, sampled, completed = progress.draws, progress.sampled, self._ring.completed
        try:
            batch = self._batch(batch_size, update if of > 1 else 1, of)
            progress.ahead.append(Drawn(number, update, batch_size, draw_state, completed, batch))
            progress.keep()
        except BaseException:
            if not (progress.ahead and progress.ahead[-1].number == number):
                progress.draws, progress.sampled = number, sampled
                self._sampler.undo_draws(draw_state)
            raise

    def _end_serving(self, ahead: Ahead) -> None:
        """Put back the batches that nobody took, and end the serving. The caller holds the lock."""
        if ahead is self._ahead:
            ahead.give_back()
            self._progress.undo(self._sampler)
            self._ahead = None

    def _batch(self, batch_size: int, update: int, of: int) -> Any:
        require_rows(batch_size)
        batch_size = int(batch_size)  # a small NumPy integer could overflow
        with self.lock:
            if self._ring.pending is not None or self._ahead is not None:
                self._prepare()
            direct = self._direct
            if direct is not None and (batch := direct.sample(self._reader.view, batch_size, update, of)) is not None:
                return batch
            self._reader.keep_rule()
            come = self._progress
            seed = come.seed if get_worker_info() is None else stream_of(come.seed)
            key = stream(seed, come.draws - come.first)
            drawn = self._sampler.draw(batch_size, key, update, of)
            if not self._own_sampler:
                drawn = readable_draw(self._ring, self._sampler, drawn, batch_size)
            places, extras = drawn
            come.draws += 1
            come.sampled += batch_size
            if come.slots is not None:
                come.keep()
            batch = self._reader.read(places, extras, key)
            if self._coming is not None:
                self._coming.after_batch(self._reader.view, batch_size, update, of)
            return batch
