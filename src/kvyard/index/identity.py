"""Request keys: the names that the index gives to blocks, and what belongs to a block's identity besides its tokens.

Engines' hashes are opaque, so the index names blocks itself: a chain over the prompt in blocks of its own size. The
prompt's side and the events' side must arrive at the same names from different knowledge. A prompt knows its adapter, salt
and media with lengths; an event lists, per engine block, what touches that block, at an offset, without lengths and without
tags. So a request key takes in each thing where it *starts*, which both sides know, and the chain carries it on to every
later block.

In direct mode names are the engine's own, because its algorithm, seed and block size are known. Adapters are refused there:
vLLM hashes an adapter's path, and the path isn't on the wire.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvyard.errors import KvyardError
from kvyard.events.types import Stored
from kvyard.hashing import PLAIN, Algorithm, ExtraKeys, Key, Namespace, TokenChain, algorithm, wire_hash

Mark: TypeAlias = tuple[int, tuple[object, ...]]
"""A token position, and what starts there."""


class IdentityError(KvyardError, ValueError):
    """A prompt or an event whose blocks can't be named."""


class Identity:
    """Naming of blocks in one index. A value: it holds no state."""

    def __init__(self, block_size: int = 16, algo: Algorithm | None = None, *, direct: bool = False) -> None:
        """``direct`` takes ``algo`` and ``block_size`` for the engines' own.

        Raises ``KvyardError`` for a block size below 1, or names that aren't 64-bit integers outside direct mode.
        """
        if block_size < 1:
            raise KvyardError(f"an index's block size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.algorithm = algo or algorithm("xxh3", "kvyard-index", {})
        self.direct = direct
        if not direct and not isinstance(self.algorithm.root, int):
            raise KvyardError(f"request keys are integers: {self.algorithm.name} makes none (use xxh3, or direct mode)")

    @property
    def names(self) -> list[str]:
        """Return everything that request keys depend on: indexes that differ in it name blocks differently."""
        return [self.algorithm.name, self.algorithm.seed, str(self.block_size), "direct" if self.direct else "bridged"]

    def keys(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> list[int]:
        """Return the request keys of every full block of a prompt. Raises ``IdentityError`` for an adapter in direct mode."""
        if self.direct:
            if namespace.lora_name is not None:
                raise IdentityError("direct mode can't name blocks of an adapter: its path isn't on the wire")
            chain = TokenChain(tokens, self.block_size, self.algorithm, namespace)
            return [wire_hash(key) for key in chain.hashes(0, len(chain.keys))]
        marks = [] if namespace.plain else _marks_of_prompt(namespace, self.block_size, len(tokens))
        return self.chain(None, 0, tokens, marks)

    def keys_by_turns(
        self, tokens: Sequence[int], namespace: Namespace = PLAIN, blocks: int = 2048
    ) -> Iterator[list[int]]:
        """Yield ``keys`` in portions of ``blocks``, for a caller that lets others have their turn in between; whole in direct
        mode.
        """
        size = self.block_size
        if self.direct or len(tokens) <= blocks * size:
            yield self.keys(tokens, namespace)
            return
        marks = [] if namespace.plain else _marks_of_prompt(namespace, size, len(tokens))
        last: int | None = None
        for start in range(0, len(tokens), blocks * size):
            keys = self.chain(last, start, tokens[start : start + blocks * size], marks)
            if keys:
                last = keys[-1]
                yield keys

    def keys_after(
        self, parent: int | None, start: int, tokens: Sequence[int], namespace: Namespace = PLAIN
    ) -> list[int]:
        """Return the request keys of the full blocks of ``tokens``, the first of which is token ``start`` of a prompt, after
        the block with the key ``parent`` (``None``: there is none). Not for direct mode, where keys don't say enough to go on
        from.
        """
        marks = [] if namespace.plain else _marks_of_prompt(namespace, self.block_size, start + len(tokens))
        return self.chain(parent, start, tokens, marks)

    def extras(self, blocks: int, namespace: Namespace) -> list[ExtraKeys | None] | None:
        """Return the extra keys of a prompt's blocks; ``None`` if there are none."""
        size = self.block_size
        marks = [] if namespace.plain else _marks_of_prompt(namespace, size, blocks * size)
        return self._extras(blocks, 0, marks)

    def chain(self, parent: int | None, start: int, tokens: Sequence[int], marks: Sequence[Mark]) -> list[int]:
        """Return the keys of the full blocks of ``tokens``, whose first is token ``start`` of its prompt, at a block's edge."""
        extras = self._extras(len(tokens) // self.block_size, start, marks)
        return self.algorithm.hash_blocks(parent, tokens, self.block_size, extras)  # type: ignore[return-value]

    def _extras(self, blocks: int, start: int, marks: Sequence[Mark]) -> list[ExtraKeys | None] | None:
        if not marks:
            return None
        extras: list[ExtraKeys | None] = [None] * blocks
        # In a fixed order where several start at one token.
        for token, mark in sorted(marks, key=lambda mark: (mark[0], str(mark[1][0]))):
            block, offset = divmod(token - start, self.block_size)
            if 0 <= block < blocks:
                extras[block] = (*(extras[block] or ()), (*mark, offset))
        return extras

    def direct_keys(self, hashes: Sequence[Key]) -> list[int]:
        """Return an engine's hashes as request keys, in direct mode; the same list if they are that already."""
        try:
            # Says at C's pace whether all fit: some may be bytes, and in a trace those of generated blocks are below zero.
            fit: array[int] = array("Q", hashes)  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            return [wire_hash(key) for key in hashes]
        return hashes if isinstance(hashes, list) else fit.tolist()


def marks_of_event(event: Stored, begin: int) -> list[Mark]:
    """Return the items that start in the blocks of ``event``, whose first token is at ``begin``.

    Raises ``IdentityError`` for extra keys whose meaning or position is ambiguous: they must not be taken for plain text.
    """
    marks: list[Mark] = []
    name = event.lora_name
    if event.extra_keys is None and name is None and not event.salt and not event.lora_id:
        return marks
    if begin == 0 and name is not None:
        marks.append((0, ("lora", name)))
    elif begin == 0 and event.lora_id:
        marks.append((0, ("lora id", str(event.lora_id))))  # no prompt has it: only names are asked for
    if begin == 0 and event.salt:
        marks.append((0, ("salt", event.salt)))
    for index, extra in enumerate(event.extra_keys or ()):
        start = begin + index * event.block_size
        for position, item in enumerate(extra or ()):
            if (position == 0 and name is not None and item == name) or (
                start == 0 and event.salt and item == event.salt
            ):
                continue
            if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) is int:
                if 0 <= item[1] < event.block_size:
                    marks.append((start + item[1], ("mm", item[0])))
            else:
                raise IdentityError(f"an extra key of block {index} that can't be placed: {item!r:.60}")
    return marks


def _marks_of_prompt(namespace: Namespace, size: int, length: int) -> list[Mark]:
    marks: list[Mark] = []
    if namespace.lora_name is not None:
        marks.append((0, ("lora", namespace.lora_name)))
    marks += [(item.offset, ("mm", item.hash)) for item in namespace.media]
    if namespace.salt:
        marks.append((0, ("salt", namespace.salt)))
    if namespace.embeds is not None:
        # No event says enough to meet these; what matters is that they meet nothing else.
        marks += [
            (offset, ("embeds", namespace.embeds.digest(offset, offset + size))) for offset in range(0, length, size)
        ]
    return marks
