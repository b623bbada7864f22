"""A vLLM request as kvyard's block manager sees it: the same tokens under the same hashes.

Nothing is hashed again. vLLM hashes each block as it fills; the chain here takes those hashes over. It is brought up to date
only when the block manager is going to look at it, which is not in most steps.
"""

from collections.abc import Sequence
from typing import Any

from kvyard.blocks import Request
from kvyard.hashing import Key, TokenChain

_WITHOUT_HASHES = 1 << 60
"""A block size that no sequence reaches: a chain that is never hashed, for an engine without prefix caching."""


class EngineHashes:
    """In the place of a hash algorithm: hands on what vLLM has computed."""

    name = "vllm"
    seed = ""

    def __init__(self, hashes: Sequence[bytes], root: bytes) -> None:
        """``hashes`` is vLLM's list, which grows; ``root`` what its first hash is chained to."""
        self.root: Key = root
        self._hashes = hashes
        self._given = 0

    def hash_blocks(
        self, parent: Key | None, tokens: Sequence[int], block_size: int, extras: object = None
    ) -> list[Key]:
        """Return the hashes of the next full blocks; ``tokens`` only says how many there are."""
        first = self._given
        self._given += len(tokens) // block_size
        hashes: list[Key] = list(self._hashes[first : self._given])
        return hashes

    def forget(self) -> None:
        """Free vLLM's list: its request has ended, while its cached blocks stay."""
        self._hashes = ()


class Counterpart:
    """One vLLM request, and kvyard's for it."""

    __slots__ = ("_hash_block_size", "_hashes", "_root", "ours", "theirs")

    def __init__(self, theirs: Any, hash_block_size: int, root: bytes | None) -> None:
        """``root`` is what vLLM's first hashes are chained to, or ``None`` in an engine that computes none."""
        self.theirs = theirs
        self._root = root or b""
        self._hash_block_size = _WITHOUT_HASHES if root is None else hash_block_size
        self.ours = Request(theirs.request_id, self._chain())
        self.ours.num_prompt_tokens = theirs.num_prompt_tokens

    def _chain(self) -> TokenChain:
        self._hashes = EngineHashes(self.theirs.block_hashes, self._root)
        return TokenChain(self.theirs.all_token_ids[:], self._hash_block_size, self._hashes)

    def update(self, running: bool) -> Request:
        """Bring kvyard's request up to date with vLLM's, and return it."""
        ours, theirs = self.ours, self.theirs
        ours.num_computed_tokens = theirs.num_computed_tokens
        ours.num_in_flight_tokens = theirs.num_in_flight_tokens
        # vLLM's scheduler decides whether the lookup's answer counts.
        ours.shared_prefix_boundary = theirs.shared_prefix_boundary
        ours.running = running
        known, there = ours.chain.num_tokens, theirs.num_tokens
        if ours.num_prompt_tokens != theirs.num_prompt_tokens or there < known:
            # A session went on: what it sampled last was dropped, and new input follows in its place.
            ours.chain = self._chain()
            ours.views = {}
            ours.num_prompt_tokens = theirs.num_prompt_tokens
            ours.forget_limits()
        elif there > known:
            ours.append(theirs.all_token_ids[known:])
        return ours

    def forget(self) -> None:
        """The request has ended."""
        self._hashes.forget()
