"""The table of docs/migration/index.md: what the newest release of each host says of our classes inside it.

python tests/hosts/table.py            rewrites it from results/*.json, and fails if anything is red
python tests/hosts/table.py agilerl    fails if that host is
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from hosts.libraries import HOSTS, Host  # noqa: E402 - found in the line above

PAGE = ROOT / "docs" / "migration" / "index.md"
RESULTS = ROOT / "tests" / "hosts" / "results"
PLACE = re.compile(r"(<!-- hosts -->).*?(<!-- /hosts -->)", re.DOTALL)
HEAD = """| host | release | tried on | its own tests | on its class | on ours | our tests | arguments |
|---|---|---|---|---:|---:|---:|---|"""


def reds(result: dict[str, Any]) -> list[str]:
    """What is wrong in the result of a host, in words; nothing if our classes still fit it."""
    suite, beside = result["suite"], result["beside"]
    found = [f"not as there: {line}" for line in result["lacking"]]
    found += [f"our test fails: {node}" for node in beside["fallen"]]
    if not result["release"] or not beside["passed"]:
        found.append("nothing was tried: there is no release, or none of our tests of both passed")
    if suite is not None:
        found += [f"passes on its class alone: {node}" for node in suite["fallen"]]
        if not suite["own"] or not suite["made"]:
            found.append(f"its own suite: {suite['own']} tests passed on its class, {suite['made']} objects were ours")
    return found


def row(host: Host, result: dict[str, Any]) -> str:
    """A line of the table."""
    suite, bad, beside = result["suite"], reds(result), result["beside"]
    release = f"{result['release']} ({result['pinned_by']})" if result["pinned_by"] else result["release"]
    cells = [f"[{host.title}]({host.page}.md)", release, result["tried"]]
    if suite is None:
        cells += [host.no_suite, "", ""]
    else:
        own = str(suite["own"]) + (f", {suite['failed_on_its_own']} fail" if suite["failed_on_its_own"] else "")
        cells += [f"of {result['tests_of']}", own, _counted(suite["ours"], suite)]
    cells += [_counted(beside["passed"], beside), f"**red**: {len(bad)}" if bad else "as there"]
    return "| " + " | ".join(cells) + " |"


def _counted(passed: int, of: dict[str, Any]) -> str:
    parts = [str(passed), *([f"{len(of['by_decision'])} differ by decision"] if of["by_decision"] else [])]
    return ", ".join([*parts, *([f"**{len(of['fallen'])} fall**"] if of["fallen"] else [])])


def results() -> dict[str, dict[str, Any]]:
    """By the host's name, what was written down for it."""
    paths = {name: RESULTS / f"{name}.json" for name in HOSTS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def table(of: dict[str, dict[str, Any]]) -> str:
    """All lines; a host without a result says so."""
    absent = "| {title} | | not tried yet | | | | | |"
    lines = (row(host, of[name]) if name in of else absent.format(title=host.title) for name, host in HOSTS.items())
    return "\n".join([HEAD, *lines])


def written(text: str, of: dict[str, dict[str, Any]]) -> str:
    """The page with the table in its place."""
    return PLACE.sub(lambda match: f"{match[1]}\n\n{table(of)}\n\n{match[2]}", text)


def main() -> None:
    """Rewrites the page, and ends with 1 if a host, of those that are named or of all, is red or was not tried."""
    found = results()
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    red = {name: reds(found[name]) if name in found else ["not tried"] for name in sys.argv[1:] or HOSTS}
    for name, lines in red.items():
        print(f"{name}: " + ("as it should be" if not lines else "\n    ".join(["RED", *lines])))
    sys.exit(any(red.values()))


if __name__ == "__main__":
    main()
