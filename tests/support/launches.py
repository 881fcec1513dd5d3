"""What a call has a device do: the operations of an eager call, the kernels of a compiled one."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import relive.replay.buffer
from relive import ReplayBuffer
from relive.memory.device import DeviceRows
from support.other_device import no_waiting

__all__ = ["Launches", "as_compiled", "as_eager", "as_on_device"]

KERNEL = re.compile(r"^\s+(\w+_fused_\w+)(?:\.run)?\(", re.MULTILINE)
EXTERNAL = re.compile(r"^\s+(?:\w+ = )?(torch\.ops\.[\w.]+|extern_kernels\.\w+)\(", re.MULTILINE)
VIEWS = ("torch.ops.aten.view.", "torch.ops.aten.reshape.", "torch.ops.aten.slice.", "torch.ops.aten.as_strided.")


class Launches(NamedTuple):
    """Of one compiled call: the kernels that the compiler made, and the operations that it left to torch."""

    kernels: int
    external: list[str]

    @property
    def total(self) -> int:
        """All of them."""
        return self.kernels + len(self.external)


def as_on_device(device: torch.device, *args: Any, **options: Any) -> ReplayBuffer:
    """A replay whose rows are kept as on a device, even if that is the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, device))
        return ReplayBuffer(*args, device=device, **options)


def as_eager(call: Callable[[], Any]) -> list[str]:
    """The operations that a GPU would be told to run."""
    with no_waiting() as watch:
        call()
    return watch.launches


def as_compiled(make: Callable[..., Callable[[], Any]]) -> Launches:
    """What a compiled call runs; ``make`` gets the ``backend`` of ``torch.compile`` and gives that call.

    Inductor writes its program, which is read and not run: the call runs in eager mode. On the CPU it puts several
    groups of operations into one function, so here each group has a function of its own, as it is a kernel of its own
    on a GPU.
    """
    # the compiler takes a second to import, and few tests compile
    from torch._functorch import config as aot_config
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering

    programs: list[str] = []

    def written(program: str) -> None:
        programs.append(program)
        raise RuntimeError("the program was written; no need to compile it")

    def note(graph: Any, inputs: list[Tensor], **options: Any) -> Any:
        runs = deepcopy(graph)
        with mock.patch.object(GraphLowering, "save_output_code", written), suppress(Exception):
            compile_fx_inner(graph, inputs, **options)
        return runs

    def backend(graph: Any, inputs: list[Tensor], **_: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=note)

    torch.compiler.reset()
    alone = mock.patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", -1)
    with alone, config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        make(backend)()
    (program,) = programs
    called = program[program.index("def call(") :]
    external = [name for name in EXTERNAL.findall(called) if not name.startswith(VIEWS)]
    return Launches(len(KERNEL.findall(called)), external)
