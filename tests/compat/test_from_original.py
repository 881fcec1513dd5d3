"""What an original of a host holds comes over: by ``from_original``, and by its pickled state. Without the hosts."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from compat import fasttd3_play
from compat.fasttd3_play import CRITIC, Play, by_start, same_row
from compat.pytorchrl_play import assert_same, parts, play
from relive.compat import agilerl, embodichain, fasttd3, pytorchrl, rsl_rl, velora
from relive.compat.base import oldest_first
from relive.compat.pytorchrl import OBS, RHS, RHS2
from relive.errors import LifecycleError
from support.agilerl_buffers import BOX, MOVES, STATES, steps
from support.pytorchrl_buffers import made as made_buffer
from support.pytorchrl_buffers import memory, stacked

pytestmark = pytest.mark.usefixtures("no_hosts")


def both_ways(kind: Any, original: Any, **options: Any) -> list[Any]:
    """An original converted, and restored from the state that a pickle of it has."""
    unpickled = kind.__new__(kind)
    unpickled.__setstate__(copy.deepcopy(vars(original)))
    converted = kind.from_original(original, **options)
    assert kind.from_original(converted) is converted
    assert type(unpickled) is type(converted) is kind
    return [converted, unpickled]


@pytest.mark.parametrize(("position", "full", "rows"), [(2, False, [0, 1]), (2, True, [2, 3, 0, 1]), (4, True, None)])
def test_rows_of_a_ring_are_put_in_the_order_of_time(position: int, full: bool, rows: Any) -> None:
    assert oldest_first(4, position, full).tolist() == (rows or [0, 1, 2, 3])


# AgileRL


AGILERLS = (
    "capacity", "observation_space", "action_space", "num_envs", "device", "gae_lambda", "gamma", "recurrent",
    "hidden_state_architecture", "use_gae", "wrap_at_capacity", "max_seq_len", "bptt_sequence_type",
)  # fmt: skip


def agilerls(one: Any, played: list[Any]) -> Any:
    """What AgileRL's buffer holds after these steps, which ``one`` gets."""
    for step in played:
        one.add(**step)
    attributes = {name: getattr(one, name) for name in (*AGILERLS, "pos", "full")}
    return SimpleNamespace(**attributes, buffer=one.buffer.clone())


@pytest.mark.parametrize(("count", "wrap"), [(0, False), (4, False), (6, False), (6, True), (9, True), (12, True)])
@pytest.mark.parametrize("recurrent", [False, True])
def test_the_steps_of_agilerls_buffer_come_over_in_their_rows_and_in_their_order(
    count: int, wrap: bool, recurrent: bool
) -> None:
    played, more = steps(count, 3, masks=2, recurrent=recurrent), steps(2, 3, 1, masks=2, recurrent=recurrent)
    options: dict[str, Any] = {"recurrent": True, "hidden_state_architecture": STATES} if recurrent else {}
    one = agilerl.RolloutBuffer(6, BOX, MOVES, 3, wrap_at_capacity=wrap, **options)
    original = agilerls(one, played)
    for other in both_ways(agilerl.RolloutBuffer, original, seed=0):
        truth = copy.deepcopy(one)
        assert (other.pos, other.full, other.size()) == (one.pos, one.full, one.size())
        for step in more if wrap or count < 5 else []:
            truth.add(**step)
            other.add(**step)
        for buffer in (truth, other):
            buffer.compute_returns_and_advantages(np.ones(3), np.zeros(3, np.bool_))
        assert_same(other.get(), truth.get())
        if recurrent and truth.size():
            for buffer in (truth, other):
                buffer.prepare_sequence_tensors()
            assert torch.equal(other.padded_data["observations"], truth.padded_data["observations"])


def test_resets_in_a_wrapped_buffer_of_agilerl_are_left_out_where_the_envs_reset_in_the_next_step() -> None:
    played = steps(9, 2)
    for t, step in enumerate(played):
        step["done"] = np.array([t == 4, False])
    one = agilerl.RolloutBuffer(6, BOX, MOVES, 2, wrap_at_capacity=True, autoreset_mode="next_step")
    original = agilerls(one, played)
    made = agilerl.RolloutBuffer.from_original(original, autoreset_mode="next_step")
    assert made.size() == one.size() == 11
    assert_same(made.get(), one.get())


# EmbodiChain


def embodichains(full: bool, further: bool) -> Any:
    shapes = {"obs": (3,), "action": (2,), "sample_log_prob": (), "value": (), "reward": ()}
    shapes |= {"critic_obs": (7,), "action_mean": (2,), "action_std": (2,)} if further else {}
    fields: dict[str, Any] = {name: torch.rand(4, 6, *shape) for name, shape in shapes.items()}
    fields |= {name: torch.rand(4, 6) < 0.3 for name in ("done", "terminated", "truncated")}
    rollout = TensorDict({**fields, "extra": torch.rand(4, 6)}, [4, 6])
    sizes = {"num_envs": 4, "rollout_len": 5, "obs_dim": 3, "action_dim": 2, "device": torch.device("cpu")}
    sizes |= {"critic_obs_dim": 7, "distribution_param_dim": 2} if further else {}  # release 0.2 has no such attributes
    return SimpleNamespace(**sizes, _rollout=rollout, _is_full=full)


@pytest.mark.parametrize("further", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_the_rollout_of_embodichains_buffer_comes_over_with_attached_fields(full: bool, further: bool) -> None:
    original = embodichains(full, further)
    for made in both_ways(embodichain.RolloutBuffer, original):
        assert made.is_full() is full
        held = vars(original)["_rollout"]  # the host's own name
        for name in held.keys():
            assert torch.equal(made.buffer[name], held[name]), name
        if full:
            assert torch.equal(made.get()["obs"], held["obs"][:, :-1].flatten(0, 1))
        rollout = made.start_rollout()
        assert rollout is made.buffer


# FastTD3


def fasttd3s(play: Play, size: int, asymmetric: bool | None, playground: bool) -> Any:
    """What FastTD3's buffer holds after a play, or holosoma's, which has no choice of what is observed."""

    def ring(values: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(play.envs, size, *values.shape[2:])
        for t in range(play.steps):
            rows[:, t % size] = values[t].float()
        return rows

    width = fasttd3_play.OBS
    names = {f"{front}observations": x[..., :width] for front, x in (("", play.critic), ("next_", play.next_critic))}
    names |= {"actions": play.action, "rewards": play.reward}
    if asymmetric is not False:
        name, front = ("privileged_observations", width) if playground else ("critic_observations", 0)
        names |= {name: play.critic[..., front:], f"next_{name}": play.next_critic[..., front:]}
    flags = {"dones": ring(play.dones).long(), "truncations": ring(play.truncations).long()}
    modes = {} if asymmetric is None else {"asymmetric_obs": asymmetric, "playground_mode": playground}
    return SimpleNamespace(
        n_env=play.envs, buffer_size=size, n_obs=width, n_act=2, n_critic_obs=CRITIC, n_steps=3, gamma=0.5, device=None,
        ptr=play.steps, **{name: ring(x[: play.steps]) for name, x in names.items()}, **flags, **modes,
    )  # fmt: skip


@pytest.mark.parametrize(("asymmetric", "playground"), [(False, False), (True, False), (True, True), (None, False)])
@pytest.mark.parametrize("count", [0, 5, 12, 31])
def test_the_steps_of_fasttd3s_buffer_come_over_in_the_order_of_time(
    count: int, asymmetric: bool | None, playground: bool
) -> None:
    play, size = Play(2, 34, reset=0.1), 12
    play.steps = count
    original = fasttd3s(play, size, asymmetric, playground)
    for made in both_ways(fasttd3.SimpleReplayBuffer, original, seed=0):
        assert (made.ptr, made.n_steps, made.gamma) == (count, 3, 0.5)
        assert (made.asymmetric_obs, made.playground_mode) == (asymmetric is not False, playground)
        first = max(count - size, 0)
        for t in range(count, 34):  # and it goes on with the step after
            made.extend(play.step(t))
        play.steps = 34
        found = by_start(made.sample(200))
        assert set(found) == {start for start in play.starts(size) if start[1] >= first}
        assert all(same_row(row, play.row(env, t, 3, 0.5)) for (env, t), row in found.items())
        play.steps = count


# rsl_rl


@pytest.mark.parametrize("kind", ["rl", "distillation"])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_the_transitions_of_rsl_rls_storage_come_over(kind: str, count: int) -> None:
    t, n, names = 5, 4, ["rewards", "values", "actions_log_prob", "returns", "advantages"]
    tensors: dict[str, Any] = {name: torch.rand(t, n, 1) for name in (names if kind == "rl" else names[:1])}
    tensors |= {"dones": torch.randint(0, 2, (t, n, 1), dtype=torch.uint8), "actions": torch.rand(t, n, 2)}
    obs = TensorDict({"policy": torch.rand(t, n, 3), "image": torch.ones(t, n, 2, dtype=torch.uint8)}, [t, n])
    if kind == "rl":
        tensors["distribution_params"] = (torch.rand(t, n, 2), torch.rand(t, n, 2)) if count else None
        tensors["saved_hidden_state_a"] = [torch.rand(t, 2, n, 4), torch.rand(t, 2, n, 4)] if count else None
        tensors["saved_hidden_state_c"] = None
    else:
        tensors["privileged_actions"] = torch.rand(t, n, 2)
    original = SimpleNamespace(
        training_type=kind, num_envs=n, num_transitions_per_env=t, actions_shape=[2], device="cpu",
        observations=obs, step=count, **tensors,
    )  # fmt: skip
    for made in both_ways(rsl_rl.RolloutStorage, original, seed=0):
        assert (made.step, made.training_type) == (count, kind)
        for name, value in tensors.items():
            found = getattr(made, name)
            if value is None or isinstance(value, torch.Tensor):
                assert found is value or (found.dtype is value.dtype and torch.equal(found[:count], value[:count])), (
                    name
                )
            else:
                assert all(torch.equal(a, b) for a, b in zip(found, value, strict=True)), name
        assert torch.equal(made.observations["image"][:count], obs["image"][:count])
        if kind == "rl" and count:
            (batch,) = made.mini_batch_generator(1, 1)
            assert sorted(batch.returns.flatten().tolist()) == sorted(tensors["returns"][:count].flatten().tolist())


# Velora


@pytest.mark.parametrize("count", [0, 4, 7, 17])
def test_the_rows_of_veloras_buffer_come_over_in_their_places(count: int) -> None:
    sizes = {"states": 3, "actions": 2, "rewards": 1, "next_states": 3, "dones": 1, "hiddens": 4}
    tensors = {name: torch.rand(7, size) for name, size in sizes.items()}
    for x in tensors.values():
        x[min(count, 7) :] = 0
    original = SimpleNamespace(
        capacity=7,
        state_dim=3,
        action_dim=2,
        hidden_dim=4,
        device=None,
        size=min(count, 7),
        position=count % 7,
        **tensors,
    )
    for made in both_ways(velora.ReplayBuffer, original, seed=0):
        assert (made.size, made.position, made.device) == (original.size, original.position, None)
        for name, x in tensors.items():
            assert torch.equal(getattr(made, name), x), name


# PyTorchRL


def pytorchrls(played: list[Any], size: int, **more: Any) -> Any:
    """What PyTorchRL's buffer holds after these steps of a feed-forward actor, as plain arrays."""
    device, actor, algorithm, _ = parts()
    data = memory(played, size) | {key: {"rhs_act": np.zeros((1, 2, 5), np.float32)} for key in (RHS, RHS2)}
    return SimpleNamespace(
        device=device, actor=actor, algo=algorithm, recurrent_actor=False, max_size=size, data=data,
        size=min(len(played), size), step=len(played) % size, **more,
    )  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("count", [5, 8, 21])
def test_the_steps_of_pytorchrls_buffer_come_over_in_the_order_of_time(count: int, nested: bool) -> None:
    played = play(count, 2, nested=nested)
    for buffer in both_ways(pytorchrl.ReplayBuffer, pytorchrls(played, 8), seed=0):
        data = dict(buffer.get_all_buffer_data())
        for key in (RHS, RHS2):
            data.pop(key)
        assert_same(data, {key: stacked(played[-8:], key) for key in data})
        assert (buffer.size, buffer.max_size) == (min(count, 8), 8)
        (batch,) = buffer.generate_batches(1, 4)
        assert batch[RHS]["rhs_act"].shape == (1, 5)


def test_priorities_of_pytorchrls_buffer_come_over() -> None:
    played, size = play(11, 2), 8
    priority = np.full((size, 2, 1), 0.1)
    priority[3, 1] = 1000.0  # of step 3, the oldest one
    original = pytorchrls(played, size, n_step=1, epsilon=0.01, alpha=0.5, beta=0.4, error=9.0)
    original.data["priority"] = priority
    for buffer in both_ways(pytorchrl.PERBuffer, original, seed=0):
        assert (buffer.alpha, buffer.beta, buffer.epsilon, buffer.error) == (0.5, 0.4, 0.01, 9.0)
        (batch,) = buffer.generate_batches(1, 1000)
        assert (batch[OBS] == played[3][OBS][1]).all(1).float().mean() > 0.98


@pytest.mark.parametrize(("rows", "first"), [(5, 0), (8, 0), (10, 4), (12, 4)])
def test_whole_sequences_of_pytorchrls_buffer_come_over(rows: int, first: int) -> None:
    """Of a ring of two sequences of four steps. Of one that is being replaced nothing is left."""
    played = play(rows, 2)
    device, actor, algorithm, _ = parts(True)
    keys = [key for key in pytorchrl.OffPolicyDataKeys if key in played[0]]
    data = {key: stacked(played[:8], key) for key in keys}
    for t, step in enumerate(played[8:]):
        for key in keys:
            one = data[key] if not isinstance(data[key], dict) else data[key]["rhs_act"]
            one[t] = step[key] if not isinstance(step[key], dict) else step[key]["rhs_act"]
    original = SimpleNamespace(
        device=device, actor=actor, algo=algorithm, recurrent_actor=True, max_size=8, size=min(rows, 8), step=rows % 8,
        data=data,
    )  # fmt: skip
    (buffer, _) = both_ways(pytorchrl.ReplayBuffer, original, seed=0)
    last = rows // 4 * 4
    assert buffer.max_size == 8
    assert_same(buffer.get_all_buffer_data()[OBS], stacked(played[first:last], OBS))
    assert_same(buffer.get_all_buffer_data()[RHS]["rhs_act"][::4], stacked(played[first:last:4], RHS)["rhs_act"])


def test_sums_of_several_rewards_do_not_become_steps() -> None:
    with pytest.raises(LifecycleError, match="n_step=3"):
        pytorchrl.NStepReplayBuffer.from_original(pytorchrls(play(5, 2), 8, n_step=3))
    one = made_buffer("nstep", 8, 1)
    assert pytorchrl.NStepReplayBuffer.from_original(one, n_step=2) is one


def test_a_subclass_may_call_its_arguments_otherwise_and_an_original_may_have_further_attributes() -> None:
    class Sub(agilerl.RolloutBuffer):
        def __init__(self, length: int, seen: Any, done: Any, **options: Any) -> None:
            super().__init__(length, seen, done, **options)

    original = agilerls(agilerl.RolloutBuffer(6, BOX, MOVES, 2), [])
    original.sampler, original.seed, original.view, original.kwargs, original.args = "a", "b", "c", {"d": 1}, (1,)
    assert Sub.from_original(original, seed=3).capacity == 6


@pytest.mark.parametrize("name", ["gamma", "capacity"])
def test_an_original_without_an_argument_is_refused_by_its_name(name: str) -> None:
    original = agilerls(agilerl.RolloutBuffer(6, BOX, MOVES, 2), [])
    delattr(original, name)
    with pytest.raises(AttributeError, match=name):
        agilerl.RolloutBuffer.from_original(original)
