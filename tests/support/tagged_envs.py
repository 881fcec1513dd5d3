"""Environments whose every observation, action and reward says where it is from: a batch proves what it is.

A tag is (env, episode, step, seed). Observation ``length`` of an episode is its final one. A reset with
a seed starts the env's life afresh with that seed and episode 0; one without goes on to the next episode.
Numbers are exact in float32, but for int64 ones, which are above 2^53 so that a trip through any float shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from support.oracle import Experience, same

Kind = Literal["terminated", "truncated", "both"]
Endings = Callable[[int, int], tuple[int, Kind]]
Observations = Literal["box", "dict", "tuple"]
Actions = Literal["discrete", "box"]

NUM_ACTIONS = 5
NUM_PHASES = 7
_COMPARED = ("env", "episode", "index", "obs", "action", "reward", "terminated", "truncated", "next_obs")
_PLACES = {"0": "state", "1": "image", "2": "count"}
_BITS = {"seed": 14, "env": 12, "episode": 16, "step": 16}


class Tag(NamedTuple):
    """Where an observation comes from: four ints, or four int64 arrays of the batch's shape."""

    env: Any
    episode: Any
    step: Any
    seed: Any


class ForeignActionError(AssertionError):
    """An env was given an action that does not belong to the observation it gave."""


# Schedules: how long each episode is, and how it ends.


def always(length: int, kind: Kind = "terminated") -> Endings:
    """Every episode of every env has ``length`` steps and ends in the same way."""
    return lambda env, episode: (length, kind)


def cycle(*per_env: Sequence[tuple[int, Kind]]) -> Endings:
    """Env ``i`` goes round its own list of (length, kind); if lists are too few, they go round too."""
    lists = [list(endings) for endings in per_env]

    def endings(env: int, episode: int) -> tuple[int, Kind]:
        mine = lists[env % len(lists)]
        return mine[episode % len(mine)]

    return endings


def drawn(seed: int, longest: int, kinds: Sequence[Kind] = ("terminated", "truncated", "both")) -> Endings:
    """Lengths from 1 to ``longest`` and kinds drawn at random, the same for the same (seed, env, episode)."""

    def endings(env: int, episode: int) -> tuple[int, Kind]:
        rng = np.random.default_rng([seed, env, episode])
        return int(rng.integers(1, longest + 1)), kinds[int(rng.integers(len(kinds)))]

    return endings


# Tags to numbers, and back.


def encode(tag: Tag, observations: Observations = "box") -> Any:
    """The observation of ``tag`` (four ints), as the space of that name holds it."""
    state = np.array([tag.env, tag.episode, tag.step, tag.seed], np.float32)
    if observations == "box":
        return state
    image = np.array([tag.env, tag.episode, tag.step, tag.seed], "<u4").view(np.uint8).reshape(4, 4, 1)
    count = np.array([_pack(tag)], np.int64)
    if observations == "tuple":
        return (state, image, count)
    phase = np.int64(tag.step % NUM_PHASES)
    return {"state": state, "camera": {"image": image}, "count": count, "phase": phase}


def decode(obs: Any) -> Tag:
    """The tag of an observation, with any leading axes; raises AssertionError if its parts disagree."""
    parts = _parts(obs)
    numbers = np.asarray(parts["state"])
    exact = numbers.astype(np.int64)
    assert numbers.shape[-1] == 4, f"no tag in shape {numbers.shape}"
    assert np.array_equal(exact, numbers), f"no tag in {numbers}"
    tag = Tag(*(exact[..., i] for i in range(4)))
    if "image" in parts:
        image = np.ascontiguousarray(parts["image"])
        assert image.dtype == np.uint8, f"the image became {image.dtype}"
        pixels = image.reshape(*numbers.shape, 4).view("<u4").reshape(numbers.shape)
        assert np.array_equal(pixels, exact), f"the image is not that of {tag}"
    if "count" in parts:
        count = np.asarray(parts["count"])
        assert count.dtype == np.int64, f"the count became {count.dtype}"
        assert np.array_equal(count[..., 0], _pack(tag)), f"the count is not that of {tag}"
    if "phase" in parts:
        phase = np.asarray(parts["phase"])
        assert phase.dtype == np.int64, f"the phase became {phase.dtype}"
        assert np.array_equal(phase, tag.step % NUM_PHASES), f"the phase is not that of {tag}"
    return tag


def reward_of(env: Any, episode: Any, step: Any) -> Any:
    """The reward of a step: above 0 (what an ignored step gets), at most 8, exact in float32."""
    return (1 + _code(env, episode, step)) / 2**20


def decode_reward(reward: Any) -> tuple[Any, Any, Any]:
    """(env modulo 64, episode modulo 512, step modulo 256) of the step that was rewarded so."""
    scaled = np.asarray(reward, np.float64) * 2**20 - 1
    code = scaled.astype(np.int64)
    assert np.array_equal(code, scaled), f"no step is rewarded with {reward}"
    assert np.all(code >= 0), f"no step is rewarded with {reward}"
    return code >> 17, (code >> 8) & 511, code & 255


def mask_of(tag: Tag) -> np.ndarray:
    """The legal actions, int8 ``[..., NUM_ACTIONS]``: at least three of them, others at each step."""
    action = np.arange(NUM_ACTIONS)
    start = np.asarray(tag.env + 2 * tag.episode + tag.step + tag.seed)[..., None]
    return ((action + start) % NUM_ACTIONS >= 2).astype(np.int8)


def action_of(tag: Tag, actions: Actions = "discrete", action_mask: Any = None) -> np.ndarray:
    """The action that belongs to an observation, and to the mask given with it."""
    code = np.asarray(tag.env * 7 + tag.episode * 5 + tag.step * 3 + tag.seed)
    if actions == "box":
        return np.stack([code % 64 / 64, -(code % 63) / 64], axis=-1).astype(np.float32)
    if action_mask is None:
        return code % NUM_ACTIONS
    legal = np.asarray(action_mask).astype(bool)
    rank = np.cumsum(legal, axis=-1)
    wanted = code % legal.sum(axis=-1) + 1
    return np.argmax(legal & (rank == wanted[..., None]), axis=-1)


def value_of(tag: Tag) -> Any:
    """A value that no other observation of up to 64 envs has: negative, and exact in float32."""
    return -reward_of(tag.env, tag.episode, tag.step)


def tagged_policy(obs: Any, action_mask: Any = None, *, actions: Actions = "discrete") -> Any:
    """The actions that tagged envs want for these observations: a tensor for tensors, else an array."""
    action = action_of(decode(obs), actions, None if action_mask is None else np.asarray(action_mask))
    return _like(obs, action)


def tagged_value(obs: Any) -> Any:
    """``value_of`` these observations, float32: a tensor for tensors, else an array."""
    return _like(obs, np.asarray(value_of(decode(obs)), np.float32))


# The environments.


class TaggedEnv(gym.Env[Any, Any]):
    """An env that follows ``endings`` and refuses an action that is not the one its observation asks for."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        env: int = 0,
        endings: Endings | None = None,
        *,
        observations: Observations = "box",
        actions: Actions = "discrete",
        action_mask: bool = False,
        check_actions: bool = True,
    ) -> None:
        assert not (action_mask and actions == "box"), "only discrete actions can be masked"
        self._endings = endings or always(3)
        self._observations: Observations = observations
        self._actions: Actions = actions
        self._action_mask = action_mask
        self._check_actions = check_actions
        self._env = env
        self._seed = 0
        self._episode = -1
        self._step = 0
        self._under_way = False
        self.num_checked = 0
        self.observation_space = _observation_space(observations)
        if actions == "box":
            self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        else:
            self.action_space = gym.spaces.Discrete(NUM_ACTIONS)

    @property
    def tag(self) -> Tag:
        """The tag of the newest observation."""
        return Tag(self._env, self._episode, self._step, self._seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or a new life with ``seed``."""
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._episode += 1
        self._step = 0
        self._under_way = True
        return encode(self.tag, self._observations), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on one step; raises ForeignActionError if ``action`` is not what the observation asks for."""
        assert self._under_way, f"env {self._env}: a step after episode {self._episode} without a reset"
        if self._check_actions:
            expected = action_of(self.tag, self._actions, mask_of(self.tag) if self._action_mask else None)
            if not np.array_equal(np.asarray(action), expected):
                raise ForeignActionError(f"{self.tag} wants action {expected}, got {action}")
            self.num_checked += 1
        reward = float(reward_of(*self.tag[:3]))
        length, kind = self._endings(self._env, self._episode)
        self._step += 1
        ended = self._step >= length
        self._under_way = not ended
        terminated, truncated = ended and kind != "truncated", ended and kind != "terminated"
        return encode(self.tag, self._observations), reward, terminated, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": mask_of(self.tag)} if self._action_mask else {}


def make_tagged(
    num_envs: int,
    mode: AutoresetMode | str,
    endings: Endings,
    *,
    observations: Observations = "box",
    actions: Actions = "discrete",
    action_mask: bool = False,
    check_actions: bool = True,
) -> SyncVectorEnv:
    """``num_envs`` tagged envs, numbered from 0, behind a vector env of any autoreset mode."""
    make = partial(
        TaggedEnv,
        endings=endings,
        observations=observations,
        actions=actions,
        action_mask=action_mask,
        check_actions=check_actions,
    )
    return SyncVectorEnv([partial(make, env) for env in range(num_envs)], autoreset_mode=mode)


def played(
    endings: Endings,
    env: int | Iterable[int],
    num_steps: int | Sequence[int],
    *,
    seed: int | None = None,
    observations: Observations = "box",
    actions: Actions = "discrete",
    action_mask: bool = False,
) -> Experience:
    """What truly happens in the first ``num_steps`` real steps of an env, or several, by ``tagged_policy``.

    ``seed`` is what the vector env was reset with: env ``i`` is tagged ``seed + i``, or 0 without one.
    Extras: ``value``, and ``action_mask`` where the envs give one.
    """
    envs = [env] if isinstance(env, int) else list(env)
    counts = [num_steps] * len(envs) if isinstance(num_steps, int) else list(num_steps)
    experience = Experience()
    for which, count in zip(envs, counts, strict=True):
        episode = step = 0
        for _ in range(count):
            tag = Tag(which, episode, step, 0 if seed is None else seed + which)
            length, kind = endings(which, episode)
            ended = step + 1 == length
            mask = mask_of(tag) if action_mask else None
            extras = {"value": float(value_of(tag))} | ({} if mask is None else {"action_mask": mask})
            experience.record(
                which,
                obs=encode(tag, observations),
                action=action_of(tag, actions, mask),
                reward=float(reward_of(*tag[:3])),
                terminated=ended and kind != "truncated",
                truncated=ended and kind != "terminated",
                next_obs=encode(tag._replace(step=step + 1), observations),
                **extras,
            )
            episode, step = (episode + 1, 0) if ended else (episode, step + 1)
    return experience


class Life:
    """The steps of one env as the caller wants them: each call says how the step ends, if it ends an episode."""

    def __init__(self, env: int, *, seed: int = 0, observations: Observations = "box") -> None:
        self._tag = Tag(env, 0, 0, seed)
        self._observations: Observations = observations

    def step(self, kind: Kind | None = None) -> dict[str, Any]:
        """One step's fields, ``next_obs`` the true one, without a leading axis."""
        tag, after = self._tag, self._tag._replace(step=self._tag.step + 1)
        self._tag = after
        if kind is not None:
            self.restart()
        return {
            "obs": encode(tag, self._observations),
            "action": np.asarray(action_of(tag)),
            "reward": np.float32(reward_of(*tag[:3])),
            "terminated": np.bool_(kind in ("terminated", "both")),
            "truncated": np.bool_(kind in ("truncated", "both")),
            "next_obs": encode(after, self._observations),
        }

    def restart(self) -> None:
        """Whatever was under way, the next step starts a new episode."""
        self._tag = self._tag._replace(episode=self._tag.episode + 1, step=0)


def row(obs: Any, index: int) -> Any:
    """Observation ``index`` of a batch, structure and dtypes kept, as NumPy."""
    if isinstance(obs, Mapping):
        return {key: row(part, index) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(row(part, index) for part in obs)
    return np.asarray(obs)[index]


def same_experience(a: Experience, b: Experience) -> bool:
    """True if both hold the same transitions, extras aside; raises AssertionError where they part."""
    for one, other in zip(a.transitions(), b.transitions(), strict=False):
        where = f"env {one.env}, episode {one.episode}, step {one.index}"
        for name in _COMPARED:
            mine, theirs = getattr(one, name), getattr(other, name)
            assert same(mine, theirs), f"{where}: {name} is {mine} in one and {theirs} in the other"
    assert len(a) == len(b), f"{len(a)} steps in one, {len(b)} in the other"
    return True


def _code(env: Any, episode: Any, step: Any) -> Any:
    return ((env % 64) * 512 + episode % 512) * 256 + step % 256


def _pack(tag: Tag) -> Any:
    """One int64 above 2^53: the tag's numbers side by side."""
    packed: Any = 1 << 60
    shift = 0
    for name, bits in reversed(_BITS.items()):
        number = getattr(tag, name)
        assert np.all(np.asarray(number) < 1 << bits), f"{name} {number} is too large for a tag"
        packed = packed | (number << shift)
        shift += bits
    return packed


def _observation_space(observations: Observations) -> gym.Space[Any]:
    state = gym.spaces.Box(0, 2**24, (4,), np.float32)
    image = gym.spaces.Box(0, 255, (4, 4, 1), np.uint8)
    count = gym.spaces.Box(0, 2**62, (1,), np.int64)
    if observations == "box":
        return state
    if observations == "tuple":
        return gym.spaces.Tuple((state, image, count))
    return gym.spaces.Dict(
        {
            "state": state,
            "camera": gym.spaces.Dict({"image": image}),
            "count": count,
            "phase": gym.spaces.Discrete(NUM_PHASES),
        }
    )


def _parts(obs: Any) -> dict[str, Any]:
    """The leaves of an observation by name, out of an array, a tuple, or nested mappings (TensorDict too)."""
    if isinstance(obs, tuple):
        obs = {str(i): part for i, part in enumerate(obs)}
    if not hasattr(obs, "keys"):
        return {"state": obs}
    parts: dict[str, Any] = {}
    for key in list(obs.keys()):  # a TensorDict iterates over its rows
        name = str(key)
        parts |= _parts(obs[key]) if hasattr(obs[key], "keys") else {_PLACES.get(name, name): obs[key]}
    return parts


def _like(obs: Any, array: np.ndarray) -> Any:
    leaf = next(iter(_parts(obs).values()))
    return torch.as_tensor(array, device=leaf.device) if isinstance(leaf, torch.Tensor) else array
