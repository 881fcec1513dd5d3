"""AgileRL's sequences: every step with its state and its targets."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from relive.compat.agilerl import BPTTSequenceType, RolloutBuffer, StepError
from support.agilerl_buffers import BOX, MOVES, STATES, filled, steps
from support.effort import every_nth

pytestmark = pytest.mark.usefixtures("no_hosts")


# -- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BPTTSequenceType)
@pytest.mark.parametrize("length", [None, 1, 2, 3, 5])
def test_the_helpers_that_subclasses_reach_for_cut_and_pad_as_the_buffer_does(kind: Any, length: int | None) -> None:
    buffer = filled(17, 3, max_seq_len=length, bptt_sequence_type=kind)
    buffer.prepare_sequence_tensors()
    dones = buffer.buffer["dones"]
    ends = [sorted({*dones[:, env].nonzero().flatten().tolist(), 16}) for env in range(3)]
    rows = torch.arange(17 * 3).view(17, 3)
    sequences, longest = buffer._get_complete_sequences(rows, ends)
    assert [seq.tolist() for seq in sequences] == [seq.tolist() for seq in buffer.unpadded_slices]
    assert min(longest, length or longest) == buffer.max_sequence_length
    nested = TensorDict({"rows": rows, "inner": TensorDict({"obs": buffer.buffer["observations"]}, [17, 3])}, [17, 3])
    members, _ = buffer._get_complete_sequences(nested, ends)
    assert [seq["rows"].tolist() for seq in members] == [seq.tolist() for seq in sequences]
    together = RolloutBuffer._pad_sequences(members)
    mask = buffer.padded_data["pad_mask"].view(len(sequences), -1)
    assert torch.equal(together["inner", "obs"][mask], buffer.padded_data["observations"].view(*mask.shape, -1)[mask])
    assert not together["rows"][~mask].any()
    assert RolloutBuffer._pad_sequences(sequences, target_length=20).shape == (len(sequences), 20)
    arrays = buffer._convert_td_to_np_dict(together)
    assert isinstance(arrays["inner"]["obs"], np.ndarray)
    buffer.bptt_sequence_type = "another"
    with pytest.raises(NotImplementedError, match="unrecognized sequence type"):
        buffer._extract_td_sequences(nested[:, 0], 2)


def test_the_state_has_agilerls_entries_and_a_pickle_has_its_rows_once() -> None:
    buffer = filled(12, 3)
    state = buffer.__getstate__()
    assert (state["pos"], state["full"]) == (12, True)
    assert torch.equal(state["buffer"]["rewards"], buffer.buffer["rewards"])
    state["buffer"] = state["buffer"].clone()
    state["buffer"]["rewards"] += 1
    expected = buffer.buffer["rewards"] + 1
    other = RolloutBuffer(12, BOX, MOVES, 3)
    other.__setstate__(copy.deepcopy(state))
    assert (other.pos, other.full, other.size()) == (12, True, 36)
    assert torch.equal(other.buffer["rewards"], expected)
    assert torch.equal(other.get_tensor_batch()["rewards"], expected.flatten())
    large = RolloutBuffer(1000, BOX, MOVES, 20)
    assert len(pickle.dumps(large)) < 1.2 * sum(x.nbytes for x in large.buffer.values(True, True))
    state["buffer"] = TensorDict({"rewards": torch.zeros(12, 4)}, [12])
    with pytest.raises(StepError, match="rewards"):
        other.__setstate__(state)
    with pytest.raises(StepError, match="expected a TensorDict, got str"):
        other.__setstate__(state | {"buffer": "nothing"})


def episodes_of(played: list[Any]) -> list[list[tuple[int, int]]]:
    """(time, env) of each episode's steps, env by env."""
    found = []
    for env in range(len(played[0]["reward"])):
        episode: list[tuple[int, int]] = []
        for t, step in enumerate(played):
            episode.append((t, env))
            if step["done"][env] or t == len(played) - 1:
                found.append(episode)
                episode = []
    return found


def windows_of(episode: list[Any], length: int | None, kind: str) -> list[list[Any]]:
    """The sequences of an episode, told by their rule: one from every start that adds a step."""
    if length is None:
        return [episode]
    stride = {"CHUNKED": length, "MAXIMUM": 1, "FIFTY_PERCENT_OVERLAP": max(length // 2, 1)}[kind]
    found: list[list[Any]] = []
    for start in range(0, len(episode), stride):
        window = episode[start : start + length]
        if not found or window[-1] != found[-1][-1]:
            found.append(window)
    return found


@pytest.mark.parametrize(
    ("kind", "length", "capacity"),
    every_nth(3, ["CHUNKED", "MAXIMUM", "FIFTY_PERCENT_OVERLAP"], [None, 1, 2, 5, 100], [23, 40]),
)
def test_sequences_hold_every_step_with_its_state_and_its_targets(kind: str, length: int | None, capacity: int) -> None:
    played = steps(40, 3, seed=7, recurrent=True, masks=3)
    buffer = filled(
        capacity=capacity, envs=3, steps=played, max_seq_len=length, wrap_at_capacity=True,
        bptt_sequence_type=BPTTSequenceType[kind],
    )  # fmt: skip
    buffer.compute_returns_and_advantages(np.ones(3), np.zeros(3))
    buffer.prepare_sequence_tensors()
    kept = played[-capacity:]
    expected = [window for episode in episodes_of(kept) for window in windows_of(episode, length, kind)]
    longest = max(map(len, expected))
    assert (buffer.num_sequences, buffer.max_sequence_length) == (len(expected), longest)
    assert [part.tolist() for part in buffer.unpadded_slices] == [[t * 3 + n for t, n in window] for window in expected]
    padded = buffer.padded_data
    assert padded.batch_size == (len(expected) * longest,)
    states = padded.get_non_tensor("initial_hidden_states")
    for i, window in enumerate(expected):
        rows = slice(i * longest, i * longest + len(window))
        rest = slice(i * longest + len(window), (i + 1) * longest)
        assert padded["pad_mask"][rows].all()
        assert not padded["pad_mask"][rest].any()
        assert torch.equal(padded["observations"][rows], stacked(kept, window, "obs"))
        assert torch.equal(padded["actions"][rows], stacked(kept, window, "action").unsqueeze(1))
        assert torch.equal(padded["action_masks"][rows], stacked(kept, window, "action_mask").bool())
        assert not padded["observations"][rest].any()
        assert padded["action_masks"][rest].all()  # AgileRL pads with no legal action at all: a softmax would be NaN
        t, n = window[0]
        for name, state in states.items():
            assert torch.equal(state[i], kept[t]["hidden_state"][name][:, n])
    assert {step for window in expected for step in window} == {(t, n) for t in range(capacity) for n in range(3)}
    assert torch.equal(
        buffer.unpadded_data["log_probs"], torch.cat([torch.from_numpy(step["log_prob"]) for step in kept])
    )


def stacked(played: list[Any], window: list[tuple[int, int]], name: str) -> Tensor:
    return torch.as_tensor(np.stack([played[t][name][n] for t, n in window])).float()


def test_minibatches_of_sequences_have_each_once_in_a_new_order_with_what_remains_last() -> None:
    buffer = filled(30, 3, max_seq_len=4)
    buffer.compute_returns_and_advantages(np.ones(3), np.zeros(3))
    buffer.prepare_sequence_tensors()
    total, longest = buffer.num_sequences, buffer.max_sequence_length
    orders = []
    for _ in range(2):
        seen, sizes = [], []
        for padded, unpadded in buffer.get_minibatch_sequences(7):
            states = padded.get_non_tensor("initial_hidden_states")
            sizes.append(len(states["actor.encoder_h"]))
            assert padded.batch_size == (sizes[-1] * longest,)
            mask = padded["pad_mask"]
            assert unpadded.batch_size == (int(mask.sum()),)
            seen += unpadded["log_probs"].tolist()
            assert set(unpadded.keys()) == {"log_probs", "advantages", "values", "returns"}
            # each padded row has the targets of the same step
            at = [row.tolist() for row in padded["observations"][mask]]
            stored = buffer.buffer["observations"].flatten(0, 1).tolist()
            values = buffer.buffer["values"].flatten()
            assert torch.equal(unpadded["values"], torch.stack([values[stored.index(row)] for row in at]))
            first = padded["observations"].view(-1, longest, 2)[:, 0].tolist()
            hidden = buffer.buffer["hidden_states", "actor.encoder_c"].flatten(0, 1)
            expected = torch.stack([hidden[stored.index(row)] for row in first])
            assert torch.equal(states["actor.encoder_c"], expected)
        assert sizes == [7] * (total // 7) + ([total % 7] if total % 7 else [])
        assert sorted(seen) == sorted(buffer.buffer["log_probs"].flatten().tolist())
        orders.append(seen)
    assert orders[0] != orders[1]
    with pytest.warns(UserWarning, match=rf"Batch size 1000 is larger than the number of sequences \({total}\)"):
        assert len(list(buffer.get_minibatch_sequences(1000))) == 1


def test_sequences_are_refused_when_agilerl_refuses_them() -> None:
    buffer = RolloutBuffer(3, BOX, MOVES, recurrent=True, hidden_state_architecture=STATES)
    with pytest.raises(ValueError, match="empty buffer"):
        buffer.prepare_sequence_tensors()
    with pytest.raises(ValueError, match="before preparing sequences"):
        next(buffer.get_minibatch_sequences(2))
    with pytest.raises(ValueError, match="only supported when recurrent=True"):
        filled().prepare_sequence_tensors()
    buffer.add(**steps(1, 1, recurrent=True)[0])
    buffer.bptt_sequence_type = "sideways"
    with pytest.raises(NotImplementedError, match="unrecognized sequence type: sideways"):
        buffer.prepare_sequence_tensors()
    prepared = filled(max_seq_len=3)
    prepared.prepare_sequence_tensors()
    prepared.reset()
    with pytest.raises(ValueError, match="before preparing sequences"):
        next(prepared.get_minibatch_sequences(2))


def test_the_enum_has_agilerls_values_and_the_name_of_its_documents() -> None:
    assert {kind.value for kind in BPTTSequenceType} == {"chunked", "maximum", "fifty_percent_overlap"}
    assert BPTTSequenceType.FIFTY_PERCENT_OVERLAPPING is BPTTSequenceType.FIFTY_PERCENT_OVERLAP
