"""As much of skrl as its drop-in asks for, so that it can be tested where that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

DROP_IN = "relive.compat.skrl"


class Memory:
    def __init__(
        self,
        *,
        memory_size: int,
        num_envs: int = 1,
        device: Any = None,
        export: bool = False,
        export_format: str = "pt",
        export_directory: str = "",
    ) -> None:
        self.memory_size, self.num_envs, self.device = memory_size, num_envs, torch.device(device or "cpu")
        self.export, self.export_format, self.export_directory = export, export_format, export_directory
        self.tensors: dict[str, Any] = {}
        self.tensors_view: dict[str, Any] = {}
        self.sampling_indexes = None
        self.reset()

    def reset(self) -> None:
        self.filled, self.env_index, self.memory_index = False, 0, 0

    def __len__(self) -> int:
        return self.memory_size * self.num_envs if self.filled else self.memory_index * self.num_envs + self.env_index

    def get_tensor_names(self) -> list[str]:
        return sorted(self.tensors)

    def get_tensor_by_name(self, name: str) -> Any:
        return self.tensors[name]

    def set_tensor_by_name(self, name: str, tensor: Any) -> None:
        self.tensors[name].copy_(tensor)

    def get_sampling_indexes(self) -> Any:
        return self.sampling_indexes

    def create_tensor(self, name: str, *, size: Any, dtype: Any = None, keep_dimensions: bool = False) -> bool:
        if size is None or name in self.tensors:
            return False
        shape = (self.memory_size, self.num_envs, *(size if keep_dimensions else [size]))
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        self.tensors[name], self.tensors_view[name] = tensor, tensor.view(-1, *shape[2:])
        setattr(self, f"_tensor_{name}", tensor)
        return True

    def save(self, directory: str = "", *, format: str = "pt") -> None:
        raise ValueError(f"Unsupported export format: '{format}'")


class RandomMemory(Memory):
    def __init__(self, *, replacement: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._replacement = replacement


@contextmanager
def installed() -> Iterator[Any]:
    """The drop-in over this instead of its host, even where that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, DROP_IN, raising=False)
        for name in ("skrl", "skrl.memories", "skrl.memories.torch"):
            module = ModuleType(name)
            module.__dict__.update(Memory=Memory, RandomMemory=RandomMemory)
            patch.setitem(sys.modules, name, module)
        yield import_module(DROP_IN)
        sys.modules.pop(DROP_IN, None)
