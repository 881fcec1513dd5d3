"""Weights: the newest weights of a network, for the processes that play with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from .. import core
from ..errors import LifecycleError, ParameterError, SchemaError
from ..parameters import TIMEOUT_RULE, require
from .blocks import ArraySpec, BlockSpec
from .shared import CACHE_LINE, Bell, Claim, SharedBlock

COPIES = 2
"""How many versions are in memory: one to read, and one to write. Version v has row v mod 2."""


class Weights:
    """The newest weights of a network: one process publishes them, others fetch them, always a whole version.

    No process waits for another. A process that is killed while it publishes or fetches stops no other one. Give the
    weights to other processes as an argument or by a fork, as with :class:`relive.Lanes`.

    Args:
        network: a module, or a mapping from names to tensors such as a ``state_dict``. Its tensors' shapes and dtypes
            are those of all that is published. Nothing is published yet.

    Raises:
        ParameterError: ``network`` is neither, or has no tensors.
        OSError: the system has no memory that processes share, such as Windows.
    """

    def __init__(self, network: nn.Module | Mapping[str, Tensor]) -> None:
        state = _state(network)
        if not state:
            raise ParameterError("Weights(network): it has no tensors")
        spec = _spec(state)
        self._share(spec, SharedBlock.create(2 * CACHE_LINE + COPIES * spec.nbytes))

    def __repr__(self) -> str:
        """Not a call: the network is not kept."""
        return f"<Weights: version {self.version} of {len(self._spec.parts)} tensors>"

    def _share(self, spec: BlockSpec, block: SharedBlock) -> None:
        """Use the weights that lie in a block."""
        self._spec, self._block = spec, block
        # a cache line for the number, one for the bell, then the versions
        self._versions = block.array[:8].view(np.int64)
        self._bell = Bell(block.array[CACHE_LINE : CACHE_LINE + 4].view(np.int32))
        self._copies = block.array[2 * CACHE_LINE :].reshape(COPIES, spec.nbytes)
        self._claim: Claim | None = None
        self._fetched: int = 0

    def __getstate__(self) -> tuple[BlockSpec, SharedBlock]:
        return self._spec, self._block

    def __setstate__(self, state: tuple[BlockSpec, SharedBlock]) -> None:
        self._share(*state)

    @property
    def version(self) -> int:
        """How often weights were published; 0 before the first time."""
        return core.published(self._versions, 0)

    def publish(self, network: nn.Module | Mapping[str, Tensor]) -> None:
        """Make the weights of ``network``, a module or its ``state_dict``, the newest.

        Raises:
            SchemaError: they have other names, shapes or dtypes.
            LifecycleError: another process publishes here, and is alive.
        """
        state = _state(network)
        self._require_alike(state)
        if self._claim is None or not self._claim.holds:
            self._claim = self._block.claim(0)
            if self._claim is None:
                raise LifecycleError("another process publishes these weights and is alive; let one process do it")
        number = self.version + 1  # nobody else writes: see the claim
        row = self._spec.tensors(torch.from_numpy(self._copies[number % COPIES]))
        for name, tensor in state.items():
            row[name,].copy_(tensor)
        # last: this shows the number after all writes above, and before those of the next version
        if core.publish(self._versions, 0, number, self._bell.word, 0):
            self._bell.wake()

    def fetch(self, network: nn.Module | Mapping[str, Tensor]) -> bool:
        """Copy the newest weights into a network, in place. Returns False, and changes nothing, if they are not new.

        Raises:
            SchemaError: the network has other names, shapes or dtypes.
        """
        state = _state(network)
        self._require_alike(state)
        while (number := self.version) > self._fetched:
            row = self._copies[number % COPIES].copy()
            if self.version == number:  # then version number + COPIES, which gets this row, was not begun
                break
        else:
            return False
        for (name,), tensor in self._spec.tensors(torch.from_numpy(row)).items():
            state[name].copy_(tensor)
        self._fetched = number
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until there are weights that were not fetched; False if none came within ``timeout`` seconds.

        Raises:
            ParameterError: the timeout is out of range.
        """
        require("Weights.wait", TIMEOUT_RULE, timeout=timeout)
        return self._bell.wait(lambda: self.version > self._fetched, timeout)

    def _require_alike(self, state: Mapping[str, Tensor]) -> None:
        spec = _spec(state)
        if spec != self._spec:
            own, given = ({part.path[0]: (part.shape, part.dtype) for part in x.parts} for x in (self._spec, spec))
            name = next(name for name in {**own, **given} if own.get(name) != given.get(name))
            raise SchemaError(
                f"weights '{name}': expected {own.get(name)}, got {given.get(name)}; pass a network like the one that "
                "Weights was made with"
            )


def _state(network: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a network, without their gradients; they share its memory."""
    state = network.state_dict() if isinstance(network, nn.Module) else network
    if not isinstance(cast("object", state), Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise ParameterError(f"network: expected a module or a mapping to tensors, got {type(network).__name__}")
    return {str(name): tensor.detach() for name, tensor in state.items()}


def _spec(state: Mapping[str, Tensor]) -> BlockSpec:
    """The tensors of a version, in an order that does not depend on that of the network."""
    return BlockSpec(tuple(ArraySpec((name,), x.dtype, tuple(x.shape)) for name, x in sorted(state.items())))
