"""The property that guards everything: a mirror fed with the decoded wire equals the map after every iteration (I4)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.events.fake_map import SHA, XXH3, FakeMap, token_chain, trace_chain

from kvyard.events import Batcher, Cleared, EventBatch, GroupMeta, Mirror, Removed, Stored, Tier
from kvyard.events.wire import Decoder, Encoder, written_dialects
from kvyard.hashing import Key, Namespace, Run, TokenChain

GROUPS = (
    GroupMeta(block_size=2, kind="full_attention", capacity=(64, 128)),
    GroupMeta(block_size=2, kind="sliding_window", window=8, capacity=(64, 128)),
    GroupMeta(block_size=2, kind="mamba", capacity=(64, 128)),
)


def salted() -> TokenChain:
    return TokenChain([5, 5] * 6, 2, XXH3, Namespace(lora_name="ad", salt="s"))


CHAINS = [
    token_chain(1, 2, 3, 4, 5, 6, size=2),
    token_chain(1, 2, 3, 7, 8, 9, size=2),
    token_chain(4, 5, 6, 7, 8, 9, size=2, digests=True),
    trace_chain(1, 6, size=2),
    salted(),
]

spans = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda pair: (pair[0], min(6, sum(pair))))
moves = st.tuples(
    st.sampled_from(["enter", "enter", "leave"]),
    st.sampled_from(CHAINS),
    spans,
    st.integers(0, 2),
    st.sampled_from(Tier),
)
steps = st.one_of(
    moves,
    moves,
    moves,
    st.just(("end",)),
    st.sampled_from([("clear", None), ("clear", Tier.G1), ("end",)]),
)


def act(held: FakeMap, step: tuple) -> None:
    if step[0] == "clear":
        held.clear(step[1])
    else:
        deed, chain, (start, stop), group, tier = step
        (held.enter if deed == "enter" else held.leave)(Run(chain, start, stop), group, tier)


def closest(held: dict) -> dict[int, dict[Key, Tier]]:
    """The projection that exclusive tiers leave of a map."""
    found: dict[int, dict[Key, Tier]] = {}
    for (group, tier), keys in sorted(held.items(), key=lambda item: -item[0][1]):
        found.setdefault(group, {}).update(dict.fromkeys(keys, tier))
    return found


@pytest.mark.parametrize("dialect", written_dialects())
@settings(max_examples=150)
@given(script=st.lists(steps, max_size=60))
def test_the_mirror_equals_the_map_after_every_iteration(dialect, script):
    held = FakeMap()
    held.sink = batcher = Batcher(GROUPS, snapshot=held.snapshot)
    encoder, decoder = Encoder(dialect, groups=GROUPS), Decoder(narrow=True)
    mirror = Mirror()
    told_anew = False
    for now, step in enumerate([*script, ("end",)]):
        if step[0] != "end":
            act(held, step)
            told_anew |= step[0] == "clear"
            continue
        batch = batcher.end_iteration(now)
        batcher.check_integrity()
        if batch is not None:
            decoded = decoder.decode(encoder.encode(batch))
            assert not decoded.problems
            mirror.apply(decoded.events)
        if dialect == "trtllm":
            assert closest(mirror.held) == closest(held.held())
        else:
            assert mirror.held == held.held()
    if not told_anew and dialect != "trtllm":
        assert mirror.repeated == 0 and mirror.unknown == 0, "stored twice, or removed what was never announced"


keys = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32)
names = st.none() | st.text(max_size=8)
counts = st.none() | st.integers(0, 2**31 - 1)
extras = st.none() | st.lists(
    st.none()
    | st.lists(st.text(max_size=4) | st.tuples(st.text(max_size=4), st.integers(-9, 9)) | st.binary(max_size=4)).map(
        tuple
    ),
    max_size=4,
)
events = st.one_of(
    st.builds(
        Stored,
        hashes=st.lists(keys, max_size=4),
        parent=st.none() | st.integers(1, 2**64 - 1) | st.binary(min_size=1, max_size=32),
        tokens=st.none() | st.lists(st.integers(0, 2**32), min_size=1, max_size=8),
        block_size=st.integers(0, 64),
        group=counts,
        tier=st.sampled_from(Tier),
        lora_name=names,
        lora_id=counts,
        extra_keys=extras.map(lambda keys: None if keys is None or not any(keys) else [key or None for key in keys]),
        kind=names,
        window=counts,
        locality=st.none() | st.sampled_from(["LOCAL", "REMOTE"]),
        ownership=names,
        session_id=names,
    ),
    st.builds(
        Removed,
        hashes=st.lists(keys, max_size=4),
        group=counts,
        tier=st.sampled_from(Tier),
        reason=names,
        locality=names,
        ownership=names,
    ),
    st.builds(Cleared, tier=st.none() | st.sampled_from(Tier)),
)
batches = st.builds(
    EventBatch,
    stream=st.just(""),
    seq=st.just(0),
    events=st.lists(events, max_size=4),
    ts=st.floats(-1e9, 1e9),
    rank=st.none() | st.integers(0, 99),
)


def without(event, *fields: str):
    """``event`` with ``fields`` at their defaults."""
    return type(event)(**{name: getattr(event, name) for name in event.__struct_fields__ if name not in fields})


@given(batch=batches)
def test_maps_carry_every_field(batch):
    decoded = Decoder().decode(Encoder(integers=False).encode(batch))
    assert not decoded.problems and (decoded.ts, decoded.rank) == (batch.ts, batch.rank)
    assert [without(event, "salt") for event in decoded.events] == batch.events


@given(batch=batches)
def test_arrays_carry_what_they_have_places_for(batch):
    decoded = Decoder().decode(Encoder("vllm-array", integers=False).encode(batch))
    lost = ("salt", "locality", "ownership", "session_id", "reason")
    assert not decoded.problems
    assert [without(event, *lost) for event in decoded.events] == [without(event, *lost) for event in batch.events]


def test_negative_keys_travel_unsigned():
    chain = trace_chain(3, 2)
    chain.grow(2)
    keys = chain.hashes(0, 4)
    assert keys[-1] < 0
    batch = EventBatch(stream="", seq=0, events=[Removed(hashes=keys)])
    for dialect in written_dialects():
        (event,) = Decoder().decode(Encoder(dialect).encode(batch)).events
        assert event.hashes == [key % 2**64 for key in keys]


def test_digests_travel_as_vllm_sends_them():
    chain = TokenChain([1, 2], 1, SHA)
    batch = EventBatch(stream="", seq=0, events=[Removed(hashes=chain.hashes(0, 2))])
    (event,) = Decoder().decode(Encoder().encode(batch)).events
    assert event.hashes == [int.from_bytes(key, "big") % 2**64 for key in chain.hashes(0, 2)]
