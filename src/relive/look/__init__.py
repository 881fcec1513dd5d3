"""Looking at stored experience: what it teaches, and whether that is right."""

from .audit import audit
from .findings import Finding, Report
from .monitor import Monitor

__all__ = ["Finding", "Monitor", "Report", "audit"]
