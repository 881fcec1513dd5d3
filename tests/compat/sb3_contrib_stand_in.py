"""As much of sb3-contrib as its drop-in asks for, over the stand-in of Stable-Baselines3."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from compat import stable_baselines3_stand_in as sb3

DROP_IN = "relive.compat.sb3_contrib"


class MaskableRolloutBuffer(sb3.RolloutBuffer):
    pass


class MaskableDictRolloutBuffer(sb3.DictRolloutBuffer):
    pass


class RecurrentRolloutBuffer(sb3.RolloutBuffer):
    pass


class RecurrentDictRolloutBuffer(sb3.DictRolloutBuffer):
    pass


class MaskableRolloutBufferSamples(NamedTuple):
    observations: Any
    actions: Any
    old_values: Any
    old_log_prob: Any
    advantages: Any
    returns: Any
    action_masks: Any


class MaskableDictRolloutBufferSamples(MaskableRolloutBufferSamples):
    pass


class RNNStates(NamedTuple):
    pi: Any
    vf: Any


class RecurrentRolloutBufferSamples(NamedTuple):
    observations: Any
    actions: Any
    old_values: Any
    old_log_prob: Any
    advantages: Any
    returns: Any
    lstm_states: Any
    episode_starts: Any
    mask: Any


class RecurrentDictRolloutBufferSamples(RecurrentRolloutBufferSamples):
    pass


class RecurrentPPO:
    """Makes what its host would hold before the first rollout."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._setup_model()

    def _setup_model(self) -> None:
        self.rollout_buffer: Any = SimpleNamespace(
            buffer_size=4, observation_space=self.observation_space, action_space=self.action_space,
            hidden_state_shape=(4, 2, 3, 5), device="cpu", gae_lambda=0.9, gamma=0.8, n_envs=3, pos=0, full=False,
            generator_ready=False,
        )  # fmt: skip


NAMES = {name: value for name, value in globals().items() if name[0].isupper()}
for value in NAMES.values():
    if isinstance(value, type) and value.__module__ == __name__:
        value.__module__ = "sb3_contrib.common.buffers"
PACKAGES = ("", ".common", ".common.maskable", ".common.recurrent", ".ppo_recurrent")
WHERE = (
    "common.maskable.buffers", "common.recurrent.buffers", "common.recurrent.type_aliases",
    "ppo_recurrent.ppo_recurrent",
)  # fmt: skip


@contextmanager
def installed() -> Iterator[Any]:
    """The drop-in over this instead of its host, even where that is installed."""
    with sb3.installed(), pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, DROP_IN, raising=False)
        for path in (*PACKAGES, *(f".{name}" for name in WHERE)):
            module = ModuleType(f"sb3_contrib{path}")
            module.__dict__.update(NAMES)
            patch.setitem(sys.modules, module.__name__, module)
        yield import_module(DROP_IN)
        sys.modules.pop(DROP_IN, None)
