"""Recurrent PPO over whole trajectories: one learner, and an adapter for each library that has such sequences."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import training_ppo as ppo
from training_play import GAMMA, LAMBDA, Clock, Env, Step, improve, mean_return, returns_differ

HIDDEN = 64


@dataclass
class Sequences:
    """A batch: padded observations `[L, B, D]`, first states `[1, B, H]`, and the real steps of everything else.

    `real` takes an output `[L, B, ...]` of the network to the layout of the other fields.
    """

    obs: Tensor
    hidden: Tensor
    real: Callable[[Tensor], Tensor]
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    ret: Tensor


@dataclass(frozen=True)
class RecurrentPpo(ppo.Ppo):
    """PPO with one GRU whose output both heads read."""

    def learn(self, storage: Any, clock: Clock) -> str:
        """A whole training; returns what was wrong with its first batch, if anything."""
        env, wrong = Env(self.envs, self.obs_dim, self.action_dim), ""
        torch.manual_seed(0)
        gru, actor, critic = nn.GRU(self.obs_dim, HIDDEN), nn.Linear(HIDDEN, self.action_dim), nn.Linear(HIDDEN, 1)
        scale = nn.Parameter(torch.zeros(self.action_dim))
        optimizer = torch.optim.Adam([*gru.parameters(), *actor.parameters(), *critic.parameters(), scale], lr=3e-4)
        hidden = torch.zeros(1, self.envs, HIDDEN)
        steps: list[Step] = []
        for update in range(self.updates):
            returns: list[Tensor] = []
            with torch.no_grad():
                for _ in range(self.steps):
                    obs, before = env.obs, hidden
                    out, hidden = gru(obs[None], before)
                    policy, value = Normal(actor(out[0]), scale.exp()), critic(out[0]).squeeze(-1)
                    action = policy.sample()
                    after, *rest = env.step(action)
                    ended, cut = rest[1] | rest[2], rest[2]
                    final_value = critic(gru(after[None], hidden)[0][0]).squeeze(-1) if cut.any() else None
                    log_prob = policy.log_prob(action).sum(-1)
                    clock(storage.add, obs, action, *rest, value, log_prob, final_value, before)
                    hidden = hidden * ~ended[:, None]
                    if update == 0:
                        steps.append((*rest, value, final_value))
                last_value = critic(gru(env.obs[None], hidden)[0][0]).squeeze(-1)
                clock(storage.finish, env.obs, last_value)
            for number, batch in enumerate(clock.each(storage.batches(self.epochs))):
                out = batch.real(gru(batch.obs, batch.hidden)[0])
                if update == 0 and number < ppo.BATCHES:
                    returns.append(batch.ret.clone())  # the batch itself may go
                    if out.shape[:-1] != batch.ret.shape:
                        wrong = f"{tuple(out.shape)} steps and {tuple(batch.ret.shape)} returns"
                advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
                ratio = (Normal(actor(out), scale.exp()).log_prob(batch.action).sum(-1) - batch.log_prob).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                improve(optimizer, 0.5 * (critic(out).squeeze(-1) - batch.ret).square().mean() - gain)
            if update == 0:
                wrong = wrong or returns_differ(returns, mean_return(steps, last_value))
            clock(storage.clear)
        return wrong


class Ready(ppo.Ready):
    """No storage: the same ready sequences each time, as many and as long as whole trajectories are."""

    def __init__(self, work: ppo.Ppo) -> None:
        count = work.envs // ppo.BATCHES
        shape = work.steps, count
        self.ready = Sequences(
            torch.zeros(*shape, work.obs_dim), torch.zeros(1, count, HIDDEN), lambda out: out,
            torch.zeros(*shape, work.action_dim), torch.zeros(shape), torch.randn(shape), torch.zeros(shape),
        )  # fmt: skip

    def batches(self, epochs: int) -> Iterator[Any]:
        return iter([self.ready] * (ppo.BATCHES * epochs))


class Relive(ppo.Relive):
    def __init__(self, work: ppo.Ppo) -> None:
        super().__init__(work)
        relive = importlib.import_module("relive")
        schema = self.rollout.schema.extend(hidden=(1, HIDDEN))
        self.rollout = relive.RolloutBuffer(schema, work.steps, work.envs, seed=0)

    def add(self, obs: Tensor, action: Tensor, *rest: Any) -> None:
        names = "reward", "terminated", "truncated", "value", "log_prob", "final_value"
        fields = {name: value for name, value in zip(names, rest[:-1], strict=True) if value is not None}
        self.rollout.add(obs=obs, action=action, hidden=rest[-1].transpose(0, 1), **fields)

    def batches(self, epochs: int) -> Iterator[Any]:
        names = "obs", "action", "log_prob", "advantage", "return"
        for b in self.rollout.sequences(num_batches=ppo.BATCHES, epochs=epochs, fields=names):
            fields = (b.flat(b[name]) for name in names[1:])
            yield Sequences(b["obs"], b["hidden"], b.flat, *fields)


class RslRl(ppo.RslRl):
    def add(self, obs: Tensor, action: Tensor, *rest: Any) -> None:
        state = rest[-1]
        self.transition.hidden_states = state, state
        super().add(obs, action, *rest[:-1])

    def batches(self, epochs: int) -> Iterator[Any]:
        unpad = importlib.import_module("rsl_rl.utils").unpad_trajectories
        for b in self.storage.recurrent_mini_batch_generator(ppo.BATCHES, epochs):
            scalars = (x.squeeze(-1) for x in (b.old_actions_log_prob, b.advantages, b.returns))
            obs, masks = b.observations["policy"], b.masks
            yield Sequences(obs, b.hidden_states[0], lambda out, masks=masks: unpad(out, masks), b.actions, *scalars)


class TorchRl(ppo.TorchRl):
    """A TensorDict [T, N], GAE on it, `split_trajectories`, and shuffled indices of the padded trajectories."""

    def add(self, obs: Tensor, action: Tensor, *rest: Any) -> None:
        super().add(obs, action, *rest[:-1])
        self.steps[-1]["hidden"] = rest[-1][0]

    def finish(self, _: Tensor, value: Tensor) -> None:
        block: Any = torch.stack(self.steps)
        following = torch.cat([block["value"][1:], value[None]])
        done = block["done"]
        advantage, ret = self.gae(GAMMA, LAMBDA, block["value"], following, block["reward"], done, done)
        fields = {"advantage": advantage, "return": ret, "next": {"done": done}}
        block = block.select("obs", "action", "log_prob", "hidden").update(fields)
        split = importlib.import_module("torchrl.collectors.utils").split_trajectories
        self.padded = split(block.transpose(0, 1).contiguous())

    def batches(self, epochs: int) -> Iterator[Any]:
        for _ in range(epochs):
            for index in torch.randperm(len(self.padded)).tensor_split(ppo.BATCHES):
                b = self.padded[index]
                mask = b["mask"]
                fields = (b[name][mask] for name in ("action", "log_prob", "advantage", "return"))
                real = lambda out, mask=mask: out.transpose(0, 1)[mask]  # noqa: E731
                yield Sequences(b["obs"].transpose(0, 1), b["hidden"][None, :, 0], real, *fields)
