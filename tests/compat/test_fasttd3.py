"""The drop-in for FastTD3's replay buffer, and holosoma's: by itself, without either."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive.replay.buffer
from compat.fasttd3_play import CRITIC, OBS, Host, Play, by_start, same_row
from relive.compat.fasttd3 import HolosomaReplayBuffer, SimpleReplayBuffer
from relive.errors import EmptyError, EpisodeEndWarning, FieldError, ParameterError, ShapeError
from relive.memory.device import DeviceRows
from support import internals
from support.effort import often
from support.other_device import no_waiting, place, places

pytestmark = pytest.mark.usefixtures("no_hosts")

MODES = [(False, False), (True, False), (True, True)]
"""asymmetric_obs and playground_mode."""


def made(play: Play, size: int, n: int = 1, gamma: float = 0.5, mode: int = 0, **options: Any) -> SimpleReplayBuffer:
    asymmetric, playground = MODES[mode]
    return SimpleReplayBuffer(
        play.envs, size, OBS, 2, CRITIC, asymmetric, playground, n_steps=n, gamma=gamma, **{"seed": 0, **options}
    )


def filled(play: Play, size: int, *args: Any, **options: Any) -> SimpleReplayBuffer:
    buffer = made(play, size, *args, **options)
    for t in range(play.steps):
        buffer.extend(play.step(t))
    return buffer


def all_rows(buffer: SimpleReplayBuffer, draws: int = 300) -> dict[Any, Any]:
    """All transitions that can be drawn, by their first step: so many draws leave none out."""
    return by_start(buffer.sample(draws))


PLAYS = [
    # envs, size, steps, and what happens
    (1, 1, 9, {}),
    (1, 4, 3, {}),
    (3, 7, 6, {}),
    (2, 7, 40, {"terminal": 0.3, "truncated": 0.2}),
    (3, 16, 90, {"reset": 0.1}),
    (3, 12, 30, {"limit": 0.2}),
    (2, 12, 70, {"terminal": 0.0, "truncated": 0.0}),
    (2, 12, 70, {"terminal": 0.0, "truncated": 0.05, "reset": 0.1, "limit": 0.1}),
]


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize(("envs", "size", "steps", "chances"), PLAYS)
def test_every_transition_is_that_of_its_episode(
    envs: int, size: int, steps: int, chances: dict[str, float], n: int
) -> None:
    play, gamma = Play(envs, steps, seed=size + steps, whole=False, **chances), 0.97
    for mode in range(len(MODES)):
        found = all_rows(filled(play, size, n, gamma, mode))
        assert set(found) == play.starts(size)
        for (env, t), row in found.items():
            assert same_row(row, play.row(env, t, n, gamma)), (env, t)


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("steps", [14, 47])
def test_transitions_are_those_of_the_host_wherever_its_windows_stay_before_the_newest_steps(
    n: int, steps: int
) -> None:
    play, size = Play(3, steps, seed=n, terminal=0.05, truncated=0.05), 16
    found, theirs = all_rows(filled(play, size, n, mode=1)), Host(play, size, n, 0.5)
    compared = 0
    for key, row in theirs.rows().items():
        if key in found and theirs.is_right(*key):
            assert same_row(found[key], row), key
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("n", [3, 8])
def test_no_window_sums_rewards_of_a_ring_ago(n: int) -> None:
    """The host's do, in each window that begins in the newest n - 1 rows of a full ring."""
    play, size = Play(2, 40, terminal=0.0, truncated=0.0), 16
    found, theirs = all_rows(filled(play, size, n)), Host(play, size, n, 0.5).rows()
    for env in range(play.envs):
        for t in range(play.steps - n + 1, play.steps):
            assert theirs[env, t]["effective_n_steps"] == n > play.steps - t
            ring_ago = [play.reward[t + k - (size if t + k >= play.steps else 0), env].item() for k in range(n)]
            assert theirs[env, t]["rewards"] == sum(0.5**k * r for k, r in enumerate(ring_ago))
        for t in range(play.steps - n - 1, play.steps - 2):
            assert found[env, t]["effective_n_steps"] == play.steps - 2 - t


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_has_the_layout_of_the_hosts(n: int) -> None:
    play = Play(4, 9)
    for mode, (asymmetric, _) in enumerate(MODES):
        batch = filled(play, 8, n, mode=mode).sample(5)
        names = {"observations": OBS, "actions": 2} | ({"critic_observations": CRITIC} if asymmetric else {})
        following = dict.fromkeys(("rewards", "dones", "truncations", "effective_n_steps"), 0)
        following |= {name: size for name, size in names.items() if name != "actions"}
        assert isinstance(batch, TensorDict)
        assert isinstance(batch["next"], TensorDict)
        assert batch.batch_size == batch["next"].batch_size == (20,)
        assert set(batch.keys()) == {*names, "next"}
        assert set(batch["next"].keys()) == set(following)
        for part, sizes in ((batch, names), (batch["next"], following)):
            for name, size in sizes.items():
                whole = name in ("dones", "truncations") or (name == "effective_n_steps" and n == 1)
                assert part[name].dtype is (torch.int64 if whole else torch.float32)
                assert part[name].shape == ((20, size) if size else (20,))
                assert part[name].is_contiguous()
        batch["next"]["rewards"] = batch["next"]["rewards"] * 0  # as FastTD3 normalizes
        assert not batch["next", "rewards"].any()


def test_draws_are_uniform_over_all_envs_also_after_the_ring_came_round() -> None:
    play = Play(3, 40, terminal=0.2)
    buffer, starts = filled(play, 8), sorted(play.starts(8))
    batch = torch.cat([buffer.sample(50)["observations"] for _ in range(40)])
    drawn = [starts.index((int(env), int(t))) for env, t in batch[:, :2].tolist()]
    counts = np.bincount(drawn, minlength=len(starts))
    expected = counts.sum() / len(starts)
    assert ((counts - expected) ** 2 / expected).sum() < len(starts) + 4 * np.sqrt(2 * len(starts))


def test_batches_follow_the_seed_or_torchs_generator() -> None:
    play = Play(2, 20)
    one, other = (filled(play, 16, seed=5).sample(9) for _ in range(2))
    assert (one == other).all()
    drawn: list[Any] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        buffer = filled(play, 16, seed=None)
        drawn.append(torch.stack([buffer.sample(9)["observations"] for _ in range(3)]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_the_first_steps_can_be_drawn_as_soon_as_they_are_there(steps: int, n: int) -> None:
    """The newest is cut off, so that its own next observation is there; later steps start new windows."""
    play = Play(2, 12, terminal=0.0, truncated=0.0)
    buffer = made(play, 16, n)
    with pytest.raises(EmptyError):
        buffer.sample(1)
    for t in range(steps):
        buffer.extend(play.step(t))
    found = all_rows(buffer)
    cut = min(steps, 2)  # the third step leaves the first complete: nothing is cut off
    assert set(found) == {(env, t) for env in (0, 1) for t in range(cut if steps < 3 else 1)}
    if steps < 3:
        play.truncations[steps - 1], play.dones[steps - 1] = True, True
        play.next_critic[steps - 1] = play.critic[steps]
    for t in range(steps, play.steps):
        buffer.sample(1)
        buffer.extend(play.step(t))
    found = all_rows(buffer)
    assert set(found) == {(env, t) for env in (0, 1) for t in range(play.steps - 2)}
    for (env, t), row in found.items():
        assert same_row(row, play.row(env, t, n, 0.5)), (env, t)


def test_the_host_may_change_what_it_passed_and_the_steps_and_the_discount_later() -> None:
    play = Play(2, 30, whole=False)
    buffer, kept = made(play, 16, 3, mode=2), TensorDict({}, [2])
    for t in range(play.steps):
        kept.update(play.step(t).clone())
        buffer.extend(kept)
        for leaf in kept.values(True, True):
            leaf.zero_()
    for n, gamma in ((3, 0.5), (1, 0.9), (8, 0.9)):
        buffer.n_steps, buffer.gamma = n, gamma
        assert (buffer.n_steps, buffer.gamma) == (n, gamma)
        for (env, t), row in all_rows(buffer).items():
            assert same_row(row, play.row(env, t, n, gamma))


def test_other_dtypes_of_the_host_are_stored_as_its_own_class_stores_them() -> None:
    play = Play(2, 20)
    one, other = made(play, 16, 3), made(play, 16, 3)
    for t in range(play.steps):
        step = play.step(t)
        one.extend(step)
        following = step["next"].to_dict()
        following |= {"dones": following["dones"].bool(), "truncations": following["truncations"].float()}
        following["rewards"] = following["rewards"].double().requires_grad_()
        plain = step.to_dict() | {"next": following}
        other.extend(plain | {"observations": step["observations"].double(), "actions": step["actions"].numpy()})
    assert (one.sample(50) == other.sample(50)).all()


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_stored() -> None:
    play = Play(2, 20)
    buffer = filled(play, 16, 3, mode=1)
    before, count = buffer.sample(50).clone(), buffer.ptr
    buffer = filled(play, 16, 3, mode=1)
    for path in play.step(0).keys(True, True):
        names = path if isinstance(path, tuple) else (path,)
        shown = ".".join(names)
        with pytest.raises(FieldError, match=f"'{shown}' is missing"):
            buffer.extend(play.step(0).exclude(path))
        wrong = play.step(0)
        wrong[path] = wrong[path].unsqueeze(-1)
        with pytest.raises(ShapeError, match=rf"'{shown}': expected \(2,.*one row per env.*got"):
            buffer.extend(wrong)
    with pytest.raises(FieldError, match="'next' is missing"):
        buffer.extend(play.step(0).exclude("next"))
    assert buffer.ptr == count
    assert (buffer.sample(50) == before).all()


def test_sizes_that_make_no_buffer_are_refused_by_name() -> None:
    for name in ("n_env", "buffer_size", "n_obs", "n_act", "n_critic_obs"):
        sizes = {"n_env": 2, "buffer_size": 8, "n_obs": 3, "n_act": 2, "n_critic_obs": 5, name: 0}
        with pytest.raises(ParameterError, match=rf"{name}=0: expected a whole number of at least 1"):
            SimpleReplayBuffer(**sizes)
    with pytest.raises(ParameterError, match="n_critic_obs=2: expected at least n_obs=3 numbers"):
        SimpleReplayBuffer(2, 8, 3, 2, 2, True, True)
    SimpleReplayBuffer(2, 8, 3, 2, 2, True, False)
    SimpleReplayBuffer(2, 8, 3, 2, 2, False, True)


def test_a_critic_that_observes_no_more_gets_the_observations_themselves() -> None:
    play = Play(2, 20)
    buffer = SimpleReplayBuffer(2, 16, OBS, 2, OBS, True, True, seed=0)
    for t in range(play.steps):
        step = play.step(t)
        for part in (step, step["next"]):
            part["critic_observations"] = part["observations"]
        buffer.extend(step)
    batch = buffer.sample(9)
    for part in (batch, batch["next"]):
        assert torch.equal(part["critic_observations"], part["observations"])
        assert part["critic_observations"].data_ptr() != part["observations"].data_ptr()


def test_holosomas_buffer_always_has_critic_observations() -> None:
    play = Play(2, 30)
    one = HolosomaReplayBuffer(n_env=2, buffer_size=16, n_obs=OBS, n_act=2, n_critic_obs=CRITIC, n_steps=3, gamma=0.5,
                               device="cpu", seed=0)  # fmt: skip
    for t in range(play.steps):
        one.extend(play.step(t))
    assert (one.sample(50) == filled(play, 16, 3, mode=1).sample(50)).all()


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_reset_between_two_steps_is_a_truncation_with_the_next_observation_that_was_passed() -> None:
    """The host's windows go on into the next episode."""
    play, n = Play(1, 12, terminal=0.0, truncated=0.0), 3
    play.resets[5] = True
    play.next_critic[5, 0, 2] += 1
    row = all_rows(filled(play, 16, n))[0, 4]
    assert row["effective_n_steps"] == 2
    assert torch.equal(row["next_observations"], play.next_critic[5, 0, :OBS])
    assert (int(row["dones"]), int(row["truncations"])) == (1, 1)
    assert Host(play, 16, n, 0.5).rows()[0, 4]["effective_n_steps"] == 3


def test_an_observation_with_nan_goes_on_with_itself() -> None:
    play = Play(1, 12, terminal=0.0, truncated=0.0)
    play.critic[6, 0, 2] = play.next_critic[5, 0, 2] = torch.nan
    assert all_rows(filled(play, 16, 3))[0, 4]["effective_n_steps"] == 3


def hides_final_observations(play: Play) -> None:
    """As Isaac Lab does: the observation after an end is the one after the reset."""
    play.next_critic = torch.where(play.dones[..., None], play.critic[1:], play.next_critic)


def test_time_limits_that_lead_to_the_reset_observation_are_reported_once() -> None:
    play = Play(2, 200, truncated=0.05)
    hides_final_observations(play)
    with pytest.warns(EpisodeEndWarning, match="bootstrap from a reset") as caught:
        filled(play, 16)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_reset_observations_after_terminals_alone_are_not_reported() -> None:
    """FastTD3's HumanoidBench and holosoma pass the final observation of truncated steps only."""
    play = Play(2, 200, truncated=0.05)
    terminal = play.dones & ~play.truncations
    play.next_critic = torch.where(terminal[..., None], play.critic[1:], play.next_critic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filled(play, 16)


# -- elsewhere --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=places())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Each device on which a replay has its rows; the CPU is made one."""
    with place(request.param) as chosen:
        if chosen.type == "cpu":
            monkeypatch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, chosen))
        yield chosen


def test_only_a_buffer_on_a_device_is_compiled() -> None:
    def empty(device: Any) -> SimpleReplayBuffer:
        return SimpleReplayBuffer(4, 16, 3, 2, 3, device=device)

    empty("cpu").compile(mode="reduce-overhead")
    with place("stand-in") as chosen, pytest.raises(ParameterError, match="a replay makes CUDA graphs of its own"):
        empty(chosen).compile(mode="reduce-overhead")


@pytest.mark.parametrize(("mode", "n"), [(0, 1), (1, 3), (2, 8)])
def test_batches_on_a_device_are_those_in_ram_and_no_call_waits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, mode: int, n: int
) -> None:
    play = Play(4, often(42, 80), whole=False, reset=0.05)
    there = made(play, 16, n, mode=mode, device=device)
    monkeypatch.undo()
    here = made(play, 16, n, mode=mode)
    for t in range(play.steps):
        step = play.step(t)
        here.extend(step)
        far = TensorDict({name: leaf.to(device) for name, leaf in step.items(True, True)}, [4])
        with no_waiting(allow=t <= 32):  # until then it looks at time limits
            there.extend(far)
            batch = there.sample(9)
        for name, leaf in here.sample(9).items(True, True):
            assert torch.equal(batch[name].cpu(), leaf), name
    assert internals.is_ahead(internals.replay(there))


# -- copies -----------------------------------------------------------------------------------------------------------


def test_copies_and_pickles_go_on_alike() -> None:
    play = Play(2, 40)
    buffer = made(play, 16, 3, mode=2)
    for t in range(30):
        buffer.extend(play.step(t))
    others = [copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    for t in range(30, 40):
        for one in (buffer, *others):
            one.extend(play.step(t))
    expected = buffer.sample(50)
    for other in others:
        other.n_steps = 3
        assert (other.sample(50) == expected).all()
        assert all(same_row(row, play.row(env, t, 3, 0.5)) for (env, t), row in all_rows(other).items())
        other.n_steps = 1
        assert all(same_row(row, play.row(env, t, 1, 0.5)) for (env, t), row in all_rows(other).items())


def test_its_repr_makes_it_again() -> None:
    buffer = SimpleReplayBuffer(2, 16, 3, 2, 5, asymmetric_obs=True, n_steps=3, gamma=0.9, device="cpu", seed=1)
    again = eval(repr(buffer))
    assert repr(again) == repr(buffer)
    assert again.asymmetric_obs


def test_steps_that_are_stored_without_gradients_and_with_them_follow_each_other() -> None:
    play = Play(3, 6)
    one, other = made(play, 8), filled(play, 8)
    for t in range(play.steps):
        with torch.inference_mode(t % 2 == 0):
            one.extend(play.step(t))
    batches = one.sample(4), other.sample(4)
    for path in batches[1].keys(include_nested=True, leaves_only=True):
        assert torch.equal(batches[0][path], batches[1][path]), path
