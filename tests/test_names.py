"""Arguments of other libraries: each public constructor and call that lacks one says what to write instead."""

import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest

import relive
from relive.names import ARGUMENT_HINTS, SYNONYMS
from relive.parameters import hinted

FOREIGN = sorted({*SYNONYMS, *(name for hints in ARGUMENT_HINTS.values() for name in hints)})
CLASSES = {
    name: part
    for name in relive.__all__
    if isinstance(part := getattr(relive, name), type) and inspect.isfunction(vars(part).get("__init__"))
}
CALLS: dict[str, Callable[..., Any]] = {
    **{name: part for name, part in CLASSES.items() if name not in ("SequenceBatch", "Uniform", "WithoutReplacement")},
    "ReplayBuffer.plan": relive.ReplayBuffer.plan,
    "ReplayBuffer.open": relive.ReplayBuffer.open,
    **{
        f"{owner.__name__}.{name}": getattr(owner, name)
        for owner, names in (
            (relive.ReplayBuffer, ("batches", "serve", "save")),
            (relive.RolloutBuffer, ("minibatches", "sequences", "env_batches", "chunks", "finish", "save")),
            (relive.Collector, ("warm", "reset")),
            (relive.Mixture, ("batches",)),
        )
        for name in names
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_another_library_says_what_to_write_and_that_exists(name: str):
    call, known = CALLS[name], inspect.signature(CALLS[name]).parameters
    itself = (object(),) if "self" in known else ()
    for foreign in FOREIGN:
        if foreign in known:
            continue
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{foreign}'; ") as caught:
            call(*itself, **{foreign: 1})
        hint = str(caught.value).partition("; ")[2]
        if renamed := re.fullmatch(r"it is called (\w+) here", hint):
            assert renamed[1] in known
        for path in re.findall(r"relive\.([\w.]+)\(", hint):
            assert pkgutil.resolve_name(f"relive:{path}"), path


@pytest.mark.parametrize(
    ("call", "foreign", "ours"),
    [
        ("GAE", "gae_lambda", "it is called lam here"),
        ("ReplayBuffer", "buffer_size", "it is called capacity here"),
        ("ReplayBuffer", "n_step", "pass view=relive.NStep(3, gamma=0.99)"),
        ("ReplayBuffer", "batch_size", "call sample(batch_size)"),
        ("RolloutBuffer", "n_envs", "it is called num_envs here"),
        ("RolloutBuffer", "n_steps", "it is called num_steps here"),
        ("RolloutBuffer", "gae_lambda", "call finish(relive.GAE(gamma=0.99, lam=0.95))"),
        ("RolloutBuffer.minibatches", "num_epochs", "it is called epochs here"),
        ("NStep", "n_step", "it is called n here"),
        ("Sequence", "batch_size", "call sample(batch_size) of the replay"),
        ("SchemaChanges", "gae_lambda", "it takes drop, rename, cast, add"),
    ],
)
def test_the_hint_for_an_argument_names_ours(call: str, foreign: str, ours: str):
    itself = (object(),) if "self" in inspect.signature(CALLS[call]).parameters else ()
    with pytest.raises(TypeError) as caught:
        CALLS[call](*itself, **{foreign: 1})
    assert str(caught.value).endswith(f"'{foreign}'; {ours}")


def test_a_type_error_from_within_a_call_stays_as_it_is():
    def inner(**options: Any) -> None:
        raise TypeError("other() got an unexpected keyword argument 'gae_lambda'")

    def outer(gae_lambda: int) -> None:
        inner(gae_lambda=gae_lambda)

    with pytest.raises(TypeError, match=r"^other\(\) got an unexpected keyword argument 'gae_lambda'$"):
        hinted(outer, "outer")(gae_lambda=1)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'gae_lambda'$"):
        hinted(outer, "outer")()
