"""Envs of every kind: whose episodes are under way in them, their spaces, their memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from torch import Tensor

from relive import Batch, Collector, RolloutBuffer, Schema, errors
from relive.batches import leaves_by_path
from support import tagged_envs
from support.tagged_collections import (
    MASK,
    OBSERVATIONS,
    Echo,
    Edited,
    Torched,
    check_unbroken,
    discrete,
    every_mode,
    gather,
    make_buffer,
    policy,
    stored,
    truth,
)

# Two collectors


def test_a_collector_does_not_go_on_in_envs_that_another_one_has_played_in() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(5, "truncated"), check_actions=False)
    one, other = (Collector(envs, policy, make_buffer(envs, 4), seed=k) for k in range(2))
    one.collect(2)
    other.collect(4)  # it resets them first, so all is well with this one
    check_unbroken(other.buffer)
    with pytest.raises(errors.LifecycleError, match=r"another Collector.*its own envs, or call reset\(\)"):
        one.collect(2)
    assert one.buffer.steps == 2
    other.collect(4)
    one.reset()  # takes them back
    one.buffer.clear()
    one.collect()
    check_unbroken(one.buffer)
    with pytest.raises(errors.LifecycleError, match="another Collector"):
        other.collect()


@pytest.mark.parametrize("shared", ["a wrapper around it", "a single env", "a function that gives the same"])
def test_envs_are_known_again_behind_wrappers_and_functions(shared: str) -> None:
    inner = tagged_envs.make_tagged(1, AutoresetMode.SAME_STEP, tagged_envs.always(5), check_actions=False)
    single = tagged_envs.TaggedEnv(0, tagged_envs.always(5), check_actions=False)
    first, second = {
        "a wrapper around it": (inner, Edited(inner, lambda obs, info: (obs, info))),
        "a single env": (single, single),
        "a function that gives the same": (lambda: inner, lambda: inner),
    }[shared]
    one, other = (Collector(envs, policy, make_buffer(inner, 4)) for envs in (first, second))
    one.collect(2)
    other.collect(2)
    with pytest.raises(errors.LifecycleError, match="another Collector"):
        one.collect(2)


def test_warming_up_in_the_envs_of_the_training_is_noticed() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(5), check_actions=False)
    collector = Collector(envs, policy, make_buffer(envs, 4))
    collector.collect(2)
    collector.warm(make_buffer(envs, 4), 4, policy=policy, envs=envs)
    with pytest.raises(errors.LifecycleError, match="another Collector"):
        collector.collect(2)


def test_envs_and_collectors_are_forgotten_with_the_last_reference() -> None:
    envs = tagged_envs.make_tagged(1, AutoresetMode.SAME_STEP, tagged_envs.always(5))
    collector = Collector(envs, policy, make_buffer(envs, 4))
    collector.collect(2)
    gone = weakref.ref(collector), weakref.ref(envs)
    del collector
    gc.collect()
    assert gone[0]() is None
    Collector(envs, policy, make_buffer(envs, 4)).collect(2)
    del envs
    gc.collect()
    assert gone[1]() is None


def test_envs_that_cannot_be_referred_to_weakly_are_played_all_the_same() -> None:
    class Slotted(VectorWrapper):
        def __hash__(self) -> int:
            raise TypeError("no hash")

        @property
        def unwrapped(self) -> Any:
            return self

    envs = Slotted(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(5)))
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    collector.collect(2)
    collector.collect(2)
    check_unbroken(collector.buffer)


# Spaces and kinds of envs


@every_mode
@pytest.mark.parametrize("observations", ["dict", "tuple"])
def test_nested_observations_are_stored_bit_for_bit_and_reach_the_policy_with_their_names(
    observations: tagged_envs.Observations, mode: AutoresetMode
) -> None:
    schedule = tagged_envs.cycle([(2, "truncated"), (3, "terminated")], [(1, "both"), (4, "truncated")])
    envs = tagged_envs.make_tagged(2, mode, schedule, observations=observations)
    buffer = make_buffer(envs, 9)
    given: list[Batch] = []

    def recording(obs: Batch) -> dict[str, Any]:
        given.append(obs.clone())
        return policy(obs)

    collector = Collector(envs, recording, buffer, seed=2, value_fn=tagged_envs.tagged_value)
    rows, _ = gather(collector, [9])
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=2, observations=observations)
    assert all(isinstance(obs, Batch) and len(obs) == 2 for obs in given)
    for t, obs in enumerate(given):
        for key in leaves_by_path(buffer["obs"]):
            assert obs[key].dtype is buffer["obs"][key].dtype
            assert torch.equal(obs[key], buffer["obs"][key][t])
    keys = {"dict": {"state", "camera", "count", "phase"}, "tuple": {"0", "1", "2"}}
    assert set(given[0].keys()) == keys[observations]


ACTION_SPACES: dict[str, tuple[gym.Space[Any], Callable[[Tensor], Any]]] = {
    "multi_discrete": (
        gym.spaces.MultiDiscrete([3, 4]),
        lambda obs: torch.stack([discrete(obs, 3), discrete(obs + 1, 4)], 1),
    ),
    "multi_binary": (gym.spaces.MultiBinary(3), lambda obs: (obs.long() + torch.arange(3)).remainder(2).to(torch.int8)),
    "tuple": (
        gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32))),
        lambda obs: (discrete(obs, 3), torch.cat([obs, -obs], 1) / 8),
    ),
    "dict": (
        gym.spaces.Dict({"move": gym.spaces.Discrete(5), "aim": gym.spaces.Dict({"at": gym.spaces.Box(-1, 1, (1,))})}),
        lambda obs: {"aim": {"at": obs / 8}, "move": discrete(obs, 5)},
    ),
}


@every_mode
@pytest.mark.parametrize("kind", ACTION_SPACES)
def test_every_action_space_gets_the_actions_that_are_stored(kind: str, mode: AutoresetMode) -> None:
    space, act = ACTION_SPACES[kind]
    envs = SyncVectorEnv([partial(Echo, space)] * 2, autoreset_mode=mode)
    buffer = RolloutBuffer(Schema.from_env(envs), 7, 2)
    Collector(envs, lambda obs: {"action": act(obs)}, buffer).collect()
    for n, env in enumerate(envs.envs):
        real = [t for t in range(7) if buffer["mask"][t, n]]
        for t, action in zip(real, env.get_wrapper_attr("given"), strict=True):
            leaves = buffer["action"]
            kept = leaves[t, n] if isinstance(leaves, Tensor) else leaves.rows(t).rows(n)
            assert_same_action(kept, action)
    flat = RolloutBuffer(Schema.from_env(envs), 4, 2)
    Collector(envs, lambda obs: {"action": act(obs)}, flat).warm(flat, 4, seed=0)  # random ones fit as well
    assert flat.is_full


def assert_same_action(kept: Any, action: Any) -> None:
    if isinstance(action, dict | tuple):
        for key, part in action.items() if isinstance(action, dict) else enumerate(action):
            assert_same_action(kept[key if isinstance(key, str) else str(key)], part)
    else:
        assert kept.numpy().dtype == np.asarray(action).dtype
        assert np.array_equal(kept, action)


@every_mode
def test_an_async_vector_env_gives_the_same_as_a_synchronous_one(mode: AutoresetMode) -> None:
    schedule = tagged_envs.cycle([(2, "truncated"), (3, "terminated")], [(4, "both"), (1, "truncated")])
    makers = [partial(tagged_envs.TaggedEnv, n, schedule, observations="dict", action_mask=True) for n in range(2)]
    envs = AsyncVectorEnv(makers, autoreset_mode=mode, copy=False)
    try:
        collector = Collector(envs, policy, make_buffer(envs, 8, action_mask=MASK), seed=4)
        rows, _ = gather(collector, [8, 5])
    finally:
        envs.close()
    expected = truth(schedule, [len(mine) for mine in rows], seed=4, observations="dict", action_mask=True)
    assert rows == expected


@pytest.mark.parametrize("given", ["CartPole-v1", None, 8])
def test_what_is_no_env_is_refused_with_the_call_that_makes_some(given: Any) -> None:
    buffer = RolloutBuffer(Schema({"action": ()}), 4, 2)
    for make in (lambda: Collector(given, policy, buffer), lambda: Schema.from_env(given)):
        with pytest.raises(errors.EnvError, match=rf"expected .*, got {given!r}; make .* such as gymnasium\.make_vec"):
            make()


def test_a_single_env_is_played_as_a_vector_of_one() -> None:
    schedule = tagged_envs.cycle([(2, "truncated"), (3, "terminated")])
    env = tagged_envs.TaggedEnv(0, schedule)
    collector = Collector(env, policy, make_buffer(env, 6), seed=7)
    rows, _ = gather(collector, [6, 4])
    assert rows == truth(schedule, [10], seed=7)
    assert env.num_checked == 10  # it is played itself, not a copy of it


@pytest.mark.parametrize("single", [True, False])
def test_a_function_that_makes_envs_is_as_good_as_envs(single: bool) -> None:
    schedule = tagged_envs.cycle([(2, "truncated"), (3, "terminated")])
    count = 1 if single else 3
    vector = partial(tagged_envs.make_tagged, count, AutoresetMode.DISABLED, schedule)
    make: Callable[[], Any] = partial(tagged_envs.TaggedEnv, 0, schedule) if single else vector
    collector = Collector(make, policy, make_buffer(vector(), 6), seed=7)
    rows, _ = gather(collector, [6, 4])
    assert rows == truth(schedule, [10] * count, seed=7)


@every_mode
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_torch_native_vector_env_is_given_tensors_and_read_rightly(
    observations: tagged_envs.Observations, mode: AutoresetMode
) -> None:
    schedule = tagged_envs.cycle([(2, "truncated"), (3, "terminated")], [(4, "both"), (1, "truncated")])
    envs = Torched(tagged_envs.make_tagged(2, mode, schedule, observations=observations, action_mask=True))
    collector = Collector(envs, policy, make_buffer(envs, 8, action_mask=MASK), seed=4)
    rows, _ = gather(collector, [8, 5])
    counts = [len(mine) for mine in rows]
    assert rows == truth(schedule, counts, seed=4, observations=observations, action_mask=True)


@every_mode
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_vector_env_that_reuses_the_memory_of_its_observations_is_stored_rightly(
    observations: tagged_envs.Observations, mode: AutoresetMode
) -> None:
    schedule = tagged_envs.cycle([(2, "truncated"), (3, "terminated")], [(4, "both"), (1, "truncated")])
    makers = [partial(tagged_envs.TaggedEnv, n, schedule, observations=observations) for n in range(2)]
    envs = SyncVectorEnv(makers, autoreset_mode=mode, copy=False)
    rows, _ = gather(Collector(envs, policy, make_buffer(envs, 8), seed=4), [8, 5])
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=4, observations=observations)


@every_mode
@pytest.mark.parametrize(
    ("reuse", "fresh"),
    [
        ("from the first reset", ()),
        ("from the first step", ()),
        ("from the first reset", ("state",)),
        ("from the first reset", ("camera", "count")),
    ],
    ids=["all", "all but what reset gives", "all but one leaf", "all but two leaves"],
)
def test_a_simulator_that_gives_out_its_own_memory_is_stored_rightly(
    reuse: str, fresh: tuple[str, ...], mode: AutoresetMode
) -> None:
    schedule = tagged_envs.cycle([(5, "truncated"), (3, "terminated")], [(4, "both"), (2, "truncated")])
    inner = tagged_envs.make_tagged(2, mode, schedule, observations="dict", action_mask=True)
    envs = Torched(inner, reuse, fresh)
    collector = Collector(envs, policy, make_buffer(envs, 8, action_mask=MASK), seed=4)
    rows, _ = gather(collector, [8, 5])
    counts = [len(mine) for mine in rows]
    assert rows == truth(schedule, counts, seed=4, observations="dict", action_mask=True)


@pytest.mark.filterwarnings("error")
def test_observations_that_must_not_be_written_to_are_taken_without_a_warning() -> None:
    def lock(obs: np.ndarray, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        obs = obs.copy()
        obs.flags.writeable = False
        return obs, info

    schedule = tagged_envs.always(3, "truncated")
    envs = Edited(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, schedule), lock)
    rows, _ = gather(Collector(envs, policy, make_buffer(envs, 8), seed=4), [8])
    assert rows == truth(schedule, [8, 8], seed=4)


@pytest.mark.parametrize("mode", [None, "SometimesStep"])
def test_a_vector_env_that_does_not_tell_its_autoreset_mode_is_refused_and_may_be_told(mode: str | None) -> None:
    schedule = tagged_envs.always(3, "truncated")
    envs = tagged_envs.make_tagged(2, AutoresetMode.DISABLED, schedule)
    envs.metadata = {} if mode is None else {"autoreset_mode": mode}
    buffer = make_buffer(envs, 8)
    with pytest.raises(errors.EnvError, match=r"autoreset_mode'\] is " + repr(mode)):
        Collector(envs, policy, buffer)
    for told in (AutoresetMode.DISABLED, "Disabled"):
        rows, _ = gather(Collector(envs, policy, buffer, seed=0, autoreset_mode=told), [8])
        assert rows == truth(schedule, [8, 8], seed=0)


def test_envs_that_are_made_again_are_told_the_mode_again() -> None:
    schedule = tagged_envs.cycle([(3, "truncated")], [(2, "terminated")])

    def make() -> SyncVectorEnv:
        envs = tagged_envs.make_tagged(2, AutoresetMode.NEXT_STEP, schedule)
        envs.metadata = {}
        return envs

    collector = Collector(make, policy, make_buffer(make(), 4), autoreset_mode=AutoresetMode.NEXT_STEP)
    extra = make_buffer(make(), 9)
    collector.warm(extra, 9, policy=policy, seed=1)
    rows = stored(extra)
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=1)
