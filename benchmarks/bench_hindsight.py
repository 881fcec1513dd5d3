"""`sample` with hindsight from a million transitions of 4 envs: "future", four rows in five with another goal.

The second workload of each size adds a row of each env before each batch, as training does, which some pay for when
they sample; the adding is measured with it, in every line.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hand_written
from harness import Contender, Effort, Workload, measure, write
from replay_data import BATCH, GatherFloor, Line, Made, drawing

ROWS, ENVS, EPISODE = 1_000_000, 4, 50
GAMMA, COPIES = 0.98, 4
ACTION, GOAL = 4, 3
PIECE = 10_000
READY = 600
"""Steps that are added again and again; whole episodes of each line."""


@dataclass(frozen=True)
class Goals:
    """`rows` transitions of 4 envs, which number them: env e has e * rows / 4 and those that follow.

    A transition's observation and the goal achieved before it are its number, those after it are the next number, and
    the goal desired is -1, which is never achieved; the reward is -1. Episodes are truncated after 50. So a batch shows
    by itself which goals it was given and whether they may be.
    """

    rows: int
    obs_dim: int
    added: bool = False
    """Whether rows are added before each batch."""

    @property
    def steps(self) -> int:
        return self.rows // ENVS

    def columns(self, number: np.ndarray) -> dict[str, np.ndarray]:
        """The transitions of these numbers ``[...]``, as arrays of their own."""
        wide = number[..., None].astype(np.float32)
        goal = np.full((*number.shape, GOAL), -1, np.float32)
        return {
            "observation": np.repeat(wide, self.obs_dim, -1),
            "achieved_goal": np.repeat(wide, GOAL, -1),
            "next_observation": np.repeat(wide + 1, self.obs_dim, -1),
            "next_achieved_goal": np.repeat(wide + 1, GOAL, -1),
            "desired_goal": goal,
            "action": np.ones((*number.shape, ACTION), np.float32),
            "reward": np.full(number.shape, -1, np.float32),
            "terminated": np.zeros(number.shape, np.bool_),
            "truncated": number % EPISODE == EPISODE - 1,
        }

    def step(self, t: int) -> dict[str, np.ndarray]:
        """Step t of all envs, ``[4, ...]``; after the last the first comes again."""
        return self.columns(np.arange(ENVS) * self.steps + t % self.steps)

    def wrong(self, obs: Any, desired: Any, reward: Any) -> str:
        """What is wrong with a batch, if anything."""
        number, goal, paid = (np.asarray(x, np.float64).reshape(len(obs), -1)[:, 0] for x in (obs, desired, reward))
        new, last = goal != -1, (number // EPISODE + 1) * EPISODE
        if len(obs) != BATCH or not 0.6 < new.mean() < 0.95:
            return f"{new.mean():.0%} of {len(obs)} rows have another goal"
        allowed = (number < goal) & (goal <= last)
        if not allowed[new].all():
            return f"{1 - allowed[new].mean():.1%} of the goals are of no later step of the episode"
        return "" if np.array_equal(paid, (goal == number + 1) - 1.0) else "rewards differ"


def reward_of(achieved: Any, desired: Any, *_: Any) -> Any:
    """As gymnasium-robotics has it: 0 within reach of the goal, else -1."""
    return -(np.linalg.norm(achieved - desired, axis=-1) > 0.5).astype(np.float32)


def members(step: dict[str, np.ndarray], following: bool = False) -> dict[str, np.ndarray]:
    """The observation of a step, or the next."""
    prefix = "next_" if following else ""
    return {name: step[prefix + name] for name in ("observation", "achieved_goal")} | {
        "desired_goal": step["desired_goal"]
    }


Read = tuple[Any, ...]
"""Obs, desired goal, reward, next obs, action and, where there is one, what ends a bootstrap, as torch tensors: what a
learner reads of a batch."""


def contender(data: Goals, add: Callable[[int], Any], sample: Callable[[], Any], read: Callable[[Any], Read]) -> Made:
    """`run` and `check`, given the two calls and what reads a batch."""
    count = 0

    def run() -> Any:
        nonlocal count
        if data.added:
            add(count % READY)
            count += 1
        return read(sample())

    return run, lambda: data.wrong(*run()[:3])


def relive_line(hindsight: bool, reuse: bool = False) -> Callable[[Goals], Made]:
    """A line of ours: with hindsight, or the same rows without."""

    def make(data: Goals) -> Made:
        relive = importlib.import_module("relive")
        flag, goal = relive.Field((), torch.bool), (GOAL,)
        obs = {"observation": (data.obs_dim,), "achieved_goal": goal, "desired_goal": goal}
        schema = relive.Schema({"obs": obs, "action": (ACTION,), "reward": (), "terminated": flag, "truncated": flag})
        view = relive.Hindsight(reward_of, k=COPIES, gamma=GAMMA) if hindsight else relive.Transition(GAMMA)
        rows = (data.steps + data.steps // EPISODE + 1) * ENVS
        replay = relive.ReplayBuffer(schema, rows, ENVS, view=view, seed=0)

        def shaped(step: dict[str, np.ndarray]) -> dict[str, Any]:
            rest = {name: step[name] for name in ("action", "reward", "terminated", "truncated")}
            return {"obs": members(step), "next_obs": members(step, True), **rest}

        for low in range(0, data.steps, PIECE):
            numbers = np.arange(low, min(low + PIECE, data.steps))[:, None] + np.arange(ENVS) * data.steps
            replay.extend(shaped(data.columns(numbers)))
        ready = [shaped(data.step(t)) for t in range(READY)]

        def read(batch: Any) -> Read:
            obs, after = batch["obs"], batch["next_obs"]
            seen = obs["observation"], obs["desired_goal"], batch["reward"], after["observation"]
            return *seen, batch["action"], batch["discount"]

        run, check = contender(data, lambda t: replay.add(ready[t]), drawing(replay, BATCH, reuse), read)
        return run, check if hindsight else lambda: ""

    return make


class Computes:
    """The one method that stable-baselines3 calls of the vector env."""

    def env_method(self, _: str, achieved: Any, desired: Any, infos: Any, indices: Any = None) -> list[Any]:
        return [reward_of(achieved, desired)]


def sb3_line(data: Goals) -> Made:
    her = importlib.import_module("stable_baselines3").HerReplayBuffer
    spaces = importlib.import_module("gymnasium.spaces")
    shapes = {"observation": data.obs_dim, "achieved_goal": GOAL, "desired_goal": GOAL}
    boxes = {name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in shapes.items()}
    action = spaces.Box(-1, 1, (ACTION,), np.float32)
    buffer = her(data.rows, spaces.Dict(boxes), action, Computes(), "cpu", ENVS, n_sampled_goal=COPIES)
    everything = data.columns(np.arange(data.steps)[:, None] + np.arange(ENVS) * data.steps)
    for name in shapes:
        buffer.observations[name][:] = members(everything)[name]
        buffer.next_observations[name][:] = members(everything, True)[name]
    buffer.actions[:], buffer.rewards[:] = everything["action"], everything["reward"]
    buffer.dones[:], buffer.timeouts[:] = everything["truncated"], everything["truncated"]
    buffer.ep_start[:] = (np.arange(data.steps) // EPISODE * EPISODE)[:, None]
    buffer.ep_length[:], buffer.full, buffer.pos = EPISODE, True, 0
    infos = [{} for _ in range(ENVS)]
    ready = [data.step(t) for t in range(READY)]

    def add(t: int) -> None:
        s = ready[t]
        buffer.add(members(s), members(s, True), s["action"], s["reward"], s["truncated"], infos)

    def read(b: Any) -> Read:
        obs, after = b.observations, b.next_observations
        return obs["observation"], obs["desired_goal"], b.rewards, after["observation"], b.actions, b.dones

    return contender(data, add, lambda: buffer.sample(BATCH), read)


def cpprb_line(data: Goals) -> Made:
    cpprb = importlib.import_module("cpprb")
    state = {"shape": data.obs_dim + GOAL}  # the goal achieved is a part of the state, which goal_func takes out
    buffer = cpprb.HindsightReplayBuffer(
        data.rows * (COPIES + 1), {"obs": state, "act": {"shape": ACTION}, "next_obs": state, "done": {}}, EPISODE,
        lambda after, _, goal: reward_of(after[:, -GOAL:], goal), goal_func=lambda after: after[:, -GOAL:],
        goal_shape=GOAL, additional_goals=COPIES, prioritized=False,
    )  # fmt: skip

    def step(number: np.ndarray) -> dict[str, np.ndarray]:
        s = data.columns(number)
        now, after = (np.concatenate([s[p + "observation"], s[p + "achieved_goal"]], -1) for p in ("", "next_"))
        return {"obs": now, "act": s["action"], "next_obs": after, "done": s["terminated"]}

    goal = np.full(GOAL, -1, np.float32)
    for low in range(0, data.rows, EPISODE):
        buffer.episode_rb.add(**step(np.arange(low, low + EPISODE)))
        buffer.on_episode_end(goal)
    turns = EPISODE // ENVS  # it has one env: four steps of it each time, as many times as an episode has room
    ready = [step(np.arange(ENVS) + t // turns * EPISODE + t % turns * ENVS) for t in range(READY)]

    def add(t: int) -> None:
        if t % turns == 0:
            buffer.on_episode_end(goal)
        for k in range(ENVS):
            buffer.add(**{name: array[k] for name, array in ready[t].items()})

    def read(b: Any) -> Read:
        return tuple([torch.from_numpy(b[name]) for name in ("obs", "goal", "rew", "next_obs", "act", "done")])

    return contender(data, add, lambda: buffer.sample(BATCH), read)


def tianshou_line(data: Goals) -> Made:
    collection = importlib.import_module("tianshou.data")
    buffer = collection.HERVectorReplayBuffer(
        data.rows, ENVS, compute_reward_fn=reward_of, horizon=EPISODE, future_k=COPIES + 1
    )

    def batch(step: dict[str, np.ndarray]) -> Any:
        flags = {name: step[name] for name in ("terminated", "truncated")}
        return collection.Batch(
            obs=collection.Batch(**members(step)), obs_next=collection.Batch(**members(step, True)), act=step["action"],
            rew=step["reward"].astype(np.float64), info=collection.Batch(), **flags,
        )  # fmt: skip

    everything = batch(data.columns(np.arange(data.rows)))
    everything.done = everything.truncated
    del everything.info
    buffer.set_batch(everything)
    for env, inner in enumerate(buffer.buffers):
        inner._size, inner._insertion_idx = data.steps, 0
        inner.last_index[0] = data.steps - 1
        buffer._lengths[env], buffer.last_index[env] = data.steps, (env + 1) * data.steps - 1
    buffer._size = data.rows
    ready = [batch(data.step(t)) for t in range(READY)]
    for step in ready:
        del step.info

    def read(b: Any) -> Read:
        obs, after = b.obs, b.obs_next
        fields = obs.observation, obs.desired_goal, b.rew, after.observation, b.act, b.terminated
        return tuple(map(torch.from_numpy, fields))

    return contender(data, lambda t: buffer.add(ready[t]), lambda: buffer.sample(BATCH)[0], read)


def torchrl_line(data: Goals) -> Made:
    collection, tensordict = importlib.import_module("torchrl.data"), importlib.import_module("tensordict").TensorDict

    def judge(td: Any) -> torch.Tensor:
        return -((td["next", "achieved_goal"] - td["desired_goal"]).norm(dim=-1, keepdim=True) > 0.5).float()

    def steps(columns: dict[str, np.ndarray]) -> Any:
        t = {name: torch.from_numpy(array) for name, array in columns.items()}
        size = [len(columns["reward"])]
        following = {name: t[f"next_{name}"] for name in ("observation", "achieved_goal")}
        following |= {"desired_goal": t["desired_goal"].clone(), "reward": t["reward"][:, None]}
        following |= {"terminated": t["terminated"][:, None], "done": t["truncated"][:, None]}
        now = {name: t[name] for name in ("observation", "achieved_goal", "desired_goal", "action")}
        return tensordict({**now, "next": tensordict(following, size)}, batch_size=size)

    buffer = collection.HERReplayBuffer(
        judge, her_ratio=COPIES / (COPIES + 1), achieved_goal_key=("next", "achieved_goal"),
        storage=collection.LazyTensorStorage(data.rows), batch_size=BATCH,
    )  # fmt: skip
    buffer.extend(steps(data.columns(np.arange(data.rows))))
    # one stream of steps: four of them each time
    ready = [list(steps(data.columns(np.arange(ENVS) + ENVS * t)).unbind(0)) for t in range(READY)]

    def read(b: Any) -> Read:
        after = b["next"]
        seen = b["observation"], b["desired_goal"], after["reward"], after["observation"]
        return *seen, b["action"], after["terminated"]

    def add(t: int) -> None:
        for step in ready[t]:  # after an extend of several to a full buffer, sample raises
            buffer.add(step)

    return contender(data, add, buffer.sample, read)


def by_hand(data: Goals) -> Made:
    """Tensors `[T * 4, ...]`, and for each step the last one of its episode, from which goals are taken."""
    names = "observation", "desired_goal", "next_observation", "next_achieved_goal", "action"
    everything = data.columns(np.arange(data.steps)[:, None] + np.arange(ENVS) * data.steps)
    blocks = [torch.from_numpy(everything[name]) for name in names]
    obs, desired, after, achieved, action = (block.flatten(0, 1) for block in blocks)
    last = (torch.arange(data.steps) // EPISODE * EPISODE + EPISODE - 1)[:, None].expand(-1, ENVS).clone()
    ends, rows = last.flatten(), data.steps * ENVS
    ready = [[torch.from_numpy(data.step(t)[name]) for name in names] for t in range(READY)]

    def add(t: int) -> None:
        for block, step in zip(blocks, ready[t], strict=True):
            block[t] = step
        last[t // EPISODE * EPISODE : t + 1] = t

    def sample() -> Read:
        row = torch.randint(rows, (BATCH,))
        time = torch.div(row, ENVS, rounding_mode="floor")
        left = ends.index_select(0, row) - time + 1
        ahead = (torch.rand(BATCH) * left).long()
        new = (torch.rand(BATCH) < COPIES / (COPIES + 1))[:, None]
        goal = torch.where(new, achieved.index_select(0, row + ahead * ENVS), desired.index_select(0, row))
        reward = torch.from_numpy(reward_of(achieved.index_select(0, row).numpy(), goal.numpy()))
        return obs.index_select(0, row), goal, reward, after.index_select(0, row), action.index_select(0, row)

    return contender(data, add, sample, lambda fields: fields)


def lines(data: Goals) -> list[Contender]:
    """All contenders of one size."""
    obs, rest = -(-4 * (data.obs_dim + 2 * GOAL) // 16) * 16, 48
    adding = "; before it a row of each env by add" if data.added else ""
    future = 'strategy "future", four rows in five'
    return [
        GatherFloor(obs + rest, obs),
        Line("relive", "relive", f"ReplayBuffer(view=Hindsight(k=4)).sample(256){adding}", relive_line(True), "ours"),
        Line(
            "relive, reuse=True",
            "relive",
            f"next(batches(_, 256, reuse=True)){adding}",
            relive_line(True, True),
            "ours",
        ),
        Line("relive, without hindsight", "relive", f"the same rows, Transition(){adding}", relive_line(False), "ours"),
        hand_written.line("index_select", f"index_select of each field, goals of later steps{adding}", by_hand),
        Line("stable-baselines3", "stable-baselines3", f"HerReplayBuffer.sample, {future}{adding}", sb3_line),
        Line(
            "cpprb", "cpprb", f"HindsightReplayBuffer.sample: five copies of every step are stored{adding}", cpprb_line
        ),
        Line("tianshou", "tianshou", f"HERVectorReplayBuffer.sample, numpy, {future}{adding}", tianshou_line),
        Line("torchrl", "torchrl", f"HERReplayBuffer.sample, one stream of steps, {future}{adding}", torchrl_line),
    ]


def run(effort: Effort, folder: Path) -> None:
    """Measures `sample` with hindsight and writes `hindsight.json`."""
    workloads = []
    for obs_dim in (10, 25):
        for added in (False, True):
            data = Goals(ROWS, obs_dim, added)
            name = f"obs {obs_dim}" + (", rows added in between" if added else "")
            workloads.append(measure(Workload(name, data, after=True), lines(data), effort))
    write("hindsight", "256 of 1 M transitions, goals of 3, other goals for four in five", workloads, folder)
