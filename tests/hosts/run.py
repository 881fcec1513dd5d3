"""Tries the newest release of one host, in the environment of that host: `make hosts` runs it for all of them.

python tests/hosts/run.py agilerl    writes tests/hosts/results/agilerl.json
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "hosts" / "results"
CHECKOUTS = ROOT / "build" / "hosts"
LONGEST = 3600
"""Seconds that a suite may take. One that hangs is killed, and its host is red."""
sys.path.insert(0, str(ROOT / "tests"))

from hosts.libraries import HOSTS, Host  # noqa: E402 - found in the line above
from hosts.signatures import lacking  # noqa: E402


def git(folder: Path, *words: str) -> bool:
    """Whether git did it."""
    return subprocess.run(["git", *words], cwd=folder, check=False, capture_output=True).returncode == 0


def fetched(host: Host, release: str) -> str:
    """The tag of the release in the host's repository, or its newest commit and that one's date; "" if none came."""
    folder = CHECKOUTS / host.repository.partition("/")[2]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    git(folder, "remote", "add", "origin", f"https://github.com/{host.repository}")
    tags = [f"v{release}", release] if release else []
    for name in [*(f"refs/tags/{tag}" for tag in tags), "HEAD"]:
        if git(folder, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin", name):
            break
    else:
        return ""
    if not git(folder, "checkout", "--quiet", "FETCH_HEAD", "--", *host.besides):
        return ""
    if name != "HEAD":
        return name.removeprefix("refs/tags/")
    said = ["git", "log", "-1", "--abbrev=7", "--format=%h of %cs", "FETCH_HEAD"]
    return subprocess.check_output(said, cwd=folder, text=True).strip()


def tests(name: str, where: Path, words: list[str], env: dict[str, str]) -> dict[str, Any]:
    """What pytest saw of the files and options, run there."""
    outcomes = CHECKOUTS / f"{name}-outcomes.json"
    outcomes.unlink(missing_ok=True)
    path = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    plugged = [sys.executable, "-m", "pytest", "-q", "-p", "hosts.in_place", "-p", "no:cacheprovider", *words]
    if where != ROOT:  # a suite is its own root, and options that want plugins are none of ours
        plugged += ["--rootdir=.", "--confcutdir=.", "--continue-on-collection-errors", "-o", "addopts="]
        plugged += ["-c", "pyproject.toml" if (where / "pyproject.toml").exists() else os.devnull]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(path), "RELIVE_OUTCOMES": str(outcomes)} | env
    given["OMP_NUM_THREADS"] = "1"  # small networks: more threads only get into each other's way
    with (
        (CHECKOUTS / f"{name}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(plugged, cwd=where, env=given, stdout=log, stderr=log, start_new_session=True) as suite,
    ):
        try:
            suite.wait(LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(suite.pid, signal.SIGKILL)  # with what it started; it has no outcomes then
    nothing: dict[str, Any] = {"outcomes": {}, "errors": {}, "made": 0}
    return json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.exists() else nothing


def of_its_suite(name: str, host: Host) -> dict[str, Any]:
    """How many tests pass on its own class and on ours, and which only on its own."""
    where = CHECKOUTS / host.repository.partition("/")[2]
    own, ours = (
        tests(f"{name}-{label}", where, [*host.options, *host.suite], {"RELIVE_IN_PLACE": inside})
        for label, inside in (("own", ""), ("ours", name))
    )
    passed = [node for node, outcome in own["outcomes"].items() if outcome == "passed"]
    fallen = [node for node in passed if ours["outcomes"].get(node) != "passed"]
    return {
        "own": len(passed),
        "failed_on_its_own": sum(outcome == "failed" for outcome in own["outcomes"].values()),
        "ours": len(passed) - len(fallen),
        "made": ours["made"],
        **split(host, fallen, ours["errors"]),
    }


def split(host: Host, failed: list[str], errors: dict[str, str]) -> dict[str, list[str]]:
    """The tests that fail by decision, by their names or their errors, and the others."""
    known = [(node, node) for node in failed], host.differences
    refused = [(node, errors.get(node, "")) for node in failed], host.refusals
    by_decision = {
        node for pairs, parts in (known, refused) for node, text in pairs
        if any(fnmatchcase(text, f"*{part}*") for part in parts)
    }  # fmt: skip
    return {
        "by_decision": [node for node in failed if node in by_decision],
        "fallen": [node for node in failed if node not in by_decision],
    }


def beside(name: str, host: Host) -> dict[str, Any]:
    """How many of our tests of both classes pass, and which fail."""
    env = {"RELIVE_PEERS": "1", "RELIVE_HOST": name}
    seen = tests(f"{name}-beside", ROOT, [*host.ours, "tests/hosts/test_planted.py"], env)
    outcomes = seen["outcomes"]
    failed = [node for node, outcome in outcomes.items() if outcome == "failed"]
    return {"passed": sum(outcome == "passed" for outcome in outcomes.values()), **split(host, failed, seen["errors"])}


def tried(name: str) -> dict[str, Any]:
    """Everything that the table says of a host."""
    host = HOSTS[name]
    release = version(host.package) if host.package else ""
    source = fetched(host, release) if host.suite or not release else ""
    if host.needs:
        fetched(HOSTS[host.needs], "")
    os.environ["RELIVE_CHECKOUTS"] = str(CHECKOUTS)
    found = [line for path, (theirs, ours) in host.both().items() for line in lacking(path, theirs, ours)]
    return {
        "release": release or source,
        "pinned_by": f"{host.pinned_by} {version(host.pinned_by)}" if host.pinned_by else "",
        "tried": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "versions": {package: version(package) for package in ("torch", "numpy")},
        "tests_of": source if host.suite else "",
        "suite": of_its_suite(name, host) if host.suite else None,
        "beside": beside(name, host),
        "lacking": [line for line in found if line not in host.allowed],
    }


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    for given in sys.argv[1:]:
        result = json.dumps(tried(given), indent=1) + "\n"
        (RESULTS / f"{given}.json").write_text(result, encoding="utf-8")
        print(f"{given}: written")
