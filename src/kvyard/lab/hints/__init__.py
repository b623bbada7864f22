"""What a retention hint would be worth, before it is built."""

from kvyard.lab.hints.hints import HintStudy, hints, quick_hints

__all__ = ["HintStudy", "hints", "quick_hints"]
