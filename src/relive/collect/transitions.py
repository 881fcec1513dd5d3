"""What a vector step needs besides its fields: observations after it, and which rows to leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..steps.arrays import Bools
from .envs import VectorEnvs, pick
from .finals import Given
from .inputs import Inputs, Leaves, shaped_as

__all__ = ["following", "truncated_rows"]


Answer = tuple[Any, dict[str, Any]]
"""The observations and the info that a step of the envs returned."""


def following(
    inputs: Inputs,
    vector: VectorEnvs,
    before: Leaves,
    step: dict[str, Any],
    real: Bools,
    answer: Answer,
    every: bool,
) -> dict[str, Any]:
    """``next_obs`` and ``mask`` of a vector step, for a replay; each only if it is needed.

    Args:
        inputs: converts observations.
        vector: the envs.
        before: the observations that the policy acted on, ``[N, ...]``.
        step: has ``terminated`` and ``truncated``, ``[N]``.
        real: the envs that did not ignore their action, ``[N]``.
        answer: the observations and the info that the step returned.
        every: whether each row needs its next observation, or only those that end an episode.

    Raises:
        EnvError: an env hides the final observation of a truncated episode, which is required. If it is not, the mask
            leaves that row out.
    """
    obs, info = answer
    done, needed = step["terminated"] | step["truncated"], dict[str, Any]()
    after = inputs.obs(obs) if every else dict(before)
    ended = done.any()
    if ended:
        cut = step["truncated"] & ~step["terminated"]
        given, _, present = vector.final_observations(cut, obs, info)
        real = real & (~cut | present)
        hidden, envs = inputs.rows(done & ~present), np.flatnonzero(done & present)
        where = torch.as_tensor(envs, device=inputs.device)
        for path, x in after.items():
            # after a terminal nothing is bootstrapped, so a hidden observation does not matter
            kept = torch.where(shaped_as(hidden, x), before[path], x)
            rows = inputs.leaf(path, pick(given, path[1:], envs)) if len(envs) else kept[:0]
            after[path] = kept.index_copy(0, where, rows)
    if every or ended:
        needed["next_obs"] = inputs.as_given(after)
    if not real.all():
        needed["mask"] = real
    return needed


def truncated_rows(
    inputs: Inputs,
    vector: VectorEnvs,
    step: dict[str, Any],
    real: Bools,
    answer: Answer,
    after: Leaves,
    info: Leaves,
    last: Leaves,
) -> tuple[Bools, tuple[Tensor, Given] | None]:
    """The final observations of a vector step that a rollout with values must value.

    Args:
        inputs: converts observations.
        vector: the envs.
        step: has ``terminated`` and ``truncated``, ``[N]``.
        real: the envs that did not ignore their action, ``[N]``.
        answer: the observations and the info that the step returned.
        after: the hidden states after the step, ``[N, ...]``.
        info: the fields that came with the observations before, ``[N, ...]``.
        last: the actions and rewards of the step, ``[N, ...]``.

    Returns:
        the rows that are left after those with a hidden final observation, bool ``[N]``; and the envs of the others
        that were truncated with the policy's inputs there, or None if there are none.

    Raises:
        EnvError: an env hides the final observation of a truncated episode, which is required.
    """
    cut = step["truncated"] & ~step["terminated"]
    if not cut.any():
        return real, None
    given, details, present = vector.final_observations(cut, *answer)
    real, envs = real & (~cut | present), np.flatnonzero(cut & present)
    if not len(envs):
        return real, None
    where = torch.as_tensor(envs, device=inputs.device)
    rows = {path: inputs.leaf(path, pick(given, path[1:], envs)) for path in inputs.obs_paths}
    states = {path: x[where] for path, x in after.items()}
    return real, (where, Given(rows, states, inputs.final_info(details, envs, info, last)))
