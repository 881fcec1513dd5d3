"""Stable-Baselines3's files: what its own ``save_replay_buffer`` wrote comes in, and nothing in a file is ever run."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relive.errors import FileFormatError, NoSaveError, ParameterError, ReliveError
from relive.exchange import from_stable_baselines3
from relive.memory import estimate
from support.forks import in_fork

FILES = Path(__file__).parents[1] / "fixtures" / "exchange" / "stable_baselines3"
PLAIN = (FILES / "plain.pkl").read_bytes()


@pytest.mark.parametrize("name", ["plain", "goals"])
def test_a_full_ring_of_two_envs_comes_in_with_every_end(name: str) -> None:
    log = from_stable_baselines3(FILES / f"{name}.pkl")
    obs, after = log.fields["obs"], log.fields["next_obs"]
    if name == "goals":
        assert obs.keys() == after.keys() == {"observation", "achieved_goal", "desired_goal"}
        obs, after = obs["achieved_goal"], after["achieved_goal"]
    np.testing.assert_array_equal(log.fields["reward"], [*range(6, 18, 2), *range(7, 18, 2)])
    np.testing.assert_array_equal(log.fields["action"][:, 1], -log.fields["reward"])
    np.testing.assert_array_equal(after - obs, np.broadcast_to([0, 0, 1], obs.shape))
    env, episode, step = (obs / [50, 1, 1]).T.astype(int)
    np.testing.assert_array_equal(log.fields["terminated"], (step == 3) & ((episode + env) % 2 == 0))
    np.testing.assert_array_equal(log.fields["truncated"], (step == 3) & ((episode + env) % 2 == 1))
    assert [len(e.steps) for e in log.replay().episodes()] == [1, 4, 1, 1, 4, 1]
    assert log.lacks == (("its infos were not read",) if name == "goals" else ())


def test_a_buffer_without_next_observations_or_time_limits_says_so() -> None:
    log = from_stable_baselines3(FILES / "slim.pkl")
    obs, after, ends = (log.fields[name] for name in ("obs", "next_obs", "terminated"))
    np.testing.assert_array_equal(log.fields["reward"], [*range(8, 18, 2), *range(9, 18, 2)])  # the row at pos is none
    np.testing.assert_array_equal(log.fields["action"][:, 0], log.fields["reward"])
    np.testing.assert_array_equal(after - obs, [[0, 0, 0 if end else 1] for end in ends])
    assert log.lacks == (
        "it does not tell truncation from termination",
        "it keeps no observation after a step but that of the following row",
    )
    assert [len(e.steps) for e in log.replay().episodes()] == [4, 1, 4, 1]


# -- attacks --------------------------------------------------------------------------------------------------------


class Call:
    """Pickles as a call of a function, which an unpickler makes."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def named(name: str) -> bytes:
    """A pickle that calls a function of any name with "x"."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n(S'x'\ntR.".encode()


def shortened(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def inside(value: bytes) -> bytes:
    """The plain buffer with a first attribute more, whose value is made by these opcodes."""
    at = PLAIN.index(b"(", PLAIN.index(b"}")) + 1
    return PLAIN[:2] + PLAIN[11:at] + shortened("more") + value + PLAIN[at:]


def named_in_two(module: str, name: str) -> bytes:
    return shortened(module) + shortened(name) + b"\x93"


FOREIGN = (
    "os.system", "posix.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "builtins.getattr",
    "builtins.__import__", "importlib.import_module", "pickle.loads", "_pickle.loads", "types.CodeType", "numpy.load",
    "numpy.fromfile", "numpy.memmap", "numpy.ctypeslib.load_library", "numpy.testing._private.utils.runstring",
    "numpy.f2py.compile", "numpy._core.multiarray.fromfile", "torch.load", "torch.hub.load", "torch.jit.load",
    "copyreg._reconstructor", "operator.attrgetter", "functools.partial", "cloudpickle.loads", "gymnasium.make",
    "gymnasium.vector.utils.misc.CloudpickleWrapper", "stable_baselines3x.common.buffers.ReplayBuffer",
)  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_that_no_buffer_needs_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "buffer.pkl"
    for hostile in (named(name), inside(named(name)[:-1]), inside(named_in_two(*name.rsplit(".", 1)))):
        file.write_bytes(hostile)
        with pytest.raises(FileFormatError, match="which no buffer needs"):
            from_stable_baselines3(file)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_no_call_is_made(tmp_path: Path, protocol: int) -> None:
    mark, file = tmp_path / "mark", tmp_path / "buffer.pkl"
    for call in (Call(os.system, f"touch {mark}"), Call(eval, f"open({str(mark)!r}, 'w')"), Call(Path.touch, mark),
                 Call(subprocess.call, ["touch", str(mark)]), Call(np.save, str(mark), 1)):  # fmt: skip
        file.write_bytes(pickle.dumps(call, protocol))
        with pytest.raises(FileFormatError):
            from_stable_baselines3(file)
        file.write_bytes(pickle.dumps({"rewards": call}, protocol))
        with pytest.raises(FileFormatError):
            from_stable_baselines3(file)
    assert not mark.exists()


def test_a_known_name_is_not_called_either(tmp_path: Path) -> None:
    file = tmp_path / "buffer.pkl"
    loads = b"cstable_baselines3.common.save_util\nload_from_pkl\n(S'/nowhere'\ntR"
    file.write_bytes(inside(loads.replace(b"S'/nowhere'\n", shortened("/nowhere"))))
    assert len(from_stable_baselines3(file)) == 12  # the attribute is not one that is read
    for known in (b"cnumpy\nndarray\n", b"ctorch\ndevice\n", b"cgymnasium.spaces.box\nBox\n"):
        file.write_bytes(b"\x80\x05" + known + b"\x8a\x05\xff\xff\xff\xff\x7f\x85R.")
        with pytest.raises(FileFormatError, match="expected a replay buffer"):
            from_stable_baselines3(file)


def opcode(code: bytes, *, sized: str = "<Q", size: int) -> bytes:
    return b"\x80\x05" + code + struct.pack(sized, size)


BOMBS: dict[str, bytes] = {
    "bytes that are not there": opcode(b"\x96", size=2**60),
    "bytes beyond all sizes": opcode(b"\x8e", size=2**64 - 1),
    "text that is not there": opcode(b"\x8d", size=2**50),
    "a number of a billion digits": opcode(b"\x8b", sized="<i", size=2**30),
    "a place of the memo far away": b"\x80\x05Nr\xff\xff\xff\x7f.",
    "a value that was never kept": b"\x80\x05h\x07.",
    "a list in itself": b"\x80\x05]\x94h\x00a.",
    "tuples in tuples": b"\x80\x05)" + b"\x85" * 10**5 + b".",
    "dicts in dicts": b"\x80\x05" + b"}N" * 10**5 + b"s" * 10**5 + b".",
    "laughs": b"\x80\x05]\x94" + b"".join(b"](" + b"h%c" % i * 99 + b"e\x94" for i in range(99)) + b".",
    "a persistent name": b"\x80\x05Pos\n.",
    "an extension": b"\x80\x05\x82\x01.",
    "a buffer from outside": b"\x80\x05\x97.",
    "an instance": b"(ios\nsystem\n.",
    "no end": b"\x80\x05N",
    "nothing": b"",
    "a group without a beginning": b"\x80\x05Nt.",
    "a call of a number": b"\x80\x05K\x01)R.",
    "a state of a list": b"\x80\x05]}b.",
    "items of a number": b"\x80\x05K\x01]a.",
    "a zip file": b"PK\x03\x04" + bytes(100),
    "one line without an end": b"c" + b"x" * 10**6,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "buffer.pkl"
    file.write_bytes(BOMBS[name])
    with pytest.raises(FileFormatError, match=r"buffer\.pkl"):
        from_stable_baselines3(file)


def instead(name: str, value: Callable[[int], bytes]) -> bytes:
    """The plain buffer with another value of one attribute; ``value`` gets the next free place of the memo."""
    given = PLAIN.replace(shortened(name), shortened("x" * len(name)), 1)
    places = sum(found.name == "MEMOIZE" for found, _, _ in pickletools.genops(given))
    assert given.endswith(b"ub.")
    return given[:2] + given[11:-3] + shortened(name) + value(places) + b"ub."


def recall(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def shared(place: int) -> bytes:
    """Tuples of two that are one, sixty deep: 2 ** 60 members in 800 bytes."""
    return b")\x94" + b"".join(b"0" + 2 * recall(place + deep) + b"\x86\x94" for deep in range(60))


def shared_calls(place: int) -> bytes:
    """The same with calls in calls."""
    calls = (b"0" + recall(place) + 2 * recall(place + 1 + deep) + b"\x86R\x94" for deep in range(60))
    return b"cnumpy\ndtype\n\x94)R\x94" + b"".join(calls)


def test_a_value_that_shares_its_members_is_refused_at_once(tmp_path: Path) -> None:
    names = ("pos", "full", "rewards", "actions", "observations", "dones", "timeouts")
    files = [instead(name, value) for name in names for value in (shared, shared_calls)]

    def refused() -> int:
        return sum(is_refused(tmp_path / "buffer.pkl", content) for content in files)

    assert in_fork(refused) == 14


def array(order: bytes, place: int) -> bytes:
    """An array [6, 2, 1000], which is kept at ``place + 1``."""
    kind = b"cnumpy\ndtype\n" + shortened("f4") + b"\x85R(K\x03" + shortened(order.decode()) + b"NNNtb\x940"
    data = b"B" + struct.pack("<I", 48_000) + bytes(48_000)
    shape = b"K\x06K\x02M\xe8\x03\x87"
    return kind + b"cnumpy._core.numeric\n_frombuffer\n(" + data + recall(place) + shape + shortened("C") + b"tR\x940"


@pytest.mark.parametrize("order", [b"<", b">"])
def test_memory_is_asked_for_each_time_that_an_array_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: bytes
) -> None:
    def observations(place: int) -> bytes:
        named = (shortened(f"{number:03}") + recall(place + 1) for number in range(200))
        return array(order, place) + b"}(" + b"".join(named) + b"u"

    file = tmp_path / "buffer.pkl"
    file.write_bytes(instead("observations", observations))
    monkeypatch.setattr(estimate, "free_memory", lambda: 2 * 200 * 48_000)
    with pytest.raises(ParameterError, match="would take 19,20"):
        from_stable_baselines3(file)


def test_memory_is_asked_for_while_many_small_objects_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "buffer.pkl"
    file.write_bytes(inside(b"(" + b"}" * 2**18 + b"l"))
    monkeypatch.setattr(estimate, "free_memory", lambda: 2**24)
    with pytest.raises(ParameterError, match="would take 25,165,824 bytes"):
        from_stable_baselines3(file)


def test_arguments_that_many_calls_share_are_not_copied(tmp_path: Path) -> None:
    def calls(place: int) -> bytes:
        shared = b"(" + b"N" * 10**4 + b"t\x940cnumpy\ndtype\n\x940"
        return shared + b"(" + (recall(place + 1) + recall(place) + b"}\x92") * 5000 + b"t"

    file = tmp_path / "buffer.pkl"
    file.write_bytes(instead("pos", calls))
    tracemalloc.start()
    with pytest.raises(FileFormatError, match="'pos': expected the type int"):
        from_stable_baselines3(file)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20_000_000  # 10,000 arguments of 5,000 calls would take 400 MB


def swapped(old: bytes, new: bytes, count: int = 1) -> Callable[[], bytes]:
    def make() -> bytes:
        assert old in PLAIN
        return PLAIN.replace(old, new, count)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (swapped(b"\x8c\x02f4", b"\x8c\x02O8", 99), "expected a dtype of numbers, got 'O8'"),
        (swapped(b"\x8c\x02f4", b"\x8c\x02f9", 99), "expected a dtype of numbers, got 'f9'"),
        (swapped(b"K\x06K\x02K\x03\x87", b"K\x06K\x02K\x04\x87"), "expected 48 numbers for the shape .*got 36"),
        (
            swapped(b"K\x06K\x02K\x03\x87", b"K\x06K\x06K\x01\x87"),
            r"in front, got \(6, 6, 1\)",
        ),
        (swapped(b"K\x06K\x02K\x03\x87", b"NNN\x87"), "expected the shape of an array"),
        (swapped(b"\x8c\x03pos\x94K\x03", b"\x8c\x03pos\x94K\x07"), "expected 'pos' of a buffer with steps in 6 rows"),
        (swapped(b"\x8c\x03pos\x94K\x03", b"\x8c\x03pos\x94\x88"), "'pos': expected the type int, got True"),
        (swapped(b"\x8c\x04full", b"\x8c\x04fuII"), "'full'"),
        (swapped(b"\x8c\x0cReplayBuffer", b"\x8c\x0cFollowBuffer"), "expected a replay buffer of stable_baselines3"),
    ],
)
def test_attributes_that_lie_are_named(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    file = tmp_path / "buffer.pkl"
    file.write_bytes(make())
    with pytest.raises(FileFormatError, match=message):
        from_stable_baselines3(file)


def is_refused(file: Path, content: bytes) -> bool:
    """Whether a file is refused; any other error than ours fails the test."""
    file.write_bytes(content)
    try:
        from_stable_baselines3(file)
    except ReliveError:
        return True
    return False


def test_a_file_with_one_byte_changed_or_cut_is_read_or_refused(tmp_path: Path) -> None:
    rng, refused, file = np.random.default_rng(0), 0, tmp_path / "b.pkl"
    for place, byte in zip(rng.integers(len(PLAIN), size=150), rng.integers(256, size=150), strict=True):
        refused += is_refused(file, PLAIN[:place] + bytes([byte]) + PLAIN[place + 1 :])
    assert refused > 0
    for place in rng.integers(len(PLAIN), size=20):
        assert is_refused(file, PLAIN[:place])
    assert not is_refused(file, PLAIN)


@pytest.mark.slow
def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    changed = (
        PLAIN[:place] + bytes([byte]) + PLAIN[place + 1 :]
        for place in range(len(PLAIN))
        for byte in (0, 46, 82, PLAIN[place] ^ 1)
    )
    assert sum(is_refused(tmp_path / "b.pkl", content) for content in changed) > 0


def test_a_file_that_is_missing_or_a_link_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSaveError, match="expected a saved replay buffer"):
        from_stable_baselines3(tmp_path / "none.pkl")
    (tmp_path / "link.pkl").symlink_to(FILES / "plain.pkl")
    with pytest.raises(FileFormatError, match="symbolic link"):
        from_stable_baselines3(tmp_path / "link.pkl")
