"""Drop-in modules: classes with the names and arguments of other libraries, built on relive's core."""

from typing import TYPE_CHECKING

from ..names import lazy_modules

if TYPE_CHECKING:
    from . import agilerl as agilerl
    from . import embodichain as embodichain
    from . import fasttd3 as fasttd3
    from . import pytorchrl as pytorchrl
    from . import rsl_rl as rsl_rl
    from . import sb3_contrib as sb3_contrib
    from . import skrl as skrl
    from . import stable_baselines3 as stable_baselines3
    from . import velora as velora
else:  # each is imported on its own, as one needs its library
    hosts = "agilerl embodichain fasttd3 pytorchrl rsl_rl sb3_contrib skrl stable_baselines3 velora"
    __getattr__, __dir__ = lazy_modules(__name__, tuple(hosts.split()))
