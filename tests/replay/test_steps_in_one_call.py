"""A step that can be copied as it is is added in one compiled call, and that call does what the long way does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, NStep, Prioritized, ReplayBuffer, Schema, Transition
from relive import Sequence as SequenceView
from relive.errors import ReliveError
from relive.replay.writer import StepAdder
from relive.ring import Ring
from support import internals, twins
from support.effort import often
from support.replays import FLAGS, random_plays
from support.twins import SAMPLERS, UNEVEN, Twin, contents, mapped, uneven

KINDS: dict[str, dict[str, Any]] = {
    "small": {},
    "images": {"dress": "image"},
    "nested": {"dress": "mixed"},
    "hidden states": {"extras": twins.recurrent},
    "unordered": {"dress": "mixed", "ordered": False},
    "own next_obs": {"dress": "image", "own_next_obs": True},
    "prioritized": {"dress": "image", "sampler": "prioritized, stratified"},
    "recent": {"sampler": "recent, prioritized"},
}


def replay(kind: str, **options: Any) -> Twin:
    """A twin of one of KINDS."""
    facts = {**KINDS[kind], **options}
    if "sampler" in facts:
        facts["sampler"] = SAMPLERS[facts["sampler"]]()
    own = facts.pop("own_next_obs", False)
    twin = Twin(2, 7, **facts)
    if own:
        twin.buffer = ReplayBuffer(twin.schema, 14, 2, own_next_obs=True, **twin.options)
    return twin


def given(twin: Twin, kinds: str) -> dict[str, Any]:
    """A vector step, with next observations if each has its own."""
    step = twin.step(kinds, final=twin.buffer.own_next_obs)
    if twin.buffer.own_next_obs and twin.ordered:
        step["next_obs"] = mapped(np.nan_to_num, step["next_obs"])
    return step


@pytest.fixture
def the_long_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make replays check and store each part of a step by itself from now on."""
    return lambda: monkeypatch.setattr(StepAdder, "add", lambda self, step, debug: False)


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_stores_the_bytes_that_the_long_way_stores(kind: str, the_long_way: Callable[[], None]) -> None:
    one = replay(kind)
    plays = random_plays(len(kind), 2, 40)
    steps = [given(one, kinds) for kinds in plays]
    ways: list[Callable[[Any], Any]] = [lambda x: x, torch.as_tensor, lambda x: x.tolist(), np.asfortranarray]
    forms = [mapped(ways[t // 7 % 4], step) for t, step in enumerate(steps)]
    for step in forms:
        one.buffer.add(**step)
    assert [adder is None for adder in internals.adders(internals.writer(one.buffer))] == [
        one.buffer.own_next_obs,
        False,
    ]
    the_long_way()
    other = replay(kind)
    for step in forms:
        other.buffer.add(**step)
    assert contents(one.buffer) == contents(other.buffer)
    assert one.buffer.stats() == other.buffer.stats()
    one.buffer.check()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_like_the_one_before_are_added_in_one_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = replay(kind)
    for kinds in ("..", "..", "T.", ".U"):  # with and without final observations
        twin.buffer.add(**given(twin, kinds))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Ring, "add", refuse)
    for kinds in ("..", "..", "T.", ".U", "BB", ".."):
        twin.buffer.add(**given(twin, kinds))


def test_the_rule_of_what_can_be_drawn_may_change_between_two_steps(the_long_way: Callable[[], None]) -> None:
    views: list[Callable[[], Any]] = [lambda: SequenceView(2, 5, "max", 1, 0.5), lambda: Transition(0.5)]
    schema = Schema({"obs": (2,), "action": Field((), torch.int64), "reward": (), **FLAGS})
    found = []
    for _ in range(2):
        rng, buffer = np.random.default_rng(3), ReplayBuffer(schema, 12, 1, sampler=Prioritized(), seed=0)
        for t in range(60):
            if t % 12 == 5:
                buffer.view = views[t // 12 % 2]()
            ended, obs = rng.random((1, 2)) < 0.15, rng.normal(size=(2, 1, 2)).astype(np.float32)
            step = {"obs": obs[0], "action": np.ones(1, np.int64), "reward": np.ones(1, np.float32)}
            flags = {"terminated": ended[:, 0], "truncated": ended[:, 1]}
            buffer.add(step, **flags, **({"next_obs": obs[1]} if ended.any() else {}))
            buffer.check()
        found.append(contents(buffer))
        the_long_way()
    assert found[0] == found[1]


VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": Transition,
    "three steps": lambda: NStep(3, 0.5),
    "sequences": lambda: SequenceView(2, 5, "max", 1, 0.5),
    "sequences of full length": lambda: SequenceView(3, 1),
}

FORMS: list[Callable[[Any], Any]] = [
    lambda x: x, torch.as_tensor, lambda x: x.tolist(), np.asfortranarray, lambda x: x.repeat(2, 0)[::2],
    lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, lambda x: torch.as_tensor(x).mT.contiguous().mT
    if x.ndim > 1 else x[::-1].copy()[::-1],
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["shared", "own", "alone"])
@pytest.mark.parametrize("sampler", [None, Prioritized])
def test_masked_steps_and_debug_mode_are_as_the_long_way_has_them(
    view: str, kind: str, sampler: Any, the_long_way: Callable[[], None]
) -> None:
    if kind != "shared" and view not in ("transitions", "three steps" if kind == "own" else ""):
        return  # windows need steps in order, and sequences those that share observations
    schema = Schema({"obs": (2,), "action": Field((), torch.int32), "reward": (), **FLAGS})
    options = {"shared": {}, "own": {"own_next_obs": True}, "alone": {"ordered": False}}[kind]
    found = []
    for _ in range(2):
        rng = np.random.default_rng(len(view))
        buffer = ReplayBuffer(
            schema, 36, 3, sampler=sampler and sampler(), view=VIEWS[view](), seed=0, check_ends=False, **options
        )
        errors = []
        for t in range(often(60, 150)):
            buffer.debug = t % 5 > 2
            ended = rng.random((2, 3)) < 0.12
            obs, after = rng.normal(size=(2, 3, 2)).astype(np.float32)
            after[~ended.any(0)] = np.nan if kind == "shared" else 0
            step = {"obs": obs, "action": np.arange(3, dtype=np.int32), "reward": np.ones(3, np.float32)}
            step |= {"terminated": ended[0], "truncated": ended[1]}
            if ended.any() or kind != "shared" or t % 3 == 0:
                step["next_obs"] = after
            if rng.random() < 0.5:
                step["mask"] = rng.random(3) < 0.6
            if rng.random() < 0.1:
                step[("obs", "reward", "next_obs")[int(rng.integers(3 if "next_obs" in step else 2))]][1:2] = np.inf
            form = FORMS[int(rng.integers(len(FORMS)))]
            try:
                buffer.add({name: form(x) for name, x in step.items()})
            except ReliveError as error:
                errors.append((t, type(error), str(error)))
            buffer.check()
        found.append((contents(buffer), errors, buffer.stats()))
        the_long_way()
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_steps_of_any_form_are_added_in_one_call(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema({"obs": (2,), "action": Field((), torch.int32), "reward": (), **FLAGS})
    buffer = ReplayBuffer(schema, 36, 3, debug=True, check_ends=False)
    step = {"obs": np.ones((3, 2), np.float32), "action": np.arange(3), "reward": np.ones(3, np.float32)}
    step |= {"terminated": np.zeros(3, np.bool_), "truncated": np.zeros(3, np.bool_), "next_obs": step["obs"] * np.nan}
    steps = [step, step | {"mask": np.array([True, False, True])}, step | {"mask": np.ones(3, np.bool_)}]
    buffer.add(**steps[0])

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Ring, "add", refuse)
    for given_ in steps:
        buffer.add(**{name: FORMS[form](x) for name, x in given_.items()})
    monkeypatch.undo()
    assert buffer.data()["obs"].shape[0] == len(buffer) > 0


WRONG_MASKS: dict[str, Any] = {
    "whole numbers": np.ones(2, np.int64), "another shape": np.ones(3, np.bool_), "one for all": np.True_, "none": None,
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_MASKS)
def test_a_wrong_mask_is_refused_and_nothing_is_stored(wrong: str) -> None:
    twin = Twin(2, 7).play("..", "..")
    before = contents(twin.buffer)
    if WRONG_MASKS[wrong] is None:
        twin.buffer.add(**twin.step(".."), mask=None)  # as if there were none
        assert contents(twin.buffer) != before
        return
    with pytest.raises(ReliveError, match="mask"):
        twin.buffer.add(**twin.step(".."), mask=WRONG_MASKS[wrong])
    assert contents(twin.buffer) == before


def test_there_is_room_for_all_events_of_a_new_rule() -> None:
    twin = Twin(1, 40, sampler=Prioritized()).play(*"......")
    adder = internals.adders(internals.writer(twin.buffer))[False]
    assert adder is not None
    before = len(internals.adding(adder).arrays.where)
    twin.buffer.view = SequenceView(2, 5, "max", 1, 0.5)
    twin.play(*"......")
    assert len(internals.adding(adder).arrays.where) == before + 2 * internals.ring(twin.buffer).rule.history
    twin.check()


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a field is missing": lambda step: {name: x for name, x in step.items() if name != "reward"},
    "another name": lambda step: {("rewards" if name == "reward" else name): x for name, x in step.items()},
    "a field too many": lambda step: {**step, "extra": np.zeros(2)},
    "a member is missing": lambda step: {**step, "obs": dict(list(step["obs"].items())[1:])},
    "a member too many": lambda step: {**step, "obs": {**step["obs"], "extra": np.zeros(2)}},
    "no mapping": lambda step: {**step, "obs": np.zeros(2)},
    "one env too many": lambda step: {**step, "reward": np.zeros(3, np.float32)},
    "numbers that do not fit": lambda step: {**step, "reward": np.array([1e300, 0.0])},
    "an end without a final observation": lambda step: {
        **{name: x for name, x in step.items() if name != "next_obs"}, "terminated": np.array([False, True])
    },
    **{kind: lambda step, kind=kind: {**step, "reward": uneven(kind, (2,))[0]} for kind in UNEVEN},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_step_is_refused_as_the_long_way_refuses_it(wrong: str, the_long_way: Callable[[], None]) -> None:
    messages = []
    for _ in range(2):
        twin = Twin(2, 7, dress="dict", sampler=Prioritized()).play("..", "..", "T.", ".U", "..")
        before = contents(twin.buffer)
        with pytest.raises(ReliveError) as refused:
            twin.buffer.add(**WRONG[wrong](twin.step("..", final=True)))
        messages.append((type(refused.value), str(refused.value)))
        assert contents(twin.buffer) == before
        assert internals.ring(twin.buffer).pending is None
        the_long_way()
    assert messages[0] == messages[1]


def test_a_tensor_without_memory_is_no_image_to_be_copied_from() -> None:
    image: Any = Field((40, 40), torch.uint8)
    buffer = ReplayBuffer(Schema({"obs": image, "action": (), "reward": (), **FLAGS}), 8)
    step = {"action": torch.zeros(1), "reward": torch.zeros(1), **{name: torch.zeros(1) > 0 for name in FLAGS}}
    for _ in range(2):
        buffer.add(**step, obs=torch.ones(1, 40, 40, dtype=torch.uint8))
    zeros: Any = getattr(torch, "_efficientzerotensor")(1, 40, 40, dtype=torch.uint8)  # noqa: B009 - it is not public
    buffer.add(**step, obs=zeros)
    buffer.add(**step, obs=torch.ones(1, 40, 40, dtype=torch.uint8))
    assert buffer.data()["obs"].flatten(1).sum(1).tolist() == [1600, 1600, 0]


def test_debug_mode_looks_at_every_number() -> None:
    twin = Twin(2, 7).play("..", "..")
    step = twin.step("..")
    twin.buffer.debug = True
    with pytest.raises(ReliveError, match="reward"):
        twin.buffer.add(**step | {"reward": np.array([0.0, np.nan], np.float32)})
    twin.buffer.debug = False
    twin.buffer.add(**step | {"reward": np.array([0.0, np.nan], np.float32)})
    assert internals.ring(twin.buffer).not_finite == 1


@pytest.mark.parametrize("image", [False, True])
def test_steps_of_many_envs_store_what_each_env_alone_would_store(image: bool) -> None:
    envs, rng = 150, np.random.default_rng(5)  # more than are stored together, and no multiple of those
    shape = (3000,) if image else (3,)  # the first is too large for a packed row
    schema = Schema({"obs": Field(shape, torch.uint8), "reward": (), **FLAGS})
    together, alone = (ReplayBuffer(schema, 7 * envs, envs, seed=0, check_ends=False) for _ in range(2))
    for _ in range(12):
        obs, after = rng.integers(0, 255, (2, envs, *shape), np.uint8)
        ends, mask = rng.random((2, envs)) < 0.2, rng.random(envs) < 0.9
        step = {"obs": obs, "reward": rng.normal(size=envs).astype(np.float32), "terminated": ends[0]}
        step |= {"truncated": ends[1], "next_obs": after, "mask": mask}
        together.add(step)
        for n in range(envs):
            alone.add({name: x[n : n + 1] for name, x in step.items()}, envs=[n])
    together.check()
    for name, rows in together.block.items():
        assert torch.equal(rows, alone.block[name])
    assert len(together) == len(alone)
