"""FastTD3's ``SimpleReplayBuffer`` (commit 229ed59), and that of holosoma's FastSAC, on relive's replay.

Both take one step of every env, and give a nested TensorDict of ``n_env * batch_size`` n-step transitions. They store
each observation twice, here once: the next observation of a step is the observation of the step after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import EpisodeEndWarning, ParameterError
from ..memory.copier import copy_all
from ..parameters import is_count
from ..replay.buffer import ReplayBuffer
from ..replay.mirror import FEWEST_ROWS
from ..steps.schema import Field, Path, Schema, Spec, map_leaves
from ..views.transitions import NStep
from .base import Device, DropIn, Nested, StepFieldError, StepShapeError, alias, as_tensordict, oldest_first, renew

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["HolosomaReplayBuffer", "SimpleReplayBuffer"]

SIZES = ("n_env", "buffer_size", "n_obs", "n_act", "n_critic_obs")
"""The arguments by position."""
FIRST_LOOK = 16
"""The check of time limits looks at what it has counted after this many steps, after twice as many, and so on."""
ENOUGH = 3
"""It decides once it has seen this many time limits."""


Step: TypeAlias = "TensorDict | Mapping[str, Any]"
"""A step of every env, as :meth:`SimpleReplayBuffer.extend` takes it, or its part ``next``."""


class SimpleReplayBuffer(DropIn):
    """The newest ``buffer_size`` steps of each env, read as n-step transitions.

    The newest step is kept apart until the next one comes: that shows whether the env went on or was reset in between.
    A step after which it was reset is stored as truncated, with the next observation that it came with. So the two
    newest steps of an env cannot be drawn. Neither can one step for every episode that has ended, because the final
    observation takes its place. If you sample before anything else can be drawn, the newest step is cut off in the same
    way.

    On a GPU, all calls leave rows and bookkeeping there and do not wait for it. Only the check of time limits reads two
    numbers, after 16, 32, 64 ... steps, until it has seen three.

    Args:
        n_env: N.
        buffer_size: steps of each env.
        n_obs: numbers of an observation.
        n_act: numbers of an action.
        n_critic_obs: numbers of what the critic observes.
        asymmetric_obs: True if steps have ``critic_observations``.
        playground_mode: True if the first ``n_obs`` numbers of ``critic_observations`` are the observation. They are
            then not stored again.
        n_steps: the most rewards of a transition. It may be changed at any time, like ``gamma``.
        gamma: discount per step.
        device: of the storage and of batches; None is the CPU.
        seed: not in FastTD3; batch t is a function of (seed, t). None draws a seed for each batch from torch's default
            generator.

    Raises:
        ParameterError: a size is out of range, or does not fit into memory.
    """

    _own_attribute = "_replay"
    _lacking = ("asymmetric_obs", "playground_mode")
    n_steps: int = alias("_replay.view.n", "The most rewards of a transition.")
    gamma: float = alias("_replay.view.gamma", "Discount per step.")

    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int,
        asymmetric_obs: bool = False,
        playground_mode: bool = False,
        n_steps: int = 1,
        gamma: float = 0.99,
        device: Device | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        self.n_env: int = n_env
        self.buffer_size: int = buffer_size
        self.n_obs: int = n_obs
        self.n_act: int = n_act
        self.n_critic_obs: int = n_critic_obs
        self.asymmetric_obs: bool = asymmetric_obs
        self.playground_mode: bool = playground_mode and asymmetric_obs
        self.device: Device | None = device
        self.ptr: int = 0
        for name in SIZES:
            if not is_count(getattr(self, name), 1):
                raise ParameterError(f"{name}={getattr(self, name)!r}: expected a whole number of at least 1")
        privileged = (n_critic_obs - n_obs if self.playground_mode else n_critic_obs) if asymmetric_obs else 0
        if privileged < 0:
            raise ParameterError(
                f"n_critic_obs={n_critic_obs}: expected at least n_obs={n_obs} numbers, because playground_mode says "
                "that they begin with the observation"
            )
        obs: Spec = {"actor": (n_obs,), "critic": (privileged,)} if privileged else (n_obs,)
        flags = dict.fromkeys(("terminated", "truncated"), Field((), torch.bool))
        schema = Schema({"obs": obs, "action": (n_act,), "reward": (), **flags})
        self._privileged, self._seed = privileged, seed
        rows = max(buffer_size + 1, FEWEST_ROWS)  # the newest row has no next observation yet
        self._replay = ReplayBuffer(
            schema,
            rows * n_env,
            n_env,
            view=NStep(n_steps, gamma),
            check_ends=False,
            device=device or "cpu",
            seed=seed or 0,
        )
        self._newest: dict[str, Any] = {}
        """The newest step, in memory of its own: an env may write the next one over what it gave."""
        self._holds = False
        """True if there is one that is not stored yet."""
        self._wanted = 2
        """How many more steps have to be stored until one can be drawn."""
        self._limits: Tensor | None = torch.zeros(2, dtype=torch.int64, device=self._replay.device)
        """How many steps were truncated, and how many of them led to the next one's observation; None: looked."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._replay.nbytes

    def compile(self, **options: Any) -> None:
        """Make a few kernels of each call, if the replay is on a GPU: see :meth:`relive.ReplayBuffer.compile`."""
        if self._replay.device.type != "cpu":
            self._replay.compile(**options)

    # -- writing ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def extend(self, tensor_dict: Step) -> None:
        """Store one step of every env, ``[N, ...]``.

        Args:
            tensor_dict: ``observations``, ``actions``, and in ``next`` ``observations``, ``rewards``, ``dones`` and
                ``truncations``; if observations are asymmetric, also ``critic_observations``, here and in ``next``.
                ``next`` has the true final observations where an episode was truncated.

        Raises:
            StepFieldError, StepShapeError: a part is missing, or has another shape. Nothing is stored.

        Warns:
            EpisodeEndWarning: the first truncated steps led to the observations after a reset.
        """
        step = self._checked(tensor_dict)
        newest = self._newest
        if self.ptr:
            apart = differ(step["obs"], newest["next_obs"])
            if self._limits is not None:
                self._count_limits(self._limits, newest["truncated"], apart)
            if self._holds:
                self._store(newest["truncated"] | (apart & ~newest["terminated"]))
            copy_all(_leaves(newest), _leaves(step))
        else:
            with torch.inference_mode(False):  # tensors of that mode could not be written to outside of it
                self._newest = {name: map_leaves(torch.clone, value) for name, value in step.items()}
        self._holds = True
        self.ptr += 1

    def _store(self, truncated: Tensor) -> None:
        """Store the newest step."""
        self._replay.add(self._newest | {"truncated": truncated})
        self._holds = False
        self._wanted -= 1

    def _checked(self, given: Step) -> dict[str, Any]:
        """A step in relive's form, on the device."""
        following, sizes = _part(given, "next"), {"observations": self.n_obs, "critic_observations": self.n_critic_obs}

        def numbers(source: Step, name: str, *shape: int) -> Tensor:
            where = f"next.{name}" if source is following else name
            value = torch.as_tensor(_part(source, name, where), device=self._replay.device).detach()
            if value.shape != (self.n_env, *shape):
                expected = (self.n_env, *shape)
                raise StepShapeError(f"'{where}': expected {expected} (one row per env), got {tuple(value.shape)}")
            return value

        def obs(source: Step) -> Nested[Tensor]:
            seen = {name: numbers(source, name, size).float() for name, size in sizes.items() if size}
            if "critic_observations" not in seen or not self._privileged:
                return seen["observations"]
            return {"actor": seen["observations"], "critic": seen["critic_observations"][:, -self._privileged :]}

        if not self.asymmetric_obs:
            del sizes["critic_observations"]
        done, truncated = (numbers(following, name) != 0 for name in ("dones", "truncations"))
        return {
            "obs": obs(given),
            "action": numbers(given, "actions", self.n_act).float(),
            "reward": numbers(following, "rewards").float(),
            "terminated": done & ~truncated,
            "truncated": truncated,
            "next_obs": obs(following),
        }

    def _count_limits(self, limits: Tensor, truncated: Tensor, apart: Tensor) -> None:
        """Warn if time limits led to what the next episode began with: the true final observations are not passed."""
        limits += torch.stack([truncated, truncated & ~apart]).sum(1)
        if self.ptr < FIRST_LOOK or self.ptr & (self.ptr - 1):
            return
        count, alike = (int(x) for x in limits.cpu())
        if count < ENOUGH:
            return
        self._limits = None
        if alike == count:
            warnings.warn(
                f"the first {count} truncated steps came with a next observation that the next episode began with. So "
                "targets at time limits bootstrap from a reset. Pass the true final observation where an episode was "
                "truncated, as a Gymnasium environment's info['final_obs']; Isaac Lab's own environments hide it. See "
                "docs/migration/fasttd3.md",
                EpisodeEndWarning,
                stacklevel=4,
            )

    # -- reading ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, batch_size: int) -> TensorDict:
        """``n_env * batch_size`` transitions, drawn uniformly and with replacement from all envs together.

        Returns:
            ``observations`` and ``actions`` of the first step of each, and in ``next``:

            - ``rewards``: the discounted sum of the rewards of its k steps; ``effective_n_steps``: k, int64 if
              ``n_steps`` is 1, otherwise float32;
            - ``observations``: after the last step;
            - ``dones`` and ``truncations``: of the last step, int64. A truncated step is also done.

            If observations are asymmetric, also ``critic_observations``, here and in ``next``.

        Raises:
            EmptyError: there is no step.
        """
        if self._wanted > 0 and self._holds:
            self._store(~self._newest["terminated"])
            self._wanted = 0
        renew(self._replay, self._seed)
        return self._shown(self._replay.sample(self.n_env * batch_size))

    def _shown(self, batch: Batch) -> TensorDict:
        """A batch of the replay in the host's form."""
        done = batch["terminated"] | batch["truncated"]
        leaves: dict[Path, Any] = {
            ("observations",): None,
            ("actions",): batch["action"].contiguous(),
            ("next", "rewards"): batch["reward"].contiguous(),
            ("next", "dones"): done.long(),
            ("next", "truncations"): batch["truncated"].long(),
            ("next", "observations"): None,
            ("next", "effective_n_steps"): batch["steps"].long() if self.n_steps == 1 else batch["steps"].float(),
        }
        for name, front in (("obs", ()), ("next_obs", ("next",))):
            actor = batch[name, "actor"] if self._privileged else batch[name]
            leaves[(*front, "observations")] = actor.contiguous()  # the fields of a row lie side by side
            if self.asymmetric_obs:
                parts = [actor] if self.playground_mode else []
                parts += [batch[name, "critic"]] if self._privileged else []
                leaves[(*front, "critic_observations")] = torch.cat(parts, 1)
        return as_tensordict(leaves, (len(done),))

    # -- from an original ---------------------------------------------------------------------------------------

    @classmethod
    def _arguments_of(cls, original: Any) -> dict[str, object]:
        return {"asymmetric_obs": True} | super()._arguments_of(original)  # holosoma has no choice

    def _take_over(self, original: Any) -> None:
        size, count = original.buffer_size, original.ptr
        for row in oldest_first(size, count % size, count >= size).tolist():
            self.extend(_step_of(original, row, self))
        self.ptr = count

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name)!r}" for name in SIZES)
        return (
            f"SimpleReplayBuffer({sizes}, asymmetric_obs={self.asymmetric_obs}, "
            f"playground_mode={self.playground_mode}, n_steps={self.n_steps}, gamma={self.gamma}, "
            f"device={self.device!r}, seed={self._seed})"
        )


def HolosomaReplayBuffer(  # noqa: N802 - named like the class that it makes
    n_env: int,
    buffer_size: int,
    n_obs: int,
    n_act: int,
    n_critic_obs: int,
    n_steps: int = 1,
    gamma: float = 0.99,
    device: Device | None = None,
    *,
    seed: int | None = None,
) -> SimpleReplayBuffer:
    """holosoma's ``SimpleReplayBuffer``: steps always have ``critic_observations``, and arguments say less.

    Args:
        n_env: N.
        buffer_size: steps of each env.
        n_obs: numbers of an observation.
        n_act: numbers of an action.
        n_critic_obs: numbers of what the critic observes.
        n_steps: the most rewards of a transition.
        gamma: discount per step.
        device: of the storage and of batches; None is the CPU.
        seed: as in :class:`SimpleReplayBuffer`.
    """
    return SimpleReplayBuffer(
        n_env, buffer_size, n_obs, n_act, n_critic_obs, True, n_steps=n_steps, gamma=gamma, device=device, seed=seed
    )


def differ(one: Nested[Tensor], other: Any) -> Tensor:
    """Which rows of two float32 tensors ``[N, M]``, or of two dictionaries of them, differ in a bit: bool ``[N]``."""
    if not isinstance(one, Tensor):
        return reduce(torch.logical_or, [differ(member, other[key]) for key, member in one.items()])
    apart = one.view(torch.int32) != other.view(torch.int32)  # a NaN equals itself
    return apart.view(torch.uint8).amax(1) != 0  # on the CPU, any(1) takes longer


def _leaves(step: Mapping[str, Nested[Tensor]]) -> Iterator[Tensor]:
    """The tensors of a step."""
    for value in step.values():
        yield from (value,) if isinstance(value, Tensor) else value.values()


def _part(source: Step, name: str, where: str | None = None) -> Any:
    try:
        return source[name]
    except KeyError:
        raise StepFieldError(f"'{where or name}' is missing; pass a TensorDict [n_env] that has it") from None


def _step_of(original: Any, row: int, made: SimpleReplayBuffer) -> dict[str, Any]:
    """A row of the host's columns, as its ``extend`` takes it."""

    def column(name: str) -> Tensor:
        return getattr(original, name)[:, row]

    step: dict[str, Any] = {"observations": column("observations"), "actions": column("actions")}
    step["next"] = {"observations": column("next_observations")}
    step["next"] |= {name: column(name) for name in ("rewards", "dones", "truncations")}
    if made.asymmetric_obs:
        for part, front in ((step, ""), (step["next"], "next_")):
            if made.playground_mode:
                critic = torch.cat([part["observations"], column(f"{front}privileged_observations")], 1)
            else:
                critic = column(f"{front}critic_observations")
            part["critic_observations"] = critic
    return step
