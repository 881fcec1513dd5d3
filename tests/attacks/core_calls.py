"""A right call of every name of the compiled core, over objects that fit each other, and values that do not."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive import core
from relive.core import _core
from relive.core.words import COUNTERS, FINALS, LANE_COUNTERS, LENGTH, STRIDE, TAILS, LaneArrays, RingArrays, StagedRows

N, ROWS, WIDTH = 2, 8, 64
"""Envs, rows of each, and bytes of a row of the ring: a step of 32, and bookkeeping in the last 16."""
BATCH = 96
"""Bytes of a batch's row."""
COVER = 2 * 7 * 3
"""The most nodes of a tree of 16 leaves that cover one range."""

Call = tuple[Callable[..., Any], dict[str, Any]]


def names() -> set[str]:
    """Every function, class, method and property of the core, as its types have them."""
    found: set[str] = set()
    for node in ast.parse(Path(str(_core.__file__)).with_name("_core.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def column(rows: Any, byte: int, dtype: Any) -> Any:
    """The numbers at a byte of packed rows ``[R, W]``, over the same memory."""
    return rows[:, byte : byte + np.dtype(dtype).itemsize].view(dtype)[:, 0]


def flags_of(rows: Any) -> tuple[Any, Any, Any]:
    """The rewards and flags of packed rows."""
    return column(rows, 16, np.float32), column(rows, 20, np.uint8), column(rows, 21, np.uint8)


def ring_arrays(length: int = 1, envs: int = N, rows: int = ROWS) -> RingArrays:
    """An empty ring that draws windows of so many steps, and notes the ends of episodes."""
    memory = np.zeros((envs * rows, WIDTH), np.uint8)
    counters = np.zeros(COUNTERS, np.int64)
    counters[[LENGTH, STRIDE, TAILS]] = length, 1, 1
    book = column(memory, 56, np.int32), column(memory, 48, np.int64), column(memory, 60, np.int32)
    ends, seen = np.zeros(envs * rows, np.int32), np.zeros(envs, np.int64)
    return RingArrays(
        rows, 32, 16, np.zeros((envs, 4), np.int64), counters, memory, *book, *flags_of(memory), ends, seen
    )


def staged_arrays(count: int = N) -> StagedRows:
    """Rows on their way into it, one of each env."""
    staged, final = (np.zeros((count, WIDTH), np.uint8) for _ in range(2))
    places = [np.zeros(count, np.int64) for _ in range(3)]
    room = 4 * count + N * ROWS
    envs = np.arange(count, dtype=np.int64) % N
    return StagedRows(
        envs, staged, final, *flags_of(staged), *places, np.zeros(room, np.int64), np.zeros(room, np.uint8)
    )


def call(function: Callable[..., Any], /, **arguments: Any) -> Call:
    """A call to be made, of a method with its object as ``self``."""
    return function, arguments


class World:
    """Objects of the core that fit each other, and the right calls of all its names by those."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.arrays, self.long = ring_arrays(), ring_arrays(3)
        self.staging = staged_arrays()
        self.ring, self.windows_ring, self.staged = (
            core.Ring(self.arrays),
            core.Ring(self.long),
            core.StagedRows(self.staging),
        )
        for _ in range(int(rng.integers(0, 20))):
            self.staging.staged[:, :32] = rng.integers(0, 256, (N, 32))
            self.staging.terminated[:], self.staging.truncated[:] = rng.random((2, N)) < 0.2
            for ring in (self.ring, self.windows_ring):
                core.add_rows(ring, self.staged, FINALS)
        places = N * ROWS
        offsets = core.tree_offsets(places)
        self.nodes, self.minima = np.zeros(offsets[-1] + 1), np.zeros(offsets[-1] + 1 - offsets[1])
        self.nodes[:places] = rng.random(places)
        self.tree = core.Tree(self.nodes, places, self.minima)
        self.tree.build()
        self.errors, self.facts, self.undo = np.ones(places, np.float32), np.array([0.6, 1e-6, 1.0, 0.0]), np.zeros(9)
        self.priorities = core.Priorities(self.tree, self.errors, self.facts, self.ring, self.undo)
        f4, i8 = torch.float32, torch.int64
        self.facts_of_rows = [
            ("obs", f4, (2,), 0),
            ("action", i8, (), 8),
            ("reward", f4, (), 16),
            ("done", torch.bool, (), 20),
            ("next", f4, (2,), 32),
            ("index", i8, (), 48),
            ("probability", torch.float64, (), 72),
            ("weight", f4, (), 80),
        ]
        self.fields = core.Fields(self.facts_of_rows, BATCH)
        large = [
            ("large", f4, (10,), None),
            ("stack", torch.uint8, (2, 9), None),
            ("next_stack", torch.uint8, (18,), None),
        ]
        self.fields_apart = core.Fields([*self.facts_of_rows, *large], BATCH)
        self.step_fields = core.Fields(self.facts_of_rows[:4], WIDTH)
        self.window_fields = core.Fields([("index", i8, (), 0), ("weight", f4, (), 56)], 64)
        apart, state = ("large", f4, (10,), None), ("state", torch.uint8, (9,), None)
        self.long_fields = core.Fields([*self.facts_of_rows[:4], apart], WIDTH)
        self.known_fields = core.Fields([("index", i8, (), 0), ("weight", f4, (), 56), state], 64)
        self.goal_fields = core.Fields([*self.facts_of_rows, apart, ("next_large", f4, (10,), None)], BATCH)
        block, states = (rng.integers(0, 256, (places, size), np.uint8) for size in (40, 9))
        self.layout = {
            "index": 48,
            "next_index": 56,
            "discount": 64,
            "steps": 68,
            "reward": 16,
            "terminated": 20,
            "truncated": 21,
            "step_bytes": 32,
            "next_at": 32,
            "next_bytes": 16,
            "own_at": 0,
            "own_bytes": 0,
        }
        self.window_layout = core.WindowLayout(**self.layout)
        self.sequence = {
            "reward": 16,
            "terminated": 20,
            "truncated": 21,
            "discount": 32,
            "steps": 36,
            "next": 40,
            "mask": 48,
            "is_start": 49,
            "step_bytes": 32,
            "obs_bytes": 16,
            "burn_in": 1,
            "n": 2,
            "time_first": True,
            "lasts": [(8, 56, 8, False)],
        }
        self.sequence_layout = core.SequenceLayout(**self.sequence)
        self.goal = {
            "window": self.window_layout,
            "goal_at": 0,
            "goal_bytes": 8,
            "into_obs": 0,
            "into_next": 32,
            "mark": 84,
            "strategy": int(rng.integers(5)),
            "finished": False,
        }
        self.goal_layout = core.GoalLayout(**self.goal)
        self.of_windows = {
            "ring": self.ring,
            "layout": self.window_layout,
            "fields": self.fields_apart,
            "probability_at": 72,
            "weight_at": 80,
            "in_files": False,
            "stacked": [(0, 8, 0, 32)],
            "depth": 2,
            "repeat": bool(rng.random() < 0.5),
            "large": [
                (rng.integers(0, 256, (places, 40), np.uint8), True, False, False),
                (rng.integers(0, 256, (places, 9), np.uint8), True, True, True),
            ],
        }
        self.of_sequences = {
            "ring": self.windows_ring,
            "layout": self.sequence_layout,
            "total": 6,
            "fields": self.long_fields,
            "facts": self.known_fields,
            "weighed": self.known_fields,
            "blank": np.zeros(WIDTH, np.uint8),
            "tabled": True,
            "in_files": False,
            "columns": [(block, False, block if rng.random() < 0.5 else None, True, True)],
            "states": [states],
        }
        self.of_goals = {
            "ring": self.ring,
            "layout": self.goal_layout,
            "fields": self.goal_fields,
            "weighed": self.goal_fields,
            "probability_at": 72,
            "weight_at": 80,
            "dtype": np.dtype(np.float32),
            "shape": [2],
            "in_files": False,
            "large": [(block, True, True, False)],
        }
        self.targets = [self.staging.staged[None, :, :8].view(np.float32), self.staging.reward[None], None]
        self.targets += [flag[None].view(bool) for flag in (self.staging.terminated, self.staging.truncated)]
        self.blocks = np.zeros((N * ROWS, 12), np.uint8)
        self.of_steps = {
            "paths": [("obs",), ("reward",), ("more", "large"), ("terminated",), ("truncated",)],
            "dtypes": [f4, f4, f4, torch.bool, torch.bool],
            "shapes": [(2,), (), (3,), (), ()],
            "count": N,
            "targets": self.targets,
            "finite": [("reward",)],
            "defaults": [np.zeros(N, np.bool_)],
        }
        self.steps = core.StepFields(**self.of_steps)
        self.of_adder = {
            "ring": self.ring,
            "staged": self.staged,
            "fields": self.steps,
            "large": [(2, self.blocks, False)],
            "mode": FINALS,
        }
        self.lane_arrays = LaneArrays(
            np.zeros(LANE_COUNTERS, np.int64),
            np.zeros(2, np.int32),
            np.zeros(4, np.uint8),
            *(np.zeros((4, N), np.uint8) for _ in range(3)),
        )
        self.pool = core.Pool()
        self.of_joined = {"fields": self.fields, "part_at": 88, "count": 0, "standing": None, "pool": self.pool}
        self.joined = core.JoinedRows(**self.of_joined)
        self.draws = [
            core.draw_by_chance(self.ring, 3, 5),
            core.draw_by_weight(self.tree, 3, 5),
            core.draw_by_weight(self.tree, 3, 5, ring=self.windows_ring, oldest=np.zeros(N, np.int64)),
            core.draw_by_priority(self.priorities, 3, 5, True, 0.4, 0.0),
        ]
        self.adder = core.StepAdder(**self.of_adder)
        self.lane, self.pages = core.Lane(self.lane_arrays), core.Pages([self.blocks, self.nodes])
        self.windows = core.Windows(**self.of_windows)
        self.sequences, self.goals = core.SequenceWindows(**self.of_sequences), core.GoalWindows(**self.of_goals)
        drawn: Any = self.goals.draw(np.arange(3), 3, 0.9, 7, 1.0) if self.arrays.state.any() else None
        self.goal_batch = drawn if isinstance(drawn, core.GoalBatch) else core.GoalBatch.__new__(core.GoalBatch)
        self.objects: list[Any] = [
            self.ring,
            self.windows_ring,
            self.staged,
            self.tree,
            self.priorities,
            self.fields,
            self.step_fields,
            self.window_fields,
            self.window_layout,
            self.sequence_layout,
            self.goal_layout,
            self.steps,
            self.adder,
            self.lane,
            self.pages,
            self.windows,
            self.sequences,
            self.goals,
            self.goal_batch,
            self.pool,
            self.joined,
            *self.draws,
        ]

    def calls(self) -> dict[str, Call]:
        """A right call of every name; its arrays are new each time."""
        rng, places = self.rng, self.rng.integers(0, N * ROWS, 3)
        step = {
            "obs": np.ones((N, 2), np.float32),
            "reward": [1.0, 2.0],
            "more": {"large": torch.ones(N, 3)},
            "terminated": np.zeros(N, bool),
            "truncated": np.zeros(N, bool),
        }
        draw = self.draws[int(rng.integers(3 + (rng.random() < 0.5)))] if rng.random() < 0.7 else places
        rows = np.zeros((3, BATCH), np.uint8)
        long = np.zeros(COVER, np.int64), np.zeros(COVER)
        counts, bells = rng.integers(0, 9, 4), np.zeros(2, np.int32)
        flags = (rng.random((3, 5, N)) < 0.3).astype(np.uint8)
        grid: dict[str, Any] = {
            name: torch.rand(5, N) for name in ("reward", "ratio", "advantage", "ret", "final_value")
        }
        grid |= {name: torch.rand(5, N) < 0.2 for name in ("terminated", "truncated", "mask")} | {
            "value": torch.rand(6, N)
        }

        def columns(*more: str) -> dict[str, Any]:
            common = ("reward", "value", "terminated", "truncated", "final_value", "mask", *more)
            return {name: grid[name] for name in common}

        factors = {"steps": 5, "gamma": 0.9, "widest": bool(rng.random() < 0.5)}
        first, lengths, is_start = (np.array(x) for x in ([0, 2, 4], [3, 1, 0], [1, 0, 0]))
        runs = {"source": np.zeros((9, WIDTH), np.uint8), "first": first, "step": 2, "lengths": lengths}
        runs["pad"] = np.zeros(WIDTH, np.uint8)
        limit = {"count": 2, "ratio": 1.5, "min_size": 3, "low": -4.0, "high": 4.0}
        cover = {"places": np.array([0]), "until": np.array([0.5])}
        rated = {"index": np.arange(3), "errors": np.ones(3, np.float32)}
        of_tree = {"nodes": self.nodes.copy(), "leaves": N * ROWS, "minima": self.minima.copy()}
        source = {"source": np.ones((9, BATCH), np.uint8), "places": places % 9}
        rewards = np.ones(self.goal_batch.total) if is_ready(self.goal_batch) else None
        batch, ring, tree = self.goal_batch, self.ring, self.tree

        def get(thing: Any, name: str) -> Call:
            return vars(type(thing))[name].fget, {"self": thing}

        def set_minima(tree: Any, array: Any) -> None:
            core.Tree.minima.__set__(tree, array)

        found: dict[str, Call] = {
            "Ring.__init__": call(core.Ring, arrays=self.arrays),
            "Ring.rebind": call(core.Ring.rebind, self=ring, arrays=self.arrays),
            "Ring.changed": call(core.Ring.changed, self=ring),
            "StepFields.__init__": call(core.StepFields, **self.of_steps),
            "StepFields.leaves": call(core.StepFields.leaves, self=self.steps, step=step),
            "StepFields.take": call(core.StepFields.take, self=self.steps, row=0, step=step, finite=True),
            "StepAdder.__init__": call(core.StepAdder, **self.of_adder),
            "StepAdder.add": call(core.StepAdder.add, self=self.adder, step=step, finite=True),
            "StagedRows.__init__": call(core.StagedRows, arrays=self.staging),
            "StagedRows.take_envs": call(core.StagedRows.take_envs, self=self.staged, envs=rng.permutation(N)),
            "plan_rows": call(core.plan_rows, ring=ring, staged=self.staged, mode=FINALS),
            "add_rows": call(core.add_rows, ring=ring, staged=self.staged, mode=FINALS),
            "scatter_rows": call(
                core.scatter_rows, source=rows.copy(), places=places, target=np.zeros((16, BATCH), np.uint8), nbytes=8
            ),
            "mix": call(core.mix, z=5),
            "key": call(core.key, seed=5, counter=3),
            "masses": call(core.masses, stream=1, stratified=True, total=2.0, out=np.zeros(3)),
            "permute": call(core.permute, seed=1, counter=2, order=np.zeros(5, np.int64)),
            "window": call(core.window, ring=ring, newest=2, first=np.zeros(N, np.int64), until=np.zeros(N, np.int64)),
            "window_runs": call(
                core.window_runs, ring=ring, newest=2, begins=np.zeros(2 * N, np.int64), ends=np.zeros(2 * N, np.int64)
            ),
            "count_complete": call(core.count_complete, ring=ring),
            "draw": call(core.draw, ring=ring, stream=1, newest=3, places=places),
            "ids_of": call(core.ids_of, ring=ring, places=places, index=np.zeros(3, np.int64)),
            "live": call(core.live, ring=ring, index=places, places=np.zeros(3, np.int64)),
            "ages": call(core.ages, ring=ring),
            "count_fresh": call(core.count_fresh, ring=ring, next=np.zeros(N, np.int64)),
            "take_fresh": call(core.take_fresh, ring=ring, next=np.zeros(N, np.int64), places=np.zeros(3, np.int64)),
            "anchors": call(core.anchors, ring=ring, out=np.zeros(16, np.int64)),
            "Tree.__init__": call(core.Tree, **of_tree),
            "Tree.minima": call(set_minima, tree=tree, array=self.minima.copy()),
            "Tree.__reduce__": call(core.Tree.__reduce__, self=tree),
            "Tree.build": call(core.Tree.build, self=tree),
            "Tree.set": call(core.Tree.set, self=tree, positions=places, values=rng.random(3)),
            "Tree.get": call(core.Tree.get, self=tree, positions=places, out=np.zeros(3)),
            "Tree.cover": call(
                core.Tree.cover, self=tree, begins=np.array([1]), ends=np.array([9]), places=long[0], until=long[1]
            ),
            "Tree.find": call(core.Tree.find, self=tree, **cover, masses=rng.random(2) / 2, out=np.zeros(2, np.int64)),
            "Tree.lowest": call(core.Tree.lowest, self=tree, begins=np.array([1]), ends=np.array([9])),
            "tree_offsets": call(core.tree_offsets, leaves=16),
            "Priorities.__init__": call(
                core.Priorities, tree=tree, errors=self.errors, facts=self.facts, ring=ring, undo=self.undo
            ),
            "Priorities.note_drawable": call(
                core.Priorities.note_drawable,
                self=self.priorities,
                places=places,
                drawable=np.ones(3, np.uint8),
                error=1.0,
                weight=1.0,
            ),
            "Priorities.rate": call(
                core.Priorities.rate, self=self.priorities, **rated, mask=None, time_first=False, eta=0.9
            ),
            "powers": call(core.powers, errors=np.ones(3, np.float32), alpha=0.6, eps=1e-06, out=np.zeros(3)),
            "WindowLayout.__init__": call(core.WindowLayout, **self.layout),
            "read_windows": call(
                core.read_windows,
                ring=ring,
                layout=self.window_layout,
                places=places,
                steps=3,
                gamma=0.9,
                out=rows,
                last=np.zeros(3, np.int64),
            ),
            "gather_rows": call(core.gather_rows, **source, out=rows.copy(), start=8, nbytes=16),
            "stack_places": call(
                core.stack_places, ring=ring, places=places, depth=4, repeat=True, out=np.zeros((3, 4), np.int64)
            ),
            "SequenceLayout.__init__": call(core.SequenceLayout, **self.sequence),
            "SequenceWindows.__init__": call(core.SequenceWindows, **self.of_sequences),
            "SequenceWindows.sample": call(core.SequenceWindows.sample, self=self.sequences, draw=draw, gamma=0.9),
            "GoalLayout.__init__": call(core.GoalLayout, **self.goal),
            "GoalBatch.relabel": call(
                core.GoalBatch.relabel, self=batch, rewards=rewards, terminated=None, truncated=None
            ),
            "GoalBatch.fields": call(core.GoalBatch.fields, self=batch),
            "GoalWindows.__init__": call(core.GoalWindows, **self.of_goals),
            "GoalWindows.draw": call(
                core.GoalWindows.draw, self=self.goals, draw=draw, steps=3, gamma=0.9, key=7, ratio=0.8
            ),
            "Pool.__init__": call(core.Pool),
            "Pool.take": call(core.Pool.take, self=self.pool, nbytes=2**20),
            "Pool.kept": get(self.pool, "kept"),
            "Pool.__reduce__": call(core.Pool.__reduce__, self=self.pool),
            "Fields.__init__": call(core.Fields, fields=list(self.facts_of_rows), width=BATCH),
            "Fields.__reduce__": call(core.Fields.__reduce__, self=self.fields),
            "Fields.tensors": call(core.Fields.tensors, self=self.fields, rows=rows.copy()),
            "Fields.pack": call(
                core.Fields.pack,
                self=self.window_fields,
                columns=(np.arange(4), np.ones(4, np.float32)),
                rows=np.zeros((4, 64), np.uint8),
                steps=2,
            ),
            "take_rows": call(core.take_rows, source=source["source"], index=places % 9, out=rows.copy()),
            "take_fields": call(
                core.take_fields,
                source=source["source"],
                index=places % 9,
                parts=(self.fields,),
                dicts=({},),
                pool=self.pool,
            ),
            "take_columns": call(
                core.take_columns,
                columns=(np.arange(9), np.ones(9, np.float32)),
                fields=self.window_fields,
                index=places % 9,
                parts=(self.window_fields,),
                dicts=({},),
                pool=self.pool,
            ),
            "give_back": call(core.give_back, refusing={}, batch={"a": {"b": 1}}),
            "nested": call(core.nested, leaves={("a", "b"): 1, ("c",): 2, ("a", "d"): 3}, kind=dict),
            "Standing.__init__": call(core.Standing, slots=2),
            "Standing.lent": get(core.Standing(2), "lent"),
            "JoinedRows.__init__": call(core.JoinedRows, **self.of_joined),
            "JoinedRows.part": get(self.joined, "part"),
            "JoinedRows.tensors": call(core.JoinedRows.tensors, self=self.joined),
            "Draw.standing": get(self.draws[0], "standing"),
            "Draw.count": get(self.draws[0], "count"),
            "Draw.weighed": get(self.draws[3], "weighed"),
            "Draw.__len__": call(core.Draw.__len__, self=self.draws[0]),
            "Draw.__iter__": call(lambda self: list(core.Draw.__iter__(self)), self=self.draws[0]),
            "Draw.__getitem__": call(item_of, self=self.draws[1], arg=1),
            "draw_by_chance": call(core.draw_by_chance, ring=ring, count=3, key=5, newest=2),
            "draw_by_weight": call(
                core.draw_by_weight,
                tree=tree,
                count=3,
                key=5,
                **cover,
                ring=self.windows_ring,
                oldest=np.zeros(N, np.int64),
            ),
            "draw_by_priority": call(
                core.draw_by_priority,
                priorities=self.priorities,
                count=3,
                key=5,
                stratified=True,
                beta=0.4,
                lowest=0.1,
                **cover,
            ),
            "Windows.__init__": call(core.Windows, **self.of_windows),
            "Windows.sample": call(
                core.Windows.sample,
                self=self.windows,
                draw=draw,
                steps=3,
                gamma=0.9,
                kind=None,
                sums=lambda anchors, steps: np.zeros(len(steps), np.float32),
            ),
            "is_grid": call(core.is_grid, **columns("ratio")),
            "fill_gae": call(core.fill_gae, **columns("advantage", "ret"), **factors, lam=0.9),
            "fill_returns": call(core.fill_returns, **columns("ret"), **factors),
            "fill_vtrace": call(
                core.fill_vtrace, **columns("ratio", "advantage", "ret"), **factors, lam=0.9, rho_clip=1.0, c_clip=1.0
            ),
            "episode_starts": call(
                core.episode_starts, done=flags[0], real=flags[1], ended=np.zeros(N, np.uint8), starts=flags[2]
            ),
            "plan_windows": call(
                core.plan_windows,
                done=flags[0],
                real=flags[1],
                starts=flags[2],
                length=2,
                stride=1,
                tails=True,
                complete=False,
            ),
            "copy_windows": call(core.copy_windows, **runs, out=np.zeros((3, 3, WIDTH), np.uint8)),
            "take_windows": call(
                core.take_windows, **runs, length=3, fields=self.step_fields, time_first=True, pool=self.pool, into={}
            ),
            "mark_windows": call(_core.mark_windows, lengths=lengths, is_start=is_start, length=4),
            "publish": call(core.publish, counters=counts, place=1, value=3, bells=bells, bell=0),
            "published": call(core.published, counters=counts, place=1),
            "mark_bell": call(core.mark_bell, bells=bells, place=0),
            "ring_bell": call(core.ring_bell, bells=bells, place=0),
            "add_count": call(core.add_count, counts=counts, place=1, amount=2),
            "admit": call(core.admit, counts=counts, side=0, **limit),
            "admit_noted": call(core.admit_noted, counts=counts, note=np.zeros(1, np.int64), **limit),
            "confirm": call(core.confirm, counts=counts, note=np.zeros(1, np.int64)),
            "take_back": call(core.take_back, counts=counts, note=np.zeros(1, np.int64)),
            "Lane.__init__": call(core.Lane, arrays=self.lane_arrays),
            "Lane.commit": call(core.Lane.commit, self=self.lane, number=5, marks=4),
            "Pages.__init__": call(core.Pages, arrays=[self.blocks, np.zeros(3)]),
            "Pages.ask_for": call(core.Pages.ask_for, self=self.pages, begins=np.array([0, 2]), ends=np.array([1, 9])),
            "Pages.row_bytes": get(self.pages, "row_bytes"),
            "scale": call(core.scale, x=torch.rand(4, 3), mask=torch.rand(4, 3) < 0.5, eps=1e-06),
            "weigh_windows": call(
                core.weigh_windows, tree=tree, ring=ring, places=places, drawable=np.ones(3, np.uint8)
            ),
            "build_info": call(core.build_info),
        }
        for kind, thing in (
            ("WindowLayout", self.window_layout),
            ("SequenceLayout", self.sequence_layout),
            ("GoalLayout", self.goal_layout),
            ("GoalBatch", batch),
        ):
            found |= {
                f"{kind}.{name}": get(thing, name) for name in vars(getattr(core, kind)) if is_property(kind, name)
            }
        return found


def is_property(kind: str, name: str) -> bool:
    return not name.startswith("_") and not callable(getattr(core, kind).__dict__[name])


def item_of(self: Any, arg: Any) -> Any:
    """Of a draw; the method takes no names."""
    return core.Draw.__getitem__(self, arg)


def is_ready(batch: Any) -> bool:
    try:
        return batch.total >= 0
    except TypeError:
        return False
