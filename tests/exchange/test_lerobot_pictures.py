"""Pictures of LeRobotDataset v3: images and videos go out and come back, and LeRobot itself reads them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import ReplayBuffer, Schema
from relive.errors import FieldError, FileFormatError, NoSaveError, ParameterError, ShapeError
from relive.exchange import from_lerobot, pictures, to_lerobot
from relive.exchange import lerobot as module
from relive.steps.schema import Field
from support.damaging import assert_read_or_refused
from support.effort import often

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

FILES = Path(__file__).parents[1] / "fixtures" / "exchange" / "lerobot"
FRAMES, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
LENGTHS = 5, 3, 5
SIZES = {"front": (12, 16, 3), "wrist": (3, 8, 8)}


def picture(number: int, shape: tuple[int, ...]) -> Any:
    """A smooth picture that a video keeps nearly as it is, and whose numbers tell which one it is."""
    planar = shape[0] == 3
    height, width = shape[1:] if planar else shape[:2]
    plane = np.add.outer(np.arange(height), np.arange(width)) * 2 + 8 * number
    channels = [plane, 255 - plane, *[np.full_like(plane, 10 * number)] * (shape[0 if planar else -1] - 2)]
    return np.stack(channels, 0 if planar else -1).astype(np.uint8)


def played(sizes: dict[str, tuple[int, ...]] = SIZES, state: bool = True) -> ReplayBuffer:
    """Episodes of LENGTHS steps: the first terminates, the second is cut off, and the last one runs on by a step."""
    obs: dict[str, Any] = {name: Field(size, torch.uint8) for name, size in sizes.items()}
    obs |= {"state": (2,)} if state else {}
    schema = Schema({"obs": obs, "action": (2,), "reward": (), "terminated": Field((), torch.bool),
                     "truncated": Field((), torch.bool)})  # fmt: skip
    replay, number = ReplayBuffer(schema, 40), 0

    def seen(number: int) -> Any:
        found = {name: picture(number, size)[None] for name, size in sizes.items()}
        return found | ({"state": np.full((1, 2), number, np.float32)} if state else {})

    for episode, length in enumerate(LENGTHS):
        for t in range(length + (episode == 2)):
            last = t == length - 1
            replay.add(obs=seen(number), action=np.full((1, 2), number, np.float32), reward=[float(number)],
                       terminated=[last and episode == 0], truncated=[last and episode == 1],
                       next_obs=seen(number + 1))  # fmt: skip
            number += 1 + (last and episode < 2)
    return replay


def needs_video(kind: str) -> None:
    if kind == "video":
        pytest.importorskip("av")


def fields(replay: ReplayBuffer, name: str) -> tuple[Any, Any]:
    steps = [episode.steps for episode in replay.episodes()]
    return tuple(np.concatenate([part[group][name].numpy() for part in steps]) for group in ("obs", "next_obs"))


@pytest.mark.parametrize("kind", ["numbers", "image", "video"])
def test_pictures_go_out_and_come_back(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_video(kind)
    monkeypatch.setattr(pictures, "VIDEO_BYTES", 1)
    monkeypatch.setattr(module, "FILES", 2)
    replay = played()
    folder = to_lerobot(replay, tmp_path / "set", fps=20, images=kind)
    log = from_lerobot(folder, images=True)
    assert log.lacks == ()
    back = log.replay()
    assert [len(e.steps) for e in back.episodes()] == list(LENGTHS)
    for name in (*SIZES, "state"):
        for want, got in zip(fields(replay, name), fields(back, name), strict=True):
            assert got.dtype == want.dtype
            if kind == "video" and name in SIZES:
                assert np.abs(got.astype(int) - want).mean() < 3
            else:
                np.testing.assert_array_equal(got, want)
    for name in SIZES:  # final observations lose nothing
        np.testing.assert_array_equal(
            log.fields["next_obs"][name][np.cumsum(LENGTHS) - 1], fields(replay, name)[1][np.cumsum(LENGTHS) - 1]
        )
    videos = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.mp4"))
    files = ("chunk-000/file-000", "chunk-000/file-001", "chunk-001/file-000")
    wanted = [f"videos/observation.{name}/{file}.mp4" for name in sorted(SIZES) for file in files]
    assert videos == (wanted if kind == "video" else [])


@pytest.mark.parametrize("kind", ["image", "video"])
def test_episodes_follow_each_other_in_one_file_and_statistics_are_by_channel(tmp_path: Path, kind: str) -> None:
    needs_video(kind)
    folder = to_lerobot(played(), tmp_path / "set", fps=20, images=kind)
    rows = pq.read_table(folder / EPISODES).to_pylist()
    if kind == "video":
        start = [row["videos/observation.front/from_timestamp"] for row in rows]
        end = [row["videos/observation.front/to_timestamp"] for row in rows]
        np.testing.assert_allclose([*start, end[-1]], np.cumsum([0, *LENGTHS]) / 20)
        np.testing.assert_allclose(start[1:], end[:-1])
        assert len(list(folder.rglob("*.mp4"))) == 2
    stats = json.loads((folder / "meta" / "stats.json").read_text())["observation.front"]
    want = from_lerobot(folder, images=True).fields["obs"]["front"].astype(float) / 255
    for key, of in (("min", want.min), ("max", want.max), ("mean", want.mean), ("std", want.std)):
        assert np.shape(stats[key]) == (3, 1, 1)
        np.testing.assert_allclose(np.ravel(stats[key]), of((0, 1, 2)), atol=0.03)
    note = json.loads((folder / "meta" / "info.json").read_text())["features"]["observation.wrist"]
    assert (note["dtype"], note["shape"], note["names"]) == (kind, [8, 8, 3], ["height", "width", "channels"])


def test_pictures_stay_in_their_files_unless_they_are_asked_for(tmp_path: Path) -> None:
    folder = to_lerobot(played(), tmp_path / "set", images="image")
    log = from_lerobot(folder)
    assert log.fields["obs"].keys() == log.fields["next_obs"].keys() == {"state"}
    assert [sentence.partition(" has")[0] for sentence in log.lacks] == ["'observation.front'", "'observation.wrist'"]
    folder = to_lerobot(played(state=False), tmp_path / "pictures alone", images="image")
    with pytest.raises(FieldError, match=r"has no observations that are numbers.*images=True"):
        from_lerobot(folder)
    assert from_lerobot(folder, images=True).fields["next_obs"]["front"].shape == (sum(LENGTHS), *SIZES["front"])


def test_what_lerobot_wrote_comes_in() -> None:
    log = from_lerobot(FILES, images=True)
    assert log.fields["obs"].keys() == {"state", "grid", "picture"}
    assert log.fields["obs"]["picture"].shape == (16, 2, 2, 3)
    assert not any("picture" in sentence for sentence in log.lacks)
    assert len(np.unique(log.fields["obs"]["picture"].reshape(16, -1), axis=0)) > 1


@pytest.mark.parametrize("size", [(3, 4, 5), (4, 5, 3), (3, 3, 3), (3, 4, 3)])
def test_the_place_of_the_channels_comes_back(tmp_path: Path, size: tuple[int, ...]) -> None:
    rng, replay = np.random.default_rng(0), played({"front": size})
    replay.block["obs", "front"][:] = torch.as_tensor(rng.integers(0, 255, replay.block["obs", "front"].shape))
    back = from_lerobot(to_lerobot(replay, tmp_path / "set", images="image"), images=True).replay()
    np.testing.assert_array_equal(fields(back, "front"), fields(replay, "front"))


# -- LeRobot itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "video"])
def test_lerobot_reads_them(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_video(kind)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dataset_class = pytest.importorskip("lerobot.datasets.lerobot_dataset").LeRobotDataset
    replay = played()
    folder = to_lerobot(replay, tmp_path / "set", fps=20, task="walk", images=kind)
    dataset = dataset_class("me/set", root=folder, video_backend="pyav")
    assert (dataset.num_frames, dataset.num_episodes, dataset.fps) == (sum(LENGTHS), len(LENGTHS), 20)
    assert set(dataset.meta.camera_keys) == {"observation.front", "observation.wrist"}
    assert dataset.meta.stats["observation.front"]["mean"].shape == (3, 1, 1)
    for name in SIZES:
        want, _ = fields(replay, name)
        for row in range(sum(LENGTHS)):
            frame = dataset[row][f"observation.{name}"]
            stored = want[row] if SIZES[name][0] == 3 else want[row].transpose(2, 0, 1)
            assert frame.shape == stored.shape
            assert np.abs(frame.numpy() * 255 - stored).mean() < (3 if kind == "video" else 1e-3)
        assert dataset[row]["task"] == "walk"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_what_lerobot_films_comes_in(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_video(kind)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dataset_class = pytest.importorskip("lerobot.datasets.lerobot_dataset").LeRobotDataset
    size = (64, 96, 3)
    camera = {"dtype": kind, "shape": size, "names": ["height", "width", "channels"]}
    features = {"observation.images.top": camera, "action": {"dtype": "float32", "shape": (2,), "names": None}}
    codec = {"vcodec": "h264"} if kind == "video" else {}
    dataset = dataset_class.create("me/set", 20, features, root=tmp_path / "set", use_videos=kind == "video", **codec)
    for episode in range(3):
        for t in range(4 + episode):
            frame = picture(7 * episode + t, size)
            dataset.add_frame({"observation.images.top": frame, "action": np.zeros(2, np.float32), "task": "walk"})
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    log = from_lerobot(tmp_path / "set", images=True)
    got = log.fields["obs"]["images"]["top"]
    want = np.stack([picture(7 * episode + t, size) for episode in range(3) for t in range(4 + episode)])
    assert got.shape == want.shape
    assert np.abs(got.astype(int) - want).mean((1, 2, 3)).max() < (6 if kind == "video" else 1e-6)


# -- what cannot be written, and what lies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "sizes", "error", "message"),
    [
        ("png", SIZES, ParameterError, r"images='png'\): expected one of 'numbers', 'image', 'video'"),
        (True, SIZES, ParameterError, r"images=True\): expected one of"),
        (
            "image",
            {},
            ParameterError,
            r"expected a picture, uint8 \[H, W, 3\] or \[3, H, W\], got .*'observation.state'",
        ),
        ("video", {}, ParameterError, "expected a picture"),
        ("image", {"depth": (8, 9, 4)}, ParameterError, r"'observation.depth' uint8 \(8, 9, 4\)"),
        ("video", {"front": (7, 8, 3)}, ShapeError, "'observation.front' is 7 × 8; the codec needs even.*'image'"),
    ],
)
def test_images_that_cannot_be_written_are_named_and_leave_nothing(
    tmp_path: Path, images: Any, sizes: Any, error: type[Exception], message: str
) -> None:
    needs_video(images)
    with pytest.raises(error, match=message):
        to_lerobot(played(sizes), tmp_path / "set", images=images)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("package", "kind"), [("PIL.Image", "image"), ("PIL.Image", "video"), ("av", "video")])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, package: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    name = "PyAV" if package == "av" else "Pillow"
    with pytest.raises(ModuleNotFoundError, match=rf"LeRobot data sets need {name}: pip install 'relive\[lerobot\]'"):
        to_lerobot(played(), tmp_path / "set", images=kind)
    assert not list(tmp_path.iterdir())


def column(folder: Path, file: str, name: str, values: Any) -> None:
    """Replace a column of a Parquet file; None removes it."""
    table = pq.read_table(folder / file)
    table = table.remove_column(table.column_names.index(name))
    pq.write_table(table if values is None else table.append_column(name, values), folder / file)


def images_of(*content: bytes | None) -> Any:
    rows = [{"bytes": x, "path": None} for x in content]
    return pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def noted(folder: Path, name: str, **changed: Any) -> None:
    file = folder / "meta" / "info.json"
    info = json.loads(file.read_text())
    info["features"][name] |= changed
    file.write_text(json.dumps(info))


PNG = pictures.pngs(np.zeros((1, 4, 4, 3), np.uint8))[0]
FRONT, FINAL = "observation.front", "final/observation.front"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: column(f, FRAMES, FRONT, None), "expected a column 'observation.front'"),
        (lambda f: column(f, FRAMES, FRONT, images_of(*[None] * 13)), "got none in row 0"),
        (lambda f: column(f, FRAMES, FRONT, pa.array(range(13))), "got none in row 0"),
        (lambda f: column(f, FRAMES, FRONT, images_of(*[PNG] * 13)), "row 0: expected an image of 12 × 16 pixels"),
        (lambda f: column(f, FRAMES, FRONT, images_of(*[b"GIF89a" + bytes(99)] * 13)), "expected an image"),
        (lambda f: column(f, EPISODES, FINAL, pa.array([PNG[:40]] * 3)), "final.*|expected an image"),
        (lambda f: noted(f, FRONT, shape=[12, 16]), "expected a picture of three sizes"),
        (lambda f: noted(f, FRONT, shape=[12, 14, 3]), "'relive.shape' contradicts"),
        (lambda f: noted(f, FRONT, info={"relive.path": []}), "'relive.path'"),
    ],
)
def test_images_that_lie_are_refused(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    folder = to_lerobot(played({"front": (12, 16, 3)}), tmp_path / "set", images="image")
    spoil(folder)
    with pytest.raises(FileFormatError, match=message):
        from_lerobot(folder, images=True)


def video(folder: Path) -> Path:
    return pictures.video_file(folder, FRONT, 0, 0)


def shorter(folder: Path) -> None:
    """A video without its last frame."""
    other = to_lerobot(played({"front": (12, 16, 3)}), folder.parent / "other", images="video", fps=20)
    av = pytest.importorskip("av")
    with av.open(str(video(other))) as old, av.open(str(video(folder)), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in [packet for packet in old.demux(video=0) if packet.dts is not None][:-1]:
            packet.stream = stream
            new.mux(packet)


START = "videos/observation.front/from_timestamp"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda f: video(f).unlink(), NoSaveError, "expected a video, got nothing"),
        (lambda f: video(f).write_bytes(b"no video"), FileFormatError, "expected a video of 12 × 16 pixels"),
        (lambda f: video(f).write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9"), FileFormatError, "a video of"),
        (lambda f: video(f).write_bytes(video(f).read_bytes().replace(b"avc1", b"xxxx")), FileFormatError, "codec is"),
        (shorter, FileFormatError, "got none for step 4 of episode 2"),
        (lambda f: column(f, EPISODES, START, None), FileFormatError, f"expected a column '{START}'"),
        (lambda f: column(f, EPISODES, START, pa.array(["0"] * 3)), FileFormatError, "got string"),
        (lambda f: column(f, EPISODES, START, pa.array([-np.inf, 0, 1])), FileFormatError, "finite numbers in 'vi"),
        (lambda f: column(f, EPISODES, START, pa.array([0, 9.0, 9.0])), FileFormatError, "for step 0 of episode"),
        (lambda f: noted(f, FRONT, shape=[16, 12, 3], info={}), FileFormatError, "a frame has 12 × 16 pixels"),
    ],
)  # fmt: skip
def test_videos_that_lie_are_refused(
    tmp_path: Path, spoil: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    pytest.importorskip("av")
    folder = to_lerobot(played({"front": (12, 16, 3)}), tmp_path / "set", images="video", fps=20)
    spoil(folder)
    with pytest.raises(error, match=message):
        from_lerobot(folder, images=True)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("count", [often(6, 40), pytest.param(2000, marks=pytest.mark.slow)])
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, kind: str, count: int) -> None:
    needs_video(kind)
    folder = to_lerobot(played(), tmp_path / "set", images=kind, fps=20)
    assert_read_or_refused(folder, lambda folder: from_lerobot(folder, images=True), count, seed=count)


def test_memory_for_pictures_is_asked_for_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = to_lerobot(played({"front": (12, 16, 3)}), tmp_path / "set", images="image")
    asked: list[int] = []
    monkeypatch.setattr(module, "require_memory", lambda size, _: asked.append(size))
    from_lerobot(folder, images=True)
    assert asked[-1] == 2 * sum(LENGTHS) * 12 * 16 * 3


def test_what_an_interrupted_writer_of_videos_began_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        to_lerobot(played(), tmp_path / "set", images="video")
    assert not list(tmp_path.iterdir())


def test_images_is_true_or_false() -> None:
    with pytest.raises(ParameterError, match=r"from_lerobot\(images='video'\): expected True or False"):
        from_lerobot(shutil.os.fspath(FILES), images="video")
