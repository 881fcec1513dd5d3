"""Estimators: each attaches what its function returns."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from relive import returns
from support.return_blocks import Block, Numbers, ask_groups, drawn, library, tensor, whole_rewards

# Estimators


def columns_of(estimator: Any, block: Block) -> dict[str, Any]:
    """The columns an estimator reads, as ``finish`` hands them over."""
    columns = block | {"log_prob": block["reward"] * 0, "target_log_prob": block["log_rho"]}
    return {name: tensor(columns[name]) for name in estimator.reads}


@pytest.mark.parametrize("normalized", [False, True])
def test_estimators_attach_what_their_functions_return(normalized: bool) -> None:
    block = drawn(14, 10, 6)
    mask, value = tensor(block["mask"]), tensor(block["value"])
    (whole,) = library("monte_carlo", block, gamma=0.9)
    (bare,) = library("monte_carlo", block | {"value": None, "final_value": None}, gamma=0.9)
    (td,) = library("lambda_returns", block, gamma=0.9, lam=0.5)
    clips: Numbers = {"rho_clip": 0.7, "c_clip": 0.6}
    expected = {
        returns.GAE(0.9, 0.5, normalize=normalized): library("gae", block, gamma=0.9, lam=0.5),
        returns.TDLambda(0.9, 0.5, normalize=normalized): (td - value[:-1], td),
        returns.MonteCarlo(0.9, normalize=normalized): (whole - value[:-1], whole),
        returns.MonteCarlo(0.9, normalize=normalized, critic=False): (bare, bare),
        returns.VTrace(0.9, 0.5, **clips, normalize=normalized): library("vtrace", block, gamma=0.9, lam=0.5, **clips),
    }
    for estimator, (advantage, ret) in expected.items():
        attached = estimator(**columns_of(estimator, block))
        assert attached.keys() == {"advantage", "return"}
        assert torch.equal(attached["return"], ret)
        assert torch.equal(attached["advantage"], returns.normalize(advantage, mask) if normalized else advantage)


def test_the_group_estimator_attaches_the_mask_of_the_steps_that_count() -> None:
    block = whole_rewards(drawn(15, 10, 6))
    estimator = returns.GroupAdvantage(3, per="episode", gamma=0.5, until_first_done=False, eps=0.25)
    attached = estimator(**columns_of(estimator, block))
    advantage, ret, mask = ask_groups(
        block, torch.float32, group_size=3, per="episode", gamma=0.5, until_first_done=False, eps=0.25
    )
    assert attached.keys() == {"advantage", "return", "mask"}
    assert torch.equal(attached["advantage"], advantage)
    assert torch.equal(attached["return"], ret)
    assert torch.equal(attached["mask"], mask)


@pytest.mark.parametrize("name", ["gamma", "gama"])
def test_an_estimator_cannot_be_changed_but_another_can_be_made_of_it(name: str) -> None:
    estimator: Any = returns.GAE(gamma=0.5)
    with pytest.raises(FrozenInstanceError, match=rf"GAE\.{name} cannot be set; make another GAE"):
        setattr(estimator, name, 0.9)
    assert replace(estimator, lam=0.1) == returns.GAE(gamma=0.5, lam=0.1)
    assert pickle.loads(pickle.dumps(estimator)) == estimator


@pytest.mark.parametrize(
    "estimator",
    [
        returns.GAE(0.9),
        returns.TDLambda(),
        returns.MonteCarlo(critic=False),
        returns.VTrace(),
        returns.GroupAdvantage(4),
    ],
)
def test_the_repr_of_an_estimator_is_the_call_that_rebuilds_it(estimator: Any) -> None:
    assert eval(repr(estimator), vars(returns).copy()) == estimator
