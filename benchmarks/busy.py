"""The leads on a busy machine beside those on an idle one, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tables

NAMES = (
    "trainings",
    "gae",
    "add",
    "minibatches",
    "replay_add",
    "replay_sample",
    "replay_sequences",
    "hindsight",
    "pixels",
)
"""What `run.py --busy` measures: the work of a training step, beside other libraries."""
RESULTS = tables.RESULTS / "busy"


def leads(reports: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The workloads in which another library takes part, by (title of the report, name)."""
    return {
        (report["title"], work["name"]): work
        for report in reports
        for work in report["workloads"]
        if work.get("best_peer_over_ours") and work.get("unit") != "count"
    }


def own_time(work: dict[str, Any]) -> float:
    """The median of our line; of a training, the time in its storage."""
    return next(line.get("storage", line["median"]) for line in work["lines"] if line["role"] == "ours")


def table(idle: Sequence[dict[str, Any]], busy: Sequence[dict[str, Any]]) -> str:
    """The markdown of the comparison; only a sentence if nothing was measured on a busy machine."""
    if not busy:
        return "Not measured yet."
    environment = busy[0]["environment"]
    beside = environment["neighbours"]
    names = [report["name"] for report in busy]
    only = "" if {*NAMES} <= {*names} else f" --only {' '.join(names)}"
    made = (
        f"Measured on {tables.machine(environment)}. Made by `python benchmarks/run.py --busy{only}`, beside {beside} "
        "processes that copy memory and multiply matrices."
    )
    quiet = leads([report for report in idle if report["environment"]["cpu"] == environment["cpu"]])
    if not quiet:  # times of two machines say nothing together
        out = ["| best peer / relive | busy |", "|---|---:|"]
        out += [f"| {title}: {name} | {tables.ratio(work)} |" for (title, name), work in leads(busy).items()]
        return "\n".join([*out, "", made + " The other tables are from another machine."])
    out = ["| best peer / relive | idle | busy | relive takes so many times as long |", "|---|---:|---:|---:|"]
    for (title, name), work in leads(busy).items():
        if (title, name) in quiet:
            before = quiet[title, name]
            longer = own_time(work) / own_time(before)
            cells = [tables.ratio(before), tables.ratio(work), f"{tables.three_digits(longer)} ×"]
            out.append("| " + " | ".join([f"{title}: {name}", *cells]) + " |")
    return "\n".join([*out, "", made])
