"""Live buffers of other libraries, of copies of them and of relive's drop-ins: each is read as what it means.

The classes here have the attributes of the library's own, which are read in tests/peers where those are installed.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive
from relive.compat import agilerl, embodichain, fasttd3, pytorchrl, rsl_rl, velora
from relive.exchange import log_of
from relive.look.experience import Experience
from relive.look.readers import experience_of
from support import loops
from support.loops import Arrays, blocks

N = 3
OBS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


def rules(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings}


def made(name: str, **attributes: Any) -> Any:
    """An object of a class of this name, somewhere in a user's code."""
    return type(name, (), attributes)()


def ends_of(rows: Arrays) -> Any:
    return rows["terminated"] | rows["truncated"]


def as_read(found: Experience, rows: Arrays, *, flags: str = "both") -> None:
    """Experience is what was stored, env by env."""

    def env_major(name: str) -> Any:
        return rows[name].swapaxes(0, 1).reshape(-1, *rows[name].shape[2:])

    (obs,) = found.obs.values()
    np.testing.assert_array_equal(obs, env_major("obs"))
    np.testing.assert_array_equal(found.reward, env_major("reward"))
    np.testing.assert_array_equal(np.bincount(found.env), np.full(N, len(rows["reward"])))
    if flags == "both":
        assert found.truncated is not None
        np.testing.assert_array_equal(found.terminated, env_major("terminated"))
        np.testing.assert_array_equal(found.truncated, env_major("truncated"))
    else:
        assert found.truncated is None
        ends = ends_of(rows)
        expected = np.append(ends[:-1], 0 * ends[-1:], 0) if flags == "starts" else ends
        np.testing.assert_array_equal(found.ended, expected.swapaxes(0, 1).reshape(-1))
    if found.next_obs is not None:
        (after,) = found.next_obs.values()
        np.testing.assert_array_equal(after, env_major("next_obs"))


def started(rows: Arrays) -> Any:
    """Whether each step is its episode's first."""
    return np.concatenate([np.ones((1, N), bool), ends_of(rows)[:-1]])


def of_cleanrl(rows: Arrays) -> Arrays:
    zeros = torch.zeros(rows["reward"].shape)
    return {"obs": torch.from_numpy(rows["obs"]), "actions": torch.from_numpy(rows["action"]), "logprobs": zeros,
            "rewards": torch.from_numpy(rows["reward"]), "dones": torch.from_numpy(started(rows)).float(),
            "values": zeros, "next_obs": torch.zeros(N, 3)}  # fmt: skip


def test_cleanrls_arrays_flag_the_step_before() -> None:
    rows = blocks()
    arrays = of_cleanrl(rows)
    as_read(experience_of(arrays), rows, flags="starts")
    as_read(experience_of({**arrays, "next_done": torch.from_numpy(ends_of(rows)[-1])}), rows, flags="done")
    assert relive.audit(arrays).source == "CleanRL arrays"
    named = {"obs": rows["obs"], "rewards": rows["reward"], "episode_starts": started(rows)}
    as_read(experience_of(named), rows, flags="starts")
    report = relive.audit(of_cleanrl(blocks(loops.ignored_steps)))
    assert "autoreset-step-stored" in rules(report), str(report)
    with pytest.raises(relive.errors.ShapeError, match="flattened"):
        relive.audit({name: x.flatten(0, 1) for name, x in arrays.items() if name != "next_obs"})


def of_fast_td3(rows: Arrays, size: int) -> Any:
    steps = len(rows["reward"])
    kept = {name: torch.from_numpy(np.roll(x[-size:], steps % size if steps >= size else 0, 0).swapaxes(0, 1).copy())
            for name, x in {**rows, "done": ends_of(rows)}.items()}  # fmt: skip
    if steps < size:
        kept = {name: torch.cat([x, torch.zeros(N, size - steps, *x.shape[2:])], 1) for name, x in kept.items()}
    return made(
        "SimpleReplayBuffer", observations=kept["obs"], next_observations=kept["next_obs"], actions=kept["action"],
        rewards=kept["reward"], dones=kept["done"].long(), truncations=kept["truncated"].long(), ptr=steps,
        buffer_size=size,
    )  # fmt: skip


def test_fasttd3s_ring_is_read_in_the_order_of_time() -> None:
    rows = blocks()
    as_read(experience_of(of_fast_td3(rows, 4000)), rows)
    as_read(experience_of(of_fast_td3(rows, 100)), {name: x[-100:] for name, x in rows.items()})
    assert not relive.audit(of_fast_td3(rows, 4000)).findings
    assert rules(relive.audit(of_fast_td3(blocks(loops.reset_as_final), 200))) == {"reset-as-final-observation"}


class Table:
    """As much of a ``datasets.Dataset`` as a LeRobotDataset's is read by."""

    def __init__(self, columns: Arrays) -> None:
        self.columns, self.column_names = columns, list(columns)

    def with_format(self, kind: str) -> Table:
        assert kind == "numpy"
        return self

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def of_lerobot(episodes: list[Arrays], **further: Any) -> Any:
    rows = loops.stored(episodes)
    lengths = [len(episode["reward"]) for episode in episodes]
    columns = {
        "observation.state": rows["obs"], "action": rows["action"], "timestamp": np.zeros(len(rows["reward"])),
        "episode_index": np.repeat(np.arange(len(episodes)), lengths),
        "frame_index": np.concatenate([np.arange(length) for length in lengths]), **further,
    }  # fmt: skip
    features = {name: {"dtype": "float32"} for name in columns} | {"observation.images.top": {"dtype": "video"}}
    return made("LeRobotDataset", hf_dataset=Table(columns), features=features)


def test_a_lerobot_data_set_ends_its_episodes_where_the_next_one_begins() -> None:
    episodes = loops.walk(20)
    rows = loops.stored(episodes)
    found = experience_of(of_lerobot(episodes))
    assert list(found.obs) == [("state",)]
    np.testing.assert_array_equal(found.ended, rows["terminated"] | rows["truncated"])
    assert found.truncated is None
    assert "it keeps no rewards" in found.lacks
    assert relive.audit(of_lerobot(episodes)).ok
    flagged = of_lerobot(episodes, **{"next.reward": rows["reward"], "next.done": rows["terminated"]})
    found = experience_of(flagged)
    np.testing.assert_array_equal(found.truncated, rows["truncated"])
    assert rules(relive.audit(flagged)) == {"truncation-without-final-observation"}


def test_lerobots_replay_buffer_keeps_no_final_observation_where_it_saves_memory() -> None:
    rows = loops.stored(loops.walk())
    size = len(rows["reward"])
    states = {"observation.state": torch.from_numpy(rows["obs"])}
    after = {"observation.state": torch.from_numpy(rows["next_obs"])}
    common: Any = {"actions": rows["action"], "rewards": torch.from_numpy(rows["reward"]), "position": 0,
                   "dones": torch.from_numpy(rows["terminated"]), "truncateds": torch.from_numpy(rows["truncated"]),
                   "size": size, "capacity": size}  # fmt: skip
    assert not relive.audit(made("ReplayBuffer", states=states, next_states=after, **common)).findings
    once = made("ReplayBuffer", states=states, next_states=states, optimize_memory=True, **common)
    assert "truncation-without-final-observation" in rules(relive.audit(once))
    assert not len(experience_of(made("ReplayBuffer", **{**common, "size": 0}, states=0)))


def flat(rows: Arrays) -> Arrays:
    """Rows as a loop over N envs adds them to a flat buffer: ``[T * N, ...]``."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}


def of_agilerl(rows: Arrays, n: int = 1) -> Any:
    steps = {"obs": rows["obs"], "next_obs": rows["next_obs"], "action": rows["action"],
             "reward": rows["reward"][:, None], "done": rows["terminated"][:, None].astype(np.float32)}  # fmt: skip
    size = len(rows["reward"])
    storage = TensorDict({name: torch.from_numpy(x) for name, x in steps.items()}, [size])
    further: Any = {"n_step": n} if n > 1 else {}
    return type("ReplayBuffer", (), {
        "storage": storage, "_cursor": 0, "max_size": size, "__len__": lambda self: size, **further})()  # fmt: skip


@pytest.mark.parametrize("loop", [loops.stored, loops.ignored_steps, loops.reset_as_final])
def test_flat_rows_of_several_envs_are_sorted_by_what_they_lead_to(loop: Any) -> None:
    rows = blocks(loop)
    found = experience_of(of_agilerl(flat(rows)))
    (obs,), (after,) = found.obs.values(), (found.next_obs or {}).values()
    assert found.follows.any()
    np.testing.assert_array_equal(after[:-1][found.follows[:-1]], obs[1:][found.follows[:-1]])
    assert found.place is not None
    np.testing.assert_array_equal(obs, flat(rows)["obs"][found.place])
    found_rules = rules(relive.audit(of_agilerl(flat(rows))))
    expected: Any = {loops.stored: set(), loops.ignored_steps: {"autoreset-step-stored"},
                     loops.reset_as_final: {"reset-as-final-observation"}}  # fmt: skip
    assert found_rules == expected[loop]


def test_flat_rows_whose_observations_come_again_have_no_order() -> None:
    rng = np.random.default_rng(0)
    rows = {"obs": rng.integers(0, 5, (400, 1)), "next_obs": rng.integers(0, 5, (400, 1)),
            "action": rng.integers(0, 2, (400, 1)), "reward": rng.normal(size=400),
            "terminated": rng.random(400) < 0.1}  # fmt: skip
    found = experience_of(of_agilerl(rows))
    assert not found.ordered
    assert not found.follows.any()
    assert relive.audit(of_agilerl(rows)).ok


def test_n_step_rows_of_several_envs_are_sorted_by_their_stride() -> None:
    rows = blocks(loops.n_step)
    report = relive.audit(of_agilerl(flat(rows), n=3))
    assert "n-step-over-an-end" in rules(report), str(report)


def test_a_copy_of_stable_baselines3s_buffer_in_a_users_code_is_known_by_its_attributes() -> None:
    rows = blocks()
    buffer = made(
        "ReplayBuffer", observations=rows["obs"], next_observations=rows["next_obs"], actions=rows["action"],
        rewards=rows["reward"], dones=rows["terminated"].astype(np.float32), timeouts=np.zeros_like(rows["reward"]),
        pos=0, full=True, handle_timeout_termination=False,
    )  # fmt: skip
    found = experience_of(buffer)
    assert found.truncated is None
    np.testing.assert_array_equal(found.terminated, rows["terminated"].T.reshape(-1))


@pytest.mark.parametrize("steps", [0, 3, 5, 8, 10])
def test_a_ring_of_stable_baselines3_that_saves_memory_has_no_step_in_the_row_of_its_newest_observation(
    steps: int,
) -> None:
    size, envs = 5, 2
    ring: Any = {"observations": np.zeros((size, envs, 1)), "actions": np.zeros((size, envs, 1), int),
                 "rewards": np.zeros((size, envs)), "dones": np.zeros((size, envs)),
                 "timeouts": np.zeros((size, envs))}  # fmt: skip
    pos = 0
    for t in range(steps):  # as its add() does: the next observation goes to the next row
        at = np.array([t, 100 + t])
        ring["observations"][pos], ring["actions"][pos], ring["rewards"][pos] = at[:, None], at[:, None], at
        ring["observations"][(pos + 1) % size] = at[:, None] + 1
        pos = (pos + 1) % size
    buffer = made("ReplayBuffer", **ring, pos=pos, full=steps >= size, optimize_memory_usage=True,
                  handle_timeout_termination=False)  # fmt: skip
    kept = np.arange(steps)[-(size - 1) :] if steps >= size else np.arange(steps)
    wanted = np.concatenate([kept, 100 + kept])
    found, log = experience_of(buffer), log_of(buffer)
    np.testing.assert_array_equal(found.obs[()][:, 0], wanted)
    np.testing.assert_array_equal(found.action[()][:, 0], wanted)
    np.testing.assert_array_equal(found.reward, wanted)
    np.testing.assert_array_equal(log.fields["next_obs"][:, 0], wanted + 1)
    assert not log.fields["truncated"].any()
    if steps:
        np.testing.assert_array_equal(log.replay().data()["next_obs"][:, 0], wanted + 1)


def of_torchrl(ring: Any, steps: int, along: int = 1) -> Any:
    """As much of a TorchRL buffer with a storage of two axes as it is read by; ``along`` 1 gives ``[N, T]``."""
    rows, envs = ring.batch_size
    storage = type("Storage", (), {"max_size": rows * envs, "ndim": 2,
                                   "__len__": lambda self: min(steps, rows) * envs})()  # fmt: skip
    return type("ReplayBuffer", (), {
        "__module__": "torchrl.data", "_storage": storage, "_writer": made("Writer", _cursor=steps % rows),
        "__getitem__": lambda self, index: ring[: min(steps, rows)].transpose(along, 0), "dim_extend": along,
    })()  # fmt: skip


@pytest.mark.parametrize("values", [2, 10**6])
@pytest.mark.parametrize("rows", [20, 40])
@pytest.mark.parametrize("along", [0, 1])
def test_a_storage_of_torchrl_with_two_axes_says_which_rows_are_of_one_env(values: int, rows: int, along: int) -> None:
    log = log_of(of_torchrl(loops.ring_of(30, N, values, rows), 30, along))
    kept = np.arange(30)[-rows:]
    np.testing.assert_array_equal(log.fields["reward"], np.concatenate([100 * env + kept for env in range(N)]))
    assert [len(episode.steps) for episode in log.replay().episodes()] == [len(kept)] * N


def test_a_trajectory_of_torchrl_that_begins_without_an_end_before_it_does_not_go_on() -> None:
    ring = loops.ring_of(30, N, 1, 30)
    ring["collector"] = TensorDict({"traj_ids": (torch.arange(30) >= 12).long()[:, None].expand(30, N)}, [30, N])
    found, log = experience_of(of_torchrl(ring, 30)), log_of(of_torchrl(ring, 30))
    assert np.flatnonzero(~found.follows).tolist() == [11, 29, 41, 59, 71, 89]
    assert [len(episode.steps) for episode in log.replay().episodes()] == [12, 18] * N


def test_blocks_of_torchrl_that_lie_env_by_env_are_known_by_their_observations() -> None:
    blocks = [loops.ring_of(30, N, 10**6, 30)[at : at + 10].transpose(0, 1) for at in (0, 10, 20)]
    log = log_of(of_torchrl(torch.cat(blocks).contiguous(), 3 * N, along=0))  # [N, T] blocks, along the first axis
    assert [len(episode.steps) for episode in log.replay().episodes()] == [10] * 3 * N  # a block stays whole


def test_steps_of_torchrl_without_an_observation_are_refused_by_name() -> None:
    ring = loops.ring_of(30, N, 10, 30).exclude(("next", "observation"))
    with pytest.raises(
        relive.errors.FieldError, match=r"got observation, action, next in steps and reward, .*store both"
    ):
        relive.audit(of_torchrl(ring, 30))


# -- relive's drop-ins ----------------------------------------------------------------------------------------------


def of_rsl_rl(rows: Arrays, time_outs: bool) -> Any:
    def given(t: int) -> Any:
        return TensorDict({"policy": torch.from_numpy(rows["obs"][t])}, [N])

    storage = rsl_rl.RolloutStorage("rl", N, len(rows["reward"]), given(0), (2,))
    for t in range(len(rows["reward"])):
        step = rsl_rl.RolloutStorage.Transition()
        step.observations, step.actions = given(t), torch.from_numpy(rows["action"][t])
        step.rewards, step.dones = torch.from_numpy(rows["reward"][t]), torch.from_numpy(ends_of(rows)[t])
        step.values, step.actions_log_prob = torch.zeros(N, 1), torch.zeros(N)
        step.distribution_params = (torch.zeros(N, 2),)
        if time_outs:
            step.time_outs, step.final_values = torch.from_numpy(rows["truncated"][t]), torch.ones(N)
        storage.add_transition(step)
    return storage


def test_the_drop_in_for_rsl_rl() -> None:
    rows = {name: x[:150] for name, x in blocks().items()}
    plain, timed = of_rsl_rl(rows, False), of_rsl_rl(rows, True)
    as_read(experience_of(plain), rows, flags="done")
    assert not experience_of(plain).judge_limits
    as_read(experience_of(timed), rows)
    assert not relive.audit(timed).findings


def test_the_drop_in_for_agilerl_leaves_out_ignored_steps() -> None:
    rows = blocks(loops.ignored_steps)
    for mode, expected in ((None, {"autoreset-step-stored"}), ("next_step", set[str]())):
        buffer = agilerl.RolloutBuffer(len(rows["reward"]), OBS, BOX, N, autoreset_mode=mode)
        for t in range(len(rows["reward"])):
            step = {name: x[t] for name, x in rows.items() if name not in ("terminated", "truncated")}
            buffer.add(**step, done=ends_of(rows)[t], value=np.zeros(N), log_prob=np.zeros(N))
        report = relive.audit(buffer)
        assert rules(report) - {"time-limit-as-terminal"} == expected, str(report)
        assert report.source == "relive.compat.agilerl RolloutBuffer"


def test_the_drop_in_for_embodichain() -> None:
    rows = blocks()
    buffer = embodichain.RolloutBuffer(N, len(rows["reward"]), 3, 2)
    rollout = buffer.start_rollout()
    for name in ("obs", "action", "reward", "terminated", "truncated"):
        rollout[name][:, :-1] = torch.from_numpy(rows[name].swapaxes(0, 1))
    as_read(experience_of(buffer), rows)
    assert rules(relive.audit(buffer)) == {"truncation-without-final-observation"}
    rollout["final_value"].fill_(1.0)
    assert not relive.audit(buffer).findings


@pytest.mark.filterwarnings("ignore::relive.errors.EpisodeEndWarning")
def test_the_drop_in_for_fasttd3() -> None:
    for rows, expected in ((blocks(), set[str]()), (blocks(loops.reset_as_final), {"reset-as-final-observation"})):
        buffer = fasttd3.SimpleReplayBuffer(N, 2 * len(rows["reward"]), 3, 2, 3)
        for t in range(len(rows["reward"])):
            step = {name: torch.from_numpy(x[t]) for name, x in rows.items()}
            following = {
                "observations": step["next_obs"], "rewards": step["reward"], "truncations": step["truncated"],
                "dones": step["terminated"] | step["truncated"],
            }  # fmt: skip
            buffer.extend({"observations": step["obs"], "actions": step["action"], "next": following})
        found, report = experience_of(buffer), relive.audit(buffer)
        assert N * (len(rows["reward"]) - 2) <= len(found) < N * len(rows["reward"])  # two of each env wait
        assert found.truncated is not None
        assert found.truncated.any()
        assert not (found.truncated & found.terminated).any()
        assert (report.source, rules(report)) == ("relive.compat.fasttd3 SimpleReplayBuffer", expected)


def test_a_drop_in_without_a_step_is_known() -> None:
    found = relive.inspect(fasttd3.SimpleReplayBuffer(N, 10, 3, 2, 3))
    assert (found.source, found.num_steps) == ("relive.compat.fasttd3 SimpleReplayBuffer", 0)


def test_the_drop_in_for_velora() -> None:
    rows = flat(blocks())
    buffer = velora.ReplayBuffer(len(rows["reward"]), 3, 2, 4)
    assert not len(experience_of(buffer))
    states: Any = {name: torch.from_numpy(x) for name, x in rows.items()}
    done = torch.from_numpy(ends_of(rows))
    hidden = torch.zeros(len(done), 4)
    buffer.add_multi(states["obs"], states["action"], states["reward"], states["next_obs"], done, hidden)
    report = relive.audit(buffer)
    assert rules(report) <= {"time-limit-as-terminal"}, str(report)
    assert report.episodes == int(done.sum())


def test_the_drop_in_for_pytorchrl() -> None:
    rows = blocks(loops.reset_as_final)

    class Plain:
        is_recurrent, gamma, sequence_overlap = False, 0.99, 0.0

    buffer = pytorchrl.ReplayBuffer(len(rows["reward"]), "cpu", Plain(), Plain(), None)
    assert not len(experience_of(buffer))
    for t in range(len(rows["reward"])):
        column = {name: torch.from_numpy(x[t].reshape(N, -1)).float() for name, x in rows.items()}
        done = torch.from_numpy(ends_of(rows)[t]).float().unsqueeze(1)
        buffer.insert_transition({
            "Observation": column["obs"], "NextObservation": column["next_obs"], "Action": column["action"],
            "Reward": column["reward"], "Done": done * 0, "NextDone": done, "RecurrentHiddenStates": None,
            "NextRecurrentHiddenStates": None, "EnvironmentInformation": None,
        })  # fmt: skip
    as_read(experience_of(buffer), rows, flags="done")
    assert "reset-as-final-observation" in rules(relive.audit(buffer))


def test_what_is_not_known_is_refused_with_all_that_can_be_read() -> None:
    with pytest.raises(relive.errors.FieldError, match=r"rsl_rl: RolloutStorage.*fast_td3: SimpleReplayBuffer"):
        relive.audit(made("ReplayBuffer"))


def test_what_only_looks_like_a_known_buffer_is_refused_with_the_reason() -> None:
    names = ("observations", "actions", "rewards", "dones", "timeouts", "next_observations")
    empty = made("ReplayBuffer", pos=0, full=True, **dict.fromkeys(names))
    with pytest.raises(relive.errors.FieldError, match="could not be read as stable_baselines3's ReplayBuffer"):
        relive.audit(empty)
    arrays = of_cleanrl(blocks())
    with pytest.raises(relive.errors.ShapeError, match="next_done"):
        relive.audit({**arrays, "next_done": np.zeros(N + 1)})
    with pytest.raises(relive.errors.DTypeError, match="done"):
        relive.audit({"obs": np.zeros((3, 1)), "reward": np.zeros(3), "dones": np.array(["no"] * 3)})


def test_columns_of_another_form_are_no_values() -> None:
    rows = loops.stored(loops.walk())
    wide = np.zeros((len(rows["reward"]), 2))
    for columns in ({"value": wide, "advantage": wide}, {"value": wide, "return": wide[:, 0]}):
        assert not relive.audit({**rows, **columns}).findings
