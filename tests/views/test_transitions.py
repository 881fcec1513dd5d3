"""Views: every item equals what the list of episodes gives, at every end, seam and newest step."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relive import Field, FrameStack, NStep, ReplayBuffer, Schema, Sequence, Transition, Uniform
from relive.errors import LifecycleError, ParameterError, SchemaError
from support import internals
from support.cases import covering
from support.effort import often
from support.twins import DRESSES, VIEWS, Twin, batch_leaves, same_batches


def plays(alphabet: str, longest: int) -> Iterator[tuple[str, ...]]:
    for length in range(1, longest + 1):
        yield from itertools.product(alphabet, repeat=length)


def fields_of(n: int, **fields: Any) -> dict[str, Any]:
    """One step of ``n`` envs with a vector observation of one number; what is not given is 0."""
    blank = {"reward": np.zeros(n, np.float32), "terminated": np.zeros(n, bool), "truncated": np.zeros(n, bool)}
    return {**blank, **{name: np.asarray(value, np.float32).reshape(n, -1) for name, value in fields.items()}}


def played(rewards: list[float], ends: dict[int, str], view: Any, capacity: int = 50) -> ReplayBuffer:
    """One env whose observation counts its steps from 0, and is 100 more where an episode ends."""
    schema = Schema({"obs": (1,), "reward": (), **{n: Field((), torch.bool) for n in ("terminated", "truncated")}})
    buffer = ReplayBuffer(schema, capacity, view=view, seed=0)
    for t, reward in enumerate(rewards):
        end = ends.get(t, "")
        buffer.add(obs=[[t]], reward=[reward], terminated=["t" in end], truncated=["u" in end], next_obs=[[100.0 + t]])
    return buffer


# Every view on every play of small worlds.


@pytest.mark.parametrize("of", [often(11, 4), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_every_short_play_reads_as_the_list_of_episodes_through_every_view(rows: int, of: int) -> None:
    for turn, play in enumerate(itertools.chain(plays(".TUB", 3), plays(".T|", 4))):
        if (turn + rows) % often(2, 1):
            continue  # the other half goes through the other ring
        twin = Twin(1, rows).play(*play)
        for make in list(VIEWS.values())[turn % of :: of]:  # all views, or two or three
            twin.buffer.view = make()
            twin.check()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 4, 6])
def test_every_longer_play_does_so_as_well(rows: int) -> None:
    for turn, play in enumerate(itertools.chain(plays(".TUB", 5), plays(".U|x", 5), plays(".T", 8))):
        twin = Twin(1, rows).play(*play)
        for make in list(VIEWS.values())[(turn + rows) % 4 :: 4]:  # two or three, others in other rings
            twin.buffer.view = make()
            twin.check()


@pytest.mark.parametrize(("dress", "view"), covering(DRESSES, VIEWS))
def test_every_kind_of_observation_reads_right_through_every_view(dress: str, view: str) -> None:
    rng = np.random.default_rng(3)
    twin = Twin(2, 7, dress=dress, view=VIEWS[view]())
    for t in range(24):
        twin.add("".join(rng.choice(list("....TUB"), 2)))
        if t in (5, 23):
            twin.check()
            twin.check_batch(twin.buffer.sample(20))


@given(st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_any_play_of_any_envs_reads_right_through_any_view(data: st.DataObject) -> None:
    num_envs, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 20))
    n, depth = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    window = NStep(n, data.draw(st.sampled_from([0.0, 0.5, 0.97, 1.0])))
    pad = data.draw(st.sampled_from(["repeat", "zeros"]))
    view = window if data.draw(st.booleans()) else FrameStack(depth, window, pad)
    twin = Twin(num_envs, rows, view=view)
    for kinds in data.draw(st.lists(st.text("......TUB", min_size=num_envs, max_size=num_envs), max_size=45)):
        if data.draw(st.integers(0, 15)):
            twin.add(kinds)
        else:
            twin.interrupt([data.draw(st.integers(0, num_envs - 1))])
    twin.check()


# The traps, by name.


def test_the_done_bits_are_those_of_the_last_step_of_the_window_and_the_target_is_right_to_the_end() -> None:
    # Rewards of 1, a terminal after step 2, and a value function that says 100 everywhere: the target of the last
    # states is what is left of the episode, never a reward and a discounted 100 from behind the terminal.
    batch = played([1, 1, 1, 1, 1], {2: "t"}, NStep(3, 0.9)).data()
    assert batch["terminated"].tolist() == [True, True, True, False]
    target = batch["reward"] + batch["discount"] * 100.0
    assert target.tolist() == pytest.approx([1 + 0.9 + 0.81, 1.9, 1.0, 1 + 0.9 * 100])
    assert batch["steps"].tolist() == [3, 2, 1, 1]


def test_reading_changes_nothing_and_two_readers_see_the_same() -> None:
    buffer = played([1, 2, 4, 8, 16], {2: "t"}, NStep(3, 0.5))
    store = internals.ring(buffer).store.target
    before = store.tobytes()
    first = buffer.data()
    batch = buffer.sample(30)
    for leaf in batch_leaves(batch).values():
        leaf[...] = 0  # what is done to a batch is done to the batch alone
    assert store.tobytes() == before
    assert same_batches(buffer.data(), first)
    assert not np.shares_memory(batch["obs"].numpy(), store)


def test_the_observation_after_a_time_limit_is_the_true_final_one() -> None:
    for n in (1, 2, 3):
        batch = played([0] * 6, {2: "u", 4: "t"}, NStep(n, 1.0)).data()
        want = {0: n, 1: 1 + n, 2: 102.0} | ({0: 102.0} if n > 2 else {}) | ({1: 102.0} if n > 1 else {})
        assert {t: batch["next_obs"][t].item() for t in range(3)} == want
        assert batch["next_obs"][4].item() == 104.0
        assert 3.0 not in batch["next_obs"][:3]


def test_dtypes_are_kept() -> None:
    dtypes = [
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    ]  # fmt: skip
    fields = {str(dtype).removeprefix("torch."): Field((3,), dtype) for dtype in dtypes}
    large = {f"large_{name}": Field((1100,), field.dtype) for name, field in fields.items()}
    needed = {"reward": Field(), **{n: Field((), torch.bool) for n in ("terminated", "truncated")}}
    schema = Schema({"obs": fields, **needed, **large, "action": Field((2,), torch.uint8)})
    rng = np.random.default_rng(0)

    def filled(field: Field) -> torch.Tensor:
        data = rng.integers(0, 2 if field.dtype is torch.bool else 256, (1, field.nbytes), np.uint8)
        bits = torch.from_numpy(data).view(field.dtype).reshape(1, *field.shape)
        return torch.nan_to_num(bits) if field.dtype.is_floating_point else bits

    steps = [schema.rebuild("obs", lambda path: filled(schema.leaves[path])) for _ in range(4)]
    others = [{name: filled(field) for name, field in large.items()} for _ in range(4)]
    for view in (Transition(), FrameStack(1)):
        buffer = ReplayBuffer(schema, 12, view=view)
        for obs, other in zip(steps, others, strict=True):
            flags = {"terminated": [False], "truncated": [False]}
            buffer.add(obs=obs, **other, action=torch.tensor([[7, 255]], dtype=torch.uint8), reward=[1], **flags)
        batch = buffer.data()
        assert batch["action"].dtype is torch.uint8
        assert batch["action"].tolist() == [[7, 255]] * 3
        for t in range(3):
            for name, field in fields.items():
                got, after = (batch[where, name][t].flatten() for where in ("obs", "next_obs"))
                assert got.dtype is after.dtype is field.dtype
                assert bits(got) == bits(steps[t][name])
                assert bits(after) == bits(steps[t + 1][name])
            for name, field in large.items():
                assert batch[name].dtype is field.dtype
                assert bits(batch[name][t]) == bits(others[t][name])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# n-step windows by the definition.


def test_one_step_windows_are_transitions() -> None:
    assert Transition(0.9) == NStep(1, 0.9)
    assert repr(Transition(0.9)) == "NStep(n=1, gamma=0.9)"


def test_next_index_is_that_of_the_row_that_next_obs_comes_from() -> None:
    twin = Twin(2, 12, view=NStep(2, 0.5)).play("..", "..", ".U", "..", "..", "..")
    batch = twin.buffer.data()
    by_index = {int(i): batch["obs"][i_at] for i_at, i in enumerate(batch["index"])}
    met = 0
    for item in map(batch.rows, range(len(batch))):
        following = by_index.get(int(item["next_index"]))
        met += following is not None
        assert following is None or torch.equal(item["next_obs"], following)
        assert item["next_index"] % 2 == item["index"] % 2
        assert item["next_index"] - item["index"] == 2 * item["steps"]
    assert met == 4


def test_n_and_gamma_can_be_changed_on_a_living_buffer() -> None:
    view = NStep(1, 0.5)
    twin = Twin(2, 9, view=view).play("..", "..", ".T", "..", "U.", "..")
    for n, gamma in ((3, 0.5), (1, 1.0), (7, 0.0)):
        view.n, view.gamma = n, gamma
        twin.check()
        twin.check_batch(twin.buffer.sample(40))
    twin.buffer.view = NStep(2, 0.5)
    twin.check()


def test_no_window_goes_over_an_interruption_where_steps_have_next_observations_of_their_own() -> None:
    schema = Schema({"obs": (1,), "reward": (), **{n: Field((), torch.bool) for n in ("terminated", "truncated")}})
    buffer = ReplayBuffer(schema, 50, own_next_obs=True, view=NStep(5, 0.5), seed=0, check_ends=False)
    for t in range(6):
        if t == 3:
            buffer.interrupt()
        buffer.add(fields_of(1, obs=t, next_obs=100 + t) | {"reward": [2.0**t]})
    for batch in (buffer.data(), buffer.sample(100)):
        at = batch["index"]
        assert set(at.tolist()) == set(range(6))
        assert torch.equal(batch["steps"], torch.tensor([3, 2, 1, 3, 2, 1])[at].int())
        assert torch.equal(batch["reward"], torch.tensor([3.0, 4, 4, 24, 32, 32])[at])
        assert torch.equal(batch["discount"], 0.5 ** batch["steps"])
        assert torch.equal(batch["next_obs"][:, 0], torch.tensor([102.0, 105])[at // 3])
        assert torch.equal(batch["next_index"], torch.tensor([2, 5])[at // 3])


WINDOWS = [
    ({"n": 0}, r"NStep\(n=0\): n is a whole number of at least 1"),
    ({"n": -1}, r"NStep\(n=-1\): n is a whole number of at least 1"),
    ({"n": 2.5}, r"NStep\(n=2.5\): n is a whole number of at least 1"),
    ({"n": 2**63}, r"NStep\(n=9223372036854775808\): n is a whole number of at least 1 and below 2\*\*30"),
    ({"n": True}, r"NStep\(n=True\): n is a whole number of at least 1"),
    ({"gamma": float("nan")}, r"NStep\(gamma=nan\): gamma is a number from 0 to 1"),
    ({"gamma": 1.5}, r"NStep\(gamma=1.5\): gamma is a number from 0 to 1"),
    ({"gamma": -0.1}, r"NStep\(gamma=-0.1\): gamma is a number from 0 to 1"),
    ({"gamma": "0.9"}, r"NStep\(gamma='0.9'\): gamma is a number from 0 to 1"),
]


@pytest.mark.parametrize(("wrong", "message"), WINDOWS)
def test_windows_that_make_no_sense_are_refused_when_they_are_made_and_when_they_are_set(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        NStep(**wrong)
    twin = Twin(1, 5, view=NStep(2, 0.5)).play(".", ".", ".")
    ((name, value),) = wrong.items()
    with pytest.raises(ParameterError, match=message):
        setattr(twin.buffer.view, name, value)
    assert twin.buffer.view == NStep(2, 0.5)
    twin.check()


def test_the_ends_of_the_ranges_and_numbers_of_numpy_are_taken() -> None:
    assert NStep(np.int64(1), np.float32(0)) == NStep(1, 0)
    assert NStep(1, 1) == Transition(1.0)
    assert FrameStack(np.int32(1), pad="zeros").history == 0


def test_windows_of_several_steps_are_refused_where_steps_have_no_order() -> None:
    twin = Twin(1, 5, ordered=False, view=NStep(2)).play(".", "T")
    with pytest.raises(SchemaError, match="exactly 1 where steps are stored without order"):
        twin.buffer.sample(1)
    twin.buffer.view.n = 1
    twin.buffer.sample(1)


def test_each_reward_is_changed_before_those_of_a_window_are_summed() -> None:
    buffer = Twin(1, 12, view=NStep(1, 0.5)).play(*"..T...U....").buffer
    single = buffer.data()
    rewards = dict(zip(single["index"].tolist(), single["reward"].tolist(), strict=True))
    buffer.view = NStep(3, 0.5, each_reward=lambda given: 2 * given + 1)
    batch = buffer.data()
    assert set(batch["steps"].tolist()) == {1, 2, 3}
    for index, steps, reward in zip(*(batch[name].tolist() for name in ("index", "steps", "reward")), strict=True):
        assert reward == pytest.approx(sum(0.5**k * (2 * rewards[index + k] + 1) for k in range(steps)))


def test_an_error_inside_each_reward_says_what_the_function_was_called_with() -> None:
    buffer = Twin(1, 12, view=NStep(3, 0.5, each_reward=lambda given: given[:, :, 0])).play(*"..T...").buffer
    with pytest.raises(IndexError, match="too many indices") as caught:
        buffer.sample(4)
    assert caught.value.__notes__ == [
        "in each_reward of NStep(n=3, gamma=0.5), which was called with float32 rewards [B, n] = (4, 3)"
    ]


# One view for each buffer.


SHARED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "transitions": lambda: (view := Transition(0.5), view),
    "windows": lambda: (view := NStep(2, 0.5), view),
    "sequences": lambda: (view := Sequence(2, gamma=0.5), view),
    "stacks": lambda: (view := FrameStack(2, NStep(1, 0.5)), view),
    "the window of a stack": lambda: (view := FrameStack(2, NStep(1, 0.5)), view.window),
    "a window in a stack": lambda: (view := NStep(1, 0.5), FrameStack(2, view)),
    "a window in two stacks": lambda: (FrameStack(2, view := NStep(1, 0.5)), FrameStack(3, view)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARED)
def test_a_view_belongs_to_one_buffer(kind: str) -> None:
    mine, other = SHARED[kind]()
    one, two = Twin(1, 8, view=mine).play(*"..T.."), Twin(1, 8, view=Transition(0.5)).play(*"..T..")
    before = repr(two.buffer.view)
    with pytest.raises(LifecycleError, match="is the view of another buffer"):
        two.buffer.view = other
    with pytest.raises(LifecycleError, match="is the view of another buffer"):
        Twin(1, 8, view=other)
    assert repr(two.buffer.view) == before
    two.check()
    one.buffer.view = one.buffer.view  # its own may be set again
    one.buffer.view = deepcopy(other)
    two.buffer.view = other  # which is free now
    one.check()
    two.check()


def test_copies_and_saves_have_views_of_their_own(tmp_path: Path) -> None:
    twin = Twin(1, 8, view=Own()).play(*"..T..")
    twin.buffer.save(tmp_path / "replay")
    made = [copy(twin.buffer), deepcopy(twin.buffer), pickle.loads(pickle.dumps(twin.buffer))]
    loaded = ReplayBuffer.load(tmp_path / "replay", view=Own())
    views = [buffer.view for buffer in (twin.buffer, *made, loaded)]
    assert len({id(view) for view in views}) == 5
    for buffer in (*made, loaded):
        assert isinstance(buffer.view, Own)
        buffer.view.shift = 2.0
        assert torch.equal(buffer.data()["reward"], twin.buffer.data()["reward"] + 2)
    with pytest.raises(LifecycleError, match="is the view of another buffer"):
        ReplayBuffer.load(tmp_path / "replay", view=twin.buffer.view)


class Own:
    """A view that a user wrote."""

    history = 0

    def __init__(self) -> None:
        self.shift, self.window = 0.0, 3  # of which the second is no view

    def read(self, ring: Any, places: Any, key: Any = None) -> Any:
        fields = NStep(1, 0.5).read(ring, places, key)
        fields["reward",] += self.shift
        return fields


@pytest.mark.parametrize("wrong", [None, 5, "NStep", Uniform()])
def test_what_is_no_view_is_refused_and_the_view_stays(wrong: Any) -> None:
    twin = Twin(1, 8, view=NStep(2, 0.5)).play(*"..T..")
    with pytest.raises(ParameterError, match=r"view=.*: expected a view, such as NStep\(3, gamma=0\.99\)"):
        twin.buffer.view = wrong
    twin.check()
    with pytest.raises(ParameterError, match=r"view=.*: expected"):
        twin.buffer.view = NStep
    twin.check()


def test_a_view_that_outlives_its_buffer_reads_the_next_one_right() -> None:
    view = NStep(1, 0.5)
    for size in range(1, 40):
        schema = Schema(
            {"obs": (size,), "reward": (), **{n: Field((), torch.bool) for n in ("terminated", "truncated")}}
        )
        buffer = ReplayBuffer(schema, 6, view=view)
        for t in range(3):
            buffer.add(obs=np.full((1, size), t), reward=[t], terminated=[False], truncated=[False])
        batch = buffer.data()
        assert batch["obs"].shape == (2, size)
        assert batch["next_obs"][1].tolist() == [2.0] * size
        del buffer, batch  # and memory of one size is soon given out again, at the same address


# Fields of every size.


def test_fields_of_no_bytes_of_few_and_of_many_come_back_as_they_were_given() -> None:
    sizes = {"none": (0,), "scalar": (), "packed": (200,), "edge": (256,), "apart": (257,), "matrix": (3, 100)}
    schema = Schema(
        {
            "obs": (2,),
            "reward": (),
            **{name: Field((), torch.bool) for name in ("terminated", "truncated")},
            **{name: Field(shape) for name, shape in sizes.items()},
        }
    )
    rng = np.random.default_rng(0)
    for view in (NStep(2, 0.5), FrameStack(2)):
        buffer = ReplayBuffer(schema, 12, 2, view=view)
        assert {path for (path,) in internals.ring(buffer).store.blocks} == {"apart", "matrix"}
        given_ = [{name: rng.random((2, *shape), np.float32) for name, shape in sizes.items()} for _ in range(9)]
        for fields in given_:
            buffer.add({**fields_of(2, obs=[[0, 0]] * 2), **fields, "reward": np.zeros(2, np.float32)})
        batch = buffer.data()
        for item in map(batch.rows, range(len(batch))):
            t, env = divmod(int(item["index"]), 2)
            for name in sizes:
                assert np.array_equal(item[name].numpy(), given_[t][name][env])


def test_a_batch_is_fresh_memory_of_the_stated_dtypes() -> None:
    batch = Twin(2, 6).play("..", "..", "T.").buffer.sample(5)
    assert {name: batch[name].dtype for name in ("index", "next_index", "discount", "steps", "reward")} == {
        "index": torch.int64,
        "next_index": torch.int64,
        "discount": torch.float32,
        "steps": torch.int32,
        "reward": torch.float32,
    }
    other = Twin(2, 6).play("..", "..", "T.").buffer.sample(5)
    assert same_batches(batch, other)
    batch["obs"].fill_(-1)
    assert (other["obs"] != -1).all()
    assert (batch["next_obs"] != -1).all()
