"""The fields that a replay requires, reserves and stores."""

from __future__ import annotations

from typing import cast

from ..errors import SchemaError
from ..steps.schema import STEP_FIELDS, Field, Schema

__all__ = ["stored_fields"]


RESERVED = frozenset(
    ("next_obs", "mask", "index", "next_index", "discount", "steps", "weight", "probability", "complete", "source")
)
"""Names that a schema must not use: further arguments of ``add``, and fields that batches add."""


def stored_fields(schema: Schema, own_next_obs: bool) -> Schema:
    """The fields that a replay stores, after a check of the schema.

    Raises:
        SchemaError: names the field that is missing, or that the buffer itself adds.
    """
    if not isinstance(cast("object", schema), Schema):
        raise SchemaError(
            f"schema: expected a relive.Schema, got {schema!r:.80}; make one with Schema.from_env(envs), or by hand: "
            "Schema({'obs': ..., 'reward': ..., ...})"
        )
    for name, dtype in STEP_FIELDS.items():
        if schema.leaves.get((name,)) != Field((), dtype):
            raise SchemaError(f"a replay's schema needs '{name}' as Field((), {dtype}), got {schema!r}")
    if "obs" not in schema:
        raise SchemaError(f"a replay's schema needs 'obs', got {schema!r}")
    for name in schema.names:
        if name in RESERVED or name.startswith("_"):
            raise SchemaError(
                f"field {name!r}: names in a replay's schema do not start with '_', and are none of those that the "
                f"buffer itself uses ({', '.join(sorted(RESERVED))}); give it another name"
            )
    return schema.extend(next_obs=schema["obs"]) if own_next_obs else schema
