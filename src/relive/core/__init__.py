"""The compiled core: ``relive.core._core``, written in C++ under ``src/core``, with all of its names."""

from ._core import *  # noqa: F403 - they are listed once, in _core.pyi
from .returns import Grid as Grid
from .returns import discounted_return as discounted_return
from .returns import gae as gae
from .returns import refuse_missing as refuse_missing
from .returns import vtrace as vtrace
from .rollouts import episodes_on_device as episodes_on_device
from .rollouts import gather_on_device as gather_on_device
from .rollouts import gather_windows as gather_windows
from .rollouts import mark_on_device as mark_on_device
from .rollouts import mark_windows as mark_windows
from .rollouts import permutation as permutation
from .rollouts import permute_on_device as permute_on_device
