"""Looking at stored experience: what it teaches, and whether that is right."""

from .audit import audit
from .findings import Finding, Report

__all__ = ["Finding", "Report", "audit"]
