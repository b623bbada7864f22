"""What a hint would be worth, before anybody builds it: a trace replayed with hints of every quality."""

from kvyard.lab.hints.study import HintPoint, HintStudy, quick_study, study

__all__ = ["HintPoint", "HintStudy", "quick_study", "study"]
