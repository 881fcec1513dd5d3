"""The ring of a replay: which steps are stored, and which of them can be drawn."""

from .ring import Ring
from .ring import WindowRule as Rule

__all__ = ["Ring", "Rule"]
