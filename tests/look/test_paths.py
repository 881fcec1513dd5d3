"""What the commands and inspect say to paths of every kind: an answer, or one line that names the path."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import relive
from relive import ReplayBuffer, errors
from relive.cli import app
from relive.look import experience as npz
from support import loops
from support.forks import in_fork

ARRAYS = {"obs": np.zeros((30, 2), np.float32), "action": np.zeros(30, int), "reward": np.zeros(30),
          "terminated": np.arange(30) % 10 == 9}  # fmt: skip


def arrays(path: Path, **changes: Any) -> Path:
    np.savez(path, **(ARRAYS | changes))  # pyright: ignore[reportArgumentType]
    return path


def cut(path: Path) -> None:
    os.truncate(arrays(path), 300)


def flipped(path: Path) -> None:
    raw = bytearray(arrays(path).read_bytes())
    raw[raw.index(b"NUMPY") + 200] ^= 255
    path.write_bytes(raw)


def claiming(shape: tuple[int, ...]) -> Callable[[Path], None]:
    """An .npz file whose headers claim a shape that its bytes do not have."""

    def make(path: Path) -> None:
        header = BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("obs", "reward", "terminated"):
                archive.writestr(f"{name}.npy", header.getvalue() + bytes(100))

    return make


def one_array(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, ARRAYS["obs"])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: None, "No such file"),
    "no bytes": (lambda path: path.touch(), "expected an .npz file"),
    "text": (lambda path: path.write_text("text"), "expected an .npz file"),
    "a file cut short": (cut, "expected an .npz file"),
    "a wrong checksum": (flipped, "expected an .npz file"),
    "one array without a name": (one_array, "expected an .npz file"),
    "Python objects": (lambda path: arrays(path, x=np.array([{}, 1], object)), "without Python objects"),
    "more numbers than bytes": (claiming((10**13,)), "an array of it claims more numbers than memory holds"),
    "more numbers than there are": (claiming((2**62, 4)), "expected an .npz file"),
    "fewer than no numbers": (claiming((-5,)), "expected an .npz file"),
    "a pipe": (os.mkfifo, "expected a regular file"),
    "an empty directory": (Path.mkdir, "a directory without manifest.json"),
    "dates": (lambda path: arrays(path, obs=np.zeros(30, "M8[s]")), "'obs': expected numbers or flags, got datetime64"),
    "records": (lambda path: arrays(path, action=np.zeros(30, [("a", "f4")])), "'action': expected numbers or flags"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_are_not_what_they_seem_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    make(path := tmp_path / "x.npz")
    for command in (["audit"], ["inspect"], ["convert", str(tmp_path / "out")]):
        if command[0] == "convert" and name in ("nothing", "a pipe", "an empty directory"):
            continue  # the format cannot be found out
        arguments = [command[0], str(path), *command[1:]]
        result = in_fork(run, arguments) if name == "a pipe" else run(arguments)  # a reader may wait on it
        assert result[0] == 2, result
        assert reason in result[1]
        assert result[1].count("\n") == 1
    assert not (tmp_path / "out").exists()


def run(arguments: list[str]) -> tuple[int, str]:
    found = CliRunner().invoke(app, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output


@pytest.mark.parametrize("name", ["a.npy", "a.pkl", "a"])
def test_a_file_of_another_kind_is_refused_with_what_can_be_read(name: str, tmp_path: Path) -> None:
    one_array(tmp_path / name)
    for command in ("audit", "inspect"):
        code, output = run([command, str(tmp_path / name)])
        assert code == 2
        assert "or an .npz file of arrays by name, got another file; numpy.savez writes such arrays" in output


def test_arrays_are_read_through_a_link_and_only_if_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = arrays(tmp_path / "x.npz")
    (tmp_path / "link.npz").symlink_to(path)
    assert relive.inspect(tmp_path / "link.npz").num_steps == 30
    monkeypatch.setattr("relive.memory.estimate.free_memory", lambda: 1000)
    with pytest.raises(errors.ParameterError, match=r"reading '.*' would take .* and 1,000 are free"):
        relive.inspect(path)
    monkeypatch.setattr(npz, "MEMBERS", 3)
    with pytest.raises(errors.FileFormatError, match="4 arrays"):
        npz.read_npz(path)


def test_a_replay_in_files_is_shown_while_it_is_open(tmp_path: Path) -> None:
    with ReplayBuffer.open(tmp_path / "r", relive.Schema.from_example({**{k: v[0] for k, v in ARRAYS.items()},
                                                                     "truncated": False}), 100) as replay:  # fmt: skip
        for t in range(10):
            replay.add({name: column[t : t + 1] for name, column in ARRAYS.items()}, truncated=[False],
                       next_obs=ARRAYS["obs"][t : t + 1])  # fmt: skip
        code, output = run(["inspect", str(tmp_path / "r"), "--json", "--steps", "0:2"])
        assert code == 0
        assert '"num_steps": 10' in output
        assert run(["convert", str(tmp_path / "r"), str(tmp_path / "save")])[0] == 0
    assert len(ReplayBuffer.load(tmp_path / "save")) == 10


def test_a_directory_of_saves_names_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        planted_replay().save(tmp_path / name)
    code, output = run(["inspect", str(tmp_path)])
    assert code == 2
    assert f"but in it: give '{tmp_path / 'a'}' or '{tmp_path / 'b'}'" in output


def test_a_save_is_not_converted_into_itself(tmp_path: Path) -> None:
    replay = planted_replay()
    replay.save(tmp_path / "a")
    for target in (tmp_path / "a", f"relive:{tmp_path / 'b' / '..' / 'a'}"):
        code, output = run(["convert", str(tmp_path / "a"), str(target)])
        assert code == 2
        assert "is the source" in output
    assert ReplayBuffer.load(tmp_path / "a").data()["reward"].tolist() == replay.data()["reward"].tolist()


def planted_replay() -> ReplayBuffer:
    return ReplayBuffer.from_arrays({k: v for k, v in loops.stored(loops.walk(3)).items() if k != "next_obs"})


def test_a_picture_needs_an_ending_and_a_recording_a_directory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    planted_replay().save(tmp_path / "a")
    for name in ("picture", "picture.foo", "a"):
        code, output = run(["inspect", str(tmp_path / "a"), "--plot", str(tmp_path / name)])
        assert code == 2
        assert "expected a file that ends in .pdf" in output
    pytest.importorskip("rerun")
    code, output = run(["inspect", str(tmp_path / "a"), "--rerun", str(tmp_path / "none" / "x.rrd")])
    assert code == 2
    assert "cannot write" in output


def test_empty_text_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (planted_replay().save, ReplayBuffer.load, ReplayBuffer.open, relive.inspect):
        with pytest.raises(errors.ParameterError, match=r"path='': .*pass '\.'"):
            call("")
    assert list(tmp_path.iterdir()) == []


STRANGE = "a\x1b]0;title\x07\x1b[2J\u202e\x9b\r\n  no mistake was found :skull: [red]x"
SEEN = r"a\x1b]0;title\x07\x1b[2J\u202e\x9b\r\n  no mistake was found :skull: [red]x"


@pytest.mark.parametrize("options", [[], ["--steps", "0:2"], ["--json"]])
def test_names_in_files_act_on_no_terminal(tmp_path: Path, options: list[str]) -> None:
    path = arrays(tmp_path / "x\x1b[2J.npz", **{STRANGE: np.full((30, 2), np.nan), "größe_漢字": np.zeros(30)})
    commands = (["inspect", str(path), *options], ["audit", str(path)], ["inspect", str(path) + "\udcff"])
    for command in commands:
        output = CliRunner().invoke(app, command).output
        assert all(letter.isprintable() or letter == "\n" for letter in output)
        output = output.replace("\n", "")  # a long path is wrapped
        assert r"\x1b[2J" in output or r"\u001b[2J" in output
    if not options:
        output = "".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, commands[0]).output.split())
        assert SEEN.replace(" ", "") in output
        assert "größe_漢字" in output
    for shown in (str(relive.inspect(path)), str(relive.audit(path))):
        assert SEEN in shown
        assert all(letter.isprintable() or letter == "\n" for letter in shown)


def test_errors_about_names_in_files_act_on_no_terminal(tmp_path: Path) -> None:
    short = arrays(tmp_path / "short.npz", **{STRANGE: np.zeros(3)})
    np.savez(tmp_path / "none.npz", **{"obs": np.zeros(3), STRANGE: np.zeros(3)})
    for path in (short, tmp_path / "none.npz"):
        result = CliRunner().invoke(app, ["audit", str(path)])
        assert result.exit_code == 2
        assert SEEN in result.output
        assert result.output.count("\n") == 1


def test_a_terminal_that_lacks_the_letters_of_a_name_shows_their_codes(tmp_path: Path) -> None:
    path = arrays(tmp_path / "x.npz", größe_漢字=np.zeros(30))
    result = CliRunner(charset="ascii").invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0, result.output
    assert r"gr\xf6\xdfe_\u6f22\u5b57" in result.output


def test_a_long_name_does_not_fill_the_terminal(tmp_path: Path) -> None:
    path = arrays(tmp_path / "x.npz", **{"a" + "b" * 60_000 + "c": np.full(30, np.nan)})
    for command in (["inspect", "--steps", "0:1"], ["audit"]):
        result = CliRunner().invoke(app, [*command, str(path)])
        assert "characters)" in "".join(result.output.split())
        assert len(result.output) < 100_000
