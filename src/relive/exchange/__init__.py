"""Exchange: experience from and to the formats of other libraries."""

from .log import Log
from .minari import from_minari, to_minari

__all__ = ["Log", "from_minari", "to_minari"]
