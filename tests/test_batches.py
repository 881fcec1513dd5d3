"""Batches: dicts of tensors; and batches of sequences, flat, padded again, packed, moved."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from relive import (
    Batch,
    Chunks,
    Field,
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    ReturnsToGo,
    Schema,
    Sequence,
    Uniform,
    WithoutReplacement,
    errors,
)  # fmt: skip
from relive.batches import as_batch, leaves_by_path, take_back
from support.window_worlds import FACTS, RICH, SMALL, assert_same, filled, found_in, leaves_of, world_of

# Flat, pad, packed, to


@pytest.mark.parametrize("time_first", [True, False])
def test_flat_gives_the_steps_to_learn_from_sequence_by_sequence_and_pad_puts_them_back(time_first: bool) -> None:
    world = world_of(["..T.m.", ".U....", "...M.."], RICH)
    (seq,) = filled(world).sequences(3, time_first=time_first)
    flat = seq.flat()
    where = [(start + i, env) for env, start, count, _ in found_in([seq]) for i in range(count)]
    assert len(flat) == len(where) == seq.num_steps
    paths = leaves_of(seq).keys()
    for path in paths:
        want = torch.stack([world.columns[path][place] for place in where])
        assert_same(flat[path], want, path)
        padded = seq.pad(flat[path])
        like = seq[path]
        assert padded.shape == like.shape
        assert padded.dtype is like.dtype
        assert_same(seq.flat(padded), want, path)
        assert not padded[~seq["mask"]].any()
    keys = {*leaves_by_path(flat)}
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
    rows = (seq["lengths"] - 1, torch.arange(len(seq)))
    torch.testing.assert_close(last[0][-1], padded[rows if time_first else rows[::-1]])


def test_a_batch_moves_to_another_device_with_all_that_is_in_it() -> None:
    (seq,) = filled(world_of(["..T..", ".U..."], RICH)).sequences(3)
    moved = seq.to("meta")
    assert set(moved) == set(seq)
    assert (moved.time_first, len(moved)) == (True, 4)
    tensors = [*leaves_of(seq), *FACTS, "mask", "is_start"]
    for name in tensors:
        assert moved[name].device.type == "meta"
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
    seq["obs", "touch"] = seq["obs", "touch"] + 1
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


# A batch: a dict of tensors


def batch_of(rows: int = 6) -> Batch:
    """Rows that name themselves, with a nested field."""
    number = torch.arange(rows)
    obs = {("obs", "camera"): number[:, None].repeat(1, 3).to(torch.uint8), ("obs", "body"): number.float()}
    return as_batch({**obs, ("reward",): number.float() / 2, ("index",): number})


def test_a_batch_is_a_dict_of_tensors_whose_length_is_its_rows() -> None:
    batch = batch_of()
    assert isinstance(batch, dict)
    assert isinstance(batch["obs"], Batch)
    assert list(batch) == list(batch.keys()) == ["obs", "reward", "index"]
    assert len(batch) == len(batch["obs"]) == 6
    assert batch["obs", "camera"] is batch["obs"]["camera"]
    assert ("obs", "camera") in batch
    assert ("obs", "lidar") not in batch
    assert batch.get(("obs", "lidar"), 7) == 7
    batch["obs", "lidar"] = torch.zeros(6)
    assert list(batch["obs"]) == ["camera", "body", "lidar"]
    assert len(Batch()) == 0
    assert "obs.camera" in repr(batch)
    assert "uint8 [6, 3]" in repr(batch)


@pytest.mark.parametrize(
    ("read", "error", "says"),
    [
        (lambda b: b["rewrad"], errors.FieldError, "'rewrad' in this batch; did you mean 'reward'"),
        (lambda b: b["rewrad"], KeyError, "did you mean"),
        (lambda b: b["timestep"], errors.FieldError, "a Sequence or Chunks with timestep=True"),
        (lambda b: b["last_action"], errors.FieldError, r"with last=\('action',\) gives it"),
        (lambda b: b["is_start"], errors.FieldError, "'is_start' in a Sequence and 'is_first' in Chunks"),
        (lambda b: b["next_obs"], errors.FieldError, "the next observation is in the next row"),
        (lambda b: b["obs", "x"], errors.FieldError, "unknown field 'obs.x'"),
        (lambda b: b[3], errors.FieldError, r"batch\.rows\(index\)"),
        (lambda b: b[b["reward"] > 1], errors.FieldError, r"batch\.rows\(index\)"),
        (lambda b: b.obs, AttributeError, r"write batch\['obs'\]"),
        (lambda b: b.batch_size, AttributeError, r"len\(batch\)"),
        (lambda b: b.nothing, AttributeError, "no attribute 'nothing'"),
        (lambda b: b.split(0), errors.ParameterError, "size=0"),
        (lambda b: b.to("gpu"), errors.ParameterError, "gpu"),
    ],
)
def test_what_a_batch_lacks_is_an_error_that_says_how_to_read_it(
    read: Callable[[Batch], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read(batch_of())


def test_a_batch_is_not_unpacked_but_its_names_can_be_read_in_all_other_ways() -> None:
    batch = batch_of()
    with pytest.raises(errors.FieldError, match=r"obs, action = batch\['obs'\].*It has: obs, reward, index"):
        _obs, _reward, _index = batch
    with pytest.raises(errors.FieldError, match="cannot be unpacked"):
        _first, *_rest = batch
    assert [*batch] == sorted(batch, key=["obs", "reward", "index"].index) == [name for name in batch]  # noqa: C416
    assert {**batch}.keys() == dict(batch).keys() == set(batch)


def test_rows_parts_and_copies_of_a_batch_are_batches_of_all_its_fields() -> None:
    batch = batch_of()
    some = batch.rows(torch.tensor([4, 1]))
    assert some["index"].tolist() == some["obs", "body"].tolist() == some["obs", "camera"][:, 0].tolist() == [4, 1]
    assert batch.rows(batch["reward"] > 1.5)["index"].tolist() == [4, 5]
    parts = batch.split(4)
    assert [part["index"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5]]
    assert parts[0]["obs", "body"].data_ptr() == batch["obs", "body"].data_ptr()
    clone, shallow = batch.clone(), batch.copy()
    batch["obs", "body"].zero_()
    assert clone["obs", "body"].tolist() == [0, 1, 2, 3, 4, 5]
    assert not shallow["obs", "body"].any()
    assert type(clone["obs"]) is type(shallow["obs"]) is Batch
    assert shallow["obs"] is not batch["obs"]
    joined = clone.apply(lambda *both: torch.cat(both), some)
    assert joined["obs", "body"].tolist() == [0, 1, 2, 3, 4, 5, 4, 1]
    assert {x.device.type for x in leaves_by_path(batch.to("meta", non_blocking=True)).values()} == {"meta"}


def test_a_tensordict_of_a_batch_has_the_same_memory() -> None:
    batch = batch_of()
    tensordict = batch.to_tensordict()
    assert tuple(tensordict.batch_size) == (6,)
    assert tensordict["obs", "camera"].data_ptr() == batch["obs", "camera"].data_ptr()
    (seq,) = filled(world_of(["..T..", ".U..."], RICH)).sequences(3)
    assert tuple(seq.to_tensordict().batch_size) == tuple(seq.shape)
    assert "lengths" not in seq.to_tensordict().keys()


def kinds() -> list[Batch]:
    """A batch of rows and one of sequences, with nested states."""
    (seq,) = filled(world_of(["..T..", ".U..."], RICH)).sequences(3, time_first=False)
    return [batch_of(), seq]


def same(a: Batch, b: Batch) -> bool:
    one, other = leaves_by_path(a), leaves_by_path(b)
    about = [(type(x), list(x), getattr(x, "time_first", None), len(x)) for x in (a, b)]
    return about[0] == about[1] and one.keys() == other.keys() and all(torch.equal(one[x], other[x]) for x in one)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_batch_goes_through_copies_pickles_and_files_of_tensors_alone(kind: int) -> None:
    batch = kinds()[kind]
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    again = [copy.deepcopy(batch), copy.copy(batch), pickle.loads(pickle.dumps(batch)), torch.load(file)]
    assert all(same(batch, x) for x in again)
    assert again[0]["reward"].data_ptr() != batch["reward"].data_ptr() == again[1]["reward"].data_ptr()


@pytest.mark.parametrize("kind", [0, 1])
def test_torchs_trees_see_the_tensors_of_a_batch(kind: int) -> None:
    batch = kinds()[kind]
    leaves, spec = pytree.tree_flatten(batch)
    assert [x.data_ptr() for x in leaves] == [x.data_ptr() for x in leaves_by_path(batch).values()]
    assert same(pytree.tree_unflatten(leaves, spec), batch)
    halves = pytree.tree_map(lambda x: x.float() / 2, batch)
    assert torch.equal(halves["reward"], batch["reward"].float() / 2)
    assert type(halves) is type(batch)
    path, _ = pytree.tree_flatten_with_path(batch)[0][0]
    assert pytree.keystr(path).startswith("['obs']['")


def _same(value: Any) -> Any:
    return value


@pytest.mark.parametrize("kind", [0, 1])
def test_a_loader_and_movers_of_nested_dicts_take_a_batch(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = kinds()[kind]
    # by itself, torch's loader makes lists of tuples, as of an LSTM's states
    (loaded,) = DataLoader([batch], batch_size=None, collate_fn=None if kind == 0 else _same)
    assert same(loaded, batch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *_: x + 0)  # there is no GPU to lock memory for
    pinned = [batch.pin_memory(), *([pin_memory(batch)] if kind == 0 else [])]
    assert all(same(x, batch) and x["reward"].data_ptr() != batch["reward"].data_ptr() for x in pinned)

    def moved(data: Any) -> Any:  # as Lightning and Accelerate move what is nested
        if isinstance(data, Mapping):
            return type(data)({name: moved(value) for name, value in data.items()})
        return data.to("meta")

    if kind == 0:
        assert {x.device.type for x in leaves_by_path(moved(batch)).values()} == {"meta"}


@pytest.mark.parametrize("kind", [0, 1])
def test_an_update_compiles_whole_and_function_transforms_go_through(kind: int) -> None:
    batch, net = kinds()[kind], nn.Linear(1, 1)

    def update(batch: Batch, parameters: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Batch]:
        value = torch.func.functional_call(net, parameters, (batch["reward"].flatten()[:, None],))
        total = value.square().mean() + sum(batch[name].float().sum() * 0 for name in batch if name == "reward")
        if ("obs", "camera") in batch and batch.get("nothing") is None:
            total = total + batch["obs", "camera"].float().mean() * 0 + len(batch) * 0
        return total, Batch({"value": value.detach()})

    parameters = {name: x.detach() for name, x in net.named_parameters()}
    eager, _ = update(batch, parameters)
    compiled, more = torch.compile(update, fullgraph=True, backend="eager")(batch, parameters)
    assert torch.equal(eager, compiled)
    assert type(more) is Batch
    gradients, _ = torch.func.grad(update, argnums=1, has_aux=True)(batch, parameters)
    assert gradients["weight"].shape == (1, 1)
    rows = torch.func.vmap(lambda row: row["reward"] * 2)(Batch({"reward": batch["reward"]}))
    assert torch.equal(rows, batch["reward"] * 2)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_batch_that_was_taken_back_refuses_all_use_and_so_do_those_nested_in_it(kind: int) -> None:
    batch = kinds()[kind]
    obs = batch["obs"]
    take_back(batch)
    uses: list[Callable[[], Any]] = [
        lambda: batch["reward"], lambda: batch.get("reward"), lambda: list(batch), lambda: len(batch),
        lambda: batch.to("cpu"), lambda: batch.rows(0), lambda: batch.split(2), lambda: "reward" in batch,
        lambda: obs["camera"], batch.items, lambda: pickle.dumps(batch), lambda: {**batch},
        batch.clone, batch.to_tensordict, lambda: copy.copy(batch),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(errors.LifecycleError, match=r"given back.*batch\.clone\(\)"):
            use()
    assert "given back" in repr(batch)


# memory that stands


VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": lambda: None, "n-step": lambda: NStep(3), "stacks": lambda: FrameStack(2),
    "sequences": lambda: Sequence(4, n=2), "returns": lambda: ReturnsToGo(window=Sequence(3)),
    "chunks": lambda: Chunks(4, timestep=True),
}  # fmt: skip
DRAWN: dict[str, Callable[[], Any]] = {
    "uniform": Uniform, "without replacement": WithoutReplacement, "prioritized": Prioritized,
    "recent": lambda: Recent(0.9, 5),
}  # fmt: skip


def replay_of(sampler: str, view: str) -> ReplayBuffer:
    """120 steps of two envs with a nested field and an image."""
    flag = Field((), torch.bool)
    obs = {"x": Field((3,)), "image": Field((20, 20), torch.uint8)}
    schema = Schema({"obs": obs, "action": (2,), "reward": (), "terminated": flag, "truncated": flag})
    replay = ReplayBuffer(schema, 200, 2, seed=0, sampler=DRAWN[sampler](), view=VIEWS[view](), check_ends=False)
    rng = np.random.default_rng(0)
    for t in range(60):
        obs = {"x": rng.normal(size=(2, 3)), "image": rng.integers(0, 256, (2, 20, 20), np.uint8)}
        ends = np.array([t % 9 == 8, t % 7 == 6])
        replay.add(
            obs=obs, action=rng.normal(size=(2, 2)), reward=rng.normal(size=2), terminated=ends, truncated=ends & False,
            **({"next_obs": obs} if ends.any() else {}),
        )  # fmt: skip
    return replay


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", DRAWN)
def test_batches_in_standing_memory_are_those_in_fresh_memory_until_their_turn_comes_again(
    sampler: str, view: str
) -> None:
    fresh = [batch.clone() for batch in replay_of(sampler, view).batches(7, 5)]
    given: list[Batch] = []
    for k, batch in enumerate(replay_of(sampler, view).batches(7, 5, reuse=True)):
        given.append(batch)
        for back in range(min(k + 1, 3)):  # this one and the two before are valid
            assert same(given[k - back], fresh[k - back])
        for old in given[: max(k - 2, 0)]:
            with pytest.raises(errors.LifecycleError, match="given back"):
                _ = old["reward"]
        batch["bonus"] = torch.zeros(5)  # what is added to one is not in the next
        del batch["bonus"]


def test_standing_memory_is_written_again_in_turn_and_what_is_changed_in_a_batch_does_not_come_back() -> None:
    batches = replay_of("uniform", "n-step").batches(6, 5, reuse=True)
    first = next(batches)
    place, kept = first["reward"].data_ptr(), first.clone()
    first["reward"] = torch.zeros(5)
    first["bonus"] = torch.zeros(5)
    del first["action"]
    others = [next(batches), next(batches)]
    again = next(batches)
    assert again["reward"].data_ptr() == place
    assert set(again) == set(kept)
    assert again["reward"].shape == (5,)
    assert others[0]["reward"].data_ptr() not in (place, others[1]["reward"].data_ptr())


def test_autograd_notices_that_a_batch_it_saved_was_written_again() -> None:
    replay, weight = replay_of("uniform", "n-step"), torch.ones((), requires_grad=True)
    batches = replay.batches(9, 5, reuse=True)
    loss = (weight * next(batches)["reward"]).sum()
    _ = [next(batches), next(batches)]
    loss.backward(retain_graph=True)  # still valid
    next(batches)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        made = [batch.clone() for batch in replay.batches(5, 4, reuse=True)]
    assert len(made) == 5


@pytest.mark.parametrize(
    "options", [{}, {"fields": ("obs", "reward")}, {"shuffle": False}, {"normalize_advantage": True}]
)
def test_minibatches_in_standing_memory_are_those_in_fresh_memory(options: dict[str, Any]) -> None:
    rollouts = [filled(world_of(["..T.....", ".U...T..", "........"], RICH)) for _ in range(2)]
    fresh = [batch.clone() for batch in rollouts[0].minibatches(5, epochs=2, **options)]
    given = []
    for k, batch in enumerate(rollouts[1].minibatches(5, epochs=2, reuse=True, **options)):
        given.append(batch)
        assert all(same(given[k - back], fresh[k - back]) for back in range(min(k + 1, 3)))
    assert len(given) == len(fresh)
    with pytest.raises(errors.LifecycleError, match="given back"):
        _ = given[0]["reward"]
    with pytest.raises(errors.ParameterError, match="reuse"):
        rollouts[0].minibatches(5, reuse=1)  # pyright: ignore[reportArgumentType]
