"""Sequences of a rollout: batches of an epoch, what is in them, chunks, and calls that make no sense."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from relive import RolloutBuffer, Schema, errors
from support import oracle
from support.effort import often
from support.oracle import Stretch
from support.window_worlds import (
    FACTS,
    FLAG,
    RICH,
    SMALL,
    World,
    add_all,
    assert_same,
    check_batch,
    filled,
    found_in,
    leaves_of,
    world_of,
)

# What a batch looks like


def test_a_batch_reads_as_its_documentation_says() -> None:
    world = world_of(["..T..", ".U..."], RICH)
    (seq,) = filled(world).sequences(3, shuffle=False)
    assert found_in([seq]) == [(0, 0, 3, True), (0, 3, 2, True), (1, 0, 2, True), (1, 2, 3, True)]
    assert seq["mask"].T.tolist() == [[True] * 3, [True, True, False], [True, True, False], [True] * 3]
    assert seq["lengths"].tolist() == [3, 2, 2, 3]
    assert seq["burn_in"].tolist() == [0, 0, 0, 0]
    assert seq["obs"]["camera"].shape == (3, 4, 33, 32)
    assert seq["obs"]["camera"].dtype is torch.uint8
    assert seq["action"]["0"].dtype is torch.int64
    assert seq["log_prob"].dtype is torch.bfloat16
    assert not seq["reward"][2, 1]
    assert not seq["obs"]["camera"][2, 1:3].any()
    assert seq["action_mask"][2, 1].tolist() == [1] * 5
    actor, critic = seq["hidden"]["actor"], seq["hidden"]["critic"]
    assert isinstance(actor, tuple)
    assert [x.shape for x in (*actor, critic)] == [(2, 4, 3), (2, 4, 3), (4, 4)]
    assert torch.equal(actor[0][:, 1], world.columns["hidden", "actor", "0"][3, 0])
    (seq,) = filled(world).sequences(3, shuffle=False, time_first=False)
    assert seq["obs"]["camera"].shape == (4, 3, 33, 32)
    assert seq["mask"].shape == (4, 3)
    assert seq["hidden"]["actor"][0].shape == (2, 4, 3)


def test_a_batch_is_a_mapping() -> None:
    (seq,) = filled(world_of(["..T", "..."])).sequences(2)
    names = {"obs", "reward", "terminated", "truncated", "mask", "is_start", "hidden"} | FACTS
    assert isinstance(seq, Mapping)
    assert set(seq) == set(seq.keys()) == {name for name, _ in seq.items()} == names
    assert len(list(seq)) == len(names)
    assert len(seq) == seq["mask"].shape[1]
    assert "obs" in seq
    assert "nope" not in seq
    assert seq.get("nope") is None
    assert seq.get("obs") is seq["obs"]
    assert {**seq}.keys() == names
    with pytest.raises(errors.FieldError, match=r"'rewrad'.*did you mean 'reward'"):
        _ = seq["rewrad"]
    assert "SequenceBatch" in repr(seq)
    assert "reward" in repr(seq)


def test_batches_are_copies() -> None:
    world = world_of(["..T..", ".U..."], RICH)
    rollout = filled(world)
    for epochs in (1, 2):
        for seq in rollout.sequences(3, epochs=epochs):
            for x in leaves_of(seq).values():
                x.zero_()
            seq["hidden"]["critic"].zero_()
            seq["mask"].zero_()
    (seq,) = rollout.sequences(3)
    check_batch(world, seq, 3)


def test_a_rollout_without_hidden_state_has_sequences_without_it() -> None:
    schema = Schema({"obs": (2,), "terminated": FLAG, "truncated": FLAG})
    world = world_of(["..T..", ".U..."], schema)
    (seq,) = filled(world).sequences(2)
    check_batch(world, seq, 2)
    assert "hidden" not in seq
    with pytest.raises(errors.FieldError, match="'hidden'"):
        _ = seq["hidden"]


def test_hidden_states_are_given_even_if_only_other_fields_are_wanted() -> None:
    world = world_of(["..T.."])
    (seq,) = filled(world).sequences(2, fields=("reward",))
    assert set(seq) == {"reward", "mask", "is_start", "hidden"} | FACTS
    check_batch(world, seq, 2)


def test_columns_that_were_attached_are_among_the_fields() -> None:
    world = world_of(["..T..", ".U..."], RICH)
    rollout = filled(world)
    rollout["extra"] = 5 + torch.arange(10.0).view(5, 2)
    for fields in (None, ("extra", "obs")):
        (seq,) = rollout.sequences(3, fields=fields, shuffle=False)
        assert seq["extra"].T.tolist() == [[5, 7, 9], [11, 13, 0], [6, 8, 0], [10, 12, 14]]


def test_final_values_and_masks_can_be_asked_for() -> None:
    world = world_of([".U.", "..."], RICH)
    rollout = filled(world)
    rollout.set_final_value([1], [0], [7.0])
    assert "final_value" not in next(rollout.sequences(2))
    (seq,) = rollout.sequences(3, fields=("final_value",), shuffle=False)
    assert seq["final_value"][:2, 0].isnan().tolist() == [True, False]
    assert seq["final_value"][1, 0] == 7
    (seq,) = rollout.sequences(3, fields=("obs", "mask"), shuffle=False)
    assert seq["mask"].T.tolist() == [[True, True, False], [True, False, False], [True] * 3]


def test_the_mask_alone_can_be_asked_for() -> None:
    (seq,) = filled(world_of(["..T.."])).sequences(3, fields=("mask",), shuffle=False)
    assert seq["mask"].T.tolist() == [[True] * 3, [True, True, False]]
    assert set(seq) == {"mask", "is_start", "hidden"} | FACTS


@pytest.mark.parametrize("name", ["env", "start", "lengths", "burn_in", "done"])
def test_a_field_whose_name_a_batch_needs_is_refused_unless_it_is_left_out(name: str) -> None:
    rollout = filled(world_of(["..T.."], SMALL.extend(**{name: (2,)})))
    for call in (rollout.sequences, rollout.chunks):
        with pytest.raises(errors.FieldError, match=rf"'{name}'.*fields="):
            call(3)
        assert "obs" in next(call(3, fields=("obs",)))


def test_a_field_without_elements_has_sequences_too() -> None:
    schema = SMALL.extend(nothing=(0,), hidden=(1, 2))
    world = world_of(["..T.."], schema)
    for epochs in (1, 2):
        for seq in filled(world).sequences(2, epochs=epochs):
            assert seq["nothing"].shape == (2, 3, 0)


# Batches of an epoch


WORLD = world_of(["..T.....", ".U...T..", "....m...", "T......."])


@pytest.mark.parametrize("size", range(1, 16))
def test_batches_have_so_many_sequences_and_the_last_one_takes_what_remains(size: int) -> None:
    rollout = filled(WORLD)
    total = len(WORLD.stretches(3, 3))
    sizes = [len(seq) for seq in rollout.sequences(3, batch_size=size)]
    assert sum(sizes) == total
    assert sizes == [size] * (total // size) + [total % size] * (total % size > 0)


def test_a_number_of_batches_splits_the_sequences_evenly() -> None:
    rollout = filled(WORLD)
    total = len(WORLD.stretches(3, 3))
    for count in range(1, total + 1):
        sizes = [len(seq) for seq in rollout.sequences(3, num_batches=count)]
        assert (len(sizes), sum(sizes)) == (count, total)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("steps", range(1, 34))
def test_batches_of_so_many_steps_are_as_full_as_the_order_allows(length: int | None, steps: int) -> None:
    rollout = filled(WORLD)
    batches = [[window.length for window in found_in([seq])] for seq in rollout.sequences(length, batch_steps=steps)]
    assert sum(map(sum, batches)) == WORLD.mask.sum()
    for mine, following in itertools.pairwise([*batches, [steps + 1]]):
        assert sum(mine) <= steps or len(mine) == 1
        assert sum(mine) + following[0] > steps


def test_without_a_size_an_epoch_is_one_batch() -> None:
    batches = list(filled(WORLD).sequences(3, epochs=4))
    assert [len(seq) for seq in batches] == [len(WORLD.stretches(3, 3))] * 4


@pytest.mark.parametrize("sizes", [{"batch_size": 2}, {"num_batches": 3}, {"batch_steps": 6}])
def test_a_new_order_is_drawn_every_epoch_and_it_is_a_function_of_the_seed_and_the_draw(sizes: Any) -> None:
    def orders(seed: int, count: int, draws: int = 0) -> list[list[Stretch]]:
        rollout = filled(WORLD, seed=seed)
        for _ in range(draws):
            rollout.sample(1)
        return [found_in(rollout.sequences(2, **sizes)) for _ in range(count)]

    one = orders(0, 4)
    assert len(set(map(tuple, one))) == 4
    assert all(sorted(order) == sorted(one[0]) for order in one)
    assert orders(0, 4) == one
    assert orders(0, 2, draws=2) == one[2:]
    assert orders(1, 4)[0] != one[0]
    together = list(filled(WORLD).sequences(2, epochs=4, **sizes))
    assert found_in(together) == [window for order in one for window in order]


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    rollout = filled(WORLD)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    one = found_in(rollout.sequences(2, batch_size=2))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    torch.manual_seed(123)
    assert found_in(filled(WORLD).sequences(2, batch_size=2)) == one


def test_every_sequence_can_come_at_every_place_of_an_epoch() -> None:
    """A bias of 1 in 100 towards the place a sequence has in time would take a far larger sample to pass: see below."""
    world = world_of(["." * 10])
    rollout, draws = filled(world), often(1000, 4000)
    counts = np.zeros((10, 10))
    for _ in range(draws):
        (seq,) = rollout.sequences(1, fields=("reward",))
        counts[seq["start"].numpy(), np.arange(10)] += 1
    expected = draws / 10
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 81 + 6 * math.sqrt(2 * 81), chi2  # 81 degrees of freedom
    leaning = 0.99 * counts + 0.01 * draws * np.eye(10) * 10  # a tenth of a row more on the diagonal
    assert ((leaning - expected) ** 2 / expected).sum() > 81 + 6 * math.sqrt(2 * 81)


def test_shuffling_can_be_turned_off() -> None:
    rollout = filled(WORLD)
    want = WORLD.stretches(3, 3)
    assert found_in(rollout.sequences(3, shuffle=False, epochs=2)) == want * 2
    assert found_in(rollout.sequences(3, shuffle=False, batch_size=2)) == want


def test_a_rollout_that_was_loaded_goes_on_with_the_orders_of_the_one_that_was_saved(tmp_path: Any) -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "T......."], RICH, [True, False, True, False])
    rollout = filled(world)
    list(rollout.sequences(2, epochs=2))
    rollout.save(tmp_path / "rollout")
    again = RolloutBuffer.load(tmp_path / "rollout")
    for _ in range(2):
        batches = list(again.sequences(2, batch_size=3))
        assert found_in(batches) == found_in(rollout.sequences(2, batch_size=3))
        for seq in batches:
            check_batch(world, seq, 2)
    for each in (rollout, again):
        each.clear()
        add_all(each, world)
        assert sorted(found_in(each.sequences(2))) == sorted(
            World(world.schema, world.letters, world.columns, world.done[-1]).stretches(2, 2)
        )


# Advantages


@pytest.mark.parametrize("time_first", [True, False])
def test_advantages_are_normalised_over_the_steps_of_each_batch_and_padding_stays_zero(time_first: bool) -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "T......."], RICH)
    rollout = filled(world)
    plain = list(filled(world).sequences(3, batch_size=4, time_first=time_first))
    batches = list(rollout.sequences(3, batch_size=4, time_first=time_first, normalize_advantage=True))
    assert len(batches) == len(plain) > 2
    for seq, raw in zip(batches, plain, strict=True):
        assert torch.equal(seq["mask"], raw["mask"])
        want = oracle.normalize(raw["advantage"].double(), raw["mask"])
        assert seq["advantage"].dtype is torch.float32
        np.testing.assert_allclose(seq["advantage"], want, rtol=1e-4, atol=1e-5)
        assert not seq["advantage"][~seq["mask"]].any()
        for path, x in leaves_of(seq).items():
            if path != ("advantage",):
                assert_same(x, leaves_of(raw)[path], path)
    assert torch.equal(rollout["advantage"], world.columns["advantage",])


def test_normalising_leaves_a_single_step_finite() -> None:
    (seq,) = filled(world_of(["mm."], RICH)).sequences(3, normalize_advantage=True)
    assert seq["advantage"].tolist() == [[0], [0], [0]]


def test_normalising_needs_advantages() -> None:
    rollout = filled(WORLD)
    with pytest.raises(errors.FieldError, match=r"'advantage'.*finish"):
        rollout.sequences(3, normalize_advantage=True)
    rich = filled(world_of(["..T"], RICH))
    with pytest.raises(errors.FieldError, match="'advantage'"):
        rich.sequences(3, normalize_advantage=True, fields=("obs",))


# Calls that make no sense


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"length": 0}, errors.ParameterError, "length=0.*at least 1"),
        ({"length": -3}, errors.ParameterError, "length=-3"),
        ({"length": 2.5}, errors.ParameterError, "length=2.5"),
        ({"overlap": "half"}, errors.ParameterError, "'half'.*length"),
        ({"overlap": 1}, errors.ParameterError, "overlap=1.*length"),
        ({"length": 3, "overlap": 3}, errors.ParameterError, "overlap=3.*0 to 2"),
        ({"length": 3, "overlap": 7}, errors.ParameterError, "overlap=7.*0 to 2"),
        ({"length": 3, "overlap": -1}, errors.ParameterError, "overlap=-1.*0 to 2"),
        ({"length": 3, "overlap": 0.5}, errors.ParameterError, "overlap=0.5"),
        ({"length": 3, "overlap": "most"}, errors.ParameterError, "'most'.*'none', 'half', 'max'"),
        ({"length": 3, "overlap": None}, errors.ParameterError, "overlap=None"),
        ({"batch_size": 2, "num_batches": 2}, errors.ParameterError, "batch_size.*num_batches.*batch_steps"),
        ({"batch_size": 2, "batch_steps": 2}, errors.ParameterError, "batch_size.*num_batches.*batch_steps"),
        ({"num_batches": 2, "batch_steps": 2}, errors.ParameterError, "batch_size.*num_batches.*batch_steps"),
        ({"batch_size": 0}, errors.ParameterError, "batch_size=0"),
        ({"batch_size": -1}, errors.ParameterError, "batch_size=-1"),
        ({"num_batches": 0}, errors.ParameterError, "num_batches=0.*1 to 9"),
        ({"num_batches": 10}, errors.ParameterError, "num_batches=10.*9 sequences.*1 to 9"),
        ({"batch_steps": 0}, errors.ParameterError, "batch_steps=0"),
        ({"batch_steps": -2}, errors.ParameterError, "batch_steps=-2"),
        ({"fields": ("obs", "rewrad")}, errors.FieldError, "'rewrad'.*did you mean 'reward'"),
        ({"fields": "obs"}, errors.FieldError, "tuple of column names"),
        ({"fields": ()}, errors.FieldError, "tuple of column names"),
    ],
    ids=str,
)
def test_a_call_that_makes_no_sense_is_refused_at_once_and_draws_nothing(
    arguments: Any, error: type[Exception], match: str
) -> None:
    rollout = filled(WORLD)
    with pytest.raises(error, match=match):
        rollout.sequences(**arguments)
    assert found_in(rollout.sequences(3, batch_size=2)) == found_in(filled(WORLD).sequences(3, batch_size=2))


def test_an_empty_rollout_has_no_sequences() -> None:
    rollout = RolloutBuffer(SMALL, 4, 2)
    for call in (rollout.sequences, rollout.chunks):
        with pytest.raises(errors.EmptyError, match=r"no steps.*add"):
            call(3)
    add_all(rollout, world_of(["..", ".."])).clear()
    with pytest.raises(errors.EmptyError, match="no steps"):
        rollout.sequences(3)


@pytest.mark.parametrize(
    ("letters", "arguments"),
    [
        ("....", {"complete": True}),
        ("..T.", {"length": 4, "drop_tail": True}),
        ("m..T", {"length": 4, "drop_tail": True}),
        ("mmmm", {}),
    ],
)
def test_a_rollout_without_such_windows_has_no_batches(letters: str, arguments: Any) -> None:
    rollout = filled(world_of([letters]))
    for sizes in ({}, {"batch_size": 2}, {"num_batches": 1}, {"batch_steps": 3}):
        for shuffle in (True, False):
            assert not list(rollout.sequences(**arguments, **sizes, shuffle=shuffle, epochs=2))


def test_a_schema_that_does_not_say_where_episodes_end_has_no_sequences() -> None:
    for schema in (Schema({"obs": (2,)}), Schema({"obs": (2,), "terminated": FLAG})):
        rollout = RolloutBuffer(schema, 2, 1)
        rollout.add(**{name: np.zeros((1, *schema.leaves[name,].shape), bool) for name in schema.names})
        for call in (rollout.sequences, rollout.chunks):
            with pytest.raises(errors.FieldError, match=r"'truncated'|'terminated'"):
                call(2)


# Chunks


@pytest.mark.parametrize("length", [None, 1, 2, 3, 8, 20])
def test_chunks_are_all_envs_in_the_order_of_time(length: int | None) -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "TM......"], RICH, [True, False, True, False])
    rollout = filled(world)
    size = length or 8
    chunks = list(rollout.chunks(length))
    assert [len(seq["mask"]) for seq in chunks] == [min(size, 8 - t) for t in range(0, 8, size)]
    for i, seq in enumerate(chunks):
        times = slice(i * size, min((i + 1) * size, 8))
        assert tuple(seq.shape) == (times.stop - times.start, 4)
        assert_same(seq["mask"], torch.from_numpy(world.mask[times]), "mask")
        assert_same(seq["done"], torch.from_numpy(world.done[times]), "done")
        got = leaves_of(seq)
        for path, column in world.columns.items():
            if path[0] != "hidden":
                assert_same(got[path], column[times], path)
        actor, critic, half = (seq["hidden"][name] for name in ("actor", "critic", "half"))
        for place in (0, 1):
            want = world.columns["hidden", "actor", str(place)][times.start].transpose(0, 1).contiguous()
            assert_same(actor[place], want, "hidden")
        assert_same(critic, world.columns["hidden", "critic"][times.start], "hidden")
        assert_same(half[0], world.columns["hidden", "half", "0"][times.start].transpose(0, 1).contiguous(), "hidden")
        starts = [
            [oracle.starts_episode(world.done, world.mask, world.ended, t, n) for n in range(4)]
            for t in range(times.start, times.stop)
        ]
        assert seq["is_start"].tolist() == starts


def test_chunks_have_the_fields_that_are_wanted() -> None:
    rollout = filled(WORLD)
    chunks = list(rollout.chunks(3, fields=("reward",)))
    assert [len(seq["mask"]) for seq in chunks] == [3, 3, 2]
    assert all("obs" not in seq for seq in chunks)
    assert torch.equal(torch.cat([seq["reward"] for seq in chunks]), WORLD.columns["reward",])
    for length in (0, -1):
        with pytest.raises(errors.ParameterError, match=f"length={length}"):
            rollout.chunks(length)
    with pytest.raises(errors.FieldError, match="did you mean 'reward'"):
        rollout.chunks(3, fields=("rewrad",))


def test_chunks_of_a_partial_and_of_a_wrapped_rollout_are_in_the_order_of_time() -> None:
    world = world_of(["..T.....", ".U...T.."])
    rollout = RolloutBuffer(SMALL, 5, 2, wrap=True)
    for count in (3, 8):
        add_all(rollout, world, range(rollout.steps, count))
        low = max(count - 5, 0)
        chunks = list(rollout.chunks(2))
        for name in ("obs", "terminated"):
            assert torch.equal(torch.cat([seq[name] for seq in chunks]), world.columns[name,][low:count])
        assert torch.equal(chunks[1]["hidden"][0], world.columns["hidden",][low + 2, :, 0])
