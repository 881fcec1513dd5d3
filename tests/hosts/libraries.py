"""The libraries that a drop-in stands in for: where each comes from, what stands for what, and what tries it.

A further one is an entry in :data:`HOSTS`, ``requirements-<name>.txt``, and its name in the Makefile's ``HOSTS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["HOSTS", "Host"]


def _nothing() -> None:
    """The library is imported as it is."""


def named(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Host:
    """A library, and what tries the drop-in inside of it."""

    title: str
    page: str
    """Its page in docs/migration."""
    repository: str
    """On GitHub: its suite, or all of it."""
    pairs: Mapping[str, str]
    """What stands in for which class or function of it: ``module:name``, both."""
    package: str = ""
    """On the package index; the newest commit of the repository is tried if it is on none."""
    suite: tuple[str, ...] = ()
    """Files and folders of its own tests that build what is replaced; empty if it ships none that can run."""
    besides: tuple[str, ...] = ("tests", "pyproject.toml")
    """What to fetch of the repository."""
    options: tuple[str, ...] = ()
    """Of pytest, for its suite."""
    ours: tuple[str, ...] = ()
    """Our tests: both classes side by side, and trainings on both."""
    no_suite: str = "none that can run"
    """In the table, where there is no suite."""
    differences: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parts of the names of tests that fail on ours by decision, with ``*`` for anything, and why."""
    refusals: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same for parts of the errors that tests fail with on ours."""
    pinned_by: str = ""
    """The package that says which release of it is tried, if not the newest."""
    needs: str = ""
    """A further host whose repository its tests read."""
    allowed: Mapping[str, str] = field(default_factory=dict[str, str])
    """What :func:`hosts.signatures.lacking` finds and may find, and why."""
    prepare: Callable[[], None] = _nothing
    """To be called before it is imported."""
    load: Callable[[str], Any] = named
    """Imports one of its classes."""

    def both(self) -> dict[str, tuple[Any, Any]]:
        """By the host's name of it, its class or function and ours."""
        self.prepare()
        return {path: (self.load(path), named(ours)) for path, ours in self.pairs.items()}


def _without_simulator() -> None:
    events = "embodichain.lab.gym.envs.managers.event_manager"
    for absent in (events, "wandb"):  # no event and no log of the web is asked for
        sys.modules.setdefault(absent, ModuleType(absent))
    vars(sys.modules[events]).setdefault("EventManager", object)


def _of_a_checkout(path: str) -> Any:
    return import_module("peers.fasttd3_host").buffer_of(path.partition(":")[0])


def _of_pytorchrl(path: str) -> Any:
    return import_module("peers.pytorchrl_host").host(path.partition(":")[0])


def _same(theirs: str, ours: str, *names: str) -> dict[str, str]:
    return {f"{theirs}:{name}": f"relive.compat.{ours}:{name}" for name in names}


_IN_ORDER = "recurrent batches are in a new order by default: reshuffle_each_epoch=False gives rsl_rl's"
_RSL_RL: dict[str, Any] = {
    "page": "rsl_rl",
    "repository": "leggedrobotics/rsl_rl",
    "pairs": _same("rsl_rl.storage", "rsl_rl", "RolloutStorage")
    | _same("rsl_rl.utils", "rsl_rl", "split_and_pad_trajectories", "unpad_trajectories"),
    "package": "rsl-rl-lib",
    "suite": ("tests",),
    "ours": ("tests/peers/test_compat_rsl_rl.py",),
}
_RSL_RL_DIFFERS = dict.fromkeys(
    (
        "TestRecurrentMiniBatchGenerator::test_trajectory_count_matches_env_slice",
        "TestRecurrentMiniBatchGenerator::test_hidden_states_align_with_trajectory_starts",
    ),
    _IN_ORDER,
)

HOSTS: dict[str, Host] = {
    "agilerl": Host(
        "AgileRL",
        "agilerl",
        "AgileRL/AgileRL",
        _same("agilerl.components.rollout_buffer", "agilerl", "RolloutBuffer"),
        "agilerl",
        (
            "tests/test_components/test_rollout_buffer.py",
            "tests/test_algorithms/test_single_agent/test_ppo.py",
            "tests/test_rollouts/test_on_policy.py",
        ),
        besides=("tests/*.py", "pyproject.toml"),
        ours=("tests/hosts/test_agilerl.py", "tests/peers/test_agilerl.py"),
        differences={
            "test_ppo_learn_with_rollout_buffer*multibinary": "one number is not spread over all bits",
            **dict.fromkeys(
                (
                    "test_rollout_buffer.py*::test_setstate_buffer_invalid_",
                    "test_rollout_buffer.py*::test_setstate_missing_observation_space",
                    "test_rollout_buffer.py*::test_setstate_batch_size_mismatch",
                ),
                "a state that does not fit is an error, where AgileRL warns and starts empty",
            ),
        },
    ),
    "embodichain": Host(
        "EmbodiChain",
        "embodichain",
        "DexForce/EmbodiChain",
        _same("embodichain.learning.rl.buffer", "embodichain", "RolloutBuffer", "transition_view")
        | _same("embodichain.learning.rl.buffer", "embodichain", "iterate_minibatches")
        | _same("embodichain.learning.rl.algo", "embodichain", "compute_gae"),
        "embodichain",
        ours=("tests/hosts/test_embodichain.py", "tests/peers/test_compat_embodichain.py"),
        prepare=_without_simulator,
    ),
    "fasttd3": Host(
        "FastTD3",
        "fasttd3",
        "younggyoseo/FastTD3",
        {"fasttd3:SimpleReplayBuffer": "relive.compat.fasttd3:SimpleReplayBuffer"},
        besides=("fast_td3",),
        ours=("tests/peers/test_compat_fasttd3.py",),
        needs="holosoma",
        load=_of_a_checkout,
    ),
    "holosoma": Host(
        "holosoma",
        "fasttd3",
        "amazon-far/holosoma",
        {"holosoma:SimpleReplayBuffer": "relive.compat.fasttd3:HolosomaReplayBuffer"},
        besides=("src/holosoma/holosoma/agents",),
        ours=("tests/peers/test_compat_fasttd3.py",),
        needs="fasttd3",  # trains on its class, too
        load=_of_a_checkout,
    ),
    "pytorchrl": Host(
        "PyTorchRL",
        "pytorchrl",
        "compsciencelab/pytorchrl",
        {
            f"{module}:{name}": f"relive.compat.pytorchrl:{name}"
            for module, name in {
                "replay": "ReplayBuffer", "nstep": "NStepReplayBuffer", "per": "PERBuffer", "ere": "EREBuffer",
                "her": "HERBuffer",
            }.items()
        },
        "pytorchrl",
        ours=("tests/peers/test_compat_pytorchrl.py",),
        load=_of_pytorchrl,
    ),
    "rsl_rl": Host("rsl_rl", **_RSL_RL, differences=_RSL_RL_DIFFERS),
    "mjlab": Host(
        "rsl_rl as mjlab pins it",
        **_RSL_RL,
        differences=_RSL_RL_DIFFERS
        | {
            "test_recurrent_batches_in_rsl_rls_order_are_the_same_to_the_bit": "the states of a batch are a list in "
            "rsl_rl 5.4; they are a tuple since 5.5, as here",
        },
        pinned_by="mjlab",
    ),
    "sb3_contrib": Host(
        "sb3-contrib",
        "sb3_contrib",
        "Stable-Baselines-Team/stable-baselines3-contrib",
        _same(
            "sb3_contrib.common.maskable.buffers", "sb3_contrib", "MaskableRolloutBuffer", "MaskableDictRolloutBuffer"
        )
        | _same(
            "sb3_contrib.common.recurrent.buffers", "sb3_contrib", "RecurrentRolloutBuffer",
            "RecurrentDictRolloutBuffer",
        ),
        "sb3-contrib",
        (
            "tests/test_lstm.py", "tests/test_invalid_actions.py", "tests/test_cnn.py::test_image_like_input",
            "tests/test_deterministic.py", "tests/test_run.py::test_advantage_normalization",
            "tests/test_train_eval_mode.py::test_ppo_mask_train_eval_mode",
        ),
        options=("-m", "not slow"),  # that one trains for many minutes
        differences={
            "test_invalid_actions.py::test_identity": "seed 32 passes on its class, and 7 of 9 others do not: it asks "
            "for luck",
        },
        ours=("tests/hosts/test_sb3_contrib.py",),
    ),
    "skrl": Host(
        "skrl",
        "skrl",
        "Toni-SM/skrl",
        _same("skrl.memories.torch", "skrl", "RandomMemory"),
        "skrl",
        ("tests/agents/torch", "tests/multi_agents/torch"),
        options=("--hypothesis-seed=0",),  # both classes are given the same examples
        ours=("tests/hosts/test_skrl.py",),
        refusals={"there are only * rows or sequences to divide": "skrl trains on empty minibatches, and gets NaN"},
    ),
    "stable_baselines3": Host(
        "Stable-Baselines3",
        "stable_baselines3",
        "DLR-RM/stable-baselines3",
        _same(
            "stable_baselines3.common.buffers", "stable_baselines3", "ReplayBuffer", "DictReplayBuffer",
            "NStepReplayBuffer", "RolloutBuffer", "DictRolloutBuffer",
        )
        | _same("stable_baselines3.her.her_replay_buffer", "stable_baselines3", "HerReplayBuffer"),
        "stable-baselines3",
        (
            "tests/test_buffers.py", "tests/test_gae.py", "tests/test_her.py", "tests/test_n_step_replay.py",
        ),
        ours=("tests/hosts/test_stable_baselines3.py", "tests/peers/test_compat_stable_baselines3.py"),
        differences={
            "test_her.py::test_truncate_last_trajectory": "it reads _current_ep_start, which ours lacks",
            "test_her.py::test_performance_her": "seed 0 passes on its class, and seed 1 does not: it asks for luck",
        },
    ),
    "velora": Host(
        "Velora",
        "velora",
        "Achronus/velora",
        _same("velora.buffer", "velora", "ReplayBuffer", "BatchExperience"),
        "velora",
        ("tests",),
        ours=("tests/hosts/test_velora.py",),
        prepare=lambda: import_module("velora.models") and None,  # its buffer cannot be imported before its models
    ),
}  # fmt: skip
"""By the name of the environment and of the requirements."""
