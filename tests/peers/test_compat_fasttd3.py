"""relive.compat.fasttd3 beside FastTD3's and holosoma's own classes, and FastTD3's training on ours."""

from __future__ import annotations

from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from compat.fasttd3_play import CRITIC, OBS, Host, Play, by_start, same_row
from peers.fasttd3_host import buffer_of, train
from relive.compat.fasttd3 import HolosomaReplayBuffer, SimpleReplayBuffer
from relive.errors import EpisodeEndWarning

LIBRARIES = ("fasttd3", "holosoma")
OURS = {"fasttd3": SimpleReplayBuffer, "holosoma": HolosomaReplayBuffer}


def pair(library: str, play: Play, size: int, n: int, gamma: float, mode: tuple[bool, bool]) -> tuple[Any, Any]:
    """Its buffer and ours, after the same play."""
    options: dict[str, Any] = {"n_steps": n, "gamma": gamma, "device": torch.device("cpu")}
    if library == "fasttd3":
        options |= {"asymmetric_obs": mode[0], "playground_mode": mode[1]}
    sizes = {"n_env": play.envs, "buffer_size": size, "n_obs": OBS, "n_act": 2, "n_critic_obs": CRITIC}
    both = tuple(kind(**sizes, **options) for kind in (buffer_of(library), OURS[library]))
    for t in range(play.steps):
        for buffer in both:
            buffer.extend(play.step(t))
    return both


def every_row(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What its own class gives for each row that it may draw."""
    count: list[int] = []

    def each(low: int, high: int, shape: tuple[int, int], **_: Any) -> torch.Tensor:
        count.append(high)
        return torch.arange(low, high).repeat(shape[0], 1)[:, : shape[1]]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", each)
        theirs.sample(1)
        return by_start(theirs.sample(count[0]))


CASES = [("fasttd3", mode) for mode in ((False, False), (True, False), (True, True))] + [("holosoma", (True, False))]


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("steps", [14, 33, 70])
@pytest.mark.parametrize(("library", "mode"), CASES)
def test_transitions_are_the_same_to_the_bit_wherever_its_windows_stay_before_the_newest_steps(
    library: str, mode: Any, n: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards are small whole numbers and the discount is a half, so that the order of sums does not matter."""
    play = Play(4, steps, seed=n, terminal=0.05, truncated=0.05)
    theirs, ours = pair(library, play, 20, n, 0.5, mode)
    rows, found = every_row(theirs, monkeypatch), by_start(ours.sample(500))
    stand_in = Host(play, 20, n, 0.5)
    compared = 0
    for key, row in rows.items():
        assert same_row(row, stand_in.rows()[key]), key  # it is what the quick tests compare with
        if key in found and stand_in.is_right(*key):
            assert row.keys() == found[key].keys()
            assert same_row(found[key], row), key
            assert all(value.dtype is row[name].dtype for name, value in found[key].items())
            compared += 1
    assert compared > 3 * (min(steps, 18) - n - 4)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_sums_differ_by_the_rounding_of_float32_and_ours_are_the_nearer_ones(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(4, 70, whole=False, terminal=0.02, truncated=0.02)
    theirs, ours = pair("fasttd3", play, 40, n, 0.97, (True, True))
    rows, found = every_row(theirs, monkeypatch), by_start(ours.sample(900))
    right = Host(play, 40, n, 0.97)
    for key in rows.keys() & found.keys():
        if right.is_right(*key):
            assert same_row(found[key], rows[key], loose=n > 1), key
            assert same_row(found[key], play.row(*key, n, 0.97)), key  # float64, rounded once


@pytest.mark.parametrize("n", [1, 3])
def test_batches_have_the_same_layout(n: int) -> None:
    for library, mode in CASES:
        theirs, ours = (buffer.sample(5) for buffer in pair(library, Play(4, 30), 20, n, 0.9, mode))
        assert type(theirs) is type(ours) is TensorDict
        assert (theirs.batch_size, theirs.device, theirs["next"].batch_size) == (
            ours.batch_size, ours.device, ours["next"].batch_size,
        )  # fmt: skip
        one, other = (dict(batch.items(True, True)) for batch in (theirs, ours))
        assert one.keys() == other.keys()
        for name, x in one.items():
            y = other[name]
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()), name


def test_both_take_the_same_arguments() -> None:
    for library in LIBRARIES:
        kind = buffer_of(library)
        host = dict(signature(kind.__init__).parameters)
        del host["self"]
        ours = dict(signature(OURS[library]).parameters)
        assert list(ours)[: len(host)] == list(host)
        assert all(ours[name].default == parameter.default for name, parameter in host.items())
        assert all(p.kind is Parameter.KEYWORD_ONLY for p in list(ours.values())[len(host) :])
        for method in ("extend", "sample"):
            names = (list(signature(getattr(x, method)).parameters) for x in (kind, SimpleReplayBuffer))
            assert next(names) == next(names)


@pytest.mark.parametrize(("library", "mode"), CASES)
def test_a_buffer_of_the_host_becomes_ours(library: str, mode: Any) -> None:
    play = Play(3, 50, reset=0.05)
    theirs, ours = pair(library, play, 20, 3, 0.5, mode)
    made = SimpleReplayBuffer.from_original(theirs, seed=0)
    assert (made.ptr, made.n_steps, made.gamma) == (theirs.ptr, 3, 0.5)
    found, expected = (by_start(buffer.sample(600)) for buffer in (made, ours))
    assert set(found) <= set(expected)
    assert len(found) >= len(expected) - 3 * 3
    assert all(same_row(row, expected[key]) for key, row in found.items())


# -- where theirs is wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_hosts_windows_at_the_seam_sum_rewards_of_a_ring_ago(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(1, 40, terminal=0.0, truncated=0.0)
    play.reward[:] = torch.arange(40.0)[:, None]
    theirs, ours = pair(library, play, 16, 3, 1.0, (True, False))
    rows = every_row(theirs, monkeypatch)
    assert rows[0, 38]["rewards"] == 38 + 39 + 24
    assert rows[0, 39]["rewards"] == 39 + 24 + 25
    assert [int(rows[0, t]["effective_n_steps"]) for t in (38, 39)] == [3, 3]
    found = by_start(ours.sample(500))
    assert found[0, 36]["rewards"] == 36 + 37
    assert found[0, 36]["effective_n_steps"] == 2
    assert max(t for _, t in found) == 37


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_hosts_windows_go_on_over_a_reset_in_mid_episode(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``train.py`` resets its envs after each evaluation."""
    play = Play(1, 12, terminal=0.0, truncated=0.0)
    play.reward[:] = torch.arange(12.0)[:, None]
    play.resets[5] = True
    play.next_critic[5, 0, 2] += 1
    theirs, ours = pair(library, play, 16, 3, 1.0, (True, False))
    assert every_row(theirs, monkeypatch)[0, 4]["rewards"] == 4 + 5 + 6
    row = by_start(ours.sample(500))[0, 4]
    assert row["rewards"] == 4 + 5
    assert torch.equal(row["next_observations"], play.next_critic[5, 0, :OBS])


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_host_sums_rewards_beyond_a_truncation_that_is_not_done(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(1, 12, terminal=0.0, truncated=0.0)
    play.reward[:] = torch.arange(12.0)[:, None]
    play.truncations[5] = True
    theirs, ours = pair(library, play, 16, 3, 1.0, (True, False))
    row = every_row(theirs, monkeypatch)[0, 4]
    assert row["rewards"] == 4 + 5 + 6
    assert torch.equal(row["next_observations"], play.next_critic[5, 0, :OBS])  # of the step before
    assert by_start(ours.sample(500))[0, 4]["rewards"] == 4 + 5


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_host_stores_each_observation_twice(library: str) -> None:
    theirs, ours = pair(library, Play(4, 1), 100, 1, 0.9, (False, False))
    held = sum(x.nbytes for x in vars(theirs).values() if isinstance(x, torch.Tensor))
    numbers = OBS + (CRITIC if library == "holosoma" else 0)
    assert held == 4 * 100 * (4 * (2 * numbers + 2 + 1) + 16)
    assert ours.nbytes <= 4 * 101 * (4 * (numbers + 2) + 32 + 8)


def test_the_host_learns_from_reset_observations_on_isaac_lab_and_ours_says_so() -> None:
    """Its wrapper of Isaac Lab has no final observation and passes the one after the reset."""
    play = Play(2, 100, terminal=0.0, truncated=0.05)
    play.next_critic = torch.where(play.dones[..., None], play.critic[1:], play.next_critic)
    with pytest.warns(EpisodeEndWarning, match="bootstrap from a reset"):
        pair("fasttd3", play, 16, 1, 0.9, (False, False))


# -- FastTD3's own training on our buffer -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_fasttd3_learns_on_our_buffer_as_well_as_on_its_own(
    n: int, asymmetric: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # it saves its models in the working directory
    reached = []
    for kind in (buffer_of("fasttd3"), SimpleReplayBuffer):
        rewards = train(kind, asymmetric, total_timesteps=500, num_steps=n)
        first, last = (sum(part) / 50 for part in (rewards[:50], rewards[-50:]))
        reached.append(last)
        assert last > first / 2, (first, last)
    print(f"n={n}, asymmetric={asymmetric}: {reached[0]:.3f} on its own, {reached[1]:.3f} on ours")
    assert reached[1] > reached[0] - 0.1


@pytest.mark.parametrize(("asymmetric", "n"), [(False, 3), (True, 1)])
def test_fasttd3s_training_script_runs_on_our_buffer(
    asymmetric: bool, n: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[SimpleReplayBuffer] = []

    def ours(**options: Any) -> SimpleReplayBuffer:
        made.append(SimpleReplayBuffer(**options))
        return made[-1]

    train(ours, asymmetric, total_timesteps=30, num_steps=n, learning_starts=0)
    assert made[0].ptr == 30
    assert made[0].playground_mode is asymmetric
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".pt"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_training_on_the_same_draws_ends_with_the_same_weights(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FastTD3's own, of one env. First it runs on ours, which is asked for its draws; then on its own, given them."""
    asymmetric, drawn = library == "holosoma", list[torch.Tensor]()
    unknown = {"asymmetric_obs", "playground_mode"} if library == "holosoma" else set[str]()

    def given(options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name not in unknown}

    def made(**options: Any) -> Any:
        buffer = OURS[library](**given(options), seed=0)
        places: dict[bytes, int] = {}
        extend, sample = buffer.extend, buffer.sample

        def stored(step: Any) -> None:
            places[step["observations"].numpy().tobytes()] = buffer.ptr % buffer.buffer_size
            extend(step)

        def noted(batch_size: int) -> Any:
            batch = sample(batch_size)
            drawn.append(torch.tensor([[places[row.numpy().tobytes()] for row in batch["observations"]]]))
            return batch

        buffer.extend, buffer.sample = stored, noted
        return buffer

    class Told(buffer_of(library)):
        def __init__(self, **options: Any) -> None:
            super().__init__(**given(options))

        def sample(self, batch_size: int) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "randint", lambda *_, **__: draws.pop(0))
                return super().sample(batch_size)

    ends = []
    for kind in (made, Told):
        draws = list(drawn)
        folder = tmp_path / kind.__name__
        folder.mkdir()
        monkeypatch.chdir(folder)  # it saves its models in the working directory
        options = {"total_timesteps": 120, "num_steps": 1, "buffer_size": 50, "batch_size": 64, "eval_interval": 10**6}
        rewards = train(kind, asymmetric, num_envs=1, **options)
        (saved,) = (folder / "models").iterdir()
        ends.append((rewards, torch.load(saved, weights_only=False)))
    assert not draws
    (one, first), (other, last) = ends
    assert one == other
    assert drawn
    for part in ("actor_state_dict", "qnet_state_dict"):
        for name, value in first[part].items():
            assert torch.equal(value, last[part][name]), (part, name)
