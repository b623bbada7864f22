"""What is tolerated, what is refused, and that a refusal costs nothing but itself."""

import math

import msgspec
import pytest

from kvyard.errors import KvyardError
from kvyard.events import Cleared, Removed, Stored, Tier
from kvyard.events.wire import Decoder, Encoder, decode, encode
from kvyard.events.wire.media import tier_of

pack = msgspec.msgpack.encode


def array(*events, ts=1.5, rank=0) -> bytes:
    return pack([ts, list(events), rank])


def one(*events, **options):
    """The only event of a payload without problems."""
    decoded = Decoder(**options).decode(array(*events))
    assert decoded.problems == []
    (event,) = decoded.events
    return event


def refused(event) -> str:
    """The kind of problem that ``event`` is; its neighbours must survive."""
    before, after = ["BlockRemoved", [1], "GPU"], {"type": "BlockRemoved", "block_hashes": [2], "medium": "cpu"}
    decoded = decode(array(before, event, after))
    assert decoded.events == [Removed(hashes=[1]), Removed(hashes=[2], tier=Tier.G2)]
    (problem,) = decoded.problems
    assert problem.index == 1 and problem.reason and problem.kind in Decoder().decode(array(event)).problems[0].kind
    assert decoded.lossy is (problem.kind not in ("unknown", "medium"))
    return problem.kind


def stored(hashes=(1,), parent=None, tokens=(7, 8), size=2, *rest):
    return ["BlockStored", list(hashes), parent, list(tokens), size, *rest]


def mapped(**fields):
    base = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [7, 8], "block_size": 2}
    return {name: value for name, value in {**base, **fields}.items() if value is not ...}


class TestPublishedFixtures:
    """The payloads of our notes on llm-d, made by hand and checked against its Go adapters."""

    @pytest.mark.parametrize(
        ("payload", "events", "problems"),
        [
            (
                "93cb3ff80000000000009299ab426c6f636b53746f72656491cf8000000000000000c092010202c0c0c0c0"
                "91b0416c6c426c6f636b73436c6561726564c0",
                [Stored(hashes=[2**63], parent=None, tokens=[1, 2], block_size=2), Cleared()],
                [],
            ),
            ("93cb3ff80000000000009191b0416c6c426c6f636b73436c656172656403", [Cleared()], []),
            (
                "93cb3ff80000000000009197ab426c6f636b53746f72656491c420000102030405060708090a0b0c0d0e0f101112131415161718"
                "191a1b1c1d1e1fc420202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f940102030404c0a347505500",
                [Stored(hashes=[1736447835066146335], parent=4051333365884599871, tokens=[1, 2, 3, 4], block_size=4)],
                [],
            ),
            (
                "93cb3ff80000000000009192ac426c6f636b52656d6f76656491d3ffffff0000000000c0",
                [Removed(hashes=[18446742974197923840])],
                [],
            ),
            ("93019191b0416c6c426c6f636b73436c656172656400", [Cleared()], []),
            (
                "93cb3ff80000000000009292ac426c6f636b52656d6f76656491cf800000000000000092a74d7973746572790100",
                [Removed(hashes=[2**63])],
                ["unknown"],
            ),
            (
                "92cb3ff80000000000009193ac426c6f636b52656d6f766564926465a3637075",
                [Removed(hashes=[100, 101], tier=Tier.G2)],
                [],
            ),
            ("93cb3ff80000000000009192ac426c6f636b52656d6f76656491ce80000005c0", [Removed(hashes=[0x80000005])], []),
            (
                "93cb3ff80000000000009195ab426c6f636b53746f72656491cf8000000000000000c092cb3ff0000000000000"
                "cb40000000000000000200",
                [],
                ["malformed"],
            ),
            (
                "93cb3ff80000000000009182a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf8000000000000000c0",
                [],
                ["malformed"],
            ),
            (
                "93cb3ff800000000000091c42a97ab426c6f636b53746f72656491cfabcdef0123456789009000c0ae5348415245445f53544f52"
                "414745c0",
                [Stored(hashes=[0xABCDEF0123456789], parent=None, tokens=None, block_size=0, tier=Tier.G3)],
                [],
            ),
        ],
        ids=[
            "two",
            "clear",
            "digests",
            "negative",
            "int-stamp",
            "unknown",
            "two-elements",
            "u32",
            "floats",
            "lacking",
            "bin",
        ],
    )
    def test_fixture(self, payload, events, problems):
        decoded = Decoder(narrow=True).decode(bytes.fromhex(payload))
        assert decoded.events == events
        assert [problem.kind for problem in decoded.problems] == problems


class TestTolerance:
    @pytest.mark.parametrize("value", [0, 1, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32, 2**63, 2**64 - 1])
    def test_every_width(self, value):
        assert one(["BlockRemoved", [value]]).hashes == [value]
        assert one(stored(parent=value)).parent == value

    @pytest.mark.parametrize("value", [-1, -33, -129, -40000, -(2**31), -(2**63)])
    def test_signed_is_unsigned(self, value):
        assert one(["BlockRemoved", [value, 5]]).hashes == [value % 2**64, 5]
        assert one(mapped(parent_block_hash=value)).parent == value % 2**64

    def test_digests_are_kept_or_narrowed(self):
        digest = bytes(range(32))
        assert one(["BlockRemoved", [digest, b"\x01"]]).hashes == [digest, b"\x01"]
        assert one(["BlockRemoved", [digest, b"\x01"]], narrow=True).hashes == [0x18191A1B1C1D1E1F, 1]

    def test_digests_and_integers_mixed(self):
        assert one(["BlockRemoved", [b"ab", -1]]).hashes == [b"ab", 2**64 - 1]

    def test_short_and_long_arrays(self):
        assert one(stored()) == Stored(hashes=[1], parent=None, tokens=[7, 8], block_size=2)
        long = stored([1], None, [7, 8], 2, 4, "CPU", "ad", [["ad"]], 3, "mamba", None, "new", {"more": 1}, [])
        assert one(long) == Stored(
            hashes=[1], parent=None, tokens=[7, 8], block_size=2, lora_id=4, tier=Tier.G2, lora_name="ad", group=3,
            kind="mamba", extra_keys=[("ad",)],
        )  # fmt: skip
        assert one(["BlockRemoved", [1], None, 2, "x", 9]) == Removed(hashes=[1], group=2)
        assert one(["AllBlocksCleared", 5, {}]) == Cleared()

    def test_maps_lack_and_have_fields(self):
        assert one(mapped(parent_block_hash=..., brand_new=[1])) == one(stored())
        assert one({"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": [0]}) == Removed(hashes=[1])
        assert one({"type": "AllBlocksCleared"}) == Cleared()

    @pytest.mark.parametrize("extra", [[], [0], [0, "more"], [0, 1, {}]])
    def test_batches_of_two_and_more(self, extra):
        decoded = decode(pack([1.0, [["AllBlocksCleared"]], *extra]))
        assert decoded.events == [Cleared()] and decoded.rank == (0 if extra else None) and not decoded.problems

    def test_batch_as_a_map(self):
        decoded = decode(pack({"ts": 2, "events": [["AllBlocksCleared"]], "data_parallel_rank": 4}))
        assert (decoded.ts, decoded.rank, decoded.events) == (2.0, 4, [Cleared()])

    def test_both_encodings_in_one_batch(self):
        decoded = decode(array(stored(), mapped()))
        assert decoded.events[0] == decoded.events[1] and decoded.dialect == "mixed" and not decoded.problems

    def test_empty_hashes_with_tokens(self):
        event = one(mapped(block_hashes=[]))
        assert event.hashes == [] and event.tokens == [7, 8]

    def test_placeholders(self):
        for parent in (None, 0):
            event = one(mapped(parent_block_hash=parent, token_ids=[], block_size=0, medium="CPU"))
            assert event == Stored(hashes=[1], parent=None, tokens=None, block_size=0, tier=Tier.G2)

    def test_parent_zero_is_a_parent_elsewhere(self):
        assert one(stored(parent=0)).parent == 0

    def test_no_group_is_not_group_0(self):
        assert one(stored()).group is None and one(mapped(group_idx=0)).group == 0
        assert one(["BlockRemoved", [1], "GPU"]).group is None and one(["BlockRemoved", [1], "GPU", 0]).group == 0

    def test_sglang_metadata_and_pairs(self):
        event = one(stored([5], None, [[1, 2], [2, 3]], 2, None, "CPU_PINNED", {"component": "swa"}))
        assert event == Stored(hashes=[5], parent=None, tokens=[1, 2], block_size=2, tier=Tier.G2)

    def test_sglang_announced(self):
        decoder = Decoder("sglang")
        assert decoder.decode(array(stored())).dialect == "array"
        assert decoder.decode(array(mapped())).dialect == "map"
        assert decoder.stats.slow_payloads == 0

    def test_salt_is_found_by_position(self):
        assert one(mapped(extra_keys=[["s"]])).salt == "s"
        assert one(mapped(extra_keys=[["ad", ["img", 0], "s"]], lora_name="ad")).salt == "s"
        assert one(mapped(extra_keys=[["ad"]], lora_name="ad")).salt is None
        assert one(mapped(extra_keys=[["mm-1", "mm-2"]])).salt is None
        assert one(mapped(extra_keys=[["s"]], parent_block_hash=4)).salt is None

    def test_plain_extra_keys_are_none(self):
        assert one(mapped(extra_keys=[None])).extra_keys is None

    @pytest.mark.parametrize(
        ("medium", "tier"),
        [
            (None, 1), ("GPU", 1), ("gpu", 1), ("CPU", 2), ("cpu", 2), ("CPU_PINNED", 2), ("cpu-pinned", 2), ("host", 2),
            ("CPU_TIER1", 2), ("CPU_TIER2", 3), ("STORAGE", 3), ("DISK", 3), ("FS", 3), ("OBJ", 5), ("OBJECT_STORE", 5),
            ("EXTERNAL", 3), ("Shared Storage", 3), ("quantum", None), ("", None),
        ],
    )  # fmt: skip
    def test_media(self, medium, tier):
        assert tier_of(medium) == tier

    def test_json_and_objects(self):
        batch = [1.5, [stored(), mapped()], 2]
        for payload in (msgspec.json.encode(batch), batch, tuple(batch)):
            decoded = decode(payload)
            assert len(decoded.events) == 2 and decoded.rank == 2 and not decoded.problems
        assert decode(bytearray(array(stored()))).events == decode(memoryview(array(stored()))).events


class TestRefusals:
    @pytest.mark.parametrize(
        ("event", "kind"),
        [
            (["Mystery", 1], "unknown"),
            ({"type": "BlockMoved"}, "unknown"),
            ([], "malformed"),
            ({}, "malformed"),
            ({"type": 5}, "malformed"),
            ({"kind": "BlockRemoved"}, "malformed"),
            (["BlockRemoved"], "malformed"),
            (["BlockRemoved", 7], "malformed"),
            (["BlockRemoved", ["x"]], "malformed"),
            (["BlockRemoved", [1.0]], "malformed"),
            (["BlockRemoved", [True]], "malformed"),
            (["BlockRemoved", [None]], "malformed"),
            (["BlockRemoved", [b""]], "hash"),
            (["BlockRemoved", [b"x" * 129]], "hash"),
            (["BlockRemoved", [1], 5], "malformed"),
            (["BlockRemoved", [1], "quantum"], "medium"),
            (["BlockRemoved", [1], "GPU", -1], "group"),
            (mapped(group_idx=-1), "group"),
            (mapped(group_idx=2**31), "group"),
            (mapped(group_idx="0"), "malformed"),
            (mapped(token_ids=...), "malformed"),
            (mapped(block_size=...), "malformed"),
            (mapped(block_hashes=...), "malformed"),
            (mapped(token_ids=[1.0]), "malformed"),
            (mapped(token_ids=[True]), "malformed"),
            (mapped(block_size=-1), "malformed"),
            (mapped(parent_block_hash=b""), "hash"),
            (mapped(lora_name=5), "malformed"),
            (mapped(extra_keys=[5]), "malformed"),
            (mapped(extra_keys=[[[["deep"]]]]), "malformed"),
            (mapped(extra_keys=[[{}]]), "malformed"),
            (stored()[:4], "malformed"),
            (5, "malformed"),
            (None, "malformed"),
            ("BlockStored", "malformed"),
            (b"junk", "malformed"),
            (b"", "malformed"),
            (pack(pack(stored())), "malformed"),
        ],
    )
    def test_a_bad_event_costs_itself(self, event, kind):
        assert refused(event) == kind

    @pytest.mark.parametrize(
        "payload",
        [
            b"", b"\x00", b"\xc0", b"\xc1", b"\x90", b"\x91\x01", b"\x92\x01", b"\x80", b"{", b"[", b"{}", b"[1]", b"[1,2]",
            b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000, b"[" * 100_000,
            pack([1.0, "events"]), pack([1.0, None]), pack({"ts": 1}), pack("BlockStored"), pack(stored()) + b"\x00",
            array(stored())[:-3], pack([1.0, [1]])[:1],
        ],
    )  # fmt: skip
    def test_no_payload_raises(self, payload):
        decoded = decode(payload)
        assert decoded.events == [] and decoded.problems[-1].kind in ("payload", "malformed")
        assert not any(problem.reason.startswith("unexpected") for problem in decoded.problems)

    def test_objects_do_not_raise_either(self):
        for payload in (None, 5, "x", [1], [1, 2], {"events": 3}, {"ts": 1, "events": None}, object()):
            assert decode(payload).events == []

    @pytest.mark.parametrize("rank", [-1, "0", 1.5, True, [], 2**40])
    def test_a_bad_rank_is_no_rank(self, rank):
        decoded = decode(array(stored(), rank=rank))
        assert decoded.rank is None and len(decoded.events) == 1 and not decoded.lossy
        assert [problem.kind for problem in decoded.problems] == ["batch"]

    @pytest.mark.parametrize("ts", ["now", None, [], math.inf, math.nan])
    def test_a_bad_stamp_is_no_stamp(self, ts):
        decoded = decode(array(stored(), ts=ts))
        assert decoded.ts == 0.0 and len(decoded.events) == 1
        assert [problem.kind for problem in decoded.problems] == ["batch"]

    def test_bad_text_costs_its_event_only(self):
        good = pack(["BlockRemoved", [1], "GPU"])
        bad = good.replace(b"GPU", b"\xff\xff\xff")
        decoded = decode(b"\x92\x01\x93" + good + bad + good)
        assert len(decoded.events) == 2 and decoded.problems[0].index == 1

    def test_a_limit_on_size(self):
        decoded = Decoder(max_bytes=10).decode(array(stored()))
        assert decoded.problems[0].kind == "payload" and "limit of 10" in decoded.problems[0].reason

    def test_unknown_dialects_are_named(self):
        with pytest.raises(
            KvyardError,
            match=r"unknown wire format 'vlm': did you mean vllm\? Choose one of kvyard",
        ):
            Decoder("vlm")
        with pytest.raises(
            KvyardError, match="wire format 'sglang' is only read: choose one of vllm, vllm-array, trtllm"
        ):
            Encoder("sglang")


class TestStats:
    def test_names_of_unknown_kinds_are_bounded(self):
        decoder = Decoder()
        for at in range(1000):
            decoder.decode(array([f"kind-{at}" * 100]))
        assert len(decoder.stats.unknown) == 65 and sum(decoder.stats.unknown.values()) == 1000
        assert all(len(name) <= 64 for name in decoder.stats.unknown)

    def test_a_payload_can_be_decoded_without_a_decoder(self):
        from kvyard.events import EventBatch

        batch = EventBatch(stream="", seq=0, events=[Cleared()], ts=2.0, rank=1)
        for dialect in ("vllm", "vllm-array"):
            decoded = decode(encode(batch, dialect))
            assert (decoded.ts, decoded.rank, decoded.events) == (2.0, 1, [Cleared()])
