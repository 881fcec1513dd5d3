"""SAC with hindsight in a replay of each library: one learner, and an adapter for each."""

import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal

from bench_hindsight import Computes, reward_of
from replay_data import drawing
from training_play import GAMMA, Clock, Env, improve, perceptron, shapes_differ

CAPACITY, EPISODE, START = 20_000, 50, 200
OBS, GOAL, ACTION, COPIES = 10, 3, 4, 4
TEMPERATURE, AVERAGE = 0.1, 0.005
Batch = tuple[Tensor, ...]  # obs with goal, action, reward, next obs with goal
Observation = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sac:
    """`steps` steps of one environment, which are truncated after 50, and after each an update."""

    steps: int
    batch: int = 256

    def learn(self, storage: Any, clock: Clock) -> str:
        """A whole training; returns what was wrong with its first batch, if anything."""
        env, wrong = Env(1, OBS, ACTION, EPISODE), ""
        torch.manual_seed(0)
        actor, critics = perceptron(OBS + GOAL, 2 * ACTION), [perceptron(OBS + GOAL + ACTION, 1) for _ in range(2)]
        targets = deepcopy(critics)
        learned = [parameter for critic in critics for parameter in critic.parameters()]
        optimizer = torch.optim.Adam(learned, lr=3e-4)
        actors = torch.optim.Adam(actor.parameters(), lr=3e-4)

        def act(seen: Tensor) -> tuple[Tensor, Tensor]:
            mean, scale = actor(seen).chunk(2, -1)
            policy = Normal(mean, scale.clamp(-5, 2).exp())
            raw = policy.rsample()
            return raw.tanh(), (policy.log_prob(raw) - (1 - raw.tanh().square() + 1e-6).log()).sum(-1)

        goal = torch.zeros(1, GOAL)
        for step in range(self.steps):
            obs = env.obs
            with torch.no_grad():
                action = act(torch.cat([obs, goal], -1))[0]
            after, _, terminated, truncated = env.step(action)
            ended = (terminated | truncated).numpy()
            before, following = ({"observation": x.numpy(), "achieved_goal": x[:, :GOAL].numpy()} for x in (obs, after))
            reward = reward_of(following["achieved_goal"], goal.numpy())
            clock(storage.add, before, goal.numpy(), action.numpy(), reward, following, ended)
            if ended[0]:
                goal = 0.5 * torch.randn(1, GOAL)
            if step < START:
                continue
            batch = clock(storage.sample)
            if step == START:
                seen = self.batch, OBS + GOAL
                wrong = shapes_differ(batch, seen, (self.batch, ACTION), (self.batch,), seen)
                if not wrong and not np.array_equal(batch[2], reward_of(batch[3][:, :GOAL], batch[3][:, OBS:])):
                    wrong = "rewards are of other goals"
            seen, action, reward, then = batch
            with torch.no_grad():
                chosen, log_prob = act(then)
                values = [target(torch.cat([then, chosen], -1)).squeeze(-1) for target in targets]
                wanted = reward + GAMMA * (torch.min(*values) - TEMPERATURE * log_prob)
            pair = torch.cat([seen, action], -1)
            losses = [(critic(pair).squeeze(-1) - wanted).square().mean() for critic in critics]
            improve(optimizer, losses[0] + losses[1])
            chosen, log_prob = act(seen)
            values = [critic(torch.cat([seen, chosen], -1)).squeeze(-1) for critic in critics]
            improve(actors, (TEMPERATURE * log_prob - torch.min(*values)).mean())
            with torch.no_grad():
                for target, critic in zip(targets, critics, strict=True):
                    for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                        old.lerp_(new, AVERAGE)
        return wrong


def joined(obs: Tensor, goal: Tensor) -> Tensor:
    """Observations with their goals, `[B, 13]`."""
    return torch.cat([obs, goal], -1)


class Ready:
    """No storage: the same ready batch each time."""

    def __init__(self, work: Sac) -> None:
        B = work.batch
        obs, action = torch.zeros(B, OBS + GOAL), torch.zeros(B, ACTION)
        self.batch = obs, action, torch.ones(B), obs

    def add(self, *_: Any) -> None: ...

    def sample(self) -> Batch:
        return self.batch


class Relive:
    def __init__(self, work: Sac) -> None:
        relive = importlib.import_module("relive")
        flag = relive.Field((), torch.bool)
        obs = {"observation": (OBS,), "achieved_goal": (GOAL,), "desired_goal": (GOAL,)}
        schema = relive.Schema({"obs": obs, "action": (ACTION,), "reward": (), "terminated": flag, "truncated": flag})
        view = relive.Hindsight(reward_of, k=COPIES, gamma=GAMMA)
        self.replay, self.size = relive.ReplayBuffer(schema, CAPACITY, view=view, seed=0), work.batch
        self.draw: Callable[[], Any] | None = None  # there is nothing to draw yet
        self.flag = np.zeros(1, np.bool_)

    def add(self, obs: Observation, goal: Any, action: Any, reward: Any, after: Observation, ended: Any) -> None:
        goals = {"desired_goal": goal}
        last = {"next_obs": after | goals} if ended[0] else {}
        self.replay.add(
            obs=obs | goals, action=action, reward=reward, terminated=self.flag, truncated=ended, **last
        )  # fmt: skip

    def sample(self) -> Batch:
        self.draw = self.draw or drawing(self.replay, self.size, reuse=True)
        b = self.draw()
        obs, then = b["obs"], b["next_obs"]
        seen, following = (joined(x["observation"], x["desired_goal"]) for x in (obs, then))
        return seen, b["action"], b["reward"], following


class StableBaselines3:
    def __init__(self, work: Sac) -> None:
        her = importlib.import_module("stable_baselines3").HerReplayBuffer
        spaces = importlib.import_module("gymnasium.spaces")
        shapes = {"observation": OBS, "achieved_goal": GOAL, "desired_goal": GOAL}
        boxes = {name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in shapes.items()}
        space = spaces.Dict(boxes), spaces.Box(-1, 1, (ACTION,), np.float32)
        self.buffer, self.size = her(CAPACITY, *space, Computes(), "cpu", 1, n_sampled_goal=COPIES), work.batch

    def add(self, obs: Observation, goal: Any, action: Any, reward: Any, after: Observation, ended: Any) -> None:
        goals, infos = {"desired_goal": goal}, [{"TimeLimit.truncated": bool(ended[0])}]
        self.buffer.add(obs | goals, after | goals, action, reward, ended, infos)

    def sample(self) -> Batch:
        b = self.buffer.sample(self.size)
        seen, then = (joined(x["observation"], x["desired_goal"]) for x in (b.observations, b.next_observations))
        return seen, b.actions, b.rewards.squeeze(-1), then


class Tianshou:
    def __init__(self, work: Sac) -> None:
        collection = importlib.import_module("tianshou.data")
        self.make, self.size = collection.Batch, work.batch
        self.buffer = collection.HERVectorReplayBuffer(
            CAPACITY, 1, compute_reward_fn=reward_of, horizon=EPISODE, future_k=COPIES + 1
        )

    def add(self, obs: Observation, goal: Any, action: Any, reward: Any, after: Observation, ended: Any) -> None:
        now, then = (self.make(**x, desired_goal=goal) for x in (obs, after))
        flags = {"terminated": np.zeros(1, np.bool_), "truncated": ended}
        self.buffer.add(self.make(obs=now, act=action, rew=reward, obs_next=then, **flags))

    def sample(self) -> Batch:
        b = self.buffer.sample(self.size)[0]
        tensor = torch.as_tensor
        seen, then = (joined(tensor(x.observation), tensor(x.desired_goal)) for x in (b.obs, b.obs_next))
        return seen, torch.as_tensor(b.act), torch.as_tensor(b.rew, dtype=torch.float32), then


class Cpprb:
    """The goal achieved is the beginning of the observation, which goal_func takes out."""

    def __init__(self, work: Sac) -> None:
        obs = {"shape": OBS}
        self.buffer = importlib.import_module("cpprb").HindsightReplayBuffer(
            CAPACITY * (COPIES + 1), {"obs": obs, "act": {"shape": ACTION}, "next_obs": obs, "done": {}}, EPISODE,
            lambda after, _, goal: reward_of(after[:, :GOAL], goal), goal_func=lambda after: after[:, :GOAL],
            goal_shape=GOAL, additional_goals=COPIES, prioritized=False,
        )  # fmt: skip
        self.size = work.batch

    def add(self, obs: Observation, goal: Any, action: Any, _: Any, after: Observation, ended: Any) -> None:
        now, then = obs["observation"][0], after["observation"][0]
        self.buffer.add(obs=now, act=action[0], next_obs=then, done=0.0)
        if ended[0]:
            self.buffer.on_episode_end(goal[0])

    def sample(self) -> Batch:
        b = self.buffer.sample(self.size)
        tensor = torch.from_numpy
        goal = tensor(b["goal"])
        seen, then = (joined(tensor(b[name]), goal) for name in ("obs", "next_obs"))
        return seen, tensor(b["act"]), tensor(b["rew"][:, 0]), then


class TorchRl:
    def __init__(self, work: Sac) -> None:
        collection = importlib.import_module("torchrl.data")
        self.dict = importlib.import_module("tensordict").TensorDict

        def judge(td: Any) -> Tensor:
            return -((td["next", "achieved_goal"] - td["desired_goal"]).norm(dim=-1, keepdim=True) > 0.5).float()

        self.buffer = collection.HERReplayBuffer(
            judge, her_ratio=COPIES / (COPIES + 1), achieved_goal_key=("next", "achieved_goal"),
            storage=collection.LazyTensorStorage(CAPACITY), batch_size=work.batch,
        )  # fmt: skip

    def add(self, obs: Observation, goal: Any, action: Any, reward: Any, after: Observation, ended: Any) -> None:
        desired = torch.from_numpy(goal)
        now, then = ({name: torch.from_numpy(array) for name, array in x.items()} for x in (obs, after))
        following = {**then, "desired_goal": desired.clone(), "reward": torch.from_numpy(reward)[:, None]}
        following |= {"terminated": torch.zeros(1, 1, dtype=torch.bool), "done": torch.from_numpy(ended)[:, None]}
        step = {**now, "desired_goal": desired, "action": torch.from_numpy(action), "next": self.dict(following, [1])}
        self.buffer.extend(self.dict(step, batch_size=[1]))

    def sample(self) -> Batch:
        b = self.buffer.sample()
        seen = joined(b["observation"], b["desired_goal"])
        then = joined(b["next", "observation"], b["next", "desired_goal"])
        return seen, b["action"], b["next", "reward"].squeeze(-1), then
