"""Other libraries on our classes, and ours in their suites: `make hosts` builds an environment for each library.

RELIVE_HOST names the library whose tests are collected; one that is missing is an error, never a skip.
"""

from __future__ import annotations

import os
from pathlib import Path

_host = os.environ.get("RELIVE_HOST")
_collected = {f"test_{_host}.py", "test_planted.py"} if _host else set[str]()
collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in _collected]
