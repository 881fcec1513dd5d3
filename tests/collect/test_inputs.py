"""What comes with an observation: the step before, action masks, starts, hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

import relive
from relive import Collector, Field, RolloutBuffer, Schema, errors
from relive.collect.inputs import Inputs
from support import oracle, tagged_envs
from support.tagged_collections import (
    MASK,
    before,
    cartpoles,
    chosen,
    counting,
    ends,
    every_mode,
    gather,
    make_buffer,
    paid,
    policy,
    truth,
)

# The action and the reward before


NESTED = gym.spaces.Dict({"move": gym.spaces.Discrete(5), "aim": gym.spaces.Box(-1, 1, (2,), np.float32)})


class Recalling(gym.Env[Any, Any]):
    """Observes (env, episode, step); what it was told last, and paid for it, comes with every observation's info."""

    observation_space = gym.spaces.Box(0, 1e4, (3,), np.float32)
    action_space = NESTED

    def __init__(self, number: int, endings: tagged_envs.Endings) -> None:
        self.number, self.endings, self.episode, self.count = number, endings, -1, 0

    def _obs(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.count], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.count = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        length, kind = self.endings(self.number, self.episode)
        reward = paid(self._obs())
        self.count += 1
        over = self.count == length
        return self._obs(), reward, over and kind != "truncated", over and kind != "terminated", {}


def remembering(obs: Tensor, last_action: Any, last_reward: Tensor) -> dict[str, Any]:
    action, reward = before(obs)
    assert all(torch.equal(last_action[name], action[name]) for name in ("move", "aim"))
    assert torch.equal(last_reward, reward)
    return {"action": chosen(obs), "value": obs.sum(1)}


@every_mode
def test_the_action_and_the_reward_before_come_with_every_observation_that_is_acted_on_or_valued(
    mode: AutoresetMode,
) -> None:
    schedule = tagged_envs.cycle([(3, "truncated"), (1, "truncated")], [(2, "terminated"), (4, "truncated")])
    envs = SyncVectorEnv([partial(Recalling, n, schedule) for n in range(2)], autoreset_mode=mode)
    schema = Schema.from_env(envs, value=())
    schema = schema.extend(last_action=schema["action"], last_reward=schema["reward"])
    rollout, valued = RolloutBuffer(schema, 9, 2), []

    def value_fn(obs: Tensor, last_action: Any, last_reward: Tensor) -> Tensor:
        valued.append(len(obs))
        return remembering(obs, last_action, last_reward)["value"]

    collector = Collector(envs, remembering, rollout, value_fn=value_fn, seed=0)
    for _ in range(3):
        collector.collect()
        rows = rollout.flat()
        action, reward = before(rows["obs"])
        assert torch.equal(rows["last_reward"], reward)
        assert all(torch.equal(rows["last_action", name], action[name]) for name in ("move", "aim"))
    assert max(valued) > 2
    collector.reset()
    collector.collect()
    replay = relive.ReplayBuffer(schema.extend(value=()), 200, 2, seed=0)
    Collector(envs, remembering, replay, seed=0).collect(20)
    batch = replay.data()
    assert torch.equal(batch["last_reward"], before(batch["obs"])[1])


def test_fields_of_those_names_are_as_the_action_and_the_reward_are_or_from_the_info() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    with pytest.raises(errors.DTypeError, match=r"'last_action'.*declare it as Field\(\(\), torch.int64\)"):
        Collector(envs, policy, make_buffer(envs, 4, last_action=(3,)))
    with pytest.raises(errors.DTypeError, match=r"'last_reward'.*rename your own"):
        Collector(envs, policy, make_buffer(envs, 4, last_reward=Field((), torch.float64)))
    Collector(envs, policy, make_buffer(envs, 4, last_reward=(2,)), from_info=("last_reward",))


# Action masks, and what else comes with an observation


@every_mode
def test_action_masks_reach_the_policy_and_the_buffer_with_the_observation_they_belong_to(mode: AutoresetMode) -> None:
    schedule = tagged_envs.drawn(3, longest=4)
    envs = tagged_envs.make_tagged(3, mode, schedule, action_mask=True)
    buffer = make_buffer(envs, 25, action_mask=MASK)
    rows, _ = gather(Collector(envs, policy, buffer, seed=0), [25])
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=0, action_mask=True)
    real = buffer["mask"]
    assert buffer["action_mask"].dtype is torch.int8
    expected = torch.as_tensor(tagged_envs.mask_of(tagged_envs.decode(buffer["obs"])))
    assert torch.equal(buffer["action_mask"][real], expected[real])
    assert buffer["action_mask"].gather(2, buffer["action"].unsqueeze(2))[real].all()


@every_mode
def test_the_value_of_a_final_observation_is_asked_for_with_the_mask_that_came_with_it(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(2, "truncated")], [(3, "truncated")]), action_mask=True)
    buffer = make_buffer(envs, 8, action_mask=MASK)

    def strict(obs: Tensor, action_mask: Tensor) -> dict[str, Tensor]:
        expected = torch.as_tensor(tagged_envs.mask_of(tagged_envs.decode(obs)))
        assert torch.equal(action_mask, expected)
        return policy(obs, action_mask)

    rows, _ = gather(Collector(envs, strict, buffer, seed=0), [8, 3])
    assert [len(mine) for mine in rows] != [0, 0]


class Privileged(tagged_envs.TaggedEnv):
    """Tells the critic more than it shows."""

    def _info(self) -> dict[str, Any]:
        return {"privileged": np.array([self.tag.episode, self.tag.step + 0.5], np.float32), "label": "of no use"}


@every_mode
def test_other_fields_of_info_are_stored_with_their_observation_and_value_the_final_one(mode: AutoresetMode) -> None:
    makers = [partial(Privileged, n, tagged_envs.cycle([(2, "truncated")], [(3, "truncated")])) for n in range(2)]
    envs = SyncVectorEnv(makers, autoreset_mode=mode)
    buffer = make_buffer(envs, 10, privileged=(2,))

    def critic(obs: Tensor, privileged: Tensor) -> dict[str, Any]:
        return {"action": tagged_envs.tagged_policy(obs), "value": privileged[:, 0] * 100 + privileged[:, 1]}

    Collector(envs, critic, buffer, from_info=("privileged",)).collect()
    tag = tagged_envs.decode(buffer["obs"])
    code = tag.episode * 100 + tag.step + 0.5
    real, cut = buffer["mask"].numpy(), buffer["truncated"].numpy()
    assert np.array_equal(buffer["value"][real], code[real])
    assert np.array_equal(buffer["final_value"][cut], code[cut] + 1)
    assert cut.sum() >= 5


@pytest.mark.parametrize(
    ("field", "error", "says"),
    [
        (Field((2,), torch.int64), errors.DTypeError, r"'privileged': expected torch\.int64, got torch\.float32"),
        (Field((3,)), errors.ShapeError, r"'privileged': expected \(2, 3\) in info\['privileged'\], got \(2, 2\)"),
    ],
)
def test_a_field_of_info_that_does_not_fit_is_refused(field: Field, error: type[Exception], says: str) -> None:
    envs = SyncVectorEnv([partial(Privileged, n, tagged_envs.always(3)) for n in range(2)])
    buffer = make_buffer(envs, 4, privileged=field)
    with pytest.raises(error, match=says):
        Collector(envs, lambda obs, privileged: policy(obs), buffer, from_info=("privileged",)).collect()


class Reserved(tagged_envs.TaggedEnv):
    """The first env says nothing of its final observations."""

    def _info(self) -> dict[str, Any]:
        over = self.tag.step == 2
        return {} if over and not self.tag.env else {"privileged": np.float32(10 * self.tag.env + self.tag.step)}


@every_mode
def test_what_one_env_does_not_say_of_its_final_observation_is_unknown_for_that_env_alone(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv(
        [partial(Reserved, n, tagged_envs.always(2, "truncated")) for n in range(2)], autoreset_mode=mode
    )
    buffer, seen = make_buffer(envs, 2, privileged=()), list[Any]()

    def value_fn(obs: Tensor, privileged: Tensor) -> Tensor:
        seen.append(privileged[2:].tolist())  # behind the current observations
        return tagged_envs.tagged_value(obs)

    play = lambda obs, privileged: policy(obs)  # noqa: E731
    Collector(envs, play, buffer, value_fn=value_fn, from_info=("privileged",)).collect()
    assert seen == [[0, 12]]


@every_mode
def test_an_action_mask_that_the_env_does_not_report_is_an_error_that_names_the_env(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.always(2))
    with pytest.raises(errors.EnvError, match=r"'action_mask'.* missing for env 0"):
        Collector(envs, policy, make_buffer(envs, 4, action_mask=MASK)).collect()
    makers = [partial(tagged_envs.TaggedEnv, n, tagged_envs.always(2), action_mask=n == 0) for n in range(2)]
    envs = SyncVectorEnv(makers, autoreset_mode=mode)
    with pytest.raises(errors.EnvError, match=r"'action_mask'.* missing for env 1"):
        Collector(envs, policy, make_buffer(envs, 4, action_mask=MASK)).collect()


# Where an episode starts


START = Field((), torch.bool)


def knowing(obs: Any, is_start: Tensor) -> dict[str, Any]:
    """A policy that checks what it is told: an observation says by itself whether it is the first of its episode."""
    assert is_start.dtype is torch.bool
    assert is_start.tolist() == (tagged_envs.decode(obs).step == 0).tolist()
    return policy(obs)


@every_mode
def test_the_policy_and_the_buffer_are_told_where_episodes_start_in_every_mode(mode: AutoresetMode) -> None:
    schedule = tagged_envs.drawn(5, longest=4)
    envs = tagged_envs.make_tagged(3, mode, schedule)
    buffer = make_buffer(envs, 25, is_start=START)
    asked: list[int] = []

    def value_fn(obs: Any, is_start: Tensor) -> Tensor:
        asked.append(len(obs))
        return knowing(obs, is_start)["value"]

    collector = Collector(envs, knowing, buffer, value_fn=value_fn, seed=0)
    for length in (25, 1, 2, 25):
        buffer.clear()
        collector.collect(length)
        real = buffer["mask"].numpy()
        assert np.array_equal(buffer["is_start"].numpy()[real], (tagged_envs.decode(buffer["obs"]).step == 0)[real])
    assert len(asked) == 4
    assert max(asked) > 3  # final observations were valued, too, and none of them is a start
    rows, _ = gather(collector, [10])
    assert [len(mine) for mine in rows] != [0, 0, 0]


@every_mode
def test_every_episode_starts_anew_after_a_reset_and_after_a_collection_that_failed(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(3, "truncated")], [(5, "terminated")]))
    buffer = make_buffer(envs, 40, is_start=START)
    calls = itertools.count()

    def failing(obs: Any, is_start: Tensor) -> dict[str, Any]:
        answer = knowing(obs, is_start)
        if next(calls) == 6:
            raise RuntimeError("out of order")
        return answer

    collector = Collector(envs, failing, buffer, value_fn=lambda *args, **inputs: knowing(*args, **inputs)["value"])
    collector.collect(4)
    collector.reset()
    collector.collect(1)
    assert buffer["is_start"][-1].tolist() == [True, True]
    with pytest.raises(RuntimeError, match="out of order"):
        collector.collect(5)
    collector.collect(12)
    assert buffer["is_start"][0].tolist() == [True, True]
    assert int(buffer["is_start"].sum()) > 4


@every_mode
def test_a_replay_holds_the_starts_and_what_warms_up_and_plays_at_random_is_told_them_as_well(
    mode: AutoresetMode,
) -> None:
    def make() -> Any:
        return tagged_envs.make_tagged(2, mode, tagged_envs.drawn(7, longest=3))

    replay = relive.ReplayBuffer(Schema.from_env(make(), is_start=START), 400, 2, seed=0)
    collector = Collector(make, knowing, replay, seed=0)
    collector.collect(20)
    collector.warm(replay, 10, policy=knowing, seed=1)
    batch = replay.data()
    assert batch["is_start"].dtype is torch.bool
    assert batch["is_start"].tolist() == (tagged_envs.decode(batch["obs"]).step == 0).tolist()
    assert 0 < int(batch["is_start"].sum()) < len(batch)
    poles = relive.ReplayBuffer(Schema.from_env(cartpoles(mode), is_start=START), 4_000, 2, seed=0)
    Collector(partial(cartpoles, mode), lambda obs: None, poles).warm(poles, 100, seed=0)
    rows = poles.slice(0)
    after_a_boundary = torch.cat([torch.tensor([True]), ~rows["complete"][:-1]])
    assert torch.equal(rows["is_start"][rows["complete"]], after_a_boundary[rows["complete"]])
    assert int(after_a_boundary.sum()) > 2


def test_a_field_of_that_name_that_the_env_reports_or_of_another_dtype_is_not_the_collectors() -> None:
    class Reporting(tagged_envs.TaggedEnv):
        def _info(self) -> dict[str, Any]:
            return {"is_start": np.float32(7)}

    envs = SyncVectorEnv([partial(Reporting, 0, tagged_envs.always(3))])
    buffer = make_buffer(envs, 6, is_start=())
    seen: list[float] = []

    def listening(obs: Any, is_start: Tensor) -> dict[str, Any]:
        seen.extend(is_start.tolist())
        return policy(obs)

    Collector(envs, listening, buffer, from_info=("is_start",)).collect()
    assert set(seen) <= {0.0, 7.0}
    assert 7.0 in seen
    for wrong in (Field((), torch.float32), Field((1,), torch.bool), {"a": START}):
        with pytest.raises(errors.DTypeError, match=r"'is_start'.*declare it as Field\(\(\), torch.bool\)"):
            Collector(envs, policy, make_buffer(envs, 6, is_start=wrong))


# Hidden states


class Recurrent(nn.Module):
    """An actor and critic over an LSTM, a GRU or a cell; its actions are those that tagged envs want."""

    def __init__(self, kind: str, layers: int = 2, size: int = 5) -> None:
        super().__init__()
        self.kind = kind
        weights = torch.Generator().manual_seed(0)
        cell = kind == "cell"
        self.core = nn.GRUCell(4, size) if cell else getattr(nn, kind)(4, size, layers)
        self.head = nn.Linear(size, 1)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=weights) * 0.4
        state = Field((size,) if cell else (layers, size))
        self.spec = {"h": state, "c": state} if kind == "LSTM" else state
        self.calls: list[Any] = []

    def unroll(self, obs: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        """Values ``[T, N]`` and the state after the last step."""
        x = obs / 8
        if self.kind == "cell":
            states = [hidden := self.core(row, hidden) for row in x]
            return self.head(torch.stack(states)).squeeze(-1), hidden
        out, hidden = self.core(x, (hidden["h"], hidden["c"]) if self.kind == "LSTM" else hidden)
        hidden = dict(zip("hc", hidden, strict=True)) if self.kind == "LSTM" else hidden
        return self.head(out).squeeze(-1), hidden

    def forward(self, obs: Tensor, hidden: Any) -> dict[str, Any]:
        value, after = self.unroll(obs.unsqueeze(0), hidden)
        return {"action": tagged_envs.tagged_policy(obs), "value": value[0], "hidden": after}


def leaves_of(hidden: Any) -> list[Tensor]:
    if isinstance(hidden, Tensor):
        return [hidden]
    return [hidden[key] for key in sorted(hidden.keys())]


@every_mode
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "cell"])
def test_unrolling_from_a_stored_state_gives_the_stored_outputs(kind: str, mode: AutoresetMode) -> None:
    net = Recurrent(kind)
    schedule = tagged_envs.cycle(
        [(5, "truncated"), (1, "terminated")], [(3, "terminated"), (7, "truncated")], [(4, "both")]
    )
    envs = tagged_envs.make_tagged(3, mode, schedule)
    buffer = make_buffer(envs, 11, hidden=net.spec)
    collector = Collector(envs, net, buffer, seed=0)
    unrolled = 0
    for _ in range(3):
        collector.collect()
        for run in (run for runs in oracle.split(*ends(buffer), buffer["mask"]) for run in runs):
            n, steps = slice(run.env, run.env + 1), slice(run.t0, run.t1)
            tag = tagged_envs.decode(buffer["obs"][run.t0, run.env])
            start = [x[run.t0, n] for x in leaves_of(buffer["hidden"])]
            assert tag.step > 0 or all((x == 0).all() for x in start)
            if kind == "LSTM":
                state: Any = {name: x.transpose(0, 1) for name, x in zip("ch", start, strict=True)}
            else:
                state = start[0] if kind == "cell" else start[0].transpose(0, 1)
            with torch.no_grad():
                value, after = net.unroll(buffer["obs"][steps, n], state)
                torch.testing.assert_close(value[:, 0], buffer["value"][steps, run.env], rtol=1e-5, atol=1e-6)
                if run.end == "truncated":
                    final = np.add(np.asarray(tagged_envs.decode(buffer["obs"][run.t1 - 1, n])).T, [0, 0, 1, 0])
                    value, _ = net.unroll(torch.as_tensor(final, dtype=torch.float32).unsqueeze(0), after)
                    stored_final = buffer["final_value"][run.t1 - 1, run.env]
                    torch.testing.assert_close(value[0, 0], stored_final, rtol=1e-5, atol=1e-6)
                elif run.end == "unfinished":
                    value, _ = net.unroll(buffer.last["obs"][n].unsqueeze(0), after)
                    torch.testing.assert_close(value[0, 0], buffer.last["value"][run.env], rtol=1e-5, atol=1e-6)
            unrolled += run.t1 - run.t0
    assert unrolled == collector.total_steps


@every_mode
def test_the_stored_state_is_the_one_before_the_step_and_zero_where_an_episode_starts(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(4, mode, tagged_envs.drawn(1, longest=5))
    buffer = make_buffer(envs, 9, hidden=(2, 3))
    collector = Collector(envs, counting, buffer, seed=0)
    for _ in range(4):
        collector.collect()
        real = buffer["mask"]
        step = torch.as_tensor(tagged_envs.decode(buffer["obs"]).step)
        assert torch.equal(buffer["hidden"][real], step[real].float()[:, None, None].expand(-1, 2, 3))


@every_mode
def test_a_policy_that_keeps_its_state_in_one_place_does_not_change_what_is_stored(mode: AutoresetMode) -> None:
    """Captured graphs give out the same memory at every call."""
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(4, "terminated")], [(3, "truncated")]))
    buffer = make_buffer(envs, 12, hidden=(3,))
    place = torch.zeros(2, 3)

    def in_place(obs: Any, hidden: Tensor) -> dict[str, Any]:
        if len(hidden) != 2:
            return counting(obs, hidden)
        place.copy_(hidden + 1)
        return policy(obs) | {"hidden": place}

    Collector(envs, in_place, buffer, seed=0).collect()
    real = buffer["mask"]
    step = torch.as_tensor(tagged_envs.decode(buffer["obs"]).step)
    assert torch.equal(buffer["hidden"][real], step[real].float()[:, None].expand(-1, 3))


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (lambda z: {"h": z, "c": z[:, :1]}, errors.ShapeError, r"'hidden\.c'.*expected \(2, 3, 4\).*got \(2, 1, 4\)"),
        (lambda z: {"h": z.transpose(0, 1), "c": z}, errors.ShapeError, r"'hidden\.h'.*expected \(2, 3, 4\)"),
        (lambda z: {"h": z}, errors.FieldError, r"hidden\.c"),
        (lambda z: (z, z), errors.FieldError, r"hidden\.h.* got tuple; nest it as the schema does: \{'h': Field"),
        (lambda z: None, errors.FieldError, "'hidden'"),
    ],
    ids=["a batch of one", "batch first", "a member missing", "a tuple for a dict", "nothing"],
)
def test_a_wrong_hidden_state_is_an_error_that_says_what_was_expected(
    answer: Callable[[Tensor], Any], error: type[Exception], match: str
) -> None:
    envs = tagged_envs.make_tagged(3, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    buffer = make_buffer(envs, 4, hidden={"h": (2, 4), "c": (2, 4)})
    wrong = answer(torch.zeros(2, 3, 4))
    with pytest.raises(error, match=match):
        Collector(envs, lambda obs, hidden: policy(obs) | {"hidden": wrong}, buffer).collect()
    assert buffer.steps == 0


# Envs that show what they are given


class Showing(gym.vector.VectorEnv[Any, Any, Any]):
    """Two envs that never end, keep the actions that they are given, and report an end in their infos."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium has it
    num_envs = 2
    single_observation_space = gym.spaces.Box(-1, 1, (3,))
    single_action_space = gym.spaces.Box(-1, 1, (2,))
    actions: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((2, 3), np.float32), {"truncated": np.ones(2, np.bool_)}

    def step(self, actions: Any) -> Any:
        self.actions = actions
        no_end = np.zeros(2, np.bool_)
        return np.zeros((2, 3), np.float32), np.zeros(2), no_end, no_end, {"truncated": np.ones(2, np.bool_)}


def showing_schema(dtype: torch.dtype) -> Schema:
    flag = Field((), torch.bool)
    return Schema(
        {"obs": Field((3,)), "action": Field((2,), dtype), "reward": Field(()), "terminated": flag, "truncated": flag}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_actions_of_a_dtype_that_numpy_lacks_are_given_to_the_envs_as_float32(dtype: torch.dtype) -> None:
    envs = Showing()
    action = torch.tensor([[0.5, 1.0], [0.25, -1.0]]).to(dtype)
    replay = relive.ReplayBuffer(showing_schema(dtype), 10, 2)
    Collector(envs, lambda obs: action, replay).collect(2)
    assert envs.actions.dtype == np.float32
    assert envs.actions.tolist() == [[0.5, 1.0], [0.25, -1.0]]


def test_flags_are_those_of_the_envs_even_if_an_info_has_their_name() -> None:
    collector = Collector(
        Showing(),
        lambda obs, **keywords: torch.ones(2, 2),
        schema=showing_schema(torch.float32),
        from_info=("truncated",),
    )
    assert not collector.steps(2)["truncated"].any()


def one_env(given: Any) -> dict[str, Tensor]:
    """The field ``cost`` of an info with this entry, of a single env."""
    schema = showing_schema(torch.float32).extend(cost=Field(()))
    return Inputs(schema, 1, torch.device("cpu"), (), ("cost",), None).step_info({"cost": given}, np.zeros(1, np.bool_))


@pytest.mark.parametrize("given", [torch.tensor(3.0), torch.tensor([3.0]), np.array([3.0]), [3.0]])
def test_an_info_of_one_env_may_come_without_its_axis_in_a_tensor(given: Any) -> None:
    assert one_env(given)["cost"].tolist() == [3.0]


@pytest.mark.parametrize("given", [3.0, torch.zeros(2), np.array(3.0)])
def test_an_info_that_is_not_for_each_env_is_refused_by_its_name(given: Any) -> None:
    with pytest.raises(errors.ShapeError, match="field 'cost': expected"):
        one_env(given)
