"""Looking at stored experience: its mistakes (audit), a summary (inspect), and figures while training (Monitor)."""

from .audit import audit
from .findings import Finding, Report
from .inspection import Inspection, inspect
from .monitor import Monitor

__all__ = ["Finding", "Inspection", "Monitor", "Report", "audit", "inspect"]
