"""Shared by the examples, but no part of an algorithm: command line, display, plot, and two small envs."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from torch import Tensor

WINDOW = 100
"""Number of last episodes in a mean return, unless a goal has its own."""


@dataclass(frozen=True)
class Goal:
    """What to reach in an env, as a mean return or another measure, and within how many steps."""

    random: float
    """The mean return of random play."""
    target: float
    """The mean return that counts as learned."""
    steps: int
    """Transitions of all envs together."""
    short: tuple[int, float]
    """Steps and target of a short run. It ends as soon as it reaches the target, and fails if it does not. A target of
    -inf means that the run is too short to learn anything."""
    stop: float = math.inf
    """The mean return that ends a run early. It is above the target, so that luck alone does not end a run."""
    window: int = WINDOW
    """Number of last episodes in a mean return."""
    measure: str = "mean return"
    """The name of the mean over episodes."""


def command_line(doc: str | None, env: str, *more: str) -> argparse.ArgumentParser:
    """The options of all examples; ``doc`` is the example's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=(env, *more), help=f"what to learn (default {env})")
    parser.add_argument("--seed", type=int, default=0, help="of the envs, the networks and the minibatches (default 0)")
    parser.add_argument("--steps", type=int, help="transitions to learn from, over all envs, at most")
    parser.add_argument("--num-envs", type=int, help="envs that are played side by side")
    parser.add_argument("--plot", type=Path, help="where the learning curve goes (default runs/NAME-ENV.png)")
    parser.add_argument("--short", action="store_true", help="a run of seconds that fails if it has not learned")
    parser.add_argument("--device", default="cpu", help="of the networks and the rollout (default cpu)")
    return parser


class Run:
    """A training run: shows its progress, knows when it is over, and sums up at the end.

    On a terminal the display is live; elsewhere it prints ten lines. Leaving the ``with`` block prints the result,
    draws the learning curve (unless it is ``drawn_later``, together with others), and exits with 1 if a short run
    missed its target.
    """

    def __init__(self, name: str, env: str, goal: Goal, args: argparse.Namespace, *, drawn_later: bool = False) -> None:
        self.name, self.env, self.goal, self.short = name, env, goal, args.short
        steps, self.target = goal.short if args.short else (goal.steps, goal.target)
        self.aim = "no target" if self.target == -math.inf else f"target {self.target:g}"
        self.steps, self.stop = args.steps or steps, goal.stop
        if args.short and self.target > -math.inf:
            self.stop = self.target
        plot = args.plot or (None if args.short else Path(f"runs/{name.lower()}-{env}.png"))
        self.plot = None if drawn_later else plot
        self.done, self.losses = 0, dict[str, float]()
        self.episodes: list[tuple[int, float]] = []  # (transitions so far, return) of every episode that ended
        self.began, self.printed = time.perf_counter(), 0
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, get_renderable=self._panel, refresh_per_second=5)

    def __enter__(self) -> Run:
        if self.console.is_terminal:
            self.live.start()
        else:
            print(f"{self.name} on {self.env}: {self.steps:,} steps at most", flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.live.stop()
        interrupted = kind is KeyboardInterrupt  # Ctrl-C ends a run early; its result is still printed
        if kind is None or interrupted:
            self._sum_up()
        return interrupted

    @property
    def remaining(self) -> float:
        """The fraction of the run that is left, from 1 to 0. Learning rates are multiplied by it."""
        return max(0.0, 1 - self.done / self.steps)

    @property
    def mean(self) -> float:
        """The mean return of the last episodes, a hundred unless the goal has its own number."""
        return float(np.mean([value for _, value in self.episodes[-self.goal.window :]])) if self.episodes else math.nan

    @property
    def over(self) -> bool:
        """Whether all steps are used, or the last episodes were good enough to stop."""
        return self.done >= self.steps or (len(self.episodes) >= self.goal.window and self.mean >= self.stop)

    def update(self, steps: int, returns: list[float], **losses: Tensor) -> None:
        """Record one round: transitions so far, returns of the episodes that ended in it, losses."""
        self.done = steps
        self.episodes += [(steps, value) for value in returns]
        self.losses = {name: float(value.detach()) for name, value in losses.items()}
        tenth = 10 * steps // self.steps
        if not self.console.is_terminal and tenth > self.printed:
            self.printed = tenth
            print("  " + "  ".join(f"{name} {value}" for name, value in self._figures()), flush=True)

    def _sum_up(self) -> None:
        reached = self.target == -math.inf or self.mean >= self.target
        verdict = "" if self.target == -math.inf else ": reached" if reached else ": missed"
        last, seconds = min(self.goal.window, len(self.episodes)), self._seconds()
        print(
            f"{self.name} on {self.env}: {self.goal.measure} {self.mean:.4g} over the last {last} episodes after "
            f"{self.done:,} steps in {seconds:.0f} s\n"
            f"  {self.aim}{verdict}; random play: {self.goal.random:g}"
        )
        if self.plot is not None and self.episodes:
            self.draw(self.plot, seconds)
            print(f"  learning curve: {self.plot}")
        if self.short and not reached:
            raise SystemExit(1)

    def _seconds(self) -> float:
        return time.perf_counter() - self.began

    def _figures(self) -> list[tuple[str, str]]:
        return [
            ("steps", f"{self.done:,}"),
            ("steps/s", f"{self.done / self._seconds():,.0f}"),
            ("episodes", f"{len(self.episodes):,}"),
            (self.goal.measure, f"{self.mean:.4g}"),
            *((name.replace("_", " "), f"{value:.3g}") for name, value in self.losses.items()),
        ]

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2), expand=True)
        figures = self._figures()
        for _ in figures:
            table.add_column(justify="right", ratio=1)
        table.add_row(*(f"[dim]{name}" for name, _ in figures))
        table.add_row(*(f"[bold]{value}" for _, value in figures))
        bar = ProgressBar(total=self.steps, completed=min(self.done, self.steps))
        title = f"[bold]{self.name}[/] on [bold]{self.env}[/], {self.aim}"
        spent = f"[dim]{self._seconds():.0f} s"
        return Panel(Group(table, bar), title=title, title_align="left", subtitle=spent, subtitle_align="right")

    def draw(self, path: Path, seconds: float) -> None:
        """Draw the learning curve into a file; the title says how long it took."""
        from matplotlib.figure import Figure  # takes a second to import; a short run does not need it

        steps, returns = (np.array(column, dtype=np.float64) for column in zip(*self.episodes, strict=True))
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        axes = figure.subplots()
        faint = min(0.6, max(0.06, 300 / len(steps)))  # thousands of dots must still show where they are dense
        axes.scatter(steps, returns, s=10, color="#5b9bd5", alpha=faint, linewidths=0, label="one episode")
        smooth = f"mean of the last {self.goal.window} episodes"
        axes.plot(*self.curve(), color="#1f4e79", linewidth=2, label=smooth)
        for level, label, color, style in (
            (self.target, "target", "#c0504d", "--"),
            (self.goal.random, "random play", "#7f7f7f", ":"),
        ):
            axes.axhline(level, color=color, linewidth=1.2, linestyle=style, label=f"{label}: {level:g}")
        axes.set_title(f"{self.name} on {self.env}", loc="left", fontweight="bold")
        axes.set_title(
            f"{self.goal.measure} {self.mean:.4g} after {seconds:.0f} s", loc="right", fontsize=10, color="#595959"
        )
        _dress(axes, steps[-1])
        _explain(figure).legend_handles[0].set_alpha(0.6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", pad_inches=0.15)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The learning curve: transitions at the end of each round, and the mean return of the episodes before it."""
        steps, returns = (np.array(column, dtype=np.float64) for column in zip(*self.episodes, strict=True))
        total = np.concatenate([[0.0], returns.cumsum()])
        first = np.maximum(np.arange(1, len(total)) - self.goal.window, 0)
        mean = (total[1:] - total[first]) / (np.arange(1, len(total)) - first)
        rounds = np.flatnonzero(np.diff(steps, append=np.inf))  # the last episode of each round
        return steps[rounds], mean[rounds]


def draw_together(path: Path, title: str, groups: Mapping[str, Sequence[Run]]) -> None:
    """The learning curves of several runs in one plot. Runs of one group, such as seeds, share a color."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    colors = "#1f4e79", "#c0504d", "#7f7f7f", "#4f9a4f"
    for color, (name, runs) in zip(colors, groups.items(), strict=False):
        mean = float(np.mean([run.mean for run in runs]))
        for k, run in enumerate(runs):
            label = f"{name}: {mean:.4g} at the end" if k == 0 else None
            axes.plot(*run.curve(), color=color, linewidth=2, alpha=1 if len(runs) == 1 else 0.6, label=label)
    goal = next(iter(groups.values()))[0].goal
    axes.axhline(goal.target, color="#a5a5a5", linewidth=1.2, linestyle="--", label=f"target: {goal.target:g}")
    axes.axhline(goal.random, color="#a5a5a5", linewidth=1.2, linestyle=":", label=f"random play: {goal.random:g}")
    axes.set_title(title, loc="left", fontweight="bold")
    _dress(axes, max(run.done for runs in groups.values() for run in runs))
    windows = sorted({run.goal.window for runs in groups.values() for run in runs})
    axes.set_ylabel(f"{goal.measure} of the last {' or '.join(map(str, windows))} episodes")
    _explain(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.15)
    print(f"  learning curves: {path}")


def draw_phases(path: Path, title: str, curve: Sequence[tuple[str, int, float]]) -> None:
    """A learning curve in phases: phase, gradient steps so far in it, mean return. The first one has a single point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    (first, _, level), *rest = curve
    axes.axhline(level, color="#7f7f7f", linewidth=1.2, linestyle=":", label=f"{first}: {level:.4g}")
    begin = 0
    for color, phase in zip(("#1f4e79", "#c0504d"), dict.fromkeys(name for name, *_ in rest), strict=False):
        steps, values = zip(*((begin + done, value) for name, done, value in rest if name == phase), strict=True)
        label = f"{phase}: {values[-1]:.4g} at the end"
        axes.plot(steps, values, color=color, linewidth=2, marker="o", markersize=4, label=label)
        begin = steps[-1]
    _dress(axes, begin)
    axes.set_xlabel("gradient steps")
    axes.set_title(title, loc="left", fontweight="bold")
    _explain(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.15)
    print(f"  learning curve: {path}")


def _explain(figure: Any) -> Any:
    """A legend below the axes, where no line or dot of theirs can run through it."""
    return figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=9, markerscale=2)


def _dress(axes: Any, steps: float) -> None:
    axes.set_xlabel("experience (transitions over all envs)")
    axes.set_ylabel("return per episode (sum of rewards)")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_xlim(0, steps * 1.02)
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


class LilyPads(gym.Env[np.ndarray, np.int64]):
    """A frog crosses a pond in jumps of -4 to 4. Only three of these eight land on a pad, and they change each time.

    ``info["action_mask"]`` shows which three, and the observation does not. Any other jump drowns the frog: reward -1,
    and the episode ends. The far bank gives 1, every other jump costs 0.02. At dusk, after 40 jumps, it is truncated.
    """

    WIDTH, DUSK, JUMPS = 20, 40, (-4, -3, -2, -1, 1, 2, 3, 4)

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(len(self.JUMPS))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = self.jumps = 0
        return self._look()

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        drowned = not self.pads[action]
        self.place, self.jumps = max(0, self.place + self.JUMPS[action]), self.jumps + 1
        across = self.place >= self.WIDTH and not drowned
        reward = -1.0 if drowned else 1.0 if across else -0.02
        obs, info = self._look()
        return obs, reward, drowned or across, self.jumps >= self.DUSK, info

    def _look(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.pads = np.zeros(len(self.JUMPS), np.bool_)
        self.pads[self.np_random.choice(len(self.JUMPS), 3, replace=False)] = True
        return np.array([self.place / self.WIDTH], np.float32), {"action_mask": self.pads}


class Courtyard(gym.Env[dict[str, Any], np.int64]):
    """Walk to a goal among four pillars. The picture shows where you are, ``goal`` where to go.

    Observations are nested: ``{"picture": uint8 [5, 5], "goal": {"row": int, "column": int}}``. The goal gives 1,
    every other step costs 0.05, and after 30 steps the walk is truncated.
    """

    SIZE, LIMIT, MOVES = 5, 30, ((-1, 0), (1, 0), (0, -1), (0, 1))
    PILLARS = ((1, 1), (1, 3), (3, 1), (3, 3))

    def __init__(self) -> None:
        cell = gym.spaces.Discrete(self.SIZE)
        picture = gym.spaces.Box(0, 255, (self.SIZE, self.SIZE), np.uint8)
        self.observation_space = gym.spaces.Dict(picture=picture, goal=gym.spaces.Dict(row=cell, column=cell))
        self.action_space = gym.spaces.Discrete(len(self.MOVES))
        self.free = [(r, c) for r in range(self.SIZE) for c in range(self.SIZE) if (r, c) not in self.PILLARS]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        here, goal = self.np_random.choice(len(self.free), 2, replace=False)
        self.here, self.goal, self.walked = self.free[here], self.free[goal], 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[dict, float, bool, bool, dict]:
        down, right = self.MOVES[action]
        there = (self.here[0] + down, self.here[1] + right)
        self.here, self.walked = there if there in self.free else self.here, self.walked + 1
        arrived = self.here == self.goal
        return self._look(), 1.0 if arrived else -0.05, arrived, self.walked >= self.LIMIT, {}

    def _look(self) -> dict[str, Any]:
        picture = np.zeros((self.SIZE, self.SIZE), np.uint8)
        picture[tuple(zip(*self.PILLARS, strict=True))] = 128
        picture[self.here] = 255
        return {"picture": picture, "goal": {"row": self.goal[0], "column": self.goal[1]}}
