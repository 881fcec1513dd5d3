"""The readers of other libraries' buffers, and which buffers each of them reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import FieldError, ReliveError
from ..experience import Experience
from . import replays, rollouts

__all__ = ["read_host", "readable_hosts"]


@dataclass(frozen=True)
class Reader:
    """How the buffers of one class are read; also those of its subclasses.

    Args:
        package: the first part of the module of the class.
        name: of the class.
        read: the buffer -> experience.
        attributes: what a class of that name and another package must have to be read, too: it is a copy in the user's
            own code, or relive's drop-in. None means that such a class is not known.
    """

    package: str
    name: str
    read: Callable[[Any], Experience]
    attributes: tuple[str, ...] | None = None

    def reads(self, kind: type, source: Any) -> bool:
        """Whether a source, one of whose classes is ``kind``, is for this reader."""
        if kind.__qualname__ != self.name:
            return False
        if kind.__module__.partition(".")[0] == self.package:
            return True
        return self.attributes is not None and all(hasattr(source, name) for name in self.attributes)


RING = ("observations", "actions", "rewards", "dones", "timeouts", "pos", "full")
"""What Stable-Baselines3's replay buffers have, and CleanRL's copy of them."""

READERS = (
    Reader("stable_baselines3", "ReplayBuffer", replays.stable_baselines3_replay, RING),
    Reader("stable_baselines3", "RolloutBuffer", rollouts.stable_baselines3_rollout,
           ("observations", "actions", "rewards", "episode_starts", "values", "pos", "full")),
    Reader("tianshou", "ReplayBuffer", replays.tianshou_replay),
    Reader("cpprb", "ReplayBuffer", replays.cpprb_replay),
    Reader("torchrl", "ReplayBuffer", replays.torchrl_replay),
    Reader("agilerl", "ReplayBuffer", replays.agilerl_replay, ("storage", "_cursor", "max_size")),
    Reader("agilerl", "RolloutBuffer", rollouts.agilerl_rollout, ("buffer", "pos", "full", "wrap_at_capacity")),
    Reader("embodichain", "RolloutBuffer", rollouts.embodichain_rollout, ("buffer", "rollout_len", "num_envs")),
    Reader("pytorchrl", "ReplayBuffer", replays.pytorchrl_replay, ("data", "step", "size", "max_size")),
    Reader("pytorchrl", "VanillaOnPolicyBuffer", rollouts.pytorchrl_rollout, ("data", "step", "size")),
    Reader("rsl_rl", "RolloutStorage", rollouts.rsl_rl_rollout, ("observations", "rewards", "dones", "step")),
    Reader("velora", "ReplayBuffer", replays.velora_replay, ("states", "next_states", "hiddens", "position", "size")),
    Reader("lerobot", "ReplayBuffer", replays.lerobot_replay, ("states", "truncateds", "position", "size")),
    Reader("lerobot", "LeRobotDataset", replays.lerobot_dataset, ("hf_dataset", "features")),
    Reader("fast_td3", "SimpleReplayBuffer", replays.fast_td3_replay, ("truncations", "next_observations", "ptr")),
)  # fmt: skip


def read_host(source: Any) -> Experience | None:
    """A live buffer of another library, a copy of one, or a drop-in for one, as experience; None if none is known.

    Raises:
        FieldError: it looks like one that is known, and cannot be read as that.
    """
    for kind in type(source).__mro__:
        for reader in READERS:
            if reader.reads(kind, source):
                return _read(reader, source)
    return None


def _read(reader: Reader, source: Any) -> Experience:
    try:
        return reader.read(source)
    except ReliveError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FieldError(
            f"a {type(source).__module__}.{type(source).__qualname__} could not be read as {reader.package}'s "
            f"{reader.name} ({type(error).__name__}: {error}); pass its steps as a dict of arrays"
        ) from error


def readable_hosts() -> str:
    """The buffers that are known, for an error."""
    names: dict[str, list[str]] = {}
    for reader in READERS:
        names.setdefault(reader.package, []).append(reader.name)
    return "; ".join(f"{package}: {', '.join(classes)}" for package, classes in names.items())
