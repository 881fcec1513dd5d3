"""Views: what a batch makes of the transitions that were drawn."""

from .contract import View
from .frames import FrameStack
from .hindsight import Hindsight
from .sequences import Sequence
from .transitions import NStep, Transition

__all__ = ["FrameStack", "Hindsight", "NStep", "Sequence", "Transition", "View"]
