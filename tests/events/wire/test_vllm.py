"""The real thing: bytes of vLLM's encoder decode to what they say, ours are the same bytes, and its types read ours."""

import base64
import json
import subprocess
from pathlib import Path

import pytest
from tests.events.fake_map import XXH3, trace_chain
from tests.peers import peer_python, why_not

from kvyard.events import Batcher, Cleared, EventBatch, GroupMeta, Removed, Stored, Tier
from kvyard.events.wire import Decoder, Encoder, decode
from kvyard.hashing import Namespace, Run, TokenChain

HERE = Path(__file__).parent
CASES = json.loads((HERE / "fixtures" / "vllm.json").read_text())["cases"]
TIERS = {"GPU": Tier.G1, "CPU": Tier.G2}


def key(value):
    return base64.b64decode(value) if isinstance(value, str) else value


def event_of(fields: dict):
    """The event that the recorded ``fields`` describe."""
    if fields["type"] == "AllBlocksCleared":
        return Cleared()
    hashes = [key(value) for value in fields["block_hashes"]]
    common = {"hashes": hashes, "tier": TIERS[fields["medium"]], "group": fields.get("group_idx")}
    if fields["type"] == "BlockRemoved":
        return Removed(**common)
    extras = fields.get("extra_keys")
    return Stored(
        **common,
        parent=key(fields["parent_block_hash"]),
        tokens=fields["token_ids"] or None,
        block_size=fields["block_size"],
        lora_id=fields["lora_id"],
        lora_name=fields["lora_name"],
        extra_keys=extras
        and [None if one is None else tuple(tuple(p) if isinstance(p, list) else p for p in one) for one in extras],
        kind=fields.get("kv_cache_spec_kind"),
        window=fields.get("kv_cache_spec_sliding_window"),
        locality=fields.get("locality"),
        ownership=fields.get("ownership"),
        session_id=fields.get("session_id"),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded_bytes_decode_to_what_they_say(case):
    decoded = decode(bytes.fromhex(case["hex"]))
    assert (decoded.ts, decoded.rank, decoded.problems, decoded.dialect) == (case["ts"], case["rank"], [], "map")
    for event, fields in zip(decoded.events, case["events"], strict=True):
        said = event_of(fields)
        if isinstance(event, Stored):
            plain = said.extra_keys is None or not any(said.extra_keys)
            assert event.salt == (None if plain else "tenant-a")
            expected = {name: getattr(said, name) for name in said.__struct_fields__}
            said = Stored(**{**expected, "salt": event.salt, "extra_keys": None if plain else said.extra_keys})
        assert event == said


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_ours_are_the_same_bytes(case):
    events = [event_of(fields) for fields in case["events"]]
    batch = EventBatch(stream="", seq=0, events=events, ts=case["ts"], rank=case["rank"])
    assert Encoder(integers=False).encode(batch).hex() == case["hex"]


def test_nothing_was_read_the_slow_way():
    decoder = Decoder()
    for case in CASES:
        decoder.decode(bytes.fromhex(case["hex"]))
    assert decoder.stats.slow_payloads == 0


def vllm_python() -> Path:
    python = peer_python("vllm")
    if python is None:
        pytest.skip(why_not("vllm"))
    return python


@pytest.mark.slow
def test_vllm_reads_what_we_write():
    """Everything the batcher can say, through vLLM's own types; importing those takes some ten seconds."""
    groups = (GroupMeta(block_size=2, kind="full_attention"), GroupMeta(block_size=2, kind="sliding_window", window=8))
    batcher = Batcher(groups, rank=1)
    chain = TokenChain(range(12), 2, XXH3, Namespace(lora_name="sql", lora_id=3, salt="tenant"))
    trace = trace_chain(2, 4, size=2)
    batcher.entered(Run(chain, 0, 4), 0, Tier.G1, True)
    batcher.entered(Run(trace, 1, 3), 1, Tier.G2, True)
    batcher.left(Run(chain, 1, 2), 0, Tier.G1, True, "evicted")
    batcher.left(Run(trace, 1, 2), 1, Tier.G2, True)
    batcher.cleared()
    batch = batcher.end_iteration(3_000_000_000)
    payloads = [Encoder().encode(batch), Encoder(integers=False).encode(batch)]
    done = subprocess.run(
        [vllm_python(), str(HERE / "record_vllm.py"), "--check"],
        input="\n".join(payload.hex() for payload in payloads),
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2
    for line in lines:
        assert (line["ts"], line["rank"]) == (3.0, 1)
        first, second, *rest = line["events"]
        assert first["type"] == second["type"] == "BlockStored"
        assert first["block_hashes"] == chain.hashes(0, 4) and first["token_ids"] == list(range(8))
        assert first["extra_keys"] == [["sql", "tenant"], ["sql"], ["sql"], ["sql"]]
        assert (first["lora_name"], first["lora_id"], first["medium"], first["group_idx"]) == ("sql", 3, "GPU", 0)
        assert second["block_hashes"] == trace.hashes(1, 3) and second["token_ids"] == []
        assert second["parent_block_hash"] == trace.hashes(0, 1)[0]
        assert (second["medium"], second["kv_cache_spec_kind"], second["kv_cache_spec_sliding_window"]) == (
            "CPU",
            "sliding_window",
            8,
        )
        assert [(event["type"], event.get("block_hashes")) for event in rest] == [
            ("BlockRemoved", chain.hashes(1, 2)),
            ("BlockRemoved", trace.hashes(1, 2)),
            ("AllBlocksCleared", None),
        ]
