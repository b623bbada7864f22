"""Checking a stream: what a consumer has to cope with, counted, and which of it is normal for the engine that sends it.

``Checker`` collects ``Facts``; ``judge`` turns them into findings. The doctor uses both.
"""

from kvyard.events.check.checker import Checker, Facts
from kvyard.events.check.rules import Finding, FindingTexts, Severity, StreamReport, judge

__all__ = ["Checker", "Facts", "Finding", "FindingTexts", "Severity", "StreamReport", "judge"]
