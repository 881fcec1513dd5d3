"""A replay for type checkers: its sampler and its view, and which batches its methods give."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Concatenate, ParamSpec, Protocol, overload

    from typing_extensions import TypeVar as TypeVarWithDefault

    from ..batches import Batch, SequenceBatch
    from ..samplers.contract import AnySampler
    from ..samplers.uniform import Uniform
    from ..views.contract import SequenceReader, View
    from ..views.transitions import NStep
    from .serving import Served

    S_co = TypeVarWithDefault("S_co", bound=AnySampler, covariant=True, default=Any)
    V_co = TypeVarWithDefault("V_co", bound=View, covariant=True, default=Any)
    GivenSampler = TypeVarWithDefault("GivenSampler", bound=AnySampler, default=Any)
    GivenView = TypeVarWithDefault("GivenView", bound=View, default=Any)
    P = ParamSpec("P")
    R = TypeVar("R")
    Replay = TypeVar("Replay")
    B_co = TypeVar("B_co", covariant=True)
    Q_co = TypeVar("Q_co", covariant=True)

    class HasView(Protocol[V_co]):
        """A replay with a view."""

        @property
        def view(self) -> V_co:
            """The view that reads the batches."""
            ...

    class Gives(Protocol[P, B_co, Q_co]):
        """A method whose result depends on the view: ``B_co`` for transitions, ``Q_co`` for sequences."""

        @overload
        def __get__(self, buffer: HasView[NStep], owner: type | None = None) -> Callable[P, B_co]: ...
        @overload
        def __get__(self, buffer: HasView[SequenceReader], owner: type | None = None) -> Callable[P, Q_co]: ...
        @overload
        def __get__(self, buffer: HasView[Any], owner: type | None = None) -> Callable[P, B_co]: ...

    Method = Callable[Concatenate[Replay, P], object]

    UNIFORM: Uniform
    TRANSITION: NStep

    def gives_batch(method: Method[Replay, P]) -> Gives[P, Batch, SequenceBatch]:
        """Declare that a method returns a batch; the method itself stays as it is."""
        ...

    def gives_batches(method: Method[Replay, P]) -> Gives[P, Iterator[Batch], Iterator[SequenceBatch]]:
        """Declare that a method returns an iterator of batches; the method itself stays as it is."""
        ...

    def gives_served(method: Method[Replay, P]) -> Gives[P, Served[Batch], Served[SequenceBatch]]:
        """Declare that a method serves batches; the method itself stays as it is."""
        ...

else:
    S_co, V_co = TypeVar("S_co", covariant=True), TypeVar("V_co", covariant=True)
    UNIFORM = TRANSITION = None
    """The default if no sampler or view is given. Type checkers see the type that the replay then has."""

    def gives_batch(method):
        """The method as it is."""
        return method

    gives_batches = gives_served = gives_batch
