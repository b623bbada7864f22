"""Mutations of payloads, seeded: bytes at random, and whole values exchanged for others inside a sound structure."""

import random

import msgspec
from tests.events.fake_map import SHA, XXH3, trace_chain

from kvyard.events import Batcher, EventBatch, GroupMeta, Tier
from kvyard.events.wire import Decoder, Encoder, written_dialects
from kvyard.hashing import Namespace, Run, TokenChain

JUNK = [
    None, True, 0, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "GPU", "x" * 300, b"", b"\x00",
    b"\xff" * 40, [], [[]], [None], [[[[[]]]]], {}, {"type": "BlockStored"}, {"": None}, ["BlockStored"], ["BlockRemoved", [1]],
    "BlockRemoved", "AllBlocksCleared", {"data": {}}, {"data": {"type": "stored"}}, [1] * 40, msgspec.msgpack.Ext(5, b"abc"),
]  # fmt: skip


def sound_batch() -> EventBatch:
    """A batch with some of everything in it."""
    groups = (GroupMeta(block_size=2, kind="full_attention"), GroupMeta(block_size=2, kind="mamba"))
    batcher = Batcher(groups, rank=1)
    chain = TokenChain(range(12), 2, XXH3, Namespace(lora_name="ad", lora_id=1, salt="s"))
    digests = TokenChain(range(100_000, 100_008), 2, SHA)
    batcher.entered(Run(chain, 0, 3), 0, Tier.G1, True)
    batcher.entered(Run(digests), 1, Tier.G2, True)
    batcher.entered(Run(trace_chain(7, 3, 2)), 0, Tier.G3, True)
    batcher.left(Run(chain, 1, 2), 0, Tier.G1, True, "evicted")
    batcher.left(Run(digests, 3, 4), 1, Tier.G2, True)
    batch = batcher.end_iteration(1_000_000_000)
    assert batch is not None
    return batch


def seeds() -> list[bytes]:
    """One sound payload of each encoding."""
    batch = sound_batch()
    whole = [Encoder("vllm", integers=False).encode(batch), Encoder("vllm-array", integers=False).encode(batch)]
    return [Encoder(dialect, groups=()).encode(batch) for dialect in written_dialects()] + whole


def mutate(rng: random.Random, payload: bytes, others: list[bytes]) -> bytes:
    """``payload`` with a few bytes changed, cut, repeated, or mixed with another payload."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(7):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randint(1, 8)]
            case 4:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 5:
                # Lengths and type bytes are where decoders break.
                data[at] = rng.choice(
                    b"\x80\x8f\x90\x9f\xc0\xc1\xc4\xc6\xc7\xca\xcb\xcf\xd3\xd9\xdb\xdc\xdd\xde\xdf\xff"
                )
            case _:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                data[at:at] = other[start : start + rng.randint(1, 64)]
    return bytes(data)


def corrupt(rng: random.Random, value: object, depth: int = 0) -> object:
    """A copy of ``value`` with one part of it replaced by junk."""
    if depth < 4 and rng.random() < 0.8:
        if isinstance(value, list) and value:
            at = rng.randrange(len(value))
            return [*value[:at], corrupt(rng, value[at], depth + 1), *value[at + 1 :]]
        if isinstance(value, dict) and value:
            name = rng.choice(list(value))
            if rng.random() < 0.2:
                return {key: kept for key, kept in value.items() if key != name}
            return {**value, name: corrupt(rng, value[name], depth + 1)}
    return rng.choice(JUNK)


def check(decoded, decoder: Decoder) -> None:
    """Check what must hold for any payload whatever."""
    for problem in decoded.problems:
        assert not problem.reason.startswith("unexpected"), problem
        assert len(problem.reason) <= 260
    assert decoded.events or decoded.problems or decoded.dialect == "none"
    assert len(decoder.stats.unknown) <= 65
