"""Sequences of a replay: each window is what the list of episodes gives, and drawn as often as it should be."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relive import (
    Field,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    ReturnsToGo,
    Schema,
    Sequence,
    SequenceBatch,
    WithoutReplacement,
)
from relive.batches import as_batch
from relive.errors import EmptyError, ParameterError, SchemaError, ShapeError
from support import tagged_envs
from support.cases import covering
from support.effort import often
from support.sequence_priorities import check_priorities
from support.twins import DRESSES, SAMPLERS, SEQUENCES, Twin, contents, recurrent, same_batches

OVERLAPS: tuple[Any, ...] = ("none", "half", "max", 1)
SHAPES = [
    (length, overlap, burn_in, n)
    for length, overlap in itertools.product(range(1, 5), OVERLAPS)
    for burn_in, n in ((0, 1), (1, 3), (2, 2))
    if overlap != 1 or length > 2  # else it is one of the others
]


def plays(alphabet: str, longest: int) -> Iterator[tuple[str, ...]]:
    for length in range(1, longest + 1):
        yield from itertools.product(alphabet, repeat=length)


def views() -> Iterator[Sequence]:
    for i, (length, overlap, burn_in, n) in enumerate(SHAPES):
        yield Sequence(length, burn_in, overlap, n, 0.5, drop_tail=i % 4 == 3, time_first=i % 3 != 2)


def check_views(twin: Twin, turn: int = 0, of: int = 1) -> None:
    """Everything, through all views; or through each so-many-th, another one at every turn."""
    for view in itertools.islice(views(), turn % of, None, of):
        twin.buffer.view = view
        twin.check()


# Every window of small worlds.


@pytest.mark.parametrize("of", [often(127, 29), pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_every_short_play_reads_as_the_list_of_episodes(rows: int, of: int) -> None:
    for turn, play in enumerate(itertools.chain(plays(".TU", 3), plays("B", 2), plays(".T|", 4))):
        if (turn + rows) % often(2, 1) == 0:  # the other half goes through the other ring
            check_views(Twin(1, rows).play(*play), turn, of)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 4, 7, 12])
def test_every_longer_play_does_so_as_well(rows: int) -> None:
    for turn, play in enumerate(itertools.chain(plays(".TUB", 4), plays(".U|x", 5), plays(".T", 8))):
        check_views(Twin(1, rows).play(*play), turn, 5)


WORLDS: dict[str, Callable[[int, int], str]] = {
    "no end at all": lambda t, env: ".",
    "an end on every step": lambda t, env: "TUB"[(t + env) % 3],
    "terminals": lambda t, env: "T" if t % (5 + env) == 4 else ".",
    "truncations": lambda t, env: "U" if t % (4 + env) == 3 else ".",
    "both, and episodes longer than the ring": lambda t, env: "B" if t % (17 + env) == 16 else ".",
}


@pytest.mark.parametrize("of", [often(29, 11), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", WORLDS)
def test_every_window_of_a_world_is_right_before_and_after_the_ring_came_round(
    name: str, num_envs: int, of: int
) -> None:
    twin = Twin(num_envs, 13)
    for t in range(31):
        twin.add("".join(WORLDS[name](t, env) for env in range(num_envs)))
        if t % 9 == 7:
            twin.interrupt([t % num_envs])
        if t in (6, 15, 16, 25, 30):
            check_views(twin, t, of)


@pytest.mark.parametrize(("dress", "view"), covering(DRESSES, SEQUENCES))
def test_observations_states_and_action_masks_of_each_kind_are_read_right(dress: str, view: str) -> None:
    rng = np.random.default_rng(3)
    if dress in ("box", "large"):
        twin = Twin(2, 14, dress=dress, extras=large_mask if dress == "large" else recurrent, view=SEQUENCES[view]())
    else:
        twin = Twin(2, 14, dress=dress, view=SEQUENCES[view]())
    for t in range(40):
        twin.add("".join(rng.choice(list("......TUB"), 2)))
        if t in (9, 39):
            twin.check()
            if len(twin.buffer):
                twin.check_batch(twin.buffer.sample(20))


def large_mask(step: Any) -> dict[str, Any]:
    """Legal actions that take so many bytes that they are stored apart."""
    return {"action_mask": np.resize(np.asarray(step["obs"]).astype(int) % 2 == 0, 1100)}


@given(st.data())
def test_any_play_of_any_envs_reads_right_through_any_window(data: st.DataObject) -> None:
    num_envs, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 40))
    length = data.draw(st.integers(1, 12))
    overlap = data.draw(st.one_of(st.sampled_from(["none", "half", "max"]), st.integers(0, length - 1)))
    view = Sequence(
        length,
        data.draw(st.integers(0, 6)),
        overlap,
        data.draw(st.integers(1, 6)),
        data.draw(st.sampled_from([0.0, 0.5, 0.97, 1.0])),
        drop_tail=data.draw(st.booleans()),
        time_first=data.draw(st.booleans()),
    )
    twin = Twin(num_envs, rows, view=view)
    for kinds in data.draw(st.lists(st.text(".........TUB", min_size=num_envs, max_size=num_envs), max_size=70)):
        if data.draw(st.integers(0, 15)):
            twin.add(kinds)
        else:
            twin.interrupt([data.draw(st.integers(0, num_envs - 1))])
    twin.check()


# What a batch offers.


def test_the_target_bootstraps_from_the_value_after_each_steps_window() -> None:
    rng = np.random.default_rng(0)
    twin = Twin(2, 60)
    for _ in range(90):
        twin.add("".join(rng.choice(list("........TU"), 2)))
    gamma = 0.9
    for n, time_first in ((1, True), (3, True), (5, False)):
        twin.buffer.view = Sequence(7, 2, "half", n, gamma, time_first=time_first)
        batch = twin.buffer.data()
        value = batch["obs"].double().sum(-1)
        target = batch["reward"].double() + batch["discount"].double() * batch.bootstrap(value)
        assert target.shape == batch["mask"].shape
        if not time_first:
            target = target.T
        for b, row in enumerate(twin.anchors()):
            excerpt = twin.truth.excerpt(row, 7, 3, 2, n)
            for t in range(excerpt.burn_in + excerpt.length):
                window = twin.truth.window(excerpt.rows[t], n, gamma)
                after = float(np.sum(window.last.obs, dtype=np.float64))
                assert target[t, b].item() == pytest.approx(window.reward + window.discount * after, rel=1e-5)
            assert (target[excerpt.burn_in + excerpt.length :, b] == 0).all()


BEFORE = ("action", "reward")


@pytest.mark.parametrize("of", [often(151, 37), pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_the_step_before_each_row_is_given_at_starts_at_ends_and_where_the_ring_came_round(rows: int, of: int) -> None:
    for turn, play in enumerate(itertools.chain(plays(".TU", 3), plays(".U|", 4))):
        if (turn + rows) % often(2, 1):
            continue  # the other half goes through the other ring
        twin = Twin(1, rows, dress="mixed" if turn % 9 == 0 else "box").play(*play)
        for view in itertools.islice(views(), turn % of, None, of):
            view.last = BEFORE
            twin.buffer.view = view
            twin.check()


def test_the_step_before_a_window_must_still_be_there_where_it_is_asked_for() -> None:
    twin = Twin(1, 4, view=Sequence(2, 1)).play(*"." * 6)
    assert len(twin.buffer) == 1  # 4 rows: one window of 2 with 1 before it, and the newest observation
    twin.buffer.view = Sequence(2, 1, last=BEFORE)
    assert len(twin.buffer) == 0
    twin.buffer.view = Sequence(2, last=BEFORE)
    assert len(twin.buffer) == 1
    twin.check()


def remembered(step: Any) -> dict[str, Any]:
    """What an agent that is told its last action and reward stores; the reward on another scale."""
    tag = tagged_envs.decode(step["obs"])
    known = int(tag.step) > 0
    action, reward = (
        tagged_envs.action_of(tag._replace(step=tag.step - 1)),
        tagged_envs.reward_of(tag.env, tag.episode, tag.step),
    )
    return {"last_action": np.asarray(action) * known, "last_reward": np.float32(reward * 8 * known)}


@pytest.mark.parametrize("last", [(), ("action",), BEFORE])
def test_what_is_stored_of_the_step_before_is_completed_where_an_episode_ended(last: tuple[str, ...]) -> None:
    twin = Twin(2, 12, extras=remembered, view=Sequence(3, 1, "half", 2, 0.5, last=last))
    for t in range(30):
        twin.add("U." if t % 5 == 4 else ".T" if t % 7 == 6 else "..")
        if t % 6 == 5:
            twin.check()
    seq = twin.buffer.data()
    ended = (seq["next"] == -1) & (seq["obs"][..., 2] > 0) & (seq["reward"] == 0) & (seq["action"] == 0)
    assert ended.any()
    assert (seq["last_reward"][ended] > 0).all()


def test_the_target_network_of_a_recurrent_agent_sees_at_a_time_limit_what_it_saw_while_it_played() -> None:
    """V(obs, last action, last reward) of the observation that an episode was cut at."""
    twin = Twin(1, 40, view=Sequence(4, overlap="none", n=1, gamma=0.5, last=BEFORE)).play(*"...U...U...U")
    seq = twin.buffer.data()
    value = seq["obs"][..., 2] + 100 * seq["last_action"] + 1000 * seq["last_reward"]
    for b in range(len(seq)):
        tag = tagged_envs.Tag(0, b, 3, 0)
        last = 4 + 100 * int(tagged_envs.action_of(tag)) + 1000 * tagged_envs.reward_of(*tag[:3])
        assert seq.bootstrap(value)[3, b].item() == pytest.approx(last)


def test_nested_actions_and_other_fields_of_the_step_before_are_given_too() -> None:
    flag = Field((), torch.bool)
    action = {"move": Field((), torch.int64), "aim": (2,)}
    image = Field((40, 40), torch.uint8)  # stored apart
    schema = Schema(
        {"obs": (1,), "action": action, "reward": (), "terminated": flag, "truncated": flag, "picture": image}
    )
    for time_first in (True, False):
        view = Sequence(3, n=2, last=("action", "picture"), time_first=time_first)
        replay = ReplayBuffer(schema, 50, view=view, seed=0)
        for t in range(10):
            replay.add(
                obs=[[t]], action={"move": [t], "aim": [[t, -t]]}, reward=[t], picture=np.full((1, 40, 40), t),
                terminated=[False], truncated=[t == 6], next_obs=[[70]],
            )  # fmt: skip
        columns = replay.data().parts[0]
        seq = as_batch(columns if time_first else {path: x.transpose(0, 1) for path, x in columns.items()})
        here = seq["obs"][..., 0]
        after = torch.where(here == 70, 7, here) - 1  # the step before each observation
        expected = torch.where((here == 0) | (here == 7), 0, after.clamp(min=0)).long()
        assert torch.equal(seq["last_action", "move"], expected)
        assert torch.equal(seq["last_action", "aim"], torch.stack([expected, -expected], -1).float())
        assert torch.equal(seq["last_picture"], expected[..., None, None].expand(-1, -1, 40, 40).to(torch.uint8))
        assert {6} <= set(expected[here == 70].tolist())


def test_before_the_first_step_of_an_episode_there_is_nothing_whatever_lies_before_it() -> None:
    """As the rows of an episode that was broken off, or of the one that lay there before the ring came round."""
    flag, image = Field((), torch.bool), Field((40, 40), torch.uint8)  # stored apart
    schema = Schema({"obs": (1,), "action": (), "reward": (), "terminated": flag, "truncated": flag, "picture": image})
    for rows in (50, 12):
        replay = ReplayBuffer(schema, rows, view=Sequence(3, last=("action", "picture")), seed=0)
        for t in range(1, 41):
            if t % 7 == 5:
                replay.interrupt()
            replay.add(
                obs=[[t]], action=[t], reward=[0.0], picture=np.full((1, 40, 40), t), terminated=[False],
                truncated=[t % 9 == 0], next_obs=[[t + 0.5]],
            )  # fmt: skip
        seq = replay.data()
        first = (seq["obs"][..., 0] % 7 == 5) | (seq["obs"][..., 0] % 9 == 1)
        assert first[0].sum() > 1
        assert not seq["last_picture"][first].any()
        assert not seq["last_action"][first].any()
        assert (seq["last_picture"][1:, :, 0, 0][seq["last_action"][1:] > 0] > 0).all()


def test_a_field_before_that_there_is_not_or_that_clashes_is_refused() -> None:
    twin = Twin(1, 20, extras=lambda step: {"last_reward": np.float64(0)}, view=Sequence(2)).play(*"." * 9)
    for last, says in (
        (("acton",), r"'acton' is not one of the fields that last can name: action, reward, last_reward"),
        (("obs",), "'obs' is not one of the fields"),
        (("reward",), r"field 'last_reward': .* declare yours in the same way"),
    ):
        twin.buffer.view = Sequence(2, last=last)
        with pytest.raises(SchemaError, match=says):
            twin.buffer.sample(2)
    twin.buffer.view = Sequence(2, last=("action",))
    twin.check()


def test_a_view_wrapped_around_sequences_reads_them() -> None:
    class Halved:
        def __init__(self, inner: Sequence) -> None:
            self.inner = inner

        history = property(lambda self: self.inner.history)
        rule = property(lambda self: self.inner.rule)
        time_first = property(lambda self: self.inner.time_first)

        def read(self, ring: Any, places: Any, key: Any = None) -> Any:
            fields = self.inner.read(ring, places, key)
            return {path: x / 2 if path[0] == "obs" else x for path, x in fields.items()}

    class Forgetful(Halved):
        rule = property(lambda self: None)

    twin = Twin(1, 30, view=Halved(Sequence(4))).play(*"." * 12)
    batch = twin.buffer.sample(5)
    assert isinstance(batch, SequenceBatch)
    twin.buffer.view = Sequence(4)
    plain = twin.buffer.data()
    twin.buffer.view = Halved(Sequence(4))
    assert torch.equal(twin.buffer.data()["obs"], plain["obs"] / 2)
    twin.buffer.view = Forgetful(Sequence(4))
    with pytest.raises(ParameterError, match="must also have its `rule`"):
        twin.buffer.sample(1)


# Files.


@pytest.mark.parametrize("weigh", ["windows", "steps", "episodes"])
def test_a_loaded_buffer_goes_on_with_the_same_batches(tmp_path: Any, weigh: Any) -> None:
    view = Sequence(4, 1, "half", 2, 0.5, time_first=False, weigh=weigh, last=("action",))
    twin = Twin(2, 21, extras=recurrent, view=view, seed=5)
    for t in range(50):
        twin.add("U." if t % 9 == 8 else "..")
    twin.buffer.sample(6)
    twin.buffer.save(tmp_path / "replay")
    loaded = ReplayBuffer.load(tmp_path / "replay")
    assert loaded.view == view
    assert contents(loaded)[1:3] == contents(twin.buffer)[1:3]
    for step in range(6):
        assert same_batches(loaded.sample(9), twin.buffer.sample(9))
        fields = twin.step(".T" if step == 3 else "..", final=True)
        twin.buffer.add(fields)
        loaded.add(fields)
    twin.check()
    loaded.check()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_goes_on_after_a_load(tmp_path: Any, sampler: str) -> None:
    twin = Twin(2, 21, view=Sequence(3, overlap="none"), sampler=SAMPLERS[sampler](), seed=5)
    for t in range(50):
        twin.add("U." if t % 9 == 8 else "..")
    batch = twin.buffer.sample(3)
    if twin.buffer.has_priorities:
        twin.buffer.update_priorities(batch["index"], batch["obs"][..., 2], batch["mask"])
    twin.buffer.save(tmp_path / "replay")
    loaded = ReplayBuffer.load(tmp_path / "replay")
    for _ in range(5):
        assert same_batches(loaded.sample(3), twin.buffer.sample(3))


# Mixtures.


def test_a_mixture_of_sequences_is_a_batch_of_sequences() -> None:
    for time_first in (True, False):
        twins = [
            Twin(2, 30, extras=recurrent, view=view, sampler=Prioritized(), seed=seed)
            for seed, view in enumerate(Sequence(4, 2, "half", 2, 0.5, time_first=time_first) for _ in range(2))
        ]
        for twin in twins:
            for t in range(40):
                twin.add("T." if t % 9 == 8 else "..")
        mixture = Mixture({"a": twins[0].buffer, "b": twins[1].buffer}, {"a": 1, "b": 2})
        batch = mixture.sample(9)
        assert isinstance(batch, SequenceBatch)
        assert len(batch) == 9
        assert batch["source"].tolist() == [0] * 3 + [1] * 6
        for source, twin in enumerate(twins):
            twin.check_batch(part(batch, batch["source"] == source))
        errors = torch.rand(batch["mask"].shape)
        assert mixture.update_priorities(batch, errors, batch["mask"]) == 0
        for source, twin in enumerate(twins):
            chosen = part(batch, batch["source"] == source)
            mine = errors[:, batch["source"] == source] if time_first else errors[batch["source"] == source]
            assert isinstance(twin.buffer.sampler, Prioritized)
            check_priorities(twin.buffer.sampler, chosen, mine, twin.buffer)


def test_a_mixture_of_views_that_do_not_fit_is_refused_at_the_call_and_draws_nothing() -> None:
    for other in (NStep(2), Sequence(5), Sequence(4, time_first=False), Sequence(4, n=2)):
        twins = [Twin(1, 30, view=view).play(*"." * 20) for view in (Sequence(4), other)]
        mixture = Mixture({"a": twins[0].buffer, "b": twins[1].buffer}, {"a": 1, "b": 1})
        before = [contents(twin.buffer) for twin in twins]
        with pytest.raises(SchemaError, match="let all of them agree"):
            mixture.batches(2, 6)
        assert [contents(twin.buffer) for twin in twins] == before


def part(batch: SequenceBatch, chosen: torch.Tensor) -> SequenceBatch:
    """Some of the sequences of a batch, without the number of their buffer."""
    columns, facts, hidden = batch.rows(chosen).parts
    del facts["source"]
    return SequenceBatch.of(columns, facts, hidden, time_first=batch.time_first)


# What is refused, and changes nothing.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length=0"),
        ({"length": None}, "length=None"),
        ({"length": 4, "overlap": 4}, "overlap=4"),
        ({"length": 4, "overlap": "most"}, "overlap='most'"),
        ({"length": 4, "burn_in": -1}, "burn_in=-1"),
        ({"length": 4, "n": 0}, "n=0"),
        ({"length": 4, "gamma": float("nan")}, r"gamma=nan\): gamma is a number from 0 to 1"),
        ({"length": 4, "gamma": 1.5}, r"gamma=1.5\): gamma is a number from 0 to 1"),
        ({"length": 2**62}, r"length is a number of steps, at least 1 and below 2\*\*30"),
        ({"length": 4, "burn_in": 2**63}, r"burn_in is a number of steps, at least 0 and below 2\*\*30"),
        ({"length": 4, "n": 2**31}, r"n is a whole number of at least 1 and below 2\*\*30"),
        ({"length": 2.5}, r"length=2.5\): length is a number of steps"),
        ({"length": 4, "drop_tail": None}, "drop_tail is True or False"),
        ({"length": 4, "time_first": 1}, "time_first is True or False"),
        ({"length": 4, "weigh": "rows"}, "weigh='rows'"),
        ({"length": 4, "last": "action"}, r"last='action'\): last is a tuple of names"),
        ({"length": 4, "last": (1,)}, r"last=\(1,\)"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Sequence(**arguments)
    twin = Twin(1, 20, view=Sequence(2)).play(*"." * 8)
    before, view = contents(twin.buffer), repr(twin.buffer.view)
    *_, (name, value) = arguments.items()
    if (name, value) != ("overlap", 4):  # which is wrong for some lengths only
        with pytest.raises(ParameterError, match=message):
            setattr(twin.buffer.view, name, value)
    assert contents(twin.buffer) == before
    assert repr(twin.buffer.view) == view


def test_windows_that_share_more_steps_than_they_have_are_refused_when_both_are_known() -> None:
    view = Sequence(4, overlap=3)
    twin = Twin(1, 20, view=view).play(*"." * 9)
    before = contents(twin.buffer)
    view.length = 3
    with pytest.raises(ParameterError, match="overlap=3: successive sequences of 3 steps"):
        twin.buffer.sample(2)
    assert contents(twin.buffer) == before
    view.overlap = 2
    twin.check_batch(twin.buffer.sample(2))


def test_steps_without_order_have_no_sequences() -> None:
    with pytest.raises(SchemaError, match="sequences need steps in order"):
        Twin(1, 20, ordered=False, view=Sequence(2))
    twin = Twin(1, 20, ordered=False).play(".", ".")
    before, view = contents(twin.buffer), twin.buffer.view
    with pytest.raises(SchemaError, match="sequences need steps in order"):
        twin.buffer.view = Sequence(2)
    assert contents(twin.buffer) == before
    assert twin.buffer.view is view
    twin.check()


@pytest.mark.parametrize("own", [{"ordered": False}, {"own_next_obs": True}], ids=["no order", "own next_obs"])
@pytest.mark.parametrize("view", [Sequence(1), ReturnsToGo(window=Sequence(1, 2))], ids=["plain", "returns to go"])
def test_nor_have_steps_with_next_observations_of_their_own_even_of_one_step(own: Any, view: Any) -> None:
    """The row after an episode's end is not the observation that it ended on."""

    def read() -> None:
        buffer = Twin(1, 20, **own, view=copy.copy(view)).play("T", "T", "T").buffer
        buffer.sample(2)

    with pytest.raises(SchemaError, match=r"sequences need steps in order|ReturnsToGo needs steps in the order"):
        read()


@pytest.mark.parametrize("sampler", [Prioritized, WithoutReplacement, lambda: Recent(inner=Prioritized())])
def test_weights_for_a_sampler_that_has_its_own_are_refused(sampler: Any) -> None:
    with pytest.raises(ParameterError, match="weigh='steps' is for Uniform"):
        Twin(1, 20, sampler=sampler(), view=Sequence(2, weigh="steps"))
    twin = Twin(1, 20, sampler=sampler()).play(*"." * 9)
    before, view = contents(twin.buffer), twin.buffer.view
    with pytest.raises(ParameterError, match="leave weigh at 'windows'"):
        twin.buffer.view = Sequence(2, weigh="steps")
    assert contents(twin.buffer) == before
    assert twin.buffer.view is view
    twin.check_batch(twin.buffer.sample(4))


def test_a_field_of_a_name_that_sequences_give_is_refused() -> None:
    twin = Twin(1, 20, extras=lambda step: {"start": np.float32(3)}, view=Sequence(2)).play(*"." * 9)
    with pytest.raises(SchemaError, match="field 'start': Sequence gives batches a field of that name"):
        twin.buffer.sample(2)


def test_errors_of_another_layout_than_the_batch_are_refused() -> None:
    twin = Twin(1, 40, sampler=Prioritized(), view=Sequence(4)).play(*"." * 20)
    batch = twin.buffer.sample(3)
    errors, mask = torch.ones(batch["mask"].shape), batch["mask"]
    before = contents(twin.buffer)
    with pytest.raises(ShapeError, match=r"expected \[T, B\] of 3 sequences, as the view has time first, got \(3, 5\)"):
        twin.buffer.update_priorities(batch["index"], errors.T, mask.T)
    with pytest.raises(ParameterError, match="pass mask=seq\\['mask'\\]"):
        twin.buffer.update_priorities(batch["index"], errors)
    with pytest.raises(ShapeError, match="mask: expected bool"):
        twin.buffer.update_priorities(batch["index"], errors, mask.T)
    assert contents(twin.buffer) == before
    square = twin.buffer.sample(5)
    uneven_errors = torch.arange(25.0).reshape(5, 5)
    twin.buffer.update_priorities(square["index"], uneven_errors, square["mask"])
    assert isinstance(twin.buffer.sampler, Prioritized)
    check_priorities(twin.buffer.sampler, square, uneven_errors, twin.buffer)
    assert twin.buffer.update_priorities(batch["index"], torch.ones(3)) == 0


def test_the_error_for_a_ring_too_short_for_any_window_says_what_to_do() -> None:
    twin = Twin(1, 8, view=Sequence(6, 4)).play(*"." * 30)
    with pytest.raises(
        EmptyError, match=r"needs the 10 rows up to its end.*newest 8 rows of its env; a buffer of more rows"
    ):
        twin.buffer.sample(1)


def test_a_sequence_view_in_use_is_pickled_with_its_parameters() -> None:
    view = Sequence(length=3, burn_in=1, last=("action",), weigh="windows")
    Twin(1, 12, view=view).play(*"....T....").buffer.sample(2)
    for again in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert again == view
        assert Twin(1, 12, view=again).play(*"....T....").buffer.sample(2)["obs"].shape[1] == 2
