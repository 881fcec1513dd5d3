"""What a replay is made with, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from relive import (
    Field,
    NStep,
    Prioritized,
    ReplayBuffer,
    Schema,
)
from relive.errors import ParameterError, SchemaError
from support.replays import PLAIN


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": None}, "'reward'"),
        ({"terminated": None}, "'terminated'"),
        ({"truncated": Field((), torch.float32)}, "'truncated'"),
        ({"reward": Field((), torch.float64)}, "'reward'"),
        ({"reward": Field((1,))}, "'reward'"),
        ({"obs": None}, "'obs'"),
        *(({name: Field()}, name) for name in ("next_obs", "mask", "index", "next_index", "discount", "steps")),
        *(({name: Field()}, name) for name in ("weight", "probability", "source", "_stamp", "_x")),
    ],
)
def test_a_schema_that_makes_no_replay_is_refused(fields: dict[str, Any], message: str) -> None:
    tree = {**{name: PLAIN[name] for name in PLAIN.names}, **fields}
    schema = Schema({name: field for name, field in tree.items() if field is not None})
    with pytest.raises(SchemaError, match=message):
        ReplayBuffer(schema, 10)


@pytest.mark.parametrize(
    ("capacity", "num_envs"), [(0, 1), (1, 1), (5, 3), (-4, 1), (10, 0), (10, -1), (1e6, 1), (10, 2.0)]
)
def test_a_capacity_of_less_than_two_rows_per_env_is_refused(capacity: int, num_envs: int) -> None:
    with pytest.raises(ParameterError, match=r"capacity|2 rows|env"):
        ReplayBuffer(PLAIN, capacity, num_envs)


def test_the_capacity_is_what_all_envs_got_together() -> None:
    assert ReplayBuffer(PLAIN, 100, num_envs=3).capacity == 99
    sized = ReplayBuffer(PLAIN, num_envs=2, capacity_bytes=10_000)
    assert ReplayBuffer(PLAIN, sized.capacity, num_envs=2).nbytes == sized.nbytes <= 10_000


@pytest.mark.parametrize("seed", [True, 1.5, "7"], ids=repr)
def test_a_seed_that_is_none_is_refused_at_once(seed: Any) -> None:
    with pytest.raises(ParameterError, match="seed is an int"):
        ReplayBuffer(PLAIN, 10, seed=seed)


def test_a_seed_that_is_not_given_follows_torchs_and_batch_t_follows_the_seed() -> None:
    rows: list[tuple[int, list[float]]] = []
    for _ in range(2):
        torch.manual_seed(42)
        replay = ReplayBuffer(PLAIN, 40, 2)
        torch.rand(5)  # what others draw meanwhile changes nothing
        for t in range(10):
            replay.add(
                obs=np.full((2, 2), t), action=[t, t], reward=[t, -t], terminated=[False] * 2, truncated=[False] * 2
            )
        replay.sample(4)
        rows.append((replay.seed, replay.sample(8)["reward"].tolist()))
    assert rows[0] == rows[1]


def test_a_class_in_place_of_a_part_is_refused() -> None:
    for part in ({"sampler": Prioritized}, {"view": NStep}):
        with pytest.raises(ParameterError, match=r"expected an object, got its class; pass \w+\(\.\.\.\)"):
            ReplayBuffer(PLAIN, 10, **cast("Any", part))


@pytest.mark.parametrize("given", [3, "x", [1]], ids=str)
def test_an_object_of_another_kind_is_refused_by_its_name(given: Any, tmp_path: Path) -> None:
    replay = ReplayBuffer(PLAIN, 10)
    with pytest.raises(SchemaError, match=r"schema: expected a relive\.Schema"):
        ReplayBuffer(given, 10)
    with pytest.raises(ParameterError, match=r"append\(other="):
        replay.append(given)
    with pytest.raises(ParameterError, match=r"append\(envs="):
        replay.append(replay, envs=given)
    with pytest.raises(ParameterError, match=r"serve\(limit="):
        replay.serve(4, limit=given)
    with pytest.raises(ParameterError, match=r"load\(changes="):
        ReplayBuffer.load(tmp_path, changes=given)


def test_a_whole_number_that_no_float_can_hold_is_out_of_range() -> None:
    with pytest.raises(ParameterError, match="alpha is a number"):
        Prioritized(alpha=10**400)
