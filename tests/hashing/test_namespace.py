"""Which extra keys belong to which block, and what a namespace refuses."""

from __future__ import annotations

from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.errors import KvyardError
from kvyard.hashing import PLAIN, Embeds, ExtraKeys, Media, Namespace, NamespaceError

LORA = Namespace(lora_name="sql", lora_path="/sql", lora_id=4)


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    items, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=4)):
        items.append(Media(draw(st.sampled_from("ab")), at + gap, length))
        at = items[-1].stop
    return Namespace(
        lora_name=draw(st.none() | st.just("sql")),
        salt=draw(st.sampled_from([None, "", "tenant"])),
        media=tuple(items),
        embeds=draw(st.none() | st.just(Embeds(bytes(range(60)), 4))),
        tagged=draw(st.booleans()),
    )


def block_by_block(space: Namespace, block: int, size: int) -> ExtraKeys | None:
    """The rule for one block, as plainly as it can be said: the model for ``extras``."""
    start, stop = block * size, (block + 1) * size
    keys: list[tuple[object, ...]] = []
    if space.lora_name is not None:
        keys.append(("lora", space.lora_name, space.lora_path))
    keys += [("mm", item.hash, item.offset - start) for item in space.media if item.offset < stop and start < item.stop]
    if block == 0 and space.salt:
        keys.append(("cache_salt", space.salt))
    if space.embeds is not None:
        width = space.embeds.bytes_per_token
        keys.append(("prompt_embeds", sha256(space.embeds.data[start * width : stop * width]).digest()))
    return tuple(keys) or None


def bare(keys: ExtraKeys | None) -> ExtraKeys | None:
    """The form of older versions and of events."""
    if keys is None:
        return None
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys if isinstance(key, tuple))


@given(namespaces(), st.integers(0, 12), st.integers(0, 12), st.integers(1, 9))
def test_extras_follow_the_rule(space: Namespace, first: int, count: int, size: int) -> None:
    expected = [block_by_block(space, block, size) for block in range(first, first + count)]
    found = space.extras(first, first + count, size)
    form = expected if space.tagged else [bare(keys) for keys in expected]
    assert found == (form if any(expected) else None)
    assert space.wire_extras(first, first + count, size) == [bare(keys) for keys in expected]


def test_plain() -> None:
    assert PLAIN.plain
    assert Namespace(salt="").plain
    assert not LORA.plain
    assert PLAIN.extras(0, 9, 4) is None
    assert PLAIN.wire_extras(1, 4, 4) == [None, None, None]


def test_blocks_without_keys_cost_nothing() -> None:
    assert Namespace(salt="s").extras(1, 9, 4) is None
    extras = LORA.extras(0, 3, 4)
    assert extras is not None
    assert extras[0] is extras[2]


def test_order_in_a_block() -> None:
    space = Namespace(
        lora_name="l", lora_path="/l", salt="s", media=(Media("a", 0, 1), Media("b", 2, 9)), embeds=Embeds(bytes(4), 1)
    )
    digest = sha256(bytes(4)).digest()
    assert space.extras(0, 1, 4) == [
        (("lora", "l", "/l"), ("mm", "a", 0), ("mm", "b", 2), ("cache_salt", "s"), ("prompt_embeds", digest))
    ]
    assert space.wire_extras(0, 2, 4) == [
        ("l", ("a", 0), ("b", 2), "s", digest),
        ("l", ("b", -2), sha256().digest()),
    ]


def test_fingerprints_distinguish_adapters_and_salts() -> None:
    spaces = [
        PLAIN,
        LORA,
        Namespace(lora_name="sql"),
        Namespace(salt="sql"),
        Namespace(lora_name="sql", salt="sql"),
    ]
    assert len({space.fingerprint() for space in spaces}) == len(spaces)
    assert LORA.fingerprint() == Namespace(lora_name="sql", lora_path="/sql").fingerprint()


def test_travels() -> None:
    space = Namespace(lora_name="l", media=(Media("a", 0, 3),), embeds=Embeds(b"1234", 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(space), type=Namespace) == space
    assert len({space, Namespace(lora_name="l", media=(Media("a", 0, 3),), embeds=Embeds(b"1234", 2))}) == 1


class TestRefusals:
    def test_impossible_media_are_refused(self) -> None:
        with pytest.raises(NamespaceError, match="start at token 0 or later, not at -1"):
            Media("a", -1, 3)
        with pytest.raises(NamespaceError, match="at least one token, not -2"):
            Media("a", 0, -2)
        with pytest.raises(NamespaceError, match="at least one token, not 0"):
            Media("a", 0, 0)

    def test_order_of_media(self) -> None:
        with pytest.raises(NamespaceError, match="sorted by offset, but 2 follows 8"):
            Namespace(media=(Media("a", 8, 1), Media("b", 2, 1)))
        with pytest.raises(NamespaceError, match="must not overlap, but the item at 2 ends after the one at 4 starts"):
            Namespace(media=(Media("a", 2, 3), Media("b", 4, 1)))

    def test_an_adapter_without_a_name(self) -> None:
        with pytest.raises(NamespaceError, match="give lora_name as well"):
            Namespace(lora_path="/a")
        with pytest.raises(NamespaceError, match="give lora_name as well"):
            Namespace(lora_id=1)

    def test_embeddings_that_are_no_rows(self) -> None:
        for width in (0, 3):
            with pytest.raises(NamespaceError, match="no whole number"):
                Embeds(bytes(8), width)

    def test_they_are_readable(self) -> None:
        assert issubclass(NamespaceError, KvyardError)
        assert issubclass(NamespaceError, ValueError)
