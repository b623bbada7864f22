"""Parameters that the processes of one recovery test share."""

from __future__ import annotations

from kvyard.events.transport import Limits
from kvyard.index import Identity

IDENTITY = Identity(2)
NAMESPACE = "recovery"
PRESET = "full+window"
QUICK = Limits(reply=500_000_000, cooldown=300_000_000, probe=100_000_000, probe_most=400_000_000)
