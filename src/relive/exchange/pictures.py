"""Pictures of LeRobot data sets: compressed images in Parquet files, and videos.

In order: what a picture is; compressed images; writing videos; reading them; and numbers about pictures.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import FileFormatError, NoSaveError, ParameterError, ShapeError
from ..names import needed
from ..steps.arrays import Array, Ints
from .log import Json, sizes_in

KINDS = "numbers", "image", "video"
"""How images are written: as numbers, as compressed images in the Parquet files, or as videos beside them."""

VIDEOS = "videos"

MODES = {1: ("L", "gray"), 3: ("RGB", "rgb24"), 4: ("RGBA", "rgba")}
"""Channels of a picture -> the names of its pixels in Pillow and in PyAV."""

BYTES = ("1", "L", "P", "RGB", "RGBA")
"""Pillow's names of pixels that bytes hold. Depth of 16 bits would be cut."""

AXES = ["height", "width", "channels"]


class Picture(NamedTuple):
    """One column of pictures.

    Args:
        name: the name of the column.
        kind: "image" or "video".
        size: height, width and channels, as they are in files.
        planar: True if the channels are the first axis in a step.
        path: where the column belongs in a step.
    """

    name: str
    kind: str
    size: tuple[int, int, int]
    planar: bool
    path: tuple[str | int, ...]

    @property
    def own_shape(self) -> tuple[int, int, int]:
        """The shape in a step."""
        height, width, channels = self.size
        return (channels, height, width) if self.planar else self.size

    def as_stored(self, frames: Array) -> Array:
        """Frames ``[k, *own_shape]`` as ``[k, height, width, channels]``, of the same memory."""
        return frames.transpose(0, 2, 3, 1) if self.planar else frames

    def note(self, fps: int) -> dict[str, object]:
        """The entry of ``info.json``."""
        ours: dict[str, object] = {"relive.path": list(self.path), "relive.shape": list(self.own_shape)}
        if self.kind == "video":
            about = {"height": self.size[0], "width": self.size[1], "codec": CODEC, "pix_fmt": PIXELS, "fps": fps,
                     "channels": 3, "is_depth_map": False}  # fmt: skip
            ours |= {f"video.{key}": value for key, value in about.items()} | {"has_audio": False}
        return {"dtype": self.kind, "shape": list(self.size), "names": AXES, "info": ours}


def is_picture(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    """True for what LeRobot takes for a picture: bytes of three channels, which are the first axis or the last."""
    return dtype == np.uint8 and len(shape) == 3 and 3 in (shape[0], shape[-1])


def to_write(
    fields: Mapping[str, tuple[np.dtype, tuple[int, ...], tuple[str | int, ...]]], images: object
) -> dict[str, Picture]:
    """The pictures among fields, by the name of their column.

    Args:
        fields: name -> dtype, shape and path in a step.
        images: how to write them, one of ``KINDS``.

    Raises:
        ParameterError: ``images`` is something else, or there are no pictures.
        ShapeError: a picture cannot be a video.
        ModuleNotFoundError: a package is missing.
    """
    if not isinstance(images, str) or images not in KINDS:
        raise ParameterError(f"to_lerobot(images={images!r:.80}): expected one of {', '.join(map(repr, KINDS))}")
    if images == "numbers":
        return {}
    found: dict[str, Picture] = {}
    for name, (dtype, shape, path) in fields.items():
        if is_picture(dtype, shape) and not name.startswith("."):  # a video lies in a folder of this name
            planar = shape[0] == 3
            height, width = shape[1:] if planar else shape[:2]
            found[name] = Picture(name, images, (height, width, 3), planar, path)
    if not found:
        shapes = ", ".join(f"'{name}' {dtype} {shape}" for name, (dtype, shape, _) in fields.items())
        raise ParameterError(
            f"to_lerobot(images={images!r}): expected a picture, uint8 [H, W, 3] or [3, H, W], got {shapes}; "
            "leave images out"
        )
    _pillow()
    for name, picture in found.items() if images == "video" else ():
        _av()
        if picture.size[0] % 2 or picture.size[1] % 2:
            raise ShapeError(
                f"to_lerobot(images='video'): '{name}' is {picture.size[0]} × {picture.size[1]}; the codec needs even "
                "numbers. Pass images='image'"
            )
    return found


def to_read(name: str, note: Mapping[str, Json], path: tuple[str | int, ...], where: Path) -> Picture | None:
    """The picture that an entry of ``info.json`` describes; None if it has other channels than pictures have.

    Raises:
        FileFormatError: it is no picture.
    """
    shape, names = sizes_in(note.get("shape"), least=1, axes=3), note.get("names")
    info = note.get("info")
    own = info.get("relive.shape") if isinstance(info, dict) else None
    if shape is None or len(shape) != 3 or name.startswith(".") or "/" in name:
        raise FileFormatError(f"'{where}', feature '{name:.80}': expected a picture of three sizes; use another copy")
    first, second, third = shape
    if own is not None:  # written here: the shape is that of the files, and the own one is that of a step
        planar = own == [third, first, second] and third == 3
        if not planar and own != list(shape):
            raise FileFormatError(f"'{where}', feature '{name:.80}': 'relive.shape' contradicts {shape}")
    else:
        planar = isinstance(names, list) and str(names[:1]).startswith("['channel")
        shape = (second, third, first) if planar else shape
    if shape[2] not in MODES:
        return None
    return Picture(name, str(note["dtype"]), (shape[0], shape[1], shape[2]), planar, path)


# -- compressed images -------------------------------------------------------------------------------------------------


def _pillow() -> Any:
    with needed("Pictures of LeRobot data sets need Pillow: pip install 'relive[lerobot]'"):
        return import_module("PIL.Image")


def pngs(frames: Array) -> Array:
    """Frames ``[k, height, width, 3]`` as PNG files, object ``[k]``. Nothing is lost."""
    image = _pillow()
    found = np.empty(len(frames), np.object_)
    for at, frame in enumerate(frames):
        stream = io.BytesIO()
        image.fromarray(np.ascontiguousarray(frame)).save(stream, "PNG")
        found[at] = stream.getvalue()
    return found


def fill_images(files: Iterable[object], picture: Picture, out: Array, where: str) -> None:
    """Decode compressed images into ``out``, ``[k, height, width, channels]``.

    Raises:
        FileFormatError: one is missing, is damaged, or has another size.
    """
    image, mode = _pillow(), MODES[picture.size[2]][0]
    for at, content in enumerate(files):
        if not isinstance(content, bytes):
            raise FileFormatError(
                f"'{where}', column '{picture.name}': expected a compressed image in each row, got none in row {at}; "
                "use another copy"
            )
        try:
            with image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as opened:
                if (opened.height, opened.width) != picture.size[:2] or opened.mode not in BYTES:
                    raise ValueError(f"it has {opened.height} × {opened.width} pixels of {opened.mode}")
                out[at] = np.asarray(opened.convert(mode)).reshape(picture.size)
        except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
            raise FileFormatError(
                f"'{where}', column '{picture.name}', row {at}: expected an image of {picture.size[0]} × "
                f"{picture.size[1]} pixels: {error!s:.200}; use another copy"
            ) from error


# -- writing videos ----------------------------------------------------------------------------------------------------

CODEC, ENCODER, PIXELS = "h264", "libx264", "yuv420p"

CODECS = "h264", "hevc", "av1", "vp9", "mpeg4"
"""The codecs of videos that are read; LeRobot writes the first three."""

OPTIONS = {"g": "2", "crf": "18", "tune": "zerolatency"}
"""Every second frame stands alone, as in LeRobot's videos, so that a frame is found at once. No frame waits for a later
one, so files begin at the time 0, and their size is known. LeRobot's own codec, SVT-AV1, ends the process where a
picture is small."""

VIDEO_BYTES = 200 * 2**20
"""Bytes of a video before the next one is begun: LeRobot's own limit."""


def _av() -> Any:
    with needed("Videos of LeRobot data sets need PyAV: pip install 'relive[lerobot]'"):
        return import_module("av")


def video_file(folder: Path, name: str, chunk: int, number: int) -> Path:
    """The path of a video."""
    return folder / VIDEOS / name / f"chunk-{chunk:03d}" / f"file-{number:03d}.mp4"


VIDEO_PATH = VIDEOS + "/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


class VideoWriter:
    """The videos of one column: episodes follow each other, and the next file begins where an episode does.

    Args:
        folder: the directory of the data set.
        picture: the column.
        fps: frames per second.
        files: files in a folder.
    """

    def __init__(self, folder: Path, picture: Picture, fps: int, files: int) -> None:
        self._folder, self._picture, self._fps, self._files = folder, picture, fps, files
        self._container: Any = None
        self._stream: Any = None
        self._number, self._frames, self._bytes = -1, 0, 0

    def add(self, frames: Array) -> dict[str, object]:
        """Write an episode ``[k, height, width, 3]``; returns where it is, for the table of episodes."""
        if self._container is None or self._bytes >= VIDEO_BYTES:
            self.close()
            self._begin()
        first = self._frames
        for frame in frames:
            picture = _av().VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            picture.pts, picture.time_base = self._frames, Fraction(1, self._fps)
            self._encode(picture)
            self._frames += 1
        chunk, number = divmod(self._number, self._files)
        place = {"chunk_index": chunk, "file_index": number, "from_timestamp": first / self._fps,
                 "to_timestamp": self._frames / self._fps}  # fmt: skip
        return {f"{VIDEOS}/{self._picture.name}/{key}": value for key, value in place.items()}

    def _begin(self) -> None:
        """Open the next file."""
        self._number, self._frames, self._bytes = self._number + 1, 0, 0
        file = video_file(self._folder, self._picture.name, *divmod(self._number, self._files))
        file.parent.mkdir(parents=True, exist_ok=True)
        self._container = _av().open(str(file), "w", format="mp4", options={"movflags": "faststart"})
        self._stream = self._container.add_stream(ENCODER, self._fps, options=OPTIONS)
        self._stream.height, self._stream.width = self._picture.size[:2]
        self._stream.pix_fmt, self._stream.time_base = PIXELS, Fraction(1, self._fps)

    def _encode(self, frame: Any) -> None:
        """Write what the encoder makes of a frame; None asks for what it still has."""
        for packet in self._stream.encode(frame):
            self._bytes += packet.size
            self._container.mux(packet)

    def close(self) -> None:
        """End the file."""
        if self._container is not None:
            try:
                self._encode(None)
            finally:
                self._container.close()
                self._container = None


# -- reading videos ----------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where the episodes of a column lie in its videos, ``[E]``."""

    chunk: Ints
    file: Ints
    start: Array
    """In seconds."""


def fill_videos(folder: Path, picture: Picture, places: Places, bounds: Ints, fps: int, out: Array) -> None:
    """Decode all videos of a column into ``out``, ``[S, height, width, channels]``.

    Args:
        folder: the directory of the data set.
        picture: the column.
        places: where the episodes lie.
        bounds: the first row of each episode, with S at the end, ``[E + 1]``.
        fps: frames per second.
        out: what is filled.

    Raises:
        NoSaveError: a file is missing.
        FileFormatError: a file is damaged, has pictures of another size, or lacks a frame.
    """
    seen = np.zeros(len(out), np.bool_)
    for chunk, number in sorted(set(zip(places.chunk.tolist(), places.file.tolist(), strict=True))):
        inside = np.flatnonzero((places.chunk == chunk) & (places.file == number))
        inside = inside[np.argsort(places.start[inside], kind="stable")]
        starts = places.start[inside]
        for time, frame in _decoded(video_file(folder, picture.name, chunk, number), picture):
            at = int(np.searchsorted(starts, time + 0.5 / fps, "right")) - 1
            if at < 0:
                continue
            episode, step = inside[at], round((time - starts[at]) * fps)
            if step < bounds[episode + 1] - bounds[episode]:
                out[bounds[episode] + step] = frame
                seen[bounds[episode] + step] = True
    if not seen.all():
        row = int(np.argmin(seen))
        episode = int(np.searchsorted(bounds, row, "right")) - 1
        raise FileFormatError(
            f"'{folder / VIDEOS / picture.name}': expected a frame for each step, got none for step "
            f"{row - bounds[episode]} of episode {episode}; use another copy"
        )


def _decoded(file: Path, picture: Picture) -> Iterator[tuple[float, Array]]:
    """The times of the frames of a video in seconds, and their pixels ``[height, width, channels]``."""
    av, pixels = _av(), MODES[picture.size[2]][1]
    if not file.is_file():
        raise NoSaveError(f"'{file}': expected a video, got nothing; give the path of a complete copy")
    try:
        with av.open(str(file), format="mp4") as container:  # other formats may name further files, and addresses
            stream = container.streams.video[0]
            codec = stream.codec_context and stream.codec_context.codec.canonical_name
            if codec not in CODECS:  # without a decoder, PyAV would end the process
                raise ValueError(f"its codec is {codec}, none of {', '.join(CODECS)}")
            for frame in container.decode(stream):
                if (frame.height, frame.width) != picture.size[:2] or frame.time is None:
                    raise ValueError(f"a frame has {frame.height} × {frame.width} pixels, at the time {frame.time}")
                yield frame.time, frame.to_ndarray(format=pixels).reshape(picture.size)
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise FileFormatError(
            f"'{file}': expected a video of {picture.size[0]} × {picture.size[1]} pixels: {error!s:.200}; "
            "use another copy"
        ) from error


# -- numbers about pictures --------------------------------------------------------------------------------------------

MOST_FRAMES, MOST_PIXELS = 100, 100
"""Frames of an episode, and rows and columns of one, that statistics look at. LeRobot takes samples, too."""


def sample_of(frames: Array) -> Array:
    """Pixels of frames ``[k, height, width, 3]`` from 0 to 1, float64 ``[pixels, 3]``."""
    some = frames[:: ceil(len(frames) / MOST_FRAMES)]
    some = some[:, :: ceil(some.shape[1] / MOST_PIXELS), :: ceil(some.shape[2] / MOST_PIXELS)]
    return some.reshape(-1, 3) / 255.0
