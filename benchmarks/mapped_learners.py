"""What learns from the batches of a replay in files: small networks, and those that papers use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

Learn = Callable[[Any], torch.Tensor]
"""One update from a batch; returns the TD errors."""


def q_learning(net: nn.Module) -> Learn:
    """Q-learning without a target network."""
    optimizer = torch.optim.Adam(net.parameters())

    def learn(batch: Any) -> torch.Tensor:
        now, then = (net(batch[name].float()) for name in ("obs", "next_obs"))
        td_error = batch["reward"] + now[:, 0] - then.amax(1).detach()
        optimizer.zero_grad()
        td_error.square().mean().backward()
        optimizer.step()
        return td_error.detach()

    return learn


def small() -> Learn:
    """Two layers of 256 over vectors."""
    return q_learning(_dense(17, 4))


def small_frames() -> Learn:
    """A small convolution over stacks of 4 frames."""
    layers = nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 16, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 4)
    return q_learning(nn.Sequential(*layers))


def dqn() -> Learn:
    """The network of DQN (Mnih et al., Nature 2015), with a target network, over stacks of 4 frames."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6),
        )  # fmt: skip

    q, target = net(), net()
    optimizer = torch.optim.Adam(q.parameters())

    def learn(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            worth = batch["reward"] + 0.99 * batch["discount"] * target(batch["next_obs"] / 255.0).amax(1)
        chosen = q(batch["obs"] / 255.0).gather(1, batch["action"].long()[:, None])[:, 0]
        td_error = worth - chosen
        optimizer.zero_grad()
        td_error.square().mean().backward()
        optimizer.step()
        return td_error.detach()

    return learn


def sac() -> Learn:
    """SAC (Haarnoja et al. 2018): two critics and an actor, each with two layers of 256, and target critics."""
    critics, targets = ([_dense(23, 1) for _ in range(2)] for _ in range(2))
    actor = _dense(17, 12)
    critic_optimizer = torch.optim.Adam([p for critic in critics for p in critic.parameters()], 3e-4)
    actor_optimizer = torch.optim.Adam(actor.parameters(), 3e-4)

    def play(obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = actor(obs).chunk(2, 1)
        pi = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = pi.rsample()
        return raw.tanh(), (pi.log_prob(raw) - 2 * (0.6931 - raw - softplus(-2 * raw))).sum(1)

    def worth(nets: list[nn.Module], obs: torch.Tensor, action: torch.Tensor) -> list[torch.Tensor]:
        return [net(torch.cat([obs, action], 1))[:, 0] for net in nets]

    def learn(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            action, log_prob = play(batch["next_obs"])
            after = torch.min(*worth(targets, batch["next_obs"], action)) - 0.2 * log_prob
            wanted = batch["reward"] + 0.99 * batch["discount"] * after
        td_errors = [wanted - q for q in worth(critics, batch["obs"], batch["action"])]
        critic_optimizer.zero_grad()
        torch.stack(td_errors).square().mean().backward()
        critic_optimizer.step()
        action, log_prob = play(batch["obs"])
        actor_optimizer.zero_grad()
        (0.2 * log_prob - torch.min(*worth(critics, batch["obs"], action))).mean().backward()
        actor_optimizer.step()
        with torch.no_grad():
            for target, critic in zip(targets, critics, strict=True):
                for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, 0.005)
        return td_errors[0].detach()

    return learn


def _dense(inputs: int, outputs: int) -> nn.Module:
    hidden = nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(256, outputs))
