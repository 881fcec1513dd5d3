"""Other defaults of torch change nothing that a rollout computes, gives, saves or loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import GAE, GroupAdvantage, MonteCarlo, RolloutBuffer, Schema, TDLambda, ValueHeads, VTrace
from support.cases import covering
from support.defaults import OTHERS, play_under
from support.other_device import ELSEWHERE, far_device
from support.overwrites import Hands, leaves
from support.rollouts import NAN, SCHEMA, play

T, N = 9, 3
RECURRENT = {name: SCHEMA[name] for name in SCHEMA.names} | {"cost": (), "target_log_prob": (), "hidden": (1, 2)}

ESTIMATORS: dict[str, Any] = {
    "GAE": GAE(0.9, 0.8),
    "TDLambda": TDLambda(0.9, 0.5),
    "MonteCarlo": MonteCarlo(0.9),
    "MonteCarlo, normalized": MonteCarlo(0.9, normalize=True),
    "VTrace": VTrace(0.9),
    "GroupAdvantage": GroupAdvantage(3),
    "heads": ValueHeads({"reward": GAE(0.9, 0.8, normalize=True), "cost": TDLambda(0.9, 0.5)}),
}


def filled(estimator: str, masked: bool, **options: Any) -> RolloutBuffer:
    heads = (2,) if estimator == "heads" else ()
    rollout = RolloutBuffer(Schema(RECURRENT | {"value": heads}), T, N, seed=3, **options)
    rng = np.random.default_rng(7)
    for each in play(T, N, seed=1, masked=masked):
        needed = ~np.isnan(each["final_value"]).reshape(N, *([1] * len(heads)))
        more = {"value": rng.normal(size=(N, *heads)), "hidden": rng.normal(size=(N, 1, 2)),
                "final_value": np.where(needed, rng.normal(size=(N, *heads)), NAN),
                "cost": rng.normal(size=N), "target_log_prob": each["log_prob"] + 0.5}  # fmt: skip
        rollout.add(each | {name: np.float32(x) for name, x in more.items()})
    rollout.set_last(value=np.float32(rng.normal(size=(N, *heads))))
    return rollout


READS: dict[str, Callable[[RolloutBuffer], Any]] = {
    "columns": lambda r: [r[name] for name in r.keys()],
    "minibatches": lambda r: r.minibatches(5, epochs=2, normalize_advantage="advantage" in r),
    "minibatches by number": lambda r: r.minibatches(num_batches=4),
    "sequences": lambda r: r.sequences(3, batch_size=2, normalize_advantage="advantage" in r),
    "sequences that overlap": lambda r: r.sequences(4, overlap=2, batch_size=4),
    "episodes": lambda r: r.sequences(None, batch_steps=8),
    "chunks": lambda r: r.chunks(4),
    "env batches": lambda r: r.env_batches(2, epochs=2),
    "env batches in order": lambda r: r.env_batches(2, shuffle=False, sequences=("obs", "value")),
    "flat": lambda r: [r.flat()],
    "sample": lambda r: [r.sample(4)],
    "data": lambda r: [r.data(), r.last],
}


@pytest.mark.parametrize(
    ("estimator", "masked", "default"), covering(ESTIMATORS, (False, True), OTHERS, full=3, quick=1)
)
def test_estimators_readers_and_files_give_the_same(estimator: str, masked: bool, default: str, tmp_path: Path) -> None:
    paths = iter((tmp_path / "plain", tmp_path / "other"))

    def run(hands: Hands) -> None:
        rollout, path = filled(estimator, masked), next(paths)
        rollout.finish(ESTIMATORS[estimator])
        rollout.save(path, extra={"weights": torch.ones(2)})
        for one in (rollout, RolloutBuffer.load(path)):
            if one is not rollout:
                one.finish(ESTIMATORS[estimator])
            for name, read in READS.items():
                hands.note(name, list(read(one)))

    play_under(default, run)


@pytest.mark.parametrize(("estimator", "masked"), covering(ESTIMATORS, (False, True), full=2, quick=1))
def test_a_rollout_on_a_device_gives_the_same_whatever_the_default_dtype(estimator: str, masked: bool) -> None:
    def run(hands: Hands) -> None:
        with far_device():
            rollout = filled(estimator, masked, device=ELSEWHERE).finish(ESTIMATORS[estimator])
            for name in ("columns", "minibatches", "sequences", "chunks", "sample", "data"):
                found = [leaf.to("cpu") if isinstance(leaf, torch.Tensor) else leaf
                         for leaf in leaves(list(READS[name](rollout)))]  # fmt: skip
                hands.note(name, found)

    play_under("dtype", run)
