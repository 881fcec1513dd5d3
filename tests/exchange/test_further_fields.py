"""Further fields: from every format into every other one, each goes along to the bit, or is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from relive import GAE, Field, ReplayBuffer, RolloutBuffer, Schema, exchange
from relive.compat import velora
from relive.exchange import Log, from_rlds, to_lerobot, to_minari
from relive.exchange.convert import FITS, READERS, WRITERS, convert
from relive.look.experience import leaves_of
from relive.steps.schema import dotted, map_leaves
from support.cases import covering

FLAG = Field((), torch.bool)
STEP: dict[str, Any] = {"obs": (3,), "action": Field((), torch.int64), "reward": (), "terminated": FLAG,
                        "truncated": FLAG}  # fmt: skip
FURTHER: dict[str, Any] = {
    "cost": (), "log_prob": (), "action_mask": Field((4,), torch.bool), "hidden": ((1, 2), (1, 2)),
    "infos": {"deep": {"x": Field((2, 2), torch.float64)}, "n": Field((), torch.int8)},
    "picture": Field((5, 4, 3), torch.uint8), "half": Field((), torch.float16), "brain": Field((2,), torch.bfloat16),
}  # fmt: skip
SCHEMA = Schema(STEP | FURTHER, max_episode_steps=9)
CARRIED = {path for path in SCHEMA.leaves if path[0] in FURTHER}


def numbers(node: Any, size: int, rng: Any) -> Any:
    if isinstance(node, dict | tuple):
        members = node.items() if isinstance(node, dict) else enumerate(node)
        made = {key: numbers(member, size, rng) for key, member in members}
        return made if isinstance(node, dict) else tuple(made.values())
    return torch.from_numpy(rng.integers(0, 2 if node.dtype is torch.bool else 100, (size, *node.shape))).to(node.dtype)


def steps(size: int, envs: int = 2) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    made = [{name: numbers(SCHEMA[name], envs, rng) for name in SCHEMA.names} for _ in range(size)]
    for t, step in enumerate(made):
        step["terminated"] = torch.tensor([t % 4 == 3, t % 6 == 5][:envs])
        step["truncated"] = torch.tensor([False, t % 5 == 4][:envs])
    return made


def replay() -> ReplayBuffer:
    made = ReplayBuffer(SCHEMA, 60, 2)
    for step in steps(12):
        made.add(step, next_obs=step["obs"] + 1)
    return made


def one_env() -> dict[str, Any]:
    """Steps of one env as arrays ``[12, ...]``."""
    rows = steps(12, 1)
    return {name: map_leaves(lambda *parts: torch.cat(parts), *(row[name] for row in rows)) for name in SCHEMA.names}


def _relive(path: Path) -> str:
    replay().save(path / "from")
    return str(path / "from")


def _rollout(path: Path) -> str:
    rollout = RolloutBuffer(SCHEMA.extend(value=()), 12, 2)
    for step in steps(12):
        rollout.add(step | {"value": torch.ones(2)}, final_value=torch.ones(2))
    rollout.finish(GAE(), last_value=torch.ones(2))
    rollout.save(path / "from")
    return str(path / "from")


def _minari(path: Path, kind: str = "arrow") -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Minari, about what it is not told
        to_minari(replay(), "from/it-v0", data_format=kind)
    return "from/it-v0"


def _lerobot(path: Path) -> str:
    to_lerobot(without(replay(), "brain"), path / "from")
    return str(path / "from")


def without(whole: ReplayBuffer, *names: str) -> ReplayBuffer:
    """The replay without some fields: no dtype of LeRobot holds bfloat16."""
    fields = {name: SCHEMA[name] for name in SCHEMA.names if name not in names}
    return exchange.log_of(whole).replay(Schema(fields))


def _npz(path: Path) -> str:
    flat = {dotted(at): leaf for at, leaf in leaves_of(one_env()).items()}  # a file of arrays has no nesting
    np.savez(path / "from.npz", **{name.replace(".", "_"): leaf for name, leaf in flat.items()})
    return str(path / "from.npz")


EPISODES: list[Any] = []


def _rlds(path: Path) -> str:
    columns = {"observation": "obs", "is_terminal": "terminated"}
    rows = {name: map_leaves(lambda x: np.asarray(x.float() if x.dtype is torch.bfloat16 else x), field)
            for name, field in one_env().items()}  # fmt: skip
    rows |= {new: rows.pop(old) for new, old in columns.items()}
    rows["hidden"] = {"0": rows["hidden"][0], "1": rows["hidden"][1]}
    flags = {"is_first": np.arange(12) == 0, "is_last": np.arange(12) == 11, "is_terminal": np.zeros(12, bool)}
    EPISODES[:] = [{"steps": {name: x for name, x in rows.items() if name != "truncated"} | flags}]
    return "episodes"


def _torchrl(path: Path) -> str:
    rows = one_env()
    rest = {name: rows[name] for name in FURTHER} | {"hidden": dict(zip("01", rows["hidden"], strict=True))}
    after = {name: rest.pop(name) for name in ("cost", "half")}  # as its envs give a reward
    after |= {"observation": rows["obs"] + 1, "reward": rows["reward"][:, None]}
    after |= {name: rows[name][:, None] for name in ("terminated", "truncated")}
    data = {"observation": rows["obs"], "action": rows["action"], "next": TensorDict(after, [12]), **rest}
    TensorDict(data, [12]).memmap(path / "from" / "storage")
    (path / "from" / "storage" / "storage_metadata.json").write_text('{"is_pytree": false, "len": 12}')
    (path / "from" / "writer").mkdir()
    (path / "from" / "writer" / "metadata.json").write_text('{"cursor": 0, "write_count": 12}')
    return str(path / "from")


def _velora(path: Path) -> str:
    buffer = velora.ReplayBuffer(20, 3, 1, 4)
    state = torch.randn(13, 3)
    done = (torch.arange(12) % 4 == 3)[:, None]
    buffer.add_multi(state[:-1], torch.ones(12, 1), torch.ones(12, 1), state[1:], done, torch.ones(12, 4))
    buffer.save(path, "it")
    return str(next(path.glob("*state.safetensors")))


SOURCES: dict[str, Callable[[Path], str]] = {
    "lerobot": _lerobot, "minari": _minari, "minari in hdf5": lambda path: _minari(path, "hdf5"), "npz": _npz,
    "relive": _relive, "relive rollout": _rollout, "rlds": _rlds, "torchrl": _torchrl, "velora": _velora,
    "stable_baselines3": lambda path: str(Path(__file__).parents[1] / "fixtures/exchange/stable_baselines3/plain.pkl"),
}  # fmt: skip
FEWER = {"lerobot": {("brain",)}, "torchrl": {("brain",)}}
NONE = ("velora", "stable_baselines3")
"""Formats whose steps have no further fields, or one that is named."""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setitem(READERS, "rlds", lambda path: from_rlds(EPISODES))


def test_all_formats_are_here() -> None:
    assert {name.partition(" ")[0] for name in SOURCES} == set(READERS)
    assert set(FITS) == set(WRITERS) - {"relive"}


def further(fields: dict[str, Any], names: set[str]) -> dict[Any, Any]:
    return {path: leaf for path, leaf in leaves_of(fields).items() if path[0] in names}


@pytest.mark.parametrize(("source", "target"), covering(list(SOURCES), list(WRITERS), full=2, quick=30))
def test_every_field_goes_along_or_is_named(source: str, target: str, tmp_path: Path) -> None:
    for package, format_ in (("minari", "minari"), ("pyarrow", "lerobot"), ("pyarrow", "minari")):
        if format_ in (source.partition(" ")[0], target):
            pytest.importorskip(package)
    where = SOURCES[source](tmp_path)
    to = {"minari": "to/it-v0"}.get(target, str(tmp_path / "to"))
    kind = source.partition(" ")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = convert(where, to, source_format=kind, target_format=target)
    names = {name for name in log.fields if name not in (*STEP, "next_obs", "done")}
    want = further(log.fields, names)
    if source == "npz":
        assert {name for (name,) in want} == {dotted(path).replace(".", "_") for path in CARRIED}
    elif kind not in NONE:
        assert want.keys() >= CARRIED - FEWER.get(source, set())
        assert source != "torchrl" or "'brain' is no tensor of numbers and was not read" in log.lacks
    elif source == "velora":
        assert "its hidden states were not read" in log.lacks
    back = READERS[target](to)
    got = further(back.fields, names)
    missing = {dotted(path) for path in want.keys() - got.keys()}
    numbering = {"index", "frame_index", "episode_index", "timestamp", "task_index"} & (names | set(back.fields))
    assert {name.partition(".")[0] for name in missing - numbering} == named(log), missing
    ended, terminated = log.fields["terminated"] | log.fields["truncated"], log.fields["terminated"]
    known = "next_obs" in log.fields or terminated | ~(ended | (np.arange(len(log)) == len(log) - 1))
    for path in want.keys() & got.keys() - {(name,) for name in numbering}:
        rows = want[path] if known is True else want[path][known]  # without what came after, a step is no transition
        assert got[path].dtype == rows.dtype, path
        assert got[path].tobytes() == rows.tobytes(), path
    if target == "relive":
        made = ReplayBuffer.load(to)
        if source == "relive":
            assert (made.schema, made.schema.max_episode_steps) == (SCHEMA, 9)
        assert len(made) == len(log.replay())


def named(log: Log) -> set[str]:
    """The further fields that the log says the target has no place for."""
    return {lack.split("'")[1] for lack in log.lacks if " does not go into " in lack or "stays out of" in lack}


def arrays(**others: Any) -> dict[str, Any]:
    rows = one_env()
    return {name: rows[name].numpy() for name in STEP} | others


def test_fields_that_no_replay_can_hold_are_named_and_the_others_stored() -> None:
    others = {"index": np.arange(12), "_own": np.ones(12), "a.b": np.ones(12), "words": np.array(["x"] * 12),
              "dates": np.zeros(12, "datetime64[s]"), "infos/x": np.ones((12, 2))}  # fmt: skip
    log = exchange.log_of(arrays(**others))
    assert named(log) == set(others) - {"infos/x"} == set(log.left_out)
    assert log.replay().data()["infos/x"].shape == (12, 2)
    assert "words" in repr(log)
    assert exchange.Log("mine", {"hidden": np.ones(3)}).lacks == ()
    assert named(exchange.Log("mine", arrays(gain=np.float32(1)))) == {"gain"}


def test_a_column_that_lerobot_makes_itself_is_named_on_its_way_there(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    fixture = str(Path(__file__).parents[1] / "fixtures" / "exchange" / "lerobot")
    log = convert(fixture, f"lerobot:{tmp_path / 'to'}")
    assert named(log) == {"task_index"}
    assert "task_index" in exchange.from_lerobot(fixture).replay().schema.names  # which of its two tasks
    assert not {"index", "frame_index", "timestamp"} & set(log.replay().schema.names)


def test_a_schema_chooses_the_fields() -> None:
    log = exchange.log_of(replay())
    assert log.replay().schema == SCHEMA
    assert log.replay(Schema(STEP | {"cost": Field((), torch.float64)})).schema.names == (*STEP, "cost")
