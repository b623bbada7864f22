"""How the service names blocks: tokens and the local hashes of Dynamo's clients lead to the same keys."""

from __future__ import annotations

import pytest

from kvyard.hashing import HashingError, Namespace, algorithm
from kvyard.index import Identity
from kvyard.server.indexer.names import LocalNames, keys_of_hashes


class TestNames:
    TEXT = list(range(1, 13))
    LOCAL = [14643705804678351452, 16777012769546811212, 483935686894639516]
    """Of blocks of four, from the /dump of Dynamo 1.6.1."""

    @pytest.mark.parametrize(
        "space", [Namespace(), Namespace(lora_name="x"), Namespace(salt="s"), Namespace(lora_name="x", salt="s")]
    )
    def test_tokens_and_their_local_hashes_lead_to_the_same_keys(self, space: Namespace) -> None:
        identity = Identity(4, LocalNames())
        keys = identity.keys([*self.TEXT, 99], space)
        assert [keys] == list(keys_of_hashes(identity, self.LOCAL, space)) and len(keys) == 3
        assert [[one] for one in keys] == list(
            keys_of_hashes(identity, [one - (1 << 64) for one in self.LOCAL], space, 1)
        )

    def test_keys_are_chained_and_know_their_namespace(self) -> None:
        identity = Identity(4, LocalNames())
        spaces = [Namespace(), Namespace(lora_name="x"), Namespace(salt="x"), Namespace(lora_name="x", salt="x")]
        found = [key for space in spaces for key in identity.keys(self.TEXT, space)]
        assert len(set(found)) == len(found)
        other = identity.keys([2, *self.TEXT[1:]])
        assert not set(other) & set(identity.keys(self.TEXT))
        assert identity.keys(self.TEXT)[:2] == identity.keys(self.TEXT[:8])

    def test_bytes_are_tokens_like_others(self) -> None:
        names, text = LocalNames(), bytes(range(256)) * 3
        assert names.hash_blocks(None, memoryview(text)[5:], 4) == names.hash_blocks(None, [*text[5:]], 4)

    def test_malformed_blocks_are_refused(self) -> None:
        names = LocalNames()
        with pytest.raises(HashingError, match="whole numbers"):
            names.hash_blocks(None, [1 << 32], 1)
        with pytest.raises(HashingError, match="at least 1"):
            names.hash_blocks(None, [1], 0)
        with pytest.raises(HashingError, match="integer"):
            names.hash_blocks(b"x", [1], 1)
        with pytest.raises(HashingError, match="2 extra keys for 1 blocks"):
            names.hash_blocks(None, [1], 1, [None, None])
        assert names.hash_blocks(None, [], 4) == []

    def test_direct_mode_takes_the_engines_own(self) -> None:
        identity = Identity(4, algorithm("sha256_cbor", "s"), direct=True)
        keys = identity.keys(self.TEXT)
        assert [*keys_of_hashes(identity, [key - (1 << 64) for key in keys], Namespace())] == [keys]
