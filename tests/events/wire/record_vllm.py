"""Record payloads of vLLM's own event encoder. Run with an interpreter that has vLLM, from the repository's root:

    /opt/peers/venv-vllm/bin/python tests/events/wire/record_vllm.py tests/events/wire/fixtures/vllm.json

Each case is kept as the bytes and as the fields they were made from. It uses vLLM (Apache-2.0) as a library; nothing of it
is copied. With ``--check`` it does the reverse: it reads hex payloads from standard input, one a line, decodes them with
vLLM's types and prints what they say as JSON.
"""

import base64
import json
import sys

import msgspec


def cases() -> list[tuple[str, float, int | None, list[dict]]]:
    first = [6544372511597843651, 15647262378301297500, 9723504175580119692]
    stored = {
        "type": "BlockStored",
        "block_hashes": first,
        "parent_block_hash": None,
        "token_ids": list(range(48)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [first[2]], "medium": "GPU", "group_idx": 0}
    digest = bytes(range(32))
    return [
        ("plain text", 1.5, None, [stored]),
        ("one remove per hash", 2.0, 3, [removed, {**removed, "block_hashes": [first[1]]}]),
        ("clear", 3.25, 0, [{"type": "AllBlocksCleared"}]),
        (
            "adapter, image and salt",
            4.0,
            0,
            [
                {
                    **stored,
                    "lora_id": 7,
                    "lora_name": "sql",
                    "extra_keys": [["sql", ["img-1", 3], "tenant-a"], ["sql", ["img-1", -13]], ["sql"]],
                }
            ],
        ),
        (
            "sliding window in the host tier",
            5.0,
            0,
            [
                {
                    **stored,
                    "parent_block_hash": first[0],
                    "block_hashes": first[1:],
                    "token_ids": list(range(100_000, 100_032)),
                    "medium": "CPU",
                    "extra_keys": None,
                    "group_idx": 1,
                    "kv_cache_spec_kind": "sliding_window",
                    "kv_cache_spec_sliding_window": 4096,
                    "locality": "LOCAL",
                    "ownership": "tier-0",
                    "session_id": "s-1",
                }
            ],
        ),
        (
            "offload, old form",
            6.0,
            0,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [first[0]],
                    "parent_block_hash": None,
                    "token_ids": [],
                    "block_size": 0,
                    "lora_id": None,
                    "medium": "CPU",
                    "lora_name": None,
                },
                {"type": "BlockRemoved", "block_hashes": first, "medium": "CPU"},
            ],
        ),
        (
            "all blocks masked",
            7.0,
            0,
            [{**stored, "block_hashes": [], "extra_keys": None, "kv_cache_spec_kind": "mamba"}],
        ),
        (
            "digests whole",
            8.0,
            0,
            [
                {
                    **stored,
                    "block_hashes": [digest],
                    "parent_block_hash": digest[::-1],
                    "token_ids": [0] * 16,
                    "extra_keys": None,
                }
            ],
        ),
    ]


def encode(ts: float, rank: int | None, events: list[dict]) -> bytes:
    from vllm.distributed import kv_events

    kinds = (kv_events.BlockStored, kv_events.BlockRemoved, kv_events.AllBlocksCleared)
    built = [msgspec.convert(event, next(kind for kind in kinds if kind.__name__ == event["type"])) for event in events]
    return msgspec.msgpack.encode(kv_events.KVEventBatch(ts=ts, events=built, data_parallel_rank=rank))


def record(path: str) -> None:
    import vllm

    out = [
        {"name": name, "ts": ts, "rank": rank, "events": events, "hex": encode(ts, rank, events).hex()}
        for name, ts, rank, events in cases()
    ]
    source = (
        f"Payloads written by the KV event encoder of vLLM {vllm.__version__} (vllm.distributed.kv_events, Apache-2.0), "
        "recorded by tests/events/wire/record_vllm.py. Bytes are in base64 inside events."
    )
    text = msgspec.json.encode({"source": source, "cases": out})
    with open(path, "w") as file:
        json.dump(json.loads(text), file, indent=1)
        file.write("\n")


def check() -> None:
    """Decode payloads with vLLM's types and say what they are."""
    from vllm.distributed import kv_events

    decoder = msgspec.msgpack.Decoder(kv_events.KVEventBatch)
    for line in sys.stdin:
        batch = decoder.decode(bytes.fromhex(line.strip()))
        events = [
            {"type": type(event).__name__, **{name: plain(getattr(event, name)) for name in event.__struct_fields__}}
            for event in batch.events
        ]
        print(json.dumps({"ts": batch.ts, "rank": batch.data_parallel_rank, "events": events}))


def plain(value: object) -> object:
    """``value`` as JSON has it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check()
    else:
        record(sys.argv[1])
