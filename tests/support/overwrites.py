"""A run that is played twice, once with all that was handed in or out overwritten as soon as a call has returned.

The law: whatever was handed to relive, or by relive, may then be overwritten, and nothing that is stored or drawn
changes. So both plays come to the same, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorWrapper
from torch import Tensor

from support import tagged_envs

Run = Callable[["Hands"], None]


def leaves(tree: Any) -> Iterator[Any]:
    """All arrays and tensors in nested mappings, sequences, arrays of objects and data classes."""
    if isinstance(tree, Tensor) or (isinstance(tree, np.ndarray) and tree.dtype != np.object_):
        yield tree
    elif isinstance(tree, Mapping) or hasattr(tree, "batch_size"):  # a TensorDict, whose values are read one by one
        for name in tree.keys():
            yield from leaves(tree[name])
    elif isinstance(tree, list | tuple | np.ndarray):
        for member in tree:
            yield from leaves(member)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from leaves(getattr(tree, field.name))


def overwrite(tree: Any) -> int:
    """Fill all arrays and tensors with NaN, the opposite of a flag, or the byte 0xAB; returns how many there were."""
    count = 0
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            with torch.no_grad():
                if leaf.dtype is torch.bool:
                    leaf.copy_(~leaf)
                elif leaf.is_floating_point():
                    leaf.fill_(torch.nan)
                else:
                    leaf.fill_(0xAB if leaf.dtype is torch.uint8 else -85)
        elif not leaf.flags.writeable:
            continue
        elif leaf.dtype == np.bool_:
            np.logical_not(leaf, out=leaf)
        else:
            leaf[...] = np.nan if leaf.dtype.kind == "f" else 0xAB if leaf.dtype == np.uint8 else -85
        count += 1
    return count


def bits(leaf: Any) -> tuple[Any, ...]:
    """What a leaf holds: its dtype, its shape and its bytes."""
    if isinstance(leaf, Tensor):
        flat = leaf.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
        return str(leaf.dtype), tuple(leaf.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(leaf.dtype), leaf.shape, leaf.tobytes()


class Hands:
    """What env, policy, user and learner hold in one play, and what is known of the buffers in it.

    Args:
        overwriting: False in the play that the other one is compared with.
    """

    def __init__(self, overwriting: bool) -> None:
        self.overwriting, self.count = overwriting, 0
        self.facts: list[tuple[str, Any]] = []
        self._held: list[Any] = []

    def hold(self, tree: Any) -> Any:
        """Keep what is handed to a call, or was returned by it, until :meth:`spoil`; returns it."""
        self._held.append(tree)
        return tree

    def take(self, name: str, tree: Any) -> Any:
        """Note what a call has returned, and hold it."""
        self.note(name, tree)
        return self.hold(tree)

    def note(self, name: str, tree: Any) -> None:
        """Note the bits that a tree holds now."""
        self.facts.append((name, [bits(leaf) for leaf in leaves(tree)]))

    def spoil(self, *trees: Any) -> None:
        """The calls have returned: overwrite ``trees``, or all that is held if there are none."""
        if not trees:
            trees, self._held = tuple(self._held), []
        if self.overwriting:
            self.count += sum(map(overwrite, trees))


def play_twice(run: Run) -> None:
    """Play a run with and without overwriting, and require that both come to the same."""
    plain, spoilt = Hands(False), Hands(True)
    run(plain)
    run(spoilt)
    assert spoilt.count, "nothing was overwritten"
    assert [name for name, _ in plain.facts] == [name for name, _ in spoilt.facts]
    changed = [name for (name, one), (_, other) in zip(plain.facts, spoilt.facts, strict=True) if one != other]
    assert not changed, f"overwriting what was handed in or out has changed {changed}"


class _Answers:
    """Gives an env's answers out as arrays of its own, which it overwrites when it is next called."""

    hands: Hands
    given: Any = ()

    def answer(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.hands.spoil(self.given)
        answer = call(*copy.deepcopy(args), **copy.deepcopy(options))
        self.hands.spoil(args)  # an action that is clipped in place, say
        self.given = copy.deepcopy(answer)
        self.hands.hold(self.given)  # also after a whole collection
        return self.given


class HoldingEnvs(_Answers, VectorWrapper):
    """A vector env of Gymnasium."""

    def __init__(self, envs: Any, hands: Hands) -> None:
        VectorWrapper.__init__(self, envs)
        self.hands = hands

    def reset(self, **options: Any) -> Any:
        return self.answer(self.env.reset, **options)

    def step(self, actions: Any) -> Any:
        return self.answer(self.env.step, actions)


class HoldingEnv(_Answers, gym.Wrapper[Any, Any, Any, Any]):
    """A single env, whose reset overwrites what the episode ended on."""

    def __init__(self, env: Any, hands: Hands) -> None:
        gym.Wrapper.__init__(self, env)
        self.hands = hands

    def reset(self, **options: Any) -> Any:
        return self.answer(self.env.reset, **options)

    def step(self, action: Any) -> Any:
        return self.answer(self.env.step, action)


class HoldingSimulator(_Answers):
    """A simulator of tensors, or rsl_rl's ``VecEnv``."""

    def __init__(self, simulator: Any, hands: Hands) -> None:
        self.simulator, self.hands = simulator, hands

    def __getattr__(self, name: str) -> Any:
        return getattr(self.simulator, name)

    def reset(self) -> Any:
        return self.answer(self.simulator.reset)

    def get_observations(self) -> Any:
        return self.answer(self.simulator.get_observations)

    def step(self, actions: Any) -> Any:
        return self.answer(self.simulator.step, actions)


class HoldingPolicy:
    """Writes to all that it is passed, and to its last answer when it is next called."""

    def __init__(self, hands: Hands, act: Callable[..., dict[str, Any]]) -> None:
        self.hands, self.act, self.last = hands, act, dict[str, Any]()

    def __call__(self, obs: Any, hidden: Any, action_mask: Any = None) -> dict[str, Any]:
        self.hands.spoil(self.last)
        self.last = self.act(obs, hidden) if action_mask is None else self.act(obs, hidden, action_mask)
        self.hands.spoil(obs, hidden, action_mask)
        return dict(self.hands.hold(self.last))


class HoldingModelFree(HoldingPolicy):
    """The same for envs without a mask."""

    def __call__(self, obs: Any, hidden: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(obs, hidden)


def act(obs: Any, hidden: Any, action_mask: Any = None) -> dict[str, Any]:
    """For tagged envs."""
    return {
        "action": tagged_envs.tagged_policy(obs, action_mask),
        "value": tagged_envs.tagged_value(obs),
        "hidden": hidden * 0.5 + obs.reshape(1, len(obs), -1)[..., :3] + 1,
    }
