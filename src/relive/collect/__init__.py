"""Collector: plays a policy in vector envs and fills a buffer."""

from .collector import Collector, CollectStats

__all__ = ["CollectStats", "Collector"]
