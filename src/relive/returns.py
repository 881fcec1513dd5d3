"""Advantages and returns: pure functions, and the estimators for ``rollout.finish``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .core import returns as recursions
from .core import scale as scale_numbers
from .core.returns import Grid, is_known_grid
from .errors import DeviceError, DTypeError, ParameterError, ShapeError
from .parameters import (
    CLIP_RULE,
    COUNT_RULE,
    EPS_RULE,
    FLAG_RULE,
    GAMMA_RULE,
    LAM_RULE,
    Rule,
    checked,
    is_count,
    is_mapping,
    is_names,
    one_of,
    require,
)
from .steps.arrays import in_memory

__all__ = [
    "EPS",
    "GAE",
    "PER_RULE",
    "Estimator",
    "GroupAdvantage",
    "MonteCarlo",
    "TDLambda",
    "VTrace",
    "ValueHeads",
    "gae",
    "group_advantage",
    "lambda_returns",
    "monte_carlo",
    "normalize",
    "scale",
    "scaled",
    "vtrace",
]


EPS = 1e-8
"""Added to standard deviations, so that equal numbers are not divided by 0."""

PER_RULE = one_of("step", "episode")
"""The rule for ``per`` of :func:`group_advantage`."""


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): Âₜ = δₜ + γλ(1 - doneₜ)Âₜ₊₁.

    Args:
        reward: ``[T, N]``, float.
        value: ``[T + 1, N]``; the last row is V(obs[T]).
        terminated: ``[T, N]``, bool.
        truncated: ``[T, N]``, bool.
        final_value: ``[T, N]``, V(true final observation); read only where a real step was truncated.
        mask: ``[T, N]``, bool, False for steps that are not real.
        gamma: discount per step.
        lam: λ; 0 gives the TD error, 1 the Monte-Carlo advantage.

    Returns:
        advantage and return (advantage + value), each ``[T, N]``, of the dtype of the input.

    Raises:
        ShapeError, DTypeError, DeviceError: an argument does not fit ``reward``.
        FieldError: a truncated step has no final value.
        ParameterError: ``gamma`` or ``lam`` is out of range.
    """
    require("gae", GAMMA_RULE, gamma=gamma)
    require("gae", LAM_RULE, lam=lam)
    _require_dense("value", value)
    grid = _grid(reward, value, terminated, truncated, final_value, mask)
    return recursions.gae(grid, gamma, lam)


def lambda_returns(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> Tensor:
    """TD(λ) returns (Sutton and Barto 2018, eq. 12.2), ``[T, N]``: Gₜ = rₜ + γ((1 - λ)v'ₜ + λGₜ₊₁).

    They equal the value plus the GAE advantage with the same λ.

    Args:
        reward: ``[T, N]``, float.
        value: ``[T + 1, N]``; the last row is V(obs[T]).
        terminated: ``[T, N]``, bool.
        truncated: ``[T, N]``, bool.
        final_value: ``[T, N]``, V(true final observation); read only where a real step was truncated.
        mask: ``[T, N]``, bool, False for steps that are not real.
        gamma: discount per step.
        lam: λ; 0 gives one reward and the value after it, 1 all rewards.

    Raises:
        ShapeError, DTypeError, DeviceError, FieldError, ParameterError: as :func:`gae`.
    """
    return gae(reward, value, terminated, truncated, final_value=final_value, mask=mask, gamma=gamma, lam=lam)[1]


def monte_carlo(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    value: Tensor | None = None,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
) -> Tensor:
    """Discounted returns to the end of each episode, ``[T, N]``: Gₜ = rₜ + γGₜ₊₁.

    The rest of an episode that was truncated is ``final_value``; the rest of one that goes on after the rollout is
    ``value[T]``. Without ``value`` there is no critic: the rest counts as 0, and ``final_value`` is ignored.

    Args:
        reward: ``[T, N]``, float.
        terminated: ``[T, N]``, bool.
        truncated: ``[T, N]``, bool.
        value: ``[T + 1, N]``; only its last row is read. None if there is no critic.
        final_value: ``[T, N]``, V(true final observation); read only where a real step was truncated.
        mask: ``[T, N]``, bool, False for steps that are not real.
        gamma: discount per step.

    Raises:
        ShapeError, DTypeError, DeviceError: an argument does not fit ``reward``.
        FieldError: with ``value``, a truncated step has no final value.
        ParameterError: ``gamma`` is out of range.
    """
    require("monte_carlo", GAMMA_RULE, gamma=gamma)
    grid = _grid(reward, value, terminated, truncated, None if value is None else final_value, mask)
    return recursions.discounted_return(grid, gamma)


def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al. 2018, eq. 1): values and policy-gradient advantages, corrected for an older policy.

    vsₜ = vₜ + ρₜδₜ + γcₜ(1 - doneₜ)(vsₜ₊₁ - vₜ₊₁), Âₜ = ρₜ(rₜ + γvs'ₜ - vₜ), with ρ = min(ρ̄, π/μ), c = λ min(c̄, π/μ).

    Args:
        log_rho: ``[T, N]``, log π(a|s) - log μ(a|s), of the target policy π and the acting policy μ.
        reward: ``[T, N]``, float.
        value: ``[T + 1, N]``; the last row is V(obs[T]).
        terminated: ``[T, N]``, bool.
        truncated: ``[T, N]``, bool.
        final_value: ``[T, N]``, V(true final observation); read only where a real step was truncated.
        mask: ``[T, N]``, bool, False for steps that are not real.
        gamma: discount per step.
        lam: λ, from 0 to 1; it shortens the trace.
        rho_clip: ρ̄, the upper limit of ρ; it decides which policy's values vs estimates.
        c_clip: c̄, the upper limit of the trace; it decides how fast the values converge.

    Returns:
        advantage and vs, each ``[T, N]``.

    Raises:
        ShapeError, DTypeError, DeviceError, FieldError, ParameterError: as :func:`gae`.
    """
    require("vtrace", GAMMA_RULE, gamma=gamma)
    require("vtrace", LAM_RULE, lam=lam)
    require("vtrace", CLIP_RULE, rho_clip=rho_clip, c_clip=c_clip)
    _require_dense("value", value)
    grid = _grid(reward, value, terminated, truncated, final_value, mask)
    ratio = _fit("log_rho", log_rho, grid.reward)
    return recursions.vtrace(ratio, grid, gamma, lam, rho_clip, c_clip)


def group_advantage(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    group_size: int,
    per: Literal["step", "episode"] = "step",
    gamma: float = 1.0,
    mask: Tensor | None = None,
    until_first_done: bool = True,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages relative to a group of envs with the same start (GRPO, Shao et al. 2024, section 4.1).

    Args:
        reward: ``[T, N]``, float.
        terminated: ``[T, N]``, bool.
        truncated: ``[T, N]``, bool.
        group_size: consecutive envs of one group; divides N.
        per: "step" compares a step's return with those of the group's envs at the same time. "episode" gives every
            step the return of its whole episode, and compares it with those of the group's episodes.
        gamma: discount per step.
        mask: ``[T, N]``, bool, False for steps that are not real.
        until_first_done: only the first episode of each env counts.
        eps: added to the (population) standard deviation.

    Returns:
        advantage, return and mask of the steps that count, each ``[T, N]``; the advantage is 0 elsewhere.

    Raises:
        ShapeError, DTypeError, DeviceError: an argument does not fit ``reward``.
        ParameterError: ``group_size`` does not divide N, or an option is out of range or not one of the choices.
    """
    reward, _, terminated, truncated, _, mask = _grid(reward, None, terminated, truncated, None, mask)
    steps, envs = reward.shape
    require("group_advantage", PER_RULE, per=per)
    require("group_advantage", FLAG_RULE, until_first_done=until_first_done)
    require("group_advantage", EPS_RULE, eps=eps)
    if not is_count(group_size, 1) or envs % group_size:
        raise ParameterError(f"group_size={group_size!r:.200} does not divide the {envs} envs into whole groups")
    done = terminated | truncated
    real = torch.ones_like(done) if mask is None else mask
    ended = (done & real).cumsum(0) - (done & real).to(torch.int64)  # episodes that ended before this step
    counted = real & (ended == 0) if until_first_done else real.clone()
    ret = monte_carlo(reward, terminated, truncated, mask=mask, gamma=gamma)
    entries, axes = counted, (2,)
    if per == "episode":
        start, ret = _of_episodes(ret, done, real)
        entries, axes = start & counted, (0, 2)
    shape = (steps, envs // group_size, group_size)
    centred, variance = _moments(ret.view(shape).double(), entries.view(shape), axes, 0)  # as in normalize
    advantage = (centred / (variance.sqrt() + float(eps))).view(steps, envs)
    return torch.where(counted, advantage, 0.0).to(ret.dtype), ret, counted


def normalize(x: Tensor, mask: Tensor | None = None, eps: float = EPS) -> Tensor:
    """(x - mean) / (std + eps) over the entries with ``mask`` True; 0 elsewhere.

    The standard deviation is unbiased. With fewer than two entries it is 0, so a single entry gives 0, not NaN.

    Args:
        x: floats of any shape.
        mask: bool of the same shape, True for the entries that count; None counts all.
        eps: added to the standard deviation.

    Raises:
        DTypeError, ShapeError, DeviceError: ``x`` is not a tensor of floats, or ``mask`` is not bool of its shape.
        ParameterError: ``eps`` is out of range.
    """
    require("normalize", EPS_RULE, eps=eps)
    _require_dense("x", x)
    if not x.is_floating_point():
        raise DTypeError(f"field 'x': expected floats, got {x.dtype}; pass .float()")
    if mask is not None:
        mask = _fit("mask", mask, x, torch.bool)
    return scaled(x, mask, float(eps))


def scaled(x: Tensor, mask: Tensor | None = None, eps: float = EPS) -> Tensor:
    """A column of a rollout, normalised as :func:`normalize` does, without its checks."""
    if x.requires_grad:
        return _scaled(x, mask, eps)
    out = x.clone()
    scale(out, mask, eps)
    return out


def scale(x: Tensor, mask: Tensor | None = None, eps: float = EPS) -> None:
    """Overwrite a column by :func:`scaled`."""
    if not scale_numbers(x, mask, eps):
        x.copy_(_scaled(x, mask, eps))


class Estimator(Protocol):
    """An argument of ``rollout.finish``: it names the columns it reads and returns the columns to attach.

    ``reads`` may name any column. ``value`` comes as ``[T + 1, N]``, all others as ``[T, N, ...]``. ``final_value``
    is None if no step was truncated, and ``mask`` is None if every step is real.
    """

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns, which are also the keywords of the call."""
        ...

    def __call__(self, *_: Any, **columns: Any) -> dict[str, Tensor]:  # both stars: any keywords will do
        """Column -> ``[T, N, ...]``."""
        ...


_EPISODES = ("reward", "terminated", "truncated", "mask")
_CRITIC = (*_EPISODES, "value", "final_value")


# The functions above keep their arguments written out, because an editor and help() then show what each takes. The
# estimators share all else.
class _Advantages(ABC):
    """Base of the estimators of advantages: the columns that they read, and the columns that they attach."""

    __slots__ = ()
    normalize: bool
    """True if the advantage is scaled over all real steps."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes."""
        return _CRITIC

    @abstractmethod
    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        """Advantage and return, each ``[T, N]``."""

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        advantage, ret = self._compute(**columns)
        return {"advantage": scaled(advantage, columns["mask"]) if self.normalize else advantage, "return": ret}


@checked(gamma=GAMMA_RULE, lam=LAM_RULE, normalize=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class GAE(_Advantages):
    """``finish(GAE(...))`` attaches ``advantage`` and ``return`` by :func:`gae`.

    Args:
        gamma: discount per step, from 0 to 1.
        lam: λ, from 0 (the TD error) to 1 (the Monte-Carlo advantage).
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        return gae(**columns, gamma=self.gamma, lam=self.lam)


@checked(gamma=GAMMA_RULE, lam=LAM_RULE, normalize=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class TDLambda(_Advantages):
    """``finish(TDLambda(...))`` attaches :func:`lambda_returns` as ``return``, and ``advantage`` = return - value.

    Args:
        gamma: discount per step, from 0 to 1.
        lam: λ, from 0 (one reward, then the value) to 1 (all rewards).
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        ret = lambda_returns(**columns, gamma=self.gamma, lam=self.lam)
        return ret - columns["value"][:-1], ret


@checked(gamma=GAMMA_RULE, normalize=FLAG_RULE, critic=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class MonteCarlo(_Advantages):
    """``finish(MonteCarlo(...))`` attaches :func:`monte_carlo` as ``return``, and ``advantage`` = return - value.

    Args:
        gamma: discount per step, from 0 to 1.
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.
        critic: False needs no ``value``: the rest of a cut episode then counts as 0, and the advantage is the return.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    normalize: bool = False
    critic: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes; ``value`` and ``final_value`` only with a critic."""
        return _CRITIC if self.critic else _EPISODES

    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        ret = monte_carlo(**columns, gamma=self.gamma)
        return ret - columns["value"][:-1] if self.critic else ret, ret


@checked(gamma=GAMMA_RULE, lam=LAM_RULE, rho_clip=CLIP_RULE, c_clip=CLIP_RULE, normalize=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class VTrace(_Advantages):
    """``finish(VTrace(...))`` attaches :func:`vtrace` from the columns ``log_prob`` and ``target_log_prob``.

    ``log_prob`` comes from the acting policy. Set ``rollout["target_log_prob"]`` to that of the learner's policy.

    Args:
        gamma: discount per step, from 0 to 1.
        lam: λ, from 0 to 1; it shortens the trace.
        rho_clip: ρ̄, the upper limit of the importance ratio of a step.
        c_clip: c̄, the upper limit of the ratio in the trace.
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    lam: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    normalize: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes."""
        return (*_CRITIC, "log_prob", "target_log_prob")

    def _compute(self, *, log_prob: Tensor, target_log_prob: Tensor, **columns: Any) -> tuple[Tensor, Tensor]:
        columns |= {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        return vtrace(target_log_prob - log_prob, **columns, gamma=self.gamma, lam=self.lam)


@checked(group_size=COUNT_RULE, per=PER_RULE, gamma=GAMMA_RULE, until_first_done=FLAG_RULE, eps=EPS_RULE)
@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """``finish(GroupAdvantage(...))`` attaches ``advantage``, ``return`` and ``mask`` by :func:`group_advantage`.

    It needs no ``value``. The envs of a group start in the same state: ``collector.reset(seed=[0, 0, 1, 1])``.

    Args:
        group_size: consecutive envs of one group; divides N.
        per: "step" compares the returns of the envs at the same time, "episode" those of their whole episodes.
        gamma: discount per step, from 0 to 1.
        until_first_done: only the first episode of each env counts; ``mask`` is False elsewhere.
        eps: added to the standard deviation of a group.

    Raises:
        ParameterError: a parameter is out of range.
    """

    group_size: int
    per: Literal["step", "episode"] = "step"
    gamma: float = 1.0
    until_first_done: bool = True
    eps: float = 1e-8

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes."""
        return _EPISODES

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage``, ``return`` and ``mask``, ``[T, N]``."""
        advantage, ret, mask = group_advantage(**columns, **asdict(self))  # its fields are that function's options
        return {"advantage": advantage, "return": ret, "mask": mask}


def _are_heads(heads: object) -> bool:
    """True for a mapping from names to estimators, of at least one."""
    if not is_mapping(heads) or not heads or not is_names([*heads]):
        return False
    return all(callable(x) and hasattr(x, "reads") and not isinstance(x, type) for x in heads.values())


HEADS_RULE: Rule = (
    _are_heads,
    "expected a mapping from columns of rewards to estimators, such as {'cost': relive.GAE()}",
)


NAMES_RULE: Rule = is_names, "expected names of heads, such as ('intrinsic',)"


@checked(heads=HEADS_RULE)
@dataclass(frozen=True, slots=True)
class ValueHeads:
    """``finish(ValueHeads({...}))`` runs an estimator for each head of a ``value`` ``[T + 1, N, K]``.

    Head k values what the k-th column holds. The results for ``reward`` keep their names; those for another column get
    its name in front: ``cost_advantage`` and ``cost_return``, ``[T, N]``, for ``cost``. Declare ``value=(K,)``.

    A head in ``non_episodic`` goes on over the ends of episodes, as the intrinsic returns of RND do (Burda et al. 2018,
    Exploration by Random Network Distillation, section 2.3). Its estimator gets the real steps of each env one after
    another, as one episode that has not ended: after a step comes the next real one, after the last the bootstrap row.
    Steps that are not real, such as those of a reset under ``NEXT_STEP``, are passed over. Their return is their value,
    as everywhere, and their other results are zeros.

    Args:
        heads: K columns ``[T, N]``, in the order of the heads, and the estimator of each.
        non_episodic: the heads that no end of an episode stops.

    Raises:
        ParameterError: ``heads`` is not such a mapping, or ``non_episodic`` names none of them.
        ShapeError: from ``finish``, if the value does not have K numbers.
    """

    heads: Mapping[str, Estimator]
    non_episodic: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.heads, dict):  # later changes of the caller's are none of these
            object.__setattr__(self, "heads", dict(self.heads))
        require("ValueHeads", NAMES_RULE, non_episodic=self.non_episodic)  # no iterator, which could be read only once
        object.__setattr__(self, "non_episodic", tuple(self.non_episodic))
        if _are_heads(self.heads) and not {*self.non_episodic} <= {*self.heads}:
            raise ParameterError(
                f"ValueHeads(non_episodic={self.non_episodic}): expected some of {', '.join(self.heads)}"
            )

    @property
    def episodic(self) -> list[int]:
        """The numbers of the heads that an end of an episode stops, and which read its final value."""
        return [k for k, name in enumerate(self.heads) if name not in self.non_episodic]

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes."""
        others = [name for estimator in self.heads.values() for name in estimator.reads if name != "reward"]
        mask = ["mask"] if self.non_episodic else []
        return tuple(dict.fromkeys(["value", "final_value", *self.heads, *others, *mask]))

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns of each estimator, under their names."""
        value, final_value = columns["value"], columns.get("final_value")
        if value.shape[2:] != (len(self.heads),):
            raise ShapeError(
                f"field 'value': expected {len(self.heads)} numbers for each env, one for each of "
                f"{', '.join(self.heads)}, got {tuple(value.shape)}; declare value=({len(self.heads)},) in the schema"
            )
        results: dict[str, Tensor] = {}
        for k, (name, estimator) in enumerate(self.heads.items()):
            if columns[name].dim() != 2:
                raise ShapeError(f"field {name!r}: expected a column [T, N], got {tuple(columns[name].shape)}")
            final = None if final_value is None else final_value[..., k]
            given = columns | {"reward": columns[name], "value": value[..., k], "final_value": final}
            run = _over_ends if name in self.non_episodic else _run
            result = run(estimator, given)
            results |= {column if name == "reward" else f"{name}_{column}": x for column, x in result.items()}
        return results


def _run(estimator: Estimator, columns: Mapping[str, Any]) -> dict[str, Tensor]:
    """The results of an estimator, which is given what it reads."""
    return estimator(**{read: columns[read] for read in estimator.reads})


def _over_ends(estimator: Estimator, columns: Mapping[str, Any]) -> dict[str, Tensor]:
    """The results of an estimator for the real steps of each env, as those of one episode that has not ended."""
    mask, value, reward = columns["mask"], columns["value"], columns["reward"]
    no_end = torch.zeros_like(reward, dtype=torch.bool)
    joined: dict[str, Any] = {**columns, "terminated": no_end, "truncated": no_end, "final_value": None}
    if mask is None:
        return _run(estimator, joined)
    # the real steps of each env come first, in their order; the value of what follows the last one is the bootstrap's
    row = torch.sort((~mask).to(torch.uint8), dim=0, stable=True).indices
    env = torch.arange(mask.shape[1], device=mask.device)
    real = mask[row, env]
    for read in estimator.reads:
        if read not in ("value", "terminated", "truncated", "final_value"):
            joined[read] = columns[read][row, env]
    joined["value"] = torch.cat([torch.where(real, value[row, env], value[-1]), value[-1:]])
    joined |= {"mask": real}
    if "mask" not in estimator.reads:  # it takes each row for a step: an end after the last one keeps the others apart
        after = torch.cat([real[1:], torch.ones_like(real[:1])])
        joined |= {"truncated": real & ~after, "final_value": value[-1].expand_as(reward)}
        joined["reward"] = joined["reward"].masked_fill(~real, 0)
    found: dict[str, Tensor] = {}
    for name, result in _run(estimator, joined).items():
        passed = value[:-1] if name == "return" else torch.zeros_like(result)  # what a step that is not real gets
        found[name] = torch.empty_like(result)
        is_step = real.reshape(*real.shape, *[1] * (result.dim() - 2))
        found[name][row, env] = torch.where(is_step, result, passed[row, env].to(result.dtype))
    return found


def _of_episodes(ret: Tensor, done: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The first step of each episode, and every real step with the return of its episode's first, ``[T, N]``."""
    before = torch.zeros_like(done)
    before[1:] = real[:-1] & ~done[:-1]  # True if the step before belongs to the same episode
    start = real & ~before
    row = torch.arange(len(ret), device=ret.device).unsqueeze(1)
    first = torch.where(start, row, 0).cummax(0).values
    return start, torch.where(real, ret.gather(0, first), 0.0)


def _scaled(x: Tensor, mask: Tensor | None, eps: float) -> Tensor:
    """:func:`scaled` in torch operations, which add in an order of their own."""
    wide = x.double()  # in float32 the mean of equal numbers is not exact, and a small eps would magnify the error
    if mask is None:
        std = wide.std() if x.numel() > 1 else 0.0
        return ((wide - wide.mean()) / (std + eps)).to(x.dtype)
    centred, variance = _moments(wide, mask, tuple(range(x.dim())), 1)
    return (torch.where(mask, centred, 0.0) / (variance.sqrt() + eps)).to(x.dtype)


def _moments(x: Tensor, entries: Tensor, axes: tuple[int, ...], fewer: int) -> tuple[Tensor, Tensor]:
    """``x`` minus the mean of its entries along ``axes``, and their variance.

    Args:
        x: float64.
        entries: bool, the numbers that count; a group without any has the mean 0 and the variance 0.
        axes: the axes that are reduced; they stay, with size 1.
        fewer: by how much the variance has fewer degrees of freedom than entries.
    """
    count = entries.sum(axes, keepdim=True)
    mean = torch.where(entries, x, 0.0).sum(axes, keepdim=True) / count.clamp(min=1)
    centred = x - mean
    squares = torch.where(entries, centred, 0.0).square().sum(axes, keepdim=True)
    return centred, squares / (count - fewer).clamp(min=1)


def _grid(
    reward: Tensor,
    value: Tensor | None,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
) -> Grid:
    """The arguments as contiguous tensors of one shape, float dtype and device.

    Raises:
        ShapeError, DTypeError, DeviceError: an argument does not fit ``reward``.
    """
    _require_dense("reward", reward)
    shape = reward.shape
    if len(shape) != 2 or not shape[0] or not shape[1]:
        raise ShapeError(f"field 'reward': expected a grid [T, N] of at least one step, got {tuple(shape)}")
    grid = Grid(reward, value, terminated, truncated, final_value, mask)
    if is_known_grid(*grid):  # then each member is as `_fit` would return it
        return grid
    double = reward.dtype is torch.float64 or getattr(value, "dtype", None) is torch.float64
    numbers = _fit("reward", reward, reward, torch.float64 if double else torch.float32)
    return Grid(
        numbers,
        None if value is None else _fit("value", value, numbers, rows=shape[0] + 1),
        _fit("terminated", terminated, numbers, torch.bool),
        _fit("truncated", truncated, numbers, torch.bool),
        None if final_value is None else _fit("final_value", final_value, numbers),
        None if mask is None else _fit("mask", mask, numbers, torch.bool),
    )


def _require_dense(name: str, x: object) -> None:
    """Require a dense tensor of real numbers.

    Raises:
        DTypeError: it is something else.
    """
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise DTypeError(f"field '{name}': expected a torch.Tensor, got {kind}; pass torch.as_tensor({name})")
    if x.is_complex() or x.is_quantized or x.is_nested or x.layout is not torch.strided:
        what = f"{'nested ' * x.is_nested}{x.dtype} tensor of layout {x.layout} on {x.device}"
        raise DTypeError(f"field '{name}': expected a dense tensor of real numbers, got a {what}")


def _fit(name: str, x: Tensor, like: Tensor, dtype: torch.dtype | None = None, rows: int | None = None) -> Tensor:
    """``x`` as a contiguous tensor of the shape and dtype of ``like``; ``dtype`` and ``rows`` replace theirs."""
    _require_dense(name, x)
    dtype, shape = dtype or like.dtype, like.shape if rows is None else (rows, *like.shape[1:])
    if x.device != like.device:
        device = str(like.device)
        raise DeviceError(f"field '{name}': expected {device}, as 'reward', got {x.device}; pass .to({device!r})")
    if x.shape != shape:
        message = f"field '{name}': expected {tuple(shape)}, got {tuple(x.shape)}"
        if name == "value" and tuple(x.shape) == tuple(like.shape):
            message += "; value has one row more than reward: append V(obs[T]), the bootstrap"
        elif name == "value" and x.dim() > 2:
            message += "; for a value of several heads, pass finish() relive.ValueHeads({'reward': ..., 'cost': ...})"
        raise ShapeError(message)
    if dtype is torch.bool and x.dtype is not torch.bool:
        raise DTypeError(f"field '{name}': expected torch.bool, got {x.dtype}; pass .bool()")
    if x.dtype is not dtype or not x.is_contiguous():
        x = x.to(dtype).contiguous()
    x = x.detach() if x.requires_grad else x
    return in_memory(x, f"field '{name}'") if x.is_cpu and not is_compiling() else x
