"""Advantages and returns: pure functions, and the estimators for ``rollout.finish``."""

from .estimators import GAE, Estimator, GroupAdvantage, MonteCarlo, TDLambda, VTrace
from .functions import gae, group_advantage, lambda_returns, monte_carlo, normalize, vtrace

__all__ = [
    "GAE",
    "Estimator",
    "GroupAdvantage",
    "MonteCarlo",
    "TDLambda",
    "VTrace",
    "gae",
    "group_advantage",
    "lambda_returns",
    "monte_carlo",
    "normalize",
    "vtrace",
]
