"""The mirror and the archive: what was announced can be announced again, to the same effect and parents first."""

from hypothesis import given
from hypothesis import strategies as st
from tests.events.fake_map import token_chain

from kvyard.events import Cleared, Mirror, Removed, Stored, Tier
from kvyard.events.mirror import restates
from kvyard.events.transport import outlet as archive_module
from kvyard.events.transport.frames import SNAPSHOT_WORD, ReplyKind, read_reply
from kvyard.events.transport.outlet import Archive
from kvyard.events.wire import Decoder

G1, G2, G3, *_ = Tier


def run(names: list[int], start: int, stop: int, group: int | None = 0, tier: Tier = G1, tokens: bool = True) -> Stored:
    """Blocks ``start`` to ``stop`` of the chain ``names``, two tokens each."""
    chain = token_chain(*names, size=2)
    return Stored(
        hashes=chain.hashes(start, stop),
        parent=chain.hashes(start - 1, start)[0] if start else None,
        tokens=chain.tokens_of(start, stop) if tokens else None,
        block_size=2,
        group=group,
        tier=tier,
        extra_keys=[("x", at) for at in range(start, stop)],
    )


NAMES = st.lists(st.integers(0, 2), min_size=1, max_size=5)
PLACE = st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from(Tier))


@st.composite
def events(draw):
    names, (group, tier) = draw(NAMES), draw(PLACE)
    start = draw(st.integers(0, len(names) - 1))
    stop = draw(st.integers(start, len(names)))
    stored = run(names, start, stop, group, tier, draw(st.booleans()))
    kind = draw(st.sampled_from(["store", "store", "remove", "remove", "clear", "clear one"]))
    if kind == "store":
        return stored
    if kind == "remove":
        return Removed(hashes=stored.hashes, group=group, tier=tier)
    return Cleared(tier=None if kind == "clear" else tier)


def sets_of(said) -> dict:
    """Return the held blocks, as plainly as can be."""
    held: set = set()
    for event in said:
        if isinstance(event, Stored):
            held |= {(event.group, event.tier, key) for key in event.hashes}
        elif isinstance(event, Removed):
            held -= {(event.group, event.tier, key) for key in event.hashes}
        else:
            held = {one for one in held if event.tier not in (None, one[1])}
    found: dict = {}
    for group, tier, key in held:
        found.setdefault((group, tier), set()).add(key)
    return found


def test_impossible_events_are_counted():
    mirror = Mirror()
    mirror.apply([run([1, 2], 0, 2), run([1, 2], 0, 1), Removed(hashes=[7, *run([1], 0, 1).hashes], group=0)])
    assert (mirror.repeated, mirror.unknown, mirror.blocks) == (1, 1, 1)


@given(said=st.lists(events(), max_size=30))
def test_announced_again_it_is_the_same_map(said):
    mirror, again = Mirror(), Mirror()
    mirror.apply(said)
    assert mirror.held == sets_of(said)
    first, *rest = mirror.events()
    assert first == Cleared() and restates([first])
    again.apply(rest)
    assert again.held == mirror.held and again.repeated == 0
    assert mirror.blocks == sum(map(len, mirror.held.values()))


@given(said=st.lists(events(), max_size=30))
def test_parents_come_first(said):
    mirror = Mirror()
    mirror.apply(said)
    held, known = mirror.held, {}
    for event in mirror.events()[1:]:
        place = (event.group, event.tier)
        if event.parent in held.get(place, ()):
            assert event.parent in known.get(place, ()), "the parent is held, so it must have been announced"
        known.setdefault(place, set()).update(event.hashes)


def test_a_part_keeps_what_belongs_to_it():
    mirror = Mirror()
    whole = run([1, 2, 3, 4], 0, 4)
    mirror.apply([whole, Removed(hashes=whole.hashes[1:2], group=0, tier=G1)])
    _, first, second = mirror.events()
    assert (first.hashes, first.parent, first.tokens) == (whole.hashes[:1], None, [1, 1])
    assert (second.hashes, second.parent, second.tokens) == (whole.hashes[2:], whole.hashes[1], [3, 3, 4, 4])
    assert second.extra_keys == [("x", 2), ("x", 3)]


def test_hashes_alone_replace_nothing():
    mirror = Mirror()
    whole = run([1, 2], 0, 2)
    mirror.apply([whole, run([1, 2], 0, 2, tokens=False)])
    assert mirror.events()[1].tokens == [1, 1, 2, 2]


def test_tokens_that_dont_line_up_stay_with_the_whole():
    mirror = Mirror()
    odd = Stored(hashes=[1, 2], parent=None, tokens=[1, 2, 3, 1 << 40], block_size=4, group=1)
    mirror.apply([odd])
    assert mirror.events()[1] == odd
    mirror.apply([Removed(hashes=[1], group=1)])
    assert mirror.events()[1].tokens is None


class TestArchive:
    def test_snapshot_in_parts(self, monkeypatch):
        monkeypatch.setattr(archive_module, "PART_BLOCKS", 3)
        archive = Archive(topic=b"t", epoch=5, rank=2)
        said = [run([at], 0, 1) for at in range(10)]
        for seq, event in enumerate(said):
            archive.keep(seq, b"x", [event])
        replies = [read_reply(message) for message in archive.answer(SNAPSHOT_WORD)]
        assert [reply.kind for reply in replies] == [ReplyKind.HEAD] + [ReplyKind.PART] * 4 + [ReplyKind.END]
        head = replies[0].head
        assert (head.epoch, head.seq, head.parts, head.blocks, head.first) == (5, 9, 4, 10, 0)
        mirror = Mirror()
        for reply in replies[1:-1]:
            decoded = Decoder().decode(reply.payload)
            assert decoded.rank == 2 and not decoded.problems
            mirror.apply(decoded.events)
        assert mirror.held == archive.mirror.held
        assert archive.counters.snapshots == 1 and archive.counters.snapshot_blocks == 10

    def test_an_answer_is_as_of_when_it_was_asked_for(self):
        archive = Archive()
        archive.keep(0, b"a", [run([1], 0, 1)])
        snapshot, replay = archive.answer(SNAPSHOT_WORD), archive.answer((0).to_bytes(8, "big"))
        archive.keep(1, b"b", [Cleared()])
        assert read_reply(next(snapshot)).head.seq == 0
        assert len(Decoder().decode(read_reply(next(snapshot)).payload).events) == 2
        assert len(list(replay)) == 2

    def test_digests_whole_or_as_integers(self):
        chain = token_chain(1, digests=True)
        event = Stored(hashes=chain.hashes(0, 1), parent=None, tokens=[1], block_size=1)
        for integers, kind in ((True, int), (False, bytes)):
            archive = Archive(integers=integers)
            archive.keep(0, b"", [event])
            _, part, _ = archive.answer(SNAPSHOT_WORD)
            assert isinstance(Decoder().decode(part[-1]).events[1].hashes[0], kind)

    def test_without_snapshots_it_answers_like_vllm(self):
        for archive in (Archive(snapshots=False), Archive(plain=True)):
            archive.keep(0, b"", [])
            assert len(list(archive.answer(SNAPSHOT_WORD))) == 1

    def test_restart(self):
        archive = Archive(epoch=1)
        archive.keep(0, b"a", [run([1], 0, 1)])
        archive.restart(2)
        head = archive.head()
        assert (head.epoch, head.seq, head.digest, head.first) == (2, -1, 0, None) and archive.mirror.blocks == 0
