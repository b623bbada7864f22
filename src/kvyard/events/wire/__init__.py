"""The wire: every engine's KV events in, ours out. See ``docs/events.md`` for what is tolerated and why."""

from kvyard.events.wire.decoded import Decoded, DecodeStats, Problem
from kvyard.events.wire.decoder import Decoder, Encoder, decode, encode
from kvyard.events.wire.format import (
    WIRES,
    EngineGuess,
    PayloadReader,
    PayloadWriter,
    StreamRules,
    WireFormat,
    dialects,
    written_dialects,
)
from kvyard.events.wire.media import tier_of

__all__ = [
    "WIRES",
    "DecodeStats",
    "Decoded",
    "Decoder",
    "Encoder",
    "EngineGuess",
    "PayloadReader",
    "PayloadWriter",
    "Problem",
    "StreamRules",
    "WireFormat",
    "decode",
    "dialects",
    "encode",
    "tier_of",
    "written_dialects",
]
