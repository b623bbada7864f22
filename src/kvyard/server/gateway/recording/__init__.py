"""Live traffic as a trace: ``recorder`` has the rows, ``prefix_ids`` makes their block ids."""

from kvyard.server.gateway.recording.recorder import TrafficRecorder
from kvyard.server.gateway.recording.request_recorder import ArrivedRequest, RecorderCounters, RequestRecorder

__all__ = ["ArrivedRequest", "RecorderCounters", "RequestRecorder", "TrafficRecorder"]
