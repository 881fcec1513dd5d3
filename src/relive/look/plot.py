"""The picture of an inspection: four panels, or six if draws were counted, for a paper or a report."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["figure_of"]


DARK, BLUE, RED, GREY = "#1f4e79", "#5b9bd5", "#c0504d", "#7f7f7f"


def figure_of(found: Any) -> Any:
    """Returns, lengths, rewards, and ages, priorities or draws of an inspection as a Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # takes a second to import
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot needs matplotlib: pip install 'relive[plot]'", name=error.name) from error
    panels = [_returns, _lengths, _rewards, *_of_sampling(found.experience)]
    columns = len(panels) // 2
    figure: Any = Figure(figsize=(4 * columns, 5.4), dpi=200, layout="constrained")
    for axes, draw in zip(figure.subplots(2, columns).flat, panels, strict=True):
        draw(axes, found)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{found.num_steps:,} steps", x=0.01, ha="left", fontsize=11)
    return figure


def _of_sampling(steps: Any) -> list[Any]:
    """The panels on how steps are drawn: one, or three if their draws were counted."""
    weighed = steps.priorities is not None and len(steps.priorities) > 0
    if steps.draws is not None:
        return [_ages, _priorities if weighed else _draws_by_age, _draws]
    return [_priorities if weighed else _ages if steps.age is not None else _spread]


def _returns(axes: Any, found: Any) -> None:
    """The return of each whole episode, in the order of storage."""
    numbers = found.episodes["return"][found.episodes["complete"]]
    axes.scatter(np.arange(len(numbers)), numbers, s=8, color=DARK, alpha=0.5, linewidths=0)
    axes.set(xlabel="whole episode, env by env", ylabel="return")


def _lengths(axes: Any, found: Any) -> None:
    """The lengths of whole episodes, in one colour for each kind of end."""
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


def _rewards(axes: Any, found: Any) -> None:
    _histogram(axes, found.experience.reward, "reward of a step", "steps")


def _ages(axes: Any, found: Any) -> None:
    _histogram(axes, found.experience.age, "age: transitions completed later", "steps")


def _spread(axes: Any, found: Any) -> None:
    """If nothing is known about sampling: the returns once more, as a distribution."""
    _histogram(axes, found.episodes["return"][found.episodes["complete"]], "return of a whole episode", "episodes")


def _draws(axes: Any, found: Any) -> None:
    """How many steps were drawn 0, 1, 2, ... times, in bins of whole numbers."""
    draws = found.experience.draws[found.experience.draws >= 0]
    width = int(draws.max(initial=0)) // 40 + 1
    axes.hist(draws, bins=np.arange(0, draws.max(initial=0) + width + 1, width) - 0.5, color=BLUE)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="times drawn", ylabel="steps")


def _draws_by_age(axes: Any, found: Any) -> None:
    """How often steps of an age were drawn: the mean of each of up to 40 groups of equally many steps."""
    known = np.flatnonzero(found.experience.draws >= 0)
    rows = known[np.argsort(found.experience.age[known], kind="stable")]
    groups = np.array_split(rows, min(40, max(len(rows), 1)))
    ages, draws = ([values[group].mean() if len(group) else np.nan for group in groups]
                   for values in (found.experience.age, found.experience.draws))  # fmt: skip
    axes.plot(ages, draws, color=DARK, marker="o", markersize=3)
    axes.set(xlabel="age: transitions completed later", ylabel="times drawn, mean")
    axes.set_ylim(bottom=0)


def _priorities(axes: Any, found: Any) -> None:
    """The probability of each transition, the largest first: a flat line is uniform sampling."""
    numbers = found.experience.priorities
    share = np.sort(numbers)[::-1] / max(numbers.sum(), 1e-300)
    axes.loglog(np.arange(1, len(share) + 1), np.maximum(share, 1e-300), color=DARK, label="prioritized")
    axes.axhline(1 / len(share), color=GREY, linestyle=":", label="uniform")
    axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="transition, by its priority", ylabel="probability of being drawn")
