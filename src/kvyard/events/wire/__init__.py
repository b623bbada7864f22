"""The wire: every engine's KV events in, ours out. See ``docs/reference/events.md`` for what is tolerated and why."""

from kvyard.events.wire.decoded import Decoded, Problem
from kvyard.events.wire.decoder import Decoder, Encoder, decode, encode
from kvyard.events.wire.format import WIRES, EngineGuess, StreamRules, WireFormat, dialects, written_dialects

__all__ = [
    "WIRES",
    "Decoded",
    "Decoder",
    "Encoder",
    "EngineGuess",
    "Problem",
    "StreamRules",
    "WireFormat",
    "decode",
    "dialects",
    "encode",
    "written_dialects",
]
