"""Live traffic as a trace: ``recorder`` has the rows, ``prefix_ids`` makes their block ids."""

from kvyard.server.gateway.recording.recorder import TrafficRecorder

__all__ = ["TrafficRecorder"]
