"""Looking at stored experience: what it teaches, and whether that is right."""

from .audit import audit
from .findings import Finding, Report
from .inspection import Inspection, inspect
from .monitor import Monitor

__all__ = ["Finding", "Inspection", "Monitor", "Report", "audit", "inspect"]
