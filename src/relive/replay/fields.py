"""The fields that a replay needs, keeps for itself, and stores."""

from __future__ import annotations

import torch

from ..errors import SchemaError
from ..steps.schema import Field, Schema

__all__ = ["stored_fields"]


NEEDED = {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool}


RESERVED = frozenset(
    ("next_obs", "mask", "index", "next_index", "discount", "steps", "weight", "probability", "complete", "source")
)
"""What a step is added with, and what batches hold, besides the fields of the schema."""


def stored_fields(schema: Schema, own_next_obs: bool) -> Schema:
    """The fields that are stored, once it is clear that they make a replay.

    Raises:
        SchemaError: naming the field that is missing, or that the buffer adds by itself.
    """
    for name, dtype in NEEDED.items():
        if schema.leaves.get((name,)) != Field((), dtype):
            raise SchemaError(f"a replay's schema needs '{name}' as Field((), {dtype}), got {schema!r}")
    if "obs" not in schema:
        raise SchemaError(f"a replay's schema needs 'obs', got {schema!r}")
    for name in schema.names:
        if name in RESERVED or name.startswith("_"):
            raise SchemaError(
                f"field {name!r}: a replay's schema has no name that starts with '_', and none of what the buffer adds "
                f"by itself ({', '.join(sorted(RESERVED))}); give it another name"
            )
    return schema.extend(next_obs=schema["obs"]) if own_next_obs else schema
