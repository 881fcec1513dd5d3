"""Tagged envs: what they return says where it comes from, in all three autoreset modes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from support import tagged_envs
from support.oracle import Experience, same

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
OBSERVATIONS: list[tagged_envs.Observations] = ["box", "dict", "tuple"]

# Tagged envs


@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_an_observation_says_where_it_comes_from(observations: tagged_envs.Observations) -> None:
    tags = [tagged_envs.Tag(63, 511, 255, 7), tagged_envs.Tag(0, 0, 0, 0), tagged_envs.Tag(4095, 65535, 65535, 16383)]
    for tag in tags:
        obs = tagged_envs.encode(tag, observations)
        assert tagged_envs.TaggedEnv(observations=observations).observation_space.contains(obs)
        assert tagged_envs.decode(obs) == tag
    space = gym.vector.utils.batch_space(tagged_envs.TaggedEnv(observations=observations).observation_space, 3)
    out = gym.vector.utils.create_empty_array(tagged_envs.TaggedEnv(observations=observations).observation_space, 3)
    batch = gym.vector.utils.concatenate(
        tagged_envs.TaggedEnv(observations=observations).observation_space,
        [tagged_envs.encode(tag, observations) for tag in tags],
        out,
    )
    assert space.contains(batch)
    assert [list(numbers) for numbers in tagged_envs.decode(batch)] == [
        list(numbers) for numbers in zip(*tags, strict=True)
    ]
    for i, tag in enumerate(tags):
        assert same(tagged_envs.row(batch, i), tagged_envs.encode(tag, observations))


def test_a_tag_survives_tensors_and_any_leading_axes() -> None:
    obs = [[tagged_envs.encode(tagged_envs.Tag(env, 3, t, 9), "dict") for env in range(2)] for t in range(5)]
    nested = TensorDict(
        {
            "state": np.stack([[one["state"] for one in row] for row in obs]),
            "camera": {"image": np.stack([[one["camera"]["image"] for one in row] for row in obs])},
            "count": np.stack([[one["count"] for one in row] for row in obs]),
            "phase": np.stack([[one["phase"] for one in row] for row in obs]),
        },
        batch_size=[5, 2],
    )
    tag = tagged_envs.decode(nested)
    assert tag.env.shape == (5, 2)
    assert tag.step[:, 0].tolist() == [0, 1, 2, 3, 4]
    actions = tagged_envs.tagged_policy(nested)
    assert isinstance(actions, torch.Tensor)
    assert actions.dtype == torch.int64
    assert isinstance(tagged_envs.tagged_value(nested["state"]), torch.Tensor)
    as_tuple = {"0": nested["state"], "1": nested["camera", "image"], "2": nested["count"]}
    assert np.array_equal(tagged_envs.decode(as_tuple).step, tag.step)


@pytest.mark.parametrize("leaf", ["camera", "count", "phase"])
def test_a_leaf_of_another_observation_is_noticed(leaf: str) -> None:
    obs = tagged_envs.encode(tagged_envs.Tag(1, 2, 3, 4), "dict")
    other = tagged_envs.encode(tagged_envs.Tag(1, 2, 4, 4), "dict")
    with pytest.raises(AssertionError, match="is not that of"):
        tagged_envs.decode(obs | {leaf: other[leaf]})


def test_a_leaf_that_went_through_a_float_is_noticed() -> None:
    obs = tagged_envs.encode(tagged_envs.Tag(1, 2, 3, 4), "dict")
    through_float = obs["count"].astype(np.float64).astype(np.int64)
    with pytest.raises(AssertionError, match="count"):
        tagged_envs.decode(obs | {"count": through_float})
    with pytest.raises(AssertionError, match="image became float32"):
        tagged_envs.decode(obs | {"camera": {"image": obs["camera"]["image"].astype(np.float32)}})


def test_rewards_and_values_say_where_they_come_from_and_are_exact_in_float32() -> None:
    env, episode, step = (axis.ravel() for axis in np.meshgrid([0, 1, 63], [0, 5, 511], [0, 1, 255]))
    reward = tagged_envs.reward_of(env, episode, step)
    assert np.array_equal(reward.astype(np.float32).astype(np.float64), reward)
    assert reward.min() > 0
    assert reward.max() <= 8
    for decoded, number in zip(tagged_envs.decode_reward(reward.astype(np.float32)), (env, episode, step), strict=True):
        assert np.array_equal(decoded, number)
    assert len(np.unique(tagged_envs.value_of(tagged_envs.Tag(env, episode, step, 0)))) == env.size
    with pytest.raises(AssertionError, match="no step"):
        tagged_envs.decode_reward(0.0)
    with pytest.raises(AssertionError, match="no step"):
        tagged_envs.decode_reward(0.3)


@pytest.mark.parametrize("observations", OBSERVATIONS)
@pytest.mark.parametrize("actions", ["discrete", "box"])
def test_a_tagged_env_is_a_proper_gymnasium_env(
    observations: tagged_envs.Observations, actions: tagged_envs.Actions
) -> None:
    env = tagged_envs.TaggedEnv(
        2, tagged_envs.always(5), observations=observations, actions=actions, check_actions=False
    )
    check_env(env, skip_render_check=True)


def test_a_tagged_env_refuses_an_action_for_another_observation() -> None:
    env = tagged_envs.TaggedEnv(1, tagged_envs.always(9))
    before, _ = env.reset(seed=3)
    obs, *_ = env.step(tagged_envs.tagged_policy(before))
    assert tagged_envs.decode(obs) == tagged_envs.Tag(1, 0, 1, 3)
    with pytest.raises(tagged_envs.ForeignActionError, match="wants action"):
        env.step(tagged_envs.tagged_policy(before))
    assert env.num_checked == 1


def test_a_tagged_env_refuses_a_step_after_the_end() -> None:
    env = tagged_envs.TaggedEnv(0, tagged_envs.always(1, "both"))
    obs, _ = env.reset()
    _, _, terminated, truncated, _ = env.step(tagged_envs.tagged_policy(obs))
    assert terminated
    assert truncated
    with pytest.raises(AssertionError, match="without a reset"):
        env.step(0)


def test_masked_actions_are_legal_and_differ_from_unmasked_ones() -> None:
    obs = np.stack([tagged_envs.encode(tagged_envs.Tag(env, 1, step, 0)) for env in range(4) for step in range(10)])
    mask = tagged_envs.mask_of(tagged_envs.decode(obs))
    action = tagged_envs.tagged_policy(obs, mask)
    assert mask.dtype == np.int8
    assert (mask.sum(axis=-1) == 3).all()
    assert (np.take_along_axis(mask, action[:, None], axis=-1) == 1).all()
    assert (action != tagged_envs.tagged_policy(obs)).any()
    assert np.array_equal(action, [tagged_envs.tagged_policy(o, m) for o, m in zip(obs, mask, strict=True)])


def test_schedules_are_deterministic_and_say_what_they_mean() -> None:
    assert tagged_envs.always(4, "both")(9, 9) == (4, "both")
    around = tagged_envs.cycle([(1, "terminated"), (2, "truncated")], [(3, "both")])
    assert [around(0, 0), around(0, 1), around(0, 2), around(1, 5), around(2, 1)] == [
        (1, "terminated"),
        (2, "truncated"),
        (1, "terminated"),
        (3, "both"),
        (2, "truncated"),
    ]
    random = tagged_envs.drawn(5, longest=4)
    drawn = [random(env, episode) for env in range(10) for episode in range(10)]
    assert drawn == [random(env, episode) for env in range(10) for episode in range(10)]
    assert {length for length, _ in drawn} == {1, 2, 3, 4}
    assert {kind for _, kind in drawn} == {"terminated", "truncated", "both"}


def test_what_was_played_has_the_final_observations_and_the_kinds_of_end() -> None:
    endings = tagged_envs.cycle([(2, "terminated"), (1, "truncated"), (2, "both")])
    experience = tagged_envs.played(endings, 5, 6, seed=10)
    episodes = experience.episodes(5)
    assert [len(episode) for episode in episodes] == [2, 1, 2, 1]
    assert [(e.steps[-1].terminated, e.steps[-1].truncated) for e in episodes] == [
        (True, False),
        (False, True),
        (True, True),
        (False, False),
    ]
    finals = [None if e.final_obs is None else tagged_envs.decode(e.final_obs) for e in episodes]
    assert finals == [tagged_envs.Tag(5, 0, 2, 15), tagged_envs.Tag(5, 1, 1, 15), tagged_envs.Tag(5, 2, 2, 15), None]
    newest = list(experience.transitions())[-1]
    assert tagged_envs.decode(newest.next_obs) == tagged_envs.Tag(5, 3, 1, 15)
    assert newest.extras["value"] == tagged_envs.value_of(tagged_envs.Tag(5, 3, 0, 15))


# The three autoreset modes


def read(envs: SyncVectorEnv, num_steps: int, seed: int, actions: tagged_envs.Actions, masked: bool) -> Experience:
    """Play ``num_steps`` vector steps and keep every real one, each mode read as its documentation says."""
    mode = envs.metadata["autoreset_mode"]
    experience = Experience()
    obs, info = envs.reset(seed=seed)
    action_mask = info.get("action_mask")
    ended = np.zeros(envs.num_envs, bool)
    for _ in range(num_steps):
        action = tagged_envs.tagged_policy(obs, action_mask if masked else None, actions=actions)
        ignored = ended if mode is AutoresetMode.NEXT_STEP else np.zeros(envs.num_envs, bool)
        after, reward, terminated, truncated, info = envs.step(action)
        ended = terminated | truncated
        for env in range(envs.num_envs):
            if ignored[env]:
                continue
            hidden = mode is AutoresetMode.SAME_STEP and ended[env]
            next_obs = info["final_obs"][env] if hidden else tagged_envs.row(after, env)
            experience.record(
                env,
                obs=tagged_envs.row(obs, env),
                action=np.asarray(action)[env],
                reward=reward[env],
                terminated=terminated[env],
                truncated=truncated[env],
                next_obs=next_obs,
            )
        action_mask = info.get("action_mask")
        if mode is AutoresetMode.DISABLED and ended.any():
            after, info = envs.reset(options={"reset_mask": ended})
            if masked:
                action_mask = np.where(ended[:, None], info["action_mask"], action_mask)
        obs = after
    return experience


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_every_autoreset_mode_plays_what_the_schedule_says(
    mode: AutoresetMode, observations: tagged_envs.Observations
) -> None:
    endings = tagged_envs.cycle([(1, "terminated"), (3, "truncated")], [(4, "both")], [(2, "truncated")])
    envs = tagged_envs.make_tagged(3, mode, endings, observations=observations)
    seen = read(envs, 20, seed=4, actions="discrete", masked=False)
    counts = [len(list(seen.transitions(env))) for env in range(3)]
    assert tagged_envs.same_experience(
        seen, tagged_envs.played(endings, range(3), counts, seed=4, observations=observations)
    )
    if mode is AutoresetMode.NEXT_STEP:
        # Every reset takes a vector step of its own: 2 in 6 for the first env, 1 in 5, 1 in 3.
        assert counts == [13, 16, 14]
    else:
        assert counts == [20, 20, 20]
    assert sum(envs.get_attr("num_checked")) == sum(counts)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("actions", "masked"), [("box", False), ("discrete", True)])
def test_every_autoreset_mode_checks_the_actions(
    mode: AutoresetMode, actions: tagged_envs.Actions, masked: bool
) -> None:
    endings = tagged_envs.drawn(0, longest=4)
    envs = tagged_envs.make_tagged(4, mode, endings, actions=actions, action_mask=masked)
    seen = read(envs, 25, seed=0, actions=actions, masked=masked)
    counts = [len(list(seen.transitions(env))) for env in range(4)]
    truth = tagged_envs.played(endings, range(4), counts, seed=0, actions=actions, action_mask=masked)
    assert tagged_envs.same_experience(seen, truth)
    for transition in truth.transitions():
        if masked:
            assert transition.extras["action_mask"][transition.action] == 1


def naive(envs: SyncVectorEnv, num_steps: int) -> list[tuple[tagged_envs.Tag, float, tagged_envs.Tag]]:
    """What a loop that knows nothing of autoreset stores: (obs, reward, next_obs) of each vector step, env 0."""
    rows = []
    obs, _ = envs.reset(seed=0)
    for _ in range(num_steps):
        after, reward, *_ = envs.step(tagged_envs.tagged_policy(obs))
        rows.append((tagged_envs.decode(obs[0]), float(reward[0]), tagged_envs.decode(after[0])))
        obs = after
    return rows


def test_the_tags_catch_an_ignored_step_that_was_stored_as_real() -> None:
    rows = naive(tagged_envs.make_tagged(1, AutoresetMode.NEXT_STEP, tagged_envs.always(3)), 8)
    crossing = [row for row in rows if row[0].episode != row[2].episode]
    assert crossing == [
        (tagged_envs.Tag(0, 0, 3, 0), 0.0, tagged_envs.Tag(0, 1, 0, 0)),
        (tagged_envs.Tag(0, 1, 3, 0), 0.0, tagged_envs.Tag(0, 2, 0, 0)),
    ]
    with pytest.raises(AssertionError, match="no step"):
        tagged_envs.decode_reward([reward for _, reward, _ in rows])


def test_the_tags_catch_a_next_observation_from_the_following_episode() -> None:
    rows = naive(tagged_envs.make_tagged(1, AutoresetMode.SAME_STEP, tagged_envs.always(3)), 8)
    crossing = [row for row in rows if row[0].episode != row[2].episode]
    assert [(obs.step, after.step) for obs, _, after in crossing] == [(2, 0), (2, 0)]


def test_experiences_that_differ_in_one_observation_are_told_apart() -> None:
    one = tagged_envs.played(tagged_envs.always(3), 0, 5)
    other = tagged_envs.played(tagged_envs.always(3), 0, 5)
    assert tagged_envs.same_experience(one, other)
    other.episodes(0)[1].steps[0].obs = tagged_envs.encode(tagged_envs.Tag(0, 1, 0, 1))
    with pytest.raises(AssertionError, match="env 0, episode 1, step 0: obs"):
        tagged_envs.same_experience(one, other)
    with pytest.raises(AssertionError, match="5 steps in one, 4 in the other"):
        tagged_envs.same_experience(one, tagged_envs.played(tagged_envs.always(3), 0, 4))
