"""Filling a replay with transitions that Velora's agent plays before training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arrays import array_of, sent

__all__ = ["generated"]


def generated(agent: Any, count: int, num_envs: int, envs: Any) -> Iterator[list[Tensor]]:
    """``count`` transitions in blocks: states, actions, rewards, next states, terminals, and the actor's states.

    The environments reset in a separate step (``NEXT_STEP``) and ignore its action. That step is left out, so the next
    state of a step is always the one that it led to.
    """
    playing = _copies(agent.env, num_envs) if envs is None else envs
    first, _ = playing.reset(seed=getattr(agent, "seed", None))
    states, hidden = sent(array_of("states", first), agent.device), None
    ended = torch.zeros(len(states), dtype=torch.bool, device=states.device)
    try:
        while count > 0:
            actions, hidden = agent.predict(states, hidden, train_mode=True)
            outcome = playing.step(actions.cpu().numpy())[:4]
            following, rewards, terminated, truncated = (sent(array_of("outcome", x), agent.device) for x in outcome)
            real = (~ended).nonzero().squeeze(1)[:count]
            if len(real):
                columns = states, actions, rewards, following, terminated, hidden
                yield [column[real] for column in columns]
            count -= len(real)
            hidden = torch.where(ended.unsqueeze(1), 0.0, hidden)  # an episode begins with the initial recurrent state
            states, ended = following, ((terminated + truncated) > 0) & ~ended
    finally:
        if envs is None:
            playing.close()


def _copies(env: Any, num_envs: int) -> Any:
    """Parallel copies of an environment, with its arguments and wrappers."""
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    make = partial(gymnasium.make, env.spec)
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
