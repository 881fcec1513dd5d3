"""Types of a replay for type checkers: its sampler, its view, and its batches. Nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from ..samplers.contract import AnySampler
from ..samplers.uniform import Uniform
from ..views.contract import SequenceReader, View
from ..views.transitions import NStep

if TYPE_CHECKING:
    from tensordict import TensorDict
    from typing_extensions import TypeVar as TypeVarWithDefault

    from ..batches.sequences import SequenceBatch
    from .serving import Served

__all__ = [
    "TRANSITION",
    "UNIFORM",
    "GivenSampler",
    "GivenView",
    "S_co",
    "V_co",
    "gives_batch",
    "gives_batches",
    "gives_served",
]

if TYPE_CHECKING:
    S_co = TypeVarWithDefault("S_co", bound=AnySampler, covariant=True, default=Any)
    V_co = TypeVarWithDefault("V_co", bound=View, covariant=True, default=Any)
    GivenSampler = TypeVarWithDefault("GivenSampler", bound=AnySampler, default=Any)
    GivenView = TypeVarWithDefault("GivenView", bound=View, default=Any)
else:
    S_co, V_co = TypeVar("S_co", covariant=True), TypeVar("V_co", covariant=True)
    GivenSampler, GivenView = TypeVar("GivenSampler"), TypeVar("GivenView")

P = ParamSpec("P")

UNIFORM, TRANSITION = cast("Uniform", None), cast("NStep", None)
"""None, the default if no sampler or view is given. Type checkers see the type that the buffer then has."""


class HasView(Protocol[V_co]):
    """What has a view: a replay."""

    @property
    def view(self) -> V_co:
        """What reads the batches."""
        ...


class GivesBatch(Protocol[P]):
    """A method whose result is a batch: a TensorDict, or a SequenceBatch if the view reads sequences."""

    @overload
    def __get__(self, buffer: HasView[NStep], owner: Any = None) -> Callable[P, TensorDict]: ...
    @overload
    def __get__(self, buffer: HasView[SequenceReader], owner: Any = None) -> Callable[P, SequenceBatch]: ...
    @overload
    def __get__(self, buffer: HasView[Any], owner: Any = None) -> Callable[P, TensorDict]: ...


class GivesBatches(Protocol[P]):
    """A method whose result is an iterator of such batches."""

    @overload
    def __get__(self, buffer: HasView[NStep], owner: Any = None) -> Callable[P, Iterator[TensorDict]]: ...
    @overload
    def __get__(self, buffer: HasView[SequenceReader], owner: Any = None) -> Callable[P, Iterator[SequenceBatch]]: ...
    @overload
    def __get__(self, buffer: HasView[Any], owner: Any = None) -> Callable[P, Iterator[TensorDict]]: ...


class GivesServed(Protocol[P]):
    """A method whose result serves such batches."""

    @overload
    def __get__(self, buffer: HasView[NStep], owner: Any = None) -> Callable[P, Served[TensorDict]]: ...
    @overload
    def __get__(self, buffer: HasView[SequenceReader], owner: Any = None) -> Callable[P, Served[SequenceBatch]]: ...
    @overload
    def __get__(self, buffer: HasView[Any], owner: Any = None) -> Callable[P, Served[TensorDict]]: ...


def gives_batch(method: Callable[Concatenate[Any, P], Any]) -> GivesBatch[P]:
    """Declare that a method returns a batch; the method itself stays as it is."""
    return cast("GivesBatch[P]", method)


def gives_batches(method: Callable[Concatenate[Any, P], Any]) -> GivesBatches[P]:
    """Declare that a method returns an iterator of batches; the method itself stays as it is."""
    return cast("GivesBatches[P]", method)


def gives_served(method: Callable[Concatenate[Any, P], Any]) -> GivesServed[P]:
    """Declare that a method serves batches; the method itself stays as it is."""
    return cast("GivesServed[P]", method)
