"""Views: batch readers, which turn drawn transitions into the fields of a batch."""

from .contract import View
from .frames import FrameStack, ReturnsToGo
from .hindsight import Hindsight
from .sequences import Sequence
from .transitions import NStep, Transition

__all__ = ["FrameStack", "Hindsight", "NStep", "ReturnsToGo", "Sequence", "Transition", "View"]
