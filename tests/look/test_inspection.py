"""What an inspection says, beside the episodes that the steps were made from."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from hashlib import sha256
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import relive
from relive import Field, Prioritized, ReplayBuffer, RolloutBuffer, Schema, errors
from relive.cli import app
from relive.look.experience import number
from support import loops

SCHEMA = Schema({
    "obs": (3,), "action": (2,), "reward": (), "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def filled(episodes: list[Any], capacity: int = 10_000, **kwargs: Any) -> ReplayBuffer:
    replay = ReplayBuffer(SCHEMA, capacity, seed=0, **kwargs)
    for episode in episodes:
        fields = {name: x for name, x in episode.items() if name != "obs"}
        after = {"next_obs": episode["obs"][1:]}
        replay.extend({k: v[:, None] for k, v in {**fields, **after, "obs": episode["obs"][:-1]}.items()})
    return replay


def truth(episodes: list[Any]) -> tuple[list[int], list[float]]:
    return [len(e["reward"]) for e in episodes], [float(e["reward"].astype(np.float64).sum()) for e in episodes]


@pytest.mark.parametrize("own", [False, True])
def test_the_table_of_episodes_is_that_of_the_play(own: bool) -> None:
    episodes = loops.walk(20)
    found = relive.inspect(filled(episodes, own_next_obs=own))
    lengths, returns = truth(episodes)
    assert found.episodes["length"].tolist() == lengths
    assert found.episodes["return"] == pytest.approx(returns)
    assert found.episodes["terminated"].tolist() == [bool(e["terminated"][-1]) for e in episodes]
    assert found.episodes["complete"].all()
    assert found.returns is not None
    assert found.returns["p50"] == pytest.approx(np.quantile(returns, 0.5))
    assert found.truncated_share == pytest.approx(np.mean([e["truncated"][-1] for e in episodes]))
    third = found.episode(3)
    np.testing.assert_array_equal(third["obs"], episodes[3]["obs"][:-1])
    np.testing.assert_array_equal(third["reward"], episodes[3]["reward"])
    assert third["step"].tolist() == list(range(sum(lengths[:3]), sum(lengths[:4])))


def test_an_episode_whose_start_was_overwritten_or_that_goes_on_is_not_complete() -> None:
    episodes = loops.walk(20)
    replay = filled(episodes, 100)
    replay.add(obs=np.zeros(3), action=np.zeros(2), reward=1.0, terminated=False, truncated=False)
    replay.add(obs=np.zeros(3), action=np.zeros(2), reward=1.0, terminated=False, truncated=False)
    found = relive.inspect(replay)
    complete = found.episodes["complete"]
    assert not complete[0]
    assert not complete[-1]
    lengths, returns = truth(episodes)
    kept = int(complete.sum())
    assert found.episodes["length"][complete].tolist() == lengths[-kept:]
    assert found.episodes["return"][complete] == pytest.approx(returns[-kept:])
    ages = replay.stats()
    assert found.ages is not None
    assert found.ages["mean"] == pytest.approx(ages["age_mean"])
    assert found.ages["max"] == ages["age_max"]


def test_arrays_begin_with_an_episode() -> None:
    episodes = loops.walk(9)
    found = relive.inspect(loops.stored(episodes))
    assert found.episodes["length"].tolist() == truth(episodes)[0]
    assert found.episodes["complete"].all()
    assert found.ages is None
    assert found.priorities is None


def test_transitions_without_order_have_no_episodes() -> None:
    found = relive.inspect(filled(loops.walk(5), ordered=False))
    assert found.returns is None
    assert len(found.episodes["start"]) == 0
    assert "no order" in str(found)


def test_fields_priorities_and_an_empty_replay() -> None:
    episodes = loops.walk(6)
    episodes[2]["reward"][0] = np.nan
    replay = filled(episodes, sampler=Prioritized())
    found = relive.inspect(replay)
    facts = {f.name: f for f in found.fields}
    rewards = np.concatenate([e["reward"] for e in episodes])
    assert (facts["reward"].not_finite, facts["obs"].shape, facts["obs"].dtype) == (1, (3,), "float32")
    assert facts["reward"].max == pytest.approx(np.nanmax(rewards))
    assert facts["obs"].nbytes == found.num_steps * 12
    assert found.priorities is not None
    json.loads(found.to_json())
    assert relive.audit(ReplayBuffer(SCHEMA, 10, seed=0)).ok
    empty = relive.inspect(ReplayBuffer(SCHEMA, 10, seed=0))
    assert (empty.num_steps, empty.returns, empty.truncated_share) == (0, None, None)
    json.loads(empty.to_json())


def test_a_rollout_is_inspected() -> None:
    rollout = RolloutBuffer(SCHEMA, num_steps=6, num_envs=2, seed=0)
    for t in range(6):
        rollout.add(obs=np.full((2, 3), t), action=np.zeros((2, 2)), reward=np.ones(2),
                    terminated=np.array([t == 2, t == 4]), truncated=np.zeros(2, bool))  # fmt: skip
    found = relive.inspect(rollout)
    assert found.episodes["length"].tolist() == [3, 3, 5, 1]
    assert not found.episodes["complete"].any()  # whether the first rows begin episodes is not known


def test_the_commands_cut_no_name_and_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arrays = loops.stored(loops.walk(30))
    ended = arrays["terminated"] | arrays["truncated"]
    arrays["next_obs"][:-1][ended[:-1]] = arrays["obs"][1:][ended[:-1]]
    np.savez(tmp_path / "loop[1].npz", **arrays)
    audited = CliRunner().invoke(app, ["audit", str(tmp_path / "loop[1].npz")])
    assert audited.exit_code == 1, audited.output
    assert "reset-as-final-observation" in audited.output
    assert "loop[1].npz" in audited.output.replace("\n", "")
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / "loop[1].npz"), "--steps", "0:2"])
    assert inspected.exit_code == 0, inspected.output
    for shown in (audited.output, inspected.output):
        assert "…" not in shown


def test_the_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"relive {relive.__version__}\n"


def test_the_command(tmp_path: Path) -> None:
    episodes, runner = loops.walk(8), CliRunner()
    filled(episodes, sampler=Prioritized()).save(tmp_path / "save")
    shown = runner.invoke(app, ["inspect", str(tmp_path / "save"), "--episode", "2"])
    assert shown.exit_code == 0, shown.output
    assert "8 stored as a whole" in shown.output
    done = runner.invoke(app, ["inspect", str(tmp_path / "save"), "--json", "--steps", "3:5"])
    found = json.loads(done.output)
    assert found["chosen"]["step"] == [3, 4]
    assert found["episodes"]["length"] == truth(episodes)[0]
    for wrong in (["--steps", "5"], ["--steps", "9:2"], ["--episode", "99"], ["--episode", "1", "--steps", "1:2"]):
        failed = runner.invoke(app, ["inspect", str(tmp_path / "save"), *wrong])
        assert failed.exit_code == 2
        assert "expected" in failed.output
    assert runner.invoke(app, ["inspect", str(tmp_path / "none")]).exit_code == 2


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sources = {
        "probability of being drawn": filled(loops.walk(4), sampler=Prioritized()),
        "age: transitions completed later": filled(loops.walk(4)),
        "return of a whole episode": loops.stored(loops.walk(2)),
    }
    for last, source in sources.items():
        found = relive.inspect(source)
        returns, lengths, rewards, *others = found.plot().axes
        assert len(others) == 1
        assert last in (others[0].get_xlabel(), others[0].get_ylabel())
        whole = found.episodes["complete"]
        assert np.array_equal(returns.collections[0].get_offsets()[:, 1], found.episodes["return"][whole])
        assert sum(bar.get_height() for bar in lengths.patches) == whole.sum()
        assert sum(bar.get_height() for bar in rewards.patches) == found.num_steps
    found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    relive.inspect(ReplayBuffer(SCHEMA, 10, seed=0)).plot(tmp_path / "empty.pdf")
    assert (tmp_path / "empty.pdf").read_bytes().startswith(b"%PDF")


def test_positions_that_are_not_there_are_refused() -> None:
    found = relive.inspect(loops.stored(loops.walk(2)))
    with pytest.raises(errors.ParameterError, match="0 <= start < stop"):
        found.steps(0, 10**6)
    with pytest.raises(errors.ParameterError, match="episode: expected a number from 0"):
        found.episode(2)
    with pytest.raises(errors.FieldError, match="not known"):
        relive.inspect(3)
    with pytest.raises(errors.FieldError, match="pass one of its buffers: old, new"):
        relive.inspect(relive.Mixture({"old": cart(), "new": cart()}, {"old": 1, "new": 1}))


def cart(images: bool = False) -> ReplayBuffer:
    episodes = loops.walk(6)
    if not images:
        return filled(episodes, sampler=Prioritized())
    flags = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
    schema = Schema({"obs": {"camera": Field((12, 10, 3), torch.uint8), "far": (100,)}, "reward": (), **flags})
    replay = ReplayBuffer(schema, 100, num_envs=2)
    for t in range(9):
        camera = np.full((2, 12, 10, 3), t, np.uint8)
        obs = {"camera": camera, "far": np.zeros((2, 100), np.float32)}
        ended = np.array([t == 4, False])
        replay.add(
            obs=obs,
            reward=np.full(2, t if t != 3 else np.nan, np.float32),
            terminated=ended,
            truncated=ended & False,
            next_obs=obs,
        )
    return replay


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the command line writes of a save with images; it is made once."""
    pytest.importorskip("PIL")
    folder = tmp_path_factory.mktemp("page")
    cart(images=True).save(folder / "<b>save")
    result = CliRunner().invoke(app, ["inspect", str(folder / "<b>save"), "--html", str(folder / "page.html")])
    assert result.exit_code == 0, result.output
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_page_has_everything_and_escapes_what_is_foreign(page: str) -> None:
    assert "<b>save" not in page
    assert "&lt;b&gt;save" in page
    order = "mistake</h2>", "not-finite", "<h2>Figures", "<h2>Fields", "<h2>Step by step", "<h2>Episodes"
    assert sorted(order, key=page.index) == list(order)  # the finding comes first
    assert f"<footer>relive {relive.__version__}, 20" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.findall(r"https?://", page)
    assert "<link" not in page


def shown_in(page: str) -> list[dict[str, Any]]:
    """The episodes that a page shows step by step."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_a_page_shows_steps_with_their_images_and_marks_those_that_the_audit_names(page: str) -> None:
    from PIL import Image

    found = relive.inspect(cart(images=True))
    shown = shown_in(page)
    assert len({episode["name"] for episode in shown}) == len(shown) >= 2
    marks: set[int] = set()
    for episode in shown:
        first, length = episode["first"], len(episode["rewards"])
        marks |= {int(row) for row in episode["marks"]}
        stored = found.steps(first, first + length)
        rewards = [np.nan if reward is None else reward for reward in episode["rewards"]]
        assert np.array_equal(rewards, stored["reward"], equal_nan=True)
        assert episode["values"]["terminated"] == [str(flag) for flag in stored["terminated"].tolist()]
        assert "obs.far" not in episode["values"]  # a hundred numbers
        images = [BytesIO(b64decode(link.removeprefix("data:image/png;base64,")))
                  for link in episode["pictures"]["obs.camera"]]  # fmt: skip
        assert np.array_equal([np.asarray(Image.open(image)) for image in images], stored["obs.camera"])
    assert marks == set(np.flatnonzero(np.isnan(found.steps(0, found.num_steps)["reward"])).tolist())
    assert {int(row) for row in re.findall(r'data-row="(\d+)"', page)} == marks


def test_a_page_shows_a_part_of_what_is_long_or_large(monkeypatch: pytest.MonkeyPatch) -> None:
    from relive.look import page as pages

    count = 1000
    fields = {
        "obs": np.random.default_rng(0).integers(0, 255, (count, 20, 20), np.uint8),
        "reward": np.ones(count),
        "terminated": np.arange(count) == 999,
    }
    fields["reward"][700] = np.nan
    found = relive.inspect(fields)
    report = relive.audit(found.experience)
    (episode,) = shown_in(pages.page(found, report))
    assert (episode["first"], episode["before"], len(episode["rewards"])) == (650, 650, pages.STEPS)
    assert episode["steps"] == 1000
    monkeypatch.setattr(pages, "IMAGE_BYTES", sum(map(len, episode["pictures"]["obs"][:20])))
    (episode,) = shown_in(pages.page(found, report))
    assert len(episode["rewards"]) == len(episode["pictures"]["obs"]) == 20


def test_fields_of_few_numbers_have_a_line_for_each(page: str) -> None:
    found = relive.inspect(cart())
    part = found._repr_html_()
    steps = found.steps(0, found.num_steps)
    for place in range(3):
        assert f"<b>[{place}]</b>" in part
        assert f">{number(float(steps['obs'][:, place].max()))}</td>" in part
    assert "<b>[0]</b>" not in page  # of images and of a hundred numbers


def test_parts_for_notebooks_show_themselves() -> None:
    arrays = loops.stored(loops.walk(5))
    arrays["reward"][2] = np.nan
    for part in (relive.inspect(cart())._repr_html_(), relive.audit(arrays)._repr_html_()):
        assert part.startswith('<div class="relive">')
        assert "<html" not in part
        assert "<script" not in part
        assert "<button" not in part
    assert "not-finite" in relive.audit(arrays)._repr_html_()
    table = Schema({"<b>": (3,)}, max_episode_steps=500)._repr_html_()
    assert "&lt;b&gt;" in table
    assert "float32[3], 12 bytes" in table
    assert "episodes of up to 500 steps" in table


def test_sources_without_steps_or_order_have_pages() -> None:
    from relive.look.page import page as made

    for replay in (ReplayBuffer(SCHEMA, 10, seed=0), filled(loops.walk(5), ordered=False)):
        found = relive.inspect(replay)
        text = made(found, relive.audit(found.experience))
        assert ("Step by step" in text) == bool(found.num_steps)
        if found.num_steps:
            assert [episode["first"] for episode in shown_in(text)] == [0]


class Used(HTMLParser):
    """What a page uses that a policy can forbid."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.order: list[str] = []
        self.policy, self.attributes = "", set[tuple[str, str]]()
        self.texts: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        tag = "data" if given.get("type") == "application/json" else tag  # no browser runs that
        self.order.append("policy" if given.get("http-equiv") == "Content-Security-Policy" else tag)
        if self.order[-1] == "policy":
            self.policy = given["content"]
        self.attributes |= set(given.items())

    def handle_data(self, data: str) -> None:
        if self.order and self.order[-1] in self.texts and data.strip():
            self.texts[self.order[-1]].append(data)


def test_a_page_allows_no_more_than_it_uses(page: str) -> None:
    used = Used(page)
    directives = dict(part.strip().split(" ", 1) for part in used.policy.split(";"))
    hashes = {tag: " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
              for tag, texts in used.texts.items()}  # fmt: skip
    assert directives == {
        "default-src": "'none'", "style-src": hashes["style"], "script-src": hashes["script"], "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert used.order.count("style") == used.order.count("script") == 1
    assert used.order.index("policy") < used.order.index("style")
    assert not {"img", "image", "link", "iframe", "object", "base", "form"} & set(used.order)
    for name, value in used.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "action", "style", "href")
        assert "url(" not in value


def chunks(path: Path) -> dict[str, list[Any]]:
    reader = pytest.importorskip("rerun.chunk").RrdReader(str(path))
    found: dict[str, list[Any]] = {}
    for chunk in reader.stream():
        found.setdefault(chunk.entity_path, []).append(chunk)
    return found


def test_a_recording_has_every_step_on_three_timelines(tmp_path: Path) -> None:
    pytest.importorskip("rerun")
    replay = cart()
    replay.save(tmp_path / "save")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "save"), "--rerun", str(tmp_path / "x.rrd")])
    assert result.exit_code == 0, result.output
    found = chunks(tmp_path / "x.rrd")
    (reward,) = found["/env_0/reward"]
    assert set(reward.timeline_names) == {"write_order", "episode", "step"}
    batch = reward.to_record_batch().to_pydict()
    steps = replay.to_pandas()
    assert batch["step"] == steps["step"].tolist()
    assert batch["episode"] == steps["episode"].tolist()
    assert sorted(batch["write_order"]) == list(range(len(replay)))
    assert np.concatenate(batch["Scalars:scalars"]).tolist() == steps["reward"].tolist()
    assert sum(chunk.num_rows for chunk in found["/env_0/obs"]) == len(replay)


def test_a_recording_shows_images_and_findings_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    pytest.importorskip("rerun")
    from relive.look.inspection import export

    replay = cart(images=True)
    found = relive.inspect(replay)
    report = relive.audit(found.experience)
    assert report.findings
    assert export(found, tmp_path / "x.rrd", report) == ("obs/far",)
    recorded = chunks(tmp_path / "x.rrd")
    images = [chunk for chunk in recorded["/env_1/obs/camera"] if not chunk.is_static]
    assert sum(chunk.num_rows for chunk in images) == 8
    assert "/audit" in recorded
    with pytest.raises(errors.ParameterError, match=r"ends in \.rrd"):
        export(found, tmp_path / "x.txt")


def test_an_inspection_is_a_table_and_a_figure() -> None:
    pytest.importorskip("pandas")
    found = relive.inspect(cart())
    table = found.to_pandas()
    assert table["reward"].tolist() == found.experience.reward.tolist()
    assert list(table.columns[:3]) == ["step", "env", "obs.0"]
    assert len(found.plot().axes) == 4
