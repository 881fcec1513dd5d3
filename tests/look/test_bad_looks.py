"""Arguments of a wrong kind for what looks at replays, and for mixtures: refused by name, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import relive
from relive.errors import DTypeError, FieldError, ParameterError, ReliveError, ShapeError
from relive.exchange import log_of

SCHEMA = relive.Schema.from_example({"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False, "truncated": False})


def filled(**options: Any) -> relive.ReplayBuffer:
    """A replay of one env with twelve transitions."""
    replay = relive.ReplayBuffer(SCHEMA, 16, seed=0, check_ends=False, sampler=relive.Prioritized(), **options)
    for i in range(13):
        replay.add(obs=float(i), action=i, reward=1.0, terminated=False, truncated=False)
    return replay


def arrays(**given: Any) -> dict[str, Any]:
    """Five steps by name, with some other fields."""
    return {"obs": np.arange(5.0), "reward": np.ones(5), "terminated": np.zeros(5, bool)} | given


def compared(**given: Any) -> Any:
    """An audit of a batch of which some fields are others."""
    replay = filled()
    return relive.audit(replay, batch=dict(replay.sample(4).items()) | given)


def rated(**given: Any) -> int:
    """Rate a batch of a mixture of which one argument is another."""
    mixture = relive.Mixture({"a": filled()}, {"a": 1})
    return mixture.update_priorities(**({"batch": mixture.sample(4), "td_error": torch.ones(4)} | given))


CALLS: dict[str, Callable[[Any], Any]] = {
    "Mixture(buffers": lambda v: relive.Mixture(v, {"a": 1}),
    "a share": lambda v: relive.Mixture({"a": filled()}, v),
    "'shares'": lambda v: relive.Mixture({"a": filled()}, {"a": 1}).load_state_dict(v),
    "batch with 'source'": lambda v: rated(batch=v),
    "td_error|update_priorities": lambda v: rated(td_error=v),
    "mask": lambda v: rated(mask=v),
    "Monitor(counts": lambda v: relive.Monitor(filled(), counts=v),
    "index": lambda v: relive.Monitor(filled(), counts=True).draws(v),
    "weight": lambda v: relive.Monitor(filled()).update({"index": np.array([1]), "weight": v}),
    "scalars.prefix": lambda v: relive.Monitor(filled()).scalars(v),
    "audit.n=": lambda v: relive.audit(filled(), n=v),
    "audit.gamma": lambda v: relive.audit(filled(), gamma=v),
    "audit.reward_fn": lambda v: relive.audit(filled(), reward_fn=v),
    "audit.spaces": lambda v: relive.audit(filled(), spaces=v),
    "audit.max_episode_steps": lambda v: relive.audit(filled(), max_episode_steps=v),
    "draws": lambda v: relive.audit(filled(), draws=v),
    "batch": lambda v: relive.audit(filled(), batch=v),
    "batch: 'index'|batch: 'obs'": lambda v: compared(index=v),
    "'reward'|reward:": lambda v: compared(reward=v),
    "'terminated'|terminated:": lambda v: compared(terminated=v),
    "next_obs": lambda v: compared(next_obs=v),
    "'obs'": lambda v: relive.audit(filled(), spaces={"obs": v}),
    "reward": lambda v: relive.inspect(arrays(reward=v)),
    "terminated": lambda v: relive.inspect(arrays(terminated=v)),
    "path": relive.load_extra,
    "path=": lambda v: relive.inspect(filled()).plot(v),
}
"""What an error's message has to say -> a call with a wrong value of that argument."""

ODD = np.zeros((2, 3)), torch.eye(2).to_sparse(), np.zeros(2, [("a", "f4")]), object(), [[1], [1, 2]], 1j


@pytest.mark.parametrize("words", CALLS)
def test_a_value_of_a_wrong_kind_is_refused_by_its_name(words: str):
    for value in ODD:
        if words in ("draws", "index") and value is ODD[0]:
            value = ODD[0] + 0.5
        with pytest.raises(ReliveError, match=words.replace("(", ".")):
            CALLS[words](value)


def test_an_index_that_was_never_issued_costs_a_monitor_no_other_count():
    replay = filled()
    monitor = relive.Monitor(replay, counts=True)
    right = replay.sample(8)
    for _ in range(2):  # the third batch is the first that is not looked at
        monitor.update(right)
    monitor.update({"index": np.array([2**40, 3])})
    with pytest.raises(ParameterError, match="never issued"):
        monitor.scalars()
    index, times = np.unique(np.append(np.tile(right["index"].numpy(), 2), 3), return_counts=True)
    assert monitor.draws(index).tolist() == times.tolist()


def test_a_weight_that_is_refused_leaves_the_batch_uncounted():
    replay = filled()
    monitor = relive.Monitor(replay, counts=True)
    batch = replay.sample(4)
    with pytest.raises(DTypeError, match="weight"):
        monitor.update({"index": batch["index"], "weight": ["a"] * 4})
    monitor.update(batch)
    assert monitor.draws(np.arange(12)).sum() == 4
    assert monitor.scalars()["weight_max"] == 1.0


def test_a_window_longer_than_all_steps_is_that_of_all_steps():
    replay = filled(view=relive.NStep(50, gamma=1.0))
    assert replay.sample(32)["reward"].max() == 12
    assert relive.audit(replay, batch=replay.sample(32), n=2**40, gamma=1.0)


def test_next_observations_without_a_member_are_refused():
    obs = {"a": np.zeros(5), "b": np.zeros(5)}
    with pytest.raises(FieldError, match=r"next_obs\.b"):
        relive.audit(arrays(obs=obs, next_obs={"a": np.zeros(5)}))


@pytest.mark.parametrize("shape", [(2**45,), (5, 2**45)])
@pytest.mark.parametrize("of", ["numpy", "torch", "bfloat16", "nested"])
def test_arrays_that_repeat_a_few_numbers_are_refused_if_they_would_not_fit(shape: tuple[int, ...], of: str):
    one = np.broadcast_to(np.zeros(1), shape)
    obs: Any = {"numpy": one, "torch": torch.zeros(1).expand(shape), "nested": {"a": (one, np.zeros(5))},
                "bfloat16": torch.zeros(1, dtype=torch.bfloat16).expand(shape)}[of]  # fmt: skip
    flags = np.broadcast_to(np.zeros(1, bool), shape[:1])
    steps = {"obs": obs, "reward": flags, "terminated": flags}
    for look in (relive.audit, relive.inspect, log_of):
        with pytest.raises(ParameterError, match=r"field 'obs' repeats its numbers.* would take .* are free"):
            look(steps)
    few = np.broadcast_to(np.zeros((1, 1)), (5, 2))
    assert relive.audit(arrays(obs=few)).rows == 5


def test_narrow_floats_are_looked_at_as_numbers():
    obs = torch.tensor([0.0, 1.0, float("nan"), 2.0, 3.0], dtype=torch.bfloat16)
    assert [finding.rule for finding in relive.audit(arrays(obs=obs)).findings if finding.sure == "certain"] == [
        "not-finite"
    ]


def test_a_space_of_another_size_is_refused():
    with pytest.raises(ParameterError, match="'obs' has 1 numbers"):
        relive.audit(filled(), spaces={"obs": gym.spaces.Box(-1, 1, (2,))})


def test_a_path_that_is_none_is_refused_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch):
    plot = pytest.importorskip("relive.look.inspection", exc_type=ImportError)
    monkeypatch.setattr(plot, "figure_of", lambda inspection: pytest.fail("it was drawn"))
    path: Any = 7
    with pytest.raises(ParameterError):
        relive.inspect(filled()).plot(path)


@pytest.mark.parametrize("name", ["next_obs", "final_obs"])
def test_observations_after_steps_that_are_not_like_the_others_are_named(name: str) -> None:
    rest = {"reward": np.ones(50), "terminated": np.ones(50, bool), "truncated": np.zeros(50, bool)}
    with pytest.raises(ShapeError, match=rf"'{name}': expected \(50, 2\), as 'obs' has, got \(50, 3\)"):
        relive.audit({"obs": np.zeros((50, 2)), name: np.zeros((50, 3)), **rest})
    with pytest.raises(FieldError, match=rf"{name}\.a"):
        relive.audit({"obs": {"a": np.zeros((50, 2))}, name: {"b": np.zeros((50, 2))}, **rest})


def test_a_policy_that_fails_in_both_ways_is_told_both() -> None:
    def policy(obs: Any, action: Any) -> Any:
        if not isinstance(obs, np.ndarray):
            raise TypeError("tensors are not taken")
        raise ValueError("the true cause")

    log = {"obs": np.random.default_rng(0).normal(size=(60, 2)), "action": np.zeros((60, 1)), "reward": np.ones(60),
           "terminated": np.zeros(60, bool), "truncated": np.zeros(60, bool), "log_prob": np.zeros(60)}  # fmt: skip
    with pytest.raises(ParameterError, match=r"tensors are not taken.*the true cause"):
        relive.audit(log, policy=policy)
