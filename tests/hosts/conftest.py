"""Whole training runs of other libraries on our classes: `make test-hosts` builds an environment for each library.

RELIVE_HOST names the library whose tests are collected; one that is missing is an error, never a skip.
"""

from __future__ import annotations

import os
from pathlib import Path

_host = os.environ.get("RELIVE_HOST")
collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != f"test_{_host}.py"]
