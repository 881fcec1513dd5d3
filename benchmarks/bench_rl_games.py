"""relive beside rl_games' storages, its data set of minibatches, and its advantages."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch

from harness import Effort
from storages import (
    ADVANTAGES,
    BATCHES,
    EPOCHS,
    GAMMA,
    LAM,
    PASSES,
    REPLAY,
    REPLAY_BATCH,
    REPLAY_ENVS,
    REPLAY_STEPS,
    STEP,
    Job,
    Way,
    Work,
    report,
)


def rl_games(data: Work) -> Job:
    experience = importlib.import_module("rl_games.common.experience")
    columns = data.columns()
    if data.method == REPLAY:
        steps = data.columns(REPLAY_STEPS, REPLAY_ENVS)
        buffer = experience.VectorizedReplayBuffer((data.obs,), (data.actions,), REPLAY_STEPS * REPLAY_ENVS, "cpu")
        for t in range(REPLAY_STEPS):
            obs, action, next_obs = (steps[name][t] for name in ("obs", "action", "next_obs"))
            buffer.add(obs, action, steps["reward"][t, :, None], next_obs, steps["terminated"][t, :, None])
        return Job(
            lambda: buffer.sample(REPLAY_BATCH), lambda: torch.tensor(float(len(buffer.sample(REPLAY_BATCH)[0])))
        )
    spaces = importlib.import_module("gymnasium").spaces
    env = {"observation_space": spaces.Box(-1, 1, (data.obs,)), "action_space": spaces.Box(-1, 1, (data.actions,))}
    sizes = {"num_actors": data.envs, "horizon_length": data.steps, "has_central_value": False}
    buffer = experience.ExperienceBuffer(env, sizes, "cpu")
    ended = columns["terminated"].byte()
    before = torch.cat([torch.ones_like(ended[:1]), ended[:-1]])
    named = {
        "obses": columns["obs"], "actions": columns["action"], "values": columns["value"][..., None],
        "rewards": columns["reward"][..., None], "neglogpacs": columns["log_prob"], "dones": before,
    }  # fmt: skip
    added = 0

    def add(t: int | None = None) -> None:
        nonlocal added
        t = added % data.steps if t is None else t
        for name, column in named.items():
            buffer.update_data(name, t, column[t])
        added += 1

    for t in range(data.steps):
        add(t)

    def advantages() -> torch.Tensor:
        agent = importlib.import_module("rl_games.common.a2c_common").A2CBase
        agent_of = SimpleNamespace(gamma=GAMMA, tau=LAM, horizon_length=data.steps)
        ends = ended[-1].float(), data.last_value()[:, None], before.float()
        return agent.discount_values(agent_of, *ends, named["values"], named["rewards"])[..., 0]

    def passes() -> int:
        datasets = importlib.import_module("rl_games.common.datasets")
        rows = data.steps * data.envs
        dataset = datasets.PPODataset(rows, rows // BATCHES, False, False, "cpu", 1)
        names = ["obses", "actions", "neglogpacs", "values", "rewards"]
        flat = buffer.get_transformed_list(lambda x: x.transpose(0, 1).reshape(rows, *x.shape[2:]), names)
        dataset.update_values_dict({**flat, "returns": flat["values"]})
        return sum(len(batch["obses"]) for _ in range(EPOCHS) for batch in dataset)

    if data.method == STEP:
        return Job(add, lambda: (add(data.steps - 1), buffer.tensor_dict["rewards"][-1, :, 0])[1])
    if data.method == ADVANTAGES:
        return Job(advantages, advantages)
    return Job(passes, lambda: torch.tensor(float(passes())))


def run(effort: Effort, folder: Path) -> None:
    """Measures the parts of an iteration, and a batch of a replay, and writes `rl_games.json`."""
    way = Way("rl_games", "rl_games", "peer", "ExperienceBuffer, PPODataset, VectorizedReplayBuffer", rl_games)
    jobs = {job: [way] for job in (STEP, ADVANTAGES, PASSES, REPLAY)}
    report("rl_games", "rl_games' storage, 4096 envs, 24 steps", jobs, (24, 4096, 48, 12), (effort, folder))
