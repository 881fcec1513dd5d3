"""AgileRL's rollout buffer and ours, fed the same random steps: every column, batch, dtype, shape and error."""

from __future__ import annotations

import itertools
import pickle
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from relive.compat.agilerl import BPTTSequenceType, RolloutBuffer

theirs: Any = import_module("agilerl.components.rollout_buffer")
typing: Any = import_module("agilerl.typing")

BOX = spaces.Box(-3, 3, (2, 3), np.float32)
SPACES = {
    "box": (BOX, BOX),
    "discrete": (spaces.Discrete(9), spaces.Discrete(4)),
    "multi": (spaces.MultiDiscrete([3, 4]), spaces.MultiDiscrete([2, 5, 3])),
    "binary": (spaces.MultiBinary(5), spaces.MultiBinary(3)),
    "bytes": (spaces.Box(0, 255, (4, 4), np.uint8), spaces.Discrete(4)),
    "dict": (spaces.Dict({"a": BOX, "b": spaces.Discrete(5), "c": spaces.MultiBinary(2)}), spaces.Discrete(4)),
}
STATES = {"h": (2, 1, 3), "c": (1, 1, 4)}
ENVS = 3


def sample(space: Any, count: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: sample(member, count) for name, member in space.spaces.items()}
    return np.stack([space.sample() for _ in range(count)])


def pair(kind: str = "box", capacity: int = 12, envs: int = ENVS, **options: Any) -> tuple[Any, Any]:
    options = {"num_envs": envs} | options
    return theirs.RolloutBuffer(capacity, *SPACES[kind], **options), RolloutBuffer(capacity, *SPACES[kind], **options)


def step(rng: Any, kind: str, envs: int = ENVS, done: float = 0.2, masks: bool = False, states: bool = False) -> Any:
    observation, action = SPACES[kind]
    made = {
        "obs": sample(observation, envs),
        "action": sample(action, envs),
        "reward": rng.normal(size=envs),
        "done": rng.random(envs) < done,
        "value": rng.normal(size=envs).astype(np.float32),
        "log_prob": torch.from_numpy(rng.normal(size=envs)),
        "next_obs": sample(observation, envs),
    }
    if masks:
        made["action_mask"] = rng.random((envs, 4)) < 0.5
    if states:
        made["hidden_state"] = {n: torch.from_numpy(rng.normal(size=(s[0], envs, s[2]))) for n, s in STATES.items()}
    return made


def filled(count: int, seed: int = 0, done: float = 0.2, states: bool = False, **options: Any) -> tuple[Any, Any]:
    kind, masks = options.get("kind", "box"), options.pop("masks", False)
    if states:
        options |= {"recurrent": True, "hidden_state_architecture": STATES}
    buffers, rng = pair(**options), np.random.default_rng(seed)
    for space in (member for members in SPACES.values() for member in members):
        space.seed(seed)
    for _ in range(count):
        given = step(rng, kind, options.get("envs", ENVS), done, masks, states)
        for buffer in buffers:
            buffer.add(**given)
    return buffers


def assert_same(one: Any, other: Any) -> None:
    """Two nested TensorDicts with the same keys, shapes, dtypes and contents."""
    ours = dict(other.items(True, True))
    assert set(dict(one.items(True, True))) == set(ours)
    assert one.batch_size == other.batch_size
    assert one.device == other.device
    for key, x in one.items(True, True):
        if isinstance(x, torch.Tensor):
            assert (x.shape, x.dtype, x.device) == (ours[key].shape, ours[key].dtype, ours[key].device), key
            assert torch.equal(x, ours[key]), key


def cursors(buffer: Any) -> Any:
    names = ("capacity", "num_envs", "pos", "full", "recurrent", "hidden_state_architecture")
    return *(getattr(buffer, name) for name in names), buffer.size()


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("kind", SPACES)
def test_every_column_cursor_and_batch_of_everything_is_equal(kind: str, states: bool, masks: bool) -> None:
    for count in (0, 5, 12):
        one, other = filled(count, kind=kind, states=states, masks=masks)
        assert_same(one.buffer, other.buffer)
        assert cursors(one) == cursors(other)
        assert_same(one.get_tensor_batch(), other.get_tensor_batch())
        assert leaves(one.get()) == leaves(other.get())


def leaves(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: leaves(member) for name, member in tree.items()}
    return tree.shape, tree.dtype, tree.tolist()


@pytest.mark.parametrize("device", ["cpu", None])
def test_sampled_batches_are_rows_of_the_same_transitions(device: Any) -> None:
    one, other = filled(12)
    rows = set(one.get()["rewards"].tolist())
    for buffer in (one, other):
        for batch in (buffer.get_tensor_batch(20, device), buffer.get(20)):
            drawn = batch["rewards"].tolist()
            assert len(set(drawn)) == len(drawn) == 20
            assert set(drawn) <= rows
    assert_same(one.get_tensor_batch(36)[:0], other.get_tensor_batch(36)[:0])


def test_wrapping_puts_every_step_where_agilerls_does() -> None:
    for count in (1, 11, 12, 13, 30):
        one, other = filled(count, wrap_at_capacity=True)
        assert_same(one.buffer, other.buffer)
        assert cursors(one) == cursors(other)


@pytest.mark.parametrize("use_gae", [True, False])
@pytest.mark.parametrize("count", [1, 7, 12])
def test_returns_are_equal_while_no_episode_ends(use_gae: bool, count: int) -> None:
    rng = np.random.default_rng(1)
    one, other = filled(count, done=0.0, use_gae=use_gae, gamma=0.9, gae_lambda=0.8)
    last_value, last_done = rng.normal(size=ENVS), rng.random(ENVS) < 0.5
    for buffer in (one, other):
        buffer.compute_returns_and_advantages(last_value, torch.from_numpy(last_done))
    for name in ("advantages", "returns"):
        torch.testing.assert_close(one.buffer[name], other.buffer[name], rtol=1e-5, atol=1e-5)


def test_monte_carlo_returns_are_equal_where_episodes_end_in_terminals() -> None:
    one, other = filled(12, use_gae=False)
    last_done = one.buffer["dones"][11].numpy()
    for buffer in (one, other):
        buffer.compute_returns_and_advantages(np.ones(ENVS), last_done)
    torch.testing.assert_close(one.buffer["returns"], other.buffer["returns"], rtol=1e-5, atol=1e-5)


def test_gae_is_agilerls_when_agilerls_is_given_the_flags_it_reads_one_step_late() -> None:
    """AgileRL cuts step t by the flag in row t + 1; ours by the flag of the step, as its collector stores it."""
    rng = np.random.default_rng(2)
    one, other = pair(capacity=20)
    before = np.zeros(ENVS, bool)
    for _ in range(20):
        given = step(rng, "box")
        other.add(**given)
        one.add(**given | {"done": before})
        before = given["done"]
    last_value = rng.normal(size=ENVS)
    for buffer in (one, other):
        buffer.compute_returns_and_advantages(last_value, before)
    torch.testing.assert_close(one.buffer["advantages"], other.buffer["advantages"], rtol=1e-5, atol=1e-5)
    one, other = filled(12)
    for buffer in (one, other):
        buffer.compute_returns_and_advantages(np.zeros(ENVS), np.zeros(ENVS))
    assert (one.buffer["advantages"] - other.buffer["advantages"]).abs().max() > 0.1


def sequences(buffer: Any) -> list[Any]:
    """Each prepared sequence: which rows of the rollout it has, and all that comes with it."""
    padded, longest = buffer.padded_data, buffer.max_sequence_length
    states = padded.get_non_tensor("initial_hidden_states")
    found = []
    for i, rows in enumerate(buffer.unpadded_slices):
        part = padded[i * longest : (i + 1) * longest]
        kept = part["pad_mask"].tolist()
        assert kept == [True] * len(rows) + [False] * (longest - len(rows))
        content = {key: part[key][: len(rows)].tolist() for key in ("observations", "actions")}
        found.append((rows.tolist(), content, {name: state[i].tolist() for name, state in states.items()}))
    return found


@pytest.mark.parametrize("length", [None, 1, 3, 4, 50])
@pytest.mark.parametrize("kind", [kind.name for kind in BPTTSequenceType])
def test_sequences_are_agilerls_and_besides_them_the_tails_that_it_drops(kind: str, length: int | None) -> None:
    if kind == "FIFTY_PERCENT_OVERLAP" and length == 1:
        one, _ = filled(40, capacity=40, states=True, max_seq_len=1, bptt_sequence_type=typing.BPTTSequenceType[kind])
        with pytest.raises(ValueError, match="must not be zero"):  # ours takes a stride of 1
            one.prepare_sequence_tensors()
        return
    options: dict[str, Any] = {"max_seq_len": length, "bptt_sequence_type": typing.BPTTSequenceType[kind]}
    one, other = filled(40, capacity=40, done=0.1, states=True, **options)
    for buffer in (one, other):
        buffer.prepare_sequence_tensors()
    assert one.max_sequence_length == other.max_sequence_length
    host, ours = sequences(one), sequences(other)
    assert [sequence for sequence in ours if sequence in host] == host  # in the same order, too
    covered = {row for rows, *_ in host for row in rows}
    more = [rows for rows, *_ in ours if rows not in [rows for rows, *_ in host]]
    assert {row for rows, *_ in ours for row in rows} == set(range(40 * ENVS))
    assert all(len(rows) < (length or 0) and not set(rows) <= covered for rows in more)
    stride = {"CHUNKED": length, "MAXIMUM": 1, "FIFTY_PERCENT_OVERLAP": (length or 0) // 2}[kind]
    assert bool(more) == (length in (3, 4) and stride > 1)
    assert_same(one.unpadded_data, other.unpadded_data)
    assert one.padded_data.keys() == other.padded_data.keys()
    for key in ("observations", "actions", "pad_mask"):
        assert one.padded_data[key].dtype == other.padded_data[key].dtype
        assert one.padded_data[key].shape[1:] == other.padded_data[key].shape[1:]


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_an_epoch_of_minibatches_has_the_same_sequences_in_parts_of_the_same_sizes(batch_size: int) -> None:
    one, other = filled(30, capacity=30, done=0.1, states=True, masks=True, max_seq_len=50)  # no tails to drop
    for buffer in (one, other):
        buffer.compute_returns_and_advantages(np.zeros(ENVS), np.zeros(ENVS))
        buffer.buffer["advantages"].copy_(one.buffer["advantages"])
        buffer.buffer["returns"].copy_(one.buffer["returns"])
        buffer.prepare_sequence_tensors()
    epochs = [list(buffer.get_minibatch_sequences(batch_size)) for buffer in (one, other)]
    longest, contents = one.max_sequence_length, []
    for (padded, _), (ours, _) in zip(*epochs, strict=True):
        assert padded.batch_size == ours.batch_size
        assert set(padded.keys()) == set(ours.keys())
    for epoch in epochs:
        content = []
        for padded, unpadded in epoch:
            states, at = padded.get_non_tensor("initial_hidden_states"), 0
            assert set(unpadded.keys()) == {"log_probs", "advantages", "values", "returns"}
            for i in range(len(padded) // longest):
                part = padded[i * longest : (i + 1) * longest]
                count = int(part["pad_mask"].sum())
                fields = [part[key][:count].flatten().tolist() for key in ("observations", "actions", "action_masks")]
                targets = [unpadded[key][at : at + count].tolist() for key in sorted(unpadded.keys())]
                content.append((fields, targets, {name: state[i].tolist() for name, state in states.items()}))
                at += count
            assert at == len(unpadded)
        contents.append(sorted(content, key=str))
    assert contents[0] == contents[1]


def test_padding_has_no_legal_action_in_agilerls_and_all_in_ours() -> None:
    one, other = filled(12, states=True, masks=True, max_seq_len=50)
    for buffer, padding in ((one, False), (other, True)):
        buffer.prepare_sequence_tensors()
        rest = buffer.padded_data["action_masks"][~buffer.padded_data["pad_mask"]]
        assert len(rest)
        assert (rest == padding).all()


def refusal(call: Any) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


def test_what_agilerls_refuses_ours_refuses_with_an_error_that_is_one_of_the_same_type() -> None:
    rng = np.random.default_rng(0)
    good = step(rng, "box")
    calls = {
        "full": lambda b: [b.add(**good) for _ in range(13)],
        "obs of too many": lambda b: b.add(**good | {"obs": sample(BOX, 4)}),
        "obs of another shape": lambda b: b.add(**good | {"obs": np.zeros((ENVS, 2, 4))}),
        "too few rewards": lambda b: b.add(**good | {"reward": [1.0]}),
        "too many values": lambda b: b.add(**good | {"value": np.zeros(4)}),
        "actions": lambda b: b.add(**good | {"action": np.zeros(4)}),
        "not recurrent": lambda b: (b.add(**good), b.prepare_sequence_tensors()),
        "not prepared": lambda b: next(b.get_minibatch_sequences(2)),
    }
    for name, call in calls.items():
        one, other = (refusal(lambda b=b, call=call: call(b)) for b in pair())
        assert one is not None, name
        assert issubclass(other, one), (name, one, other)
    recurrent = pair(recurrent=True, hidden_state_architecture=STATES)
    assert [refusal(buffer.prepare_sequence_tensors) for buffer in recurrent] == [ValueError, ValueError]
    for options in ({"recurrent": True}, {"observation_space": spaces.Tuple((BOX,))}, {"action_space": spaces.Text(3)}):
        given = {"capacity": 3, "observation_space": BOX, "action_space": BOX} | options
        one, other = (refusal(lambda c=c, given=given: c(**given)) for c in (theirs.RolloutBuffer, RolloutBuffer))
        assert one is not None, options
        assert issubclass(other, one), (options, one, other)


@pytest.mark.parametrize("call", ["get", "get_tensor_batch"])
def test_asking_for_too_much_warns_alike_and_gives_all(call: str) -> None:
    messages = []
    for buffer in filled(4):
        with pytest.warns(UserWarning, match="Batch size 13") as caught:
            assert len(getattr(buffer, call)(13)["rewards"]) == 12
        messages += [str(warning.message) for warning in caught]
    assert messages[0] == messages[1]


def test_both_are_pickled_with_what_they_hold() -> None:
    for buffer in filled(7, states=True, masks=True):
        again = pickle.loads(pickle.dumps(buffer))
        assert_same(again.buffer, buffer.buffer)
        assert cursors(again) == cursors(buffer)


def test_a_reset_forgets_the_same_and_keeps_no_row_of_a_field_that_is_left_out() -> None:
    for buffer, stale in zip(filled(12), (True, False), strict=True):
        buffer.reset()
        assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
        assert buffer.padded_data is buffer.unpadded_data is buffer.unpadded_slices is None
        given = step(np.random.default_rng(9), "box")
        del given["next_obs"]
        buffer.add(**given)
        assert bool(buffer.get_tensor_batch()["next_observations"].any()) == stale


def test_agilerls_batch_of_everything_is_a_view_and_ours_a_copy() -> None:
    for buffer, aliases in zip(filled(12), (True, False), strict=True):
        buffer.get_tensor_batch()["rewards"].zero_()
        assert bool(buffer.buffer["rewards"].any()) != aliases


def test_after_a_wrap_agilerls_returns_are_those_of_the_rows_order_and_ours_of_times() -> None:
    for buffer, right in zip(filled(13, done=0.0, wrap_at_capacity=True, use_gae=False), (False, True), strict=True):
        buffer.compute_returns_and_advantages(np.zeros(ENVS), np.ones(ENVS))
        newest = buffer.pos - 1
        alone = torch.equal(buffer.buffer["returns"][newest], buffer.buffer["rewards"][newest])
        assert alone == right


def test_the_enums_have_the_same_members() -> None:
    names = [{kind.name: kind.value for kind in kinds} for kinds in (typing.BPTTSequenceType, BPTTSequenceType)]
    assert names[0] == names[1]


def test_the_signatures_are_agilerls_with_more_at_the_end_by_keyword_alone() -> None:
    from inspect import Parameter, signature

    public = [name for name in vars(theirs.RolloutBuffer) if not name.startswith("_")]
    methods = [name for name in public if callable(getattr(theirs.RolloutBuffer, name))]
    for name in ["__init__", *methods]:
        one, other = (signature(getattr(kind, name)).parameters for kind in (theirs.RolloutBuffer, RolloutBuffer))
        assert list(other)[: len(one)] == list(one), name
        assert all(p.kind is Parameter.KEYWORD_ONLY for p in itertools.islice(other.values(), len(one), None)), name
        for key, parameter in one.items():
            default = getattr(parameter.default, "value", parameter.default)
            assert getattr(other[key].default, "value", other[key].default) == default, (name, key)


@pytest.mark.parametrize(("count", "wrap"), [(0, False), (7, False), (12, False), (12, True), (19, True), (24, True)])
@pytest.mark.parametrize("kind", ["box", "dict"])
def test_a_buffer_of_agilerl_becomes_ours_with_its_steps_and_its_pickled_state_too(
    kind: str, count: int, wrap: bool
) -> None:
    options: dict[str, Any] = {"recurrent": True, "hidden_state_architecture": STATES, "wrap_at_capacity": wrap}
    one, truth = pair(kind, **options)
    rng = np.random.default_rng(0)
    for _ in range(count):
        made = step(rng, kind, states=True, masks=kind == "dict")
        one.add(**made)
        truth.add(**made)
    state = pickle.loads(pickle.dumps(one)).__getstate__()
    unpickled = RolloutBuffer.__new__(RolloutBuffer)
    unpickled.__setstate__(state)
    for other in (RolloutBuffer.from_original(one), unpickled):
        assert (other.pos, other.full, other.size()) == (one.pos, one.full, one.size())
        columns = other.buffer.items(True, True)
        assert all(torch.equal(column, one.buffer[path]) for path, column in columns)
        if count:
            for buffer in (other, truth):
                buffer.compute_returns_and_advantages(np.ones(ENVS), np.zeros(ENVS, np.bool_))
            for path, column in truth.get_tensor_batch().items(True, True):
                assert torch.equal(other.get_tensor_batch()[path], column), path
