"""The conformance check: what is found, what is taken for normal, and what real streams look like through it."""

import lzma
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.events.fake_map import FakeMap, token_chain

from kvyard.cli.events import report_lines, report_value
from kvyard.errors import KvyardError
from kvyard.events import Batcher, GroupMeta, Tier
from kvyard.events.check import Checker, Severity, StreamReport, judge
from kvyard.events.transport.frames import Frame
from kvyard.events.transport.state import Origin, State, Update
from kvyard.events.types import Stored
from kvyard.events.wire import Encoder
from kvyard.hashing import Run

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "blocks").glob("*.jsonl.xz"))


def stored(*hashes: int, parent: int | None = None, medium="GPU", tokens=None, size=2, **more) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(size * len(hashes))) if tokens is None else tokens,
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def removed(*hashes: int, medium="GPU", **more) -> dict:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


def array(event: dict) -> list:
    return list(event.values())


CLEARED = {"type": "AllBlocksCleared"}


def check(*batches: list, engine="auto", seqs=None, blocks=None) -> StreamReport:
    checker = Checker()
    for at, events in enumerate(batches):
        seq = at if seqs is None else seqs[at]
        checker.frame(Frame(b"t", seq, msgspec.msgpack.encode([1.0 + at, events, 0])))
    return judge(checker.facts(), engine, device_blocks=blocks)


def found(report: StreamReport, severity: Severity = Severity.PROBLEM) -> dict[str, int]:
    """Count per code of one severity."""
    counts: dict[str, int] = {}
    for finding in report.findings:
        if finding.severity == severity:
            counts[finding.code] = counts.get(finding.code, 0) + finding.count
    return counts


NORMAL, NOTE = Severity.NORMAL, Severity.NOTE
FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}


class TestSequence:
    def test_clean(self):
        report = check([stored(1, 2, **FULL)], [stored(3, parent=2, **FULL)], [removed(3, group_idx=0)])
        assert report.clean and report.engine == "vllm" and report.guessed
        assert report.findings == []
        assert report.facts.held == 2 and report.facts.stored_blocks == 3

    def test_gap_and_what_follows_from_it(self):
        report = check([stored(1, **FULL)], [stored(9, parent=8, **FULL), removed(7, group_idx=0)], seqs=[0, 5])
        assert found(report) == {"gap": 4}
        assert found(report, NOTE) == {"orphan-parent": 1, "unknown-remove": 1}
        assert report.findings[0].examples == ["1 to 4"]

    def test_a_clear_makes_up_for_a_gap(self):
        report = check([stored(1)], [CLEARED, stored(9, parent=8)], seqs=[0, 5])
        assert found(report) == {"gap": 4, "orphan-parent": 1}

    def test_duplicate(self):
        checker = Checker()
        frame = Frame(b"t", 0, msgspec.msgpack.encode([1.0, [stored(1)], 0]))
        checker.frame(frame)
        checker.frame(frame)
        report = judge(checker.facts())
        assert found(report) == {"duplicate": 1} and report.facts.stored_blocks == 1

    def test_reordered(self):
        report = check([stored(1)], [stored(3)], [stored(2)], seqs=[0, 2, 1])
        assert found(report) == {"gap": 1, "reordered": 1}

    def test_restart(self):
        report = check([stored(1)], [stored(2)], [stored(1)], [stored(2)], seqs=[0, 1, 0, 1])
        assert found(report) == {"restart": 1}
        assert found(report, NORMAL) == {}, "a new engine's stores are no repetitions"

    def test_joined_late(self):
        report = check([stored(9, parent=8), removed(5)], seqs=[17])
        assert report.clean and found(report, NOTE) == {"joined-late": 1, "orphan-parent": 1, "unknown-remove": 1}

    def test_streams_are_kept_apart(self):
        checker = Checker()
        for seq in range(3):
            for topic in (b"a", b"b"):
                payload = msgspec.msgpack.encode([float(seq), [stored(seq + 1, parent=seq or None)], 0])
                checker.frame(Frame(topic, seq, payload))
        report = judge(checker.facts())
        assert report.clean and list(report.facts.streams) == ["a", "b"]


class TestReadability:
    def test_messages_and_payloads_that_are_none(self):
        checker = Checker()
        checker.message([b"t", b"12345678", b"x", b"y"])
        checker.message([b"t", b"123", b"x"])
        checker.message([b"t", (0).to_bytes(8, "big"), b"\xc1"])
        assert found(judge(checker.facts())) == {"message": 2, "bad-payload": 1}

    def test_bad_events_cost_themselves(self):
        report = check([stored(1), {"type": "BlockRemoved"}, {"type": "News"}, removed(1, medium="MOON"), removed(1)])
        assert found(report) == {"bad-malformed": 1, "bad-medium": 1, "unknown-kind": 1}
        assert report.facts.held == 0 and report.facts.unknown_kinds == {"News": 1}

    def test_encodings(self):
        report = check([stored(1)], [array(stored(2))])
        assert "encodings" in found(report, NOTE)
        assert report.facts.guess.encodings == {"map": 1, "array": 1}
        old = check([array(stored(1))])
        assert found(old, NOTE) == {"old-encoding": 1} and old.engine == "vllm"


class TestAnnouncements:
    def test_repeated_stores_are_vllms_way(self):
        report = check([stored(1, 2, **FULL)], [stored(1, **FULL)], [removed(1, group_idx=0)])
        assert report.clean and found(report, NORMAL) == {"repeated-store": 1}
        (finding,) = report.findings
        assert "miss 1 of the 2 blocks" in finding.means

    def test_a_rule_is_its_engines_alone(self):
        report = check([stored(1)], [stored(1)], engine="kvyard")
        assert found(report) == {"repeated-store": 1}

    def test_orphans(self):
        never = check([stored(9, parent=8, **FULL)])
        assert found(never) == {"orphan-parent": 1} and never.findings[0].examples
        gone = check([stored(8, **FULL)], [removed(8, group_idx=0)], [stored(9, parent=8, **FULL)])
        assert gone.clean and found(gone, NORMAL) == {"removed-parent": 1}
        window = check([stored(9, parent=8, **WINDOW)])
        assert window.clean and found(window, NORMAL) == {"orphan-parent": 1}
        other_tier = check([stored(8, **FULL)], [stored(9, parent=8, medium="CPU", **FULL)])
        assert other_tier.findings == []

    def test_removals(self):
        unknown = check([removed(1, group_idx=0)])
        assert found(unknown) == {"unknown-remove": 1}
        twice = check([stored(1, **FULL)], [removed(1, group_idx=0), removed(1, group_idx=0)])
        assert found(twice) == {"repeated-remove": 1}
        below = check([stored(1, **FULL)], [removed(2, medium="CPU", group_idx=0)])
        assert below.clean and found(below, NORMAL) == {"unknown-remove": 1}

    def test_shapes(self):
        empty = stored(tokens=[1, 2], **WINDOW)
        odd = stored(1, 2, tokens=[1, 2, 3], **FULL)
        masked = stored(3, tokens=[1, 2, 3, 4], **WINDOW)
        bare = stored(4, tokens=[], size=0, medium="CPU", group_idx=0)
        report = check([empty, odd, masked, bare])
        assert found(report) == {"misaligned": 1}
        assert found(report, NORMAL) == {"empty-store": 1, "misaligned": 1, "hash-only": 1}

    def test_sizes(self):
        report = check([stored(1, **FULL)], [stored(2, size=4, **FULL)])
        assert found(report, NORMAL) == {"block-size": 2}

    def test_ranks(self):
        checker = Checker()
        for seq in range(2):
            checker.frame(Frame(b"t", seq, msgspec.msgpack.encode([1.0, [stored(1)], seq])))
        report = judge(checker.facts())
        assert found(report) == {"ranks": 1}, "each rank's copy is its own"


class TestRemovals:
    """Engines that leak: removals that don't say of what, and more on a device than it has."""

    def test_a_removal_without_hashes_is_a_fault_of_every_engine(self):
        for engine in ("vllm", "sglang", "trtllm", "kvyard", "unknown"):
            report = check([stored(1, **FULL)], [removed(group_idx=0)], [removed(group_idx=0)], engine=engine)
            assert found(report)["empty-remove"] == 2, engine
        assert report.findings[0].examples == ["batch 1", "batch 2"]

    def leaky(self, **more) -> StreamReport:
        return check(
            [stored(1, 2, **FULL)], [stored(3, parent=2, **FULL)], [stored(4, **FULL), removed(4, group_idx=0)], **more
        )

    def test_more_blocks_than_the_device_has(self):
        report = self.leaky(blocks=2)
        assert found(report) == {"over-capacity": 1} and report.findings[0].seen.endswith(": 3 of 2.")
        assert self.leaky(blocks=3).clean and self.leaky().clean

    def test_within_a_batch_stores_may_come_before_the_removals_that_made_room(self):
        batch = [stored(3, **WINDOW), removed(1, group_idx=0)]
        assert check([stored(1, 2, **FULL)], batch, blocks=2).clean

    def test_groups_share_the_device_and_ranks_have_one_each(self):
        both = [stored(1, 2, **FULL), stored(1, 2, **WINDOW)]
        assert found(check(both, blocks=3)) == {"over-capacity": 1}
        checker = Checker()
        for rank in (0, 1):
            payload = msgspec.msgpack.encode([1.0, [stored(1, 2, **FULL)], rank])
            checker.frame(Frame(b"%d" % rank, 0, payload))
        assert judge(checker.facts(), device_blocks=2).clean

    def test_lower_tiers_are_not_the_device(self):
        assert check([stored(1, 2, medium="CPU", **FULL)], blocks=1).clean

    def test_after_a_gap_nothing_is_concluded_until_a_clear(self):
        lost = check([stored(1, 2, **FULL)], [stored(3, **FULL)], seqs=[0, 5], blocks=2)
        assert found(lost) == {"gap": 4}
        again = check([stored(1, **FULL)], [CLEARED, stored(2, 3, 4, **FULL)], seqs=[0, 5], blocks=2)
        assert found(again) == {"gap": 4, "over-capacity": 1}

    def test_batches_that_were_fetched_again_are_a_note(self):
        checker = Checker()
        for seq in (0, 3):
            checker.frame(Frame(b"", seq, msgspec.msgpack.encode([1.0, [stored(seq, **FULL)], 0])))
        report = judge(checker.facts(), recovered=True)
        assert report.clean and not report.capacity_checked
        (note,) = report.findings
        assert note.code == "gap" and note.seen == "2 batches are missing, in 1 gap. All of it was fetched again."

    def test_a_subscription_has_fetched_what_the_stream_lost(self):
        def update(seq: int, *hashes: int, state: State = State.FRESH, replaces: bool = False) -> Update:
            event = Stored(hashes=list(hashes), parent=None, tokens=None, block_size=4)
            place = {"stream": "a", "topic": "", "epoch": 0, "origin": Origin.REPLAY, "rank": 0}
            return Update(seq=seq, events=[event], state=state, replaces=replaces, **place)

        def peak(*updates: Update) -> int:
            checker = Checker()
            for one in updates:
                checker.update(one)
            return checker.facts().streams[""].device_peak

        assert peak(update(0, 1, 2), update(1, 3)) == 3
        assert peak(update(0, 1, 2), update(1, 3, replaces=True)) == 2
        assert peak(update(0, 1, 2), update(1, 3, state=State.STALE)) == 2

    def test_tensorrt_llm_says_what_it_has_and_is_known_to_leak(self):
        drain = [
            {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [1, 4]}, "window_size": 64},
            {
                "event_id": 1,
                "data": {"type": "stored", "blocks": [{"block_hash": key, "cache_level": 0} for key in (1, 2)]},
                "window_size": 64,
            },
        ]
        checker = Checker()
        checker.message([msgspec.json.encode(drain)])
        assert checker.facts().capacities == {"64": 1}
        assert found(judge(checker.facts()), NORMAL)["over-capacity"] == 1
        assert found(judge(checker.facts(), "kvyard"))["over-capacity"] == 1


class TestEngines:
    def test_sglang(self):
        report = check([array(stored(-5, -6, medium="GPU"))], [array(stored(-5, medium="CPU_PINNED"))])
        assert report.engine == "sglang" and report.clean and report.cautions
        assert report.facts.guess.hashes == {"signed": 3}

    def test_tensorrt_llm_stream(self):
        assert check([stored(-5)]).engine == "trtllm"

    def test_tensorrt_llm_dicts(self):
        def event(at: int, **data) -> dict:
            return {"event_id": at, "data": data, "window_size": 64}

        def block(key: int, tokens: int) -> dict:
            return {"block_hash": key, "tokens": [{"token_id": t} for t in range(tokens)], "cache_level": 0}

        drains = [
            [event(0, type="created", num_blocks_per_cache_level=[8, 4])],
            [event(1, type="stored", parent_hash=None, blocks=[block(1, 4), block(2, 4), block(3, 1)])],
            [event(2, type="updated", block_hash=2, cache_level={"new_value": 1, "old_value": 0})],
            [event(3, type="removed", block_hashes=[3])],
            [event(9, type="removed", block_hashes=[1])],
        ]
        checker = Checker()
        for drain in drains:
            checker.message([msgspec.json.encode(drain)])
        report = judge(checker.facts())
        assert report.engine == "trtllm"
        assert found(report) == {"bad-gap": 1}
        assert found(report, NORMAL) == {"partial-blocks": 1, "unknown-remove": 1, "hash-only": 1}
        assert report.facts.tiers == {"G1": 2, "G2": 1}

    def test_ours(self):
        held = FakeMap()
        held.sink = batcher = Batcher((GroupMeta(block_size=1, kind="full_attention"),), snapshot=held.snapshot)
        checker, encoder = Checker(), Encoder()
        for at in range(20):
            held.enter(Run(token_chain(at, at + 100)), 0, Tier.G1)
            if at > 2:
                held.leave(Run(token_chain(at - 2, at + 98))[1:], 0, Tier.G1)
            batch = batcher.end_iteration(at)
            checker.frame(Frame(b"", batch.seq, encoder.encode(batch)))
        report = judge(checker.facts(), "kvyard")
        assert report.clean and report.findings == []
        assert report.facts.held == sum(map(len, held.held().values()))

    def test_unknown_engine_is_refused(self):
        with pytest.raises(KvyardError, match="unknown wire format 'triton': choose one of kvyard, sglang"):
            judge(Checker().facts(), "triton")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def test_real_vllm_streams_are_clean(path):
    """What vLLM's own manager announced in our recorded walks, hybrid models included: odd in places, never wrong."""
    checker = Checker()
    seq = 0
    for line in lzma.decompress(path.read_bytes()).splitlines():
        if b'"take_events"' not in line:
            continue
        record = msgspec.json.decode(line)
        if record["op"]["op"] != "take_events" or not record["result"]["events"]:
            continue
        if any(isinstance(key, str) for event in record["result"]["events"] for key in event.get("block_hashes", ())):
            pytest.skip("digests, which the log has as text")
        checker.frame(Frame(b"", seq, msgspec.msgpack.encode([1.0, record["result"]["events"], 0])))
        seq += 1
    report = judge(checker.facts())
    assert report.engine == ("vllm" if seq else "unknown")
    assert report.clean, list(report_lines(report, path.name))


def test_report_for_people_and_programs():
    report = check([stored(1, **FULL)], [stored(9, parent=8, **FULL), stored(1, **FULL)], seqs=[0, 5])
    text = "\n".join(report_lines(report, "x"))
    assert "looks like vLLM" in text and "Problems\n  gap: 4 batches are missing, in 1 gap." in text
    assert "group 0: full_attention, blocks of 2 tokens" in text and "1 problem found." in text
    value = report_value(report, "x")
    assert value["clean"] is False and value["facts"]["streams"]["t"]["missing"] == 4
    assert msgspec.json.decode(msgspec.json.encode(value))["findings"][0]["code"] == "gap"


@given(
    messages=st.lists(
        st.one_of(
            st.lists(st.binary(max_size=12), max_size=4),
            st.builds(
                lambda seq, payload: Frame(b"", seq, payload).parts(),
                st.integers(0, 5),
                st.recursive(
                    st.one_of(
                        st.none(), st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=3), st.binary(max_size=3)
                    ),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                ).map(msgspec.msgpack.encode),
            ),
        ),
        max_size=8,
    )
)
def test_anything_can_be_checked(messages):
    checker = Checker()
    for parts in messages:
        checker.message(parts)
    report = judge(checker.facts())
    assert list(report_lines(report, "x")) and msgspec.json.encode(report_value(report, "x"))


def test_five_of_many_malformed_messages_are_shown() -> None:
    checker = Checker()
    for frames in range(4, 12):
        checker.message([b""] * frames)
    (finding,) = [one for one in judge(checker.facts(), "auto").findings if one.code == "message"]
    assert finding.count == 8 and len(finding.examples) == 5


def test_a_tier_that_never_removes():
    again = [[stored(*range(1, 21)), stored(*range(101, 121), medium="CPU")]] * 3
    report = check(*again, [removed(*range(1, 21))])
    (finding,) = [one for one in report.findings if one.code == "never-removes"]
    assert finding.severity is Severity.PROBLEM and "20 of 20 blocks of the host tier" in finding.seen
    assert "never-removes" not in found(check(*again[:2])), "two copies may be made at the same time"
    assert "never-removes" not in found(check(*again, [removed(*range(1, 21)), removed(101, medium="CPU")]))
