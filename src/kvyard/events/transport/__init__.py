"""Event streams over ZeroMQ: publishing, subscribing, replay, snapshots and recovery. See ``docs/explain/event-streams.md``.

Importing this doesn't import ZeroMQ; opening a socket does, and says what to install if it is missing.
"""

from kvyard.events.transport.frames import Frame
from kvyard.events.transport.publisher import Publisher
from kvyard.events.transport.raw import fetch_replay
from kvyard.events.transport.state import Limits, Origin, State, StreamStatus, Update
from kvyard.events.transport.subscriber import Subscriber
from kvyard.events.transport.subscription import Follower

__all__ = [
    "Follower",
    "Frame",
    "Limits",
    "Origin",
    "Publisher",
    "State",
    "StreamStatus",
    "Subscriber",
    "Update",
    "fetch_replay",
]
