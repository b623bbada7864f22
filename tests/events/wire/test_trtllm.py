"""TensorRT-LLM's dicts: what its engine and HTTP route give, and what we write in its words."""

import json

import msgspec
import pytest
from tests.events.fake_map import SHA, XXH3, FakeMap, token_chain

from kvyard.events import Batcher, Cleared, EventBatch, GroupMeta, Mirror, Removed, Stored, Tier
from kvyard.events.wire import Decoder, Encoder, decode
from kvyard.events.wire import trtllm as reading
from kvyard.hashing import Namespace, Run, TokenChain
from kvyard.hashing.namespace import Media

G1, G2, G3, *_ = Tier


def tokens(*ids: int) -> list[dict]:
    return [{"type": "unique_token", "token_id": at, "token_extra_id": 0} for at in ids]


def block(key, *ids: int, level: int = 0, **more) -> dict:
    return {
        "type": "stored_block", "block_hash": key, "tokens": tokens(*ids), "cache_level": level, "priority": 35,
        "mm_keys": [], **more,
    }  # fmt: skip


def event(at: int, data: dict, window: int | None = 4096, **more) -> dict:
    return {"event_id": at, "data": data, **({} if window is None else {"window_size": window}), **more}


def stored(*blocks: dict, parent=None) -> dict:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def moved(key, old: int, new: int) -> dict:
    diff = {"type": "event_diff", "new_value": new, "old_value": old}
    return {"type": "updated", "block_hash": key, "cache_level": diff, "priority": None}


def removed(*keys) -> dict:
    return {"type": "removed", "block_hashes": list(keys)}


CREATED = {"type": "created", "num_blocks_per_cache_level": [100, 200]}


@pytest.fixture(params=["json", "objects", "msgpack"])
def read(request):
    """A way to decode a list of dicts: as the HTTP route gives it, as the Python API does, or packed."""
    decoder = Decoder("trtllm")

    def decode_items(*items):
        if request.param == "objects":
            return decoder.decode(list(items))
        pack = msgspec.json.encode if request.param == "json" else msgspec.msgpack.encode
        return decoder.decode(pack(list(items)))

    return decode_items


class TestReading:
    def test_a_first_drain(self, read):
        decoded = read(
            event(0, CREATED),
            event(1, stored(block(11, 1, 2), block(12, 3, 4))),
            event(2, stored(block(13, 5, 6), parent=12)),
            event(3, removed(11, 12)),
        )
        assert decoded.problems == [] and decoded.dialect == "trtllm" and decoded.rank is None
        common = {"block_size": 2, "group": 4096, "window": 4096}
        assert decoded.events == [
            Cleared(),
            Stored(hashes=[11, 12], parent=None, tokens=[1, 2, 3, 4], **common),
            Stored(hashes=[13], parent=12, tokens=[5, 6], **common),
            Removed(hashes=[11, 12], group=4096),
        ]

    def test_updated_is_an_enter_and_a_leave(self, read):
        decoded = read(event(0, stored(block(1, 5, 6))), event(1, moved(1, 0, 1)), event(2, removed(1)))
        assert decoded.events[1:] == [
            Stored(hashes=[1], parent=None, tokens=None, block_size=0, group=4096, tier=G2, window=4096),
            Removed(hashes=[1], group=4096, tier=G1),
            Removed(hashes=[1], group=4096, tier=G2),
        ]

    def test_a_block_stored_below_is_removed_there(self, read):
        decoded = read(event(0, stored(block(1, 5, level=1), block(2, 6), block(3, 7))), event(1, removed(1, 2, 3)))
        assert [(type(one).__name__, one.tier, one.hashes) for one in decoded.events] == [
            ("Stored", G2, [1]), ("Stored", G1, [2, 3]), ("Removed", G1, [2, 3]), ("Removed", G2, [1]),
        ]  # fmt: skip
        assert decoded.events[1].parent == 1

    def test_priorities_and_empty_diffs_change_nothing(self, read):
        same = {"type": "updated", "block_hash": 1, "cache_level": None, "priority": {"new_value": 1, "old_value": 2}}
        decoded = read(event(0, same), event(1, {"type": "updated", "block_hash": 1}))
        assert decoded.events == [] and decoded.problems == []

    def test_partial_blocks_are_left_out(self):
        decoder = Decoder()
        decoded = decoder.decode([event(0, stored(block(1, 1, 2, 3), block(2, 4, 5, 6), block(3, 7)))])
        assert decoded.events[0].hashes == [1, 2] and decoder.stats.partial_blocks == 1
        decoded = decoder.decode([event(1, stored(block(4, 8, 9), parent=2))])
        assert decoded.events == [] and decoder.stats.partial_blocks == 2, "the size was learned"
        assert Decoder(block_size=4).decode([event(0, stored(block(1, 1, 2)))]).events == []

    def test_groups(self, read):
        decoded = read(
            event(0, removed(1), window=None),
            event(1, removed(1), layer_group_id=0),
            event(2, removed(1), window=-1),
            event(3, removed(1), layer_group_id=-2),
            event(4, removed(2)),
        )
        assert [one.group for one in decoded.events] == [None, 0, reading.STATE_GROUP + 1, 4096]
        assert [(problem.index, problem.kind) for problem in decoded.problems] == [(3, "group")]

    def test_state_groups_say_so(self, read):
        decoded = read(event(0, stored(block(1, 1)), window=-1))
        assert decoded.events[0].kind == "mamba" and decoded.events[0].window is None

    def test_hex_hashes_and_media(self, read):
        digest = bytes(range(32)).hex()
        media = [{"type": "mm_key", "hash": "aa", "start_offset": 3}]
        decoded = read(
            event(
                0,
                stored(block(digest, 1, mm_keys=media, cache_salt="s"), block(digest[::-1], 2)),
                hash_algo="v2_sha256",
            )
        )
        (one,) = decoded.events
        assert one.hashes == [bytes.fromhex(digest), bytes.fromhex(digest[::-1])]
        assert one.extra_keys == [(("aa", -3),), None] and one.salt == "s"

    def test_one_bad_event_costs_itself(self, read):
        decoded = read(
            event(0, removed(1)),
            event(1, removed("not hex")),
            event(2, {"type": "exploded"}),
            {"event_id": 3},
            event(4, moved(1, 0, 9)),
            event(5, removed(2**64)) if False else event(5, removed(None)),
            event(6, removed(2)),
        )
        assert [one.hashes for one in decoded.events] == [[1], [1], [2]], (
            "a block that moves away has left, wherever it went"
        )
        kinds = [problem.kind for problem in decoded.problems if problem.kind != "gap"]
        assert kinds == ["hash", "unknown", "malformed", "medium", "malformed"]

    def test_neighbours_that_are_no_dicts(self):
        decoded = decode([5, event(0, removed(1)), None, "x"])
        assert [one.hashes for one in decoded.events] == [[1]] and len(decoded.problems) == 3

    def test_missing_ids_show(self, read):
        assert read(event(0, removed(1)), event(1, removed(2))).problems == []
        (gap,) = read(event(4, removed(3))).problems
        assert (gap.kind, gap.reason) == ("gap", "events 2 to 3 are missing")
        decoded = read(event(0, CREATED))
        assert decoded.problems[0].kind == "restart" and decoded.lossy

    def test_ranks_are_kept_apart(self, read):
        decoded = read(
            event(0, removed(1), attention_dp_rank=0),
            event(0, removed(2), attention_dp_rank=1),
            event(1, removed(3), attention_dp_rank=0),
        )
        assert decoded.problems == [] and decoded.rank is None and decoded.ranks == [0, 1, 0]
        parts = decoded.by_rank()
        assert [(part.rank, [one.hashes[0] for one in part.events]) for part in parts] == [(0, [1, 3]), (1, [2])]
        assert read(event(2, removed(1), attention_dp_rank=0)).rank == 0

    def test_an_empty_drain(self, read):
        decoded = read()
        assert decoded.events == [] and decoded.dialect == "none"

    def test_one_event_alone(self):
        assert decode(json.dumps(event(0, removed(1))).encode()).events == [Removed(hashes=[1], group=4096)]

    def test_memory_of_lower_tiers_is_bounded(self, monkeypatch):
        monkeypatch.setattr(reading, "MAX_REMEMBERED", 2)
        decoder = Decoder()
        decoder.decode([event(0, stored(*(block(at, 1, level=1) for at in range(4))))])
        decoded = decoder.decode([event(1, removed(0, 3))])
        mirror = Mirror()
        mirror.apply([Stored(hashes=[0, 3], parent=None, tokens=None, block_size=1, group=4096, tier=G2)])
        mirror.apply(decoded.events)
        assert mirror.held == {}, "what was forgotten is removed everywhere"


class TestStreaming:
    def test_its_zmq_sink_writes_maps(self):
        """Like vLLM's but with signed hashes and the medium always GPU."""
        payload = msgspec.msgpack.encode(
            [1.0, [{"type": "BlockStored", "block_hashes": [-5], "parent_block_hash": None, "token_ids": [1], "block_size": 1,
                    "lora_id": None, "medium": "GPU"}, {"type": "AllBlocksCleared"}], 2]
        )  # fmt: skip
        decoded = Decoder("trtllm").decode(payload)
        assert decoded.rank == 2 and decoded.events == [
            Stored(hashes=[2**64 - 5], parent=None, tokens=[1], block_size=1),
            Cleared(),
        ]


class TestWriting:
    GROUPS = (GroupMeta(block_size=1, capacity=(8, 16)), GroupMeta(block_size=1, window=64))

    def write(self, *batches: EventBatch) -> list[list[dict]]:
        encoder = Encoder("trtllm", groups=self.GROUPS)
        return [json.loads(encoder.encode(batch)) for batch in batches]

    @staticmethod
    def batch(*events, first_id: int = 0, **more) -> EventBatch:
        return EventBatch(stream="", seq=0, events=list(events), first_id=first_id, **more)

    def test_created_goes_first_and_ids_are_dense(self):
        one, two = self.write(
            self.batch(Removed(hashes=[1], group=0)), self.batch(Removed(hashes=[2], group=1), first_id=1)
        )
        assert [item["event_id"] for item in one + two] == [0, 1, 2, 3]
        assert [item["data"]["type"] for item in one] == ["created", "created", "removed"]
        assert one[0]["data"]["num_blocks_per_cache_level"] == [8, 16]
        assert [item["window_size"] for item in one[:2]] == [2**31 - 1, 64] and two[0]["layer_group_id"] == 1

    def test_a_hole_in_our_ids_is_a_hole_in_theirs(self):
        one, two = self.write(
            self.batch(Removed(hashes=[1], group=0)), self.batch(Removed(hashes=[2], group=0), first_id=7)
        )
        assert two[0]["event_id"] - one[-1]["event_id"] == 7

    def test_the_shape_of_a_stored_block(self):
        space = Namespace(salt="s", media=(Media("img", 1, 3),))
        chain = TokenChain([7, 8, 9], 1, XXH3, space)
        batcher = Batcher(self.GROUPS, rank=2)
        batcher.entered(Run(chain, 1, 3), 0, G1, True)
        (items,) = self.write(batcher.end_iteration(0))
        item = items[-1]
        assert item["attention_dp_rank"] == 2
        assert item["data"]["parent_hash"] == chain.keys[0]
        assert item["data"]["blocks"][1] == {
            "type": "stored_block",
            "block_hash": chain.keys[2],
            "tokens": [{"type": "unique_token", "token_id": 9, "token_extra_id": 0}],
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [{"type": "mm_key", "hash": "img", "start_offset": 1, "uuid": None}],
            "cache_salt": "s",
        }

    def test_tiers_are_exclusive_there(self):
        held = FakeMap()
        held.sink = batcher = Batcher(self.GROUPS, snapshot=held.snapshot)
        encoder = Encoder("trtllm", groups=self.GROUPS)
        run = Run(token_chain(1))

        def said() -> list[str]:
            batch = batcher.end_iteration(0)
            return [] if batch is None else [item["data"]["type"] for item in json.loads(encoder.encode(batch))]

        held.enter(run, 0, G1)
        assert said() == ["created", "created", "stored"]
        held.enter(run, 0, G2)
        assert said() == []
        held.leave(run, 0, G1)
        assert said() == ["updated"]
        held.enter(run, 0, G1)
        assert said() == ["updated"]
        held.leave(run, 0, G2)
        assert said() == []
        held.leave(run, 0, G1)
        assert said() == ["removed"]

    def test_a_clear_removes_by_name(self):
        one, two = self.write(
            self.batch(Stored(hashes=[1, 2], parent=None, tokens=None, block_size=1, group=0)),
            self.batch(Cleared(), first_id=1),
        )
        assert two[0]["data"] == {"type": "removed", "block_hashes": [1, 2]} and len(one) == 3

    def test_digests_are_hex(self):
        chain = TokenChain([1], 1, SHA)
        (items,) = self.write(self.batch(Removed(hashes=chain.hashes(0, 1), group=0)))
        assert items[-1]["data"]["block_hashes"] == [chain.hashes(0, 1)[0].hex()]
        assert items[-1]["hash_algo"] == "v2_sha256"
