"""What a step's info reports: costs, success flags and the like, stored with the step that they are about."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

import relive
from relive import Collector, Field, RolloutBuffer, Schema, errors
from support import tagged_envs
from support.tagged_collections import every_mode, make_buffer, policy


class Costly(tagged_envs.TaggedEnv):
    """Reports the cost of each step, its success where an episode ends, and the force of odd steps."""

    def __init__(
        self, env: int, endings: tagged_envs.Endings, reports: tuple[str, ...] = ("cost", "success", "force")
    ) -> None:
        super().__init__(env, endings)
        self._reports = reports

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        tag = self.tag
        obs, reward, terminated, truncated, _ = super().step(action)
        told: dict[str, Any] = {"cost": cost_of(tag)}
        if terminated or truncated:
            told["success"] = is_success(tag)
        if tag.step % 2 or terminated or truncated:
            told["force"] = force_of(tag)
        return obs, reward, terminated, truncated, {name: x for name, x in told.items() if name in self._reports}


def cost_of(tag: tagged_envs.Tag) -> Any:
    return tag.env + 10 * tag.episode + tag.step / 8 + 1


def is_success(tag: tagged_envs.Tag) -> Any:
    return (tag.env + tag.episode) % 2 == 0


def force_of(tag: tagged_envs.Tag) -> Any:
    return np.stack([np.asarray(tag.step) + 1, np.asarray(tag.env) - 1], -1).astype(np.float32)


TOLD = ("cost", "success", "force")
TOLD_FIELDS: dict[str, Any] = {"cost": (), "success": Field((), torch.bool), "force": (2,)}
MIXED = tagged_envs.cycle([(3, "truncated"), (1, "terminated")], [(2, "terminated"), (4, "truncated")])


def check_told(step: Any, done: Tensor) -> None:
    """Real steps have what their own info reported."""
    tag = tagged_envs.decode(step["obs"])
    assert np.array_equal(step["cost"], np.float32(cost_of(tag)))
    assert torch.equal(step["success"], done & torch.as_tensor(is_success(tag)))
    told = torch.as_tensor(tag.step % 2 == 1) | done
    assert torch.equal(step["force"], torch.as_tensor(force_of(tag)) * told.unsqueeze(-1))


@every_mode
@pytest.mark.parametrize("into", ["rollout", "replay", "chunk"])
def test_what_a_steps_info_reports_is_stored_with_that_step(mode: AutoresetMode, into: str) -> None:
    envs = SyncVectorEnv([partial(Costly, n, MIXED) for n in range(2)], autoreset_mode=mode)
    schema = Schema.from_env(envs, **TOLD_FIELDS)
    if into == "rollout":
        rollout = RolloutBuffer(schema, 7, 2)
        collector = Collector(envs, lambda obs: policy(obs)["action"], rollout, seed=0, from_step_info=TOLD)
        for _ in range(4):
            collector.collect()
            rows = rollout.flat()
            check_told(rows, rows["terminated"] | rows["truncated"])
        return
    replay = relive.ReplayBuffer(schema, 200, 2, seed=0)
    play = partial(Collector, envs, lambda obs: policy(obs)["action"], seed=0, from_step_info=TOLD)
    if into == "replay":
        play(replay).collect(28)
    else:
        replay.extend(play(schema=schema).steps(28))
    rows = replay.data()
    check_told(rows, rows["terminated"] | rows["truncated"])
    assert rows["success"].any()


@every_mode
def test_a_warm_up_reads_the_same_infos(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([partial(Costly, n, MIXED) for n in range(2)], autoreset_mode=mode)
    rollout = make_buffer(envs, 9, **TOLD_FIELDS)
    collector = Collector(envs, policy, rollout, from_step_info=TOLD)
    extra = make_buffer(envs, 9, **TOLD_FIELDS)
    collector.warm(extra, 9, policy=policy)
    rows = extra.flat()
    check_told(rows, rows["terminated"] | rows["truncated"])


@every_mode
@pytest.mark.parametrize("missing", TOLD)
def test_an_end_that_does_not_report_a_field_is_an_error_that_names_the_env(mode: AutoresetMode, missing: str) -> None:
    told = [TOLD, tuple(name for name in TOLD if name != missing)]
    envs = SyncVectorEnv([partial(Costly, n, MIXED, told[n]) for n in range(2)], autoreset_mode=mode)
    buffer = make_buffer(envs, 9, **TOLD_FIELDS)
    with pytest.raises(errors.EnvError, match=rf"'{missing}'.* missing for env 1, whose episode ended; report it"):
        Collector(envs, policy, buffer, from_step_info=TOLD).collect()
    assert buffer.steps == 0


def test_a_field_of_a_steps_info_is_of_its_kind_and_shape_and_has_one_source() -> None:
    envs = SyncVectorEnv([partial(Costly, n, MIXED) for n in range(2)])

    def collect(**fields: Any) -> RolloutBuffer:
        buffer = make_buffer(envs, 9, **fields)
        Collector(envs, policy, buffer, from_step_info=tuple(fields)).collect()
        return buffer

    assert collect(cost=Field((), torch.bool))["cost"].any()  # a flag may be a number, as in Gymnasium's masks
    assert collect(force=(2, 1))["force"].shape == (9, 2, 2, 1)
    with pytest.raises(errors.DTypeError, match=r"'cost': expected torch\.int64, got torch\.float64"):
        collect(cost=Field((), torch.int64))
    with pytest.raises(errors.ShapeError, match=r"'force': expected \(2, 3\) in info\['force'\], got \(2, 2\)"):
        collect(force=(3,))
    with pytest.raises(errors.SchemaError, match=r"'cost': .*has no members"):
        collect(cost={"speed": (), "force": ()})
    with pytest.raises(errors.FieldError, match=r"unknown field 'cots' in the schema, but from_step_info names it"):
        Collector(envs, policy, make_buffer(envs, 9, cost=()), from_step_info=("cots",))
    for name in ("reward", "terminated", "obs"):
        with pytest.raises(
            errors.ParameterError, match=f"from_step_info names '{name}', which the collector itself sets"
        ):
            Collector(envs, policy, make_buffer(envs, 9), from_step_info=(name,))
    with pytest.raises(errors.ParameterError, match=r"'cost': .*name it in one of them"):
        Collector(envs, policy, make_buffer(envs, 9, cost=()), from_info=("cost",), from_step_info=("cost",))


class AtReset(Costly):
    """Its resets report, too."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(**options)
        return obs, {"cost": 99.0, "success": True, "force": np.full(2, 99, np.float32)}


@every_mode
@pytest.mark.parametrize("into", ["rollout", "chunk"])
def test_a_row_that_only_resets_has_nothing_of_the_info_of_the_reset(mode: AutoresetMode, into: str) -> None:
    envs = SyncVectorEnv([partial(AtReset, n, MIXED) for n in range(2)], autoreset_mode=mode)
    schema = Schema.from_env(envs, **TOLD_FIELDS)
    play = partial(Collector, envs, lambda obs: policy(obs)["action"], seed=0, from_step_info=TOLD)
    if into == "rollout":
        rollout = RolloutBuffer(schema, 12, 2)
        play(rollout).collect()
        rows: Any = {name: rollout[name] for name in (*TOLD, "reward", "mask")}
    else:
        rows = {name: torch.as_tensor(x) for name, x in play(schema=schema).steps(12).items()}
    masked = ~rows["mask"]
    assert masked.any() == (mode is AutoresetMode.NEXT_STEP)
    for name in (*TOLD, "reward"):
        assert not rows[name][masked].any(), name
        assert not (rows[name] == 99).any(), name
