"""Lengths are compared within each episode: one that is short and another that is long do not make up for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relive.errors import ReliveError, ShapeError
from relive.exchange import from_minari, from_rlds

EPISODES, STEPS = 4, 6


def episode(change: str = "", by: int = 0) -> dict[str, Any]:
    """The arrays of an episode, one of which is ``by`` rows longer."""
    sizes = {"obs": STEPS + 1, "action": STEPS, "reward": STEPS, "terminated": STEPS, "truncated": STEPS, "cost": STEPS}
    sizes |= {change: sizes[change] + by} if change else {}
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {name: rng.normal(size=(size, 2)).astype(np.float32) for name, size in sizes.items()}
    made |= {name: made[name][:, 0] for name in ("reward", "cost")}
    return made | {name: np.zeros(sizes[name], bool) for name in ("terminated", "truncated")}


def minari(episodes: list[dict[str, Any]]) -> SimpleNamespace:
    def read(one: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(
            observations={"state": one["obs"]}, actions=(one["action"],), rewards=one["reward"],
            terminations=one["terminated"], truncations=one["truncated"], infos={"deep": {"cost": one["cost"]}},
        )  # fmt: skip

    return SimpleNamespace(id="it-v0", iterate_episodes=lambda: map(read, episodes))


def rlds(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def read(one: dict[str, Any]) -> dict[str, Any]:
        rows = np.arange(len(one["terminated"]) + 1)
        steps = {name: np.append(one[name], one[name][:1], 0) for name in ("action", "reward", "cost")}
        steps |= {"is_first": rows == 0, "is_last": rows == rows[-1], "is_terminal": rows < 0}
        return {"steps": steps | {"observation": {"state": one["obs"]}}}

    return [read(one) for one in episodes]


@pytest.mark.parametrize("by", [-1, 1, -5, 2])
@pytest.mark.parametrize("name", ["obs", "action", "reward", "terminated", "truncated", "cost"])
@pytest.mark.parametrize("form", [minari, rlds])
def test_an_episode_with_a_row_too_few_or_too_many_is_named(form: Any, name: str, by: int) -> None:
    if form is rlds and name == "truncated":
        pytest.skip("it has no such flags")
    if form is minari and (name, by) == ("cost", 1):
        pytest.skip("the info of the reset comes before those of the steps")
    read: Any = {minari: from_minari, rlds: from_rlds}[form]
    good = episode()
    assert len(read(form([good] * EPISODES))) == EPISODES * STEPS
    for other in (good, episode(name, -by)):  # with the second one, all numbers add up
        with pytest.raises(ReliveError, match=r"^episode 1 of the (Minari|RLDS) data set") as raised:
            read(form([good, episode(name, by), other, good]))
        assert str(STEPS) in str(raised.value) or str(STEPS + 1) in str(raised.value)


def test_the_message_says_the_field_and_both_numbers() -> None:
    one = minari([episode(), episode("obs", -1)])
    with pytest.raises(ShapeError, match=r"expected 7 rows of 'obs\.state', one more than rewards, got 6; leave the"):
        from_minari(one)
    with pytest.raises(ShapeError, match=r"its info 'deep\.cost' has the shape \(4,\); expected 6 rows"):
        from_minari(minari([episode("cost", -2)]))


def test_the_info_of_a_reset_is_no_step() -> None:
    with_reset = episode("cost", 1)
    log = from_minari(minari([episode(), with_reset]))
    np.testing.assert_array_equal(log.fields["deep"]["cost"], [*episode()["cost"], *with_reset["cost"][1:]])
    assert log.lacks == ()


def test_infos_that_cannot_be_fields_are_named() -> None:
    data = minari([episode(), episode()])
    episodes = list(data.iterate_episodes())
    episodes[0].infos |= {"words": ["a"] * 6, "reward": np.ones(6), "wide": np.ones((6, 2)), "once": np.ones(6)}
    episodes[1].infos |= {"words": ["b"] * 6, "reward": np.ones(6), "wide": np.ones((6, 3)), "deep.cost.x": np.ones(6)}
    log = from_minari(SimpleNamespace(id="it-v0", iterate_episodes=lambda: episodes))
    assert sorted(lack.split("'")[1] for lack in log.lacks) == ["deep.cost.x", "once", "reward", "wide", "words"]
    assert log.fields["deep"]["cost"].shape == (12,)
