"""Stable-Baselines3's own training on its own buffers and on the drop-ins: the same hyperparameters, several seeds.

python benchmarks/learn_sb3.py                        all tasks, three seeds each; rewrites the migration page's table
python benchmarks/learn_sb3.py --only her sac         some of: her, dqn, dqn3, ppo, sac
python benchmarks/learn_sb3.py --seeds 0 1 2 3 4      other seeds; runs that are on record are not made again

Every run is kept in results/learning/sb3.json as soon as it is over. One thread, about a minute a run.
"""

import argparse
import importlib
import json
import os
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "learning" / "sb3.json"
PAGE = HERE.parent / "docs" / "migration" / "stable_baselines3.md"
MARKED = re.compile(r"(<!-- learning:sb3 -->).*?(<!-- /learning:sb3 -->)", re.DOTALL)
SIDES = OURS, THEIRS = "relive", "stable-baselines3"
HOST = "stable_baselines3"
# as tuned by its authors for CartPole-v1, in rl-baselines3-zoo
DQN: dict[str, Any] = {
    "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
    "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
}  # fmt: skip
PPO: dict[str, Any] = {
    "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
    "learning_rate": lambda left: left * 1e-3, "clip_range": lambda left: left * 0.2,
}  # fmt: skip
HER: dict[str, Any] = {
    "policy": "MultiInputPolicy", "learning_rate": 1e-3, "batch_size": 64, "buffer_size": 20_000, "gamma": 0.95,
    "learning_starts": 200, "gradient_steps": 1, "exploration_fraction": 0.5, "target_update_interval": 200,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One algorithm of the host's, the class that its experience goes into, and what it is to learn."""

    name: str
    algorithm: str
    env: str
    buffer: str
    steps: int
    options: dict[str, Any]
    envs: int = 1
    buffer_options: dict[str, Any] = field(default_factory=dict[str, Any])
    won: bool = False
    """Whether episodes are won or lost, rather than scored by their return."""


TASKS = {
    "her": Task(
        "DQN with hindsight, flipping 8 bits", "DQN", "BitFlipping", "HerReplayBuffer", 10_000, HER,
        buffer_options={"n_sampled_goal": 4, "goal_selection_strategy": "future"}, won=True,
    ),
    "dqn": Task("DQN, CartPole-v1", "DQN", "CartPole-v1", "ReplayBuffer", 30_000, DQN),
    "dqn3": Task(
        "3-step DQN, CartPole-v1", "DQN", "CartPole-v1", "NStepReplayBuffer", 30_000, DQN,
        buffer_options={"n_steps": 3, "gamma": 0.99},
    ),
    "ppo": Task("PPO, CartPole-v1", "PPO", "CartPole-v1", "RolloutBuffer", 50_000, PPO, envs=8),
    "sac": Task("SAC, Pendulum-v1", "SAC", "Pendulum-v1", "ReplayBuffer", 6_000, {"learning_rate": 1e-3}),
}  # fmt: skip


def environment(name: str) -> Any:
    """One env, which notes the returns of its episodes."""
    gym: Any = importlib.import_module("gymnasium")
    monitor: Any = importlib.import_module(f"{HOST}.common.monitor")
    if name != "BitFlipping":
        return monitor.Monitor(gym.make(name))
    return monitor.Monitor(importlib.import_module(f"{HOST}.common.envs").BitFlippingEnv(n_bits=8, max_steps=8))


def built(task: Task, side: str, seed: int) -> Any:
    """The host's algorithm, with the buffer of one of both sides."""
    ours = importlib.import_module("relive.compat.stable_baselines3")
    theirs = importlib.import_module(HOST if task.buffer[:3] == "Her" else f"{HOST}.common.buffers")
    kind = "rollout" if "Rollout" in task.buffer else "replay"
    options = {
        "policy": "MlpPolicy", "device": "cpu", "seed": seed, **deepcopy(task.options),
        f"{kind}_buffer_class": getattr(ours if side == OURS else theirs, task.buffer),
        f"{kind}_buffer_kwargs": task.buffer_options | ({"seed": seed} if side == OURS else {}),
    }  # fmt: skip
    vec_env: Any = importlib.import_module(f"{HOST}.common.vec_env")
    envs = vec_env.DummyVecEnv([lambda: environment(task.env)] * task.envs)
    return getattr(importlib.import_module(HOST), task.algorithm)(env=envs, **options)


def played(task: Task, act: Callable[[Any], Any], episodes: int) -> list[float]:
    """Whether each episode was won, or its return; the episodes are the same for everybody."""
    env, scores = environment(task.env), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=10_000 + episode)
        over, score = False, 0.0
        while not over:
            obs, reward, terminated, truncated, info = env.step(act(obs))
            over = terminated or truncated
            score = float(info["is_success"]) if task.won else score + float(reward)
        scores.append(score)
    return scores


def trained(task: Task, side: str, seed: int, steps: int | None = None, episodes: int = 50) -> dict[str, float]:
    """A whole training.

    Returns:
        "trained": the mean score of its policy, acting greedily, over so many episodes; "training": the mean return of
        the episodes that ended in the second half of the training.
    """
    model = built(task, side, seed)
    model.learn(steps or task.steps)
    late = [reward for env in model.get_env().env_method("get_episode_rewards") for reward in env[len(env) // 2 :]]
    scores = played(task, lambda obs: model.predict(obs, deterministic=True)[0], episodes)
    return {"trained": sum(scores) / episodes, "training": sum(late) / len(late)}


def table(report: dict[str, Any]) -> str:
    """The markdown of the runs on record, of seeds that both sides have been trained with."""
    tables: Any = importlib.import_module("tables")
    out = [
        "| task | seed | the drop-in: greedily | while training | Stable-Baselines3's: greedily | while training |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, task in TASKS.items():
        made = [run for run in report["runs"] if run["task"] == name]
        runs = [{run["seed"]: run for run in made if run["side"] == side} for side in SIDES]
        greedily = ".0%" if task.won else ".0f"
        for seed in sorted(runs[0].keys() & runs[1].keys()):
            cells = [f"{task.name}, {task.steps // 1000} k steps", f"{seed}"]
            for of_side in runs:
                cells += [format(of_side[seed]["trained"], greedily), format(of_side[seed]["training"], ".0f")]
            out.append("| " + " | ".join(cells) + " |")
    foot = (
        "Greedily: the mean return of 50 episodes of the trained policy, or with hindsight, the share of them that is "
        "won. While training: the mean return of the second half of each env's episodes. Made by "
        f"`python benchmarks/learn_sb3.py` on {tables.machine(report['environment'])}."
    )
    return "\n".join([*out, "", fill(foot, 120, break_on_hyphens=False)])


def main() -> None:
    """Makes the runs that are not on record, and rewrites the table."""
    parser = argparse.ArgumentParser(description="Train on Stable-Baselines3's own buffers and on ours.")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    harness: Any = importlib.import_module("harness")
    harness.one_thread()
    report: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}
    known = {(run["task"], run["side"], run["seed"]) for run in report["runs"]}
    for seed in arguments.seeds:
        for name in arguments.only:
            for side in SIDES:
                if (name, side, seed) in known:
                    continue
                run = {"task": name, "side": side, "seed": seed} | trained(TASKS[name], side, seed)
                print(run, flush=True)
                report["runs"].append(run)
                packages = {HOST.replace("_", "-"): harness.version_of(THEIRS)}
                report["environment"] = harness.environment()
                report["environment"]["packages"] |= packages
                RESULT.parent.mkdir(parents=True, exist_ok=True)
                RESULT.write_text(json.dumps(report, indent=1) + "\n")
    text = table(report)
    print(text)
    PAGE.write_text(MARKED.sub(lambda found: f"{found[1]}\n\n{text}\n\n{found[2]}", PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
