"""relive.compat.sb3_contrib over a stand-in of sb3-contrib: masks and states come with their steps."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from compat import sb3_contrib_stand_in as stand_in

T, N, LAYERS, SIZE = 6, 3, 2, 4
BOX = spaces.Box(-1, 1, (2,), np.float32)
MEMBERS = spaces.Dict({"first": BOX, "image": spaces.Box(0, 255, (2, 2, 1), np.uint8)})
MOVES = spaces.Discrete(5)


@pytest.fixture
def ours() -> Iterator[Any]:
    with stand_in.installed() as module:
        yield module


def number(t: int) -> Any:
    """Says which step of which env this is."""
    return 10 * t + np.arange(N, dtype=np.float32)


def observed(space: Any, t: int) -> Any:
    first = np.repeat(number(t)[:, None], 2, 1)
    image = np.tile(number(t).astype(np.uint8)[:, None, None, None], (1, 2, 2, 1))
    return {"first": first, "image": image} if space is MEMBERS else first


def states(t: int) -> Any:
    one = torch.as_tensor(number(t)).view(1, N, 1).expand(LAYERS, N, SIZE)
    return stand_in.RNNStates((one, one + 0.25), (one + 0.5, one + 0.75))


STARTS = np.zeros((T, N), np.bool_)
STARTS[2, 0] = STARTS[5, 0] = STARTS[1, 2] = True


def filled(buffer: Any, space: Any = BOX, **options: Any) -> Any:
    masks, recurrent = options.get("masks"), hasattr(buffer, "hidden_states_pi")
    for t in range(T):
        more = {"lstm_states": states(t)} if recurrent else {"action_masks": None if masks is None else masks[t]}
        values = torch.as_tensor(number(t))
        buffer.add(observed(space, t), number(t).astype(int), number(t), STARTS[t], values, values + 1, **more)
    buffer.compute_returns_and_advantage(torch.zeros(N), np.zeros(N, np.bool_))
    return buffer


def maskable(ours: Any, space: Any = BOX, action_space: Any = MOVES, **options: Any) -> Any:
    kind = ours.MaskableDictRolloutBuffer if space is MEMBERS else ours.MaskableRolloutBuffer
    return kind(T, space, action_space, "cpu", n_envs=N, **options)


def recurrent(ours: Any, space: Any = BOX, **options: Any) -> Any:
    kind = ours.RecurrentDictRolloutBuffer if space is MEMBERS else ours.RecurrentRolloutBuffer
    return kind(T, space, MOVES, (T, LAYERS, N, SIZE), "cpu", 0.9, 0.8, N, **options)


@pytest.mark.parametrize("space", [BOX, MEMBERS])
@pytest.mark.parametrize("batch_size", [None, 5, 1])
def test_a_mask_comes_with_its_step(ours: Any, space: Any, batch_size: int | None) -> None:
    masks = np.random.default_rng(0).random((T, N, 5)) < 0.5
    buffer = filled(maskable(ours, space), space, masks=masks)
    assert buffer.action_masks.dtype == np.float32
    assert (buffer.action_masks == masks).all()
    seen: list[int] = []
    for batch in buffer.get(batch_size):
        assert type(batch).__name__ == f"Maskable{'Dict' * (space is MEMBERS)}RolloutBufferSamples"
        assert batch.actions.dtype == torch.int64
        rows = batch.actions.squeeze(1)
        first = batch.observations["first"] if space is MEMBERS else batch.observations
        assert (first[:, 0] == rows).all()
        assert (batch.old_log_prob == rows + 1).all()
        assert (batch.action_masks.numpy() == masks[rows // 10, rows % 10]).all()
        seen += rows.tolist()
    assert sorted(seen) == sorted(int(x) for t in range(T) for x in number(t))


def test_masks_that_are_not_given_allow_everything_also_after_a_rollout_with_some(ours: Any) -> None:
    buffer = filled(maskable(ours), masks=np.zeros((T, N, 5), np.bool_))
    assert not buffer.action_masks.any()
    buffer.reset()
    assert buffer.action_masks.all()
    assert filled(buffer).action_masks.all()


@pytest.mark.parametrize(
    ("space", "dims"),
    [(MOVES, 5), (spaces.MultiDiscrete([2, 3]), 5), (spaces.MultiBinary(4), 8), (spaces.MultiBinary([2, 2]), None),
     (BOX, None)],
)  # fmt: skip
def test_the_mask_has_a_number_for_each_choice(ours: Any, space: Any, dims: int | None) -> None:
    if dims is None:
        with pytest.raises((AssertionError, ValueError), match=r"not supported|Unsupported action space"):
            maskable(ours, action_space=space)
    else:
        assert maskable(ours, action_space=space).action_masks.shape == (T, N, dims)


def test_a_mask_of_another_size_is_refused_and_nothing_is_stored(ours: Any) -> None:
    buffer = maskable(ours)
    with pytest.raises(ValueError, match="reshape"):
        filled(buffer, masks=np.ones((T, N, 4)))
    assert buffer.pos == 0


@pytest.mark.parametrize("space", [BOX, MEMBERS])
@pytest.mark.parametrize("batch_size", [None, 18, 7, 4, 1])
def test_sequences_end_with_their_episode_and_begin_with_the_state_before_them(
    ours: Any, space: Any, batch_size: int | None
) -> None:
    buffer = filled(recurrent(ours, space, seed=3), space)
    seen: list[int] = []
    for batch in buffer.get(batch_size):
        assert type(batch).__name__ == f"Recurrent{'Dict' * (space is MEMBERS)}RolloutBufferSamples"
        count = batch.lstm_states.pi[0].shape[1]
        real = batch.mask.view(count, -1) != 0
        rows, starts = batch.actions.view(count, -1), batch.episode_starts.view(count, -1)
        assert real[:, 0].all()
        assert not rows[~real].any()
        assert not batch.returns[~real.flatten()].any()
        assert (rows.diff(dim=1)[real[:, 1:]] == 10).all()  # one env after another step
        assert not starts[:, 1:].any()
        first = (batch.observations["first"] if space is MEMBERS else batch.observations)[:, 0].view(count, -1)
        assert (first == rows).all()
        for i, state in enumerate((*batch.lstm_states.pi, *batch.lstm_states.vf)):
            assert state.shape == (LAYERS, count, SIZE)
            assert state.is_contiguous()
            assert (state == (rows[:, 0] + i / 4).view(1, -1, 1)).all()
        seen += rows[real].tolist()
    order = [10 * t + env for env in range(N) for t in range(T)]
    at = order.index(seen[0])
    assert seen == order[at:] + order[:at]


def test_passes_begin_elsewhere_and_a_seed_makes_them_repeatable(ours: Any) -> None:
    def firsts(seed: int | None) -> list[int]:
        buffer = filled(recurrent(ours, seed=seed))
        return [int(next(buffer.get(4)).actions[0]) for _ in range(10)]

    assert firsts(0) == firsts(0) != firsts(1)
    assert len({*firsts(0)}) > 3
    np.random.seed(0)  # noqa: NPY002 - what the host seeds
    one = firsts(None)
    np.random.seed(0)  # noqa: NPY002
    expected = [int(10 * (k % T) + k // T) for k in np.random.randint(T * N, size=10)]  # noqa: NPY002
    assert one == expected


def test_states_are_views_in_the_hosts_order_of_axes(ours: Any) -> None:
    buffer = filled(recurrent(ours))
    assert buffer.cell_states_vf.shape == (T, LAYERS, N, SIZE)
    assert (buffer.cell_states_vf[2, 1, :, 3] == number(2) + 0.75).all()
    buffer.hidden_states_pi[:] = 7
    assert all((batch.lstm_states.pi[0] == 7).all() for batch in buffer.get(5))
    with pytest.raises(TypeError, match=r"add\(\) needs lstm_states=RNNStates"):
        buffer.add(observed(BOX, 0), number(0), number(0), STARTS[0], torch.zeros(N), torch.zeros(N))
    buffer.reset()
    with pytest.raises(AssertionError, match="not full"):
        buffer.get(4)


@pytest.mark.parametrize("ready", [False, True])
def test_an_original_comes_over_before_and_after_it_was_flattened(ours: Any, ready: bool) -> None:
    def flat(column: Any) -> Any:
        return column.swapaxes(0, 1).reshape(T * N, *(column.shape[2:] or (1,)))

    for made, kept, further in (
        (filled(maskable(ours), masks=np.eye(5)[[[0, 1, 2]] * T]), ("rewards", "episode_starts"), ["action_masks"]),
        (filled(recurrent(ours)), ("rewards",), ["hidden_states_pi", "cell_states_pi", "hidden_states_vf"]),
    ):
        names = ["observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns"]
        held = {name: getattr(made, name).copy() for name in (*names, *further)}
        if ready:
            for name in set(held) - set(kept):
                held[name] = flat(held[name].swapaxes(1, 2) if "_states_" in name else held[name])
        facts = {name: getattr(made, name) for name in ("buffer_size", "observation_space", "action_space", "device",
                                                        "gae_lambda", "gamma", "n_envs")}  # fmt: skip
        original = SimpleNamespace(**facts, **held, pos=T, full=True, generator_ready=ready,
                                   hidden_state_shape=(T, LAYERS, N, SIZE))  # fmt: skip
        other = type(made).from_original(original)
        assert other.full
        for name in (*names, *further):
            assert np.array_equal(getattr(other, name), getattr(made, name)), name
    again = pickle.loads(pickle.dumps(made))
    assert np.array_equal(again.hidden_states_pi, made.hidden_states_pi)


@pytest.mark.parametrize("space", [BOX, MEMBERS])
def test_recurrent_ppo_has_our_buffer_with_the_arguments_of_its_own(ours: Any, space: Any) -> None:
    model = ours.RecurrentPPO(space, MOVES)
    buffer = model.rollout_buffer
    kind = "RecurrentDictRolloutBuffer" if space is MEMBERS else "RecurrentRolloutBuffer"
    assert type(buffer) is getattr(ours, kind)
    assert isinstance(buffer, getattr(stand_in, kind))
    assert (buffer.buffer_size, buffer.n_envs, buffer.gamma, buffer.gae_lambda) == (4, 3, 0.8, 0.9)
    assert buffer.hidden_states_vf.shape == (4, 2, 3, 5)
    with pytest.raises(AssertionError, match="must be used with Dict obs space only"):
        ours.RecurrentDictRolloutBuffer(T, BOX, MOVES, (T, LAYERS, N, SIZE))
    with pytest.raises(AssertionError, match="must be used with Dict obs space only"):
        ours.MaskableDictRolloutBuffer(T, BOX, MOVES)


def test_each_class_shows_all_its_arguments(ours: Any) -> None:
    shared = ["buffer_size", "observation_space", "action_space", "device", "gae_lambda", "gamma", "n_envs", "seed"]
    for kind in ("MaskableRolloutBuffer", "MaskableDictRolloutBuffer"):
        assert list(inspect.signature(getattr(ours, kind)).parameters) == shared
    for kind in ("RecurrentRolloutBuffer", "RecurrentDictRolloutBuffer"):
        assert list(inspect.signature(getattr(ours, kind)).parameters) == [
            *shared[:3],
            "hidden_state_shape",
            *shared[3:],
        ]
    assert list(inspect.signature(ours.MaskableRolloutBuffer.add).parameters)[-1] == "action_masks"


def test_states_with_gradients_are_stored_without_and_may_be_overwritten_afterwards(ours: Any) -> None:
    buffer = recurrent(ours)
    state = torch.ones(LAYERS, N, SIZE, requires_grad=True)
    held = torch.ones(LAYERS, N, SIZE)
    given = stand_in.RNNStates((state, held), (held, state))
    moves, values = number(0).astype(int), torch.zeros(N)
    buffer.add(observed(BOX, 0), moves, number(0), STARTS[0], values, values, lstm_states=given)
    held[:] = 5
    assert (buffer.cell_states_pi[0] == 1).all()
    assert (buffer.hidden_states_pi[0] == 1).all()


def test_a_subclass_that_overrides_what_is_never_called_is_refused(ours: Any) -> None:
    class Mine(ours.MaskableRolloutBuffer):
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Mine\._get_samples would never be called"):
        Mine(T, BOX, MOVES, "cpu")
