"""Values that lie in the buffer's own memory are read before any of them is overwritten."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, Prioritized, ReplayBuffer, RolloutBuffer, Schema
from support import twins
from support.cases import covering
from support.replays import FLAGS

WIDTHS = {"packed": 4, "block": 40_000}
KINDS: dict[str, dict[str, Any]] = {
    "shared": {},
    "prioritized": {"sampler": Prioritized},
    "own next_obs": {"own_next_obs": True},
    "unordered": {"ordered": False},
    "in files": {},
}
WAYS_IN = "add", "add, the episode ends", "add, masked", "extend", "extend, many"
ENVS, ROWS = 2, 6


def numbered(base: float, width: int, count: int = ENVS) -> np.ndarray:
    return np.arange(base, base + count, dtype=np.float32)[:, None].repeat(width, 1)


def filled(kind: str, width: int, path: Any) -> ReplayBuffer:
    """A replay whose next step overwrites the oldest, and in which each row has another number."""
    options = {"view": None, "seed": 0, "check_ends": False, **KINDS[kind]}
    options["sampler"] = options["sampler"]() if "sampler" in options else None
    schema = Schema({"obs": (width,), "hidden": (width,), "wide": Field((width,), torch.bool), "reward": (), **FLAGS})
    if kind == "in files":
        replay = ReplayBuffer.open(path, schema, ENVS * ROWS, ENVS, **options)
    else:
        replay = ReplayBuffer(schema, ENVS * ROWS, ENVS, **options)
    for t in range(2 * ROWS + 1):
        replay.add(**step(10 * t, width, replay.own_next_obs))
    return replay


def step(base: float, width: int, own: bool = False) -> dict[str, Any]:
    obs = numbered(base, width)
    flags = dict.fromkeys(FLAGS, np.zeros(ENVS, np.bool_))
    made = {"obs": obs, "hidden": obs + 0.5, "wide": obs % 20 < 10, "reward": obs[:, 0].copy(), **flags}
    return made | ({"next_obs": obs + 0.25} if own else {})


def rows_of(replay: ReplayBuffer) -> dict[Any, torch.Tensor]:
    """All rows as tensors over the storage, one env after the other."""
    return dict(replay.block.items())


def taken(replay: ReplayBuffer, shift: int, length: int = ENVS) -> dict[str, Any]:
    """A step, or several, of views of the rows from ``shift`` on, of which some are about to be overwritten."""
    rows = rows_of(replay)
    names = ["obs", "hidden", "wide", "reward", *FLAGS, *(["next_obs"] if replay.own_next_obs else [])]
    given = {name: rows[name][shift : shift + length] for name in names}
    given["hidden"], given["obs"] = given["obs"], given["hidden"]  # each lies where the other is written
    return given


def copied(tree: Any) -> Any:
    return twins.mapped(lambda x: x.clone(), tree)


@pytest.mark.parametrize(("kind", "way", "width"), covering(KINDS, WAYS_IN, WIDTHS.values()))
def test_a_view_of_a_replays_own_rows_is_stored_as_its_copy_is(kind: str, width: int, way: str, tmp_path: Any) -> None:
    for shift in range(0, ENVS * ROWS - ENVS + 1, 2 if way == "add" else 5):
        found = []
        for form in (lambda tree: tree, copied):
            replay = filled(kind, width, tmp_path / f"{shift} {len(found)}")
            length = ENVS * (ROWS - 1) if way == "extend, many" else ENVS
            given = taken(replay, min(shift, ENVS * ROWS - length), length)
            if way == "add, the episode ends":
                given["truncated"] = torch.ones(ENVS, dtype=torch.bool)
                given["next_obs"] = rows_of(replay)["hidden"][ENVS - 1 : 2 * ENVS - 1]
            if way == "add, masked":
                given["mask"] = rows_of(replay)["wide"][shift, :ENVS]
            given = form(given)
            if way.startswith("extend"):
                replay.extend(twins.mapped(lambda x: x.reshape(-1, ENVS, *x.shape[1:]), given))
            else:
                replay.add(given)
            replay.check()
            found.append({name: x.clone() for name, x in rows_of(replay).items()})
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0]), shift


SCHEMA = Schema({"obs": (3,), "twin": (3,), "reward": (), "value": (), "log_prob": (), **FLAGS})


def play(wrap: bool = False) -> RolloutBuffer:
    rollout = RolloutBuffer(SCHEMA, 4, ENVS, wrap=wrap)
    for t in range(6 if wrap else 3):
        obs = numbered(10 * t, 3)
        numbers = {name: obs[:, 0] + k / 8 for k, name in enumerate(("reward", "value", "log_prob"))}
        rollout.add(obs=obs, twin=-obs, **numbers, **dict.fromkeys(FLAGS, np.zeros(ENVS, np.bool_)))
    return rollout


def add_swapped(rollout: RolloutBuffer, form: Any, row: int) -> None:
    block = rollout.block
    given = {name: block[name][row] for name in ("twin", "value", "reward", *FLAGS)}
    given |= {"obs": block["twin"][row], "twin": block["obs"][row], "log_prob": block["value"][row]}
    given["value"], given["reward"] = block["reward"][row], block["log_prob"][row]
    rollout.add(form(given), final_value=form(block["value"][row]))


def extend_shifted(rollout: RolloutBuffer, form: Any) -> None:
    """A column of itself, a step on: each row is overwritten before it is read."""
    rollout["obs"] = form(torch.as_strided(rollout.block["obs"], (rollout.steps, ENVS, 3), (3 * ENVS, 3, 1), 3))


def reserve_swapped(rollout: RolloutBuffer, form: Any) -> None:
    rows = rollout.reserve(1)
    rows["obs"][0], rows["twin"][0] = 5.0, 7.0
    rollout.add(form({name: rows[name][0] for name in rows.keys()} | {"obs": rows["twin"][0], "twin": rows["obs"][0]}))


def swapped_columns(rollout: RolloutBuffer, form: Any) -> None:
    class Swap:
        reads = ("reward", "value")

        def __call__(self, **_: Any) -> dict[str, torch.Tensor]:
            names = ("value", "reward")
            return form({"advantage": rollout["reward"], "return": rollout["log_prob"]}) | dict(
                zip(("reward", "value"), (form(rollout[name]) for name in names), strict=True)
            )

    rollout.set_last(value=np.zeros(ENVS))
    rollout.finish(Swap(), partial=True)


def last_swapped(rollout: RolloutBuffer, form: Any) -> None:
    rollout.set_last(obs=numbered(50, 3), twin=numbered(60, 3), value=numbered(70, 1)[:, 0])
    rollout.set_last(obs=form(rollout.last["twin"]), twin=form(rollout.last["obs"]), value=form(rollout.last["value"]))


def final_shifted(rollout: RolloutBuffer, form: Any) -> None:
    steps = torch.arange(3).repeat_interleave(ENVS)
    envs = torch.arange(ENVS).repeat(3)
    rollout.set_final_value(steps, envs, numbered(80, 1, 3 * ENVS)[:, 0])
    flat = rollout.block["final_value"].reshape(-1)
    rollout.set_final_value(steps[1:], envs[1:], form(flat[: 3 * ENVS - 1]))


WAYS: dict[str, Any] = {
    "add a step of a row's other fields": partial(add_swapped, row=3),
    "add the rows that are reserved": reserve_swapped,
    "a column of itself": extend_shifted,
    "columns of an estimator": swapped_columns,
    "the last row": last_swapped,
    "final values": final_shifted,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_view_of_a_rollouts_own_columns_is_stored_as_its_copy_is(way: str) -> None:
    found = []
    for form in (lambda tree: tree, lambda tree: twins.mapped(lambda x: x.clone(), tree)):
        rollout = play()
        WAYS[way](rollout, form)
        found.append({name: rollout.block[name].clone() for name in rollout.keys() if name in rollout.block.keys()})
        found[-1] |= {name: rollout[name].clone() for name in rollout.keys()}
    for name in found[0]:
        assert torch.equal(found[0][name].nan_to_num(7), found[1][name].nan_to_num(7)), name


def test_a_step_of_the_row_that_makes_way_is_stored_as_its_copy_is() -> None:
    found = []
    for form in (lambda tree: tree, lambda tree: twins.mapped(lambda x: x.clone(), tree)):
        rollout = play(wrap=True)
        add_swapped(rollout, form, 2)  # the oldest
        found.append({name: rollout[name].clone() for name in rollout.keys()})
    for name in found[0]:
        assert torch.equal(found[0][name].nan_to_num(7), found[1][name].nan_to_num(7)), name
