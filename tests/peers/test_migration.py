"""The blocks of migration pages that need the library, and what the pages say that it gets wrong."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from test_docs import blocks

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migration"
CUT = [0.0, 1, 2, 10, 11, 12]
"""Observations and values of two episodes that are cut off after three steps; each step pays 1."""


@pytest.mark.parametrize("name", ["rl_games", "skrl", "stable_baselines3", "tianshou", "torchrl"])
def test_every_block_of_the_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one block saves a replay
    names: dict[str, Any] = {}
    code = [block for block in blocks((PAGES / f"{name}.md").read_text(encoding="utf-8")) if block.language == "python"]
    assert any(block.no_run for block in code)
    for block in code:
        if "compiled extension" not in (block.no_run or ""):
            exec(block.code, names)


def columns() -> tuple[torch.Tensor, torch.Tensor]:
    """The values, and where an episode was cut off: [6, 1, 1]."""
    values = torch.tensor(CUT).view(6, 1, 1)
    return values, values % 10 == 2


def test_torchrls_prioritized_buffer_raises_where_its_extension_does_not_fit_torch() -> None:
    data = import_module("torchrl.data")
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the page speaks of torch 2.13")
    with pytest.raises(RuntimeError, match="SumSegmentTreeFp32 is not available"):
        data.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=data.LazyTensorStorage(10), batch_size=2)


def test_torchrls_slices_are_drawn_by_episode() -> None:
    data, tensordict = import_module("torchrl.data"), import_module("tensordict")
    sampler = data.SliceSampler(slice_len=5, traj_key="episode", strict_length=False)
    replay = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(1000), sampler=sampler, batch_size=50)
    episode = torch.cat([torch.zeros(10), torch.ones(500)]).long()
    replay.extend(tensordict.TensorDict({"episode": episode}, [510]))
    torch.manual_seed(0)
    short = torch.stack([(replay.sample()["episode"] == 0).float().mean() for _ in range(100)]).mean()
    assert 0.45 < short < 0.55


def test_tianshous_prioritized_buffer_keeps_old_priorities_over_a_reset() -> None:
    data = import_module("tianshou.data")
    buffer = data.PrioritizedVectorReplayBuffer(200, 2, alpha=0.6, beta=0.4)

    def fill(steps: int) -> None:
        no, zero = np.zeros(2, bool), np.zeros((2, 1), np.float32)
        for _ in range(steps):
            step = {"obs": zero, "act": np.zeros(2, int), "rew": np.ones(2), "terminated": no, "truncated": no}
            buffer.add(data.Batch(**step, obs_next=zero, info=[{}, {}]))

    fill(13)
    buffer.reset()
    fill(3)
    np.random.seed(0)  # noqa: NPY002
    drawn = np.concatenate([buffer.sample(32)[1] for _ in range(200)])
    assert 0.4 < np.mean(drawn % 100 >= 3) < 0.95
    buffer.update_weight(buffer.sample(4)[1], np.array([np.nan, 1, 1, 1]))
    with pytest.raises(AssertionError):
        buffer.sample(4)


def test_skrls_advantages_run_on_through_time_limits() -> None:
    values, cut = columns()
    last, no = torch.full((1, 1), 20.0), torch.zeros_like(cut)
    ppo, rnn = (import_module(f"skrl.agents.torch.ppo.{name}").compute_gae for name in ("ppo", "ppo_rnn"))
    sums = {"discount_factor": 1.0, "lambda_coefficient": 1.0, "values": values, "terminated": no}

    def returns(function: Any, added: torch.Tensor, **options: Any) -> list[float]:
        return function(rewards=1.0 + added * cut, **sums, **options)[0].flatten().tolist()

    right, wrong = [6, 5, 4, 16, 15, 14], [26, 25, 24, 23, 22, 21]
    both = {"truncated": cut, "last_values": last}
    assert returns(ppo, 0 * values, **both) == returns(rnn, 0 * values, next_values=last) == wrong
    assert returns(rnn, values, next_values=last) == [40, 39, 38, 35, 34, 33]
    assert returns(ppo, values + 1, **both, time_limit_bootstrap=True) == right
    reset = 10 * (values // 10) + 10
    assert returns(ppo, reset, **both, time_limit_bootstrap=True) == [13, 12, 11, 23, 22, 21]


def test_skrls_memory_serves_sequences_over_its_cursor_and_leaves_rows_out() -> None:
    memory = import_module("skrl.memories.torch").RandomMemory
    ring = memory(memory_size=8, num_envs=1, device="cpu", replacement=True)
    rows = memory(memory_size=10, num_envs=3, device="cpu")
    for buffer, steps in ((ring, 12), (rows, 10)):
        buffer.create_tensor(name="t", size=1, dtype=torch.float32)
        for t in range(steps):
            buffer.add_samples(t=torch.full((buffer.num_envs, 1), float(t)))
    torch.manual_seed(0)
    sequences = ring.sample(["t"], batch_size=2000, sequence_length=4)[0][0].view(-1, 4)
    assert 0.55 < (sequences.diff(dim=1) != 1).any(1).float().mean() < 0.65
    assert sum(len(batch[0]) for batch in rows.sample_all(["t"], mini_batches=4)) == 28


def test_rl_games_values_time_limits_by_the_state_before_and_repeats_its_minibatches() -> None:
    values, cut = columns()
    before = torch.tensor([1.0, 0, 0, 1, 0, 0])[:, None]
    agent = SimpleNamespace(gamma=1.0, tau=1.0, horizon_length=6)
    discount = import_module("rl_games.common.a2c_common").A2CBase.discount_values
    advantages = discount(agent, torch.ones(1), torch.full((1, 1), 20.0), before, values, 1.0 + values * cut)
    assert (advantages + values).flatten().tolist() == [5, 4, 3, 15, 14, 13]
    dataset = import_module("rl_games.common.datasets").PPODataset(12, 4, False, False, "cpu", 1)
    dataset.update_values_dict({"row": torch.arange(12)})
    first, second = ([batch["row"].tolist() for batch in dataset] for _ in range(2))
    assert first == second == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
