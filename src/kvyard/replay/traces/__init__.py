"""Traces: requests with arrival times, lengths, and shared prefixes of their prompts.

Readers turn files of many formats into one kind of request, lazily. Nothing here knows engines, and nothing invents reuse
that a file doesn't show.
"""

from kvyard.replay.traces.changes import scaled, sliced, with_arrivals
from kvyard.replay.traces.errors import TraceError
from kvyard.replay.traces.registry import FORMATS, Format, Head
from kvyard.replay.traces.request import TraceRequest
from kvyard.replay.traces.trace import Trace, open_trace

__all__ = [
    "FORMATS",
    "Format",
    "Head",
    "Trace",
    "TraceError",
    "TraceRequest",
    "open_trace",
    "scaled",
    "sliced",
    "with_arrivals",
]
