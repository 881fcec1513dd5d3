"""Writes ``src/relive/core/_core.pyi``, the types of the compiled core, from the core itself: ``make stub``."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

STUB = Path(__file__).resolve().parents[1] / "src" / "relive" / "core" / "_core.pyi"

HEAD = '''"""Types of the compiled core. Written by ``make stub``; do not edit. The docstrings are in ``src/core``."""

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray
'''


def stub() -> str:
    """The types of the core, as nanobind finds them, with `Any` where Python objects of several types do."""
    stubgen: Any = importlib.import_module("nanobind.stubgen")
    core = importlib.import_module("relive.core._core")
    found = stubgen.StubGen(module=core, quiet=True, include_docstrings=False)
    found.put(core)
    text: str = found.get()
    body = re.sub(r"\A.*?(?=^(?:class |def |[A-Z_]+: ))", "", text, flags=re.S | re.M)
    body = re.sub(r"\n    __slotnames__: .*\n", "", body)  # what pickle notes of a class, once it was asked
    body = re.sub(r"\bnumpy\.typing\.NDArray\b", "NDArray[Any]", body)
    body = re.sub(r"\bobject(?: \| None)?(?=[,)\]:=\s])", "Any", body)
    body = re.sub(r"(?<=-> )(dict|tuple|list)(?=:)", r"\1[Any, Any]", body)
    body = re.sub(r"\b(Iterator|Sequence)\b(?!\[)", r"\1[Any]", body)
    body = re.sub(r"\btuple\b(?!\[)", "tuple[Any, ...]", body)
    body = body.replace("-> tuple[Any, Any]:", "-> tuple[Any, ...]:").replace("-> list[Any, Any]:", "-> list[Any]:")
    return f"{HEAD}\n{body.strip()}\n"


def main() -> None:
    STUB.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
