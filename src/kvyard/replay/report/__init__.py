"""The report of a replay: its contents, and its forms (table, JSON, page)."""

from kvyard.replay.report.make import make_report
from kvyard.replay.report.numbers import Histogram, Share, Spread, spread
from kvyard.replay.report.report import Report, Slo

__all__ = ["Histogram", "Report", "Share", "Slo", "Spread", "make_report", "spread"]
