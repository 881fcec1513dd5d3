"""Other defaults of torch change nothing: each play of tests/test_overwritten.py once more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode

import relive
import test_overwritten as plays
from relive import Lanes, Mixture, ReplayBuffer, Uniform
from support.cases import covering
from support.defaults import OTHERS, TORCH, other_default, play_under
from support.effort import CI
from support.overwrites import Hands
from support.twins import SAMPLERS


def cells() -> list[Any]:
    """Those of the two kinds of processes are left to ``.ci/run``."""
    envs = sorted(plays.ENVS, key=lambda name: name.startswith("async"))
    found = covering(plays.KINDS, envs, list(AutoresetMode), OTHERS, full=2, quick=1)
    return [pytest.param(*x.values, marks=CI if "async" in x.values[1] and not x.marks else x.marks) for x in found]


@pytest.mark.parametrize(("kind", "envs", "mode", "default"), cells())
def test_a_collector_stores_the_same(kind: str, envs: str, mode: AutoresetMode, default: str, tmp_path: Path) -> None:
    paths = iter((tmp_path / "plain", tmp_path / "other"))
    play_under(default, lambda hands: plays.collected(hands, kind, envs, mode, next(paths)))


@pytest.mark.parametrize(
    ("view", "sampler", "default"), covering([*plays.VIEWS, *plays.SEQUENCES], SAMPLERS, OTHERS, full=2, quick=1)
)
def test_a_replay_gives_and_serves_the_same(sampler: str, view: str, default: str) -> None:
    play_under(default, lambda hands: plays.read(hands, sampler, view))


def mixed(hands: Hands, path: Path) -> None:
    """Mixtures of replays that lanes fill, before and after they are saved."""
    replays = {name: ReplayBuffer(plays.USERS, 60, plays.N, seed=k, sampler=Uniform()) for k, name in enumerate("ab")}
    for replay in replays.values():
        lanes = Lanes(plays.USERS, 1, plays.N, steps=20)
        plays.fill(hands, lanes.writer(0), "tensors", count=9)
        lanes.drain(replay)
    mixture = Mixture(replays, {"a": 0.3, "b": 0.7})
    hands.note("mixed", [mixture.sample(5) for _ in range(4)])
    for name, replay in replays.items():
        replay.save(path / name)
    loaded = Mixture({name: ReplayBuffer.load(path / name) for name in replays}, mixture.shares)
    loaded.load_state_dict(mixture.state_dict())
    hands.note("loaded", [loaded.sample(5) for _ in range(2)])


USES: dict[str, Callable[[Hands, Path], None]] = {
    **{f"adds {form}": lambda hands, _, form=form: plays.added(hands, form) for form in plays.FORMS},
    "extends": lambda hands, _: plays.added(hands, "arrays", extend=True),
    "unordered": lambda hands, _: plays.added(hands, "tensors", ordered=False),
    **{f"hindsight, {sampler}": lambda hands, _, sampler=sampler: plays.relabelled(hands, sampler)
       for sampler in ("uniform", "prioritized, stratified")},
    **{f"rollout of {form}": lambda hands, _, form=form: plays.rolled(hands, form) for form in plays.FORMS},
    "saves": plays.saved,
    "mixture": mixed,
}  # fmt: skip


@pytest.mark.parametrize("default", OTHERS)
@pytest.mark.parametrize("use", USES)
def test_direct_calls_give_the_same(use: str, default: str, tmp_path: Path) -> None:
    paths = iter((tmp_path / "plain", tmp_path / "other"))
    play_under(default, lambda hands: USES[use](hands, next(paths)))


def test_a_tensor_that_relive_makes_without_a_device_or_dtype_is_found() -> None:
    def run(hands: Hands, file: str) -> None:
        exec(compile("made = torch.zeros(2)", file, "exec"), found := {"torch": torch})
        hands.note("dtype", found["made"].cpu() if found["made"].device.type == "cpu" else torch.ones(2))

    for default in OTHERS:
        with pytest.raises(AssertionError, match=f"default {default} has changed"):
            play_under(default, partial(run, file=relive.__file__))
        play_under(default, partial(run, file=__file__))
    with other_default("device"):
        assert torch.nn.Linear(1, 1).weight.device.type == "cpu", f"{TORCH} is called by nobody of relive"
