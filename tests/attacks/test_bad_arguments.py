"""Arguments of a wrong kind: the error is one of relive's own and names the argument; nothing is taken silently."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import relive
from relive.errors import DTypeError, EnvError, FieldError, ParameterError, SchemaError, ShapeError
from relive.exchange import to_lerobot, to_minari
from relive.exchange.convert import convert
from relive.returns import gae, group_advantage, lambda_returns, monte_carlo, normalize, vtrace
from relive.steps.arrays import as_host

SCHEMA = relive.Schema.from_example({"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False, "truncated": False})

ENVS = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")

NOTHING = torch.zeros(3, 2, dtype=torch.bool)

GRID: dict[str, Any] = {"reward": torch.ones(3, 2), "terminated": NOTHING, "truncated": NOTHING}

VALUED = GRID | {"value": torch.ones(4, 2)}

ODD: dict[str, Any] = {
    "array": np.zeros((2, 3)),
    "empty array": np.zeros(0),
    "tensor": torch.zeros(3),
    "sparse": torch.eye(2).to_sparse(),
    "records": np.zeros(2, [("a", "f4")]),
    "text": "text",
    "object": object(),
    "NaN": float("nan"),
    "list": [[1], [1, 2]],
}
"""Values that no argument below may have."""


def filled(**options: Any) -> relive.ReplayBuffer:
    """A replay of one env with six transitions."""
    replay = relive.ReplayBuffer(SCHEMA, 16, seed=0, check_ends=False, **options)
    for i in range(7):
        replay.add(obs=float(i), action=i, reward=1.0, terminated=False, truncated=False)
    return replay


def rating(**given: Any) -> int:
    """Rate a batch of two."""
    replay = filled(sampler=relive.Prioritized())
    return replay.update_priorities(**({"index": replay.sample(2)["index"], "td_error": torch.ones(2)} | given))


def rollout(*, full: bool = False, reserved: bool = False) -> relive.RolloutBuffer:
    """A rollout of four steps of two envs: empty, full, or with rows that are reserved."""
    found = relive.RolloutBuffer(relive.Schema({name: SCHEMA[name] for name in SCHEMA.names} | {"value": ()}), 4, 2)
    for _ in range(4 if full else 0):
        zeros = {name: np.zeros(2) for name in ("obs", "reward", "value")}
        flags = {name: np.zeros(2, bool) for name in ("terminated", "truncated")}
        found.add(zeros, action=np.zeros(2, int), **flags)
    if reserved:
        found.reserve(2)
    return found


def collector(**given: Any) -> relive.Collector:
    """A collector of two envs, without a buffer."""
    options: dict[str, Any] = {"envs": ENVS, "policy": lambda obs: torch.zeros(2, dtype=torch.int64)} | given
    return relive.Collector(**options)


CALLS: dict[str, Callable[[Any], Any]] = {
    "GAE(normalize": lambda v: relive.GAE(normalize=v),
    "TDLambda(normalize": lambda v: relive.TDLambda(normalize=v),
    "MonteCarlo(critic": lambda v: relive.MonteCarlo(critic=v),
    "VTrace(rho_clip": lambda v: relive.VTrace(rho_clip=v),
    "GroupAdvantage(until_first_done": lambda v: relive.GroupAdvantage(2, until_first_done=v),
    "GroupAdvantage(eps": lambda v: relive.GroupAdvantage(2, eps=v),
    "ValueHeads(": relive.ValueHeads,
    "Prioritized(normalize": lambda v: relive.Prioritized(normalize=v),
    "inner": lambda v: relive.Recent(inner=v),
    "NStep(each_reward": lambda v: relive.NStep(each_reward=v),
    "FrameStack(pad": lambda v: relive.FrameStack(pad=v),
    "Hindsight(strategy": lambda v: relive.Hindsight(lambda a, b: a, v),
    "ReplayBuffer(ordered": lambda v: relive.ReplayBuffer(SCHEMA, 16, ordered=v),
    "ReplayBuffer(own_next_obs": lambda v: relive.ReplayBuffer(SCHEMA, 16, own_next_obs=v),
    "ReplayBuffer(check_ends": lambda v: relive.ReplayBuffer(SCHEMA, 16, check_ends=v),
    "ReplayBuffer(debug": lambda v: setattr(filled(), "debug", v),
    "sampler": lambda v: relive.ReplayBuffer(SCHEMA, 16, sampler=v),
    "view": lambda v: relive.ReplayBuffer(SCHEMA, 16, view=v),
    "device": lambda v: relive.ReplayBuffer(SCHEMA, 16, device=v),
    "num_envs": lambda v: relive.ReplayBuffer(SCHEMA, 16, v),
    "clear(rewind": lambda v: filled().clear(rewind=v),
    "envs": lambda v: filled().interrupt(v),
    "RolloutBuffer(wrap": lambda v: relive.RolloutBuffer(SCHEMA, 4, 2, wrap=v),
    "RolloutBuffer(debug": lambda v: relive.RolloutBuffer(SCHEMA, 4, 2, debug=v),
    "plan(ordered": lambda v: relive.ReplayBuffer.plan(SCHEMA, 16, ordered=v),
    "gae(gamma": lambda v: gae(**VALUED, gamma=v),
    "gae(lam": lambda v: gae(**VALUED, lam=v),
    "monte_carlo(gamma": lambda v: monte_carlo(**GRID, gamma=v),
    "vtrace(c_clip": lambda v: vtrace(torch.ones(3, 2), **VALUED, c_clip=v),
    "group_advantage(eps": lambda v: group_advantage(**GRID, group_size=2, eps=v),
    "group_size": lambda v: group_advantage(**GRID, group_size=v),
    "normalize(eps": lambda v: normalize(torch.ones(3), eps=v),
    "reward": lambda v: gae(**(VALUED | {"reward": v})),
    "value": lambda v: gae(**(VALUED | {"value": v})),
    "final_value": lambda v: gae(**VALUED, final_value=v),
    "from_example(num_envs": lambda v: relive.Schema.from_example({"obs": np.zeros(2)}, v),
    "Schema": relive.Schema,
    "from_env": relive.Schema.from_env,
    "SchemaChanges(rename": lambda v: relive.SchemaChanges(rename=v),
    "applied(schema": lambda v: relive.SchemaChanges().applied(v),
    "RolloutBuffer(schema": lambda v: relive.RolloutBuffer(v, 4, 2),
    "RolloutBuffer(columns": lambda v: relive.RolloutBuffer(SCHEMA, 4, 2, columns=v),
    "reserve(steps": lambda v: rollout().reserve(v),
    "commit(steps": lambda v: rollout(reserved=True).commit(v),
    "commit(last": lambda v: rollout(reserved=True).commit(last=v),
    "finish(partial": lambda v: rollout().finish(relive.MonteCarlo(critic=False), partial=v),
    "minibatches(normalize_advantage": lambda v: rollout(full=True).minibatches(4, normalize_advantage=v),
    "sequences(drop_tail": lambda v: rollout(full=True).sequences(2, drop_tail=v, batch_size=2),
    "name": lambda v: rollout()[v] if not isinstance(v, str) else rollout()[("name", 1)],
    "set_final_value": lambda v: rollout(full=True).set_final_value(v, [0], [1.0]),
    "save(background": lambda v: filled().save("nowhere", background=v),
    "path": lambda v: filled().save(v if not isinstance(v, str) else 1),
    "open(verify": lambda v: relive.ReplayBuffer.open("nowhere", SCHEMA, 16, verify=v),
    "slice(stop": lambda v: filled().slice(0, 0, v),
    "largest_error": lambda v: setattr(relive.Prioritized(), "largest_error", v),
    "episode_return": lambda v: relive.Recent().observe(v),
    "policy": lambda v: collector(policy=v),
    "value_fn": lambda v: collector(value_fn=v),
    "from_info": lambda v: collector(from_info=v),
    "from_step_info": lambda v: collector(from_step_info=v),
    "autoreset_mode": lambda v: collector(autoreset_mode=v),
    "env": lambda v: collector(envs=v),
    "warm(buffer": lambda v: collector().warm(v, 4),
    "warm(seed": lambda v: collector().warm(relive.ReplayBuffer(relive.Schema.from_env(ENVS), 64, 2), 2, seed=v),
    "reset(seed": lambda v: collector().reset(v),
    "reset(options": lambda v: collector().reset(options=v),
    "progress": lambda v: collector().steps(1, progress=v),
    "schema": lambda v: collector(schema=v),
    "to(device": lambda v: filled(view=relive.Sequence(2)).sample(2).to(v),
    "convert(source": lambda v: convert(v if not isinstance(v, str) else 1, "nowhere"),
    "convert(source_format": lambda v: convert("nowhere", "there", source_format=v if not isinstance(v, str) else 1),
    "to_minari(dataset_id": lambda v: to_minari(filled(), v),
    "to_minari(spaces": lambda v: to_minari(filled(), "a/b-v0", spaces=v),
    "to_minari(drop_incomplete": lambda v: to_minari(filled(), "a/b-v0", drop_incomplete=v),
    "to_lerobot(drop_incomplete": lambda v: to_lerobot(filled(), "nowhere", drop_incomplete=v),
    "convert(drop_incomplete": lambda v: convert("nowhere", "there", drop_incomplete=v),
    "each_reward": lambda v: filled(view=relive.NStep(2, each_reward=lambda reward: v)).sample(2),
    "td_error": lambda v: rating(td_error=v),
    "index": lambda v: rating(index=v),
}
"""What an error's message has to say -> a call with a wrong value of that argument."""


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_a_wrong_kind_is_refused_by_the_name_of_the_argument(name: str):
    for kind, value in ODD.items():
        if name in ("index", "td_error", "envs") and kind == "empty array":
            continue  # a batch or a selection of no row
        with pytest.raises(relive.ReliveError, match=f"{re.escape(name)}|update_priorities|field .steps.") as caught:
            CALLS[name](value)
        assert len(str(caught.value)) < 600, kind


@pytest.mark.parametrize("nothing", [0, "", [], {}])
def test_what_is_false_is_not_taken_for_the_default_part(nothing: Any):
    for part in ("sampler", "view"):
        with pytest.raises(ParameterError, match=part):
            relive.ReplayBuffer(SCHEMA, 16, **{part: nothing})
    with pytest.raises(ParameterError, match="inner"):
        relive.Recent(inner=nothing)


class Counting:
    """A sampler of a user that has a length, which is 0 at first."""

    def __init__(self) -> None:
        self.inner, self.drawn = relive.Uniform(), 0

    def __len__(self) -> int:
        return self.drawn

    def attach(self, ring: Any) -> None:
        self.inner.attach(ring)

    def draw(self, count: int, key: int, update: int, of: int) -> Any:
        self.drawn += count
        return self.inner.draw(count, key, update, of)


def test_a_sampler_with_the_length_zero_draws():
    sampler = Counting()
    filled(sampler=sampler).sample(4)
    assert sampler.drawn == 4


def test_complex_errors_are_refused_and_narrow_floats_taken():
    with pytest.raises(DTypeError, match="td_error"):
        rating(td_error=torch.ones(2, dtype=torch.complex64))
    assert rating(td_error=torch.ones(2, dtype=torch.bfloat16)) == 0


def test_arrays_that_numpy_cannot_have_are_refused_by_name():
    wide = as_host(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert wide.dtype == np.float32
    assert wide.tolist() == [1.5, -2.0]
    with pytest.raises(ShapeError, match=r"an index: .* with rows of different lengths"):
        as_host([[1], [1, 2]], "an index")
    for value in (torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(DTypeError, match="an index"):
            as_host(value, "an index")


def test_names_that_are_not_text_are_shown_in_the_error():
    with pytest.raises(relive.ReliveError, match="1"):
        filled().add({1: 2})
    with pytest.raises(SchemaError, match="1"):
        relive.Schema.from_example({1: 2})  # pyright: ignore[reportArgumentType]
    with pytest.raises(SchemaError, match="mapping"):
        relive.Schema.from_example(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(EnvError, match="got None"):
        relive.Schema.from_env(None)


def test_a_device_that_is_not_there_is_refused_with_torchs_reason():
    for device in ("nonsense", "cuda:99", True, 1.5):
        with pytest.raises(ParameterError, match="device"):
            relive.RolloutBuffer(SCHEMA, 4, 2, device=device)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["reward", "value", "terminated", "truncated"])
def test_a_column_that_is_none_is_refused_and_never_read(name: str):
    for call in (gae, lambda_returns, lambda **columns: vtrace(torch.ones(3, 2), **columns)):
        with pytest.raises(DTypeError, match=f"'{name}'"):  # compiled code would read address 0
            call(**(VALUED | {name: None}))


@pytest.mark.parametrize("value", [None, 1, "text", {1: 2}, torch.zeros(2, device="meta"), [[1], [1, 2]]])
def test_flat_arrays_of_a_wrong_kind_are_refused_by_name(value: Any):
    flat: dict[str, Any] = {name: np.zeros(4) for name in ("obs", "action", "reward", "terminated", "truncated")}
    for name in flat:
        with pytest.raises(relive.ReliveError, match=name):
            relive.ReplayBuffer.from_arrays(flat | {name: value})
    if value is not None:
        with pytest.raises(ParameterError, match="schema"):
            relive.ReplayBuffer.from_arrays(flat, value)


def test_a_huge_whole_number_is_taken_as_the_float_that_it_is():
    assert normalize(torch.tensor([0.0, 1.0]), eps=2**70).abs().max() < 1e-20
    assert group_advantage(**GRID, group_size=2, eps=2**70)[0].abs().max() < 1e-20


def test_rows_after_a_window_change_no_reward_of_it():
    """Rows that were never written hold 0, whose logarithm is infinite."""
    replay = filled(view=relive.NStep(5, gamma=1.0, each_reward=np.log))
    with np.errstate(divide="ignore"):
        assert replay.sample(64)["reward"].tolist() == [0.0] * 64


@pytest.mark.parametrize("name", [None, 1, 1.5, [], {}, {"a": 1}, np.zeros(2), object()])
def test_a_name_that_is_no_text_is_refused_by_a_batch_of_sequences(name: Any):
    batch: Any = filled(view=relive.Sequence(3)).sample(2)
    unhashable = isinstance(name, list | dict | np.ndarray)  # which no dict looks up
    with pytest.raises(TypeError if unhashable else FieldError, match="unhashable" if unhashable else "name is text"):
        _ = batch[name]
    if not unhashable:
        assert batch.get(name, 5) == 5
    for call in (batch.flat, batch.pad, batch.bootstrap):
        with pytest.raises(relive.ReliveError, match=r"torch\.Tensor"):
            call(name if name is not None else "obs")
