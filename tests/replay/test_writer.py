"""Adding to a replay: steps in any form, with and without order, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from relive import (
    Field,
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Transition,
)
from relive.errors import DTypeError, EmptyError, FieldError, NotFiniteError, ParameterError, SchemaError, ShapeError
from support import internals, oracle
from support.cases import covering
from support.effort import first_of
from support.replays import FLAGS, PLAIN, numbers, random_plays, three
from support.twins import DRESSES, POISON, SAMPLERS, UNEVEN, Twin, contents, mapped, same_batches, stacked, uneven

# Adding.


def test_steps_are_taken_as_mappings_keywords_arrays_tensors_lists_and_tensordicts() -> None:
    play = ["..", ".T", "U.", ".."]
    twin = Twin(2, 8).play(*play)

    def nested(step: dict[str, Any]) -> TensorDict:
        return TensorDict(mapped(torch.as_tensor, step), batch_size=[2])

    ways: list[Callable[[ReplayBuffer, dict[str, Any]], None]] = [
        lambda buffer, step: buffer.add(**step),
        lambda buffer, step: buffer.add({"obs": step["obs"]}, **{n: x for n, x in step.items() if n != "obs"}),
        lambda buffer, step: buffer.add(mapped(torch.as_tensor, step)),
        lambda buffer, step: buffer.add(mapped(lambda x: torch.as_tensor(x.tolist(), dtype=torch.float64).to(
            torch.bool if x.dtype == bool else torch.int64 if x.dtype == np.int64 else torch.float32), step)),
        lambda buffer, step: buffer.add(nested(step)),
        lambda buffer, step: buffer.add({n: x if "obs" in n else x.tolist() for n, x in step.items()}),
        lambda buffer, step: buffer.add(mapped(np.asfortranarray, step)),
        lambda buffer, step: buffer.add({**step, "reward": step["reward"].astype(np.float64)}),
    ]  # fmt: skip
    for way in ways:
        other = Twin(2, 8)
        for kinds in play:
            way(other.buffer, other.step(kinds))
        other.check()
        assert same_batches(other.buffer.data(), twin.buffer.data())


def test_a_step_is_not_changed_by_adding_it_and_is_not_kept() -> None:
    twin = Twin(2, 8, dress="mixed")
    step = twin.step("T.")
    step["mask"] = np.array([True, True])
    before = mapped(np.copy, step)
    twin.buffer.add(step)
    assert mapped(np.array_equal, step, before) == mapped(lambda _: True, step)
    mapped(lambda x: x.fill(POISON), step)
    twin.add("..")
    twin.check()


def test_with_one_env_the_leading_axis_may_be_left_out() -> None:
    for dress in DRESSES:
        twin, other = Twin(1, 8, dress=dress), Twin(1, 8, dress=dress)
        for kinds in "..T.U..":
            twin.add(kinds)
            step = other.step(kinds)
            other.buffer.add(mapped(lambda x: x[0], step))
        other.check()
        assert same_batches(twin.buffer.data(), other.buffer.data())


@pytest.mark.parametrize("dress", DRESSES)
def test_asynchronous_envs_step_at_any_pace_and_in_any_order(dress: str) -> None:
    rng = np.random.default_rng(0)
    twin = Twin(4, 6, dress=dress, sampler=Prioritized())
    for t in range(50):
        envs = rng.permutation(4)[: int(rng.integers(0, 5))].tolist()
        twin.add("".join(rng.choice(list("....TUB"), len(envs))), envs)
        if t % 10 == 9:
            twin.check()
            twin.check_batch(twin.buffer.sample(16))


def test_a_masked_row_is_not_stored_and_nothing_is_joined_across_it() -> None:
    twin = Twin(3, 8).play("...", "...")
    heads = internals.ring(twin.buffer).heads.copy()
    twin.add("...", mask=[True, False, True])
    assert (internals.ring(twin.buffer).heads - heads).tolist() == [1, 0, 1]
    twin.add("...")
    twin.check()
    assert len(twin.buffer) == 3 + 1 + 3
    twin.add("TUB", mask=[False, False, False])
    twin.check()
    assert POISON not in twin.buffer.data()["obs"]


@pytest.mark.parametrize("at_once", [False, True])
def test_the_step_before_a_masked_time_limit_is_kept_with_the_observation_it_led_to(at_once: bool) -> None:
    twin = Twin(2, 20, view=NStep(2, 0.5), sampler=Prioritized())
    plays = ["..", "..", "U.", "..", ".U", "..", "..", "..", "UU", "..", ".."]
    masks = [[letter != "U" for letter in kinds] for kinds in plays]
    if at_once:
        twin.extend(plays, masks)
    else:
        for kinds, mask in zip(plays, masks, strict=True):
            twin.add(kinds, mask=mask)
    twin.check()
    # of each env's eleven steps two are masked, and the newest is not known to lead anywhere yet
    assert len(twin.buffer) == 2 * (11 - 2 - 1)
    data = twin.buffer.data()
    assert not (data["truncated"] | data["terminated"]).any()
    twin.check_batch(twin.buffer.sample(32))


def test_a_masked_time_limit_after_no_step_is_left_out_whole() -> None:
    twin = Twin(1, 9)
    twin.add("U", mask=[False])
    twin.play("T")
    twin.add("U", mask=[False])
    twin.extend([".", "U", "U", "U"], [[True], [False], [False], [False]])
    assert internals.ring(twin.buffer).heads.tolist() == [4]  # a step and what it ended on; a step and what it led to
    twin.check()
    assert len(twin.buffer) == 2


def test_a_masked_time_limit_is_found_among_steps_of_own_next_observations() -> None:
    step = {"obs": np.zeros((1, 2)), "action": [0], "reward": [1.0], "terminated": [False], "next_obs": np.ones((1, 2))}
    for options in ({"own_next_obs": True}, {"ordered": False}):
        buffer = ReplayBuffer(PLAIN, 9, **options)
        buffer.add(step, truncated=[False])
        buffer.add(step, truncated=[True], mask=np.array([False]))
        assert len(buffer) == 1  # what the first led to it told itself
        assert internals.ring(buffer).heads.tolist() == [1]


@pytest.mark.parametrize("wrap", [lambda x: x, np.bool_, torch.tensor, lambda x: [x], lambda x: np.array([x])])
def test_with_one_env_a_mask_may_be_a_single_bool(wrap: Callable[[bool], Any]) -> None:
    buffer = ReplayBuffer(PLAIN, 9)
    step = {"obs": [0.0, 1.0], "action": 0, "reward": 1.0, "terminated": False, "truncated": False}
    for kept in (True, True, False, True):
        buffer.add(step, mask=wrap(kept))
    assert internals.ring(buffer).heads.tolist() == [3]
    assert len(buffer) == 1
    several = ReplayBuffer(PLAIN, 18, 2)
    with pytest.raises(ShapeError, match=r"mask: expected bool \(2,\), got bool \(\)"):
        several.add({name: np.stack([value, value]) for name, value in step.items()}, mask=True)


def test_a_mask_may_leave_rows_out_of_fields_of_every_dtype_and_size() -> None:
    schema = Schema({"obs": (2,), "reward": (), **FLAGS, "half": Field((3,), torch.bfloat16), "large": (400,)})
    buffer = ReplayBuffer(schema, 12, 3)
    for t in range(3):
        buffer.add(
            obs=torch.full((3, 2), float(t)),
            reward=torch.arange(3.0),
            terminated=torch.tensor([False, t == 2, False]),
            truncated=torch.zeros(3, dtype=torch.bool),
            half=torch.arange(9).reshape(3, 3).to(torch.bfloat16),
            large=torch.arange(1200.0).reshape(3, 400),
            next_obs=torch.full((3, 2), 50.0 + t),
            mask=torch.tensor([True, True, False]),
        )
    batch = buffer.data()
    assert sorted((batch["index"] % 3).tolist()) == [0, 0, 1, 1, 1]
    for item in map(batch.rows, range(len(batch))):
        env = int(item["index"]) % 3
        assert item["half"].tolist() == [3.0 * env, 3.0 * env + 1, 3.0 * env + 2]
        assert item["large"][0] == 400 * env


@pytest.mark.parametrize("seed", first_of(3, range(6)))
def test_extend_is_a_loop_of_add(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rows = int(rng.integers(1, 4)), int(rng.integers(2, 9))
    for dress in ("box", "mixed"):
        one, other = (
            Twin(num_envs, rows, dress=dress, sampler=Prioritized(), view=FrameStack(2, NStep(2, 0.5)))
            for _ in range(2)
        )
        for round_ in range(4):
            plays = random_plays(seed * 10 + round_, num_envs, int(rng.integers(1, 40)))
            masks = (rng.random((len(plays), num_envs)) < 0.8).tolist() if round_ % 2 else None
            for t, kinds in enumerate(plays):
                one.add(kinds, mask=None if masks is None else masks[t])
            other.extend(plays, masks)
            one.check()
            other.check()
            # the bytes of boundary rows that mean nothing may differ; the batches may not
            assert same_batches(one.buffer.data(), other.buffer.data())
            if len(one.buffer):
                assert same_batches(one.buffer.sample(9), other.buffer.sample(9))
                index = one.buffer.sample(5)["index"]
                errors = torch.linspace(0, 3, 5)
                assert one.buffer.update_priorities(index, errors) == other.buffer.update_priorities(index, errors)
                other.buffer.sample(5)


def test_extend_takes_some_envs_tensors_and_many_more_steps_than_there_are_rows() -> None:
    one, other = Twin(3, 5), Twin(3, 5)
    plays = random_plays(0, 2, 200)
    steps = []
    for kinds in plays:
        one.add(kinds, [2, 0])
        steps.append(other.step(kinds, [2, 0], final=True))
    other.buffer.extend(mapped(torch.as_tensor, stacked(steps)), envs=[2, 0])
    one.check()
    other.check()
    assert same_batches(one.buffer.data(), other.buffer.data())


@pytest.mark.parametrize("masked", [False, True])
def test_a_few_steps_of_one_env_among_many_are_stored_one_after_another(masked: bool) -> None:
    one, other = (Twin(4, 2, view=NStep(2, 0.5)) for _ in range(2))
    for kinds in (["U", ".", "T"], [".", ".", "."], [".", "B", "."]):
        steps = [one.step(kind, [2], final=True) for kind in kinds]
        masks = [[True], [not masked], [True]]
        for step, mask in zip(steps, masks, strict=True):
            one.buffer.add(step, envs=[2], mask=np.array(mask))
        other.buffer.extend(mapped(torch.as_tensor, stacked(steps)) | {"mask": np.array(masks)}, envs=[2])
        other.buffer.check()
        assert same_batches(one.buffer.slice(2), other.buffer.slice(2))
        assert same_batches(one.buffer.data(), other.buffer.data())


@pytest.mark.parametrize("as_given", [torch.zeros, np.zeros])
def test_extend_takes_fields_that_have_no_elements(as_given: Callable[[tuple[int, ...]], Any]) -> None:
    replay = ReplayBuffer(PLAIN.extend(obs={"place": (2,), "nothing": (0, 3)}), 100, num_envs=2)
    replay.extend(
        {
            "obs": {"place": as_given((5, 2, 2)), "nothing": as_given((5, 2, 0, 3))},
            "action": np.zeros((5, 2), np.int64),
            "reward": as_given((5, 2)),
            "terminated": np.zeros((5, 2), np.bool_),
            "truncated": np.zeros((5, 2), np.bool_),
        }
    )
    assert replay.data()["obs", "nothing"].shape == (8, 0, 3)


def test_extending_by_nothing_is_nothing() -> None:
    twin = Twin(2, 5).play("..", "..")
    step = twin.step("..", final=True)
    before = contents(twin.buffer)
    twin.buffer.extend(mapped(lambda x: x[None][:0], step))
    assert contents(twin.buffer) == before


def test_what_an_interruption_leaves_behind_is_never_drawn() -> None:
    twin = Twin(2, 9).play("..", "..", "|", "..", "..")
    twin.check()
    assert len(twin.buffer) == 4
    twin.interrupt([1])
    twin.add("..")
    twin.add("..")
    twin.check()
    assert len(twin.buffer) == 4 + 2 + 1
    twin.interrupt([])
    twin.interrupt()
    twin.interrupt()
    twin.play("T.", "|", "..")  # after an end there is nothing to interrupt
    twin.check()


def test_after_a_clear_it_is_as_good_as_new_but_for_its_numbers() -> None:
    for sampler in SAMPLERS.values():
        twin = Twin(2, 6, sampler=sampler()).play(*random_plays(1, 2, 15))
        twin.buffer.sample(2)
        numbers = internals.ring(twin.buffer).heads.copy()
        twin.clear()
        assert len(twin.buffer) == 0
        assert len(twin.buffer.data()) == 0
        assert twin.buffer.stats()["size"] == 0
        with pytest.raises(EmptyError):
            twin.buffer.sample(1)
        twin.clear()
        twin.play("..", ".T", "..")
        twin.check()
        assert twin.buffer.data()["index"].min() // 2 >= numbers.min()
        twin.check_batch(twin.buffer.sample(3))


# Steps without order.


@pytest.mark.parametrize(("dress", "sampler"), covering(DRESSES, SAMPLERS))
def test_steps_without_order_are_drawn_as_they_were_given(dress: str, sampler: str) -> None:
    twin = Twin(2, 6, dress=dress, ordered=False, sampler=SAMPLERS[sampler](), view=Transition(0.5))
    for t, kinds in enumerate(random_plays(0, 2, 20)):
        twin.add(kinds)
        assert len(twin.buffer) == min(2 * (t + 1), 12)  # complete at once, a row each
        twin.check()
        batch = twin.buffer.sample(2)
        among = None
        if isinstance(twin.buffer.sampler, Recent):
            anchors = twin.anchors()
            among = anchors[-oracle.recent_count(len(anchors), 0.9, 2, 1, 1) :]
        twin.check_batch(batch, among=among)
        assert torch.equal(batch["next_index"], batch["index"])


def test_steps_without_order_need_no_successor_and_each_a_next_obs() -> None:
    buffer = ReplayBuffer(PLAIN, 4, ordered=False, seed=0)
    step = {"obs": [[1, 2]], "action": [3], "reward": [4], "terminated": [False], "truncated": [False]}
    with pytest.raises(FieldError, match="next_obs"):
        buffer.add(step)
    buffer.add({**step, "next_obs": [[5, 6]]})
    batch = buffer.sample(2)
    assert batch["next_obs"].tolist() == [[5, 6]] * 2
    assert batch["discount"].tolist() == pytest.approx([0.99] * 2)
    buffer.add({**step, "next_obs": [[7, 8]]}, mask=np.array([False]))
    assert len(buffer) == 1
    for _ in range(9):
        buffer.add({**step, "terminated": [True], "next_obs": [[7, 8]]})
    assert len(buffer) == 4
    assert buffer.data()["index"].tolist() == [6, 7, 8, 9]
    assert buffer.data()["discount"].tolist() == [0.0] * 4
    buffer.interrupt()
    buffer.check()
    buffer.clear()
    buffer.check()
    assert len(buffer) == 0


def test_many_steps_without_order_are_added_at_once() -> None:
    one, other = (Twin(2, 7, ordered=False, sampler=Prioritized()) for _ in range(2))
    plays = random_plays(5, 2, 23)
    for kinds in plays:
        one.add(kinds)
    other.extend(plays)
    one.check()
    other.check()
    assert contents(one.buffer) == contents(other.buffer)


def without(step: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name not in names}


BAD_STEPS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "a field is missing": (lambda s: without(s, "action"), FieldError, "lacks 'action'"),
    "a field is unknown": (
        lambda s: {**s, "rewards": s["reward"]},
        FieldError,
        "unknown field 'rewards'.*did you mean",
    ),
    "one flag for both ends": (
        lambda s: {**s, "done": s["truncated"]},
        FieldError,
        "'terminated' or 'truncated'. It has",
    ),
    "a name of another library": (lambda s: {**s, "state": s["obs"]}, FieldError, "its name here is 'obs'. It has"),
    "one env too few": (lambda s: mapped(lambda x: x[:2], s), ShapeError, r"expected shape \(3"),
    "one env too few in one field": (lambda s: {**s, "reward": s["reward"][:2]}, ShapeError, "field 'reward'.*3 envs"),
    "no leading axis": (lambda s: {**s, "action": np.int64(3)}, ShapeError, "field 'action'.*num_envs"),
    "an axis too many": (lambda s: {**s, "reward": s["reward"][:, None]}, ShapeError, r"field 'reward'.*squeeze"),
    "a float action": (lambda s: {**s, "action": np.full(3, 0.5)}, DTypeError, "field 'action'.*int64"),
    "an integer flag": (lambda s: {**s, "truncated": np.zeros(3, np.int64)}, DTypeError, "field 'truncated'.*bool"),
    "a string": (lambda s: {**s, "reward": "much"}, ShapeError, "field 'reward'"),
    "ragged lists": (lambda s: {**s, "reward": [[1], [1, 2], 3]}, ShapeError, "field 'reward'"),
    "a wrong inner shape": (
        lambda s: {**s, "obs": {**s["obs"], "state": np.zeros((3, 5), np.float32)}},
        ShapeError,
        r"field 'obs.state'.*\(3, 4\).*\(3, 5\)",
    ),
    "a member is missing": (
        lambda s: {**s, "obs": without(s["obs"], "camera")},
        FieldError,
        "field 'obs.camera.image': missing",
    ),
    "a member is unknown": (
        lambda s: {**s, "obs": {**s["obs"], "stat": np.zeros(3)}},
        FieldError,
        "unknown field 'obs.stat'",
    ),
    "next_obs is missing at an end": (lambda s: without(s, "next_obs"), FieldError, "env 1 ended.*next_obs"),
    "next_obs has a wrong shape": (
        lambda s: {**s, "next_obs": {**s["next_obs"], "count": np.zeros((3, 2), np.int64)}},
        ShapeError,
        "field 'next_obs.count'",
    ),
    "next_obs lacks a member": (
        lambda s: {**s, "next_obs": without(s["next_obs"], "phase")},
        FieldError,
        "field 'next_obs.phase'",
    ),
    "next_obs of one env too few": (
        lambda s: {**s, "next_obs": mapped(lambda x: x[:2], s["next_obs"])},
        ShapeError,
        r"field 'next_obs.*\(3",
    ),
    "a mask of numbers": (lambda s: {**s, "mask": np.ones(3)}, ShapeError, r"mask: expected bool \(3,\)"),
    "a mask of another length": (lambda s: {**s, "mask": np.ones(2, bool)}, ShapeError, r"mask.*\(3,\).*\(2,\)"),
    "a mask, and next_obs is missing": (
        lambda s: {**without(s, "next_obs"), "mask": np.array([False, True, True])},
        FieldError,
        "env 1 ended",
    ),
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_step_that_does_not_fit_is_refused_by_name_and_leaves_everything_as_it_was(what: str) -> None:
    spoil, error, message = BAD_STEPS[what]
    twin, other = three(), three()
    step = other.step(".TU")
    before = contents(twin.buffer)
    with pytest.raises(error, match=message):
        twin.buffer.add(spoil(step))
    assert contents(twin.buffer) == before
    with pytest.raises(error):
        twin.buffer.extend(mapped(lambda x: np.stack([x, x]) if isinstance(x, np.ndarray) else x, spoil(step)))
    assert contents(twin.buffer) == before
    twin.add(".TU")
    twin.check()
    other.buffer.add(step)
    assert contents(twin.buffer) == contents(other.buffer)


@pytest.mark.parametrize(
    ("envs", "error", "message"),
    [
        ([0, 0], ParameterError, "each env once"),
        ([0, 3], ParameterError, "numbers from 0 to 2"),
        ([-1, 1], ParameterError, "numbers from 0 to 2"),
        ([[0, 1]], ShapeError, "envs: expected one axis"),
        (np.array([True, False]), DTypeError, "envs: expected integers"),
        ([0.0, 1.0], DTypeError, "envs: expected integers"),
        ([0], ShapeError, r"expected shape \(1"),
        ([0, 1, 2], ShapeError, r"expected shape \(3"),
    ],
)
def test_envs_that_are_not_there_or_do_not_fit_the_rows_are_refused(
    envs: Any, error: type[Exception], message: str
) -> None:
    twin, other = three(), three()
    step = other.step("..", [0, 1], final=True)
    before = contents(twin.buffer)
    with pytest.raises(error, match=message):
        twin.buffer.add(step, envs=envs)
    with pytest.raises(error):
        twin.buffer.extend(mapped(lambda x: x[None], step), envs=envs)
    if "shape" not in message:
        with pytest.raises(error, match=message):
            twin.buffer.interrupt(envs)
    assert contents(twin.buffer) == before


def test_many_steps_of_which_one_does_not_fit_are_refused_as_a_whole() -> None:
    for wide in (False, True):
        rows = 2 if wide else 12
        twin, other = (Twin(4, rows, sampler=Prioritized()).play("....", ".T.U") for _ in range(2))
        steps = stacked([other.step(kinds, final=True) for kinds in ("....", "....", "..T.", "....", "....")])
        before = contents(twin.buffer)
        for name, value in steps.items():
            with pytest.raises(ShapeError, match="expected"):
                twin.buffer.extend({**steps, name: value[:4]})
            with pytest.raises(ShapeError, match="expected"):
                twin.buffer.extend({**steps, name: value[:, :3]})
        with pytest.raises(ShapeError, match="expected"):
            twin.buffer.extend({})
        with pytest.raises(FieldError, match="env 2 ended"):
            twin.buffer.extend(without(steps, "next_obs"))
        mask = np.zeros((5, 4), bool)
        mask[[0, 1, 2], [0, 1, 2]] = True  # fewer rows than envs are left
        with pytest.raises(FieldError, match="env 2 ended"):
            twin.buffer.extend({**without(steps, "next_obs"), "mask": mask})
        assert contents(twin.buffer) == before
        mask[2, 2] = False
        twin.buffer.extend({**without(steps, "next_obs"), "mask": mask})
        twin.buffer.check()


@pytest.mark.parametrize("given", [np.zeros((2, 2)), torch.zeros(2), [("obs", 1)], "obs", 5])
@pytest.mark.parametrize("more", [(), (np.zeros(2), [True, False])])
def test_a_step_that_is_not_given_by_name_is_refused_with_the_call_that_does(given: Any, more: Any) -> None:
    replay: Any = ReplayBuffer(PLAIN, 40, 2)
    for arguments in ((given, *more), (None, given)):
        with pytest.raises(FieldError, match=r"names of its fields.*add\(obs=\.\.\., action="):
            replay.add(*arguments)
    with pytest.raises(FieldError, match="extend: expected a mapping"):
        replay.extend(given)
    assert len(replay) == 0


@pytest.mark.parametrize("kind", UNEVEN)
def test_what_has_no_one_shape_is_refused_by_the_name_of_its_field(kind: str) -> None:
    value, message = uneven(kind, (2, 2))
    replay = ReplayBuffer(PLAIN, 40, 2)
    step = {
        "obs": np.zeros((2, 2)),
        "action": [1, 1],
        "reward": [0, 0],
        "terminated": [True] * 2,
        "truncated": [False] * 2,
    }
    for wrong in ({**step, "obs": value}, {**step, "obs": value, "next_obs": step["obs"]}):
        with pytest.raises(SchemaError, match=rf"'obs'.*{message}"):
            replay.add(wrong)
    with pytest.raises(SchemaError, match=rf"'next_obs'.*{message}"):
        replay.add(step, next_obs=value)
    with pytest.raises(SchemaError):
        replay.extend({name: np.asarray(x)[None] for name, x in step.items()} | {"obs": value})
    assert len(replay) == 0
    replay.check()


@pytest.mark.parametrize("options", [{}, {"ordered": False}, {"dress": "image"}])
def test_rewards_that_are_no_numbers_are_counted_and_the_count_is_saved(options: Any, tmp_path: Path) -> None:
    twin = Twin(2, 6, **options)
    for rewards in ([np.nan, 1.0], [-np.inf, np.inf], [0.0, 2.0]):
        twin.buffer.add({**twin.step("..", final=True), "reward": np.array(rewards)})
    steps = stacked([twin.step(".T", final=True) for _ in range(3)])
    twin.buffer.extend({**steps, "reward": np.full((3, 2), np.nan, np.float32)})
    assert twin.buffer.stats()["not_finite_rewards"] == 9
    twin.buffer.check()
    twin.buffer.save(tmp_path / "replay")
    assert ReplayBuffer.load(tmp_path / "replay").stats()["not_finite_rewards"] == 9


NOT_FINITE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a reward": (lambda step: step["reward"].__setitem__(1, np.nan), "'reward': row 1, of env 1, is nan"),
    "an observation": (lambda step: step["obs"]["x"].__setitem__((0, 1), np.inf), "'obs.x': row 0, of env 0"),
    "an observation of a dtype that NumPy lacks": (
        lambda step: step["obs"].__setitem__("half", torch.tensor([[0.0], [torch.nan]], dtype=torch.bfloat16)),
        "'obs.half': row 1",
    ),
    "an action": (lambda step: step["action"].__setitem__(0, -np.inf), "'action': row 0"),
    "a final observation": (lambda step: step["next_obs"]["x"].__setitem__((1, 0), np.nan), "'next_obs.x': row 1"),
}

FLOATS = Schema({
    "obs": {"x": (3,), "half": Field((1,), torch.bfloat16)}, "action": Field((), torch.float64), "log_prob": (),
    "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool),
})  # fmt: skip


@pytest.mark.parametrize("what", NOT_FINITE)
def test_in_debug_mode_a_step_with_a_number_that_is_none_is_refused_and_nothing_is_stored(what: str) -> None:
    spoil, message = NOT_FINITE[what]
    buffer = ReplayBuffer(FLOATS, 20, 2, debug=True, sampler=Prioritized(), seed=0)
    buffer.add(numbers())
    before, step = contents(buffer), numbers()
    spoil(step)
    with pytest.raises(NotFiniteError, match=message):
        buffer.add(step)
    with pytest.raises(NotFiniteError, match=message.split(":")[0]):
        buffer.extend(stacked([plain(numbers()), plain(step)]))
    assert contents(buffer) == before
    buffer.add({**step, "mask": np.zeros(2, bool)})
    assert contents(buffer)[0] == before[0]
    calm = ReplayBuffer(FLOATS, 20, 2, seed=0)
    with np.errstate(over="ignore"):
        calm.add(step)
    assert calm.stats()["not_finite_rewards"] == ("reward" in message)


def test_debug_mode_takes_a_step_of_no_env() -> None:
    buffer = ReplayBuffer(FLOATS, 20, 2, debug=True, seed=0)
    buffer.add(mapped(lambda x: x[:0], numbers()), envs=[])
    assert contents(buffer)[0] == contents(ReplayBuffer(FLOATS, 20, 2, debug=True, seed=0))[0]


def plain(step: dict[str, Any]) -> Any:
    """Tensors of a dtype that NumPy lacks as ones it has."""
    return mapped(lambda x: x.float().numpy() if isinstance(x, torch.Tensor) else x, step)


def test_debug_mode_is_saved(tmp_path: Path) -> None:
    ReplayBuffer(FLOATS, 20, 2, debug=True, seed=0).save(tmp_path / "replay")
    assert ReplayBuffer.load(tmp_path / "replay").debug
