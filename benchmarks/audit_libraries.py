"""Audits what other libraries' own training loops store, and writes what was found into docs/audit-of-libraries.md.

python benchmarks/audit_libraries.py                        all libraries that are installed here
python benchmarks/audit_libraries.py --only Tianshou cpprb   some of them
python benchmarks/audit_libraries.py --checkouts ~/code      also CleanRL and FastTD3, from cleanrl/ and FastTD3/ there
python benchmarks/audit_libraries.py --pages                 only the page again, from results/audits/*.json

Libraries that cannot be installed side by side are run in environments of their own: .venv-bench, .venv-audit (with
PYTHONPATH=src), .venv-agilerl, .venv-velora. Each run is a minute at most, on one thread. A library that is not
installed is passed over.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import audit_envs
import audit_replays
import audit_rollouts
import relive

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "audits"
PAGE = HERE.parent / "docs" / "audit-of-libraries.md"

Runs = Callable[..., Iterator[audit_envs.Run]]

INSTALLED: dict[str, tuple[str, tuple[Runs, ...]]] = {
    "Stable-Baselines3": ("stable_baselines3", (audit_replays.stable_baselines3, audit_rollouts.stable_baselines3)),
    "Tianshou": ("tianshou", (audit_replays.tianshou,)),
    "TorchRL": ("torchrl", (audit_replays.torchrl,)),
    "cpprb": ("cpprb", (audit_replays.cpprb,)),
    "AgileRL": ("agilerl", (audit_replays.agilerl, audit_rollouts.agilerl)),
    "rsl_rl": ("rsl-rl-lib", (audit_rollouts.rsl_rl,)),
    "PyTorchRL": ("pytorchrl", (audit_rollouts.pytorchrl,)),
    "EmbodiChain": ("embodichain", (audit_rollouts.embodichain,)),
    "Velora": ("velora", (audit_replays.velora,)),
    "LeRobot": ("lerobot", (audit_replays.lerobot,)),
    "Gymnasium": ("gymnasium", (audit_rollouts.gymnasium,)),
}
"""Library -> its distribution, and its runs."""

CHECKOUTS: dict[str, tuple[str, tuple[Runs, ...]]] = {
    "CleanRL": ("cleanrl", (audit_replays.cleanrl, audit_rollouts.cleanrl)),
    "FastTD3": ("FastTD3", (audit_replays.fast_td3,)),
}
"""Library -> the folder of its checkout, and its runs."""


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(folder: Path) -> str:
    """The commit of a checkout: by git, or as a file COMMIT in it says."""
    noted = folder / "COMMIT"
    if noted.exists():
        return noted.read_text().strip()[:10]
    git = ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def audited(run: audit_envs.Run) -> dict[str, Any]:
    """What an audit of one run found, as JSON."""
    report = relive.audit(run.source)
    print(f"  {run.loop}, {run.env}")
    print("  " + str(report).replace("\n", "\n  "))
    findings = [{"rule": f.rule, "sure": f.sure, "rows": f.rows, "share": round(f.share, 4)} for f in report.findings]
    return {"loop": run.loop, "env": run.env, "rows": report.rows, "episodes": report.episodes,
            "findings": findings, "lacks": list(report.lacks)}  # fmt: skip


def played(library: str, version: str, runs: tuple[Runs, ...], *arguments: Any) -> None:
    """Runs a library's loops, audits what they stored, and writes the result."""
    print(f"{library} {version}")
    found = []
    for each in runs:
        silent, heard = each(*arguments), io.StringIO()
        while True:
            with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = next(silent, None)
            if run is None:
                break
            found.append(audited(run))
    packages = {name: version_of(name) for name in ("gymnasium", "torch", "numpy", "tensordict")}
    result = {"library": library, "version": version, "python": platform.python_version(), "packages": packages,
              "runs": found}  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{library.lower()}.json").write_text(json.dumps(result, indent=1) + "\n")


def table(results: list[dict[str, Any]]) -> str:
    """The page's table: a row for each run."""
    lines = ["| library | filled by | environment | rows | found |", "|---|---|---|---:|---|"]
    for result in results:
        for i, run in enumerate(result["runs"]):
            name = f"[{result['library']}](#{result['library'].lower()}) {result['version']}" if not i else ""
            found = "<br>".join(f"`{f['rule']}`, {f['sure']}, {f['share']:.1%}" for f in run["findings"]) or "nothing"
            lines.append(f"| {name} | {run['loop']} | {run['env']} | {run['rows']:,} | {found} |")
    return "\n".join(lines)


def page() -> str:
    """The page, with the table of all results on record between its markers."""
    known = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    results = [known[name.lower()] for name in [*INSTALLED, *CHECKOUTS] if name.lower() in known]
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- audits -->")
    _, end, after = rest.partition("<!-- /audits -->")
    return f"{before}{begin}\n\n{table(results)}\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*INSTALLED, *CHECKOUTS], metavar="LIBRARY")
    parser.add_argument("--checkouts", type=Path, help="a folder with checkouts of CleanRL and FastTD3")
    parser.add_argument("--pages", action="store_true", help="only write the page again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    for library, (package, runs) in {} if args.pages else INSTALLED.items():
        version = version_of(package)
        if version and (args.only is None or library in args.only):
            played(library, version, runs)
    for library, (folder, runs) in {} if args.pages or not args.checkouts else CHECKOUTS.items():
        if (args.checkouts / folder).exists() and (args.only is None or library in args.only):
            played(library, commit_of(args.checkouts / folder), runs, args.checkouts / folder)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
