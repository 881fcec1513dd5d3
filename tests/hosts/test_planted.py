"""In the environment of a host: an argument that is planted into its real class or function is found and named."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

from hosts.libraries import HOSTS
from hosts.signatures import lacking

PAIRS = HOSTS[os.environ["RELIVE_HOST"]].both()


@pytest.mark.parametrize("name", PAIRS)
def test_an_argument_that_is_planted_into_the_hosts_class_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = PAIRS[name]
    before = lacking(name, theirs, ours)
    calls: dict[str, Any] = {f"{name}(": theirs}
    if inspect.isclass(theirs):
        calls = {f"{name}(": vars(theirs).get("__init__")}
        calls |= {f"{name}.{x}(": vars(theirs)[x] for x in vars(theirs) if not x.startswith("_")}
    calls = {where: call for where, call in calls.items() if inspect.isfunction(call)}
    assert calls
    for where, call in calls.items():
        shown = inspect.signature(call)
        planted = inspect.Parameter("planted", inspect.Parameter.KEYWORD_ONLY, default=None)
        last = [one for one in shown.parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
        first = [one for one in shown.parameters.values() if one not in last]
        with monkeypatch.context() as patch:
            patch.setattr(call, "__signature__", shown.replace(parameters=[*first, planted, *last]), raising=False)
            assert lacking(name, theirs, ours) != before, where
            assert f"{where}planted=): no such argument here" in lacking(name, theirs, ours)
