"""Conformance: replay operation logs of a real vLLM block manager through ours and compare every result."""

from kvyard.lab.conform.log import LogDifference, LogError, LogVerdict, Replayer, conform
from kvyard.lab.conform.recorder import VllmRecorder

__all__ = ["LogDifference", "LogError", "LogVerdict", "Replayer", "VllmRecorder", "conform"]
