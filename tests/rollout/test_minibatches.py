"""Minibatches: every real transition once an epoch, whole, in an order that the seed decides; packed rows."""

from __future__ import annotations

import cProfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import relive
from relive import GAE, Batch, Field, RolloutBuffer, core, errors
from relive.memory.layout import LARGE_FIELD
from relive.rollout import buffer
from relive.rollout.minibatches import rows_of
from relive.steps.schema import Path
from support import internals, oracle
from support.fields import DTYPES, LEAVES, bits, noise
from support.rollouts import LAST, SCHEMA, all_ids, filled, holds, ids, play, same_data, stack, step

# Reading all, some, and in minibatches


def test_all_data_flat_are_time_first_and_a_copy() -> None:
    steps = play(3)
    rollout = filled(steps)
    batch = rollout.flat()
    assert len(batch) == 6
    assert set(batch.keys()) == set(SCHEMA.names)
    assert ids(batch) == all_ids(3)
    for x in batch.values():
        x.zero_()
    assert holds(rollout, steps)


@pytest.mark.parametrize("masked", [False, True])
def test_batches_are_copies(masked: bool) -> None:
    steps = play(4, masked=masked)
    rollout = filled(steps)
    clean = rollout.flat().clone()
    for batch in (rollout.flat(), rollout.sample(2), *rollout.minibatches(3, epochs=2)):
        assert len(set(ids(batch)) - set(ids(clean))) == 0
        for x in batch.values():
            x.zero_()
    assert holds(rollout, steps)


def test_only_the_columns_asked_for_are_in_a_batch() -> None:
    rollout = filled(play(3))
    fields = ("obs", "mask", "final_value")
    for batch in (rollout.flat(fields), rollout.sample(2, fields), next(rollout.minibatches(2, fields=fields))):
        assert tuple(batch.keys()) == fields
    for call in (rollout.flat, lambda f: rollout.sample(2, f), lambda f: rollout.minibatches(2, fields=f)):
        with pytest.raises(errors.FieldError, match="did you mean 'obs'"):
            call(("obbs",))


def test_a_minibatch_without_columns_is_refused_or_empty() -> None:
    rollout = filled([step(0)])
    try:
        batches = list(rollout.minibatches(1, fields=()))
    except errors.ReliveError:
        return
    assert [tuple(batch.keys()) for batch in batches] == [(), ()]


@pytest.mark.parametrize("masked", [False, True])
def test_every_row_of_a_batch_is_one_transition_whole(masked: bool) -> None:
    rollout = filled(play(8, 3, masked=masked)).finish(GAE(), last_value=[1, 2, 3])
    rows = {int(row["action"]): row for row in rollout.flat().split(1)}
    for batch in (rollout.sample(5), *rollout.minibatches(4, epochs=2)):
        for row in batch.split(1):
            assert same_data(row, rows[int(row["action"])])


def test_a_sample_is_drawn_without_replacement_by_the_next_permutation() -> None:
    rollout = filled([step(t) for t in range(5)], seed=8)
    flat = all_ids(5)
    for counter, size in enumerate([1, 4, 10, 3]):
        order = core.permutation(10, 8, counter)[:size]
        assert ids(rollout.sample(size)) == [flat[i] for i in order]


@pytest.mark.parametrize("size", [0, -1, 11])
def test_a_sample_larger_than_the_rollout_is_refused(size: int) -> None:
    with pytest.raises(errors.ParameterError, match=rf"sample\({size}\).*holds 10 transitions; ask for 1 to 10"):
        filled([step(t) for t in range(5)]).sample(size)


def test_every_epoch_has_a_new_permutation_and_serves_every_row_once() -> None:
    rollout = filled([step(t) for t in range(16)])  # 32 rows, of which four batches of seven would use 28
    epochs = [ids(list(rollout.minibatches(7))) for _ in range(4)]
    batches = list(rollout.minibatches(7, epochs=4))
    assert [len(batch) for batch in batches] == [7, 7, 7, 7, 4] * 4
    epochs += [ids(batches[5 * k : 5 * k + 5]) for k in range(4)]
    assert all(sorted(order) == all_ids(16) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 8


@pytest.mark.parametrize("masked", [False, True])
def test_minibatches_that_are_not_shuffled_are_the_steps_in_order_and_draw_no_permutation(masked: bool) -> None:
    rollout, other = (filled(play(8, 3, masked=masked), seed=1) for _ in range(2))
    options: list[dict[str, Any]] = [
        {"batch_size": 5},
        {"num_batches": 4},
        {"batch_size": 1},
        {"reshuffle": False, "batch_size": 24},
    ]
    for given_options in options:
        batches = list(rollout.minibatches(**given_options, epochs=2, shuffle=False))
        half = len(batches) // 2
        for epoch in (batches[:half], batches[half:]):
            assert same_data(Batch.joined(epoch, set(epoch[0]), {}), rollout.flat())
    for batch in rollout.minibatches(5, epochs=2, drop_last=True, shuffle=False):
        assert len(batch) == 5
    assert ids(list(rollout.minibatches(5))) == ids(list(other.minibatches(5)))


@given(st.integers(1, 9), st.integers(1, 3), st.data())
def test_an_epoch_serves_every_real_row_once_whatever_the_sizes(steps: int, envs: int, data: st.DataObject) -> None:
    played = play(steps, envs, masked=data.draw(st.booleans()), seed=data.draw(st.integers(0, 9)))
    rollout = filled(played, seed=3)
    real = [i for i, m in zip(all_ids(steps, envs), stack(played, "mask").flatten(), strict=True) if m]
    assert len(rollout) == len(real)
    assert ids(rollout.flat()) == real
    size = data.draw(st.integers(1, steps * envs + 2))
    sizes = [len(batch) for batch in rollout.minibatches(size)]
    assert sizes == [size] * (len(real) // size) + [len(real) % size] * (len(real) % size > 0)
    assert sorted(ids(list(rollout.minibatches(size)))) == real
    if real:
        count = data.draw(st.integers(1, len(real)))
        batches = list(rollout.minibatches(num_batches=count))
        assert sorted(ids(batches)) == real
        assert len(batches) == count
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        whole = list(rollout.minibatches(num_batches=count, drop_last=True))
        assert [len(batch) for batch in whole] == [len(real) // count] * count
        assert len(set(ids(whole))) == len(real) // count * count


def test_dropping_the_last_batch_drops_other_rows_each_epoch() -> None:
    rollout = filled([step(t) for t in range(5)])
    rollout.seed = 0
    batches = list(rollout.minibatches(4, epochs=30, drop_last=True))
    assert [len(batch) for batch in batches] == [4, 4] * 30
    dropped = [frozenset(all_ids(5)) - set(ids([a, b])) for a, b in zip(batches[::2], batches[1::2], strict=True)]
    assert all(len(rows) == 2 for rows in dropped)
    assert set().union(*dropped) == set(all_ids(5))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either batch_size or num_batches"),
        ({"batch_size": 2, "num_batches": 2}, "either batch_size or num_batches"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -2}, "batch_size=-2"),
        ({"batch_size": 7, "drop_last": True}, "batch_size=7.*ask for 1 to 6"),
        ({"num_batches": 0}, "num_batches=0"),
        ({"num_batches": 7}, "num_batches=7.*1 to 6"),
        ({"batch_size": 2.0}, r"batch_size=2\.0"),
        ({"num_batches": "2"}, "num_batches='2'"),
        ({"batch_size": 2, "epochs": 0}, "epochs=0"),
        ({"batch_size": 2, "epochs": 1.5}, r"epochs=1\.5"),
    ],
    ids=str,
)
def test_minibatches_that_do_not_fit_are_refused_at_the_call(options: Any, says: str) -> None:
    with pytest.raises(errors.ParameterError, match=says):
        filled([step(t) for t in range(3)]).minibatches(**options)


def test_an_empty_rollout_refuses_to_be_read_or_finished() -> None:
    rollout = RolloutBuffer(SCHEMA, 2, 2)
    calls = [rollout.flat, lambda: rollout.sample(1), lambda: rollout.minibatches(1), lambda: rollout.finish(GAE())]
    for call in calls:
        with pytest.raises(errors.EmptyError, match=r"no steps; call add\(\)"):
            call()


# Steps that are not real


def test_unreal_steps_are_counted_and_served_nowhere_but_stay_in_their_columns() -> None:
    masks = [[True, False], [False, False], [True, True]]
    rollout = filled(step(t, mask=mask) for t, mask in enumerate(masks))
    assert len(rollout) == 3
    assert ids(rollout.flat()) == [0, 200, 201]
    assert sorted(ids(list(rollout.minibatches(2)))) == [0, 200, 201]
    assert sorted(ids(rollout.sample(3))) == [0, 200, 201]
    assert rollout["action"].tolist() == [[0, 1], [100, 101], [200, 201]]
    with pytest.raises(errors.ParameterError, match="3 transitions"):
        rollout.sample(4)


@pytest.mark.parametrize("how", ["whole", "through a view", "through data", "through env_major"])
def test_a_mask_may_also_be_set_later(how: str) -> None:
    rollout = filled([step(0), step(1)])
    if how == "whole":
        rollout["mask"] = [[True, False], [True, True]]
    elif how == "through a view":
        rollout["mask"][0, 1] = False
    elif how == "through data":
        rollout.data()["mask"][0, 1] = False
    else:
        rollout.env_major["mask"][1, 0] = False
    assert rollout["mask"].tolist() == [[True, False], [True, True]]
    assert len(rollout) == 3
    assert ids(rollout.flat()) == [0, 100, 101]


def test_a_rollout_of_unreal_steps_alone_serves_nothing() -> None:
    rollout = filled([step(0, mask=[False, False])]).finish(GAE(), last_value=[1, 1])
    assert len(rollout) == 0
    assert list(rollout.minibatches(4, epochs=2)) == []
    assert len(rollout.flat()) == 0
    assert rollout["advantage"].tolist() == [[0, 0]]


# Advantages normalised per minibatch


@pytest.mark.parametrize("masked", [False, True])
def test_advantages_are_normalised_within_each_minibatch(masked: bool) -> None:
    raw, normal = (filled(play(8, 3, masked=masked), seed=4).finish(GAE(), last_value=LAST) for _ in range(2))
    before = normal["advantage"].clone()
    sizes = []
    for a, b in zip(
        raw.minibatches(5, epochs=2), normal.minibatches(5, epochs=2, normalize_advantage=True), strict=True
    ):
        assert ids(a) == ids(b)
        np.testing.assert_allclose(b["advantage"], oracle.normalize(a["advantage"]), atol=1e-5)
        assert torch.equal(a["return"], b["return"])
        sizes.append(len(a))
    assert torch.equal(normal["advantage"], before)
    assert len(sizes) > 4


def test_a_minibatch_of_one_has_advantage_zero_when_normalised() -> None:
    rollout = filled(play(3)).finish(GAE(), last_value=[1, 2])
    assert [batch["advantage"].item() for batch in rollout.minibatches(1, normalize_advantage=True)] == [0] * 6


def test_advantages_that_are_not_there_cannot_be_normalised() -> None:
    rollout = filled(play(3))
    with pytest.raises(errors.FieldError, match=r"no 'advantage'; call finish"):
        rollout.minibatches(2, normalize_advantage=True)
    rollout.finish(GAE(), last_value=[1, 2])
    with pytest.raises(errors.FieldError, match="advantage"):
        rollout.minibatches(2, normalize_advantage=True, fields=("obs",))


# Randomness


def test_the_same_seed_gives_the_same_batches_and_another_seed_others() -> None:
    def served(seed: int | None) -> list[int]:
        rollout = filled([step(t) for t in range(20)], seed=seed)
        return ids([*rollout.minibatches(7, epochs=2), rollout.sample(5), *rollout.minibatches(num_batches=3)])

    assert served(1) == served(1)
    assert len({tuple(served(seed)) for seed in range(10)}) == 10


def test_a_seed_that_was_not_given_is_drawn_and_told() -> None:
    steps = [step(t) for t in range(20)]
    first, other = filled(steps), filled(steps)
    assert first.seed != other.seed
    again = filled(steps, seed=first.seed)
    assert ids(first.sample(40)) == ids(again.sample(40)) != ids(other.sample(40))


def test_batches_neither_read_nor_touch_the_global_generators() -> None:
    def served() -> list[int]:
        rollout = filled([step(t) for t in range(9)], seed=3)
        return ids([*rollout.minibatches(4, epochs=2), rollout.sample(3)])

    numpys: Any = np.random.mtrand._rand
    torch.manual_seed(0)
    before = torch.get_rng_state(), numpys.get_state()[1].tolist()
    first = served()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpys.get_state()[1].tolist() == before[1]
    torch.manual_seed(1)
    assert served() == first


def test_permutation_number_k_depends_on_the_seed_and_k_alone() -> None:
    flat = all_ids(6)
    rollout = filled([step(t) for t in range(6)], seed=11)
    rollout.sample(2)
    list(rollout.minibatches(5, epochs=3))
    rollout.clear()
    for t in range(6):
        rollout.add(step(t))
    assert ids(list(rollout.minibatches(5))) == [flat[i] for i in core.permutation(12, 11, 4)]


@pytest.mark.parametrize("seed", [-1, 2**64, 2**70], ids=repr)
def test_a_seed_may_be_any_integer(seed: int) -> None:
    rollout = filled([step(t) for t in range(6)], seed=seed)
    flat = ids([rollout.flat()])
    assert ids(list(rollout.minibatches(5))) == [flat[i] for i in core.permutation(12, seed, 0)]
    rollout.seed = 11  # from here on as a new one with that seed
    assert ids(list(rollout.minibatches(5))) == [flat[i] for i in core.permutation(12, 11, 0)]


@pytest.mark.parametrize("seed", [True, 1.5, "7"], ids=repr)
def test_a_seed_that_cannot_be_used_is_refused_at_once(seed: Any) -> None:
    with pytest.raises(errors.ReliveError, match="seed"):
        RolloutBuffer(SCHEMA, 2, 2, seed=seed)


def test_a_seed_that_is_not_given_is_one_number_of_torchs_default_generator() -> None:
    seeds: list[list[int]] = []
    for _ in range(2):
        torch.manual_seed(42)
        seeds.append([RolloutBuffer(SCHEMA, 2, 2).seed for _ in range(3)])
        after = torch.rand(1)
        torch.manual_seed(42)
        drawn = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(3)]
        assert seeds[-1] == drawn
        assert torch.equal(after, torch.rand(1))
        before = torch.get_rng_state()
        RolloutBuffer(SCHEMA, 2, 2, seed=3)
        assert torch.equal(torch.get_rng_state(), before)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    with torch.device("meta"):  # wherever tensors are made by default
        assert isinstance(RolloutBuffer(SCHEMA, 2, 2, device="cpu").seed, int)


FIELDS = ("obs", "action", "reward", "value")


def random_rollout(steps: int, envs: int) -> RolloutBuffer:
    flag = relive.Field((), torch.bool)
    schema = {"obs": (5,), "action": (2,), "reward": (), "terminated": flag, "truncated": flag, "value": ()}
    rollout, rng = RolloutBuffer(relive.Schema(schema), steps, envs, seed=1), np.random.default_rng(0)
    for _ in range(steps):
        numbers = {name: rng.standard_normal((envs, *schema[name])).astype(np.float32) for name in FIELDS}
        rollout.add(numbers, terminated=np.zeros(envs, bool), truncated=np.zeros(envs, bool))
    return rollout


@pytest.mark.parametrize("many", [1, 10**9])
def test_packing_does_not_change_a_batch(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = random_rollout(40, 3)
    orders = torch.from_numpy(internals.permutations(rollout).next(120).numpy()).split(7)
    expected = [rollout.flat().rows(order) for order in orders]
    rollout.seed = 1
    monkeypatch.setattr(buffer, "MANY", many)
    for batch, want in zip(rollout.minibatches(7), expected, strict=True):
        assert all(torch.equal(batch[name], want[name]) for name in FIELDS)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_small_minibatch_takes_at_most_forty_calls(epochs: int) -> None:
    rollout = random_rollout(512, 8)
    run = lambda: sum(1 for _ in rollout.minibatches(64, epochs=epochs, fields=FIELDS))  # noqa: E731
    run()
    profile = cProfile.Profile()
    profile.enable()
    count = run()
    profile.disable()
    assert count == 64 * epochs
    assert sum(entry.callcount for entry in profile.getstats()) <= 40 * count


def columns_of(leaves: dict[Path, Field], steps: int, envs: int) -> dict[Path, Tensor]:
    """A column ``[T, N, ...]`` of noise for each leaf."""
    return {
        path: noise((steps, envs, *field.shape), field.dtype, seed) for seed, (path, field) in enumerate(leaves.items())
    }


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What torch before 2.6 can index in place of each."""


def picked(column: Tensor, index: Tensor) -> Tensor:
    """Rows of a column ``[T, N, ...]``, by torch's own indexing."""
    flat, signed = column.flatten(0, 1), SIGNED.get(column.dtype)
    return flat[index] if signed is None else flat.view(signed)[index].view(column.dtype)


# Rows


@given(LEAVES, st.integers(1, 4), st.integers(1, 3), st.data())
def test_gathered_rows_equal_the_columns_at_their_index(
    leaves: dict[Path, Field], steps: int, envs: int, data: st.DataObject
) -> None:
    columns = columns_of(leaves, steps, envs)
    index = torch.tensor(data.draw(st.lists(st.integers(0, steps * envs - 1), max_size=8)), dtype=torch.int64)
    batch = rows_of(columns).gather(index)
    assert list(batch) == list(columns)
    for path, column in columns.items():
        want = picked(column, index)
        assert (batch[path].shape, batch[path].dtype) == (want.shape, want.dtype)
        assert bits(batch[path]) == bits(want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_fields_at_the_limit_of_packing_are_gathered_exactly(dtype: torch.dtype, over: int) -> None:
    length = LARGE_FIELD // dtype.itemsize + over
    columns = columns_of({("a",): Field((3,), torch.uint8), ("large",): Field((length,), dtype), ("b",): Field()}, 3, 2)
    index = torch.tensor([5, 0, 0, 3])
    batch = rows_of(columns).gather(index)
    assert list(batch) == list(columns)
    for path, column in columns.items():
        assert bits(batch[path]) == bits(picked(column, index))


def test_large_fields_alone_are_gathered_too() -> None:
    columns = columns_of({("image",): Field((84, 84, 4), torch.uint8), ("scan",): Field((300,))}, 2, 2)
    batch = rows_of(columns).gather(torch.tensor([3, 1]))
    for path, column in columns.items():
        assert bits(batch[path]) == bits(picked(column, torch.tensor([3, 1])))


@pytest.mark.parametrize("length", [2, LARGE_FIELD])
def test_gathered_rows_are_a_copy(length: int) -> None:
    columns = {("x",): torch.ones(2, 2, length)}
    packed = rows_of(columns)
    packed.gather(torch.arange(4))["x",].zero_()
    assert packed.gather(torch.arange(4))["x",].min() == 1
    assert columns["x",].min() == 1
