"""Runs that survive being killed: DQN and PPO go on from their last save, with the same curve to the last bit.

    python examples/resume.py                    DQN on CartPole-v1. Kill it at any instant and start it again
    python examples/resume.py --algorithm ppo    the same with PPO
    python examples/resume.py --short            kills runs of both at random, and compares curves and networks

One save has all of the run: the buffer, and as ``extra`` the networks, the optimizer, torch's random numbers and the
curve. It is written in the background, and is the old one or the new one whenever the process dies.

What no save has is the inside of an environment: many simulators do not give their state, and a vector environment has
no instant at which all of its episodes end. So each save begins new episodes, with a seed that follows from its number.
A run that was killed begins the same ones. The price is that the episodes under way are cut.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
from multiprocessing import Process, Value
from pathlib import Path
from statistics import mean
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import relive
from relive.errors import NoSaveError

ENV, NUM_ENVS, GAMMA = "CartPole-v1", 8, 0.99
SAVE_EVERY = 500  # transitions
STEPS, SHORT = 60_000, 3_000
WARM_UP = 500  # DQN: transitions before the first gradient step


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class DQN(nn.Module):
    """Q-learning from a prioritized replay."""

    Buffer = relive.ReplayBuffer

    def __init__(self) -> None:
        super().__init__()
        self.q, self.slow = network(4, 2), network(4, 2)
        self.slow.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=1e-3)

    def buffer(self, envs: Any, seed: int) -> relive.ReplayBuffer:
        parts: Any = {"sampler": relive.Prioritized(), "view": relive.NStep(3, gamma=GAMMA)}
        return relive.ReplayBuffer(relive.Schema.from_env(envs), 20_000, NUM_ENVS, seed=seed, **parts)

    def forward(self, obs: Tensor) -> Tensor:
        greedy = self.q(obs).argmax(dim=1)
        return torch.where(torch.rand(len(obs)) < 0.1, torch.randint(2, greedy.shape), greedy)

    def round(self, collector: relive.Collector, replay: Any) -> list[float]:
        """One step of every env, and two gradient steps. Returns the returns of the episodes that ended."""
        stats = collector.collect(1)
        for batch in replay.batches(2, 64) if collector.total_steps > WARM_UP else ():
            with torch.no_grad():
                target = batch["reward"] + batch["discount"] * self.slow(batch["next_obs"]).amax(dim=1)
            td_error = target - self.q(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
            self.optimizer.zero_grad()
            (batch["weight"] * td_error.square()).mean().backward()
            self.optimizer.step()
            replay.update_priorities(batch["index"], td_error.detach())
            for slow, fast in zip(self.slow.parameters(), self.q.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.01)
        return stats.episode_returns


class PPO(nn.Module):
    """Proximal policy optimization."""

    Buffer = relive.RolloutBuffer

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(4, 2), network(4, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)

    def buffer(self, envs: Any, seed: int) -> relive.RolloutBuffer:
        schema = relive.Schema.from_env(envs, value=(), log_prob=())
        return relive.RolloutBuffer(schema, num_steps=32, num_envs=NUM_ENVS, seed=seed)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        pi = Categorical(logits=self.actor(obs))
        action = pi.sample()
        return {"action": action, "log_prob": pi.log_prob(action), "value": self.critic(obs).squeeze(-1)}

    def round(self, collector: relive.Collector, rollout: Any) -> list[float]:
        """One rollout, and four passes over it. Returns the returns of the episodes that ended."""
        stats = collector.collect()
        rollout.finish(relive.GAE(gamma=GAMMA, lam=0.95))
        for batch in rollout.minibatches(64, epochs=4, normalize_advantage=True):
            log_prob = Categorical(logits=self.actor(batch["obs"])).log_prob(batch["action"])
            ratio, advantage = (log_prob - batch["log_prob"]).exp(), batch["advantage"]
            policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            value_loss = (self.critic(batch["obs"]).squeeze(-1) - batch["return"]).square().mean()
            self.optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            self.optimizer.step()
        return stats.episode_returns


LEARNERS = {"dqn": DQN, "ppo": PPO}


def train(algorithm: str, path: Path, seed: int, steps: int, shown: Any) -> list[list[float]]:
    """Train from the save in ``path``, or from the start. Returns the curve; a file has the parameters, too."""
    torch.manual_seed(seed)
    envs = gym.make_vec(ENV, NUM_ENVS)
    learner, saving, saves, curve = LEARNERS[algorithm](), None, 0, []
    try:
        buffer = learner.Buffer.load(path)
    except NoSaveError:
        buffer = learner.buffer(envs, seed)
    collector = relive.Collector(envs, learner, buffer)
    if extra := buffer.extra:
        learner.load_state_dict(extra["networks"])
        learner.optimizer.load_state_dict(extra["optimizer"])
        torch.set_rng_state(extra["random"])
        saves, curve, collector.total_steps = extra["saves"], extra["curve"].tolist(), extra["steps"]
        print(f"  goes on from save {saves}, after {collector.total_steps:,} transitions", flush=True)
    collector.reset(seed=1_000_000 * seed + saves)

    while collector.total_steps < steps:
        curve += [[collector.total_steps, value] for value in learner.round(collector, buffer)]
        shown.value = collector.total_steps
        if collector.total_steps >= (saves + 1) * SAVE_EVERY:
            saves += 1
            collector.reset(seed=1_000_000 * seed + saves)  # new episodes, here and in a run that goes on from here
            extra = {"networks": learner.state_dict(), "optimizer": learner.optimizer.state_dict(),
                     "random": torch.get_rng_state(), "saves": saves, "steps": collector.total_steps,
                     "curve": torch.tensor(curve).reshape(-1, 2)}  # fmt: skip
            saving = buffer.save(path, extra=extra, background=True)  # the training goes on meanwhile
    if saving:
        saving.wait()  # an error of the last save comes here, those of the others from the next save
    parameters = nn.utils.parameters_to_vector(learner.parameters()).tolist()
    path.with_suffix(".json").write_text(json.dumps({"curve": curve, "parameters": parameters}))
    return curve


def in_process(algorithm: str, path: Path, seed: int, steps: int, kill_at: int | None = None) -> dict[str, Any] | None:
    """Train in a process of its own; kill it after ``kill_at`` transitions. Returns what comes of it, if it lives."""
    process = Process(target=train, args=(algorithm, path, seed, steps, shown := Value("q", 0, lock=False)))
    process.start()
    while kill_at is not None and process.is_alive():
        if shown.value >= kill_at:
            process.kill()  # SIGKILL: nothing of it runs any more
        process.join(0.001)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), "the run failed"
    return json.loads(path.with_suffix(".json").read_text()) if process.exitcode == 0 else None


def compare(algorithm: str, folder: Path, seed: int, steps: int) -> None:
    """A run that is killed again and again has the curve and the networks of one that is not."""
    LEARNERS[algorithm]()  # imports what optimizers need, before the first fork
    draw, result, kills, at = random.Random(seed), None, 0, 0
    expected = in_process(algorithm, folder / "undisturbed", seed, steps)
    while result is None:
        at += draw.randrange(steps // 6, steps // 2)
        result = in_process(algorithm, folder / "killed", seed, steps, kill_at=at if at < steps else None)
        kills += result is None
    assert kills > 0, "the run was never killed"
    assert result == expected, "the curves differ"
    print(f"{algorithm}: killed {kills} times; all {len(result['curve'])} returns and all parameters are the same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=LEARNERS, help="default: dqn; with --short: both")
    parser.add_argument("--path", type=Path, help="the save (default runs/resume-ALGORITHM)")
    parser.add_argument("--seed", type=int, default=0, help="of the envs, the networks and the batches (default 0)")
    parser.add_argument("--steps", type=int, help="transitions")
    parser.add_argument("--short", action="store_true", help="kill and compare short runs, in a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    if args.short:
        for algorithm in [args.algorithm] if args.algorithm else LEARNERS:
            with tempfile.TemporaryDirectory() as folder:
                compare(algorithm, Path(folder), args.seed, args.steps or SHORT)
        return
    algorithm = args.algorithm or "dqn"
    path = args.path or Path(f"runs/resume-{algorithm}")
    curve = train(algorithm, path, args.seed, args.steps or STEPS, Value("q"))
    print(f"{algorithm} on {ENV}: mean return {mean(value for _, value in curve[-100:]):.0f}; parameters beside {path}")


if __name__ == "__main__":
    main()
