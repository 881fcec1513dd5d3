"""Every transition of flat arrays is drawn exactly, its end is right, and what is not known is not made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import Field, NStep, Prioritized, ReplayBuffer, Schema, errors
from support import loops

D4RL = {"obs": "observations", "action": "actions", "reward": "rewards", "terminated": "terminals",
        "truncated": "timeouts", "next_obs": "next_observations"}  # fmt: skip


def d4rl(episodes: list[Any], *, next_obs: bool = True) -> dict[str, Any]:
    arrays = loops.stored(episodes)
    return {D4RL[name]: x for name, x in arrays.items() if next_obs or name != "next_obs"}


def rows_of(batch: Any) -> dict[bytes, tuple[Any, ...]]:
    """Observation -> the rest of the transition; observations of a walk are all different."""
    columns = (batch[name].numpy() for name in ("action", "reward", "terminated", "truncated", "next_obs"))
    rows = zip(batch["obs"].numpy(), *columns, strict=True)
    return {obs.tobytes(): tuple(np.asarray(x).tobytes() for x in rest) for obs, *rest in rows}


def expected(arrays: dict[str, Any], kept: Any = slice(None)) -> dict[bytes, tuple[Any, ...]]:
    names = ("actions", "rewards", "terminals", "timeouts", "next_observations")
    rows = zip(arrays["observations"][kept], *(arrays[name][kept] for name in names), strict=True)
    return {obs.tobytes(): tuple(np.asarray(x).tobytes() for x in rest) for obs, *rest in rows}


OPTIONS: list[dict[str, Any]] = [{}, {"own_next_obs": True}, {"ordered": False}, {"sampler": Prioritized}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cut", [0, 5])
def test_every_transition_is_there_exactly_once(options: dict[str, Any], cut: int) -> None:
    arrays = d4rl(loops.walk(30))
    size = len(arrays["rewards"]) - cut  # the last episode goes on, too
    arrays = {name: x[:size] for name, x in arrays.items()}
    made = {name: part() if name == "sampler" else part for name, part in options.items()}
    replay = ReplayBuffer.from_arrays(arrays, seed=0, **made)
    assert len(replay) == size
    assert rows_of(replay.data()) == expected(arrays)
    assert relive.audit(replay), str(relive.audit(replay))
    replay.check()


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_rows_that_do_not_go_on_from_one_another_keep_their_next_observations(options: dict[str, Any]) -> None:
    whole = d4rl(loops.walk(30))
    kept = np.sort(np.random.default_rng(0).choice(len(whole["rewards"]), 300, replace=False))
    arrays = {name: x[kept] for name, x in whole.items()}
    replay = ReplayBuffer.from_arrays(arrays, seed=0, **options)
    assert rows_of(replay.data()) == expected(arrays)
    replay.view = NStep(3, gamma=1.0)  # and no window runs over a gap
    batch, at = replay.data(), {obs.tobytes(): i for i, obs in enumerate(arrays["observations"])}
    done = arrays["terminals"] | arrays["timeouts"]
    for obs, reward in zip(batch["obs"].numpy(), batch["reward"].tolist(), strict=True):
        i, total = at[obs.tobytes()], 0.0
        for k in range(i, min(i + 3, len(kept))):
            total += float(arrays["rewards"][k])
            if done[k] or k + 1 == len(kept) or kept[k + 1] != kept[k] + 1:
                break
        assert reward == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_without_next_observations_only_the_unknown_is_left_out(own: bool) -> None:
    episodes = loops.walk(30)
    whole, arrays = d4rl(episodes), d4rl(episodes, next_obs=False)
    size = len(arrays["rewards"]) - 2
    whole, arrays = ({name: x[:size] for name, x in part.items()} for part in (whole, arrays))
    terminal = whole["terminals"]
    known = ~whole["timeouts"]
    known[-1] &= bool(terminal[-1])
    whole["next_observations"] = np.where(terminal[:, None], whole["observations"], whole["next_observations"])
    replay = ReplayBuffer.from_arrays(arrays, own_next_obs=own, seed=0)
    assert rows_of(replay.data()) == expected(whole, known)
    assert len(replay) == known.sum()
    assert relive.audit(replay), str(relive.audit(replay))


def test_the_capacity_is_just_enough_and_can_be_given() -> None:
    arrays = d4rl(loops.walk(30))
    size = len(arrays["rewards"])
    ends = int((arrays["terminals"] | arrays["timeouts"]).sum())
    assert len(ReplayBuffer.from_arrays(arrays).block) == size + ends
    assert len(ReplayBuffer.from_arrays(arrays, own_next_obs=True).block) == size
    small = ReplayBuffer.from_arrays(arrays, capacity=50)
    assert len(small.block) == 50
    large = ReplayBuffer.from_arrays(arrays, capacity=size + ends + 10)
    large.add(obs=np.zeros(3), action=np.zeros(2), reward=0.0, terminated=False, truncated=False)
    assert len(large) == size  # the new step starts an episode of its own


@pytest.mark.parametrize("shape", [(1, 3), (1, 0), (4, 0)])
def test_one_row_and_observations_without_numbers_are_read(shape: tuple[int, int]) -> None:
    obs, size = np.zeros(shape, np.float32), shape[0]
    arrays = {
        "obs": obs,
        "next_obs": obs,
        "action": np.zeros(size),
        "reward": np.arange(size),
        "terminated": [0] * size,
    }
    replay = ReplayBuffer.from_arrays(arrays, seed=0)
    assert replay.data()["reward"].tolist() == list(range(size))


def test_many_rows_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relive.replay.arrays.PIECE", 7)
    arrays = d4rl(loops.walk(30))
    assert rows_of(ReplayBuffer.from_arrays(arrays).data()) == expected(arrays)
    bare = {name: x for name, x in arrays.items() if name != "next_observations"}
    known = int((~arrays["timeouts"]).sum())
    assert len(ReplayBuffer.from_arrays(bare)) == known


def test_a_schema_chooses_fields_and_dtypes_and_observations_may_be_nested() -> None:
    arrays = d4rl(loops.walk(5))
    goal = arrays["observations"][:, :1]
    nested = {**arrays, "observations": {"a": arrays["observations"], "goal": goal}, "infos/log_prob": goal[:, 0],
              "next_observations": {"a": arrays["next_observations"], "goal": goal}}  # fmt: skip
    replay = ReplayBuffer.from_arrays(nested)
    assert set(replay.schema.names) == {"obs", "action", "reward", "terminated", "truncated"}
    assert replay.data()["obs", "goal"].shape == (len(goal), 1)
    flags = {"terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
    schema = Schema({"obs": (3,), "action": (2,), "reward": (), **flags, "infos/log_prob": ()})
    other = ReplayBuffer.from_arrays({**arrays, "infos/log_prob": goal[:, 0]}, schema=schema)
    assert torch.equal(other.data()["infos/log_prob"], other.data()["obs"][:, 0])


@pytest.mark.parametrize("names", [("terminals", "timeouts"), ("terminations", "truncations")])
def test_the_fields_may_have_the_names_of_either_kind_of_data_set(names: tuple[str, str]) -> None:
    arrays = d4rl(loops.walk(30))
    renamed = {
        dict(zip(("terminals", "timeouts"), names, strict=True)).get(name, name): x for name, x in arrays.items()
    }
    assert rows_of(ReplayBuffer.from_arrays(renamed, seed=0).data()) == expected(arrays)


def test_flags_of_any_dtype_and_columns_are_read() -> None:
    arrays = d4rl(loops.walk(8))
    loose = {**arrays, "terminals": arrays["terminals"].astype(np.float32)[:, None],
             "rewards": arrays["rewards"][:, None], "timeouts": torch.from_numpy(arrays["timeouts"])}  # fmt: skip
    assert rows_of(ReplayBuffer.from_arrays(loose).data()) == expected(arrays)


def test_what_is_missing_or_contradicts_itself_is_refused() -> None:
    arrays = d4rl(loops.walk(8))
    without = {name: x for name, x in arrays.items() if name != "timeouts"}
    assert len(ReplayBuffer.from_arrays(without)) == len(arrays["rewards"])  # next observations show the cuts
    bare = {name: x for name, x in without.items() if name != "next_observations"}
    for wrong, error, words in (
        (bare, errors.FieldError, "lack truncated;"),
        ({**arrays, "actions": arrays["actions"][:-1]}, errors.ShapeError, "'action': expected"),
        ({**arrays, "terminals": arrays["terminals"] * 2}, errors.ParameterError, "is 2; expected 0 or 1"),
        ({**arrays, "next_observations": arrays["observations"][:, :2]}, errors.ShapeError, "'next_obs': expected"),
        ({**arrays, "obs": arrays["observations"]}, errors.FieldError, "'observations' and 'obs' are two names"),
        ({"rewards": arrays["rewards"]}, errors.FieldError, "lack obs, action"),
        ({**arrays, "dones": ~arrays["terminals"]}, errors.ParameterError, "'done' contradicts"),
        ([1, 2], errors.FieldError, "expected a mapping"),
        ({name: x[:0] for name, x in arrays.items()}, errors.ShapeError, "no rows"),
        ({name: np.broadcast_to(x[:1], (2**45, *x.shape[1:])) for name, x in without.items()}, errors.ParameterError,
         "field 'obs' repeats its numbers.* are free"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            ReplayBuffer.from_arrays(wrong)
    with pytest.raises(errors.ParameterError, match="num_envs"):
        ReplayBuffer.from_arrays(arrays, num_envs=2)


def test_nan_in_observations_follows_nan_and_nothing_else() -> None:
    obs = np.array([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan], [3.0, 4.0], [5.0, np.nan]])
    after = np.concatenate([obs[1:], [[6.0, np.nan]]])
    after[3] = [5.0, 6.0]  # the number is not the NaN of the next row, nor the other way round
    after[1] = [np.nan, 0.0]
    never = np.zeros(5, bool)
    arrays = {"obs": obs, "next_obs": after, "action": np.zeros(5), "reward": np.ones(5), "terminated": never}
    replay = ReplayBuffer.from_arrays(arrays, seed=0)
    np.testing.assert_array_equal(replay.data()["next_obs"], after)
    assert [len(episode.steps) for episode in replay.episodes()] == [2, 2, 1]
    assert len(ReplayBuffer.from_arrays({**arrays, "truncated": never}).block) == 5 + 3


@pytest.mark.parametrize("own", [False, True])
def test_a_row_with_both_flags_is_a_terminal_that_needs_no_next_observation(own: bool) -> None:
    both = np.array([False, True, False, False, True])
    arrays = {"obs": np.arange(5.0), "action": np.arange(5), "reward": np.arange(5.0), "terminated": both,
              "truncated": both | np.array([False, False, True, False, False])}  # fmt: skip
    replay = ReplayBuffer.from_arrays(arrays, own_next_obs=own, seed=0)
    kept = replay.data()
    assert kept["action"].tolist() == [0, 1, 3, 4]  # 2 was only cut off, and what came after it is not known
    assert kept["next_obs"].tolist() == [1, 1, 4, 4]
    for name in ("terminated", "truncated"):
        assert kept[name].tolist() == [False, True, False, True]
