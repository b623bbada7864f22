"""Conformance: replay operation logs of a real vLLM block manager through ours and compare every result."""

from kvyard.blocks.conform.log import Difference, Verdict, conform
from kvyard.blocks.conform.recorder import VllmRecorder
from kvyard.blocks.conform.replayer import LogError, Replayer

__all__ = ["Difference", "LogError", "Replayer", "Verdict", "VllmRecorder", "conform"]
