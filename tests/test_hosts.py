"""What `make hosts` rests on: arguments compared, classes put in place, and a table that turns red."""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from compat import stable_baselines3_stand_in as stand_in
from hosts import in_place, run, table
from hosts.in_place import put_in_place
from hosts.libraries import HOSTS, named
from hosts.signatures import lacking
from relive.compat import embodichain

ROOT = Path(__file__).resolve().parents[1]
EXTRA = inspect.Parameter("planted", inspect.Parameter.KEYWORD_ONLY, default=None)


def like(call: Any, *planted: inspect.Parameter) -> Any:
    """A function that shows the arguments of another, and those that are planted."""

    def made(*_: Any, **__: Any) -> None: ...

    shown = inspect.signature(call)
    vars(made)["__signature__"] = shown.replace(parameters=[*shown.parameters.values(), *planted])
    return made


def hosts_class(ours: Any, planted: str = "", **members: Any) -> Any:
    """What stands in for a host's class or function: ours, with an argument planted into one of its methods."""
    if not inspect.isclass(ours):
        return like(ours, *[EXTRA] * bool(planted))
    names = [name for name in dir(ours) if not name.startswith("_") and inspect.isfunction(getattr(ours, name))]
    made: dict[str, Any] = {name: like(getattr(ours, name), *[EXTRA] * (name == planted)) for name in names}
    init = like(ours.__init__, *[EXTRA] * (planted == "__init__"))
    return type("Class", (), made | {"__init__": init, "__module__": "host.buffers"} | members)


def result(**changes: Any) -> dict[str, Any]:
    """Of a host that is as it should be, but for the changes."""
    suite = {"own": 9, "failed_on_its_own": 0, "ours": 8, "made": 4, "by_decision": ["a"], "fallen": []}
    beside = {"passed": 3, "by_decision": [], "fallen": []}
    made = {"release": "1.2", "pinned_by": "", "tried": "2026-11-29", "versions": {}, "tests_of": "v1.2"}
    return deepcopy(made | {"suite": suite, "beside": beside, "lacking": []} | changes)


@pytest.mark.parametrize("name", sorted(HOSTS.keys() - {"sb3_contrib", "skrl"}))  # derive from their hosts' classes
def test_an_argument_that_a_host_gets_is_named(name: str) -> None:
    context = stand_in.installed() if name == "stable_baselines3" else nullcontext()
    with context:
        for path, ours in HOSTS[name].pairs.items():
            mine = named(ours)
            if inspect.isfunction(mine) and name == "holosoma":
                continue  # a function in place of a class: see below
            assert lacking(path, hosts_class(mine), mine) == []
            found = lacking(path, hosts_class(mine, "__init__"), mine)
            assert found == [f"{path}(planted=): no such argument here"]


@pytest.mark.parametrize("method", ["extend", "sample"])
def test_a_function_in_place_of_a_class_is_held_to_the_class_that_it_makes(method: str) -> None:
    ours, made = (named(f"relive.compat.fasttd3:{x}") for x in ("HolosomaReplayBuffer", "SimpleReplayBuffer"))
    kind = hosts_class(made, method, __init__=lambda self: None)
    assert lacking("Class", kind, ours) == [f"Class.{method}(planted=): no such argument here"]


def test_methods_places_defaults_and_nested_classes_are_compared() -> None:
    class Ours:
        class Step:
            def clear(self) -> None: ...

        def add(self, obs: int, action: int = 0, *, seed: int = 1, more: int = 2) -> None: ...

        def all(self, **options: Any) -> None: ...

    def add(self: Any, action: int, obs: int, seed: int = 2) -> None: ...

    def with_new(self: Any, new: int) -> None: ...

    step = type("Step", (), {"clear": with_new, "__module__": "host.buffers"})
    members = {"add": add, "all": with_new, "Step": step, "new": with_new, "width": 3, "_private": with_new}
    host = type("Host", (), members | {"__module__": "host.buffers"})
    assert lacking("Host", host, Ours) == [
        "Host.Step.clear(new=): no such argument here",
        "Host.add(action=): argument 2 there, not here",
        "Host.add(obs=): argument 3 there, not here",
        "Host.add(seed=): argument 4 there, not here",
        "Host.add(seed=): the default is 2 there, 1 here",
        "Host.new: not here",
        "Host.width: not here",
    ]


def test_embodichains_old_drop_in_turns_the_table_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It stood in for release 0.2.4. The next one's trainer passes two arguments more, which it did not take."""

    class Old(embodichain.RolloutBuffer):
        def __init__(self, num_envs: int, rollout_len: int, obs_dim: Any, action_dim: Any, device: Any = "cpu") -> None:
            super().__init__(num_envs, rollout_len, obs_dim, action_dim, device)

    release = hosts_class(embodichain.RolloutBuffer)
    assert lacking("RolloutBuffer", release, embodichain.RolloutBuffer) == []
    found = lacking("RolloutBuffer", release, Old)
    assert found == [
        f"RolloutBuffer({name}=): no such argument here" for name in ("critic_obs_dim", "distribution_param_dim")
    ]
    page = tmp_path / "index.md"
    page.write_text("before\n<!-- hosts -->\nold\n<!-- /hosts -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    for lines, status in (([], 0), (found, 1)):
        for name in HOSTS:
            given = result(lacking=lines if name == "embodichain" else [])
            (tmp_path / f"{name}.json").write_text(json.dumps(given), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["table.py"])
        with pytest.raises(SystemExit) as ended:
            table.main()
        assert int(ended.value.code or 0) == status
    (line,) = [line for line in page.read_text(encoding="utf-8").splitlines() if "EmbodiChain" in line]
    assert line.endswith("| 3 | **red**: 2 |")
    assert page.read_text(encoding="utf-8").startswith("before\n<!-- hosts -->\n\n| host |")


@pytest.mark.parametrize(
    "changes",
    [
        {"release": ""},
        {"lacking": ["an argument"]},
        {"beside": {"passed": 3, "by_decision": [], "fallen": ["test_one"]}},
        {"beside": {"passed": 0, "by_decision": [], "fallen": []}},
        {"suite": result()["suite"] | {"fallen": ["test_one"]}},
        {"suite": result()["suite"] | {"own": 0}},
        {"suite": result()["suite"] | {"made": 0}},
    ],
)
def test_a_host_is_red_if_anything_falls_or_nothing_was_tried(changes: dict[str, Any]) -> None:
    assert table.reds(result()) == table.reds(result(suite=None)) == []
    (line,) = table.reds(result(**changes))
    assert all(name in line for name in (*changes.get("lacking", []), *changes.get("beside", {}).get("fallen", [])))


def test_a_host_that_was_not_tried_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "index.md"
    page.write_text("<!-- hosts --><!-- /hosts -->", encoding="utf-8")
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    (tmp_path / "velora.json").write_text(json.dumps(result()), encoding="utf-8")
    for names, status in (([], 1), (["velora"], 0), (["agilerl"], 1)):
        monkeypatch.setattr(sys, "argv", ["table.py", *names])
        with pytest.raises(SystemExit) as ended:
            table.main()
        assert int(ended.value.code or 0) == status
    assert "| AgileRL | | not tried yet |" in page.read_text(encoding="utf-8")


def test_our_class_is_put_wherever_a_module_has_read_the_hosts_and_each_object_of_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Theirs: ...

    class Ours: ...

    modules: dict[str, Any] = {name: ModuleType(name) for name in ("host_a", "host_a.b", "relive.compat.host_a")}
    for name, module in modules.items():
        module.Buffer = Theirs
        monkeypatch.setitem(sys.modules, name, module)
    put_in_place({"host_a:Buffer": (Theirs, Ours)})
    assert [module.Buffer for module in modules.values()] == [Ours, Ours, Theirs]
    before = in_place.made[0]
    Ours()
    assert in_place.made[0] == before + 1


def test_a_test_differs_by_decision_by_its_name_or_by_the_error_that_it_ends_with() -> None:
    host = replace(HOSTS["velora"], differences={"test_one*[[]a]": "why"}, refusals={"only * rows": "why"})
    failed = ["test_one[a]", "test_one[b]", "test_two", "test_three", "test_four"]
    errors = {"test_two": "ParameterError: there are only 3 rows\nto divide", "test_three": "AssertionError"}
    assert run.split(host, failed, errors) == {
        "by_decision": ["test_one[a]", "test_two"], "fallen": ["test_one[b]", "test_three", "test_four"]
    }  # fmt: skip


def test_the_errors_of_failed_tests_are_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_outcomes", "_errors"):
        monkeypatch.setattr(f"hosts.in_place.{name}", {})
    monkeypatch.setenv("RELIVE_OUTCOMES", str(tmp_path / "outcomes"))
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="ValueError: no"))
    for node, when, outcome, longrepr in (
        ("good", "call", "passed", None), ("bad", "call", "failed", crash), ("bad", "teardown", "passed", None),
        ("worse", "setup", "failed", "a text"),
    ):  # fmt: skip
        report = SimpleNamespace(nodeid=node, when=when, outcome=outcome, longrepr=longrepr)
        in_place.pytest_runtest_logreport(report)
    in_place.pytest_sessionfinish()
    seen = json.loads((tmp_path / "outcomes").read_text(encoding="utf-8"))
    assert seen["outcomes"] == {"good": "passed", "bad": "failed", "worse": "failed"}
    assert seen["errors"] == {"bad": "ValueError: no", "worse": "a text"}


def test_a_suite_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    while True:\n        pass\n", encoding="utf-8")
    monkeypatch.setattr(run, "CHECKOUTS", tmp_path)
    monkeypatch.setattr(run, "LONGEST", 0)
    assert run.tests("some", tmp_path, ["test_it.py"], {}) == {"outcomes": {}, "errors": {}, "made": 0}


def test_the_page_has_the_table_of_what_was_tried() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.written(text, table.results()) == text
    assert table.PLACE.search(text)


def test_every_host_has_an_environment_in_the_makefile_and_in_the_workflow() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (line,) = [line for line in makefile.splitlines() if line.startswith("HOSTS :=")]
    assert set(line.removeprefix("HOSTS :=").split()) == set(HOSTS)
    assert all((ROOT / f"tests/hosts/requirements-{name}.txt").exists() for name in HOSTS)
    workflow = ROOT / ".github" / "workflows" / "hosts.yml"
    if workflow.exists():  # an sdist has none
        (line,) = [line for line in workflow.read_text(encoding="utf-8").splitlines() if "host: [" in line]
        assert set(line.partition("[")[2].rstrip("]").replace(" ", "").split(",")) == set(HOSTS)
