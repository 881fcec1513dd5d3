"""A batch of sequences: flat, padded again, packed, moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from relive import errors
from windowed import FACTS, RICH, SMALL, assert_same, filled, found_in, leaves_of, world_of

# Flat, pad, packed, to


@pytest.mark.parametrize("time_first", [True, False])
def test_flat_gives_the_steps_to_learn_from_sequence_by_sequence_and_pad_puts_them_back(time_first: bool) -> None:
    world = world_of(["..T.m.", ".U....", "...M.."], RICH)
    (seq,) = filled(world).sequences(3, time_first=time_first)
    flat = seq.flat()
    where = [(start + i, env) for env, start, count, _ in found_in([seq]) for i in range(count)]
    assert tuple(flat.batch_size) == (len(where),) == (seq.num_steps,)
    paths = leaves_of(seq).keys()
    for path in paths:
        want = torch.stack([world.columns[path][place] for place in where])
        assert_same(flat[path], want, path)
        padded = seq.pad(flat[path])
        like = seq.data[path]
        assert padded.shape == like.shape
        assert padded.dtype is like.dtype
        assert_same(seq.flat(padded), want, path)
        assert not padded[~seq["mask"]].any()
    keys = {key if isinstance(key, tuple) else (key,) for key in flat.keys(True, True)}
    assert keys == {*paths, ("is_start",)}


@pytest.mark.parametrize("time_first", [True, False])
def test_flat_and_pad_take_a_networks_output_and_pass_its_gradient(time_first: bool) -> None:
    (seq,) = filled(world_of(["..T..", ".U..."])).sequences(3, time_first=time_first)
    out = torch.randn(*seq["mask"].shape, 2, 4, requires_grad=True)
    flat = seq.flat(out)
    assert flat.shape == (seq.num_steps, 2, 4)
    flat.sum().backward()
    assert torch.equal(out.grad, seq["mask"][..., None, None].expand_as(out).float())
    rows = torch.randn(seq.num_steps, requires_grad=True)
    seq.pad(rows * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full_like(rows, 2))
    assert torch.equal(seq.flat(seq["mask"]), torch.ones(seq.num_steps, dtype=torch.bool))


def test_shapes_that_do_not_fit_a_batch_are_refused() -> None:
    (seq,) = filled(world_of(["..T..", ".U..."])).sequences(3, shuffle=False)
    with pytest.raises(errors.ShapeError, match=r"\(3, 4\).*got \(4, 3, 2\)"):
        seq.flat(torch.zeros(4, 3, 2))
    with pytest.raises(errors.ShapeError, match=r"\[L, B, \.\.\.\].*got \(5,\)"):
        seq.flat(torch.zeros(5))
    with pytest.raises(errors.ShapeError, match=r"10 steps.*got \(9, 2\)"):
        seq.pad(torch.zeros(9, 2))
    with pytest.raises(errors.ShapeError, match=r"10 steps.*got \(\)"):
        seq.pad(torch.tensor(1.0))


@pytest.mark.parametrize("time_first", [True, False])
def test_a_packed_field_goes_through_an_lstm_like_a_padded_one(time_first: bool) -> None:
    torch.manual_seed(0)
    schema = SMALL.extend(hidden=((2, 5), (2, 5)))
    world = world_of(["..T.....", ".U...T..", "........"], schema)
    (seq,) = filled(world).sequences(4, time_first=time_first)
    lstm = nn.LSTM(2, 5, 2, batch_first=not time_first)
    states = tuple(x / 100 for x in seq["hidden"])
    padded, _ = lstm(seq["obs"] / 100, states)
    packed = seq.packed("obs")
    assert len(packed.data) == seq.num_steps
    out, last = lstm(packed._replace(data=packed.data / 100), states)
    unpacked, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=not time_first)
    assert torch.equal(lengths, seq["lengths"])
    torch.testing.assert_close(seq.flat(unpacked), seq.flat(padded))
    rows = (seq["lengths"] - 1, torch.arange(seq.num_sequences))
    torch.testing.assert_close(last[0][-1], padded[rows if time_first else rows[::-1]])


def test_a_batch_moves_to_another_device_with_all_that_is_in_it() -> None:
    (seq,) = filled(world_of(["..T..", ".U..."], RICH)).sequences(3)
    moved = seq.to("meta")
    assert set(moved) == set(seq)
    assert (moved.time_first, moved.num_sequences) == (True, 4)
    tensors = [*leaves_of(seq), *FACTS, "mask", "is_start"]
    for name in tensors:
        assert (moved.data[name] if isinstance(name, tuple) else moved[name]).device.type == "meta"
    hidden = moved["hidden"]
    assert isinstance(hidden["actor"], tuple)
    assert {x.device.type for x in (*hidden["actor"], hidden["critic"], *hidden["half"])} == {"meta"}
    assert seq["obs"]["touch"].device.type == "cpu"


# A mapping


def test_a_member_of_a_nested_field_is_read_by_its_path_as_in_a_tensordict() -> None:
    (seq,) = filled(world_of(["..T..", ".U..."], RICH)).sequences(3)
    paths = [("obs", "touch"), ("obs",), ("mask",), ("lengths",)]
    before = [seq[path] for path in paths]
    assert before[0] is seq["obs"]["touch"]
    hidden = seq["hidden"]
    assert seq["hidden", "actor", "1"] is hidden["actor"][1]
    assert seq["hidden", "critic"] is hidden["critic"]
    assert ("obs", "touch") in seq
    assert ("obs", "tuoch") not in seq
    assert seq.get(("hidden", "none"), 7) == 7
    seq.data["obs", "touch"] = seq.data["obs", "touch"] + 1  # what the user has changed there counts
    assert torch.equal(seq["obs", "touch"], before[0] + 1)


@pytest.mark.parametrize(
    "path", [("obs", "tuoch"), ("obs", "touch", "x"), ("hidden", "actor", "7"), ("hidden", "actor", "x"), ("mask", "x")]
)
def test_a_path_without_a_member_is_refused_with_the_names_that_there_are(path: tuple[str, ...]) -> None:
    (seq,) = filled(world_of(["..T..", ".U..."], RICH)).sequences(3)
    with pytest.raises(errors.FieldError, match=rf"unknown field '{'.'.join(path)}'.*obs.touch.*mask.*hidden"):
        _ = seq[path]
    for wrong in ((), ("obs", 0)):
        with pytest.raises(errors.FieldError, match=r"such as \('obs', 'camera'\), got \("):
            _ = seq[wrong]  # pyright: ignore[reportArgumentType]
