"""Ray, for the examples that run on it."""

from __future__ import annotations

import argparse
import logging

import ray

__all__ = ["add_address", "start_ray"]


def add_address(parser: argparse.ArgumentParser) -> None:
    """Let the command line name a cluster."""
    parser.add_argument("--address", help="of a Ray cluster (default: Ray is started on this machine)")


def start_ray(address: str | None) -> None:
    """Join the cluster at this address, or start Ray on two cores of this machine."""
    here = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    ray.init(address=address, logging_level=logging.WARNING, **({} if address else here))
