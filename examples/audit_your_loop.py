"""A loop that stores the wrong thing, found by an audit, and mended.

    python examples/audit_your_loop.py           three loops over Pendulum-v1, and what the audit says of each
    python examples/audit_your_loop.py --short   the same, with fewer steps

Each loop looks right, runs without an error, and fills a replay. The first two go wrong at the end of every
episode: under ``NEXT_STEP`` autoreset, Gymnasium's default, they store the step that the env ignores; under
``SAME_STEP`` autoreset, they store the next episode's first observation as the last one's final. The third is right.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive

NUM_ENVS = 4
EPISODE = 50  # steps up to Pendulum's time limit here


def make(mode: AutoresetMode, seed: int) -> tuple[SyncVectorEnv, relive.ReplayBuffer]:
    envs = SyncVectorEnv([lambda: gym.make("Pendulum-v1", max_episode_steps=EPISODE)] * NUM_ENVS, autoreset_mode=mode)
    envs.action_space.seed(seed)
    schema = relive.Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    # check_ends=False keeps the replay itself quiet: it would warn of both mistakes after three episodes
    replay = relive.ReplayBuffer(schema, 40_000, NUM_ENVS, own_next_obs=True, check_ends=False, seed=seed)
    return envs, replay


def naive(mode: AutoresetMode, steps: int, seed: int) -> relive.ReplayBuffer:
    """The loop of most tutorials: whatever step() returns is what came next."""
    envs, replay = make(mode, seed)
    obs, _ = envs.reset(seed=seed)
    for _ in range(steps):
        action = envs.action_space.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        replay.add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, next_obs=next_obs)
        obs = next_obs
    return replay


def mended(steps: int, seed: int) -> relive.ReplayBuffer:
    """The same under NEXT_STEP autoreset, without the steps that the env ignores."""
    envs, replay = make(AutoresetMode.NEXT_STEP, seed)
    obs, _ = envs.reset(seed=seed)
    ended: Any = False
    for _ in range(steps):
        action = envs.action_space.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        replay.add(
            obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, next_obs=next_obs,
            mask=~ended if ended is not False else None,
        )  # fmt: skip
        obs, ended = next_obs, terminated | truncated
    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    steps = 500 if args.short else 5000
    replays = {
        "ignored steps stored": (naive(AutoresetMode.NEXT_STEP, steps, args.seed), ["autoreset-step-stored"]),
        "reset observation stored": (naive(AutoresetMode.SAME_STEP, steps, args.seed), ["reset-as-final-observation"]),
        "mended": (mended(steps, args.seed), []),
    }
    for name, (replay, expected) in replays.items():
        report = relive.audit(replay)
        print(f"\n{name}\n{report}")
        assert [finding.rule for finding in report.findings] == expected


if __name__ == "__main__":
    main()
