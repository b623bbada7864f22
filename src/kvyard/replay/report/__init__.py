"""The report of a replay: what it says, and the forms it comes in."""

from kvyard.replay.report.make import make_report
from kvyard.replay.report.numbers import Histogram, Share, Spread, spread
from kvyard.replay.report.report import Report, Slo

__all__ = ["Histogram", "Report", "Share", "Slo", "Spread", "make_report", "spread"]
