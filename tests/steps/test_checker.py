"""Every step is checked before it is stored: what is taken, what is refused and why; a refusal writes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike
from tensordict import TensorDict
from torch import Tensor

from relive import Field, ReplayBuffer, RolloutBuffer, Schema, errors
from relive.batches import leaves_by_path
from relive.steps.arrays import as_host, check_castable, numpy_view
from relive.steps.checker import StepChecker

N = 3
SCHEMA = Schema(
    {
        "obs": {"cam": Field((2, 2), torch.uint8), "pose": (Field((4,)), Field((), torch.float64))},
        "action": Field((), torch.int64),
        "reward": (),
        "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
        "value": (),
    }
)
STORED = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def step(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """A step of N envs that fits SCHEMA, unless ``changed`` says otherwise."""
    rng = np.random.default_rng(seed)
    fields = {
        "obs": {
            "cam": rng.integers(0, 256, (N, 2, 2), np.uint8),
            "pose": (rng.normal(size=(N, 4)).astype(np.float32), rng.normal(size=N)),
        },
        "action": rng.integers(-5, 5, N),
        "reward": rng.normal(size=N).astype(np.float32),
        "terminated": rng.random(N) < 0.5,
        "truncated": rng.random(N) < 0.5,
        "value": rng.normal(size=N).astype(np.float32),
    }
    return fields | changed


def one(field: Field, value: Any, num_envs: int = N) -> Tensor:
    """What is stored of ``value``, the only field of the only step: ``[N, ...]``."""
    rollout = RolloutBuffer(Schema({"x": field}), 1, num_envs)
    rollout.add(x=value)
    return rollout["x"][0]


def everything(rollout: RolloutBuffer) -> list[Tensor]:
    """A copy of all the memory of a rollout and of what it knows about itself."""
    block = [x.clone() for x in leaves_by_path(rollout.block).values()]
    return [*block, torch.tensor([rollout.steps, rollout.is_full, len(rollout)])]


def unchanged(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether two snapshots agree in every bit."""
    same = (
        a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes() for a, b in zip(before, after, strict=True)
    )
    return len(before) == len(after) and all(same)


@pytest.fixture
def rollout() -> Iterator[RolloutBuffer]:
    """A rollout with one step and one to come; whatever a test does to it, it must still take a step in the end."""
    rollout = RolloutBuffer(SCHEMA, 2, N, debug=True)
    rollout.add(step(1), mask=[True, False, True], final_value=np.arange(N))
    yield rollout
    rollout.add(step(2))
    for t in range(2):
        want = step(1 + t)
        assert np.array_equal(rollout["obs", "cam"][t], want["obs"]["cam"])
        assert np.array_equal(rollout["reward"][t], want["reward"])
    assert rollout["mask"].tolist() == [[True, False, True], [True] * 3]


# What is taken


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)], ids=str)
def test_a_tensor_of_the_stored_dtype_arrives_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = (torch.arange(N * 4).reshape(N, 4).sum(1) % 2).reshape(N, *[1] * len(shape)).expand(N, *shape).to(dtype)
    for value in (given, given.contiguous()):
        stored = one(Field(shape, dtype), value)
        assert stored.dtype is dtype
        assert torch.equal(stored, given)


@pytest.mark.parametrize("dtype", [d for d in STORED if d is not torch.bfloat16], ids=str)
def test_an_array_of_the_stored_dtype_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    given = torch.tensor([[0, 1], [1, 1], [0, 0]]).to(dtype)
    stored = one(Field((2,), dtype), given.numpy())
    assert stored.dtype is dtype
    assert torch.equal(stored, given)


def test_not_a_number_and_signed_zero_arrive_bit_for_bit() -> None:
    given = torch.tensor([float("nan"), -0.0, float("-inf")])
    for value in (given, given.numpy()):
        assert one(Field(), value).view(torch.int32).tolist() == given.view(torch.int32).tolist()


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": np.asfortranarray,
    "every other": lambda x: np.repeat(x, 2, axis=0)[::2],
    "backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "of a wider row": lambda x: np.concatenate([x, x], axis=1)[:, : x.shape[1]],
    "unaligned": lambda x: np.frombuffer(bytearray(b"\0" + x.tobytes()), np.uint8)[1:].view(x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("field", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_layout_of_an_array_does_not_matter(layout: str, dtype: DTypeLike, field: torch.dtype) -> None:
    plain = np.arange(N * 4).reshape(N, 4).astype(dtype)
    given = LAYOUTS[layout](plain)
    assert np.array_equal(given, plain)
    assert one(Field((4,), field), given).tolist() == plain.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16], ids=str)
def test_the_layout_of_a_tensor_does_not_matter(dtype: torch.dtype) -> None:
    plain = torch.arange(N * 4).reshape(N, 4).to(dtype)
    wide = torch.stack([plain, plain], -1)
    for given in (plain.T.contiguous().T, wide[..., 0], plain[:1].expand(N, 4), plain.repeat(2, 1)[N:]):
        assert one(Field((4,), dtype), given).tolist() == given.tolist()


@pytest.mark.parametrize("order", [">", "<"])
@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i2", "i4", "i8", "u2"])
@pytest.mark.parametrize("field", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_the_byte_order_of_an_array_does_not_matter(order: str, kind: str, field: torch.dtype) -> None:
    given = np.array([1, 2, 260], order + kind)
    if field is torch.int64 and kind[0] == "f":
        with pytest.raises(errors.DTypeError):
            one(Field((), field), given)
    else:
        assert one(Field((), field), given).tolist() == torch.tensor([1, 2, 260]).to(field).tolist()


def test_an_array_of_another_owner_is_taken_without_a_warning() -> None:
    given = np.array([1, 2, 3], np.int32)
    given.flags.writeable = False  # as JAX hands them out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one(Field((), torch.int64), given).tolist() == [1, 2, 3]
        assert one(Field((), torch.int32), given).tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_tensors_that_carry_a_graph_are_stored_without_it(dtype: torch.dtype) -> None:
    leaf = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for value in (leaf * 1, leaf.reshape(3, 1).expand(3, 2)[:, 1], torch.nn.Parameter(leaf)):
        stored = one(Field((), dtype), value)
        assert not stored.requires_grad
        assert stored.tolist() == [1, 2, 3]
        stored[:] = 0
    assert leaf.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["value", "final_value", "last"])
def test_values_straight_from_a_critic_may_carry_a_graph_wherever_they_are_passed(name: str) -> None:
    rollout = RolloutBuffer(SCHEMA, 2, N)
    value = torch.tensor([1.0, 2.0, 3.0], requires_grad=True) * 1
    if name == "last":
        rollout.add(step())
        rollout.set_last(value=value)
        stored = rollout.last["value"]
    else:
        rollout.add(step(**{name: value}))
        stored = rollout[name][0]
    assert stored.tolist() == [1, 2, 3]
    assert rollout.steps == 1


def test_lazily_conjugated_and_negated_tensors_are_stored_as_they_read() -> None:
    z = torch.tensor([[1 + 2j], [3 - 4j], [5j]])
    assert one(Field((1,), torch.complex64), z.conj()).tolist() == z.conj().tolist()
    assert one(Field((1,), torch.float32), z.conj().imag).tolist() == [[-2], [4], [-5]]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (np.array([1.5, -2.0, 3.25]), torch.float32),
        (np.array([1.5, -2.0, 3.25]), torch.float16),
        (np.array([1.5, -2.0, 3.25], np.float32), torch.float64),
        (np.array([1.5, -2.0, 3.25], np.float32), torch.bfloat16),
        (torch.tensor([1.5, -2.0, 3.25], dtype=torch.float64), torch.float32),
        (torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16), torch.float32),
        (torch.tensor([1.5, -2.0, 3.25]), torch.bfloat16),
        ([1.5, -2.0, 3.25], torch.float32),
        ((1, 2, 3), torch.float32),
        ([True, False, True], torch.float32),
        (np.array([1, 2, 3]), torch.float32),
        (np.array([1, 2, 3]), torch.uint8),
        (np.array([1, 2, 3]), torch.uint16),
        (np.array([1, 2, 3], np.int8), torch.int64),
        (np.array([1, 2, 65535], np.uint16), torch.int64),
        (np.array([1, 2, 2**32 - 1], np.uint32), torch.int64),
        (np.array([1, 2, 3], np.uint64), torch.int64),
        (torch.tensor([1, 2, 3], dtype=torch.uint16), torch.int32),
        (np.array([True, False, True]), torch.int64),
        ([1, 0, 7], torch.int64),
        (np.array([1.0, 2.0, 3.0]), torch.complex64),
        (np.ma.masked_array([1.0, 2.0, 3.0]), torch.float32),
    ],
    ids=lambda x: str(getattr(x, "dtype", x)),
)
def test_what_keeps_its_meaning_is_converted(given: Any, field: torch.dtype) -> None:
    stored = one(Field((), field), given)
    assert stored.dtype is field
    assert (
        stored.tolist()
        == torch.tensor(np.asarray(given).tolist() if not isinstance(given, Tensor) else given.tolist())
        .to(field)
        .tolist()
    )


@pytest.mark.parametrize(
    "value", [3.0, np.float64(3), np.float32(3), 3, np.array(3.0), torch.tensor(3.0), [3.0]], ids=repr
)
def test_the_number_of_a_single_env_needs_no_axis(value: Any) -> None:
    assert one(Field(), value, num_envs=1).tolist() == [3.0]


def test_several_rows_for_a_single_env_are_refused_with_the_number_of_envs() -> None:
    with pytest.raises(errors.ShapeError, match="pass one row, as num_envs is 1"):
        one(Field(), [1.0, 2.0], num_envs=1)


def test_a_single_env_may_leave_out_the_leading_axis_of_any_field() -> None:
    rollout = RolloutBuffer(SCHEMA, 2, 1)
    full = {
        "obs": {"cam": np.ones((1, 2, 2), np.uint8), "pose": (torch.ones(1, 4), [2.5])},
        "action": [3], "reward": [1.0], "terminated": [True], "truncated": [False], "value": torch.tensor([4.0]),
    }  # fmt: skip
    bare = {
        "obs": {"cam": np.ones((2, 2), np.uint8), "pose": (torch.ones(4), 2.5)},
        "action": 3, "reward": 1.0, "terminated": True, "truncated": False, "value": torch.tensor(4.0),
    }  # fmt: skip
    rollout.add(full, mask=[False], final_value=[5.0])
    rollout.add(bare, mask=False, final_value=5.0)
    for name, column in leaves_by_path(rollout.data()).items():
        assert torch.equal(column[0], column[1]), name
    assert rollout["mask"].tolist() == [[False], [False]]


def test_a_step_may_come_as_a_tensordict_and_tuples_as_lists() -> None:
    given = step(3)
    pose = given["obs"]["pose"]
    nested = TensorDict(
        {
            "obs": {
                "cam": torch.tensor(given["obs"]["cam"]),
                "pose": {"0": torch.tensor(pose[0]), "1": torch.tensor(pose[1])},
            },
            **{name: torch.tensor(x) for name, x in given.items() if name != "obs"},
        },
        [N],
    )
    rollout = RolloutBuffer(SCHEMA, 3, N)
    rollout.add(given)
    rollout.add(nested)
    rollout.add(step(3, obs={"cam": given["obs"]["cam"], "pose": list(pose)}))
    data = rollout.data()
    del data["final_value"]
    for name, column in leaves_by_path(data).items():
        assert torch.equal(column[0], column[1]), name
        assert torch.equal(column[0], column[2]), name


@pytest.mark.parametrize(
    ("obs", "said"),
    [
        ([{"cam": 1}, {"cam": 2}], "list of 2 dicts given; pass one dict, whose members have one row per env"),
        (np.array([{"cam": 1}] * N), "ndarray of 3 dicts given; pass one dict"),
        (np.zeros((N, 9)), r"ndarray of shape \(3, 9\) given; pass a dict or tuple of its members"),
        (torch.zeros(N, 9), r"Tensor of shape \(3, 9\) given; pass a dict or tuple of its members"),
        (None, "NoneType given; pass a dict or tuple of its members"),
        ({"camera": 1, "pose": 2}, "dict given, which has 'camera', 'pose'"),
    ],
    ids=["dicts", "an array of dicts", "an array", "a tensor", "none", "another member"],
)
def test_what_is_given_for_a_nested_field_and_has_no_members_is_said(obs: Any, said: str) -> None:
    rollout = RolloutBuffer(SCHEMA, 2, N)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.FieldError, match=f"field 'obs.cam': missing from the {said}"):
            rollout.add(step(obs=obs))
    assert rollout.steps == 0


@pytest.mark.parametrize(
    ("pose", "said"),
    [
        ((np.zeros((N, 4)),), r"1': missing from 'obs.pose', the tuple of 1 given"),
        (np.zeros((N, 4)), r"0': missing from 'obs.pose', the ndarray of shape \(3, 4\) given; pass a dict or tuple"),
        ({"x": 1}, r"0': missing from 'obs.pose', the dict given, which has 'x'"),
    ],
    ids=["a short tuple", "an array", "a dict"],
)
def test_what_is_given_deep_within_a_field_and_lacks_a_member_is_said(pose: Any, said: str) -> None:
    with pytest.raises(errors.FieldError, match=rf"field 'obs.pose.{said}"):
        RolloutBuffer(SCHEMA, 2, N).add(step(obs=step()["obs"] | {"pose": pose}))


def test_a_tuple_without_a_member_is_said() -> None:
    with pytest.raises(errors.FieldError, match=r"field 'x.1': missing from the tuple of 1 given"):
        RolloutBuffer(Schema({"x": ((), ())}), 2, N).add(x=(np.zeros(N),))


def test_the_step_that_was_given_is_neither_changed_nor_kept() -> None:
    rollout = RolloutBuffer(SCHEMA, 2, N)
    given = step(4) | {"value": torch.ones(N), "mask": np.array([True, False, True])}
    names = list(given)
    rollout.add(given)
    assert list(given) == names
    given["reward"][:] = 77
    given["value"][:] = 77
    given["mask"][:] = False
    assert rollout["reward"].tolist() == [step(4)["reward"].tolist()]
    assert rollout["value"].tolist() == [[1, 1, 1]]
    assert rollout["mask"].tolist() == [[True, False, True]]


def test_the_checker_copies_nothing_that_fits() -> None:
    check = StepChecker(Schema({"a": (2,), "b": Field((), torch.int64)}), N, torch.device("cpu"))
    a, b = np.ones((N, 2), np.float32), torch.ones(N, dtype=torch.int64)
    first, second = check({"b": b, "a": a})
    assert first is a
    assert second.data_ptr() == b.data_ptr()


def test_bits_without_a_numpy_dtype_are_viewed_as_integers_of_their_size() -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    view = numpy_view(x)
    view[1] = view[0]
    assert x.tolist() == [1.0, 1.0]
    assert view.dtype == np.int16


# What is refused, and how


def rows(*shape: int) -> np.ndarray:
    """A float32 array of zeros."""
    return np.zeros(shape, np.float32)


def obs(**changed: Any) -> dict[str, Any]:
    """The observation of a step that fits, unless ``changed`` says otherwise."""
    return step()["obs"] | changed


Case = tuple[dict[str, Any], type[Exception], list[str]]
REFUSED: dict[str, Case] = {
    "one env too many": ({"value": rows(4)}, errors.ShapeError, ["'value'", "(3,)", "(4,)", "3 envs"]),
    "one env too few": ({"value": torch.zeros(2)}, errors.ShapeError, ["'value'", "(3,)", "(2,)", "3 envs"]),
    "no leading axis": ({"value": 1.0}, errors.ShapeError, ["'value'", "(3,)", "()", "one row per env"]),
    "no leading axis of an image": (
        {"obs": obs(cam=np.zeros((2, 2), np.uint8))}, errors.ShapeError, ["'obs.cam'", "(3, 2, 2)", "num_envs"],
    ),
    "a trailing axis of one": ({"reward": rows(3, 1)}, errors.ShapeError, ["'reward'", "(3, 1)", ".squeeze(-1)"]),
    "envs in the second place": (
        {"obs": obs(cam=np.zeros((2, 3, 2), np.uint8))}, errors.ShapeError, ["'obs.cam'", ".transpose(0, 1)"],
    ),
    "another shape per env": (
        {"obs": obs(pose=(rows(3, 5), rows(3)))}, errors.ShapeError, ["'obs.pose.0'", "(3, 5)", "(4,) per env"],
    ),
    "float for int": ({"action": rows(3)}, errors.DTypeError, ["'action'", "torch.int64", "torch.float32", ".to("]),
    "float tensor for int": (
        {"action": torch.zeros(3)}, errors.DTypeError, ["'action'", "torch.int64", "torch.float32", ".to("],
    ),
    "float for image": (
        {"obs": obs(cam=rows(3, 2, 2))}, errors.DTypeError, ["'obs.cam'", "torch.uint8", "torch.float32", "declare"],
    ),
    "float for bool": ({"terminated": rows(3)}, errors.DTypeError, ["'terminated'", "torch.bool", "torch.float32"]),
    "int for bool": ({"truncated": [0, 1, 0]}, errors.DTypeError, ["'truncated'", "torch.bool", "torch.int64"]),
    "complex for float": (
        {"value": np.zeros(3, np.complex64)}, errors.DTypeError, ["'value'", "torch.float32", "torch.complex64"],
    ),
    "too large for uint8": (
        {"obs": obs(cam=np.full((3, 2, 2), 256))}, errors.DTypeError, ["'obs.cam'", "256", "torch.uint8", "wider"],
    ),
    "negative for uint8": (
        {"obs": obs(cam=np.full((3, 2, 2), -1))}, errors.DTypeError, ["'obs.cam'", "-1", "torch.uint8", "wider"],
    ),
    "too large for int64": (
        {"action": np.full(3, 2**63, np.uint64)}, errors.DTypeError, ["'action'", str(2**63), "torch.int64"],
    ),
    "too large for float32": (
        {"reward": np.array([0, 1e39, 0])}, errors.DTypeError, ["'reward'", "1e+39", "torch.float32", "wider"],
    ),
    "too large for float32, of the other sign, in a row": (
        {"obs": obs(pose=(np.full((3, 4), -1e39), rows(3)))}, errors.DTypeError, ["'obs.pose.0'", "1e+39"],
    ),
    "far too large for float32": ({"reward": np.full(3, 1e300)}, errors.DTypeError, ["'reward'", "1e+300"]),
    "too large a tensor": (
        {"value": torch.full((3,), 1e39, dtype=torch.float64)}, errors.DTypeError, ["'value'", "1e+39", "float32"],
    ),
    "too large a number in a list": ({"value": [0.0, 0.0, 1e39]}, errors.DTypeError, ["'value'", "1e+39"]),
    "another device": (
        {"value": torch.zeros(3, device="meta")}, errors.DeviceError, ["'value'", "cpu", "meta", ".to('cpu')"],
    ),
    "another device and dtype": (
        {"value": torch.zeros(3, device="meta", dtype=torch.float64)}, errors.DeviceError, ["'value'", "cpu", "meta"],
    ),
    "an unknown field": ({"valeu": rows(3)}, errors.FieldError, ["'valeu'", "did you mean 'value'", "reward"]),
    "text": ({"value": "abc"}, errors.ShapeError, ["'value'", "str"]),
    "nothing": ({"value": None}, errors.ShapeError, ["'value'", "NoneType"]),
    "objects": ({"value": np.array([1, None, 2])}, errors.ShapeError, ["'value'", "object"]),
    "ragged lists": ({"obs": obs(pose=([[1.0], [1.0, 2.0]], rows(3)))}, errors.ShapeError, ["'obs.pose.0'", "list"]),
    "a dict for an array": ({"value": {"a": rows(3)}}, errors.ShapeError, ["'value'", "dict"]),
    "an array for a dict": ({"obs": rows(3, 2, 2)}, errors.FieldError, ["'obs.cam'"]),
    "a tensor for a dict": ({"obs": torch.zeros(3, 2, 2)}, errors.FieldError, ["'obs.cam'"]),
    "a list for a dict": ({"obs": [rows(3), rows(3)]}, errors.FieldError, ["'obs.cam'"]),
    "nothing for a dict": ({"obs": None}, errors.FieldError, ["'obs.cam'"]),
    "a tensor for a tuple": ({"obs": obs(pose=torch.zeros(3, 4))}, errors.FieldError, ["'obs.pose.0'"]),
    "an array for a tuple": ({"obs": obs(pose=rows(3, 4))}, errors.FieldError, ["'obs.pose.0'"]),
    "a short tuple": ({"obs": obs(pose=(rows(3, 4),))}, errors.FieldError, ["'obs.pose.1'"]),
    "a long tuple": ({"obs": obs(pose=(rows(3, 4), rows(3), rows(3)))}, errors.FieldError, ["'obs.pose"]),
    "a lacking member": ({"obs": {"cam": obs()["cam"]}}, errors.FieldError, ["'obs.pose"]),
    "an unknown member": ({"obs": obs(camera=1)}, errors.FieldError, ["camera", "cam"]),
    "a mask that is not bool": ({"mask": [1, 0, 1]}, errors.DTypeError, ["'mask'", "torch.bool", "torch.int64"]),
    "a mask of other envs": ({"mask": [True]}, errors.ShapeError, ["'mask'", "(3,)", "(1,)"]),
    "final values of other envs": ({"final_value": rows(4)}, errors.ShapeError, ["'final_value'", "(3,)", "(4,)"]),
    "not a number": ({"reward": np.array([0, np.nan, 0])}, errors.NotFiniteError, ["'reward'", "step 1 of env 1"]),
    "infinite": ({"reward": torch.tensor([0, 0, -torch.inf])}, errors.NotFiniteError, ["'reward'", "env 2", "-inf"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_step_that_does_not_fit_is_refused_with_what_to_do_and_nothing_is_written(
    rollout: RolloutBuffer, what: str
) -> None:
    changed, error, says = REFUSED[what]
    before = everything(rollout)
    with pytest.raises(error) as caught:
        rollout.add(step(9, **changed), **({} if "mask" in changed else {"mask": [False, True, True]}))
    message = str(caught.value)
    assert [part for part in says if part not in message] == [], message
    assert isinstance(caught.value, errors.ReliveError)
    assert unchanged(before, everything(rollout))


@pytest.mark.parametrize("name", ["reward", "obs"])
def test_a_step_that_lacks_a_field_is_refused_by_its_name(rollout: RolloutBuffer, name: str) -> None:
    before = everything(rollout)
    given = step(9)
    del given[name]
    with pytest.raises(errors.FieldError, match=rf"lacks '{name}'; a step has exactly the fields obs, action"):
        rollout.add(given)
    assert unchanged(before, everything(rollout))


@pytest.mark.parametrize(
    "what", [name for name, (changed, _, _) in REFUSED.items() if not {"mask", "reward"} & {*changed}]
)
def test_a_last_row_that_does_not_fit_is_refused_and_nothing_is_written(rollout: RolloutBuffer, what: str) -> None:
    changed, error, _ = REFUSED[what]
    changed = {name: x for name, x in changed.items() if name != "final_value"} or {"value": rows(4)}
    before = everything(rollout)
    good = {"action": np.full(N, 9), "value": rows(N)}
    with pytest.raises(error):
        rollout.set_last(**{name: x for name, x in good.items() if name not in changed}, **changed)
    assert unchanged(before, everything(rollout))


def test_a_number_that_is_not_finite_is_found_in_the_reward_of_a_single_env() -> None:
    rollout = RolloutBuffer(Schema({"reward": ()}), 2, 1, debug=True)
    rollout.add(reward=1.0)
    for reward in (float("nan"), np.float32("inf"), [float("nan")], torch.tensor(float("-inf"))):
        with pytest.raises(errors.NotFiniteError, match="step 1 of env 0"):
            rollout.add(reward=reward)
    assert rollout.steps == 1


def test_rewards_are_looked_at_in_debug_mode_only() -> None:
    rollout = RolloutBuffer(Schema({"reward": ()}), 1, 2)
    rollout.add(reward=[float("nan"), 1.0])
    assert rollout["reward"].isnan().tolist() == [[True, False]]


def test_rewards_without_a_numpy_dtype_are_looked_at_too() -> None:
    rollout = RolloutBuffer(Schema({"reward": Field((), torch.bfloat16)}), 2, 2, debug=True)
    rollout.add(reward=torch.tensor([1, 2], dtype=torch.bfloat16))
    with pytest.raises(errors.NotFiniteError, match="step 1 of env 1"):
        rollout.add(reward=torch.tensor([1, torch.nan], dtype=torch.bfloat16))
    assert rollout["reward"].tolist() == [[1, 2]]


def test_rewards_of_several_objectives_name_the_right_step_and_env() -> None:
    rollout = RolloutBuffer(Schema({"reward": (2,)}), 2, 3, debug=True)
    with pytest.raises(errors.NotFiniteError, match="step 0 of env 2"):
        rollout.add(reward=[[0, 0], [0, 0], [0, float("nan")]])


def test_a_foreign_device_is_refused_on_every_other_device_as_well() -> None:
    rollout = RolloutBuffer(Schema({"x": ()}), 2, N, device="meta")
    rollout.add(x=torch.zeros(N, device="meta"))
    rollout.add(x=np.zeros(N))  # arrays are always copied over
    with pytest.raises(errors.DeviceError, match=r"'x': the buffer is on meta, got a tensor on cpu"):
        rollout.add(x=torch.zeros(N))
    assert rollout.steps == 2


SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("given", [*SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
@pytest.mark.parametrize("field", [*SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_integers_are_converted_exactly_if_they_fit_and_else_refused(given: torch.dtype, field: torch.dtype) -> None:
    source, target = torch.iinfo(given), torch.iinfo(field)
    for number in sorted({source.min, source.max, -1, 0, 1, target.min, target.max, target.min - 1, target.max + 1}):
        if not source.min <= number <= source.max:
            continue
        array = np.array([0, number, 0], str(given).removeprefix("torch."))
        for value in (array, torch.from_numpy(array)):
            if target.min <= number <= target.max:
                assert one(Field((), field), value).tolist() == [0, number, 0]
            else:
                with pytest.raises(errors.DTypeError, match=str(number)):
                    one(Field((), field), value)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64]


SIZES = [1.0, 65504.0, 65519.0, 65521.0, 1e5, 1e9, 1e18, 1e30, 3.39e38, 3.4028235e38, 1e39, 1e300, 1.7e308]


@pytest.mark.parametrize("given", [*FLOATS, torch.int64, torch.int32, torch.uint32, torch.uint16], ids=str)
@pytest.mark.parametrize("field", FLOATS, ids=str)
def test_a_finite_number_is_stored_as_a_finite_one_or_refused(given: torch.dtype, field: torch.dtype) -> None:
    if not torch.can_cast(given, field):
        return
    floats = given.is_floating_point or given.is_complex
    largest = (torch.finfo(given) if floats else torch.iinfo(given)).max
    for size in [size for size in SIZES if size <= largest]:
        value = torch.tensor([0.0, size, -size if floats else 1.0], dtype=torch.float64).to(given)
        if not value.isfinite().all():
            continue
        for way in [value] if given is torch.bfloat16 else [value, value.numpy(), value.tolist()]:
            stored = value.to(field)
            if not stored.isfinite().all():
                with pytest.raises(errors.DTypeError, match=rf"'x': .* is more than {field} holds"):
                    one(Field((), field), way)
            elif not floats and int(stored[1].real) != int(size):
                with pytest.raises(errors.DTypeError, match=rf"'x': {int(size)} is not a number of {field}"):
                    one(Field((), field), way)
            else:
                assert torch.equal(one(Field((), field), way), stored)


BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53, torch.complex64: 24}


@pytest.mark.parametrize("given", [np.int32, np.int64, np.uint32, np.uint64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("field", BITS, ids=str)
def test_a_whole_number_is_stored_exactly_in_a_float_field_or_refused(given: DTypeLike, field: torch.dtype) -> None:
    limits, largest = np.iinfo(given), 2 ** BITS[field]
    most, says = min(limits.max, int(torch.finfo(field).max)), rf"is not a number of {field}.*up to {largest}"
    for exact in (largest, -largest, largest - 1, 2 * (largest - 1), limits.min, 0):
        if max(-most - 1, limits.min) <= exact <= most:
            assert one(Field((), field), np.array([0, exact, 1], given))[1].item() == exact
    for lost in (largest + 1, -largest - 1, 2 * largest + 2, limits.max - 1):
        if abs(lost) > largest and max(-most, limits.min) <= lost <= most:
            array = np.array([0, lost, 1], given)
            listed = [array.tolist()] if lost < 2**63 else []  # beyond, NumPy itself makes floats of a list
            for value in (array, torch.from_numpy(array), *listed):
                with pytest.raises(errors.DTypeError, match=f"'x': {lost} {says}"):
                    one(Field((), field), value)


@pytest.mark.parametrize("reward", [2**24 + 1, 1e300])
def test_a_reward_that_float32_cannot_hold_is_to_be_scaled_as_no_other_dtype_can_be_declared(reward: float) -> None:
    schema = Schema.from_example({"obs": 0.0, "reward": 0.0, "terminated": False, "truncated": False})
    replay = ReplayBuffer(schema, capacity=4)
    for given in (np.array([reward]), torch.tensor([reward], dtype=torch.int64 if reward < 1e9 else torch.float64)):
        with pytest.raises(errors.DTypeError, match=r"'reward': .*; a replay's rewards are always float32, so scale"):
            replay.add(obs=0.0, reward=given, terminated=False, truncated=False)


def test_a_masked_array_is_refused_where_a_number_is_masked_whatever_it_is_passed_to() -> None:
    rollout = RolloutBuffer(Schema({"x": (), "value": ()}), num_steps=1, num_envs=2)
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    for write in (
        lambda: rollout.add(x=masked, value=[0.0, 0.0]),
        lambda: rollout.set_last(value=masked),
        lambda: rollout.__setitem__("other", masked[None]),
        lambda: as_host(masked, "x"),
    ):
        with pytest.raises(errors.DTypeError, match=r"with 1 masked of 2 numbers; pass its \.filled\(\.\.\.\)"):
            write()
    assert rollout.steps == 0


def test_a_number_is_refused_that_a_dtype_without_infinity_would_cut_off() -> None:
    assert one(Field((), torch.float8_e4m3fn), [448.0, -448.0, 1.0]).float().tolist() == [448, -448, 1]
    with pytest.raises(errors.DTypeError, match="500 is more than"):
        one(Field((), torch.float8_e4m3fn), [500.0, 0.0, 0.0])


@pytest.mark.parametrize("field", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_that_are_not_finite_are_stored_as_they_are_given(field: torch.dtype) -> None:
    given = [float("inf"), -float("inf"), float("nan")]
    for value in (np.array(given), torch.tensor(given, dtype=torch.float64), given):
        stored = one(Field((), field), value)
        assert stored[:2].tolist() == given[:2]
        assert stored[2].isnan()


def test_every_way_into_a_column_refuses_a_number_that_is_too_large() -> None:
    rollout = RolloutBuffer(Schema({"value": (), "truncated": Field((), torch.bool)}), num_steps=1, num_envs=2)
    rollout.add(value=np.zeros(2), truncated=np.ones(2, np.bool_))
    large = np.full(2, 1e39)
    for write in (
        lambda: rollout.set_last(value=large),
        lambda: rollout.set_final_value([0, 0], [0, 1], large),
        lambda: rollout.__setitem__("value", large[None]),
    ):
        with pytest.raises(errors.DTypeError, match=r"is more than torch\.float32 holds"):
            write()
    assert rollout["value"].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("given", STORED, ids=str)
def test_only_bools_are_bools(given: torch.dtype) -> None:
    value = torch.tensor([0, 1, 0]).to(given)
    if given is torch.bool:
        check_castable(value, torch.bool, "x")
    else:
        with pytest.raises(errors.DTypeError, match=r"'x': expected torch\.bool"):
            check_castable(value, torch.bool, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16], ids=str)
def test_a_tensor_that_is_negated_or_conjugated_lazily_arrives_with_its_numbers(dtype: torch.dtype) -> None:
    plain, private = torch.arange(1, N + 1).to(dtype), cast("Any", torch)
    for given in (private._neg_view(plain), plain.conj(), private._efficientzerotensor(N).to(dtype)):
        rollout = RolloutBuffer(Schema({"x": Field((), dtype), "y": ()}), 3, N)
        for value in (plain, plain, given):  # by then, plain ones are copied by address
            rollout.add(x=value, y=torch.ones(N))
        assert torch.equal(rollout["x"][2], given + 0)
