"""The wire: every engine's KV events in, ours out. See ``docs/events.md`` for what is tolerated and why."""

from kvyard.events.wire.decoded import Decoded, DecodeStats, Problem
from kvyard.events.wire.decoder import DIALECTS, Decoder, decode
from kvyard.events.wire.encoder import WRITTEN_DIALECTS, Encoder, encode
from kvyard.events.wire.media import tier_of

__all__ = [
    "DIALECTS",
    "WRITTEN_DIALECTS",
    "DecodeStats",
    "Decoded",
    "Decoder",
    "Encoder",
    "Problem",
    "decode",
    "encode",
    "tier_of",
]
