"""Conformance: replay operation logs of a real vLLM block manager through ours and compare every result."""

from kvyard.lab.conform.log import Difference, LogError, Replayer, Verdict, conform
from kvyard.lab.conform.recorder import VllmRecorder

__all__ = ["Difference", "LogError", "Replayer", "Verdict", "VllmRecorder", "conform"]
