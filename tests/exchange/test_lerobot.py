"""LeRobotDataset v3: what goes out comes back, what LeRobot wrote comes in, and what lies is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import ReplayBuffer, Schema
from relive.errors import DTypeError, FieldError, FileFormatError, NoSaveError, ParameterError, ShapeError
from relive.exchange import from_lerobot, to_lerobot
from relive.exchange import lerobot as read
from relive.exchange import lerobot as write
from relive.exchange.lerobot import episode_stats, joined_stats
from relive.steps.schema import Field
from support import internals
from support.twins import Twin

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

FILES = Path(__file__).parents[1] / "fixtures" / "exchange" / "lerobot"
FRAMES, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"


def columns(replay: Any) -> dict[str, Any]:
    table = replay.to_pandas(next_obs=True)
    return {name: np.stack(list(table[name])) for name in table.columns if name not in ("env", "index", "episode")}


@pytest.mark.parametrize("dress", ["box", "dict", "tuple", "image", "mixed"])
def test_episodes_go_out_and_come_back(tmp_path: Path, dress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "FILE_BYTES", 1)
    monkeypatch.setattr(write, "FILES", 2)
    monkeypatch.setattr(write, "TOGETHER", 3)
    monkeypatch.setattr(write, "PIECE", 3)
    twin = Twin(2, 40, dress=dress).play("..", ".T", "..", "U.", "..", ".B", "..")
    folder = to_lerobot(twin.buffer, tmp_path / "set", task="walk")
    assert len(list(folder.glob("data/chunk-*/*.parquet"))) == 4
    assert len(list(folder.glob("data/chunk-*"))) == 2
    tables = [pq.read_table(file) for file in sorted(folder.glob("data/chunk-*/*.parquet"))]
    assert [number for table in tables for number in table["index"].to_pylist()] == list(range(12))
    log = from_lerobot(folder)
    back = log.replay(twin.schema)
    back.check()
    want, got = columns(twin.buffer), columns(back)
    last = want.pop("truncated"), got.pop("truncated")
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].dtype == got[name].dtype
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert len(np.flatnonzero(last[0] != last[1])) == 1  # the episode that was still running
    assert [len(e.steps) for e in back.episodes()] == [4, 2, 2, 4]
    assert log.lacks == ()
    np.testing.assert_array_equal(log.fields["frame_index"], [*range(4), 0, 1, 0, 1, *range(4)])


def test_further_fields_and_dtypes_come_back_to_the_bit(tmp_path: Path) -> None:
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32",
             "float64")  # fmt: skip
    fields = {f"x_{name}": Field((2,) if at % 2 else (), getattr(torch, name)) for at, name in enumerate(names)}
    schema = Schema({"obs": (3,), "action": (), "reward": (), "terminated": Field((), torch.bool),
                     "truncated": Field((), torch.bool), "hidden": ((2,), (1, 2)), **fields})  # fmt: skip
    replay = ReplayBuffer(schema, 20)
    rng = np.random.default_rng(0)
    for t in range(12):
        step = {name: rng.integers(0, 2, size=(1, *field.shape)).astype(str(field.dtype)[6:])
                for name, field in fields.items()}  # fmt: skip
        step |= {"obs": rng.normal(size=(1, 3)), "action": np.ones(1), "reward": np.ones(1)}
        step["hidden"] = rng.normal(size=(1, 2)), rng.normal(size=(1, 1, 2))
        replay.add(step | {"terminated": [t % 4 == 3], "truncated": [False], "next_obs": rng.normal(size=(1, 3))})
    log = from_lerobot(to_lerobot(replay, tmp_path / "set"))
    want, got = columns(replay), columns(log.replay(schema))
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].tobytes() == got[name].tobytes(), name


def test_what_lerobot_wrote_comes_in() -> None:
    log = from_lerobot(FILES)
    obs = log.fields["obs"]
    assert obs.keys() == {"state", "grid"}
    assert obs["grid"].dtype == np.int16
    np.testing.assert_array_equal(obs["grid"][:, 1, 2], obs["state"][:, 2])
    np.testing.assert_array_equal(log.fields["reward"], [*range(0, 16, 2), *range(1, 16, 2)])
    np.testing.assert_array_equal(log.fields["action"][:, 1], -log.fields["reward"])
    np.testing.assert_array_equal(np.flatnonzero(log.fields["terminated"]), [3, 15])
    np.testing.assert_array_equal(np.flatnonzero(log.fields["truncated"]), [7, 11])
    assert log.lacks == (
        "'observation.picture' has the dtype image and was not read; images=True reads it",
        "it does not tell truncation from termination; a done episode counts as terminated",
        "it names its tasks in words, which were not read; 'task_index' was",
        "it keeps no final observations",
    )
    assert [len(e.steps) for e in log.replay().episodes()] == [4, 3, 3, 4]


def test_statistics_are_those_of_lerobot() -> None:
    theirs = json.loads((FILES / "meta" / "stats.json").read_text())
    log = from_lerobot(FILES)
    for name, array in {"action": log.fields["action"], "next.reward": log.fields["reward"][:, None]}.items():
        ours: Any = None
        for low in range(0, 16, 4):
            part = episode_stats(array[low : low + 4])
            ours = part if ours is None else joined_stats(ours, part)
        for key in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(ours[key], theirs[name][key], rtol=1e-6)
        for key in ("q01", "q50", "q99"):  # which LeRobot takes from histograms
            np.testing.assert_allclose(ours[key], theirs[name][key], atol=2)


# -- ends -----------------------------------------------------------------------------------------------------------


def rewritten(folder: Path, name: str, **changed: Any) -> None:
    """Replace columns of a Parquet file; None removes one."""
    table = pq.read_table(folder / name)
    for column, values in changed.items():
        at = table.column_names.index(column) if column in table.column_names else None
        if at is not None:
            table = table.remove_column(at)
        if values is not None:
            array = values if isinstance(values, pa.Array) else pa.array(values)
            table = table.append_column(column, array)
    pq.write_table(table, folder / name)


def twice(folder: Path, name: str, column: str) -> None:
    """Store a column of a Parquet file a second time."""
    table = pq.read_table(folder / name)
    pq.write_table(table.append_column(column, table[column]), folder / name)


def described(folder: Path, features: dict[str, Any] | None = None, **changed: Any) -> None:
    """Change members of info.json, and features; None removes one."""
    file = folder / "meta" / "info.json"
    info = json.loads(file.read_text()) | changed
    known = info["features"] | (features or {})
    info["features"] = {name: note for name, note in known.items() if note is not None}
    file.write_text(json.dumps(info))


FLAG = {"dtype": "bool", "shape": [1], "names": None}
BITS = np.arange(16) % 4 == 3


@pytest.mark.parametrize(
    ("flags", "terminated", "truncated", "lack"),
    [
        ({"done": BITS, "truncated": BITS & (np.arange(16) > 4)}, [3], [7, 11, 15], None),
        ({"done": BITS, "terminated": BITS & (np.arange(16) > 4)}, [7, 11, 15], [3], None),
        ({"truncated": BITS & (np.arange(16) > 4)}, [], [3, 7, 11, 15], "does not say how"),
        ({"terminated": BITS & (np.arange(16) > 4)}, [7, 11, 15], [3], None),
        ({"done": BITS}, [3, 7, 11, 15], [], "does not tell"),
        ({}, [], [3, 7, 11, 15], "does not say how"),
    ],
)
def test_ends_follow_from_the_flags_that_there_are(
    tmp_path: Path, flags: dict[str, Any], terminated: list[int], truncated: list[int], lack: str | None
) -> None:
    folder = shutil.copytree(FILES, tmp_path / "set")
    rewritten(folder, FRAMES, **({"next.done": None} | {f"next.{name}": bits for name, bits in flags.items()}))
    described(folder, {"next.done": None} | {f"next.{name}": FLAG for name in flags})
    log = from_lerobot(folder)
    assert np.flatnonzero(log.fields["terminated"]).tolist() == terminated
    assert np.flatnonzero(log.fields["truncated"]).tolist() == truncated
    found = [sentence for sentence in log.lacks if "truncation" in sentence or "ended" in sentence]
    assert [lack in sentence for sentence in found] == [True] if lack else not found


def test_a_data_set_without_rewards_says_so(tmp_path: Path) -> None:
    folder = shutil.copytree(FILES, tmp_path / "set")
    described(folder, {"next.reward": None})
    log = from_lerobot(folder)
    assert "it keeps no rewards; zeros stand for them" in log.lacks
    assert not log.fields["reward"].any()


# -- what lies ------------------------------------------------------------------------------------------------------


def note(dtype: str = "float32", *shape: Any, **info: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": None, "info": info}


def of_features(**features: Any) -> Callable[[Path], None]:
    return lambda folder: described(folder, {name.replace("__", "."): x for name, x in features.items()})


def of_frames(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: rewritten(folder, FRAMES, **{name.replace("__", "."): x for name, x in changed.items()})


def ragged(_: Any = None) -> Any:
    return pa.array([[1.0, 2.0]] * 15 + [[1.0, 2.0, 3.0]], pa.list_(pa.float32()))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda f: described(f, codebase_version="v2.1"), FileFormatError, "convert it with LeRobot"),
        (lambda f: described(f, total_frames=17), FileFormatError, "expected total_frames of 16"),
        (lambda f: described(f, total_episodes=3), FileFormatError, "expected total_episodes of 4, .* got 3"),
        (lambda f: described(f, total_frames=-1), FileFormatError, "whole number"),
        (lambda f: (f / "meta/info.json").write_text("[]"), FileFormatError, "JSON object"),
        (lambda f: (f / "meta/info.json").write_text('{"codebase_version": "v3.0", "features": 3}'), FileFormatError,
         "'features': expected an object"),
        (lambda f: (f / "meta/info.json").unlink(), NoSaveError, r"info\.json"),
        (lambda f: ((f / "meta/info.json").unlink(), (f / "meta/info.json").symlink_to("info.json")), FileFormatError,
         "symbolic link"),
        (lambda f: ((f / FRAMES).unlink(), os.mkfifo(f / FRAMES)), FileFormatError, "expected a regular file"),
        (lambda f: shutil.rmtree(f / "data"), NoSaveError, "expected Parquet files"),
        (lambda f: (f / FRAMES).write_bytes(b"PAR1" + bytes(99) + b"PAR1"), FileFormatError, "damaged"),
        (lambda f: os.truncate(f / FRAMES, 9000), FileFormatError, "damaged"),
        (of_features(action=note("float32", 3)), FileFormatError, "expected 3 numbers in each of"),
        (of_features(action=note("float32", 2**39)), FileFormatError, "numbers in each of"),
        (of_features(action=note("float32", 2, -1)), FileFormatError, "expected a dtype and a shape"),
        (of_features(action=note("object", 2)), FileFormatError, "expected a dtype and a shape"),
        (of_features(action=note("int8", 2)), FileFormatError, "numbers of float32"),
        (of_features(action=note("float32", 1, 2)), FileFormatError, "where a list is due|lists of other lengths"),
        (of_features(action=3), FileFormatError, "expected a dtype and a shape"),
        (of_features(other=note("float32", 1)), FileFormatError, "expected a column 'other'"),
        (of_features(action=note("float32", 2, **{"relive.shape": [3]})), FileFormatError, "'relive.shape'"),
        (of_features(action=note("float32", 2, **{"relive.path": []})), FileFormatError, "'relive.path'"),
        (of_features(action=note("float32", 2, **{"relive.path": ["obs", "state"] * 20})), FileFormatError, "'relive"),
        (of_features(action=note("float32", 2, **{"relive.path": ["obs", 1]}), observation__state=None),
         FileFormatError, "expected 0, 1"),
        (of_features(action=note("float32", 2, **{"relive.path": ["obs"]})), FileFormatError, "more after it"),
        (of_features(observation__state=None, observation__grid=None), FieldError, "has no observations"),
        (of_frames(action=ragged()), FileFormatError, "expected 2 numbers in each of 16 frames, got 33"),
        (of_frames(action=pa.array([[1.0, 2.0]] * 14 + [[1.0], [1.0, 2.0, 3.0]], pa.list_(pa.float32()))),
         FileFormatError, "lists of other lengths"),
        (of_frames(action=pa.array([[1.0, 2.0]] * 15 + [[1.0, None]], pa.list_(pa.float32()))), FileFormatError,
         "missing values"),
        (of_frames(action=["a"] * 16), FileFormatError, "numbers in each of|where a list is due"),
        (of_frames(next__done=[None] * 15 + [True]), FileFormatError, "missing values"),
        (of_frames(frame_index=np.arange(16)), FileFormatError,
         "count from 0 in each episode; row 4, of episode 1, has 4"),
        (of_frames(episode_index=np.arange(16)[::-1] // 4), FileFormatError, "in order"),
        (lambda f: rewritten(f, EPISODES, length=[4, 5, 3, 4]), FileFormatError,
         "the frames have, got others: row 1 is of episode 1 with 5 frames, and the frames are 4 of episode 1"),
        (lambda f: rewritten(f, EPISODES, episode_index=[0, 1, 2, 4]), FileFormatError, "the frames have"),
        (lambda f: rewritten(f, EPISODES, length=None), FileFormatError, "expected a column 'length'"),
        (lambda f: rewritten(f, EPISODES, **{"final/observation.state": [[1.0] * 4] * 4, "final/observation.grid":
                                             [[1] * 6] * 4}), FileFormatError, "expected 3 numbers in each of 4"),
    ],
)  # fmt: skip
def test_a_data_set_that_lies_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    folder = shutil.copytree(FILES, tmp_path / "set")
    spoil(folder)
    with pytest.raises(error, match=message):
        from_lerobot(folder)


def test_a_small_file_of_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = shutil.copytree(FILES, tmp_path / "set")
    many = pa.ListArray.from_arrays(pa.array([0, 2**18], pa.int32()), pa.array(np.zeros(2**18, np.float32)))
    rewritten(folder, FRAMES, action=pa.array([many[0].as_py()] + [[]] * 15, pa.list_(pa.float32())))
    assert (folder / FRAMES).stat().st_size < 2**16
    with pytest.raises(FileFormatError, match="expected 2 numbers in each of 16 frames, got"):
        from_lerobot(folder)


def test_more_rows_than_are_stated_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, many = shutil.copytree(FILES, tmp_path / "set"), np.zeros(2**16, np.int64)
    pq.write_table(pa.table({"episode_index": many, "length": many}), folder / EPISODES)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(FileFormatError, match="expected total_episodes of 65536, as the files have, got 4"):
        from_lerobot(folder)


def test_memory_for_frames_and_final_observations_is_asked_for_as_they_lie_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(FILES, tmp_path / "set")
    asked: list[int] = []
    monkeypatch.setattr(read, "require_memory", lambda size, _: asked.append(size))
    from_lerobot(folder)
    rewritten(folder, FRAMES, action=pa.array([[1.0, 2.0]] * 16, pa.list_(pa.float64())))
    from_lerobot(folder)  # twice as wide as a float32, and with the offsets of 16 lists
    assert asked[1] - asked[0] == 3 * (16 * 2 * 4 + 16 * 8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: rewritten(f, FRAMES, **{"next.reward": ["x" * 1000] * 16}), "got string"),
        (lambda f: twice(f, FRAMES, "next.reward"), "got 2"),
        (lambda f: twice(f, EPISODES, "length"), "got 2"),
        (
            lambda f: rewritten(
                f, EPISODES, **{"final/observation.state": [[1.0] * 2**12] * 4, "final/observation.grid": [[1] * 6] * 4}
            ),
            "got 16384 in all",
        ),
    ],
)
def test_columns_that_would_take_more_memory_than_they_say_are_refused_before_they_are_read(
    tmp_path: Path, spoil: Callable[[Path], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(FILES, tmp_path / "set")
    spoil(folder)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(FileFormatError, match=message):
        from_lerobot(folder)


# -- writing --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(1, 20).play(".", "T", ".", "U")
    for fps in (0, -1, 1.5, True, "30"):
        with pytest.raises(ParameterError, match="fps"):
            to_lerobot(twin.buffer, tmp_path / "set", fps=fps)
    with pytest.raises(ParameterError, match="expected words"):
        to_lerobot(twin.buffer, tmp_path / "set", task=3)
    with pytest.raises(ParameterError, match="no complete transition"):
        to_lerobot(Twin(1, 20).buffer, tmp_path / "set")
    with pytest.raises(FieldError, match="rename it"):
        to_lerobot(ReplayBuffer(twin.schema.extend(timestamp=()), 20), tmp_path / "set")
    with pytest.raises(DTypeError, match="bfloat16"):
        to_lerobot(ReplayBuffer(twin.schema.extend(half=Field((), torch.bfloat16)), 20), tmp_path / "set")
    with pytest.raises(ShapeError, match="1 to 5 axes"):
        to_lerobot(ReplayBuffer(twin.schema.extend(deep=(1,) * 6), 20), tmp_path / "set")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(write, "_write_task", interrupted)
        with pytest.raises(KeyboardInterrupt):
            to_lerobot(twin.buffer, tmp_path / "set")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set").mkdir()
    to_lerobot(twin.buffer, tmp_path / "set")  # an empty directory will do
    assert len(from_lerobot(tmp_path / "set")) == 4
    with pytest.raises(FileFormatError, match="nothing or an empty directory"):
        to_lerobot(twin.buffer, tmp_path / "set")


def test_a_next_observation_that_an_episode_cannot_hold_is_named(tmp_path: Path) -> None:
    replay = ReplayBuffer(Twin(1, 20).schema, 20, own_next_obs=True)
    for t in range(4):
        after = np.full((1, 4), 50 if t == 2 else t + 1)
        replay.add(
            obs=np.full((1, 4), t), action=[0], reward=[0], terminated=[t == 3], truncated=[False], next_obs=after
        )
    with pytest.raises(FieldError, match="field 'obs': the observation after step 2 of an episode"):
        to_lerobot(replay, tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_write_at_once_the_first_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(1, 20).play(".", "T", ".", "U")
    last = internals.write_task(write)

    def after_another(file: Path, task: str) -> None:
        monkeypatch.setattr(write, "_write_task", last)
        to_lerobot(twin.buffer, tmp_path / "set", task="first")
        last(file, task)

    monkeypatch.setattr(write, "_write_task", after_another)
    with pytest.raises(FileFormatError, match="something was put there meanwhile"):
        to_lerobot(twin.buffer, tmp_path / "set", task="second")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert pq.read_table(tmp_path / "set" / "meta" / "tasks.parquet")["task"].to_pylist() == ["first"]


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = shutil.copytree(FILES, tmp_path / "set")
    table = pq.read_table(folder / FRAMES)
    (folder / FRAMES).unlink()
    for low, name in ((0, "chunk-000/file-999"), (4, "chunk-000/file-1000"), (8, "chunk-999/file-000"),
                      (12, "chunk-1000/file-000")):  # fmt: skip
        (folder / "data" / name).parent.mkdir(exist_ok=True)
        pq.write_table(table.slice(low, 4), folder / "data" / f"{name}.parquet")
    np.testing.assert_array_equal(from_lerobot(folder).fields["index"], np.arange(16))


def test_numbers_that_are_not_finite_have_no_statistics(tmp_path: Path) -> None:
    twin = Twin(1, 20)
    twin.play(".", "T", ".", "U")
    twin.buffer.block["reward"][0] = float("nan")
    folder = to_lerobot(twin.buffer, tmp_path / "set")
    stats = json.loads((folder / "meta" / "stats.json").read_text())
    assert "next.reward" not in stats
    assert "action" in stats
    assert np.isnan(from_lerobot(folder).fields["reward"]).sum() == 1
