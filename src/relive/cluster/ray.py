"""Shards as Ray actors. This is the one module that imports Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .messages import Link, RolloutQueue
from .shard import Connect, Shard, ShardPlan

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ImportError as _error:
    raise ImportError("relive.cluster.Replay needs Ray: pip install 'relive[ray]'") from _error

__all__ = ["RayLink", "actors", "queue_actor"]


class RayLink(Link):
    """Messages to actors, one for each shard. Ray keeps the order of the messages of a process to a shard.

    Args:
        handles: the handles of the actors, in the order of the shards.
    """

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def call(self, shard: int, method: str, *arguments: object) -> object:
        """Send a message to an actor, as :meth:`Link.call`."""
        return getattr(self.handles[shard], method).remote(*arguments)

    def answers(self, calls: Mapping[int, object], timeout: float) -> tuple[dict[int, Any], set[int]]:
        """The answers of actors that came in time, as :meth:`Link.answers`."""
        if not calls:
            return {}, set()
        rpc: Any = ray  # which leaves the types of references open
        ready = set(rpc.wait(list(calls.values()), num_returns=len(calls), timeout=timeout)[0])
        answers, failed = dict[int, Any](), set[int]()
        for key, ref in calls.items():
            try:
                if ref in ready:
                    answers[key] = rpc.get(ref)
            except RayTaskError as error:  # the shard refused what it was asked
                raise error.cause from error
            except RayError:  # the actor or its node died, or the answer was lost on its way
                failed.add(key)
        return answers, failed

    def close(self) -> None:
        """End the actors."""
        for handle in self.handles:
            ray.kill(handle)


def actors(**options: object) -> Connect:
    """A function that makes each shard a Ray actor, for the argument ``connect`` of :class:`relive.cluster.Replay`.

    Actors spread over the nodes and reserve no CPU. Ray restarts them as often as they die. Ray is started on this
    machine if ``ray.init`` was not called before.

    Args:
        options: options of the actors, as ``Actor.options`` takes them, such as ``num_cpus=1`` or
            ``resources={"shard": 1}``.
    """

    def connect(plans: list[ShardPlan]) -> Link:
        defaults: dict[str, object] = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": -1, **options}
        actor: Any = ray.remote(Shard)
        return RayLink([actor.options(**defaults).remote(plan) for plan in plans])

    return connect


def queue_actor(**options: object) -> Callable[[int], Link]:
    """A function that makes the queue of :class:`relive.cluster.Rollouts` a Ray actor, for its ``connect``.

    With ``name="rollouts", lifetime="detached"`` the queue outlives the learner's process. A learner that is started
    again in the same namespace finds it.

    Args:
        options: options of the actor, as ``Actor.options`` takes them.
    """

    def connect(capacity: int) -> Link:
        defaults: dict[str, object] = {"num_cpus": 0, "max_restarts": -1, **options}
        if "name" in defaults:
            defaults["get_if_exists"] = True
        actor: Any = ray.remote(RolloutQueue)
        return RayLink([actor.options(**defaults).remote(capacity)])

    return connect
