"""Whole episodes, their priorities and tables: what the list of episodes says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import FrameStack, NStep, Prioritized, ReplayBuffer, Transition
from relive.errors import LifecycleError, ParameterError, SchemaError
from support.replays import PLAIN, random_plays
from support.twins import Twin, batch_leaves


def expected(twin: Twin) -> list[list[Any]]:
    """The stored transitions of each episode, env by env in the order of time."""
    found: list[list[Any]] = []
    for env in range(twin.num_envs):
        groups: dict[int, list[Any]] = {}
        for row in twin.truth.live(env):
            if row.complete:
                groups.setdefault(id(row.episode), []).append(row)
        found += groups.values()
    return found


@pytest.mark.parametrize("dress", ["box", "mixed"])
@pytest.mark.parametrize("rows", [5, 12, 60])
def test_episodes_are_those_that_were_played(rows: int, dress: str) -> None:
    twin = Twin(3, rows, dress=dress, view=FrameStack(2, NStep(3, 0.5)))
    for number, kinds in enumerate(random_plays(rows, 3, 40)):
        twin.add(kinds)
        if number % 13 == 12:
            twin.interrupt([number % 3])
    wanted = expected(twin)
    found = list(twin.buffer.episodes())
    assert len(found) == len(wanted) > 3
    for episode, steps in zip(found, wanted, strict=True):
        first, last = steps[0], steps[-1]
        assert episode.env == first.env
        assert episode.begins == (first.at == 0)
        assert episode.ended == last.episode.steps[last.at].done
        assert episode.whole == (first.at == 0 and episode.ended)
        leaves = batch_leaves(episode.steps)
        for k, row in enumerate(steps):
            want = twin.item(row, Transition())
            assert leaves.keys() == want.keys() - {("discount",), ("steps",), ("next_index",)}
            assert all(np.array_equal(leaves[path][k], want[path]) for path in leaves)
        assert torch.equal(flat(episode.final_obs), flat(episode.steps.rows(-1)["next_obs"]))


def flat(obs: Any) -> torch.Tensor:
    return obs if isinstance(obs, torch.Tensor) else obs["state"]


def test_what_is_overwritten_before_its_turn_is_left_out() -> None:
    twin = Twin(1, 8).play(*"..T..T")  # rows 0 to 3 and 4 to 7
    episodes = twin.buffer.episodes()
    twin.play(*"....")  # rows 8 to 11, where 0 to 3 were
    twin.buffer.check()
    assert [episode.steps["index"].tolist() for episode in episodes] == [[4, 5, 6]]
    episodes = twin.buffer.episodes()
    twin.play(*"..")  # rows 12 and 13, where 4 and 5 were
    found = list(episodes)
    assert [(e.steps["index"].tolist(), e.begins, e.ended) for e in found] == [
        ([6], False, True),
        ([8, 9, 10], True, False),
    ]


def test_steps_with_next_observations_of_their_own_have_episodes_and_those_without_order_have_none() -> None:
    own = ReplayBuffer(PLAIN, 20, own_next_obs=True)
    for t in range(6):
        own.add(obs=np.full(2, t), action=t, reward=1.0, terminated=t == 2, truncated=False, next_obs=np.full(2, t + 1))
    assert [e.steps["action"].tolist() for e in own.episodes()] == [[0, 1, 2], [3, 4, 5]]
    assert [e.whole for e in own.episodes()] == [True, False]
    loose = ReplayBuffer(PLAIN, 20, ordered=False)
    with pytest.raises(SchemaError, match="no order"):
        loose.episodes()
    assert list(ReplayBuffer(PLAIN, 20).episodes()) == []


def test_priorities_are_those_that_draws_follow() -> None:
    twin = Twin(2, 8, sampler=Prioritized(alpha=0.5, eps=1e-9)).play("..", "..", ".T", "..", "..")
    index = twin.buffer.data()["index"]
    twin.buffer.update_priorities(index, torch.arange(1.0, len(index) + 1))
    assert torch.allclose(twin.buffer.priorities(index), torch.arange(1.0, len(index) + 1).double().sqrt())
    gone = index[:1].clone()
    for _ in range(9):
        twin.add("..")
    assert twin.buffer.priorities(gone).tolist() == [0.0]
    assert twin.buffer.priorities([]).tolist() == []
    with pytest.raises(ParameterError, match="never issued"):
        twin.buffer.priorities([10_000])
    with pytest.raises(LifecycleError, match="has no priorities"):
        Twin(1, 5).buffer.priorities([0])


def test_a_table_has_a_row_for_each_complete_step() -> None:
    pytest.importorskip("pandas")
    twin = Twin(2, 30, dress="dict").play("..", ".T", "..", "U.", "..", "..")
    table: Any = twin.buffer.to_pandas(next_obs=True)
    steps = [row for episode in expected(twin) for row in episode]
    assert table["index"].tolist() == [twin.truth.index(row) for row in steps]
    assert table["env"].tolist() == [row.env for row in steps]
    assert table["step"].tolist() == [row.at for row in steps]
    assert table["episode"].nunique() == len(expected(twin))
    assert table["reward"].tolist() == [np.float32(row.episode.steps[row.at].reward) for row in steps]
    assert table["obs.state.2"].tolist() == [float(row.at) for row in steps]
    assert table["next_obs.state.2"].tolist() == [float(row.at + 1) for row in steps]
    assert not [name for name in twin.buffer.to_pandas().columns if name.startswith("next_obs")]


def test_a_table_keeps_dtypes_and_large_fields_and_needs_no_order() -> None:
    pytest.importorskip("pandas")
    images = Twin(1, 20, dress="image").play(*"..T..")
    table: Any = images.buffer.to_pandas()
    assert table["obs"][0].shape == (36, 32)
    assert table["terminated"].dtype == bool
    loose = ReplayBuffer(PLAIN, 20, ordered=False)
    fields = {"action": 1, "terminated": False, "truncated": False, "next_obs": np.ones(2)}
    for t in range(3):
        loose.add(obs=np.zeros(2), reward=float(t), **fields)
    assert loose.to_pandas()["reward"].tolist() == [0, 1, 2]
    assert "episode" not in loose.to_pandas()
    assert len(ReplayBuffer(PLAIN, 20).to_pandas()) == 0
