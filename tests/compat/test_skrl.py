"""relive.compat.skrl over a stand-in of skrl: what goes in comes out, and right where skrl's memory is not."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compat import skrl_stand_in as stand_in
from relive.errors import EmptyError, FieldError, FileFormatError, ParameterError, ShapeError

NAMES = ["observations", "states", "actions", "rnn_policy_0"]


@pytest.fixture
def ours() -> Iterator[Any]:
    with stand_in.installed() as module:
        yield module


def memory(ours: Any, steps: int = 8, envs: int = 1, **options: Any) -> Any:
    made = ours.RandomMemory(memory_size=steps, num_envs=envs, device="cpu", **options)
    created(made)
    return made


def created(made: Any) -> None:
    made.create_tensor("observations", size=2, dtype=torch.float32)
    made.create_tensor("actions", size=1, dtype=torch.int64)
    made.create_tensor("rnn_policy_0", size=(1, 3), dtype=torch.float32, keep_dimensions=True)
    made.create_tensor("returns", size=1, dtype=torch.float32)  # no step brings it


def step(number: int, envs: int = 1, first: int = 0) -> dict[str, Any]:
    """Every field says which step and env it is of."""
    numbers = 100 * number + first + torch.arange(envs).unsqueeze(1)
    return {
        "observations": numbers.expand(-1, 2).float(), "states": None, "actions": numbers,
        "rnn_policy_0": numbers.view(-1, 1, 1).expand(-1, -1, 3).float(), "infos": numbers,
    }  # fmt: skip


def filled(made: Any, count: int) -> Any:
    for number in range(count):
        made.add_samples(**step(number, made.num_envs))
    return made


def numbers(batch: list[Any]) -> list[int]:
    """Which steps and envs the rows of a batch are of, if all fields agree."""
    observations, states, actions, rnn = batch
    assert states is None
    assert (observations == actions).all()
    assert (rnn.squeeze(1) == actions).all()
    assert (observations.dtype, actions.dtype, rnn.dtype) == (torch.float32, torch.int64, torch.float32)
    return actions.squeeze(1).tolist()


def every(batches: list[list[Any]]) -> list[int]:
    return [number for batch in batches for number in numbers(batch)]


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("count", [1, 5, 8, 13, 16])
def test_the_newest_steps_are_stored_each_in_its_row_with_all_its_fields(ours: Any, envs: int, count: int) -> None:
    made = filled(memory(ours, 8, envs), count)
    newest = range(max(count - 8, 0), count)
    assert len(made) == len(newest) * envs
    assert sorted(every(made.sample_all(NAMES))) == [100 * k + env for k in newest for env in range(envs)]
    for k in newest:
        assert made.get_tensor_by_name("actions")[k % 8, :, 0].tolist() == [100 * k + env for env in range(envs)]
    assert made.get_tensor_by_name("returns").isnan().all()


@pytest.mark.parametrize("blocks", [[2], [3, 3], [6, 6], [8], [5, 8], [7, 1, 9], [20], [8, 8, 3]])
def test_several_steps_at_once_are_stored_as_one_by_one(ours: Any, blocks: list[int]) -> None:
    together, single = memory(ours), memory(ours)
    until = 0
    for count in blocks:
        parts = [step(until + k) for k in range(count)]
        together.add_samples(
            **{name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "states"}, states=None
        )
        for part in parts:
            single.add_samples(**part)
        until += count
        assert len(together) == len(single)
        assert (together.memory_index, together.filled) == (single.memory_index, single.filled)
        for name in ("observations", "actions", "rnn_policy_0"):
            assert torch.equal(together.tensors[name].nan_to_num(-1), single.tensors[name].nan_to_num(-1)), name


def test_one_row_for_many_steps_is_repeated_over_the_end_of_the_memory_too(ours: Any) -> None:
    made = filled(memory(ours), 6)
    made.add_samples(observations=torch.full((5, 2), 7.0), actions=torch.tensor([[7]]), rnn_policy_0=torch.tensor(7.0))
    assert Counter(every(made.sample_all(NAMES))) == {7: 5, 300: 1, 400: 1, 500: 1}


def test_a_field_with_as_many_rows_as_are_left_to_the_end_of_the_memory_does_not_fit_more_steps(ours: Any) -> None:
    made = filled(memory(ours, steps=4), 2)
    before = {name: tensor.clone() for name, tensor in made.tensors.items()}
    several = {name: x if x is None else torch.cat([x] * 3) for name, x in step(7).items()}
    with pytest.raises(ShapeError, match=r"rnn_policy_0: expected rows of shape \(3, 1, 3\), got \(2, 1, 3\)"):
        made.add_samples(**several | {"rnn_policy_0": several["rnn_policy_0"][:2]})
    assert (made.memory_index, made.filled) == (2, False)
    for name, tensor in made.tensors.items():
        assert torch.equal(tensor.nan_to_num(-1), before[name].nan_to_num(-1)), name


def test_a_tensor_that_moved_to_shared_memory_is_read_where_it_lies_now(ours: Any) -> None:
    made = filled(memory(ours, steps=4), 4)
    made.sample(["actions"], batch_size=2)
    made.tensors["actions"].share_memory_()
    filled(made, 1)
    made.tensors["actions"].fill_(5)
    ((read,),) = made.sample_by_index(["actions"], indexes=range(4))
    assert read.tolist() == [[5]] * 4
    made.tensors["actions"] = torch.full((4, 1, 1), 6)
    ((read,),) = made.sample(["actions"], batch_size=4)
    assert read.tolist() == [[6]] * 4


def test_in_the_place_of_skrls_own_class_it_is_made_as_before(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where skrl's ``Runner`` is to make its memory of it."""
    monkeypatch.setattr(sys.modules["skrl.memories.torch"], "RandomMemory", ours.RandomMemory)
    assert len(filled(memory(ours, steps=4), 3)) == 3


def test_a_step_can_come_env_by_env(ours: Any) -> None:
    made = filled(memory(ours, 3, 4), 2)
    made.add_samples(**step(2, 2))
    assert (len(made), made.env_index) == (10, 2)
    made.add_samples(**{name: x if x is None else x[0] for name, x in step(2, 1, 2).items()})  # without the axis
    assert (len(made), made.env_index) == (11, 3)
    with pytest.raises(ValueError, match=r"current_num_envs <= 1, since 3 envs of this step are stored, got \(4, 2\)"):
        made.add_samples(**step(3, 4))
    assert set(every(made.sample(NAMES, batch_size=200))) == {0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202}
    made.add_samples(**step(2, 1, 3))
    assert (len(made), made.env_index, made.memory_index, made.filled) == (12, 0, 0, True)
    assert numbers(made.sample_all(NAMES)[0])[-4:] == [200, 201, 202, 203]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"actions": torch.zeros(2, 1)}, ShapeError, r"actions: expected rows of shape \(3, 1\), got \(2, 1\)"),
        ({"rnn_policy_0": torch.zeros(3, 1, 4)}, ShapeError, r"rnn_policy_0: expected rows of shape \(3, 1, 3\)"),
        ({"observations": torch.zeros(5, 2)}, ValueError, r"current_num_envs <= 3, got \(5, 2\)"),
        ({"observations": torch.zeros(3, 1, 2)}, ValueError, r"got \(3, 1, 2\)"),
        ({"observations": torch.zeros(0, 2)}, ValueError, r"got \(0, 2\)"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(ours: Any, change: Any, error: Any, words: str) -> None:
    made = filled(memory(ours, 4, 3), 3)
    before = copy.deepcopy(made.tensors)
    with pytest.raises(error, match=words):
        made.add_samples(**step(3, 3) | change)
    with pytest.raises(ValueError, match="There are no samples"):
        made.add_samples(states=None)
    assert (made.memory_index, made.env_index, made.filled) == (3, 0, False)
    assert all(torch.equal(made.tensors[name].nan_to_num(-1), x.nan_to_num(-1)) for name, x in before.items())


def test_what_was_added_may_be_overwritten_afterwards_and_a_batch_changed(ours: Any) -> None:
    made = memory(ours, 4, 3)
    for k in range(4):
        given = step(k, 3)
        made.add_samples(**{name: x if x is None else x.contiguous() for name, x in given.items()})
        for x in given.values():
            if x is not None:
                x.copy_(torch.full_like(x, -9))
    expected = sorted(100 * k + env for k in range(4) for env in range(3))
    batches = [made.sample(NAMES, batch_size=12)[0] for _ in range(3)]
    for x in batches[0]:
        if x is not None:
            x.fill_(-7)
    assert sorted(numbers(batches[1])) == sorted(numbers(batches[2])) == expected
    assert sorted(every(made.sample_all(NAMES, sequence_length=2))) == expected


def test_gradients_stay_out(ours: Any) -> None:
    made = memory(ours)
    made.add_samples(observations=torch.ones(1, 2, requires_grad=True))
    made.add_samples(observations=torch.ones(1, requires_grad=True))
    assert not made.tensors["observations"].requires_grad


def test_an_agent_may_be_initialized_twice(ours: Any) -> None:
    made = memory(ours)
    filled(made, 2)
    assert made.create_tensor("rnn_policy_0", size=[1, 3], dtype=torch.float32, keep_dimensions=True) is False
    with pytest.raises(ValueError, match=r"Tensor size \(\(2, 3\)\) doesn't match the existing one \(\(1, 3\)\)"):
        made.create_tensor("rnn_policy_0", size=(2, 3), keep_dimensions=True)
    with pytest.raises(ValueError, match=r"dtype \(torch.int64\) doesn't match the existing one \(torch.float32\)"):
        made.create_tensor("rnn_policy_0", size=(1, 3), dtype=torch.int64, keep_dimensions=True)
    created(made)
    assert every(made.sample_all(NAMES)) == [0, 100]


# Sequences


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize(("count", "more"), [(5, 0), (8, 0), (11, 0), (20, 2), (5, 1)])
def test_sequences_are_consecutive_steps_of_one_env_and_all_are_equally_likely(
    ours: Any, count: int, envs: int, more: int
) -> None:
    made = filled(memory(ours, 8, envs, replacement=True, seed=0), count)
    more = more if more < envs else 0
    if more:
        made.add_samples(**step(count, more))
    drawn = numbers(made.sample(NAMES, batch_size=4000, sequence_length=4)[0])
    found = Counter(tuple(drawn[i : i + 4]) for i in range(0, len(drawn), 4))
    oldest = [max(count + (env < more) - 8, 0) for env in range(envs)]
    expected = {
        tuple(100 * (k + j) + env for j in range(4))
        for env in range(envs)
        for k in range(oldest[env], count + (env < more) - 3)
    }
    assert found.keys() == expected
    mean = 4000 / len(expected)
    assert sum((n - mean) ** 2 / mean for n in found.values()) < 3 * len(expected) + 10


def test_each_sequence_of_a_full_memory_is_drawn_once_without_replacement(ours: Any) -> None:
    made = filled(memory(ours, 6, 2), 9)
    batch = made.sample(NAMES, batch_size=100, sequence_length=3)[0]
    starts = [numbers([None if x is None else x[i::3] for x in batch]) for i in range(3)]
    assert sorted(starts[0]) == [300, 301, 400, 401, 500, 501, 600, 601]
    assert starts[2] == [number + 200 for number in starts[0]]
    again = made.sample_by_index(["rnn_policy_0"], indexes=made.get_sampling_indexes())[0][0]
    assert torch.equal(again, batch[3])


@pytest.mark.parametrize("mini_batches", [1, 2, 3, 4])
def test_minibatches_of_sequences_hold_whole_ones(ours: Any, mini_batches: int) -> None:
    made = filled(memory(ours, 8, 3), 8)
    for batches in (
        made.sample(NAMES, batch_size=10, mini_batches=mini_batches, sequence_length=4),
        made.sample_all(NAMES, mini_batches=mini_batches, sequence_length=4),
    ):
        assert len(batches) == mini_batches
        for batch in batches:
            found = torch.tensor(numbers(batch)).view(-1, 4)
            assert (found.diff() == 100).all()


@pytest.mark.parametrize("count", [4, 6, 8, 9, 13])
def test_all_sequences_are_read_env_by_env_oldest_first(ours: Any, count: int) -> None:
    made = filled(memory(ours, 8, 3), count)
    stored = range(max(count - 8, 0), count)
    expected = [100 * k + env for env in range(3) for k in stored]
    assert every(made.sample_all(NAMES, sequence_length=2)) == expected


def test_rows_that_do_not_divide_into_sequences_of_one_env_are_refused(ours: Any) -> None:
    made = filled(memory(ours, 6, 2), 6)
    with pytest.raises(ParameterError, match=r"12 rows of 2 envs do not divide into sequences of one env each"):
        made.sample_all(NAMES, sequence_length=4)
    made.reset()
    with pytest.raises(EmptyError, match=r"set memory.filled = True"):
        made.sample_all(NAMES, sequence_length=2)
    filled(made, 2).add_samples(**step(2, 1))
    with pytest.raises(ParameterError, match=r"5 rows of 2 envs"):
        made.sample_all(NAMES, sequence_length=2)
    with pytest.raises(EmptyError, match=r"no sequence of 4 rows is stored: the memory holds 5 rows of 2 envs"):
        made.sample(NAMES, batch_size=1, sequence_length=4)


# Draws


@pytest.mark.parametrize("mini_batches", [1, 4, 7])
def test_minibatches_leave_no_row_out(ours: Any, mini_batches: int) -> None:
    made = filled(memory(ours, 10, 3), 10)
    expected = sorted(every(made.sample_all(NAMES)))
    assert len(expected) == 30
    assert every(made.sample_all(NAMES, mini_batches=mini_batches)) == expected
    for batches in (
        made.sample(NAMES, batch_size=30, mini_batches=mini_batches),
        made.sample_by_index(NAMES, indexes=list(range(30)), mini_batches=mini_batches),
    ):
        sizes = [len(batch[0]) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(every(batches)) == expected


def test_only_stored_rows_are_read(ours: Any) -> None:
    made = filled(memory(ours, 10, 3), 4)
    expected = [100 * k + env for k in range(4) for env in range(3)]
    assert every(made.sample_all(NAMES, mini_batches=5)) == expected
    assert sorted(every(made.sample(NAMES, batch_size=50))) == expected
    views = made.sample_all(["actions"])[0][0]
    assert views.data_ptr() == made.tensors["actions"].data_ptr()


def test_a_batch_of_few_rows_of_many_has_each_at_most_once_and_all_equally_often(ours: Any) -> None:
    made = ours.RandomMemory(memory_size=2**11, num_envs=8, device="cpu", seed=0)
    made.create_tensor("row", size=1, dtype=torch.int64)
    made.set_tensor_by_name("row", torch.arange(2**14).view(2**11, 8, 1))
    made.filled = True
    counts = torch.zeros(2**14)
    for _ in range(100):
        rows = made.sample(["row"], batch_size=2**11)[0][0].squeeze(1)
        assert len(rows.unique()) == 2**11
        counts[rows] += 1
    by_place = counts.view(16, -1).sum(1)
    expected = 100 * 2**11 / 16
    assert ((by_place - expected) ** 2 / expected).sum() < 45
    first = torch.stack([made.sample(["row"], batch_size=64)[0][0] for _ in range(200)]).double().mean()
    assert abs(float(first) / 2**13 - 1) < 0.03


@pytest.mark.parametrize("replacement", [False, True])
def test_a_seed_makes_batches_a_function_of_it_and_of_their_number(ours: Any, replacement: bool) -> None:
    def drawn(seed: int | None, skipped: int = 0) -> list[list[int]]:
        made = filled(memory(ours, 50, 2, replacement=replacement, seed=seed), 50)
        for _ in range(skipped):
            made.sample(NAMES, batch_size=7)
        return [every(made.sample(NAMES, batch_size=20)) for _ in range(3)]

    torch.manual_seed(0)
    one = drawn(5)
    torch.rand(3)
    assert drawn(5) == one != drawn(6)
    assert drawn(5, 1)[:2] == one[1:]
    assert drawn(-1) == drawn(-1)
    torch.manual_seed(1)
    by_torch = drawn(None)
    torch.manual_seed(1)
    assert drawn(None) == by_torch != drawn(None)


def test_wrong_arguments_are_refused_by_name(ours: Any) -> None:
    made = memory(ours)
    with pytest.raises(EmptyError, match="no row is stored"):
        made.sample(NAMES, batch_size=1)
    filled(made, 3)
    for name, call in {
        "batch_size=0": lambda: made.sample(NAMES, batch_size=0),
        "sequence_length=0": lambda: made.sample(NAMES, batch_size=1, sequence_length=0),
        "mini_batches=0": lambda: made.sample(NAMES, batch_size=1, mini_batches=0),
        "mini_batches=4: there are only 3 rows": lambda: made.sample(NAMES, batch_size=9, mini_batches=4),
        "mini_batches=5: there are only 3 rows": lambda: made.sample_all(NAMES, mini_batches=5),
        "memory_size=0": lambda: ours.RandomMemory(memory_size=0),
        "num_envs=0": lambda: ours.RandomMemory(memory_size=1, num_envs=0),
        "seed is an int": lambda: ours.RandomMemory(memory_size=1, seed="1"),
    }.items():
        with pytest.raises(ParameterError, match=name):
            call()
    with pytest.raises(IndexError):
        made.sample_by_index(NAMES, indexes=[8])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_are_read_by_any_kind_of_index_negative_ones_too(ours: Any, kind: Any) -> None:
    made = filled(memory(ours, 4, 2), 4)
    assert every(made.sample_by_index(NAMES, indexes=kind([3, 0, -1, 3]))) == [101, 0, 301, 101]


# Files and copies


def saved(made: Any, folder: Path, kind: str) -> str:
    made.save(str(folder), format=kind)
    (path,) = (folder / "memories").iterdir()
    return str(path)


@pytest.mark.parametrize("kind", ["pt", "npz"])
@pytest.mark.parametrize("count", [0, 5, 8, 11])
@pytest.mark.parametrize("empty", [False, True])
def test_a_loaded_memory_goes_on_as_the_saved_one(
    ours: Any, tmp_path: Path, kind: str, count: int, empty: bool
) -> None:
    made = filled(memory(ours, 8, 2), count)
    made.add_samples(**step(count, 1))
    path = saved(made, tmp_path, kind)
    loaded = ours.RandomMemory(memory_size=8, num_envs=2, device="cpu") if empty else filled(memory(ours, 8, 2), 3)
    before = None if empty else loaded.get_tensor_by_name("observations")
    loaded.load(path)
    created(loaded)  # as an agent does that starts later
    assert empty or before is loaded.get_tensor_by_name("observations")
    for one in (made, loaded):
        one.add_samples(**step(count, 1, 1))
        filled(one, 2)
    assert len(loaded) == len(made)
    assert every(loaded.sample_all(NAMES)) == every(made.sample_all(NAMES))
    assert (loaded.memory_index, loaded.env_index, loaded.filled) == (made.memory_index, made.env_index, made.filled)


@pytest.mark.parametrize("count", [0, 3, 8, 11])
def test_a_file_of_skrls_brings_the_rows_that_were_written(ours: Any, tmp_path: Path, count: int) -> None:
    made = filled(memory(ours, 8, 2), count)
    torch.save({name: made.tensors[name] for name in made.get_tensor_names()}, tmp_path / "memory.pt")
    loaded = ours.RandomMemory(memory_size=8, num_envs=2, device="cpu")
    loaded.load(tmp_path / "memory.pt")
    assert len(loaded) == len(made)
    assert not count or every(loaded.sample_all(NAMES)) == every(made.sample_all(NAMES))
    torch.save({"actions": made.tensors["actions"]}, tmp_path / "memory.pt")  # which row was written does not show
    loaded = ours.RandomMemory(memory_size=8, num_envs=2, device="cpu")
    loaded.load(tmp_path / "memory.pt")
    assert len(loaded) == 16


def test_a_file_that_does_not_fit_changes_nothing(ours: Any, tmp_path: Path) -> None:
    made = filled(memory(ours, 4, 2), 3)
    other = filled(memory(ours, 6, 2), 6)
    with pytest.raises(ShapeError, match=r"'\w+' is \(6, 2, \d\), expected \(4, 2, \d\); create the memory with the"):
        made.load(saved(other, tmp_path / "size", "pt"))
    with pytest.raises(ShapeError, match=r"is \(6, 2, \d\), expected \(4, 2\)"):
        ours.RandomMemory(memory_size=4, num_envs=2).load(saved(other, tmp_path / "again", "npz"))
    held = dict(made.tensors)
    for name, tensors, error in (
        ("no tensor 'returns'; it has", {name: x for name, x in held.items() if name != "returns"}, FieldError),
        ("'actions' is torch.int32, expected torch.int64", held | {"actions": held["actions"].int()}, ShapeError),
    ):
        torch.save(tensors, tmp_path / "memory.pt")
        with pytest.raises(error, match=name):
            made.load(tmp_path / "memory.pt")
    with pytest.raises(FileFormatError, match=r"unsupported format; expected \.pt or \.npz"):
        made.load("memory.txt")
    with pytest.raises(NotImplementedError):
        made.load("memory.csv")
    with pytest.raises(ValueError, match="Unsupported export format"):
        made.save(str(tmp_path), format="txt")
    assert every(made.sample_all(NAMES)) == [0, 1, 100, 101, 200, 201]


def test_a_full_memory_is_exported_before_its_rows_are_overwritten(ours: Any, tmp_path: Path) -> None:
    made = memory(ours, 4, export=True, export_format="npz", export_directory=str(tmp_path))
    parts = [step(k) for k in range(10)]
    names = ("observations", "actions", "rnn_policy_0")
    made.add_samples(**{name: torch.cat([part[name] for part in parts]) for name in names})
    found = sorted((tmp_path / "memories").iterdir())
    rows = [np.load(path)["actions"].ravel().tolist() for path in found]
    assert rows == [[0, 100, 200, 300], [400, 500, 600, 700]]


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "from_original", "state"])
def test_copies_and_originals_come_over_with_one_memory_for_each_tensor(ours: Any, way: str) -> None:
    made = filled(memory(ours, 4, 2, seed=3), 5)
    made.sample(NAMES, batch_size=3)
    if way in ("pickle", "deepcopy"):
        other = pickle.loads(pickle.dumps(made)) if way == "pickle" else copy.deepcopy(made)
    else:
        names = ("memory_size", "num_envs", "device", "export", "export_format", "export_directory", "tensors",
                 "memory_index", "env_index", "filled", "_replacement")  # fmt: skip
        original = SimpleNamespace(**{name: getattr(made, name) for name in names})
        if way == "from_original":
            other = ours.RandomMemory.from_original(original, seed=3)
            other.sample(NAMES, batch_size=3)
        else:
            other = ours.RandomMemory.__new__(ours.RandomMemory)
            other.__setstate__(vars(original))
    for one in (made, other):
        filled(one, 2)
        one.set_tensor_by_name("returns", torch.ones(4, 2, 1))
    assert (other.memory_index, other.filled, len(other)) == (made.memory_index, True, 8)
    assert every(other.sample_all(NAMES)) == every(made.sample_all(NAMES))
    assert other.sample_all(["returns"])[0][0].sum() == 8
    if way != "state":
        assert every(other.sample(NAMES, batch_size=3)) == every(made.sample(NAMES, batch_size=3))
    assert ours.RandomMemory.from_original(made) is made
