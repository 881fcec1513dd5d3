"""The picture of an inspection: four panels, for a paper or a report."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["figure_of"]


DARK, BLUE, RED, GREY = "#1f4e79", "#5b9bd5", "#c0504d", "#7f7f7f"


def figure_of(found: Any) -> Any:
    """Returns, lengths, rewards, and ages or priorities of an inspection as a Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # takes a second to import
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot needs matplotlib: pip install 'relive[plot]'", name=error.name) from error
    figure: Any = Figure(figsize=(8, 5.4), dpi=200, layout="constrained")
    (returns, lengths), (rewards, last) = figure.subplots(2, 2)
    _returns(returns, found)
    _lengths(lengths, found)
    _histogram(rewards, found.experience.reward, "reward of a step", "steps")
    if found.experience.priorities is not None and len(found.experience.priorities):
        _priorities(last, found.experience.priorities)
    elif found.experience.age is not None:
        _histogram(last, found.experience.age, "age: transitions completed later", "steps")
    else:
        _histogram(last, found.episodes["return"][found.episodes["complete"]], "return of a whole episode", "episodes")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{found.num_steps:,} steps", x=0.01, ha="left", fontsize=11)
    return figure


def _returns(axes: Any, found: Any) -> None:
    """The return of each whole episode, in the order of storage."""
    numbers = found.episodes["return"][found.episodes["complete"]]
    axes.scatter(np.arange(len(numbers)), numbers, s=8, color=DARK, alpha=0.5, linewidths=0)
    axes.set(xlabel="whole episode, env by env", ylabel="return")


def _lengths(axes: Any, found: Any) -> None:
    """How long whole episodes are, by how they ended."""
    table = found.episodes
    terminated, whole = table["terminated"], table["complete"]
    kinds = {"terminated": whole & terminated, "truncated": whole & ~terminated}
    groups = {name: table["length"][kept] for name, kept in kinds.items() if kept.any()}
    if groups:
        axes.hist(list(groups.values()), bins=30, stacked=True, label=list(groups), color=[BLUE, RED][: len(groups)])
        axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="length of a whole episode, steps", ylabel="episodes")


def _histogram(axes: Any, numbers: Any, name: str, of: str) -> None:
    """A histogram of the finite numbers."""
    axes.hist(numbers[np.isfinite(numbers)].astype(np.float64), bins=40, color=BLUE)
    axes.set(xlabel=name, ylabel=of)


def _priorities(axes: Any, numbers: Any) -> None:
    """The probability of each transition, the largest first: a flat line is uniform sampling."""
    share = np.sort(numbers)[::-1] / max(numbers.sum(), 1e-300)
    axes.loglog(np.arange(1, len(share) + 1), np.maximum(share, 1e-300), color=DARK, label="prioritized")
    axes.axhline(1 / len(share), color=GREY, linestyle=":", label="uniform")
    axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="transition, by its priority", ylabel="probability of being drawn")
