"""Policies and value functions: how they are called, what they return, and one that acts at random."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batches import swap_layers
from ..errors import EnvError, FieldError
from ..parameters import Rule, require, seed_or_drawn
from ..steps.arrays import Bools, as_host
from ..steps.schema import Path, Schema, descend
from .envs import require_start

__all__ = ["Policy", "RandomPolicy", "ask", "fields_of", "require_functions", "value_of"]


Policy = Callable[..., Any]


POLICY_RULE: Rule = callable, "expected a function of observations, such as a torch.nn.Module"


def require_functions(policy: Any, value_fn: Any) -> None:
    """Require a policy that can be called, and a value function that can, or None.

    Raises:
        ParameterError: names the one that cannot.
    """
    require("Collector", POLICY_RULE, policy=policy, value_fn=policy if value_fn is None else value_fn)


def ask(policy: Policy, obs: Any, inputs: dict[str, Any]) -> Any:
    """The result of a policy or value function. If its signature does not fit, the error lists what it is passed.

    An error of torch about dtypes gets a note if observations are float64, as networks are float32 unless told.
    """
    try:
        return policy(obs, **inputs)
    except RuntimeError as error:
        if "ouble" in str(error) and _has_float64(obs):
            error.add_note(
                "The policy (or value_fn) got float64 observations, as the schema declares them. If the network is "
                "float32, make the buffer with Schema.from_env(envs).as_float32()"
            )
        raise
    except TypeError as error:
        reason = _misfit(policy, inputs)
        if reason is None:
            raise
        call = ", ".join(["obs", *(f"{name}=..." for name in inputs)])
        raise FieldError(
            f"the policy (or value_fn) is called as policy({call}), which fails: {reason}. 'hidden', 'is_start', "
            "'last_action', 'last_reward' and the fields of from_info are passed if the schema has a field of that "
            "name; add it to the schema, or to the policy's parameters"
        ) from error


def _misfit(policy: Policy, inputs: dict[str, Any]) -> str | None:
    """Why a function cannot be called with these arguments, if its signature shows it."""
    try:
        signature = inspect.signature(getattr(policy, "forward", policy))  # a torch.nn.Module takes anything itself
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, **inputs)
    except TypeError as error:
        return str(error)
    return None


def _has_float64(obs: Any) -> bool:
    """Whether a tensor, or a member of a TensorDict, is float64."""
    leaves = [obs] if isinstance(obs, torch.Tensor) else obs.values(include_nested=True, leaves_only=True)
    return any(leaf.dtype is torch.float64 for leaf in leaves)


def fields_of(answer: Any) -> dict[str, Any]:
    """The fields of a policy's answer, which is a mapping or the bare actions."""
    return dict(answer.items()) if hasattr(answer, "items") else {"action": answer}


def value_of(policy: Policy) -> Policy:
    """A value function that calls ``policy`` and returns only the value."""

    def value(obs: Any, **inputs: Any) -> Any:
        fields = fields_of(ask(policy, obs, inputs))
        if "value" not in fields:
            raise FieldError("the schema has 'value', but the policy's answer does not; return it, or pass value_fn=")
        return fields["value"]

    return value


class RandomPolicy:
    """Uniformly random actions among those that ``action_mask`` allows. All other fields of a policy are 0."""

    def __init__(self, space: Any, schema: Schema, num_envs: int, device: torch.device, seed: int | None) -> None:
        self._space, self._schema, self._num_envs, self._device = space, schema, num_envs, device
        self._rng = np.random.default_rng(seed_or_drawn(require_start("warm", 1, seed)))
        space.seed(int(self._rng.integers(2**31)))

    def __call__(self, obs: Any, **inputs: Any) -> dict[str, Any]:
        """Every field of the schema that comes neither from the env nor from ``inputs``."""
        given = {"obs", "action", "reward", "terminated", "truncated", *inputs} - {"hidden"}
        answer = {name: self._schema.rebuild(name, self._zeros) for name in self._schema.names if name not in given}
        return answer | {"action": self._actions(inputs.get("action_mask"))}

    def _zeros(self, path: Path) -> Tensor:
        leaf = self._schema.leaves[path]
        zeros = torch.zeros((self._num_envs, *leaf.shape), dtype=leaf.dtype, device=self._device)
        return swap_layers(zeros) if path[0] == "hidden" else zeros

    def _actions(self, mask: Any) -> Any:
        if mask is None:
            rows = [self._space.sample() for _ in range(self._num_envs)]
            return self._schema.rebuild("action", lambda path: np.stack([descend(row, path[1:]) for row in rows]))
        legal: Bools = as_host(mask).astype(np.bool_)
        if legal.ndim != 2 or not hasattr(self._space, "start"):
            raise EnvError("random actions under an action mask need one Discrete action; pass warm(..., policy=...)")
        return np.where(legal, self._rng.random(legal.shape), -1.0).argmax(1) + int(self._space.start)
