"""PPO with a rollout buffer of each library: one learner, and an adapter for each."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from rollout_data import box
from training_play import (
    GAMMA,
    LAMBDA,
    Clock,
    Env,
    Step,
    improve,
    mean_return,
    perceptron,
    returns_differ,
    shapes_differ,
)

BATCHES = 4
Batch = tuple[Tensor, ...]  # obs, action, log_prob, advantage, return


@dataclass(frozen=True)
class Ppo:
    """How much is learned: `updates` rollouts of `steps` steps of `envs` environments."""

    envs: int
    steps: int
    obs_dim: int
    action_dim: int
    updates: int
    epochs: int = 5

    def learn(self, storage: Any, clock: Clock) -> str:
        """A whole training; returns what was wrong with its first batch, if anything."""
        env, wrong = Env(self.envs, self.obs_dim, self.action_dim), ""
        torch.manual_seed(0)
        actor, critic = perceptron(self.obs_dim, self.action_dim), perceptron(self.obs_dim, 1)
        scale = nn.Parameter(torch.zeros(self.action_dim))
        optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters(), scale], lr=3e-4)
        rows = self.envs * self.steps // BATCHES
        steps: list[Step] = []
        for update in range(self.updates):
            returns: list[Tensor] = []
            with torch.no_grad():
                for _ in range(self.steps):
                    obs = env.obs
                    policy, value = Normal(actor(obs), scale.exp()), critic(obs).squeeze(-1)
                    action = policy.sample()
                    after, *rest = env.step(action)
                    cut = rest[2]
                    final_value = critic(after).squeeze(-1) if cut.any() else None
                    clock(storage.add, obs, action, *rest, value, policy.log_prob(action).sum(-1), final_value)
                    if update == 0:
                        steps.append((*rest, value, final_value))
                last_value = critic(env.obs).squeeze(-1)
                clock(storage.finish, env.obs, last_value)
            for number, batch in enumerate(clock.each(storage.batches(self.epochs))):
                if update == 0 and number < BATCHES:
                    sizes = (rows, self.obs_dim), (rows, self.action_dim), (rows,), (rows,), (rows,)
                    returns.append(batch[-1].clone())  # the batch itself may go
                    wrong = wrong or shapes_differ(batch, *sizes)
                obs, action, log_prob, advantage, ret = batch
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = Normal(actor(obs), scale.exp())
                ratio = (policy.log_prob(action).sum(-1) - log_prob).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                improve(optimizer, 0.5 * (critic(obs).squeeze(-1) - ret).square().mean() - gain)
            if update == 0:
                wrong = wrong or returns_differ(returns, mean_return(steps, last_value))
            clock(storage.clear)
        return wrong


class Ready:
    """No storage: the same ready batch each time."""

    def __init__(self, work: Ppo) -> None:
        rows = work.envs * work.steps // BATCHES
        self.batch = torch.zeros(rows, work.obs_dim), torch.zeros(rows, work.action_dim), *torch.zeros(3, rows)
        self.batch[3][::2] = 1

    def add(self, *_: Any) -> None: ...

    def finish(self, *_: Any) -> None: ...

    def batches(self, epochs: int) -> Iterator[Batch]:
        return iter([self.batch] * (BATCHES * epochs))

    def clear(self) -> None: ...


class Relive:
    def __init__(self, work: Ppo) -> None:
        relive = importlib.import_module("relive")
        flags = {name: relive.Field((), torch.bool) for name in ("terminated", "truncated")}
        fields = {"obs": (work.obs_dim,), "action": (work.action_dim,), "reward": (), "value": (), "log_prob": ()}
        self.rollout = relive.RolloutBuffer(relive.Schema(fields | flags), work.steps, work.envs, seed=0)
        self.estimator = relive.GAE(GAMMA, LAMBDA)

    def add(
        self, obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, value: Tensor,
        log_prob: Tensor, final_value: Tensor | None,
    ) -> None:  # fmt: skip
        more = {} if final_value is None else {"final_value": final_value}
        self.rollout.add(
            obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, value=value,
            log_prob=log_prob, **more,
        )  # fmt: skip

    def finish(self, obs: Tensor, value: Tensor) -> None:
        self.rollout.set_last(obs=obs, value=value)
        self.rollout.finish(self.estimator)

    def batches(self, epochs: int) -> Iterator[Batch]:
        names = "obs", "action", "log_prob", "advantage", "return"
        for batch in self.rollout.minibatches(num_batches=BATCHES, epochs=epochs, fields=names, reuse=True):
            yield tuple(batch[name] for name in names)

    def clear(self) -> None:
        self.rollout.clear()


def folded(reward: Tensor, final_value: Tensor | None, truncated: Tensor) -> Tensor:
    """Rewards with the discounted values of truncated ends, as the collectors of peers with one flag have them."""
    return reward if final_value is None else reward + GAMMA * final_value * truncated


class StableBaselines3:
    def __init__(self, work: Ppo) -> None:
        kind = importlib.import_module("stable_baselines3.common.buffers").RolloutBuffer
        spaces = box(work.obs_dim), box(work.action_dim)
        self.buffer = kind(work.steps, *spaces, "cpu", gae_lambda=LAMBDA, gamma=GAMMA, n_envs=work.envs)
        self.rows, self.start = work.steps * work.envs // BATCHES, np.ones(work.envs, np.bool_)

    def add(
        self, obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, value: Tensor,
        log_prob: Tensor, final_value: Tensor | None,
    ) -> None:  # fmt: skip
        reward = folded(reward, final_value, truncated)
        self.buffer.add(obs.numpy(), action.numpy(), reward.numpy(), self.start, value, log_prob)
        self.start = (terminated | truncated).numpy()

    def finish(self, _: Tensor, value: Tensor) -> None:
        self.buffer.compute_returns_and_advantage(value, self.start)

    def batches(self, epochs: int) -> Iterator[Batch]:
        for _ in range(epochs):
            for b in self.buffer.get(self.rows):
                yield b.observations, b.actions, b.old_log_prob, b.advantages, b.returns

    def clear(self) -> None:
        self.buffer.reset()


class Tianshou:
    """As its on-policy trainer has it; the values of all next observations are those that PPO computed already."""

    def __init__(self, work: Ppo) -> None:
        collection = importlib.import_module("tianshou.data")
        self.returns = importlib.import_module("tianshou.algorithm.algorithm_base").Algorithm.compute_episodic_return
        self.make, self.rows = collection.Batch, work.steps * work.envs // BATCHES
        self.buffer = collection.VectorReplayBuffer(work.steps * work.envs, work.envs)
        self.next_values: list[Any] = []

    def add(
        self, obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, value: Tensor,
        log_prob: Tensor, final_value: Tensor | None,
    ) -> None:  # fmt: skip
        if self.next_values:
            last, cut = self.next_values[-1], self.cut
            self.next_values[-1] = value if last is None else torch.where(cut, last, value)
        self.next_values.append(final_value)
        self.cut = truncated
        policy = self.make(value=value.numpy(), log_prob=log_prob.numpy())
        self.buffer.add(
            self.make(
                obs=obs.numpy(), act=action.numpy(), rew=reward.numpy(), terminated=terminated.numpy(),
                truncated=truncated.numpy(), policy=policy,
            )
        )  # fmt: skip

    def finish(self, _: Tensor, value: Tensor) -> None:
        last = self.next_values[-1]
        self.next_values[-1] = value if last is None else torch.where(self.cut, last, value)
        batch, indices = self.buffer.sample(0)
        following = torch.stack(self.next_values, 1).reshape(-1).numpy()
        value = batch.policy.value
        ret, advantage = self.returns(batch, self.buffer, indices, following, value, GAMMA, LAMBDA)
        fields = {"obs": batch.obs, "act": batch.act, "logp": batch.policy.log_prob, "adv": advantage, "ret": ret}
        self.batch = self.make(**{name: np.asarray(array, np.float32) for name, array in fields.items()})

    def batches(self, epochs: int) -> Iterator[Batch]:
        for _ in range(epochs):
            for b in self.batch.split(self.rows, merge_last=True):
                yield tuple(map(torch.from_numpy, (b.obs, b.act, b.logp, b.adv, b.ret)))

    def clear(self) -> None:
        self.buffer.reset(keep_statistics=True)
        self.next_values.clear()


class TorchRl:
    """A TensorDict [T, N] that its collector would fill, GAE on it, and a buffer without replacement."""

    def __init__(self, work: Ppo) -> None:
        collection = importlib.import_module("torchrl.data")
        samplers = importlib.import_module("torchrl.data.replay_buffers.samplers")
        functional = importlib.import_module("torchrl.objectives.value.functional")
        self.gae, self.dict = functional.vec_generalized_advantage_estimate, importlib.import_module("tensordict")
        if work.envs > 100:  # the other one is faster for many environments
            self.gae = functional.generalized_advantage_estimate
        self.buffer = collection.ReplayBuffer(
            storage=collection.LazyTensorStorage(work.steps * work.envs),
            sampler=samplers.SamplerWithoutReplacement(), batch_size=work.steps * work.envs // BATCHES,
        )  # fmt: skip
        self.steps: list[Any] = []

    def add(
        self, obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, value: Tensor,
        log_prob: Tensor, final_value: Tensor | None,
    ) -> None:  # fmt: skip
        fields = {"obs": obs, "action": action, "log_prob": log_prob, "value": value, "terminated": terminated}
        fields |= {"reward": folded(reward, final_value, truncated), "done": terminated | truncated}
        self.steps.append(self.dict.TensorDict(fields, batch_size=[len(obs)]))

    def finish(self, _: Tensor, value: Tensor) -> None:
        block: Any = torch.stack(self.steps)
        following = torch.cat([block["value"][1:], value[None]])
        done = block["done"]  # the values of truncated ends are in the rewards
        advantage, ret = self.gae(GAMMA, LAMBDA, block["value"], following, block["reward"], done, done)
        block = block.select("obs", "action", "log_prob").update({"advantage": advantage, "return": ret})
        self.buffer.extend(block.reshape(-1))

    def batches(self, epochs: int) -> Iterator[Batch]:
        for _ in range(epochs * BATCHES):
            batch = self.buffer.sample()
            yield tuple(batch[name] for name in ("obs", "action", "log_prob", "advantage", "return"))

    def clear(self) -> None:
        self.steps.clear()


class RslRl:
    def __init__(self, work: Ppo) -> None:
        self.compute = importlib.import_module("rsl_rl.algorithms.ppo").PPO.compute_returns
        kind = importlib.import_module("rsl_rl.storage").RolloutStorage
        self.dict = importlib.import_module("tensordict").TensorDict
        obs = self.named(torch.zeros(work.envs, work.obs_dim))
        self.storage = kind("rl", work.envs, work.steps, obs, [work.action_dim], "cpu")
        self.transition = kind.Transition()

    def named(self, obs: Tensor) -> Any:
        return self.dict({"policy": obs}, batch_size=[len(obs)])

    def add(
        self, obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, value: Tensor,
        log_prob: Tensor, final_value: Tensor | None,
    ) -> None:  # fmt: skip
        step = self.transition
        step.observations, step.actions, step.values = self.named(obs), action, value[:, None]
        step.actions_log_prob, step.distribution_params = log_prob, ()
        step.rewards, step.dones = folded(reward, final_value, truncated), terminated | truncated
        self.storage.add_transition(step)
        step.clear()

    def finish(self, obs: Tensor, value: Tensor) -> None:
        class Critic:
            def get_hidden_state(self) -> None: ...

            def reset(self, hidden_state: Any = None) -> None: ...

            def __call__(self, _: Any) -> Tensor:
                return value[:, None]

        settings = {"gamma": GAMMA, "lam": LAMBDA, "normalize_advantage_per_mini_batch": True}
        self.compute(SimpleNamespace(storage=self.storage, critic=Critic(), **settings), self.named(obs))

    def batches(self, epochs: int) -> Iterator[Batch]:
        for b in self.storage.mini_batch_generator(BATCHES, epochs):
            scalars = b.old_actions_log_prob, b.advantages, b.returns
            yield b.observations["policy"], b.actions, *(scalar.flatten() for scalar in scalars)

    def clear(self) -> None:
        self.storage.clear()
