"""What ``inspect.signature``, ``help`` and configuration tools see of the drop-ins: the arguments of their hosts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from compat import stable_baselines3_stand_in as stand_in
from relive.compat import agilerl, embodichain, fasttd3, pytorchrl, rsl_rl, velora
from relive.compat.base import passes_on
from support.pytorchrl_buffers import parts

STARS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
OURS = {"from_original", "compile"}
"""Methods that no host has. They pass options on, to a constructor and to ``torch.compile``."""


def names_of(call: Any) -> list[str]:
    return list(inspect.signature(call).parameters)


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """The functions and classes that a module lists, and their methods; without errors, and what needs its host."""
    for name in module.__all__:
        value = vars(module).get(name)
        if inspect.isfunction(value):
            yield name, value
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        yield name, value
        methods = [(x, getattr(value, x)) for x in dir(value) if not x.startswith("_") and x not in OURS]
        yield from ((f"{name}.{x}", one) for x, one in methods if inspect.isfunction(one) or inspect.ismethod(one))


@pytest.mark.parametrize("module", [agilerl, embodichain, fasttd3, pytorchrl, rsl_rl, velora, None])
def test_no_public_call_hides_its_arguments(module: Any) -> None:
    with stand_in.installed() as stable_baselines3:
        found = [
            name
            for name, call in public(module or stable_baselines3)
            if any(one.kind in STARS for one in inspect.signature(call).parameters.values())
        ]
    assert found == []


def test_a_factory_of_pytorchrl_shows_the_arguments_of_its_class_and_takes_them_all() -> None:
    per = ["n_step", "epsilon", "alpha", "beta", "default_error"]
    expected = {
        pytorchrl.ReplayBuffer: [],
        pytorchrl.NStepReplayBuffer: ["n_step"],
        pytorchrl.PERBuffer: per,
        pytorchrl.EREBuffer: [*per, "eta", "cmin"],
        pytorchrl.HERBuffer: ["her_function", *per, "eta", "cmin"],
    }
    for kind, names in expected.items():
        shown = inspect.signature(kind.create_factory)
        assert list(shown.parameters) == ["size", *names, "seed"]
        assert {name: shown.parameters[name].default for name in names} == {
            name: inspect.signature(kind).parameters[name].default for name in names
        }
        defaults = {name: one.default for name, one in shown.parameters.items() if name != "size"}
        assert type(kind.create_factory(size=10, **defaults)(*parts())) is kind
        assert type(kind.create_factory(10, *(defaults[name] for name in names))(*parts())) is kind
        with pytest.raises(TypeError, match="no_such"):
            kind.create_factory(10, no_such=1)


def test_a_class_of_the_users_own_shows_the_arguments_of_its_own_factory() -> None:
    class Mine(pytorchrl.NStepReplayBuffer):
        def __init__(self, size: int, device: Any, actor: Any, algorithm: Any, envs: Any, color: str = "red") -> None:
            super().__init__(size, device, actor, algorithm, envs, 3)
            self.color = color

    class Passing(pytorchrl.PERBuffer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

    assert names_of(Mine.create_factory) == ["size", "color"]
    assert Mine.create_factory(10, color="blue")(*parts()).color == "blue"
    assert Passing.create_factory(10, 3, alpha=0.5)(*parts()).alpha == 0.5


def test_a_function_that_passes_arguments_on_shows_them_with_its_own_and_without_what_it_gives() -> None:
    def host(a: int, b: int = 2, view: str = "", *, c: int = 3) -> int:
        return 100 * a + 10 * b + c

    @passes_on(host, "view")
    def ours(*args: Any, c: int = 4, d: int = 5, **options: Any) -> int:
        return host(*args, view="mine", c=c + d, **options)

    shown = inspect.signature(ours)
    assert str(shown).startswith("(a: 'int', b: 'int' = 2, *, c: 'int' = 4, d: 'int' = 5)")
    assert ours(1, b=1) == 119


def test_the_drop_in_for_stable_baselines3_shows_one_list_of_arguments_however_deep_its_classes_pass_them_on() -> None:
    with stand_in.installed() as module:
        shared = ["buffer_size", "observation_space", "action_space", "device", "n_envs", "optimize_memory_usage"]
        assert names_of(module.NStepReplayBuffer)[:6] == names_of(module.PrioritizedReplayBuffer)[:6] == shared
        prioritized = names_of(module.PrioritizedReplayBuffer)
        assert {"alpha", "beta", "eps", "n_steps", "gamma", "seed"} <= set(prioritized)
        assert not {"sampler", "view"} & set(prioritized)
        assert names_of(module.DictRolloutBuffer) == names_of(module.RolloutBuffer)
