"""``relive.Schema`` and ``relive.Field``: what a step consists of, from every source, to JSON and back."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from relive import Field, RolloutBuffer, Schema, errors

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
FIXED = {
    ("reward",): Field((), torch.float32),
    ("terminated",): Field((), torch.bool),
    ("truncated",): Field((), torch.bool),
}
VISIBLE = st.characters(exclude_characters=".", exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"])
NAMES = st.text(VISIBLE, min_size=1, max_size=8)
FIELDS = st.builds(Field, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES))
NODES = st.recursive(
    FIELDS,
    lambda node: (
        st.dictionaries(NAMES, node, min_size=1, max_size=3) | st.lists(node, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=8,
)
SCHEMAS = st.dictionaries(NAMES, NODES, min_size=1, max_size=4).map(Schema)


def space_schema(space: Any) -> Schema:
    """The schema of an env with this observation space."""
    return Schema.from_spaces(space, spaces.Discrete(2))


def text_of(field: Any, **more: Any) -> str:
    """JSON of a schema of one field "x" that was tampered with."""
    return json.dumps({"format": 1, "fields": {"x": field}} | more)


# From spaces


@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (2, 0, 3), (84, 84, 4), (1, 1, 1, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64"]
)
def test_a_box_keeps_its_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    schema = space_schema(spaces.Box(0, 1, shape, np.dtype(dtype).type))
    field = schema["obs"]
    assert field == Field(shape, getattr(torch, dtype))
    assert field.nbytes == math.prod(shape) * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("space", "field"),
    [
        (spaces.Discrete(5), Field((), torch.int64)),
        (spaces.Discrete(5, start=-3), Field((), torch.int64)),
        (spaces.Discrete(5, dtype=np.int16), Field((), torch.int16)),
        (spaces.MultiDiscrete([3, 4]), Field((2,), torch.int64)),
        (spaces.MultiDiscrete([[3, 4, 5], [2, 2, 2]], dtype=np.int32), Field((2, 3), torch.int32)),
        (spaces.MultiBinary(7), Field((7,), torch.int8)),
        (spaces.MultiBinary([2, 3]), Field((2, 3), torch.int8)),
    ],
    ids=repr,
)
def test_discrete_spaces_keep_their_integers(space: Any, field: Field) -> None:
    schema = Schema.from_spaces(space, space)
    assert schema["obs"] == schema["action"] == field
    sample = torch.as_tensor(np.asarray(space.sample()))
    assert (tuple(sample.shape), sample.dtype) == (field.shape, field.dtype)


def test_an_env_has_the_fields_of_the_contract_with_fixed_dtypes() -> None:
    schema = Schema.from_spaces(spaces.Box(0, 1, (3,), np.float64), spaces.Discrete(2))
    assert schema.names == ("obs", "action", "reward", "terminated", "truncated")
    assert {path: schema.leaves[path] for path in FIXED} == FIXED


def test_spaces_nested_three_deep_become_the_same_tree_of_fields() -> None:
    camera = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    inner = spaces.Tuple([spaces.Dict({"deep": spaces.Discrete(3)}), spaces.MultiBinary(2)])
    schema = space_schema(
        spaces.Dict({"cam": camera, "body": spaces.Dict({"arm": inner}), "x": spaces.Tuple([camera])})
    )
    leaves = {path[1:]: field for path, field in schema.leaves.items() if path[0] == "obs"}
    assert leaves == {
        ("cam",): Field((4, 4, 3), torch.uint8),
        ("body", "arm", "0", "deep"): Field((), torch.int64),
        ("body", "arm", "1"): Field((2,), torch.int8),
        ("x", "0"): Field((4, 4, 3), torch.uint8),
    }
    assert isinstance(schema["obs"], dict)
    assert isinstance(schema["obs", "body", "arm"], tuple)


@pytest.mark.parametrize(
    "bad",
    [
        spaces.Text(3),
        spaces.Graph(spaces.Box(0, 1), spaces.Box(0, 1)),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1)]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_without_a_fixed_shape_are_refused_by_their_path(bad: Any) -> None:
    name = type(bad).__name__
    nested = spaces.Dict(
        {"ok": spaces.Discrete(2), "body": spaces.Tuple([spaces.Discrete(2), spaces.Dict({"in": bad})])}
    )
    for observation_space, action_space, where in [
        (bad, spaces.Discrete(2), "observation_space: "),
        (spaces.Discrete(2), bad, "action_space: "),
        (nested, spaces.Discrete(2), "observation_space['body'][1]['in']: "),
    ]:
        with pytest.raises(errors.SpaceError) as caught:
            Schema.from_spaces(observation_space, action_space)
        message = str(caught.value)
        assert message.startswith(where + name)
        assert "use Box" in message


def test_a_dtype_that_torch_lacks_is_refused_by_its_path() -> None:
    wide = spaces.Box(0, 1, (2,), np.longdouble)
    with pytest.raises(errors.SpaceError, match=r"observation_space\['x'\].*float128"):
        space_schema(spaces.Dict({"x": wide}))


@pytest.mark.parametrize("empty", [spaces.Dict({}), spaces.Tuple([])], ids=repr)
def test_a_space_without_members_is_refused_and_not_taken_for_a_number(empty: Any) -> None:
    with pytest.raises(errors.SchemaError):
        space_schema(empty)


def test_a_vector_env_and_its_single_env_have_the_same_schema() -> None:
    extras: dict[str, Any] = {"value": (), "hidden": {"h": (1, 8)}}
    env = gymnasium.make("CartPole-v1")
    envs = gymnasium.make_vec("CartPole-v1", num_envs=3)
    assert Schema.from_env(envs, **extras) == Schema.from_env(env, **extras)
    assert Schema.from_env(envs)["obs"] == Field((4,), torch.float32)
    env.close()
    envs.close()


def test_extras_may_be_fields_shapes_and_nested_dicts_and_tuples() -> None:
    schema = Schema.from_spaces(
        spaces.Discrete(2),
        spaces.Discrete(2),
        value=(),
        action_mask=Field((2,), torch.bool),
        hidden=(Field((1, 8)), {"c": (1, 8), "deep": ((3,), Field((), torch.int32))}),
        privileged={"mass": [2, 3]},
    )
    extras = {path: field for path, field in schema.leaves.items() if path[0] not in ("obs", "action")}
    assert extras == FIXED | {
        ("value",): Field(()),
        ("action_mask",): Field((2,), torch.bool),
        ("hidden", "0"): Field((1, 8)),
        ("hidden", "1", "c"): Field((1, 8)),
        ("hidden", "1", "deep", "0"): Field((3,)),
        ("hidden", "1", "deep", "1"): Field((), torch.int32),
        ("privileged", "mass"): Field((2, 3)),
    }


# From an example step


def test_an_example_of_arrays_tensors_and_numbers_gives_their_shapes_and_dtypes() -> None:
    schema = Schema.from_example(
        {
            "image": np.zeros((8, 8), np.uint8),
            "half": torch.zeros(3, dtype=torch.bfloat16),
            "wide": np.zeros(2, np.float64),
            "scalar": np.int16(3),
            "float": 1.5,
            "int": 3,
            "flag": True,
            "list": [1.0, 2.0],
            "hidden": (torch.zeros(1, 4), {"c": np.zeros((1, 4), np.float32)}),
        }
    )
    assert schema.leaves == {
        ("image",): Field((8, 8), torch.uint8),
        ("half",): Field((3,), torch.bfloat16),
        ("wide",): Field((2,), torch.float64),
        ("scalar",): Field((), torch.int16),
        ("float",): Field((), torch.float32),
        ("int",): Field((), torch.int64),
        ("flag",): Field((), torch.bool),
        ("list",): Field((2,), torch.float32),
        ("hidden", "0"): Field((1, 4)),
        ("hidden", "1", "c"): Field((1, 4)),
    }


def test_the_reward_and_done_bits_of_an_example_are_float32_and_bool_whatever_they_were() -> None:
    step = {"reward": np.zeros(3, np.float64), "terminated": np.zeros(3, np.uint8), "truncated": torch.zeros(3)}
    assert Schema.from_example(step, num_envs=3).leaves == FIXED


def test_the_leading_axis_of_an_example_of_many_envs_is_no_part_of_its_fields() -> None:
    schema = Schema.from_example({"obs": {"a": np.zeros((5, 2))}, "value": torch.zeros(5)}, num_envs=5)
    assert schema.leaves == {("obs", "a"): Field((2,), torch.float64), ("value",): Field(())}


@pytest.mark.parametrize("value", [np.zeros((4, 2)), np.zeros(()), 1.0], ids=repr)
def test_an_example_with_another_number_of_envs_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(errors.ShapeError, match=r"'obs\.a'.*\b5\b"):
        Schema.from_example({"obs": {"a": value}}, num_envs=5)


@pytest.mark.parametrize(
    "value", ["text", None, object(), [[1.0], [1.0, 2.0]], np.array(["a"])], ids=lambda v: type(v).__name__
)
def test_an_example_that_is_no_array_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(errors.SchemaError, match=r"'obs\.a'"):
        Schema.from_example({"obs": {"a": value}})


def test_a_named_tuple_of_an_example_counts_as_a_tuple() -> None:
    state = namedtuple("state", "h c")(np.zeros((1, 4)), np.zeros((1, 2)))
    assert list(Schema.from_example({"hidden": state}).leaves) == [("hidden", "0"), ("hidden", "1")]


def test_a_buffer_takes_the_example_its_schema_was_made_from() -> None:
    step = {"obs": ({"a": np.ones((2, 3), np.uint8)}, np.full(2, 7)), "reward": np.ones(2), "flag": [True, False]}
    rollout = RolloutBuffer(Schema.from_example(step, num_envs=2), 1, 2)
    rollout.add(step)
    assert rollout["obs", "0", "a"].tolist() == [[[1, 1, 1], [1, 1, 1]]]
    assert rollout["obs", "1"].tolist() == [[7, 7]]
    assert rollout["flag"].tolist() == [[True, False]]


# By hand


def test_a_shape_may_hold_integers_of_numpy() -> None:
    field = Field(cast("Any", (np.int64(3), np.uint8(2))))
    assert field == Field((3, 2))
    assert all(type(n) is int for n in field.shape)
    schema = Schema({"obs": cast("Any", (np.int32(3),))})
    assert schema["obs"] == Field((3,))
    assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize("shape", [(-1,), (2.0,), (True,), ("2",), 3, None, "", "23", {}, {3}, (2, None)], ids=repr)
def test_a_shape_that_is_no_tuple_of_counts_is_refused(shape: Any) -> None:
    with pytest.raises(errors.SchemaError, match="shape"):
        Field(shape)


@pytest.mark.parametrize("dtype", [np.float32, "float32", float, None, np.dtype("f4")], ids=repr)
def test_a_dtype_that_is_not_torchs_is_refused(dtype: Any) -> None:
    with pytest.raises(errors.SchemaError, match=r"torch\.float32"):
        Field((), dtype)


@pytest.mark.parametrize(
    "fields",
    [{}, {"": ()}, {"a.b": ()}, {3: ()}, {"a": {}}, {"a": {"b.c": ()}}, {"a": {"": ()}}, {"a": 3}, {"a": "x"},
     {"a": None}, {"a": torch.float32}, {"a": ((), 3)}, {"a": {"b": ({"c": None},)}}],
    ids=repr,
)  # fmt: skip
def test_a_field_that_is_none_is_refused(fields: Any) -> None:
    with pytest.raises(errors.SchemaError):
        Schema(fields)


def test_the_error_of_a_bad_field_says_its_path() -> None:
    with pytest.raises(errors.SchemaError, match=r"'a\.b\.0\.c'.*got None"):
        Schema({"a": {"b": ({"c": None},)}})  # type: ignore[dict-item]


def test_a_list_of_counts_is_a_shape_and_cannot_change_the_field_later() -> None:
    shape = [1, 2]
    schema = Schema({"a": shape, "b": Field(shape)})  # type: ignore[arg-type,dict-item]
    shape.append(3)
    assert schema["a"] == schema["b"] == Field((1, 2))


@given(SCHEMAS)
def test_bytes_are_those_of_all_leaves_as_numpy_counts_them(schema: Schema) -> None:
    expected = sum(torch.zeros(field.shape, dtype=field.dtype).nbytes for field in schema.leaves.values())
    assert schema.nbytes == expected


def test_bytes_of_a_huge_field_do_not_overflow() -> None:
    assert Field((2**40, 2**40), torch.float64).nbytes == 2**83


def test_leaves_and_members_are_looked_up_by_name_and_path() -> None:
    schema = Schema({"obs": {"a": (), "t": (Field((2,)), Field((3,)))}, "value": ()})
    assert "obs" in schema
    assert ("obs", "t", "1") in schema
    assert ("obs", "t", "2") not in schema
    assert ("value", "a") not in schema
    assert schema["obs", "t", "1"] == Field((3,))
    with pytest.raises(errors.FieldError, match=r"did you mean 'value'.*obs, value"):
        _ = schema["valeu"]


def test_a_schema_is_a_mapping_of_its_field_names() -> None:
    schema = Schema({"obs": {"a": (), "b": ()}, "value": (2,)})
    assert list(schema) == list(schema.keys()) == ["obs", "value"]
    assert len(schema) == 2
    assert dict(schema.items()) == {"obs": {"a": Field(()), "b": Field(())}, "value": Field((2,))}
    assert [*schema.values()] == [schema["obs"], schema["value"]]
    assert (schema.get("value"), schema.get(("obs", "c"), 7)) == (Field((2,)), 7)
    assert Schema(schema) == Schema({**schema}) == schema


@pytest.mark.parametrize("name", [0, None, (), (0,), ["value", 0], np.zeros(2)])
def test_what_names_no_field_is_not_in_a_schema_and_its_error_says_the_fields(name: Any) -> None:
    schema = Schema({"value": (2,)})
    assert name not in schema
    with pytest.raises(errors.FieldError, match=r"unknown field.* in the schema.*It has: value"):
        _ = schema[name]


def test_the_leaves_of_a_schema_are_a_copy() -> None:
    schema = Schema({"a": ()})
    schema.leaves.clear()
    assert list(schema.leaves) == [("a",)]


def test_extending_adds_and_replaces_fields_and_leaves_the_schema_alone() -> None:
    schema = Schema({"a": (), "b": {"c": ()}})
    extended = schema.extend(b=Field((2,), torch.int8), d=((), ()))
    assert extended == Schema({"a": (), "b": Field((2,), torch.int8), "d": (Field(()), Field(()))})
    assert schema == Schema({"a": (), "b": {"c": ()}})


def test_float64_becomes_float32_at_any_depth_and_other_dtypes_stay() -> None:
    double, half = Field((2,), torch.float64), Field((), torch.float16)
    schema = Schema({"obs": {"q": double, "image": Field((4,), torch.uint8)}, "hidden": (double, half), "reward": ()})
    single = schema.as_float32()
    assert single == Schema(
        {"obs": {"q": (2,), "image": Field((4,), torch.uint8)}, "hidden": ((2,), half), "reward": ()}
    )
    assert list(single.leaves) == list(schema.leaves)
    assert schema["obs", "q"] == double
    assert single.as_float32() == single


def test_rebuilding_gives_the_dicts_and_tuples_again_with_new_leaves() -> None:
    schema = Schema({"x": (), "obs": {"a": (), "t": (Field((2,)), {"u": ()})}})
    assert schema.rebuild("x", "/".join) == "x"
    assert schema.rebuild("obs", "/".join) == {"a": "obs/a", "t": ("obs/t/0", {"u": "obs/t/1/u"})}


@given(SCHEMAS)
def test_every_leaf_is_rebuilt_once_and_at_its_place(schema: Schema) -> None:
    rebuilt = Schema({name: schema.rebuild(name, lambda path: schema.leaves[path]) for name in schema.names})
    assert rebuilt == schema


# Equality, hash, repr, JSON


@given(SCHEMAS)
def test_the_repr_of_a_schema_is_the_call_that_rebuilds_it(schema: Schema) -> None:
    assert eval(repr(schema), {"Schema": Schema, "Field": Field, "torch": torch}) == schema


@given(SCHEMAS)
def test_json_gives_back_the_same_schema_in_the_same_order(schema: Schema) -> None:
    back = Schema.from_json(schema.to_json())
    assert back == schema
    assert hash(back) == hash(schema)
    assert list(back.leaves.items()) == list(schema.leaves.items())
    assert repr(back) == repr(schema)


@given(SCHEMAS, SCHEMAS)
def test_schemas_are_equal_only_if_their_trees_are(one: Schema, other: Schema) -> None:
    assert (one == other) == ({n: one[n] for n in one.names} == {n: other[n] for n in other.names})


@given(st.dictionaries(NAMES, NODES, min_size=2, max_size=4))
def test_equal_schemas_have_equal_hashes(fields: dict[str, Any]) -> None:
    one, other = Schema(fields), Schema(dict(reversed(fields.items())))
    assert one != other or hash(one) == hash(other)


@pytest.mark.parametrize(
    "other",
    [{"a": (3,)}, {"a": Field((2,), torch.float64)}, {"b": (2,)}, {"a": (2,), "b": ()}, {"a": {"0": (2,)}},
     {"a": (Field((2,)),)}],
    ids=repr,
)  # fmt: skip
def test_schemas_that_differ_in_anything_are_unequal(other: Any) -> None:
    assert Schema({"a": (2,)}) != Schema(other)


def test_a_tuple_and_a_dict_of_the_same_leaves_are_not_the_same_field() -> None:
    assert Schema({"a": {"0": ()}}) != Schema({"a": (Field(()),)})


FOREIGN = {
    "no JSON": "{",
    "nothing": "",
    "a number": "3",
    "null": "null",
    "a list": "[]",
    "no format": '{"fields": {"x": {"shape": [], "dtype": "float32"}}}',
    "no fields": '{"format": 1}',
    "empty fields": '{"format": 1, "fields": {}}',
    "fields are a list": '{"format": 1, "fields": []}',
    "fields are text": '{"format": 1, "fields": "fields"}',
    "a newer format": text_of({"shape": [], "dtype": "float32"}, format=2),
    "a text format": text_of({"shape": [], "dtype": "float32"}, format="1"),
    "a bool format": text_of({"shape": [], "dtype": "float32"}, format=True),
    "a field is null": text_of(None),
    "a field is a number": text_of(3),
    "a field is text": text_of("dtype"),
    "a field is a list": text_of([2, 3]),
    "no dtype": text_of({"shape": []}),
    "no shape": text_of({"dtype": "float32"}),
    "a function for a dtype": text_of({"shape": [], "dtype": "load"}),
    "a module for a dtype": text_of({"shape": [], "dtype": "nn"}),
    "a dunder for a dtype": text_of({"shape": [], "dtype": "__class__"}),
    "a dotted dtype": text_of({"shape": [], "dtype": "torch.float32"}),
    "an unknown dtype": text_of({"shape": [], "dtype": "float31"}),
    "a number for a dtype": text_of({"shape": [], "dtype": 6}),
    "a list for a dtype": text_of({"shape": [], "dtype": ["float32"]}),
    "a negative shape": text_of({"shape": [2, -1], "dtype": "float32"}),
    "a float shape": text_of({"shape": [2.0], "dtype": "float32"}),
    "a bool shape": text_of({"shape": [True], "dtype": "float32"}),
    "a text shape": text_of({"shape": "", "dtype": "float32"}),
    "a dict shape": text_of({"shape": {}, "dtype": "float32"}),
    "a number for a shape": text_of({"shape": 3, "dtype": "float32"}),
    "a null shape": text_of({"shape": None, "dtype": "float32"}),
    "a dotted name": text_of({"fields": {"a.b": {"shape": [], "dtype": "float32"}}}),
    "an empty name": text_of({"fields": {"": {"shape": [], "dtype": "float32"}}}),
    "an empty dict": text_of({"fields": {}}),
    "an empty tuple": text_of({"items": []}),
    "items are a dict": text_of({"items": {}}),
    "items are text": text_of({"items": "items"}),
    "an infinite shape": '{"format": 1, "fields": {"x": {"shape": [Infinity], "dtype": "float32"}}}',
    "nested too deep": '{"format": 1, "fields": ' + '{"a": {"fields": ' * 100_000 + "}}" * 100_000 + "}",
}


def test_a_schema_of_a_schema_has_its_time_limit() -> None:
    schema = Schema({"obs": (3,)}, max_episode_steps=5)
    assert Schema(schema).max_episode_steps == 5
    assert Schema(schema, max_episode_steps=7).max_episode_steps == 7


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "\x85", "\u202ea", "a\u2028", "\ufeffa", "a\ud800", "\x00"])
def test_a_name_with_characters_that_nobody_sees_is_refused(name: str) -> None:
    for spec in ({name: (3,)}, {"obs": {name: (3,)}}):
        with pytest.raises(errors.SchemaError, match="without dots and invisible characters") as raised:
            Schema(spec)
        assert str(raised.value).isprintable()
    with pytest.raises(errors.SchemaError, match="invisible"):
        Schema.from_json(text_of({"fields": {name: {"shape": [], "dtype": "float32"}}}))
    assert Schema({"größe": (), "漢字": (), "γ": (), "👩\u200d🚀": ()}).names[0] == "größe"


@pytest.mark.parametrize("what", FOREIGN)
def test_text_that_is_no_schema_is_refused(what: str) -> None:
    with pytest.raises(errors.SchemaError):
        Schema.from_json(FOREIGN[what])


@pytest.mark.parametrize("given_", [None, 3, {"format": 1}, b"\xff\xfe\x00"], ids=repr)
def test_what_is_no_text_is_refused(given_: Any) -> None:
    with pytest.raises(errors.SchemaError):
        Schema.from_json(given_)


def test_the_error_of_a_newer_format_says_what_to_do() -> None:
    with pytest.raises(errors.SchemaError, match=r"format 2 .*update relive"):
        Schema.from_json(FOREIGN["a newer format"])


def test_a_time_limit_is_kept_with_a_schema_and_does_not_count_for_equality() -> None:
    env = gymnasium.make("Pendulum-v1", max_episode_steps=30)
    schema = Schema.from_env(env, value=())
    assert schema.max_episode_steps == 30
    assert Schema.from_env(env.unwrapped).max_episode_steps is None
    assert (
        Schema.from_env(gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)).max_episode_steps
        == 500
    )
    unequal = gymnasium.vector.SyncVectorEnv(
        [lambda n=n: gymnasium.make("CartPole-v1", max_episode_steps=n) for n in (10, 20)]
    )
    assert Schema.from_env(unequal).max_episode_steps is None
    without = Schema.from_spaces(env.observation_space, env.action_space, value=())
    assert without.max_episode_steps is None
    assert schema == without
    assert hash(schema) == hash(without)
    assert "max_episode_steps" not in without.to_json()  # saves without a limit are what they were
    for other in (Schema.from_json(schema.to_json()), schema.extend(x=()), schema.as_float32(),
                  eval(repr(schema), {"Schema": Schema, "Field": Field, "torch": torch})):  # fmt: skip
        assert other.max_episode_steps == 30
    for wrong in (0, -1, 1.5, True, "30"):
        with pytest.raises(errors.ReliveError, match="max_episode_steps"):
            Schema({"obs": ()}, max_episode_steps=wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.SchemaError, match="max_episode_steps"):
            Schema.from_json(schema.to_json().replace("30", json.dumps(wrong)))
