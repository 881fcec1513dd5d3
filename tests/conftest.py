"""What all tests share: one thread each, and how hard Hypothesis tries."""

from __future__ import annotations

import os

# Before torch and numba are imported: the workers of pytest-xdist fill the cores already, and the processes
# that tests start inherit this. Plots are drawn, never shown.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", NUMBA_NUM_THREADS="1", MPLBACKEND="Agg")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# `ci` draws the same examples in every run, so that a red run is red again; `thorough` looks for new ones.
# No deadline in either: the first call of a numba kernel compiles it.
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", derandomize=True, max_examples=60, deadline=None, suppress_health_check=QUIET)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=QUIET)
settings.load_profile("ci")
