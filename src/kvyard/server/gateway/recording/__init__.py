"""Live traffic as a trace: ``recorder`` has the rows, ``prefix_ids`` makes their block ids."""

from kvyard.server.gateway.recording.recorder import RecorderCounters, TrafficRecorder
from kvyard.server.gateway.recording.request_recorder import RequestRecorder

__all__ = ["RecorderCounters", "RequestRecorder", "TrafficRecorder"]
