"""Request keys: what sets prompts apart does on both sides, and what is the same meets."""

from __future__ import annotations

import pytest
from tests.index.support import Bench

from kvyard.events.types import Stored
from kvyard.hashing import PLAIN, Embeds, Media, Namespace, algorithm
from kvyard.index import Identity

TEXT = list(range(1000, 1128))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_d12_identity_is_adapter_salt_and_media(size: int) -> None:
    """Engine blocks of 4 against ours of any size: what sets prompts apart does, and what is the same meets."""
    text = TEXT[:32]
    media = Namespace(media=(Media("cat", 6, 10),))
    spaces = [
        Namespace(),
        Namespace(lora_name="poet", lora_path="/p"),
        Namespace(salt="tenant"),
        Namespace(lora_name="poet", lora_path="/p", salt="tenant"),
        media,
        Namespace(media=(Media("dog", 6, 10),)),
        Namespace(media=(Media("cat", 7, 9),)),
    ]
    for number, space in enumerate(spaces):
        bench = Bench(block_size=size)
        bench.say(
            Stored(
                hashes=[number * 100 + at for at in range(8)],
                parent=None,
                tokens=text,
                block_size=4,
                lora_name=space.lora_name,
                salt=space.salt,
                extra_keys=None if space.plain else space.wire_extras(0, 8, 4),
            )
        )
        for other in spaces:
            found = bench.blocks(text, namespace=other)
            if other == space:
                assert found == 32 // size
            else:
                common = 4 // size if {space, other} <= {spaces[0], *spaces[4:]} else 0
                assert found == common, (space, other)


def test_d12_what_cannot_be_placed_is_refused() -> None:
    bench = Bench()
    bench.say(
        Stored(hashes=[1], parent=None, tokens=[1, 2, 3, 4], block_size=4, extra_keys=[("who", "knows")]),
        Stored(hashes=[2], parent=1, tokens=[5, 6, 7, 8], block_size=4),
    )
    assert bench.blocks([1, 2, 3, 4]) == 0
    ((_, feed),) = bench.indexer.feeds()
    assert feed.counters.refused == 1 and "can't be placed" in feed.counters.last_refusal


@pytest.mark.parametrize("size", [1, 4, 16])
def test_keys_by_turns_are_the_same_keys(size: int) -> None:
    tokens = [(7 * at) % 1000 for at in range(500)]
    media = (Media("a picture", 37, 20), Media("another", 300, 5))
    for namespace in (PLAIN, Namespace(lora_name="l", salt="s"), Namespace(media=media)):
        for blocks in (1, 3, 1000):
            identity = Identity(size)
            portions = list(identity.keys_by_turns(tokens, namespace, blocks))
            assert [key for portion in portions for key in portion] == identity.keys(tokens, namespace)
            assert all(len(portion) <= blocks for portion in portions) or len(portions) == 1
    direct = Identity(size, algorithm("sha256_cbor", "0"), direct=True)
    assert list(direct.keys_by_turns(tokens, blocks=3)) == [direct.keys(tokens)]
    assert list(Identity(size).keys_by_turns([])) == [[]]


def test_prompts_of_embeddings_meet_nothing_else() -> None:
    identity, tokens = Identity(4), [0] * 12
    plain = identity.keys(tokens)
    rows = Namespace(embeds=Embeds(bytes(range(24)), 2))
    ours = identity.keys(tokens, rows)
    assert ours == identity.keys(tokens, rows) and not set(ours) & set(plain)
    other = identity.keys(tokens, Namespace(embeds=Embeds(bytes([*range(8), 99, *range(9, 24)]), 2)))
    assert [one == two for one, two in zip(ours, other, strict=True)] == [True, False, False]
