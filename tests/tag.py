"""Fails unless a tag names the version that the package, its citation and its changelog have. For releases."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/relive/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}


def versions() -> dict[str, str]:
    """File -> the version that it names."""
    found: dict[str, str] = {}
    for name, pattern in PLACES.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert match, f"{name}: no line is {pattern}"
        found[name] = match[1]
    return found


def complaints(tag: str, changelog: str) -> list[str]:
    """What is wrong with a release of this tag."""
    wanted = tag.removeprefix("v")
    wrong = [f"{name} has version {version}" for name, version in versions().items() if version != wanted]
    if not re.search(rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        wrong.append(f"CHANGELOG.md has no heading [{wanted}] with a date")
    return wrong


if __name__ == "__main__":
    wrong = complaints(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if wrong:
        sys.exit(f"the tag is {sys.argv[1]}, but " + "; ".join(wrong))
