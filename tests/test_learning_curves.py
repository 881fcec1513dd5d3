"""The pictures that examples draw: their legend lies where no line and no dot runs through it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from support.common import Run, draw_phases, draw_together

GOAL: Any = SimpleNamespace(target=475.0, random=22.0, window=25, measure="mean return")


def run() -> Any:
    """A run whose returns rise from the bottom of the picture to the target."""
    returns = np.linspace(20, 500, 60)
    made: Any = object.__new__(Run)
    made.goal, made.name, made.env, made.target, made.done = GOAL, "PPO", "CartPole-v1", 475.0, 60_000
    made.episodes = [(1000 * k, float(x)) for k, x in enumerate(returns)]
    return made


@pytest.mark.parametrize("draw", [
    lambda path: run().draw(path, 7.0),
    lambda path: draw_together(path, "two", {"a": [run()], "b": [run(), run()]}),
    lambda path: draw_phases(path, "phases", [("cloned", 0, 20.0), ("then", 10, 90.0), ("then", 20, 99.0)]),
])  # fmt: skip
def test_nothing_strikes_through_a_legend(draw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw(tmp_path / "curve.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legends = [*figure.legends, *([axes.get_legend()] if axes.get_legend() else [])]
    assert len(legends) == 1
    assert not legends[0].get_window_extent().overlaps(axes.get_window_extent())
    assert len(legends[0].get_texts()) >= 2
