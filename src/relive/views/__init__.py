"""Views: batch readers, which turn drawn transitions into the fields of a batch."""

from .chunks import Chunks
from .contract import View
from .frames import FrameStack
from .hindsight import Hindsight
from .returns_to_go import ReturnsToGo
from .sequences import Sequence
from .transitions import NStep, Transition

__all__ = ["Chunks", "FrameStack", "Hindsight", "NStep", "ReturnsToGo", "Sequence", "Transition", "View"]
