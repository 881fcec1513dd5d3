"""Forged saves: good ones of every kind in which something is changed and every checksum computed again.

``main`` forges, loads and uses one after another, and notes each in a file: after a crash or a hang the file shows
which it was. The case of a number is the same in every run.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive import (
    FrameStack,
    Fresh,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Sequence,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive import files as persist
from relive.errors import InvariantError, ReliveError
from relive.files import format
from relive.files import format as sealed
from relive.memory.layout import row_layout
from relive.steps.schema import Field
from support import internals

__all__ = ["KINDS", "Forged", "attack", "forge", "good_save", "main", "write"]

N, ROWS, STEPS = 2, 12, 20
MEMORY = 2**28
"""Bytes that loading and using a save of a few kB may take."""

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "epochs": WithoutReplacement,
    "prioritized": Prioritized,
    "buffer": lambda: Prioritized(normalize="buffer", stratified=False, beta=(0.4, 1.0, 100)),
    "recent": lambda: Recent(0.9, 2, adapt=True),
    "recent prioritized": lambda: Recent(0.9, 2, inner=Prioritized()),
    "fresh": lambda: Fresh(Recent(0.9, 2, inner=Prioritized())),
}
VIEWS: dict[str, Callable[[], Any]] = {
    "transition": Transition,
    "3-step": lambda: NStep(3),
    "stack": lambda: FrameStack(3, NStep(2), "zeros"),
    "sequence": lambda: Sequence(3, 2, "none", 2),
    "steps": lambda: Sequence(4, 1, "half", weigh="steps"),
    "episodes": lambda: Sequence(2, 1, 1, weigh="episodes", time_first=False),
}
ALONE = ("transition", "3-step")
WEIGHED = ("steps", "episodes")

SCHEMA = Schema(
    {
        "obs": {"state": (3,), "camera": Field((33, 33), torch.uint8)},
        "action": Field((), torch.int64),
        "reward": (),
        "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
        "action_mask": Field((2,), torch.bool),
    }
)


def observations(tag: Any) -> dict[str, Any]:
    """Observations that tell which they are, and are nowhere else in memory."""
    tags = np.asarray(tag)
    state = np.stack([tags + 0.125, tags * 2 + 0.25, tags * 3 + 0.375], -1).astype(np.float32)
    camera = np.repeat((tags % 199 + 50).astype(np.uint8)[..., None], 33 * 33, -1).reshape(*tags.shape, 33, 33)
    return {"state": state, "camera": camera}


def step(t: int, ends: bool) -> dict[str, Any]:
    """A step of all envs; with ``ends`` the first env's episode is over."""
    tags = np.arange(N) * 1000 + t
    done = np.arange(N) == t % N
    return {
        "obs": observations(tags),
        "next_obs": observations(tags + 500),
        "action": tags,
        "reward": tags.astype(np.float32),
        "terminated": done & ends,
        "truncated": done & ends & (t % 2 == 0),
        "action_mask": np.ones((N, 2), np.bool_),
    }


def replay(sampler: str, view: str, mode: str) -> ReplayBuffer:
    """A buffer that came round, with episodes that ended, one that was interrupted, and what its sampler noted."""
    buffer = ReplayBuffer(
        SCHEMA, ROWS * N, N, sampler=SAMPLERS[sampler](), view=VIEWS[view](), seed=1,
        ordered=mode != "alone", own_next_obs=mode == "own",
    )  # fmt: skip
    for t in range(STEPS):
        buffer.add(step(t, t % 7 == 6))
        if t == 12:
            buffer.interrupt()
    batch = buffer.sample(2)
    if buffer.has_priorities:
        rate(buffer, batch)
    if isinstance(buffer.sampler, Recent):
        for k in range(25):
            buffer.sampler.observe(float(k))
    return buffer


def rate(buffer: ReplayBuffer, batch: Any) -> None:
    """Give a batch TD errors."""
    errors = np.linspace(0.5, 2, len(batch["index"]))
    mask = batch["mask"] if isinstance(buffer.view, Sequence) else None
    if mask is not None:
        errors = np.ones(tuple(mask.shape))
    buffer.update_priorities(batch["index"], errors, mask)


def rollout(kind: str) -> RolloutBuffer:
    """A rollout of a few steps, of one of several kinds."""
    hidden: Any = {"hidden": {"h": (1, 4)}} if kind == "states" else {}
    schema = SCHEMA.extend(value=(), **hidden)
    further = {"further": Field((2,))} if kind == "columns" else None
    buffer = RolloutBuffer(schema, 8, N, seed=1, wrap=kind == "wrap", columns=further)
    for t in range(11 if kind == "wrap" else 6):
        fields = {name: value for name, value in step(t, t % 4 == 3).items() if name != "next_obs"}
        extras = {"hidden": {"h": np.full((N, 1, 4), t, np.float32)}} if hidden else {}
        buffer.add({**fields, **extras, "value": np.ones(N, np.float32), "final_value": np.ones(N, np.float32)})
    buffer["advantage"] = torch.ones(buffer.steps, N)
    return buffer


KINDS: dict[str, Callable[[], Any]] = {
    f"{sampler}, {view}, {mode}": lambda s=sampler, v=view, m=mode: replay(s, v, m)
    for sampler in SAMPLERS
    for view in VIEWS
    for mode in ("shared", "own", "alone")
    if (mode == "shared" or (view in ALONE and (mode == "own" or view == "transition")))
    and (view not in WEIGHED or sampler in ("uniform", "recent"))
}
KINDS |= {f"rollout, {kind}": lambda k=kind: rollout(k) for kind in ("plain", "wrap", "states", "columns")}


# Forging.

NUMBERS = (-1, 0, 1, 2, 2**31 - 1, 2**31, 2**32, 2**52, 2**53 + 1, 2**60, 2**61, 2**62, 2**63 - 1, -(2**63), 2**64)
OTHERS: tuple[Any, ...] = (
    None, True, False, 0.5, -0.5, 1e300, -1e300, 10**9, 10**40, "", "1", "Uniform", "NStep", "obs", [], {}, [[]], [1],
    [0, 0, 0], {"part": "Uniform"}, {"part": "NStep"}, {"part": "Sequence", "length": 10**9},
    {"part": "FrameStack", "depth": 10**9}, {"part": "Recent", "inner": {"part": "Recent"}},
    {"part": "Prioritized", "alpha": 1e300},
)  # fmt: skip
DTYPES = (torch.int64, torch.float64, torch.uint8, torch.bool, torch.float16, torch.int32, torch.complex64)
META = ("_stamp", "_step", "_order")
Content = Any
Tensors = dict[str, torch.Tensor]


class Forged:
    """A save's parts, to be changed one after another; ``said`` tells what was done."""

    def __init__(self, tensors: Tensors, content: Content, rng: np.random.Generator) -> None:
        self.tensors, self.content, self.rng = tensors, content, rng
        self.edit: Callable[[bytes], bytes] | None = None
        self.said: list[str] = []

    def pick(self, choices: Any) -> Any:
        """One of several."""
        options = list(choices)
        return options[int(self.rng.integers(len(options)))]

    def value(self, old: Any = None) -> Any:
        """Something in place of ``old``."""
        draw = self.rng.random()
        if isinstance(old, int) and not isinstance(old, bool) and draw < 0.4:
            return old + self.pick((-1, 1, 2**31, 2**32, 2**52, 2**60, 2**61, -(2**61), ROWS, -ROWS))
        return self.pick(NUMBERS) if draw < 0.7 else self.pick(OTHERS)

    def change_content(self) -> None:
        """One entry of the JSON is another, missing, doubled, or what some other entry is."""
        places = list(entries(self.content))
        top = [place for place in places if len(place[1]) == 1]
        holder, path = self.pick(top if self.rng.random() < 0.3 else places)
        key, how = path[-1], self.rng.random()
        if how < 0.7:
            holder[key] = self.value(holder[key])
        elif how < 0.8:
            del holder[key]
        elif how < 0.9:
            other, there = self.pick(places)
            holder[key] = json.loads(json.dumps(other[there[-1]])) if there[-1] in range_of(other) else None
        elif isinstance(holder[key], list):
            holder[key] = holder[key][::-1] if self.rng.random() < 0.5 else [*holder[key], *holder[key][:1]]
        else:
            holder[key] = [holder[key]]
        self.said.append(f"{path} -> {(holder[key] if key in range_of(holder) else 'nothing')!r:.60}")

    def change_state(self) -> None:
        """A cursor or counter of a replay is another number."""
        if "state" not in self.content:
            return self.change_content()
        rows, column, env = self.content["state"], self.pick(range(4)), self.pick(range(N))
        if self.rng.random() < 0.7:
            rows[env][column] = int(rows[env][column] + self.pick((1, -1, 2**32, 2**52, 2**60, 2**61, 2**62, -(2**40))))
            self.said.append(f"state[{env}, {column}] = {rows[env][column]}")
        else:
            at = self.pick(range(3))
            self.content["counters"][at] += self.pick((1, -1, 2**32, 2**61, -(2**40)))
            self.said.append(f"counters[{at}] = {self.content['counters'][at]}")
        return None

    def change_rows(self) -> None:
        """What rings note with rows, or a flag, is another number in some rows; or rows change places."""
        arrays = fields_of(self.tensors, self.content)
        if not arrays:
            return self.change_tensor()
        rows = self.tensors["rows"].numpy()
        some = self.rng.permutation(len(rows))[: self.pick((1, 2, len(rows)))]
        how = self.rng.random()
        if how < 0.2:
            rows[some] = rows[self.rng.permutation(some)]
            self.said.append(f"rows {some.tolist()} permuted")
        elif how < 0.3:
            rows[some] = rows[some[0]]
            self.said.append(f"rows {some.tolist()} alike")
        else:
            path = (self.pick((*META, *META, "terminated", "truncated", "action_mask")),)
            array = arrays[path].view(np.uint8) if arrays[path].dtype == np.bool_ else arrays[path]
            array, info = array.reshape(len(rows), -1)[:, 0], np.iinfo(array.dtype)
            value = self.pick((-1, 0, 1, 2, 255, info.min, info.max, 2**31 - 1, 2**61, -(2**61), "+1", "+1", "last"))
            for row in some:
                old = int(array[row])
                new = {"+1": old + 1, "-1": old - 1, "last": int(array[-1])}.get(str(value), value)
                array[row] = min(max(int(new), info.min), info.max)
            self.said.append(f"{path[0]} of rows {some.tolist()} is {value}")
        return None

    def change_together(self) -> None:
        """Cursors, counters and rows change such that they go on agreeing with each other, as far as can be."""
        arrays, rows = fields_of(self.tensors, self.content), self.content.get("state")
        if not arrays or not isinstance(rows, list):
            return self.change_content()
        env, large = self.pick(range(N)), self.pick((2**20, 2**31, 2**32, 2**52, 2**53, 2**58, 2**60, 2**61))
        live = [min(row[0] - row[1], ROWS) for row in rows]
        mine = np.arange(sum(live[:env]), sum(live[: env + 1]))
        match self.pick(("cursors", "steps", "all steps", "count", "order", "stamps", "following", "none")):
            case "cursors":  # the same places, of later rows
                for column in (0, 1, *self.pick(((), (3,)))):
                    rows[env][column] += large // ROWS * ROWS
            case "steps":  # of the oldest episode
                numbers = arrays["_step",][mine] - np.arange(len(mine))
                first = mine[np.cumsum(numbers != numbers[0]) == 0]
                with np.errstate(over="ignore"):
                    arrays["_step",][first] += self.pick((-1, -3, -(2**20), -(2**31), 1, 5, 2**20))
            case "all steps":
                begin, each = self.pick((0, -1, 2**31 - 1, -(2**31))), self.pick((0, 1))
                arrays["_step",][mine] = (begin + np.arange(len(mine)) * each).astype(np.int32)
            case "count":
                rows[env][3] += self.pick((2**32, 2**61, -(2**32)))
                self.content["counters"][0] = sum(row[3] for row in rows)
            case "order":
                shift = self.pick((1, -1, 5, 2**31 - 1))
                with np.errstate(over="ignore"):
                    arrays["_order",][mine] += np.int32(shift)
                rows[env][3] += shift
                self.content["counters"][0] += shift
            case "stamps":
                shift = self.pick((-1, 1, 100, large))
                stamps = arrays["_stamp",]
                stamps[:] = np.where(stamps < 0, stamps - shift, stamps + shift)
                self.content["counters"][0] += shift
            case "following":
                rows[env][2] = self.pick((1, 2, ROWS, int(arrays["_step",][mine[-1]]) + 1, large))
            case _:
                rows[env][1], rows[env][2] = rows[env][0], self.pick((0, 1, large))
                keep = np.delete(np.arange(sum(live)), mine)
                for name in [name for name in self.tensors if len(self.tensors[name]) == sum(live)]:
                    self.tensors[name] = self.tensors[name][torch.from_numpy(keep)].clone()
                self.content["counters"][1] = self.pick(range(ROWS * N))
        self.said.append(f"together: env {env}, state {rows}, counters {self.content.get('counters')}")
        return None

    def change_parts(self) -> None:
        """What the sampler notes, or a parameter of it or of the view, is another."""
        arrays = [name for name in self.tensors if name.startswith("sampler.")]
        if arrays and self.rng.random() < 0.5:
            name = self.pick(arrays)
            old = self.tensors[name].clone()
            at = self.rng.permutation(len(old))[: self.pick((1, len(old)))] if old.ndim == 1 else []
            wild = (-1, 0, 1, 30, 10**6, 2**31, 2**60, 2**63 - 1, -(2**63))
            if not old.dtype.is_floating_point:
                old[at] = self.pick(wild) if self.rng.random() < 0.7 else torch.randint(-5, 60, (len(at),))
            else:
                old[at] = self.pick((-1.0, float("nan"), float("inf"), 3e38, 1e-45, -0.0))
            self.tensors[name] = old
            self.said.append(f"{name} at {list(at)} is {old[at][:1].tolist() if len(at) else None}")
            return None
        part = self.pick(("sampler", "view", "sampler_state", "sampler", "view"))
        holder = self.content.get(part)
        if not isinstance(holder, dict) or not holder:
            return self.change_content()
        if self.rng.random() < 0.2:
            self.content["sampler"], self.content["view"] = self.content.get("view"), self.content.get("sampler")
            self.said.append("the sampler and the view change places")
            return None
        inner = self.pick([name for name, value in holder.items() if isinstance(value, dict)] or [None])
        holder = holder if inner is None else holder[inner]
        key = self.pick(holder)
        holder[key] = self.pick((0, -1, 1, 2**16, 10**9, 2**31, 2**53, 2**63, 10**30, 1e300, 0.5, *OTHERS))
        self.said.append(f"{part}.{key} is {holder[key]!r:.60}")
        return None

    def change_tensor(self) -> None:
        """A tensor has other values, another shape or dtype, another name, or is missing."""
        if not self.tensors:
            return self.change_content()
        name, how = self.pick(self.tensors), self.rng.random()
        old = self.tensors[name]
        if how < 0.4 and old.numel():
            flat = old.reshape(-1).clone()
            limits = torch.finfo if old.dtype.is_floating_point else torch.iinfo
            wild = [-1, 0, 1, 2, 255]
            if old.dtype is torch.bool:
                flat.view(torch.uint8)[self.pick(range(flat.numel()))] = self.pick((2, 255))
            else:
                wild += [limits(old.dtype).min, limits(old.dtype).max]
                wild += [float("nan"), float("inf")] if old.dtype.is_floating_point else [2**31, 2**52, 2**61]
                low, high = (limits(old.dtype).min, limits(old.dtype).max)
                fitting = [x for x in wild if x != x or x in (float("inf"),) or low <= x <= high]
                flat[self.pick(range(flat.numel()))] = self.pick(fitting)
            self.tensors[name] = flat.reshape(old.shape)
        elif how < 0.6:
            more = torch.cat([old, old[:1]]) if old.ndim else old
            changed = {
                "one less": old[:-1], "one more": more, "none": old[:0], "an axis more": old[None],
                "turned": old.flip(0), "alike": old[:1].expand(old.shape) if len(old) else old,
                "flat": old.reshape(-1), "an axis at the end": old[..., None],
            }  # fmt: skip
            how_changed = self.pick(changed)
            self.tensors[name] = changed[how_changed].clone(memory_format=torch.contiguous_format)
            self.said.append(how_changed)
        elif how < 0.8:
            self.tensors[name] = old.to(self.pick(DTYPES))
        elif how < 0.9:
            other = self.pick(self.tensors)
            self.tensors[name], self.tensors[other] = self.tensors[other], old
        else:
            del self.tensors[name]
            self.tensors[self.pick((name + "x", "sampler.order", "sampler.errors", ".ended", "block.obs"))] = old
        self.said.append(f"tensor {name} ({old.dtype} {tuple(old.shape)})")
        return None

    def change_manifest(self) -> None:
        """A word of the manifest is another one."""

        def edit(body: bytes) -> bytes:
            at = int(self.rng.integers(len(body)))
            return body[:at] + self.pick((b"", b"9", b"-", b"[", b"{}", b'"', b"0,")) + body[at + self.pick((0, 1)) :]

        self.edit = edit
        self.said.append("a byte of the manifest")


def fields_of(tensors: Tensors, content: Any) -> dict[Any, Any]:
    """The packed fields of the rows of a save, where they lie; none if these are no such rows."""
    own = content.get("own_next_obs") is True or content.get("ordered") is False
    layout, _ = row_layout((SCHEMA.extend(next_obs=SCHEMA["obs"]) if own else SCHEMA).leaves)
    rows = tensors.get("rows")
    fits = rows is not None and rows.dtype is torch.uint8 and rows.ndim == 2 and rows.shape[1] == layout.nbytes
    return layout.arrays(rows.numpy()) if fits and len(rows) else {}


def range_of(holder: Any) -> Any:
    """The keys of an object or list of JSON."""
    return holder if isinstance(holder, dict) else range(len(holder))


def entries(tree: Any, at: tuple[Any, ...] = ()) -> Any:
    """Each entry of JSON: its holder, and the path to it."""
    for key in range_of(tree) if isinstance(tree, dict | list) else ():
        yield tree, (*at, key)
        yield from entries(tree[key], (*at, key))


CHANGES = (
    Forged.change_content, Forged.change_state, Forged.change_rows, Forged.change_tensor, Forged.change_manifest,
    Forged.change_together, Forged.change_together, Forged.change_parts, Forged.change_parts,
)  # fmt: skip


def write(path: Path, tensors: Tensors, content: str, edit: Callable[[bytes], bytes] | None = None) -> None:
    """A save of whatever there is, with the right sizes and checksums."""
    path.mkdir(parents=True)
    specs = format.plan(tensors, "0" * 16)
    files: dict[str, format.FileNote] = {}
    for file, group in format.by_file(specs).items():
        raw = format.header(group)
        for name in group:
            tensor = tensors[name].contiguous()
            raw += tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        (path / file).write_bytes(raw)
        files[file] = format.FileNote(len(raw), f"{zlib.crc32(raw):08x}")
    body = format.compose(content, files, specs)[: -sealed.TAIL_BYTES]
    body = body if edit is None else edit(body)
    (path / format.MANIFEST).write_bytes(body + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(body))


def good_save(kind: str, folder: Path) -> tuple[Tensors, Content]:
    """The parts of a good save of this kind, which lies in ``folder`` afterwards; the rows of a replay in one part."""
    path = folder / kind
    if not path.exists():
        buffer = KINDS[kind]()
        if isinstance(buffer, ReplayBuffer):
            arrays, content = internals.saver(buffer).whole_state()
            persist.write(path, arrays, content)
        else:
            buffer.save(path)
    return persist.read(path)


def forge(number: int, good: Path, path: Path) -> tuple[str, list[str]]:
    """Save number ``number`` at ``path``; the kind of good save it was made of, and what was changed."""
    rng = np.random.default_rng(number)
    kind = list(KINDS)[number % len(KINDS)]
    tensors, content = good_save(kind, good)
    forged = Forged(tensors, content, rng)
    for _ in range(1 + int(rng.random() < 0.3)):
        with suppress(TypeError, LookupError, ArithmeticError, ValueError, RuntimeError):  # after another change
            CHANGES[int(rng.integers(len(CHANGES)))](forged)
    write(path, forged.tensors, json.dumps(forged.content), forged.edit)
    return kind, forged.said


# Use.


class OtherMemoryError(Exception):
    """A batch holds what was never stored."""


def frames(tensor: torch.Tensor, size: int) -> set[bytes]:
    """The single frames of a batch of them."""
    return {row.tobytes() for row in tensor.contiguous().numpy().reshape(-1, size)}


def stored(tensors: Tensors, content: Any) -> dict[str, set[bytes]]:
    """All observations that a save holds, and nothing."""
    found: dict[str, set[bytes]] = {"state": {bytes(12)}, "camera": {bytes(33 * 33)}}
    for path, array in fields_of(tensors, content).items():
        if path[-1] == "state":
            found["state"] |= {row.tobytes() for row in np.ascontiguousarray(array)}
    for name, tensor in tensors.items():
        if name.startswith("block."):
            found["camera"] |= frames(tensor, 33 * 33)
    return found


@contextmanager
def refusals() -> Iterator[None]:
    """Nothing to draw, or a view that this buffer cannot have: that is told, and does no harm."""
    try:
        yield
    except InvariantError:
        raise
    except ReliveError:
        pass


def use_replay(path: Path) -> None:
    """Load, check, draw, add, draw, rate, check."""
    tensors, content = persist.read(path)
    buffer = ReplayBuffer.load(path)
    known = stored(tensors, content)
    same = buffer.schema == SCHEMA and buffer.num_envs == N
    views = [buffer.view, *(VIEWS[view]() for view in VIEWS)]

    def look(view: Any) -> None:
        buffer.view = view
        for count in (1, 4):
            for batch in buffer.batches(2, count):
                if buffer.has_priorities and len(batch["index"]):
                    rate(buffer, batch)
                for name in ("obs", "next_obs") if same and "next_obs" in batch.keys() else ():
                    for leaf, size in (("state", 3), ("camera", 33 * 33)):
                        if not frames(batch[name][leaf], size) <= known[leaf]:
                            raise OtherMemoryError(f"{name}.{leaf} through {view!r}")

    def look_through_all() -> None:
        for view in views:
            with refusals():
                look(view)
        buffer.view = views[0]

    buffer.check()
    look_through_all()
    if same:
        for t in range(50):
            added = step(STEPS + t, t % 9 == 8)
            for name in ("obs", "next_obs"):
                for leaf, size in (("state", 3), ("camera", 33 * 33)):
                    known[leaf] |= frames(torch.from_numpy(added[name][leaf]), size)
            buffer.add(added)
    buffer.check()
    look_through_all()
    buffer.check()
    buffer.stats()
    with refusals():
        buffer.data()
    buffer.clear()
    buffer.check()


def use_rollout(path: Path) -> None:
    """Load, read, go on."""
    buffer = RolloutBuffer.load(path)
    for look in (
        lambda: [buffer[name] for name in buffer.schema.names],
        lambda: list(buffer.minibatches(3, epochs=1)),
        lambda: list(buffer.sequences(length=2, batch_size=2)),
        lambda: list(buffer.chunks(2)),
        lambda: buffer.save(path.with_name(path.name + "-again")),
    ):
        with suppress(ReliveError):
            look()
    buffer.clear()


def memory() -> int:
    """The most bytes in RAM since the last time it was asked, where the system tells; 0 elsewhere."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def attack(path: Path, kind: str) -> str:
    """What came of a forged save: "refused", "harmless", or what went wrong."""
    memory()
    before, outcome = memory(), "harmless"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (use_rollout if kind.startswith("rollout") else use_replay)(path)
    except InvariantError as error:
        outcome = f"INCONSISTENT {error}"
    except ReliveError as error:
        outcome = "refused" if type(error).__name__ == "FileFormatError" else f"LATE {error!r}"
    except OtherMemoryError as error:
        outcome = f"OTHER MEMORY {error}"
    except Exception as error:
        outcome = f"FOREIGN {error!r}"
    if memory() - before > MEMORY:
        outcome = f"MEMORY {outcome}"
    return outcome


def attack_shares(number: int) -> str:
    """What came of a forged state of a Mixture."""
    rng = np.random.default_rng(number)
    buffers = {name: replay("uniform", "transition", "shared") for name in ("a", "b")}
    mixture = Mixture(buffers, {"a": 0.5, "b": 0.5})
    forged = Forged({}, mixture.state_dict(), rng)
    for _ in range(1 + int(rng.random() < 0.3)):
        if list(entries(forged.content)):
            forged.change_content()
    try:
        mixture.load_state_dict(forged.content)
    except ReliveError:
        return "refused"
    except Exception as error:
        return f"FOREIGN {error!r} {forged.said}"
    batch = mixture.sample(8)
    return "harmless" if len(batch) == 8 else f"INCONSISTENT {forged.said}"


def main(folder: Path, first: int, count: int, log: Path) -> None:
    """Cases ``first`` to ``first + count``; each is noted in ``log``, a line when it begins and one when it is over."""
    with log.open("w", encoding="utf-8", buffering=1) as notes:
        for number in range(first, first + count):
            path = folder / str(number)
            try:
                kind, said = forge(number, folder / "good", path)
            except ReliveError as error:  # the writer itself would not have it
                notes.write(json.dumps([number, "", [repr(error)], "refused"]) + "\n")
                continue
            notes.write(json.dumps([number, kind, said, None]) + "\n")
            notes.write(json.dumps([number, kind, said, attack(path, kind)]) + "\n")
            for left in folder.glob(f"{number}*"):
                shutil.rmtree(left)
