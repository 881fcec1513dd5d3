"""The drop-in for Stable-Baselines3's buffers: by itself, over a stand-in for the classes that it is derived from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from compat import stable_baselines3_stand_in as stand_in
from relive.errors import EmptyError, FullError
from support import internals

BOX, MOVE = spaces.Box(-1e6, 1e6, (2,), np.float32), spaces.Box(-1, 1, (1,), np.float32)
DICT = spaces.Dict({"seen": BOX, "id": spaces.Discrete(1000)})
NUMPYS: Any = np.random.mtrand._rand


@pytest.fixture(scope="module", autouse=True)
def ours() -> Iterator[Any]:
    with stand_in.installed() as module:
        yield module


def observed(tag: Any, space: Any = BOX) -> Any:
    """An observation of each env that says which one it is."""
    flat = np.stack([np.asarray(tag, np.float32), np.asarray(tag, np.float32) + 0.5], 1)
    return flat if space is BOX else {"seen": flat, "id": np.asarray(tag, np.int64) % 1000}


def play(count: int, envs: int = 1, seed: int = 0, space: Any = BOX, ends: float = 0.25) -> list[tuple[Any, ...]]:
    """Random steps as the host's collector passes them to ``add``; next observations are those of what follows."""
    rng, found = np.random.default_rng(seed), []
    tag = np.arange(envs) * 100.0
    for _ in range(count):
        done = rng.random(envs) < ends
        infos = [{"TimeLimit.truncated": bool(d and rng.random() < 0.5)} for d in done]
        reward, after = rng.standard_normal(envs).astype(np.float32), tag + 1
        found.append((observed(tag, space), observed(after, space), tag[:, None] / 1e3, reward, done, infos))
        tag = np.where(done, after + 10, after)
    return found


def fed(buffer: Any, steps: list[tuple[Any, ...]]) -> Any:
    for step in steps:
        buffer.add(*step)
    return buffer


def timeouts_of(step: tuple[Any, ...]) -> Any:
    return np.array([info["TimeLimit.truncated"] for info in step[5]])


def by_first(batch: Any) -> dict[float, tuple[float, ...]]:
    """first observation -> (reward, done, first of the next observation, discount), of each row."""
    obs, after = batch.observations, batch.next_observations
    if isinstance(obs, dict):
        obs, after = obs["seen"], after["seen"]
    discounts = torch.ones(len(obs), 1) if batch.discounts is None else batch.discounts
    columns = [obs[:, 0], batch.rewards[:, 0], batch.dones[:, 0], after[:, 0], discounts[:, 0]]
    return {row[0]: tuple(row[1:]) for row in torch.stack(columns, 1).tolist()}


def windows(steps: list[tuple[Any, ...]], n: int, gamma: float) -> dict[float, tuple[float, ...]]:
    """The same of all n-step windows, from a plain list of the steps of several envs."""
    found: dict[float, tuple[float, ...]] = {}
    for env in range(len(steps[0][3])):
        for t in range(len(steps)):
            total, k = 0.0, 0
            for k, step in enumerate(steps[t : t + n]):
                total += gamma**k * float(step[3][env])
                if step[4][env] or timeouts_of(step)[env]:
                    break
            last = steps[t + k]
            terminal = float(last[4][env] and not timeouts_of(last)[env])
            found[float(steps[t][0][env, 0])] = (total, terminal, float(last[1][env, 0]), gamma ** (k + 1))
    return found


def assert_rows(found: dict[float, tuple[float, ...]], wanted: dict[float, tuple[float, ...]]) -> None:
    assert set(found) == set(wanted)
    for key, row in found.items():
        assert row == pytest.approx(wanted[key], abs=1e-5)


# -- replays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envs", [1, 3])
def test_a_replay_keeps_the_newest_steps_where_the_host_has_them(ours: Any, envs: int) -> None:
    buffer, steps = ours.ReplayBuffer(5 * envs, BOX, MOVE, "cpu", envs), play(13, envs)
    for count, step in enumerate(steps, 1):
        buffer.add(*step)
        assert (buffer.pos, buffer.full, buffer.size()) == (count % 5, count >= 5, min(count, 5))
    for row, t in zip(range(5), [10, 11, 12, 8, 9], strict=True):
        shown = [getattr(buffer, name)[row] for name in ("observations", "next_observations", "actions", "rewards")]
        for mine, given in zip(shown, steps[t][:4], strict=True):
            np.testing.assert_allclose(mine, given, rtol=1e-6)
        assert buffer.dones[row].tolist() == steps[t][4].tolist()
        assert buffer.timeouts[row].tolist() == timeouts_of(steps[t]).tolist()
    single = {key: row for t in range(8, 13) for key, row in windows(steps[t : t + 1], 1, 1.0).items()}
    assert_rows(by_first(buffer.sample(500)), single)
    buffer.reset()
    with pytest.raises(EmptyError):
        buffer.sample(1)
    fed(buffer, steps[:2])
    np.testing.assert_array_equal(buffer.observations[1], steps[1][0])  # the first row again, whatever was before
    assert (buffer.pos, buffer.full, buffer.size()) == (2, False, 2)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_windows_of_rewards_end_with_their_episodes_and_at_time_limits(ours: Any, n: int, once: bool) -> None:
    steps = play(30, 2)
    while steps[-1][4].any():
        steps.pop()
    buffer = ours.NStepReplayBuffer(200, BOX, MOVE, "cpu", 2, once, n_steps=n, gamma=0.9)
    complete = steps[:-1] if once else steps  # stored once, a transition is complete with the step after it
    assert_rows(by_first(fed(buffer, steps).sample(3000)), windows(complete, n, 0.9))


def test_a_time_limit_without_a_done_ends_a_window_and_is_no_end_of_the_task(ours: Any) -> None:
    buffer, steps = ours.NStepReplayBuffer(20, BOX, MOVE, "cpu", n_steps=3, gamma=1.0), play(6, ends=0)
    steps[2][5][0]["TimeLimit.truncated"] = True
    fed(buffer, steps)
    assert buffer.timeouts[:, 0].tolist()[:6] == [False, False, True, False, False, False]
    assert not buffer.dones.any()
    assert_rows(by_first(buffer.sample(300)), windows(steps, 3, 1.0))


def test_a_window_does_not_run_over_a_reset_that_only_the_observation_tells(ours: Any) -> None:
    """Also if ``n_steps`` was 1 when the steps came."""
    first, second = play(3, ends=0), play(3, seed=1, ends=0)
    second = [(obs + 500, after + 500, *rest) for obs, after, *rest in second]
    for n in (1, 3):
        buffer = fed(ours.NStepReplayBuffer(20, BOX, MOVE, "cpu", n_steps=n, gamma=1.0), first + second)
        buffer.n_steps = 3
        assert_rows(by_first(buffer.sample(300)), windows(first, 3, 1.0) | windows(second, 3, 1.0))


def test_priorities_decide_what_is_drawn(ours: Any) -> None:
    buffer = fed(ours.PrioritizedReplayBuffer(64, BOX, MOVE, "cpu", alpha=1.0, beta=1.0), play(64))
    batch = buffer.sample(64)
    errors = np.where(batch.indices == batch.indices[0], 63.0, 1.0)
    assert buffer.update_priorities(batch.indices, torch.as_tensor(errors)[:, None]) == 0
    again = buffer.sample(2000)
    often = again.indices == batch.indices[0]
    assert 0.4 < often.mean() < 0.6
    np.testing.assert_allclose(again.weights[often].numpy(), 1 / 63, rtol=1e-3)


def test_windows_are_refused_where_batches_have_no_discounts_to_go_with_them(ours: Any) -> None:
    """The host's warning about custom buffers tells users to pass these to whichever class it is."""
    for kind, space in ((ours.ReplayBuffer, BOX), (ours.DictReplayBuffer, DICT)):
        with pytest.raises(TypeError, match="n_steps"):
            kind(20, space, MOVE, "cpu", n_steps=3, gamma=0.9)


def test_observations_and_rewards_go_through_the_hosts_normalization(ours: Any) -> None:
    env = SimpleNamespace(normalize_obs=lambda obs: obs / 10, normalize_reward=lambda reward: reward * 2)
    steps = play(12)
    plain = windows(steps, 3, 0.9)
    wanted = {k / 10: (2 * reward, end, after / 10, gone) for k, (reward, end, after, gone) in plain.items()}
    buffer = fed(ours.NStepReplayBuffer(20, BOX, MOVE, "cpu", n_steps=3, gamma=0.9), steps)
    found = {round(key, 4): row for key, row in by_first(buffer.sample(300, env)).items()}
    assert_rows(found, {round(key, 4): row for key, row in wanted.items()})
    buffer._get_samples(np.arange(4), env)
    pickle.dumps(buffer)  # it does not hold the env, whose functions cannot be pickled


# -- the arrays -------------------------------------------------------------------------------------------------------


def test_what_is_written_to_the_arrays_is_what_is_sampled(ours: Any) -> None:
    buffer, steps = ours.NStepReplayBuffer(10, BOX, MOVE, "cpu", n_steps=3, gamma=1.0), play(10, ends=0)
    fed(buffer, steps)
    buffer.rewards[4] = 50.0
    buffer.dones[5, :] = True
    buffer.observations[7, 0] = [7000.0, 0.0]
    buffer.next_observations = buffer.next_observations + 1
    rows = by_first(buffer.sample(400))
    assert 7000.0 in rows
    assert rows[3.0] == pytest.approx((steps[3][3][0] + 50 + steps[5][3][0], 1.0, 7.0, 1.0))
    buffer.timeouts[5] = True
    assert by_first(buffer.sample(400))[3.0][1] == 0.0
    other = copy.deepcopy(buffer)
    other.rewards[:] = 0
    assert buffer.rewards.any()
    assert not other.sample(50).rewards.any()


def test_members_of_a_dictionary_are_the_storage_as_well(ours: Any) -> None:
    buffer, steps = ours.DictReplayBuffer(6, DICT, MOVE, "cpu", 2), play(3, 2, space=DICT)
    fed(buffer, steps)
    assert list(buffer.observations) == ["seen", "id"] or set(buffer.observations) == {"seen", "id"}
    buffer.observations["id"][1, 0] = 999
    assert 999 in buffer.sample(200).observations["id"]
    buffer.observations = {key: member * 0 for key, member in buffer.observations.items()}
    assert not buffer.sample(50).observations["seen"].any()
    with pytest.raises(AssertionError, match="Dict obs space only"):
        ours.DictReplayBuffer(6, BOX, MOVE)


def test_rows_written_in_place_count_once_pos_or_full_says_so(ours: Any) -> None:
    buffer, steps = ours.ReplayBuffer(6, BOX, MOVE, "cpu"), play(6)
    fed(buffer, steps[:2])
    for row in range(2, 6):
        arrays = buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones
        for array, value in zip(arrays, steps[row][:5], strict=True):
            array[row] = value
        buffer.timeouts[row] = timeouts_of(steps[row])
    buffer.pos = 4
    assert (buffer.pos, buffer.full, buffer.size()) == (4, False, 4)
    buffer.full = True
    assert (buffer.pos, buffer.full, buffer.size()) == (0, True, 6)
    assert_rows(by_first(buffer.sample(200)), {k: v for step in steps for k, v in windows([step], 1, 1.0).items()})
    buffer.add(*steps[0])
    for name, value in (("pos", 0), ("full", False), ("pos", 5)):
        with pytest.raises(AttributeError, match="7 so far"):
            setattr(buffer, name, value)
    assert buffer.pos == 1


def test_time_limits_are_terminals_if_they_are_not_to_be_handled(ours: Any) -> None:
    steps = play(30, ends=0.5)
    assert any(timeouts_of(step)[0] for step in steps)
    for handled in (True, False):
        buffer = fed(ours.ReplayBuffer(30, BOX, MOVE, "cpu", handle_timeout_termination=handled), steps)
        expected = {float(s[3][0]): float(s[4][0] and not (handled and timeouts_of(s)[0])) for s in steps}
        batch = buffer.sample(300)
        pairs = zip(batch.rewards.flatten().tolist(), batch.dones.flatten().tolist(), strict=True)
        assert all(expected[reward] == done for reward, done in pairs)
        assert bool(buffer.timeouts.any()) is handled


@pytest.mark.parametrize("name", ["observations", "rewards", "dones", "timeouts"])
def test_where_observations_are_stored_once_arrays_are_copies_that_refuse_to_be_written_to(
    ours: Any, name: str
) -> None:
    buffer = fed(ours.ReplayBuffer(12, BOX, MOVE, "cpu", optimize_memory_usage=True), play(5, ends=0))
    shown = getattr(buffer, name)
    with pytest.raises(ValueError, match="copy"):
        shown[0] = 1
    with pytest.raises(ValueError, match="copy"):
        shown[0][0] = 1
    with pytest.raises(ValueError, match="copy"):
        setattr(buffer, name, 1)
    mine = shown.copy()
    mine[0] = 1  # a copy of one's own may be
    assert (shown + 1 if shown.dtype != bool else ~shown).flags.writeable
    with pytest.raises(AttributeError, match="observations"):
        _ = buffer.next_observations
    with pytest.raises(AttributeError, match="written to the arrays"):
        buffer.full = True


def test_the_hosts_way_to_cut_episodes_off_before_it_resets_interrupts_them(ours: Any) -> None:
    buffer, steps = ours.ReplayBuffer(30, BOX, MOVE, "cpu", optimize_memory_usage=True), play(4, ends=0)
    fed(buffer, steps)
    buffer.dones[(buffer.pos - 1) % buffer.buffer_size] = True
    fed(buffer, [(steps[3][1], *steps[0][1:])])  # what would go on, had it not been cut off
    assert set(by_first(buffer.sample(200))) == {0.0, 1.0, 2.0}


def test_rows_can_be_asked_for_by_their_number(ours: Any) -> None:
    buffer, steps = ours.PrioritizedReplayBuffer(20, BOX, MOVE, "cpu", 2, n_steps=3, gamma=0.9), play(14, 2)
    fed(buffer, steps)
    wanted = windows(steps[4:], 3, 0.9)
    seen = {}
    for _ in range(20):
        seen |= by_first(buffer._get_samples(np.arange(10)))
    assert_rows(seen, wanted)
    assert buffer._get_samples(np.array([-1])).weights.tolist() == [[1.0]]
    with pytest.raises(IndexError):
        buffer._get_samples(np.array([10]))


def test_a_subclass_that_reads_rows_by_itself_is_asked_for_them(ours: Any) -> None:
    class Reading(ours.ReplayBuffer):
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            return self.rewards[batch_inds], super()._get_samples(batch_inds, env)

    buffer, steps = Reading(8, BOX, MOVE, "cpu"), play(8)
    fed(buffer, steps)
    NUMPYS.seed(3)
    rewards, batch = buffer.sample(5)
    assert rewards.tolist() == batch.rewards.tolist()
    with pytest.raises(TypeError, match=r"Reading\._get_samples would never be called"):
        Reading(8, BOX, MOVE, "cpu", optimize_memory_usage=True)

    class Goals(ours.HerReplayBuffer):
        def _sample_goals(self, batch_indices: Any, env_indices: Any) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Goals\._sample_goals"):
        Goals(8, Walk.space, MOVE, Walk())

    class Rollout(ours.RolloutBuffer):
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            return None

    with pytest.raises(TypeError, match="override get"):
        Rollout(8, BOX, MOVE)


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_without_a_seed_batches_follow_numpys_generator_whenever_it_is_seeded(ours: Any) -> None:
    steps, states = play(30), torch.get_rng_state()
    buffers = [fed(ours.PrioritizedReplayBuffer(50, BOX, MOVE, "cpu"), steps) for _ in range(2)]

    def drawn(buffer: Any, seed: int) -> list[Any]:
        NUMPYS.seed(seed)
        return [buffer.sample(6).indices.tolist() for _ in range(2)]

    first = drawn(buffers[0], 42)
    assert first[0] != first[1]
    assert drawn(buffers[1], 42) == first == drawn(buffers[0], 42)
    assert drawn(buffers[0], 43) != first
    NUMPYS.seed(42)
    assert [pickle.loads(pickle.dumps(buffers[0])).sample(6).indices.tolist()] == first[:1]
    assert torch.equal(torch.get_rng_state(), states)


def test_a_seed_of_its_own_leaves_numpys_generator_alone(ours: Any) -> None:
    before, steps = str(NUMPYS.get_state()), play(30)
    one, two, three = (fed(ours.ReplayBuffer(50, BOX, MOVE, "cpu", seed=seed), steps) for seed in (1, 1, 2))
    drawn = one.sample(8).rewards.tolist()
    assert drawn == two.sample(8).rewards.tolist() != three.sample(8).rewards.tolist()
    assert drawn != one.sample(8).rewards.tolist()
    assert str(NUMPYS.get_state()) == before


# -- hindsight --------------------------------------------------------------------------------------------------------


class Walk:
    """A vector env of one goal env: it says what infos its rewards were asked with."""

    space = spaces.Dict(
        dict.fromkeys(("observation", "achieved_goal", "desired_goal"), spaces.Box(-1e6, 1e6, (1,), np.float32))
    )

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any, Any]] = []

    def has_attr(self, name: str) -> bool:
        return False

    def env_method(self, name: str, achieved: Any, desired: Any, infos: Any, indices: Any) -> list[Any]:
        self.asked.append((achieved, desired, infos))
        for info in infos:
            info["seen"] = True  # as a careless env might
        return [np.where((achieved == desired).all(-1), 0.0, -1.0)]


def walked(buffer: Any, lengths: list[int], under_way: int = 0, envs: int = 1) -> Any:
    """Episodes of these lengths, cut off by time limits; then steps of one that goes on."""

    def seen(episode: int, t: int) -> dict[str, Any]:
        tag = (1000.0 * np.arange(envs) + 100.0 * (episode + 1) + t).astype(np.float32)[:, None]
        return {"observation": tag, "achieved_goal": tag.copy(), "desired_goal": np.zeros((envs, 1), np.float32)}

    for episode, length in enumerate([*lengths, under_way]):
        for t in range(length):
            done = np.full(envs, t == length - 1 and episode < len(lengths))
            infos = [
                {"TimeLimit.truncated": bool(d), "at": float(x)}
                for d, x in zip(done, seen(episode, t)["observation"][:, 0], strict=True)
            ]
            buffer.add(seen(episode, t), seen(episode, t + 1), np.zeros((envs, 1)), np.full(envs, -1.0), done, infos)
    return buffer


def test_goals_are_those_that_were_achieved_later_in_the_episode(ours: Any) -> None:
    buffer = walked(ours.HerReplayBuffer(40, Walk.space, MOVE, Walk(), "cpu"), [4, 2])
    batch = buffer.sample(2000)
    rows = zip(batch.observations["observation"], batch.observations["desired_goal"], batch.rewards, strict=True)
    found = {tuple(float(x) for x in row) for row in rows}
    wanted = {(100.0 * e + t, 100.0 * e + g, 0.0 if g == t + 1 else -1.0)
              for e, length in ((1, 4), (2, 2)) for t in range(length) for g in range(t + 1, length + 1)}  # fmt: skip
    assert found == wanted | {(100.0 * e + t, 0.0, -1.0) for e, length in ((1, 4), (2, 2)) for t in range(length)}
    assert not batch.dones.any()


def test_next_observations_are_shown_also_of_the_newest_step(ours: Any) -> None:
    buffer = walked(ours.HerReplayBuffer(60, Walk.space, MOVE, Walk(), "cpu", 2), [3, 2], 2, envs=2)
    before, after = (getattr(buffer, name)["observation"][..., 0] for name in ("observations", "next_observations"))
    assert before[:7, 0].tolist() == [100, 101, 102, 200, 201, 300, 301]
    assert after[:7, 0].tolist() == [101, 102, 103, 201, 202, 301, 302]
    assert (after[:7, 1] == after[:7, 0] + 1000).all()
    assert buffer.dones[:7, 0].tolist() == [False, False, True, False, True, False, False]
    with pytest.raises(AttributeError, match="`dones` says where episodes end"):
        _ = buffer.ep_length
    assert not hasattr(buffer, "anything else")


def test_infos_are_kept_and_rewards_are_asked_with_copies_of_those_of_their_steps(ours: Any) -> None:
    env = Walk()
    buffer = walked(ours.HerReplayBuffer(12, Walk.space, MOVE, env, "cpu", copy_info_dict=True), [4, 3, 5], 2)
    for one in (buffer, pickle.loads(pickle.dumps(buffer))):
        if one.env is None:
            one.set_env(env)
        env.asked.clear()
        one.sample(300)
        ((achieved, _, infos),) = env.asked
        assert len(infos) == len(achieved) > 200
        assert all(info["at"] == reached - 1 for info, reached in zip(infos, achieved[:, 0], strict=True))
        assert not any("seen" in info for info in one.infos.reshape(-1))
    plain = walked(ours.HerReplayBuffer(40, Walk.space, MOVE, env, "cpu"), [4])
    env.asked.clear()
    plain.sample(50)
    assert all(info == {"seen": True} for info in env.asked[0][2])


# -- the host's own buffers -------------------------------------------------------------------------------------------


def original(steps: list[tuple[Any, ...]], size: int, space: Any = BOX, once: bool = False, **more: Any) -> Any:
    """What the host's replay holds after these steps, as plain arrays."""
    envs = len(steps[0][3])

    def empty(shape: Any, dtype: Any = np.float32) -> Any:
        if isinstance(shape, dict):
            return {key: empty(member, space[key].dtype) for key, member in shape.items()}
        return np.zeros((size, envs, *shape), dtype)

    def put(column: Any, row: int, value: Any) -> None:
        for key in column if isinstance(column, dict) else [None]:
            target, given = (column, value) if key is None else (column[key], value[key])
            target[row] = given.reshape(target[row].shape)

    shape = stand_in.obs_shape(space)
    made = SimpleNamespace(
        buffer_size=size, n_envs=envs, observation_space=space, action_space=MOVE, device=torch.device("cpu"),
        optimize_memory_usage=once, handle_timeout_termination=not once, observations=empty(shape),
        actions=np.zeros((size, envs, 1), np.float32), rewards=np.zeros((size, envs), np.float32),
        dones=np.zeros((size, envs), np.float32), timeouts=np.zeros((size, envs), np.float32),
        infos=np.full((size, envs), None), **more,
    )  # fmt: skip
    if not once:
        made.next_observations = empty(shape)
    for count, step in enumerate(steps):
        row = count % size
        put(made.observations, row, step[0])
        put(*((made.observations, (row + 1) % size) if once else (made.next_observations, row)), step[1])
        made.actions[row], made.rewards[row], made.dones[row] = step[2], step[3], step[4]
        made.timeouts[row] = 0 if once else timeouts_of(step)
        made.infos[row] = step[5]
    made.pos, made.full = len(steps) % size, len(steps) >= size
    return made


@pytest.mark.parametrize("count", [9, 37])
@pytest.mark.parametrize("space", [BOX, DICT], ids=["box", "dict"])
def test_a_replay_of_the_host_becomes_ours_with_all_that_it_holds(ours: Any, space: Any, count: int) -> None:
    steps = play(count, 2, space=space)
    made = ours.NStepReplayBuffer.from_original(original(steps, 12, space), n_steps=3, gamma=0.9)
    assert type(made) is ours.NStepReplayBuffer
    assert ours.ReplayBuffer.from_original(made) is made
    flat = [(step[0] if space is BOX else step[0]["seen"], step[1] if space is BOX else step[1]["seen"], *step[2:])
            for step in steps[-12:]]  # fmt: skip
    assert_rows(by_first(made.sample(1500)), windows(flat, 3, 0.9))
    assert (made.full, made.size()) == (count > 12, min(count, 12))
    fed(made, play(3, 2, space=space))


def test_a_pickled_state_of_the_hosts_replay_is_restored_as_ours(ours: Any) -> None:
    steps = play(20, 2)
    state = copy.deepcopy(vars(original(steps, 12)))
    made = ours.ReplayBuffer.__new__(ours.ReplayBuffer)
    made.__setstate__(state)
    assert (made.pos, made.full, made.size()) == (0, True, 12)
    assert_rows(by_first(made.sample(1500)), windows(steps[-12:], 1, 1.0))


@pytest.mark.parametrize("count", [0, 2, 5])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("name", ["RolloutBuffer", "DictRolloutBuffer"])
def test_a_rollout_of_the_host_becomes_ours_before_and_after_it_was_read(
    ours: Any, name: str, read: bool, count: int
) -> None:
    """The host flattens the columns that it serves, env by env, at the first ``get``."""
    rng, space = np.random.default_rng(0), DICT if name.startswith("Dict") else BOX
    seen = rng.standard_normal((5, 2, 2)).astype(np.float32)
    obs: Any = {"seen": seen, "id": rng.integers(9, size=(5, 2, 1))} if space is DICT else seen
    names = ["rewards", "episode_starts", "values", "log_probs", "advantages", "returns"]
    columns = {name: rng.standard_normal((5, 2)).astype(np.float32) for name in names}
    columns |= {"observations": obs, "actions": rng.standard_normal((5, 2, 1)).astype(np.float32)}

    def flat(column: Any) -> Any:
        if isinstance(column, dict):
            return {key: flat(member) for key, member in column.items()}
        return column.swapaxes(0, 1).reshape(10, *(column.shape[2:] or (1,)))

    stored = {key: flat(x) if read and key not in ("rewards", "episode_starts") else x for key, x in columns.items()}
    found = SimpleNamespace(
        buffer_size=5, n_envs=2, observation_space=space, action_space=MOVE, device="cpu", gae_lambda=0.9, gamma=0.97,
        generator_ready=read, pos=count, full=count == 5, **stored,
    )  # fmt: skip
    kind = getattr(ours, name)
    made = kind.from_original(found, seed=0, gamma=0.5)
    assert kind.from_original(made) is made
    assert (made.pos, made.full, made.gae_lambda, made.gamma) == (count, count == 5, 0.9, 0.5)
    for key, column in columns.items():
        shown = getattr(made, key)
        for member in column if isinstance(column, dict) else [...]:
            np.testing.assert_array_equal(shown[member], column[member])
    if count == 5:
        (batch,) = made.get()
        assert sorted(batch.returns.tolist()) == sorted(columns["returns"].flatten().tolist())
        made.reset()


def test_windows_of_a_converted_replay_stop_where_an_env_was_reset_without_an_end(ours: Any) -> None:
    first, second = play(3, ends=0), [(obs + 500, after + 500, *rest) for obs, after, *rest in play(3, ends=0)]
    found = original(first + second, 10, n_steps=3, gamma=1.0)
    for options in ({}, {"optimize_memory_usage": True}):
        made = ours.NStepReplayBuffer.from_original(found, **options)
        assert (made.n_steps, made.gamma) == (3, 1.0)
        wanted = windows(first, 3, 1.0) | windows(second, 3, 1.0)
        rows = by_first(made.sample(300))
        assert_rows({k: v for k, v in rows.items() if k < 400}, {k: v for k, v in wanted.items() if k < 400})
        if not options:
            assert_rows(rows, wanted)


@pytest.mark.parametrize("count", [8, 31])
def test_a_replay_of_the_host_that_saved_memory_is_converted_but_for_what_it_overwrote(ours: Any, count: int) -> None:
    steps = play(count, ends=0)
    made = ours.ReplayBuffer.from_original(original(steps, 10, once=True))
    kept = steps[-10:][count > 10 :]  # the newest next observation lies where the oldest step was
    wanted = {k: v for step in kept[:-1] for k, v in windows([step], 1, 1.0).items()}
    assert_rows(by_first(made.sample(300)), wanted)


def test_a_hindsight_replay_of_the_host_is_converted_with_its_env_and_its_infos(ours: Any) -> None:
    recorded: list[Any] = []
    walked(SimpleNamespace(add=lambda *step: recorded.append(step)), [4, 3], 2)
    env, goal = Walk(), stand_in.GoalSelectionStrategy.FINAL
    more = {"env": env, "n_sampled_goal": 3, "goal_selection_strategy": goal, "copy_info_dict": True}
    made = ours.HerReplayBuffer.from_original(original(recorded, 20, Walk.space, **more))
    assert (made.n_sampled_goal, made.goal_selection_strategy, made.env) == (3, goal, env)
    batch = made.sample(400)
    obs = batch.observations
    aims = {float(g) for a, g in zip(obs["observation"], obs["desired_goal"], strict=True) if a < 200}
    assert aims == {0.0, 104.0}
    infos, achieved = env.asked[0][2], env.asked[0][0]
    assert all(info["at"] == reached - 1 for info, reached in zip(infos, achieved[:, 0], strict=True))


def test_a_model_with_the_mixin_gets_ours_whatever_class_was_pickled(ours: Any) -> None:
    class Algorithm:
        replay_buffer: Any = None
        replay_buffer_class, replay_buffer_kwargs = ours.ReplayBuffer, {"seed": 7}

        def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
            self.replay_buffer = path

    class Model(ours.ConvertsReplays, Algorithm):
        pass

    model = Model()
    for loaded in (original(play(5), 10), ours.ReplayBuffer(10, BOX, MOVE)):
        model.load_replay_buffer(loaded)
        assert type(model.replay_buffer) is ours.ReplayBuffer
        assert internals.seed(model.replay_buffer) == (None if loaded is model.replay_buffer else 7)
    assert model.replay_buffer is loaded


# -- rollouts ---------------------------------------------------------------------------------------------------------


def rolled(ours: Any, steps: list[tuple[Any, ...]], **options: Any) -> tuple[Any, Any]:
    """A rollout of these steps, and the done flags after it."""
    buffer = ours.RolloutBuffer(len(steps), BOX, MOVE, "cpu", 0.9, 0.95, len(steps[0][3]), **options)
    start = np.ones(buffer.n_envs, bool)
    for t, step in enumerate(steps):
        value = torch.arange(buffer.n_envs)[:, None] + float(t)
        buffer.add(step[0], step[2], step[3], start, value, -torch.arange(buffer.n_envs) - float(t))
        start = step[4]
    return buffer, start


def test_advantages_are_those_of_a_loop_over_the_steps(ours: Any) -> None:
    steps = play(9, 3)
    buffer, ends = rolled(ours, steps)
    buffer.compute_returns_and_advantage(torch.full((3, 1), 2.0), ends)
    advantage, after = np.zeros(3), np.full(3, 2.0)
    for t in range(8, -1, -1):
        value, goes_on = np.arange(3.0) + t, 1.0 - steps[t][4]
        advantage = steps[t][3] + 0.95 * goes_on * after - value + 0.95 * 0.9 * goes_on * advantage
        after = value
        np.testing.assert_allclose(buffer.advantages[t], advantage, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(buffer.returns[t], advantage + value, rtol=1e-4, atol=1e-5)
    batches = list(buffer.get(10))
    assert [len(batch.actions) for batch in batches] == [10, 10, 7]
    flat = torch.cat([torch.stack([b.old_values, b.old_log_prob, b.advantages, b.returns], 1) for b in batches])
    columns = buffer.values, buffer.log_probs, buffer.advantages, buffer.returns
    assert sorted(flat.tolist()) == sorted(np.stack([x.reshape(-1) for x in columns], 1).tolist())
    with pytest.raises(FullError):
        buffer.add(steps[0][0], steps[0][2], steps[0][3], ends, torch.zeros(3, 1), torch.zeros(3))


def test_before_the_returns_are_computed_a_rollout_serves_zeros_of_them(ours: Any) -> None:
    buffer, ends = rolled(ours, play(4, 2))
    for _ in range(2):
        (batch,) = buffer.get()
        assert len(batch.advantages) == 8
        assert not batch.advantages.any()
        assert not batch.returns.any()
        buffer.compute_returns_and_advantage(torch.ones(2), ends)
        assert buffer.advantages.any()
        buffer.reset()
        assert not buffer.advantages.any()
        buffer.full = True


def test_observations_that_are_single_numbers_are_served_with_a_last_axis(ours: Any) -> None:
    buffer = ours.RolloutBuffer(4, spaces.Box(-9, 9, (), np.float32), MOVE, "cpu", n_envs=2)
    for t in range(4):
        buffer.add(
            np.full(2, t, np.float32), np.zeros((2, 1)), np.zeros(2), np.zeros(2), torch.zeros(2), torch.zeros(2)
        )
    for batch in buffer.get(5):
        assert batch.observations.shape == (len(batch.actions), 1)


def test_the_columns_of_a_rollout_are_its_storage(ours: Any) -> None:
    buffer, ends = rolled(ours, play(4, 2))
    buffer.rewards[2] = [10.0, 20.0]
    buffer.observations = buffer.observations + 1000
    buffer.episode_starts[3] = 1
    buffer.compute_returns_and_advantage(torch.zeros(2), ends)
    np.testing.assert_allclose(buffer.returns[2], [10.0, 20.0], rtol=1e-6)  # the next step begins an episode
    assert (next(iter(buffer.get())).observations >= 1000).all()
    other = pickle.loads(pickle.dumps(buffer))
    other.returns = 3.0
    assert (next(iter(other.get())).returns == 3).all()
    assert (other.pos, other.full) == (4, True)


def test_rows_of_a_rollout_written_in_place_count_once_pos_or_full_says_so(ours: Any) -> None:
    buffer = ours.RolloutBuffer(4, BOX, MOVE, "cpu", n_envs=2)
    with pytest.raises(AssertionError, match="not full"):
        buffer.get()
    buffer.rewards[:] = np.arange(8).reshape(4, 2)
    buffer.values = 1.0
    buffer.pos = 3
    assert (buffer.pos, buffer.full) == (3, False)
    buffer.full = True
    buffer.compute_returns_and_advantage(torch.zeros(2), np.ones(2, bool))
    assert sorted(next(iter(buffer.get())).returns.tolist())[:2] != [0.0, 0.0]
    for name, value in (("pos", 2), ("full", False)):
        with pytest.raises(AttributeError, match="4 so far"):
            setattr(buffer, name, value)


def test_without_a_seed_the_order_of_a_rollout_follows_numpys_generator(ours: Any) -> None:
    orders = []
    for seed in (42, 42, 43):
        buffer, _ = rolled(ours, play(8, 2))
        NUMPYS.seed(seed)
        orders.append([batch.old_values.tolist() for _ in range(2) for batch in buffer.get(6)])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:3] != orders[0][3:]


def test_a_subclass_may_allocate_columns_of_its_own_when_it_is_reset(ours: Any) -> None:
    class Masked(ours.DictRolloutBuffer):
        def reset(self) -> None:
            self.masks = np.ones((self.buffer_size, self.n_envs))
            super().reset()

    assert Masked(3, DICT, MOVE, n_envs=2).masks.shape == (3, 2)
