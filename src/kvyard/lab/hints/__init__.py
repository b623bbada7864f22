"""Value of a retention hint, before it is built."""

from kvyard.lab.hints.hints import hints, quick_hints

__all__ = ["hints", "quick_hints"]
