"""Everything that looks at experience, over every kind of buffer that can be made: it works, and it is right."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import relive
from relive.cli import app
from relive.look.inspection import export
from relive.look.page import page
from support import kinds, loops
from support.cases import covering
from support.effort import QUICK
from support.kinds import DRESSES, HOMES, MISTAKES, kind, seen

pytestmark = pytest.mark.filterwarnings("error")


def sure(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings if finding.sure != "possible"}


@pytest.mark.parametrize(("home", "dress"), covering(HOMES, DRESSES, full=2, quick=1))
def test_what_is_stored_rightly_is_clean_and_is_shown_as_it_is(home: str, dress: str, tmp_path: Path) -> None:
    with kind(home, dress, tmp_path) as (source, rows):
        report, found = relive.audit(source), relive.inspect(source)
        assert not report.findings, str(report)
        ends = rows["terminated"] | rows["truncated"]
        rewards = rows["reward"].astype(np.float64)
        if HOMES[home].whole:
            assert (report.rows, report.episodes) == (rewards.size, ends.sum())
            assert found.experience.reward.astype(np.float64).sum() == pytest.approx(rewards.sum(), rel=1e-6)
        if HOMES[home].whole and HOMES[home].ordered:
            assert_returns(found, rewards, ends)
        stored = kinds.first(DRESSES[dress].of(rows["obs"]))
        facts = next(facts for facts in found.fields if facts.name.startswith("obs"))
        if HOMES[home].whole and facts.min is not None:
            assert (facts.min, facts.max) == (stored.min(), stored.max())
        if home != "npz":
            declared = dress == "bfloat16" and home != "arrays"  # which has no schema to say so
            assert facts.dtype == ("bfloat16" if declared else str(stored.dtype))
            assert facts.nbytes == report.rows * stored[0, 0].size * (2 if declared else stored.itemsize)


def assert_returns(found: Any, rewards: Any, ends: Any) -> None:
    """The table of episodes has those of the play, env by env."""
    at, expected = 0, list[float]()
    for env in range(rewards.shape[1]):
        cuts = np.flatnonzero(ends[:, env])
        expected += [float(rewards[a:b, env].sum()) for a, b in zip([0, *cuts + 1], [*cuts + 1, len(rewards)],
                                                                     strict=True) if a < b]  # fmt: skip
        at += len(rewards)
    assert at == found.num_steps
    assert found.episodes["return"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("home", "dress", "mistake"), covering(HOMES, DRESSES, MISTAKES, full=1))
def test_a_mistake_is_found_in_every_kind_that_shows_it(home: str, dress: str, mistake: str, tmp_path: Path) -> None:
    with kind(home, dress, tmp_path, mistake) as (source, _):
        report = relive.audit(source)
    if seen(home, dress, mistake) or HOMES[home].whole:  # a part of the rows may show it or not
        assert (MISTAKES[mistake] in sure(report)) == seen(home, dress, mistake), str(report)


OF_EACH_PANEL = {"arrays", "rollout", "replay", "prioritized", "monitor", "save with counts"}
"""Homes whose figures have every panel that there is: ``make test`` draws the others without writing them to a file."""


@pytest.mark.parametrize(("home", "dress"), covering(HOMES, DRESSES, full=1))
def test_every_page_and_figure_can_be_made(home: str, dress: str, tmp_path: Path) -> None:
    with kind(home, dress, tmp_path, "not finite") as (source, _):
        show_everything(source, tmp_path, written=home in OF_EACH_PANEL or not QUICK)


def show_everything(source: Any, folder: Path, plotted: bool = True, written: bool = True) -> None:
    report, found = relive.audit(source), relive.inspect(source)
    assert json.loads(report.to_json())["rows"] == json.loads(found.to_json())["num_steps"] == len(found.experience)
    for shown in (report, found):
        assert str(shown)
        assert '<div class="relive">' in shown._repr_html_()
    assert "not-finite" in page(found, report, 0 if len(found.episodes["start"]) else None) or not report.rows
    if found.num_steps:
        assert len(found.steps(0, 1)["reward"]) == 1
    if find_spec("matplotlib") and plotted:
        found.plot(folder / "found.svg" if written else None)
    if find_spec("pandas"):
        assert len(found.to_pandas()) == found.num_steps
    if find_spec("rerun"):
        export(found, folder / "found.rrd", report)
    inside = getattr(source, "replay", source)
    if isinstance(inside, relive.ReplayBuffer):
        monitor = source if isinstance(source, relive.Monitor) else relive.Monitor(inside, counts=True)
        assert monitor.scalars()["size"] == inside.stats()["size"]
        assert (monitor.draws(found.experience.place) >= -1).all()
    if isinstance(source, Path):
        with_page = ["inspect", str(source), "--html", str(folder / "page.html"), "--json"]
        for command in (["audit", str(source), "--json"], with_page, ["inspect", str(source)], ["audit", str(source)]):
            answer = CliRunner().invoke(app, command)
            assert answer.exit_code in (0, 1), answer.output
            assert "--json" not in command or json.loads(answer.output)


@pytest.mark.parametrize("home", [home for home in HOMES if home not in ("arrays", "npz")])
def test_what_is_empty_can_be_looked_at(home: str, tmp_path: Path) -> None:
    if home.startswith(("rollout", "save of a rollout")):
        made: Any = relive.RolloutBuffer(kinds.schema_of(DRESSES["nested"], value=(2,)), 5, 2, seed=0)
    elif "files" in home:
        schema = kinds.schema_of(DRESSES["nested"])
        made = relive.ReplayBuffer.open(tmp_path / "files", schema, 50, num_envs=2, seed=0)
    else:
        made = relive.ReplayBuffer(kinds.schema_of(DRESSES["nested"]), 50, 2, seed=0)
    source = kinds.saved(made, tmp_path) if home.startswith("save") else made
    report = relive.audit(source)
    assert (report.rows, report.findings) == (0, ())
    show_everything(source, tmp_path, plotted=False)


# -- heads ----------------------------------------------------------------------------------------------------------

TARGETS = {
    "late": "advantage-over-an-end",
    "before": "bootstrap-before-the-step",
    "terminal": "truncation-without-bootstrap",
    "next": "bootstrap-from-the-next-episode",
    "open": "rollout-end-without-bootstrap",
}


def heads(*mistakes: str, swapped: bool = False, lam: float = 0.9) -> dict[str, Any]:
    """A rollout of a head for each of the mistakes, ``""`` for none: of the reward, and of costs, multiples of it."""
    alone = [loops.rollout(mistake, lam=lam) for mistake in mistakes]
    found = {name: x for name, x in alone[0].items() if name not in ("value", "advantage", "final_value")}
    order = range(len(mistakes))[::-1] if swapped else range(len(mistakes))
    for name in ("value", "final_value"):
        found[name] = np.stack([(k + 1) * alone[k][name] for k in order], -1)
    for k in range(len(mistakes)):
        found["advantage" if k == 0 else f"cost{k}_advantage"] = (k + 1) * alone[k]["advantage"]
        if k:
            found[f"cost{k}"] = (k + 1) * found["reward"]
    return found


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("mistake", ["", *TARGETS])
def test_a_mistake_of_one_head_is_found_in_that_head(mistake: str, swapped: bool) -> None:
    report = relive.audit(heads("", mistake, swapped=swapped))
    wrong = 0 if swapped else 1
    expected = [(TARGETS[mistake], f"value[{wrong}]")] if mistake else []
    assert [(finding.rule, finding.field) for finding in report.findings] == expected, str(report)
    assert all(f"head {wrong} of 'value', of 'cost1'" in finding.what for finding in report.findings)


def test_two_heads_with_two_mistakes_give_two_findings() -> None:
    report = relive.audit(heads("terminal", "", "terminal", lam=1.0))
    assert [(finding.rule, finding.field) for finding in report.findings] == [
        ("truncation-without-bootstrap", "value[0]"), ("truncation-without-bootstrap", "value[2]")]  # fmt: skip


def test_a_head_whose_advantages_are_of_another_kind_says_so_and_the_others_are_judged() -> None:
    rows = heads("", "terminal")
    rows["advantage"] = (rows["advantage"] - 3) / 7
    report = relive.audit(rows)
    assert sure(report) == {"truncation-without-bootstrap"}
    assert any("head 0 of 'value', of 'reward': advantages are not those" in lack for lack in report.lacks)


def test_a_value_of_a_head_one_step_off_is_found_and_a_critic_has_an_answer_for_each_head() -> None:
    rows = heads("", "")
    critic = lambda obs: np.stack([k * loops.value_of(np.asarray(obs)) for k in (1, 2)], -1)  # noqa: E731
    for swapped in (False, True):
        right = heads("", "", swapped=swapped)
        named = {finding.rule for finding in relive.audit(right, critic=critic).findings}
        assert named == ({"value-of-another-observation"} if swapped else set())
    rows["value"][..., 1] = np.roll(rows["value"][..., 1], -1, 0)
    for options in ({}, {"critic": critic}):
        found = [(f.rule, f.field) for f in relive.audit(rows, **options).findings if f.sure != "possible"]
        assert found == [("value-one-step-off", "value[1]")]
    with pytest.raises(relive.errors.ParameterError, match="critic: expected 2 numbers, one of each head"):
        relive.audit(rows, critic=lambda obs: loops.value_of(np.asarray(obs)))


def test_a_final_value_that_one_head_lacks_is_missed() -> None:
    rows = heads("", "")
    rows["final_value"][..., 1] = np.nan
    assert "truncation-without-final-observation" in sure(relive.audit(rows))


# -- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool", "float16", "float64"])
def test_rewards_of_any_dtype_are_judged_alike(dtype: str) -> None:
    rows = kinds.play()
    rows["reward"] = (rows["reward"] > 1.2 if dtype == "bool" else 100 * rows["reward"]).astype(dtype)
    assert not relive.audit(rows).findings
    late = {**rows, "reward": np.roll(rows["reward"], 1, 0)}
    assert sure(relive.audit(late)) == {"reward-one-step-off"}
    quiet = {**rows, "reward": np.where(np.arange(rows["reward"].shape[1]) == 1, rows["reward"][:1], rows["reward"])}
    assert relive.audit(quiet).rows == rows["reward"].size


@pytest.mark.parametrize("shape", [(1,), (2,), "nested"])
def test_rewards_of_several_numbers_are_looked_at_as_their_sums(shape: Any) -> None:
    rows = kinds.play()
    plain = relive.inspect(rows)
    given: Any = {"a": rows["reward"], "b": rows["reward"]}
    if shape != "nested":
        given = np.stack([rows["reward"]] * shape[0], -1)
    found, report = relive.inspect({**rows, "reward": given}), relive.audit({**rows, "reward": given})
    times = 1 if shape == (1,) else 2
    assert found.episodes["return"] == pytest.approx(times * plain.episodes["return"])
    assert any("their sums" in lack for lack in report.lacks) == (times == 2)
    names = {"nested": {"reward", "reward.a", "reward.b"}, (2,): {"reward", "reward.0", "reward.1"}}
    assert {facts.name for facts in found.fields if facts.name.startswith("reward")} == names.get(shape, {"reward"})


def test_infinite_imaginary_parts_are_found_and_parts_are_learned_from() -> None:
    rows = kinds.play()
    for name in ("obs", "next_obs"):
        rows[name] = kinds.DRESSES["complex"].of(rows[name])
    assert not relive.audit(rows).findings
    rows["obs"][3, 1, 0] = complex(1.0, np.inf)
    assert "not-finite" in sure(relive.audit(rows))


def test_a_mixture_is_named_with_its_buffers_and_stacked_frames_are_shown(tmp_path: Path) -> None:
    made = kinds.stacked(tmp_path)
    with pytest.raises(relive.errors.FieldError, match="pass one of its buffers: a"):
        relive.audit(relive.Mixture({"a": made}, {"a": 1}))
    for source in (made, kinds.saved(made, tmp_path)):
        assert not relive.audit(source).findings
        assert "data:image/png" in page(relive.inspect(source), relive.audit(source))
