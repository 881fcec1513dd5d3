"""A replay buffer and its naive twin, played side by side: every item it hands out is looked up in the episodes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relive import (
    FrameStack,
    Fresh,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    SequenceBatch,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive import (
    Sequence as SequenceView,
)
from relive.batches import leaves_by_path
from relive.steps.schema import Path
from relive.views.contract import rule_of
from support import internals, oracle, tagged_envs

KINDS: dict[str, tagged_envs.Kind | None] = {".": None, "T": "terminated", "U": "truncated", "B": "both"}
"""How one letter of a play says that a step ends: it goes on, terminates, is truncated, both."""

POISON = 77
"""What stands in the next_obs of a step that goes on, and in all fields of a row that is masked, unless it was
truncated: nobody may see it."""

EXACT_GAMMAS = (0.0, 0.5, 1.0)
"""Discounts by which rewards of tagged envs are summed without rounding."""

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "without replacement": WithoutReplacement,
    "prioritized, stratified": Prioritized,
    "prioritized, independent": lambda: Prioritized(stratified=False, normalize="buffer"),
    "recent, uniform": lambda: Recent(0.9, 2),
    "recent, prioritized": lambda: Recent(0.9, 2, inner=Prioritized()),
    "fresh": Fresh,
}

VIEWS: dict[str, Callable[[], Any]] = {
    "transition": lambda: Transition(0.5),
    **{f"{n}-step": lambda n=n: NStep(n, 0.5) for n in (2, 3, 5)},
    **{
        f"stack of {depth} {pad}, {n}-step": lambda depth=depth, pad=pad, n=n: FrameStack(depth, NStep(n, 0.5), pad)
        for depth, pad, n in ((1, "repeat", 1), (2, "zeros", 1), (4, "repeat", 1), (4, "zeros", 3), (3, "repeat", 3))
    },
}


def image_of(obs: np.ndarray) -> np.ndarray:
    """A uint8 image of more than 1,024 bytes, which is stored apart: an observation's bytes over and over."""
    return np.tile(obs.astype("<u4").view(np.uint8), 72).reshape(36, 32)


def goals_of(obs: np.ndarray, achieved: np.ndarray) -> dict[str, np.ndarray]:
    """An observation with goals: the one achieved names the row it is of, the one desired is that of no row."""
    return {"observation": obs[:3], "achieved_goal": achieved, "desired_goal": np.full_like(achieved, 99)}


SEQUENCES: dict[str, Callable[[], SequenceView]] = {
    "pairs": lambda: SequenceView(2, gamma=0.5),
    "of 3, burn-in 2, 2-step": lambda: SequenceView(3, 2, "none", 2, 0.5),
    "of 4, half, batch first, 3-step": lambda: SequenceView(4, 1, "half", 3, 0.5, time_first=False),
    "of 5, 2 shared, whole ones": lambda: SequenceView(5, 0, 2, 2, 0.5, drop_tail=True),
    "of 2, burn-in 1, 2-step, the step before": lambda: SequenceView(2, 1, "none", 2, 0.5, last=("reward", "action")),
    "of 40": lambda: SequenceView(40, 3, "none", 1, 0.5),
}
"""Windows shorter and longer than most episodes of these tests."""


def recurrent(step: Mapping[str, Any]) -> dict[str, Any]:
    """Extras of a step that tell which one it is: the state before it, of two layers and of none, and legal actions."""
    tag = np.asarray(step["obs"], np.float32)
    legal = np.array([True, tag[2] % 2 == 0, tag[1] % 2 == 0])
    return {"hidden": (np.stack([tag, tag + 0.5]), tag[:3] * 2), "action_mask": legal}


DRESSES: dict[str, tuple[tagged_envs.Observations, Callable[[Any], Any]]] = {
    "box": ("box", lambda obs: obs),
    "dict": ("dict", lambda obs: obs),
    "tuple": ("tuple", lambda obs: obs),
    "large": ("box", lambda obs: np.repeat(obs[:, None], 80, axis=1)),
    "image": ("box", image_of),
    "mixed": ("box", lambda obs: {"state": obs, "camera": image_of(obs)}),
    "goals": ("box", lambda obs: goals_of(obs, obs)),
    "image goals": ("box", lambda obs: goals_of(obs, image_of(obs))),
    "goals and images": ("box", lambda obs: {**goals_of(obs, obs), "observation": image_of(obs)}),
}
"""Observations of each kind, made of tagged ones: small and large, plain and nested."""


def leaves(tree: Any, at: Path = ()) -> dict[Path, Any]:
    """The arrays of nested mappings and tuples, by path."""
    if isinstance(tree, tuple):
        tree = {str(i): member for i, member in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {at: tree}
    return {path: leaf for name, member in tree.items() for path, leaf in leaves(member, (*at, name)).items()}


def mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """``function`` of the leaves of alike trees, in a tree like them."""
    if isinstance(trees[0], Mapping):
        return {name: mapped(function, *(tree[name] for tree in trees)) for name in trees[0]}
    if isinstance(trees[0], tuple):
        return tuple(mapped(function, *members) for members in zip(*trees, strict=True))
    return function(*trees)


def stacked(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of several steps, or of several vector steps, with a leading axis."""
    return mapped(lambda *arrays: np.array(arrays), *steps)  # a fraction of the time that np.stack takes


def poisoned(tree: Any) -> Any:
    """Arrays like these with nothing in them that was ever observed."""
    return mapped(lambda array: np.full_like(array, POISON), tree)


class Twin:
    """A buffer, the oracle that knows what it should hold, and the tagged envs that both are told of.

    Args:
        num_envs: N.
        rows: rows per env.
        dress: what observations look like, of DRESSES.
        extras: further fields of a step, made of a tagged one.
        ordered: as the buffer's.
        options: of the buffer: sampler, view, seed.
    """

    def __init__(
        self,
        num_envs: int = 1,
        rows: int = 5,
        *,
        dress: str = "box",
        extras: Callable[[Any], dict[str, Any]] = lambda step: {},
        ordered: bool = True,
        **options: Any,
    ) -> None:
        observations, self._dress = DRESSES[dress]
        self._extras = extras
        self.lives = [tagged_envs.Life(env, observations=observations) for env in range(num_envs)]
        self.truth = oracle.Replay(num_envs, rows, alone=not ordered)
        example = self._dressed(tagged_envs.Life(0, observations=observations).step())
        self.schema = Schema.from_example({name: value for name, value in example.items() if name != "next_obs"})
        self.options = {"seed": 0, "ordered": ordered, **options}
        self.buffer = ReplayBuffer(self.schema, rows * num_envs, num_envs, **self.options)
        self.num_envs, self.ordered = num_envs, ordered

    # What happens, in both.

    def add(self, kinds: str, envs: Sequence[int] | None = None, mask: Sequence[bool] | None = None) -> None:
        """One step of each of ``envs``, ended as the letters of KINDS say; a masked one is cut off instead.

        If it was truncated, the step before it has its next observation; else nothing of it counts.
        """
        step = self.step(kinds, envs, mask)
        self.buffer.add(step) if envs is None else self.buffer.add(step, envs=np.array(envs))

    def extend(self, plays: Sequence[str], masks: Sequence[Sequence[bool]] | None = None) -> None:
        """Several vector steps of all envs at once."""
        which = [None] * len(plays) if masks is None else masks
        steps = [self.step(kinds, mask=mask, final=True) for kinds, mask in zip(plays, which, strict=True)]
        self.buffer.extend(stacked(steps))

    def play(self, *plays: str) -> Twin:
        """Vector steps one after another; "|" interrupts all envs, "x" clears."""
        for kinds in plays:
            {"|": self.interrupt, "x": self.clear}.get(kinds, lambda kinds=kinds: self.add(kinds))()
        return self

    def interrupt(self, envs: Sequence[int] | None = None) -> None:
        """What is under way does not go on."""
        for env in range(self.num_envs) if envs is None else envs:
            self.truth.interrupt(env)
            self.lives[env].restart()
        self.buffer.interrupt() if envs is None else self.buffer.interrupt(np.array(envs))

    def clear(self) -> None:
        """Everything is forgotten."""
        self.truth.clear()
        for life in self.lives:
            life.restart()
        self.buffer.clear()

    def step(
        self, kinds: str, envs: Sequence[int] | None = None, mask: Sequence[bool] | None = None, final: bool = False
    ) -> dict[str, Any]:
        """The fields of one vector step ``[K, ...]``, noted in the oracle; ``next_obs`` where needed, or ``final``."""
        chosen = list(range(self.num_envs)) if envs is None else list(envs)
        real = [True] * len(chosen) if mask is None else list(mask)
        steps: list[dict[str, Any]] = []
        for env, letter, counts in zip(chosen, kinds, real, strict=True):
            if not counts and self.ordered and letter in "UB" and self.truth.goes_on(env):
                last = self._dressed(self.lives[env].step())
                self.truth.add(env, **last)
                self.truth.interrupt(env)
                self.lives[env].restart()
                unseen = {"next_obs": poisoned(last["next_obs"]), "reward": np.float32(POISON)}
                steps.append({**last, **unseen, "truncated": np.bool_(True), "terminated": np.bool_(letter == "B")})
                continue
            if not counts:
                self.truth.interrupt(env)
                self.lives[env].restart()
                steps.append({**poisoned(self._example()), "truncated": np.bool_(letter in "UB")})
                continue
            step = self._dressed(self.lives[env].step(KINDS[letter]))
            self.truth.add(env, **step)
            if self.ordered and letter == ".":
                step["next_obs"] = poisoned(step["next_obs"])
            steps.append(step)
        fields = stacked(steps) if steps else mapped(lambda x: np.zeros((0, *np.shape(x)), x.dtype), self._example())
        if self.ordered and not final and set(kinds) <= {"."} and not len(self.truth.completed) % 2:
            del fields["next_obs"]
        return fields if mask is None else {**fields, "mask": np.array(mask, np.bool_)}

    def _example(self) -> dict[str, Any]:
        return self._dressed(tagged_envs.Life(0, observations=self.lives[0]._observations).step())

    def _dressed(self, step: dict[str, Any]) -> dict[str, Any]:
        dressed = {name: self._dress(step[name]) for name in ("obs", "next_obs")}
        return {**step, **dressed, **self._extras(step)}

    # What the buffer says, against the oracle.

    def anchors(self) -> list[oracle.Row]:
        """What can be drawn, in the order of completion."""
        rule = rule_of(self.buffer.view)
        return self.truth.anchors(*rule[:4], rule.across)

    def check(self) -> None:
        """Everything the buffer holds is what it should hold, and nothing else."""
        self.buffer.check()
        anchors = self.anchors()
        assert len(self.buffer) == len(anchors)
        data = self.buffer.data()
        assert data["index"].tolist() == [self.truth.index(row) for row in anchors]
        self.check_batch(data)

    def check_batch(self, batch: Any, view: Any = None, among: Iterable[oracle.Row] | None = None) -> None:
        """Every item is what the oracle says of its index, and one of ``among``, or of all that can be drawn."""
        rows = {self.truth.index(row): row for row in (self.anchors() if among is None else among)}
        if isinstance(batch, SequenceBatch):
            self.check_sequences(batch, view or self.buffer.view, rows)
            return
        found = batch_leaves(batch)
        index = found["index",].tolist()
        assert set(index) <= rows.keys(), f"drawn {sorted(set(index) - rows.keys())}, which cannot be"
        known = {i: self.item(rows[i], view or self.buffer.view) for i in set(index)}
        example = self.item_shapes()
        extras = found.keys() - example
        assert extras <= {("weight",), ("probability",)}, extras
        assert found.keys() - extras == example
        window = getattr(view or self.buffer.view, "window", view or self.buffer.view)
        for path in example:
            got = found[path]
            assert len(got) == len(index)
            if not index:
                continue
            want = np.stack([known[i][path] for i in index])
            assert got.dtype == want.dtype, f"{path}: {got.dtype}, not {want.dtype}"
            assert got.shape == want.shape, f"{path}: {got.shape}, not {want.shape}"
            if path[0] in ("reward", "discount") and window.gamma not in EXACT_GAMMAS:
                assert np.allclose(got, want, rtol=1e-6, atol=0), f"{path}: {got}, not {want}"
            else:
                assert np.array_equal(got, want), f"{path}: {got}, not {want}, of {index}"

    def item_shapes(self) -> set[Path]:
        """The paths of a batch, but for what the sampler adds."""
        stored = set(self.schema.leaves)
        following = {("next_obs", *path[1:]) for path in stored if path[0] == "obs"}
        return stored | following | {("index",), ("next_index",), ("discount",), ("steps",)}

    def item(self, row: oracle.Row, view: Any) -> dict[Path, np.ndarray]:
        """What a view makes of a transition."""
        frames = view if isinstance(view, FrameStack) else None
        window = view.window if isinstance(view, FrameStack) else view
        result = self.truth.window(row, window.n, window.gamma)
        step, last = row.episode.steps[row.at], result.last
        after = row.episode.next_obs(last.at - 1)
        obs, following = step.obs, after
        if frames is not None:
            obs = self._stacked(self.truth.stack(row, frames.depth), obs, frames)
            # the observation after the window, which may be the newest row of its episode or its last
            before = self.truth.stack(last.back(1), frames.depth)[1:] if frames.depth > 1 else []
            following = self._stacked([*before, after], after, frames)
        item: dict[Path, Any] = {
            **leaves(obs, ("obs",)),
            **leaves(following, ("next_obs",)),
            ("action",): step.action,
            ("reward",): np.float32(result.reward),
            ("terminated",): np.bool_(result.terminated),
            ("truncated",): np.bool_(result.truncated),
            ("discount",): np.float32(result.discount),
            ("steps",): np.int32(result.steps),
            ("index",): np.int64(self.truth.index(row)),
            ("next_index",): np.int64(self.truth.index(last if self.ordered else row)),
            **leaves(step.extras),
        }
        return {path: np.asarray(value) for path, value in item.items()}

    def check_sequences(self, batch: SequenceBatch, view: SequenceView, rows: Mapping[int, oracle.Row]) -> None:
        """Every sequence is what the oracle says of its index, row by row, and one of these ``rows``."""
        index = batch["index"].tolist()
        assert set(index) <= rows.keys(), f"drawn {sorted(set(index) - rows.keys())}, which cannot be"
        assert batch.time_first is view.time_first
        high = view.burn_in + view.length + view.n
        assert batch.shape == ((high, len(index)) if view.time_first else (len(index), high))
        found = {path: x if view.time_first else x.swapaxes(0, 1) for path, x in arrays_by_path(batch.parts[0]).items()}
        facts = {("index",), ("lengths",), ("burn_in",), ("env",), ("start",)}
        extras = {(name,) for name in batch.parts[1]} - facts
        assert extras <= {("weight",), ("probability",)}, extras
        found |= leaves({name: batch[name].numpy() for (name,) in facts})
        known = {i: self.sequence(rows[i], view) for i in set(index)}
        for b, i in enumerate(index):
            want = known[i]
            assert {path for path in want if path[0] != "hidden"} == found.keys()
            for path, value in want.items():
                if path[0] == "hidden":
                    state = batch["hidden"]
                    for name in path[1:]:
                        state = state[int(name)] if isinstance(state, tuple) else state[name]
                    assert state.is_contiguous()
                    got = (state[:, b] if value.ndim > 1 else state[b]).numpy()
                else:
                    got = found[path][b] if path in facts else found[path][:, b]
                assert got.dtype == value.dtype, f"{path} of {i}: {got.dtype}, not {value.dtype}"
                if path[0] in ("reward", "discount") and view.gamma not in EXACT_GAMMAS:
                    assert np.allclose(got, value, rtol=1e-6, atol=0), f"{path} of {i}: {got}, not {value}"
                else:
                    assert np.array_equal(got, value), f"{path} of {i}: {got}, not {value}"

    def sequence(self, row: oracle.Row, view: SequenceView) -> dict[Path, np.ndarray]:
        """What a view of sequences makes of the window that ends with this step."""
        _, length, stride, *_ = view.rule
        excerpt = self.truth.excerpt(row, length, stride, view.burn_in, view.n)
        high, steps = view.burn_in + view.length + view.n, excerpt.burn_in + excerpt.length
        blank = mapped(np.zeros_like, self._lasts(self._example(), view.last)) | self._blank()
        columns: list[dict[Path, Any]] = []
        for t in range(high):
            there = excerpt.rows[t] if t < len(excerpt.rows) else None
            column = dict(blank)
            if there is not None:
                column |= leaves(there.obs, ("obs",)) | self._before(there, view)
                if there.at < len(there.episode):
                    step = there.episode.steps[there.at]
                    column |= {("action",): step.action, **leaves(step.extras)}
            results: tuple[Any, ...] = (0.0, 0.0, 0, False, False, -1)
            if there is not None and t < steps:
                window = self.truth.window(there, view.n, view.gamma)
                results = (*window[:5], t + window.steps)
            for name, dtype, value in zip(
                ("reward", "discount", "steps", "terminated", "truncated", "next"),
                (np.float32, np.float32, np.int32, np.bool_, np.bool_, np.int64),
                results,
                strict=True,
            ):
                column[name,] = dtype(value)
            column["mask",] = np.bool_(excerpt.burn_in <= t < steps)
            columns.append(column)
        first = excerpt.rows[0]
        item = {path: np.stack([column[path] for column in columns]) for path in columns[0] if path[0] != "hidden"}
        item |= {path: np.asarray(value) for path, value in columns[0].items() if path[0] == "hidden"}
        facts = {
            "index": self.truth.index(row),
            "lengths": len(excerpt.rows),
            "burn_in": excerpt.burn_in,
            "env": row.env,
            "start": first.number + excerpt.burn_in,
        }
        item |= {(name,): np.int64(value) for name, value in facts.items()}
        item["is_start",] = np.arange(high) == (0 if first.at == 0 else -1)
        return item

    def _before(self, there: oracle.Row, view: SequenceView) -> dict[Path, Any]:
        """What the step before a row was, where the row's own step does not say it."""
        if there.at == 0:
            return {}
        step = there.episode.steps[there.at - 1]
        stored = [name.removeprefix("last_") for name in step.extras if name.startswith("last_")]
        names = [*view.last, *stored] if there.at == len(there.episode) else view.last
        return self._lasts({"action": step.action, "reward": np.float32(step.reward), **step.extras}, names)

    @staticmethod
    def _lasts(step: Mapping[str, Any], names: Iterable[str]) -> dict[Path, Any]:
        return {path: x for name in names for path, x in leaves(step[name], (f"last_{name}",)).items()}

    def _blank(self) -> dict[Path, Any]:
        """A row of a batch where there is none: zeros, but that every action is legal."""
        example = leaves({name: value for name, value in self._example().items() if name != "next_obs"})
        blank = {path: np.zeros_like(np.asarray(value)) for path, value in example.items()}
        return {path: np.ones_like(value) if path[0] == "action_mask" else value for path, value in blank.items()}

    def _stacked(self, frames: list[Any], newest: Any, view: FrameStack) -> Any:
        """Frames on top of each other, oldest first; what is missing before the first is padded."""
        first = next(frame for frame in frames if frame is not None)
        blank = mapped(np.zeros_like, first)
        full = [frame if frame is not None else first if view.pad == "repeat" else blank for frame in frames]
        together = mapped(lambda *arrays: np.stack(arrays), *full)
        if view.keys is None:
            return together
        if isinstance(newest, tuple):
            return tuple(t if str(i) in view.keys else n for i, (t, n) in enumerate(zip(together, newest, strict=True)))
        return {name: together[name] if name in view.keys else newest[name] for name in newest}


def batch_leaves(batch: Any) -> dict[Path, np.ndarray]:
    """The tensors of a batch by path, as NumPy."""
    return arrays_by_path(leaves_by_path(batch))


def arrays_by_path(tensors: Mapping[Path, Tensor]) -> dict[Path, np.ndarray]:
    """Tensors as NumPy; bfloat16 as its bits."""
    return {
        path: (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()
        for path, value in tensors.items()
    }


def same_batches(a: Any, b: Any) -> bool:
    """Whether two batches have the same fields, bit for bit."""
    one, other = batch_leaves(a), batch_leaves(b)
    return one.keys() == other.keys() and all(
        one[path].dtype == other[path].dtype and one[path].tobytes() == other[path].tobytes() for path in one
    )


def assert_alike(one: ReplayBuffer[Any, Any], other: ReplayBuffer[Any, Any]) -> None:
    """Both hold the same transitions, indices, priorities and cursors, and draw the same batches."""
    one, other = copy.copy(one), copy.copy(other)  # they draw
    one.check()
    other.check()
    assert same_batches(one.data(), other.data())
    assert one.stats() == other.stats()
    assert np.array_equal(internals.ring(one).state, internals.ring(other).state)
    assert np.array_equal(internals.ring(one).counters, internals.ring(other).counters)
    for env in range(one.num_envs):
        mine, others = (internals.ring(replay).live_places(env) for replay in (one, other))
        assert np.array_equal(mine, others)
        assert np.array_equal(internals.ring(one).stamp[mine], internals.ring(other).stamp[others])
        assert np.array_equal(internals.ring(one).step[mine], internals.ring(other).step[others])
    priorities = (replay.sampler.state_dict() for replay in (one, other))
    assert pickle.dumps(next(priorities)) == pickle.dumps(next(priorities))
    if len(one):
        assert same_batches(one.sample(9), other.sample(9))


def contents(buffer: ReplayBuffer) -> tuple[bytes, ...]:
    """Every byte a replay keeps: rows, blocks, cursors, counters, and what its sampler knows."""
    ring, come = internals.ring(buffer), internals.progress(buffer)
    parts = [ring.store.target, ring.state, ring.counters]
    parts += ring.store.blocks.values()
    parts += [np.asarray(value) for value in buffer.sampler.state_dict().values()]
    own = np.array([come.draws, come.sampled, come.late, *ring.rule[:4]])
    return tuple(np.ascontiguousarray(part).tobytes() for part in [*parts, own])


UNEVEN = ("nested", "sparse", "ragged list", "ragged arrays")
"""What may come as a field and has no one dense shape."""


def uneven(kind: str, shape: tuple[int, ...]) -> tuple[Any, str]:
    """Such a thing, of that shape if it has one, and what the error says of it."""
    if kind == "nested":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the oldest layout, whose own errors name nothing
            parts = [torch.ones(2), torch.ones(1)]
            return torch.nested.nested_tensor(parts), r"dense tensor, got a nested one.*to_padded_tensor"
    if kind == "sparse":
        return torch.ones(shape).to_sparse(), r"dense tensor, got a sparse one.*to_dense"
    ragged = [[1.0, 2.0], [1.0]] if kind == "ragged list" else [np.ones(2), np.ones(1)]
    return ragged, "rows of different lengths; pad"
