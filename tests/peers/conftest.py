"""Differential tests against other libraries: they run where those are installed, in `make test-peers` only.

With RELIVE_PEERS=1 the folder is collected, and a peer that is missing is an error, never a skip.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("RELIVE_PEERS") == "1" else ["test_*.py"]
