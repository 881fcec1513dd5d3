"""ValueHeads: a value of several heads gives each of several rewards advantages of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from relive import GAE, Collector, MonteCarlo, RolloutBuffer, Schema, TDLambda, ValueHeads, VTrace, errors
from support import tagged_envs
from support.other_device import ELSEWHERE, far_device, no_waiting
from support.rollouts import NAN, SCHEMA, play, same_data
from support.tagged_collections import every_mode, policy

T, N = 9, 3
HEADS = ValueHeads({"reward": GAE(0.99, 0.95), "cost": TDLambda(0.9, 0.5, normalize=True), "speed": MonteCarlo(0.8)})
WIDE = Schema({**{name: SCHEMA[name] for name in SCHEMA.names}, "value": (3,), "cost": (), "speed": ()})


def filled(device: str = "cpu", *, masked: bool = True, count: int = T, **options: Any) -> RolloutBuffer:
    """A rollout of random steps with three rewards, three values and, where they are read, final values."""
    rollout, rng = RolloutBuffer(WIDE, T, N, device=device, **options), np.random.default_rng(5)
    numbers = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    for each in play(count, N, seed=1, masked=masked):
        needed = ~np.isnan(each["final_value"])[:, None]
        wide = {"value": numbers(N, 3), "final_value": np.where(needed, numbers(N, 3), NAN)}
        rollout.add(each | wide | {"cost": numbers(N), "speed": numbers(N)})
    rollout.set_last(value=numbers(N, 3))
    return rollout


def narrow(rollout: RolloutBuffer, k: int, name: str) -> RolloutBuffer:
    """A rollout with one value for each env: head k, and the column of that name as rewards."""
    made = RolloutBuffer(SCHEMA, rollout.steps, N)
    for t in range(rollout.steps):
        row = {field: rollout[field][t] for field in (*SCHEMA.names, "mask", "final_value")}
        made.add(
            row | {"value": row["value"][:, k], "final_value": row["final_value"][:, k], "reward": rollout[name][t]}
        )
    made.set_last(value=rollout.last["value"][:, k])
    return made


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [T, 2 * T + 4])
def test_each_head_is_finished_as_if_it_were_alone(count: int, masked: bool) -> None:
    rollout = filled(masked=masked, count=count, wrap=True).finish(HEADS)
    for k, (name, estimator) in enumerate(HEADS.heads.items()):
        alone, prefix = narrow(rollout, k, name).finish(estimator), "" if name == "reward" else f"{name}_"
        assert torch.equal(rollout[f"{prefix}advantage"], alone["advantage"])
        assert torch.equal(rollout[f"{prefix}return"], alone["return"])
    (batch,) = rollout.minibatches(num_batches=1, fields=("value", "cost_advantage", "advantage"))
    assert batch["value"].shape == (len(rollout), 3)


@every_mode
def test_a_collector_values_final_observations_by_every_head(mode: AutoresetMode) -> None:
    schedule = tagged_envs.cycle([(3, "truncated"), (1, "truncated")], [(2, "terminated"), (4, "truncated")])

    def two_heads(obs: Tensor) -> Mapping[str, Tensor]:
        answer = policy(obs)
        return answer | {"value": torch.stack([answer["value"], 7 - answer["value"]], -1)}

    rollouts: list[RolloutBuffer] = []
    for acting, shape in ((two_heads, (2,)), (policy, ())):
        envs = tagged_envs.make_tagged(2, mode, schedule)
        rollout = RolloutBuffer(Schema.from_env(envs, value=shape), 11, 2)
        Collector(envs, acting, rollout, seed=0).collect()
        rollouts.append(rollout)
    wide, alone = rollouts
    alone.finish(GAE(0.9, 0.8))
    wide["twice"] = 2 * wide["reward"]
    wide.finish(ValueHeads({"reward": GAE(0.9, 0.8), "twice": GAE(0.9, 0.8)}))
    assert torch.equal(wide["advantage"], alone["advantage"])
    cut = wide["truncated"] & ~wide["terminated"] & wide["mask"]
    assert cut.any()
    assert torch.equal(wide["final_value"][cut][:, 1], 7 - alone["final_value"][cut])
    after = 2 * wide["reward"] + 0.9 * wide["final_value"][..., 1] - wide["value"][..., 1]
    assert torch.equal(wide["twice_advantage"][cut], after[cut])


def test_heads_on_a_device_give_the_same_and_wait_for_nothing() -> None:
    ours = filled().finish(HEADS)
    with far_device():
        theirs = filled(ELSEWHERE)
        with no_waiting():
            theirs.finish(HEADS)
        data = theirs.data().to("cpu")
        theirs.debug = True
        theirs.finish(HEADS)
        cut = theirs["truncated"] & ~theirs["terminated"]
        theirs["final_value"][..., 1].masked_fill_(cut, NAN)  # torch 2.5 takes the 1 in [cut, 1] for an env
        with pytest.raises(errors.FieldError, match="was truncated and has no value"):
            theirs.finish(HEADS)
    for name in ("advantage", "return", "cost_advantage", "speed_return"):
        torch.testing.assert_close(data[name], ours[name], rtol=1e-5, atol=1e-5)


def test_a_head_may_have_an_estimator_of_ones_own() -> None:
    class Endless:
        """Advantages that see no end, as those of exploration rewards (Burda et al. 2019)."""

        reads = GAE().reads

        def __call__(self, *, terminated: Tensor, truncated: Tensor, **columns: Any) -> dict[str, Tensor]:
            no = torch.zeros_like(terminated)
            return GAE(0.99, 0.9)(terminated=no, truncated=no, **columns) | {"seen": columns["value"][:-1]}

    rollout = filled(masked=False).finish(ValueHeads({"reward": GAE(), "cost": GAE(), "speed": Endless()}))
    assert torch.equal(rollout["speed_seen"], rollout["value"][..., 2])
    assert not torch.equal(rollout["speed_advantage"], filled(masked=False).finish(HEADS)["speed_advantage"])


def test_values_and_columns_that_do_not_fit_are_refused_by_name() -> None:
    rollout = filled()
    with pytest.raises(
        errors.ShapeError, match=r"'value': expected 2 numbers .* each of reward, cost, got \(10, 3, 3\)"
    ):
        rollout.finish(ValueHeads({"reward": GAE(), "cost": GAE()}))
    with pytest.raises(errors.ShapeError, match=r"'value': expected \(10, 3\), got \(10, 3, 3\); .*ValueHeads"):
        rollout.finish(GAE())
    with pytest.raises(errors.FieldError, match=r"ValueHeads reads 'costs'.*did you mean 'cost'"):
        rollout.finish(ValueHeads({"reward": GAE(), "costs": GAE(), "speed": GAE()}))
    with pytest.raises(errors.FieldError, match="'target_log_prob'"):
        rollout.finish(ValueHeads({"reward": GAE(), "cost": GAE(), "speed": VTrace()}))
    rollout["extra"] = torch.zeros(rollout.steps, N, 1)
    for heads in (("reward", "cost", "extra"), ("extra", "reward", "cost")):
        for endless in ((), ("extra",)):
            with pytest.raises(errors.ShapeError, match=r"'extra': expected a column \[T, N\], got \(9, 3, 1\)"):
                rollout.finish(ValueHeads(dict.fromkeys(heads, GAE()), endless))
    assert "advantage" not in rollout


@pytest.mark.parametrize("heads", [{}, [GAE()], {"cost": GAE}, {"cost": 0.9}, {1: GAE()}, None])
def test_heads_are_named_estimators(heads: Any) -> None:
    with pytest.raises(errors.ParameterError, match="from columns of rewards to estimators"):
        ValueHeads(heads)


@pytest.mark.parametrize(
    ("name", "says"), [("value", "'value': step 4 of env 1"), ("speed", "'speed': step 4 of env 1")]
)
def test_a_number_that_spoils_one_head_is_named_and_no_head_has_advantages(name: str, says: str) -> None:
    rollout = filled(masked=False).finish(HEADS)
    rollout[name][4, 1] = torch.tensor([0.0, 0.0, NAN]) if name == "value" else NAN
    with pytest.raises(errors.NotFiniteError, match=f"{says} is nan"):
        rollout.finish(HEADS)
    assert not {"advantage", "return", "cost_advantage", "speed_return"} & set(rollout.keys())


def test_heads_are_the_call_that_makes_them_and_do_not_change_with_the_mapping() -> None:
    heads = {"reward": GAE(0.9), "cost": GAE()}
    made = ValueHeads(heads)
    assert eval(repr(made)) == made
    heads["speed"] = GAE()
    assert list(made.heads) == ["reward", "cost"]
    before = filled().finish(HEADS)
    assert same_data(filled().finish(eval(repr(HEADS))).data(), before.data())


# heads that no end of an episode stops


def joined(rollout: RolloutBuffer, k: int, name: str, estimator: Any) -> dict[str, Tensor]:
    """The results of an estimator for each env's real steps, one after another; other rows return their value."""
    found: dict[str, Tensor] = {}
    value = torch.cat([rollout["value"][:-1] if len(rollout["value"]) > rollout.steps else rollout["value"]])
    for n in range(N):
        rows = [t for t in range(rollout.steps) if rollout["mask"][t, n]]
        if not rows:
            continue
        no = torch.zeros(len(rows), 1, dtype=torch.bool)
        values = torch.cat([value[rows, n, k], rollout.last["value"][n : n + 1, k]])[:, None]
        columns = {"reward": rollout[name][rows, n][:, None], "value": values, "mask": None, "final_value": None}
        columns |= {"terminated": no, "truncated": no, "log_rho": no.float()}
        for result, x in estimator(**{read: columns[read] for read in estimator.reads}).items():
            others = value[: rollout.steps, :, k] if result == "return" else torch.zeros(rollout.steps, N)
            found.setdefault(result, others.clone())[rows, n] = x[:, 0]
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("estimator", [GAE(0.99, 0.95), TDLambda(0.9, 0.5), MonteCarlo(0.8)], ids=repr)
def test_a_head_that_no_end_stops_has_the_returns_of_the_joined_steps(estimator: Any, masked: bool) -> None:
    for count in (T, 2 * T + 4):
        rollout = filled(masked=masked, count=count, wrap=True)
        heads = {"reward": GAE(0.99, 0.95), "cost": estimator, "speed": MonteCarlo(0.8)}
        rollout.finish(ValueHeads(heads, non_episodic=("cost",)))
        for result, x in joined(rollout, 1, "cost", estimator).items():
            torch.testing.assert_close(rollout[f"cost_{result}"], x, rtol=1e-5, atol=1e-5)
        others = filled(masked=masked, count=count, wrap=True).finish(ValueHeads(heads))
        assert (rollout["terminated"] | rollout["truncated"]).any()
        assert not torch.allclose(others["cost_return"], rollout["cost_return"])
        for column in ("advantage", "return", "speed_advantage", "speed_return"):
            assert torch.equal(others[column], rollout[column])


@every_mode
def test_a_collector_joins_the_steps_of_every_mode(mode: AutoresetMode) -> None:
    """Hand-written: the reset row of NEXT_STEP is no step, so the trace passes over it."""
    schedule = tagged_envs.cycle([(3, "truncated"), (1, "terminated")], [(2, "terminated"), (4, "truncated")])
    envs = tagged_envs.make_tagged(2, mode, schedule)
    rollout = RolloutBuffer(Schema.from_env(envs, value=(2,)), 11, 2)
    two = lambda obs: (a := policy(obs)) | {"value": torch.stack([a["value"], 7 - a["value"]], -1)}  # noqa: E731
    Collector(envs, two, rollout, seed=0).collect()
    rollout["new"] = 2 * rollout["reward"]
    rollout.finish(ValueHeads({"reward": GAE(0.9, 0.8), "new": GAE(0.95, 0.7)}, non_episodic=["new"]))  # type: ignore[arg-type]
    for n in range(2):
        later, after = rollout.last["value"][n, 1], torch.zeros(())
        for t in reversed(range(11)):
            if rollout["mask"][t, n]:
                value = rollout["value"][t, n, 1]
                after = rollout["new"][t, n] + 0.95 * later - value + 0.95 * 0.7 * after
                torch.testing.assert_close(rollout["new_advantage"][t, n], after)
                later = value
            else:
                assert rollout["new_advantage"][t, n] == 0


def test_a_head_that_no_end_stops_is_the_same_on_a_device() -> None:
    heads = ValueHeads({"reward": GAE(), "cost": GAE(0.9, 0.8), "speed": GAE(0.9)}, ("cost", "speed"))
    ours = filled().finish(heads)
    with far_device():
        theirs = filled(ELSEWHERE)
        with no_waiting():
            theirs.finish(heads)
        data = theirs.data().to("cpu")
    for name in ("advantage", "cost_advantage", "cost_return", "speed_return"):
        torch.testing.assert_close(data[name], ours[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("debug", [False, True])
def test_a_head_that_no_end_stops_needs_no_final_value_but_a_bootstrap(debug: bool) -> None:
    rollout = filled(masked=False, debug=debug)
    cut = rollout["truncated"] & ~rollout["terminated"]
    assert cut.any()
    rollout["final_value"][..., 1] = NAN
    heads: Any = {"reward": GAE(), "cost": GAE(), "speed": GAE()}
    with pytest.raises((errors.FieldError, errors.NotFiniteError), match="final_value"):
        rollout.finish(ValueHeads(heads))
    rollout.finish(ValueHeads(heads, ("cost",)))
    rollout["final_value"][...] = NAN
    rollout.finish(ValueHeads(heads, ("reward", "cost", "speed")))
    rollout["cost"][2, 1] = NAN
    with pytest.raises(errors.NotFiniteError, match="'cost': step 2 of env 1"):
        rollout.finish(ValueHeads(heads, ("reward", "cost", "speed")))
    ended = RolloutBuffer(WIDE, 1, N)
    row = {name: torch.zeros(N, *leaf.shape, dtype=leaf.dtype) for (name,), leaf in WIDE.leaves.items()}
    ended.add(row | {"terminated": np.ones(N, np.bool_)})
    ended.finish(ValueHeads(heads))
    with pytest.raises(errors.UnfinishedError, match=r"'speed' goes on after the last step.*last_value"):
        ended.finish(ValueHeads(heads, ("speed",)))


class Plain:
    """GAE of a user, who goes by the ends of episodes and takes each row for a step, as most code does."""

    reads = ("reward", "value", "terminated", "truncated", "final_value")

    def __call__(self, *, final_value: Tensor | None, **columns: Tensor) -> dict[str, Tensor]:
        reward, value, done = columns["reward"], columns["value"], columns["terminated"] | columns["truncated"]
        found, later = torch.zeros_like(reward), torch.zeros_like(reward[0])
        for t in reversed(range(len(reward))):
            after = value[t + 1] if final_value is None else torch.where(done[t], final_value[t], value[t + 1])
            after = torch.where(columns["terminated"][t], 0, after)
            later = reward[t] + 0.9 * after - value[t] + torch.where(done[t], 0, 0.9 * 0.8 * later)
            found[t] = later
        return {"advantage": found}


@pytest.mark.parametrize("masked", [False, True])
def test_an_estimator_of_the_user_that_reads_no_mask_gets_nothing_from_rows_that_are_no_steps(masked: bool) -> None:
    rollout = filled(masked=masked, count=2 * T + 4, wrap=True)
    rollout["cost"][~rollout["mask"]] = 1e6
    heads: Any = {"reward": GAE(), "cost": GAE(0.9, 0.8), "speed": GAE()}
    want = rollout.finish(ValueHeads(heads, ("cost",)))["cost_advantage"].clone()
    rollout.finish(ValueHeads(heads | {"cost": Plain()}, ("cost",)))
    torch.testing.assert_close(rollout["cost_advantage"], want)


@pytest.mark.parametrize("names", [("costs",), "cost", 3, (1,), (name for name in ("cost",)), {"cost"}])
def test_heads_that_no_end_stops_are_some_of_the_heads(names: Any) -> None:
    with pytest.raises(errors.ParameterError, match=r"ValueHeads\(non_episodic=.*expected"):
        ValueHeads({"reward": GAE(), "cost": GAE()}, names)
