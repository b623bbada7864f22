"""The block manager, spelled out block by block: slow, and meant to be checked by reading.

A test oracle. ``Model().apply(op)`` takes the operations of the golden logs (``golden/README.md``) and answers what
vLLM 0.32's KV cache manager answers: hits, tables, failures, reference counts, the order of the free queue, events.

Nothing here is clever. The free queue is a list, a count is a number in a dict, a table is a list of block ids with 0
(``NULL``) where nobody needs a block, and a block that can be found again has its keys written down twice: who holds
this key, and which keys has this block. What an engine may not ask for (a lookup that is out of date, more blocks than
were checked for) is an assertion, not an answer.

Three nouns: ``Pool`` knows blocks and no requests, a ``Group`` is one attention type's tables and rules, ``Model`` is
the whole manager and the protocol. Nothing is imported from kvyard.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import cbor2
import msgspec

NULL = 0
"""The block id that stands for "nobody needs this position"."""

Key = tuple[int, bytes]
"""Identity of a block: (group, hash of the whole text up to where the block's content ends)."""

Hits = list[list[int]]
"""A lookup's answer: per group one block id per position, ``NULL`` where nothing has to be there."""


def blocks_for(tokens: int, size: int) -> int:
    """How many blocks of ``size`` hold ``tokens``."""
    return -(-tokens // size)


def floor(tokens: int, unit: int) -> int:
    """The last multiple of ``unit`` at or below ``tokens``."""
    return tokens // unit * unit


# -- requests ---------------------------------------------------------------------------------------------------------


def digest(value: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


@dataclass
class Request:
    """A request's text, the hashes of it, and how far it has come."""

    name: str
    tokens: list[int]
    hash_size: int
    seed: bytes
    salt: str | None = None
    lora: dict[str, Any] | None = None
    media: list[dict[str, Any]] = field(default_factory=list)
    report: str = "incremental"

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.hashes: list[bytes] = []
        self.computed = 0
        self.in_flight = 0
        self.running = False
        self.shared_boundary = 0
        self.pending: tuple[Hits, int] | None = None
        self.hash_more()

    def hash_more(self) -> None:
        """Hash every unit that is complete by now. Each hash covers its own tokens and, through its parent, all before."""
        while (len(self.hashes) + 1) * self.hash_size <= len(self.tokens):
            start = len(self.hashes) * self.hash_size
            stop = start + self.hash_size
            parent = self.hashes[-1] if self.hashes else self.seed
            self.hashes.append(digest((parent, tuple(self.tokens[start:stop]), self.extra_keys(start, stop))))

    def hash_at(self, tokens: int) -> bytes | None:
        """The hash that names the first ``tokens`` tokens; ``None`` where that text isn't known yet, or is empty."""
        units = tokens // self.hash_size
        return self.hashes[units - 1] if 0 < units <= len(self.hashes) else None

    def extra_keys(self, start: int, stop: int) -> tuple[tuple[Any, ...], ...] | None:
        """Return what makes this run different besides tokens: adapter, media in it, and at the very start the salt."""
        keys: list[tuple[Any, ...]] = []
        if self.lora:
            keys.append(("lora", self.lora["name"], self.lora.get("path", "/adapter")))
        for item in self.media:
            if item["offset"] < stop and item["offset"] + item["length"] > start:
                keys.append(("mm", item["hash"], item["offset"] - start))
        if self.salt and start == 0:
            keys.append(("cache_salt", self.salt))
        return tuple(keys) or None


def announced_keys(keys: tuple[tuple[Any, ...], ...] | None) -> tuple[Any, ...] | None:
    """Extra keys as events carry them: without their tags, an adapter without its path."""
    return keys and tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)


# -- the pool ---------------------------------------------------------------------------------------------------------


class NoneLeft(Exception):
    """More blocks are taken than are free. vLLM raises here too, half-way through an allocation."""


class Pool:
    """All blocks: which are free and in what order, how often each is held, and under which keys each can be found."""

    def __init__(self, count: int, events: bool, whole_hashes: bool) -> None:
        self.count = count
        self.whole_hashes = whole_hashes
        self.queue = list(range(1, count))
        """Free blocks; the first is handed out next. Block 0 is never free."""
        self.refs = dict.fromkeys(range(1, count), 0)
        self.holders: dict[Key, list[int]] = {}
        """Key -> blocks with that content, oldest first. No block is ever dropped for being a duplicate."""
        self.keys: dict[int, list[Key]] = {}
        """Block -> its keys, the main one first. A block without keys isn't in here."""
        self.covers: dict[int, int] = {}
        """Block -> tokens from the start of the text to where its main key ends."""
        self.events: list[dict[str, Any]] | None = [] if events else None

    def take(self, count: int) -> list[int]:
        """Hand out the first ``count`` free blocks. They lose their keys."""
        if count > len(self.queue):
            raise NoneLeft
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.evict(block)
            self.refs[block] = 1
        return taken

    def touch(self, blocks: list[int]) -> None:
        """Hold found blocks once more; one that was free leaves the queue from wherever it stands."""
        for block in blocks:
            if block != NULL:
                if self.refs[block] == 0:
                    self.queue.remove(block)
                self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Let go of blocks, given in the order they should be reused: the keyless to the front, the others to the back."""
        front, back = [], []
        for block in blocks:
            if block != NULL:
                self.refs[block] -= 1
                assert self.refs[block] >= 0
                if self.refs[block] == 0:
                    (back if block in self.keys else front).append(block)
        self.queue = front + self.queue + back

    def used(self, name: str, blocks: list[int], size: int) -> None:
        """Request ``name`` is about to let go of ``blocks`` of one group. To LRU that is nothing new."""

    def find(self, hash_: bytes | None, groups: list[int]) -> list[int] | None:
        """One block per group with this content, the oldest each; ``None`` if any group has none."""
        if hash_ is None or any((group, hash_) not in self.holders for group in groups):
            return None
        return [self.holders[group, hash_][0] for group in groups]

    def name(self, block: int, key: Key, covers: int) -> None:
        """Make ``block`` findable under ``key`` as well. Its first key is its main one."""
        if block not in self.keys:
            self.covers[block] = covers
        self.keys.setdefault(block, []).append(key)
        self.holders.setdefault(key, []).append(block)

    def unname(self, block: int) -> list[Key]:
        """Take all keys from ``block``; tells which, main one first. Count and place in the queue stay."""
        keys = self.keys.pop(block, [])
        self.covers.pop(block, None)
        for key in keys:
            self.holders[key].remove(block)
            if not self.holders[key]:
                del self.holders[key]
        return keys

    def evict(self, block: int) -> None:
        """Take all keys from ``block`` and announce each."""
        for group, hash_ in self.unname(block):
            self.announce("BlockRemoved", block_hashes=[self.on_wire(hash_)], medium="GPU", group_idx=group)

    def main_key(self, block: int) -> Key | None:
        return self.keys[block][0] if block in self.keys else None

    def clear(self) -> bool:
        """Forget every key, if nobody holds a block. The queue stays as it is."""
        if len(self.queue) != self.count - 1:
            return False
        for names in (self.holders, self.keys, self.covers):
            names.clear()
        self.announce("AllBlocksCleared")
        return True

    def on_wire(self, hash_: bytes | None) -> int | bytes | None:
        """A hash as events carry it: its low 64 bits, unless whole hashes were asked for."""
        if hash_ is None or self.whole_hashes:
            return hash_
        return int.from_bytes(hash_[-8:], "big")

    def announce(self, kind: str, **fields: Any) -> None:
        if self.events is not None:
            self.events.append({"type": kind, **fields})


# -- groups -----------------------------------------------------------------------------------------------------------


class Group:
    """One group: its tables and its rules. Here are the rules that most attention types share, and those of a type
    that looks at everything; what a type does otherwise is in its own class below."""

    sees_everything = False
    """Full attention: needs all blocks from the start, so one lookup per request is enough."""
    looks_inside_blocks = False
    """Can resume from a hash boundary inside a block."""
    is_mamba = False

    def __init__(self, model: Model, index: int, spec: dict[str, Any]) -> None:
        self.model = model
        self.pool = model.pool
        self.index = index
        self.spec = spec
        self.size: int = spec["block_size"]
        self.eagle = False
        self.admission_cap: int | None = None
        self.tables: dict[str, list[int]] = {}
        self.registered: dict[str, int] = {}
        """Request -> leading blocks done with (registered, adopted, or passed over). Not in here: not yet started."""
        self.split: dict[str, tuple[int, int]] = {}
        """Request -> (position, block) of a block with a hash ending inside it, to be copied before it is written."""
        self.copies: list[tuple[int, int]] = []
        """(source, target) of copies not yet run; each holds a reference on both."""

    def table(self, name: str) -> list[int]:
        return self.tables.setdefault(name, [])

    def skipped(self, computed: int) -> int:
        """Leading tokens that no later token looks at, once ``computed`` are there."""
        return 0

    def is_split(self, hits: list[int], local: int) -> bool:
        """Return true if a hit of ``local`` tokens ends inside the last of its blocks."""
        return bool(hits) and local % self.size != 0

    # Allocation, in the order the manager asks for it.

    def drop_skipped(self, request: Request, computed: int) -> None:
        """Give up the whole blocks before the window, from the right, up to the first that is already given up."""
        self.drop(request.name, 0, self.skipped(computed) // self.size)

    def drop(self, name: str, first: int, last: int) -> None:
        table = self.table(name)
        dropped = []
        for position in range(min(last, len(table)) - 1, first - 1, -1):
            if table[position] == NULL:
                break
            dropped.append(table[position])
            table[position] = NULL
        self.pool.used(name, dropped, self.size)
        self.pool.release(dropped)

    def blocks_needed(
        self, name: str, slots: int, main_slots: int, hits: list[int], local: int, total: int, capped: bool
    ) -> int:
        """Free blocks it takes to give the request ``slots``: new ones, and hits that are free now and won't be then."""
        required = blocks_for(slots, self.size)
        if capped and self.admission_cap is not None:
            required = min(required, self.admission_cap)
        held = len(self.table(name))
        if name in self.registered:
            assert not hits, "hits for a request that has started"
            return max(required - held, 0)
        skipped = self.skipped(total) // self.size
        new = max(required - max(skipped, len(hits) + held), 0)
        copy = 1 if self.is_split(hits, local) else 0
        return new + copy + self.free_among(hits[max(skipped - held, 0) :])

    def free_among(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if block != NULL and self.pool.refs[block] == 0)

    def adopt(self, name: str, hits: list[int], local: int, external: int) -> None:
        """Start the table with the hits, but for those that fall out of the window at once."""
        assert not self.table(name), "hits for a request that holds blocks"
        skipped = self.skipped(local + external) // self.size
        hits = hits[skipped:]
        self.pool.touch(hits)
        self.tables[name] = [NULL] * skipped + hits
        self.registered[name] = len(self.tables[name])
        if self.is_split(hits, local):
            self.registered[name] = local // self.size
            self.split[name] = (local // self.size, hits[-1])

    def take_external(self, name: str, local: int, external: int) -> None:
        """Take blocks for tokens that will be loaded from elsewhere, unless all of those are out of the window."""
        total = local + external
        if total > self.skipped(total):
            table = self.table(name)
            table += self.pool.take(max(blocks_for(total, self.size) - len(table), 0))

    def take_new(self, name: str, slots: int, main_slots: int) -> list[int]:
        """Take blocks until the table has ``slots``. A split block is first replaced by a copy of the request's own."""
        table = self.table(name)
        fresh = []
        if name in self.split:
            fresh = self.pool.take(1)
            self.copy_on_write(name, fresh[0])
        new = self.pool.take(max(blocks_for(slots, self.size) - len(table), 0))
        table += new
        return fresh + new

    def copy_on_write(self, name: str, target: int) -> None:
        position, source = self.split.pop(name)
        assert self.table(name)[position] == source
        self.table(name)[position] = target
        self.copies.append((source, target))
        self.pool.refs[target] += 1  # the source keeps the reference it got as a hit

    def release(self, name: str) -> None:
        """Give everything back, the last block first."""
        blocks = self.tables.pop(name, [])[::-1]
        self.pool.used(name, blocks, self.size)
        self.pool.release(blocks)
        self.registered.pop(name, None)
        self.split.pop(name, None)

    # Registering.

    def register(self, request: Request, tokens: int) -> None:
        """Make the whole blocks among the first ``tokens`` findable, those worth it. Each is considered once."""
        first, last = self.registered.get(request.name, 0), tokens // self.size
        if first >= last:
            return
        table, hashes, extras = self.table(request.name), [], []
        for position in range(first, last):
            if table[position] == NULL or not self.worth_keeping(request, position):
                continue
            end = (position + 1) * self.size
            hash_ = request.hash_at(end)
            assert hash_ is not None
            if table[position] in self.pool.keys:
                assert self.pool.covers[table[position]] < end, "registered twice"
                self.pool.evict(table[position])
            self.pool.name(table[position], (self.index, hash_), end)
            hashes.append(hash_)
            extras.append(request.extra_keys(end - self.size, end))
        self.announce_stored(request, hashes, first * self.size, last * self.size, self.size, extras)
        self.registered[request.name] = last

    def worth_keeping(self, request: Request, position: int) -> bool:
        return True

    def register_inside(self, request: Request, tokens: int) -> None:
        """Make the block that holds token ``tokens`` - 1 findable under the hash of the text up to there."""
        block = self.table(request.name)[(tokens - 1) // self.size]
        hash_ = request.hash_at(tokens)
        assert hash_ is not None
        key = (self.index, hash_)
        if block == NULL or block in self.pool.holders.get(key, []):
            return
        if block in self.pool.keys and self.pool.covers[block] < tokens:
            self.pool.evict(block)
        self.pool.name(block, key, tokens)
        unit = self.model.hash_size
        extras = [request.extra_keys(tokens - unit, tokens)]
        self.announce_stored(request, [hash_], tokens - unit, tokens, unit, extras)

    def announce_stored(
        self, request: Request, hashes: list[bytes], start: int, stop: int, size: int, extras: list[Any]
    ) -> None:
        """One event per call, even if no block was worth keeping; its tokens are those of the whole stretch."""
        on_wire = self.pool.on_wire
        self.pool.announce(
            "BlockStored",
            block_hashes=[on_wire(hash_) for hash_ in hashes],
            parent_block_hash=on_wire(request.hash_at(start)),
            token_ids=request.tokens[start:stop],
            block_size=size,
            lora_id=request.lora.get("id", 1) if request.lora else None,
            medium="GPU",
            lora_name=request.lora["name"] if request.lora else None,
            extra_keys=[announced_keys(keys) for keys in extras] or None,
            group_idx=self.index,
            kv_cache_spec_kind=KINDS[self.spec["type"]][1],
            kv_cache_spec_sliding_window=self.spec["window"] if isinstance(self, SlidingWindow) else None,
        )

    # Looking up.

    def longest_hit(self, request: Request, limit: int, align: int, drop: bool, groups: list[int]) -> tuple[Hits, int]:
        """The longest prefix of at most ``limit`` tokens, a multiple of ``align``, that all ``groups`` can resume from:
        their blocks, and its length. ``drop``: what is found must be recomputed from one unit earlier (EAGLE)."""
        raise NotImplementedError

    def found(self, request: Request, end: int, groups: list[int]) -> list[int] | None:
        return self.pool.find(request.hash_at(end), groups)


class FullAttention(Group):
    sees_everything = True
    looks_inside_blocks = True

    def longest_hit(self, request: Request, limit: int, align: int, drop: bool, groups: list[int]) -> tuple[Hits, int]:
        """Every block from the start, up to the first that is missing."""
        size = self.size
        rows = []
        while (len(rows) + 1) * size <= limit and (row := self.found(request, (len(rows) + 1) * size, groups)):
            rows.append(row)
        length = len(rows) * size
        if align < size:  # hits may end inside a block: the furthest end inside the next one
            for end in range(floor(min(limit, length + size - 1), align), length, -align):
                if row := self.found(request, end, groups):
                    rows.append(row)
                    length = end
                    break
        if drop and length:
            length -= min(align, size)
        length = floor(length, align)
        return columns(rows[: blocks_for(length, size)], groups), length

    def register(self, request: Request, tokens: int) -> None:
        """Also the end of the prompt, where it ends inside a block: there an identical prompt can resume."""
        super().register(request, tokens)
        if self.size == self.model.hash_size:
            return
        end = floor(request.prompt if self.eagle else request.prompt - 1, self.model.hash_size)
        if 0 < end <= tokens and end % self.size and end // self.size < len(self.table(request.name)):
            self.register_inside(request, end)


class ReferenceWindow(FullAttention):
    """R-SWA: the prompt stays, of what was generated only the last ``window`` tokens."""

    def drop_skipped(self, request: Request, computed: int) -> None:
        first = blocks_for(request.prompt, self.size)
        last = max(request.prompt, computed - self.spec["window"]) // self.size
        self.drop(request.name, first, last)


class SlidingWindow(Group):
    def __init__(self, model: Model, index: int, spec: dict[str, Any]) -> None:
        super().__init__(model, index, spec)
        reach = min(spec["window"] - 1 + model.max_in_flight, model.max_length)
        self.admission_cap = blocks_for(reach, self.size) + 1

    def skipped(self, computed: int) -> int:
        return max(0, computed - self.spec["window"] + 1)

    def tail(self, eagle: bool) -> int:
        """Blocks in a row that a hit needs at its end."""
        return blocks_for(self.spec["window"] - 1, self.size) + (1 if eagle else 0)

    def longest_hit(self, request: Request, limit: int, align: int, drop: bool, groups: list[int]) -> tuple[Hits, int]:
        """The furthest end with enough blocks in a row before it; failing that, a short run from the very start."""
        size, need, dropped = self.size, max(self.tail(drop), 1), 1 if drop else 0
        rows = [self.found(request, (i + 1) * size, groups) for i in range(limit // size)]
        ends = [end for end in range(len(rows), 0, -1) if (end - dropped) * size % align == 0]
        for end in ends:
            if end >= need and all(rows[end - need : end]):
                nothing = [[NULL] * len(groups)] * (end - need)
                kept = nothing + rows[end - need : end - dropped]
                return columns(kept, groups), (end - dropped) * size
        for end in ends:
            if end < need and all(rows[:end]):
                length = floor(end * size, align)
                if drop and length:
                    length = floor(length - size, align)
                return columns(rows[: length // size], groups), length
        return columns([], groups), 0

    def worth_keeping(self, request: Request, position: int) -> bool:
        """Only the blocks a hit could need: the tail before each point where hits may end."""
        align, interval = self.model.align, self.model.retention
        if align % self.size:
            return True
        need, shift = self.tail(self.eagle), 1 if self.eagle else 0
        segment = align if interval is None else interval
        if segment:
            per = segment // self.size
            if need >= per:
                return True
            if position >= shift and (position - shift) % per >= per - need:
                return True
        if interval is not None:
            for boundary in self.model.resume_points(request):
                end = floor(boundary, align) // self.size + shift
                if end - need <= position < end:
                    return True
        return False


class ChunkedLocal(Group):
    def __init__(self, model: Model, index: int, spec: dict[str, Any]) -> None:
        super().__init__(model, index, spec)
        self.admission_cap = blocks_for(min(spec["chunk"] + model.max_in_flight, model.max_length), self.size)

    def skipped(self, computed: int) -> int:
        return floor(computed, self.spec["chunk"])

    def longest_hit(self, request: Request, limit: int, align: int, drop: bool, groups: list[int]) -> tuple[Hits, int]:
        """All before the chunk in which ``limit`` lies counts as there; inside it, block by block to the first miss."""
        assert not drop and align == self.size
        rows = [[NULL] * len(groups)] * (floor(limit, self.spec["chunk"]) // self.size)
        while (len(rows) + 1) * self.size <= limit:
            row = self.found(request, (len(rows) + 1) * self.size, groups)
            if row is None:
                break
            rows.append(row)
        return columns(rows, groups), len(rows) * self.size


class Mamba(Group):
    """State groups. Modes ``none`` and ``all`` hold a block per position and ``spec_blocks`` more; ``align`` holds only
    the running state (at the last position, with ``spec_blocks`` scratch ones behind it) and states not yet let go."""

    looks_inside_blocks = True
    is_mamba = True

    def __init__(self, model: Model, index: int, spec: dict[str, Any]) -> None:
        super().__init__(model, index, spec)
        self.aligned = spec["mode"] == "align"
        self.scratch: int = spec["spec_blocks"]
        self.has_state: set[str] = set()
        """Align: requests that have their running state and scratch blocks."""
        self.written_now: set[Key] = set()
        """States that this step will have written only at its end."""

    def skipped(self, computed: int) -> int:
        return max(0, computed - 1)

    def drop(self, name: str, first: int, last: int) -> None:
        """Align: there are holes between states, so a hole doesn't end the walk."""
        if not self.aligned:
            return super().drop(name, first, last)
        table = self.table(name)
        places = [place for place in range(min(last, len(table)) - 1, first - 1, -1) if table[place] != NULL]
        dropped = [table[place] for place in places]
        for place in places:
            table[place] = NULL
        self.pool.release(dropped)

    def blocks_needed(
        self, name: str, slots: int, main_slots: int, hits: list[int], local: int, total: int, capped: bool
    ) -> int:
        if hits and hits[-1] != NULL and self.pool.main_key(hits[-1]) in self.written_now:
            return self.pool.count + 1  # not this step
        if not self.aligned:
            slots += self.scratch * self.size
            return super().blocks_needed(name, slots, main_slots, hits, local, total, capped)
        new = blocks_for(main_slots, self.size) + self.scratch - len(hits) - len(self.table(name))
        copy = 1 if self.is_split(hits, local) or name in self.split else 0
        if copy:
            new = max(new, 0) + 1
        new = min(new, 1 + copy + (0 if name in self.has_state else self.scratch))
        return new + self.free_among(hits)  # may be negative, where rejected drafts left the table too long

    def take_new(self, name: str, slots: int, main_slots: int) -> list[int]:
        if not self.aligned:
            return super().take_new(name, slots + self.scratch * self.size, main_slots)
        table = self.table(name)
        required = blocks_for(main_slots, self.size) + self.scratch
        started = name in self.has_state
        self.has_state.add(name)
        if required <= len(table) and name not in self.split:
            return []
        before = len(table)
        state = required - self.scratch - 1  # where the running state goes; nothing is needed up to there
        table += [NULL] * (state - before)
        if started:  # scratch blocks that would fall behind the state move along
            for place in range(before - self.scratch, min(before, state)):
                assert self.pool.refs[table[place]] == 1 and table[place] not in self.pool.keys
                table.append(table[place])
                table[place] = NULL
        copy = 1 if name in self.split else 0
        new = self.pool.take(max(required - len(table), 0) + copy)
        assert len(new) <= 1 + copy + (0 if started else self.scratch)
        shown = table[before:]
        if copy:
            target = new.pop(0)
            if started:
                self.move_keys(name, target)
            else:
                self.copy_on_write(name, target)
                shown = [target, *shown]
        table += new
        return shown + new

    def move_keys(self, name: str, target: int) -> None:
        """The request goes on writing into its own block; the state at the boundary lives on in a copy, with its keys."""
        position, source = self.split.pop(name)
        assert self.table(name)[position] == source
        covers = self.pool.covers.get(source, 0)
        for key in self.pool.unname(source):
            self.pool.name(target, key, covers)
        self.copies.append((source, target))
        self.pool.refs[source] += 1  # the target keeps the reference it was taken with
        main = self.pool.main_key(target)
        if main is not None:
            self.written_now.add(main)

    def release(self, name: str) -> None:
        super().release(name)
        self.has_state.discard(name)

    def register(self, request: Request, tokens: int) -> None:
        """Also, in align mode, the state at the end of the prompt when the computation stops just there."""
        name, table = request.name, self.table(request.name)
        first = self.registered.get(name, 0)
        super().register(request, tokens)
        considered = range(first, self.registered.get(name, 0))
        if self.aligned and tokens > 0 and tokens == self.prompt_state(request):
            position = blocks_for(tokens, self.size) - 1
            hash_ = request.hash_at(tokens)
            if position < len(table) and table[position] != NULL and hash_ is not None:
                self.register_inside(request, tokens)
                self.written_now.add((self.index, hash_))
                if tokens % self.size:
                    self.split[name] = (position, table[position])
                    self.registered[name] = position
        for position in considered:
            main = self.pool.main_key(table[position])
            if main is not None:
                self.written_now.add(main)

    def prompt_state(self, request: Request) -> int:
        """Where a state must be kept for the same prompt to resume from it."""
        unit = self.model.hash_size
        if self.model.use_eagle:
            return max(floor(request.prompt, unit) - unit, 0)
        return floor(request.prompt - 1, unit)

    def worth_keeping(self, request: Request, position: int) -> bool:
        interval = self.model.retention
        if interval is None:
            return True
        if interval:
            per = interval // self.size
            if per <= 1 or (position + 1) % per == 0:
                return True
        points = self.model.resume_points(request)
        return any(floor(point, self.model.align) // self.size - 1 == position for point in points)

    def longest_hit(self, request: Request, limit: int, align: int, drop: bool, groups: list[int]) -> tuple[Hits, int]:
        """The furthest single state. No draft model has states, so nothing is dropped."""
        unit = min(align, self.size)
        for end in range(floor(limit, unit), 0, -unit):
            if end % align == 0 and (row := self.found(request, end, groups)):
                nothing = [[NULL] * len(groups)] * ((end - 1) // self.size)
                return columns([*nothing, row], groups), end
        return columns([], groups), 0


class Cross(Group):
    """Cross attention: blocks for the encoder's tokens, never shared, never found again."""

    def adopt(self, name: str, hits: list[int], local: int, external: int) -> None:
        assert not hits

    def take_external(self, name: str, local: int, external: int) -> None:
        pass

    def register(self, request: Request, tokens: int) -> None:
        raise AssertionError("cross attention works only without prefix caching")


def columns(rows: list[Any], groups: list[int]) -> Hits:
    """Rows (one block per group) turned into one list per group."""
    return [[row[i] for row in rows] for i in range(len(groups))]


KINDS: dict[str, tuple[type[Group], str]] = {
    "full": (FullAttention, "full_attention"),
    "mla": (FullAttention, "mla_attention"),
    "rswa": (ReferenceWindow, "full_attention"),
    "sliding_window": (SlidingWindow, "sliding_window"),
    "sliding_window_mla": (SlidingWindow, "sliding_window_mla"),
    "chunked_local": (ChunkedLocal, "chunked_local_attention"),
    "mamba": (Mamba, "mamba"),
    "cross": (Cross, "cross_attention"),
}


# -- the manager ------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 16,
    "groups": [{"type": "full"}],
    "events": False,
    "caching": True,
    "hash_block_size": None,
    "scheduler_block_size": None,
    "hash_algo": "sha256_cbor",
    "hash_seed": None,
    "event_hash": "int",
    "max_model_len": 1 << 20,
    "max_in_flight_tokens": None,
    "watermark": 0.0,
    "retention_interval": None,
    "use_eagle": False,
    "num_prefill_lookahead": 0,
    "trace": False,
}


class Model:
    """The whole manager, behind the operations of the golden logs. The first one must be ``config``."""

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        """Do one operation. Raises for anything that isn't legal; the model is of no use after that."""
        result = getattr(self, "op_" + op["op"])(op)
        result["num_free"] = len(self.pool.queue)
        if self.config["trace"] and op["op"] not in ("config", "state"):
            result.update(self.trace())
        return result

    def trace(self) -> dict[str, Any]:
        return {"refs": {str(b): n for b, n in self.pool.refs.items() if n}, "queue": list(self.pool.queue)}

    def tables(self, name: str) -> list[list[int]]:
        return [list(group.tables.get(name, [])) for group in self.groups]

    # -- set-up

    make_pool = Pool

    def op_config(self, op: dict[str, Any]) -> dict[str, Any]:
        given = {k: v for k, v in op.items() if k not in ("op", "tag")}
        assert given.keys() <= DEFAULTS.keys(), f"unknown config keys {given.keys() - DEFAULTS.keys()}"
        config = self.config = {**DEFAULTS, **given}
        assert config["hash_algo"] == "sha256_cbor", "the only algorithm this model knows"
        specs = [
            {"block_size": config["block_size"], "mode": "align", "spec_blocks": 0, **group}
            for group in config["groups"]
        ]
        sizes = [spec["block_size"] for spec in specs]
        self.hash_size: int = config["hash_block_size"] or math.gcd(*sizes)
        self.scheduler_size: int = config["scheduler_block_size"] or math.lcm(*sizes)
        self.seed = digest("vllm-none-hash" if config["hash_seed"] is None else config["hash_seed"])
        self.caching: bool = config["caching"]
        self.use_eagle: bool = config["use_eagle"]
        self.retention: int | None = config["retention_interval"]
        self.max_length: int = config["max_model_len"]
        self.max_in_flight: int = (
            self.max_length if config["max_in_flight_tokens"] is None else config["max_in_flight_tokens"]
        )
        self.watermark = int(config["watermark"] * config["num_blocks"])
        self.unsettled = max(0, config["num_prefill_lookahead"] - 1)
        """Trailing tokens whose drafts may be computed again: not to be registered yet."""
        self.pool = self.make_pool(config["num_blocks"], config["events"], config["event_hash"] == "bytes")
        self.groups = [KINDS[spec["type"]][0](self, i, spec) for i, spec in enumerate(specs)]
        self.hybrid = self.caching and len(self.groups) > 1
        self.requests: dict[str, Request] = {}
        self.plan_lookup()
        self.check_config(sizes)
        return {
            "hash_block_size": self.hash_size,
            "scheduler_block_size": self.scheduler_size,
            "none_hash": self.seed.hex(),
        }

    def check_config(self, sizes: list[int]) -> None:
        """Raise for configurations that vLLM refuses at start-up."""
        assert all(self.scheduler_size % size == 0 for size in [self.hash_size, *sizes])
        if self.caching:
            assert all(size % self.hash_size == 0 for size in sizes)
            assert self.hybrid or sizes == [self.hash_size]
            assert not self.any_eagle or self.scheduler_size >= self.config["num_prefill_lookahead"]
        if self.retention:
            assert self.retention > 0 and self.retention % self.scheduler_size == 0
            assert any(isinstance(group, SlidingWindow | Mamba) for group in self.groups)

    def plan_lookup(self) -> None:
        """Which groups are looked up together, in what order, to what unit hits are rounded, and who drops for EAGLE."""
        flagged = {g.index for g in self.groups if g.spec.get("eagle")}
        if self.use_eagle and not flagged:
            flagged = {g.index for g in self.groups}
        self.any_eagle = bool(flagged)

        self.fine = (
            self.hybrid
            and any(isinstance(g, Mamba) and g.aligned and g.size > self.hash_size for g in self.groups)
            and all(g.looks_inside_blocks or g.size == self.hash_size for g in self.groups)
        )
        self.align = self.hash_size if self.fine else self.scheduler_size

        def alike(group: Group) -> dict[str, Any]:
            return {k: v for k, v in group.spec.items() if k != "eagle"}

        self.batches: list[list[Group]] = []
        for group in self.groups:
            for batch in self.batches:
                if alike(batch[0]) == alike(group):
                    batch.append(group)
                    break
            else:
                self.batches.append([group])
        self.batches.sort(key=lambda batch: not batch[0].sees_everything)
        for batch in self.batches:  # one flagged group makes its whole batch drop
            for group in batch:
                group.eagle = self.caching and any(g.index in flagged for g in batch)

    # -- requests

    def op_new(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.create(op)
        return {"num_tokens": len(request.tokens), "hashes": [h.hex() for h in request.hashes]}

    def create(self, op: dict[str, Any]) -> Request:
        request = Request(
            op["req"],
            expand(op["tokens"]),
            self.hash_size,
            self.seed,
            salt=op.get("salt"),
            lora=op.get("lora"),
            media=op.get("mm") or [],
            report=op.get("report", "incremental"),
        )
        self.requests[op["req"]] = request
        return request

    def request(self, op: dict[str, Any]) -> Request:
        return self.requests.get(op["req"]) or self.create(op)

    def op_append(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.request(op)
        request.tokens += expand(op["tokens"])
        request.hash_more()
        return {"num_tokens": len(request.tokens)}

    def op_settle(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.request(op)
        request.in_flight -= op["n"]
        return {"num_in_flight": request.in_flight}

    def op_rollback(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.request(op)
        request.computed -= op["n"]
        return {"num_computed": request.computed}

    # -- lookup

    def op_get_computed(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.request(op)
        hits, length, longest = self.lookup(request)
        request.pending = (hits, length)
        # Some group knows the text further than all groups together: worth keeping that point next time.
        request.shared_boundary = longest if longest > length else 0
        if length and request.report == "full":
            for group, blocks in zip(self.groups, hits, strict=True):
                if blocks:
                    self.announce_hit(group, request, len(blocks))
        return {
            "hit_tokens": length,
            "hit_blocks": [list(blocks) for blocks in hits],
            "shared_prefix_boundary": request.shared_boundary,
        }

    def lookup(self, request: Request) -> tuple[Hits, int, int]:
        """Blocks per group, the length all groups agree on, and the longest any group had on the way there."""
        limit = len(request.tokens) - 1  # the last token is always computed
        if not self.caching:
            return [[] for _ in self.groups], 0, 0
        if not self.hybrid:
            hits, length = self.groups[0].longest_hit(request, limit, self.groups[0].size, self.groups[0].eagle, [0])
            return hits, length, length

        hits = [[] for _ in self.groups]
        found: dict[int, int] = {}  # batch -> length it had when last looked up
        dropped: set[int] = set()  # batches that have paid the EAGLE drop for the present length
        simple = len(self.batches) == 2 and self.batches[0][0].sees_everything
        length, longest = limit, 0
        while True:
            now = length
            for number, batch in enumerate(self.batches):
                group = batch[0]
                if group.sees_everything and number in found:
                    now = min(now, found[number])  # what it had stays good for anything shorter
                    continue
                drop = group.eagle and number not in dropped
                reach = now
                if drop and not group.is_mamba:  # look one unit further, as that is what will be dropped
                    inside = self.fine and group.looks_inside_blocks
                    reach = min(now + (self.hash_size if inside else group.size), len(request.hashes) * self.hash_size)
                members = [g.index for g in batch]
                blocks, got = group.longest_hit(request, reach, self.align, drop, members)
                if drop:
                    dropped.add(number)
                elif got < now:
                    dropped.clear()
                now = found[number] = got
                longest = max(longest, now)
                for member, column in zip(members, blocks, strict=True):
                    hits[member] = column
            if now >= length:
                break
            length = now
            if simple:
                break
        for group in self.groups:
            if group.sees_everything:
                hits[group.index] = hits[group.index][: blocks_for(length, group.size)]
        return hits, length, longest

    def announce_hit(self, group: Group, request: Request, count: int) -> None:
        """Report mode "full": a hit is announced like a store, positions without a block included."""
        ends = [(i + 1) * group.size for i in range(count)]
        hashes = [request.hashes[end // self.hash_size - 1] for end in ends]  # vLLM too fails for a hit inside a block
        extras = [request.extra_keys(end - group.size, end) for end in ends]
        group.announce_stored(request, hashes, 0, count * group.size, group.size, extras)

    # -- allocation

    def op_allocate(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.request(op)
        new, external = op["num_new_tokens"], op.get("num_external", 0)
        hits: Hits = [[] for _ in self.groups]
        hit = 0
        if not request.running and request.computed == 0 and request.pending:
            hits, hit = request.pending
        taken = self.allocate(request, new, hits, hit, external, op)
        if taken is None:
            return {"allocated": False}
        request.pending = None
        if op.get("advance", True):
            request.computed += hit + external + new
            request.in_flight += op.get("in_flight", 0)
            request.running = True
        return {
            "allocated": True,
            "new_blocks": taken,
            "blocks": self.tables(request.name),
            "num_computed": request.computed,
        }

    def allocate(
        self, request: Request, new: int, hits: Hits, hit: int, external: int, op: dict[str, Any]
    ) -> Hits | None:
        """The stages, in order. ``None``: it doesn't fit, and nothing but the skipped blocks has changed."""
        assert new or external or hit, "nothing to do"
        name = request.name
        local = request.computed + hit
        total = min(local + external, self.max_length)
        encoder = op.get("num_encoder", 0)
        spare = self.watermark if op.get("has_running", True) and not request.running else 0

        def needed(slots: int, main_slots: int, total: int, capped: bool) -> int:
            count = 0
            for group in self.groups:
                if isinstance(group, Cross):
                    count += group.blocks_needed(name, encoder, encoder, [], 0, 0, capped)
                else:
                    count += group.blocks_needed(name, slots, main_slots, hits[group.index], local, total, capped)
            return count

        if op.get("must_fit"):
            whole = min(len(request.tokens), self.max_length)
            if needed(whole, whole, total, capped=True) + spare > len(self.pool.queue):
                return None

        main_slots = total + new
        slots = min(main_slots + op.get("num_lookahead", 0), self.max_length)
        for group in self.groups:
            group.drop_skipped(request, max(0, total - request.in_flight))
        free = len(self.pool.queue) - op.get("reserved", 0)
        if needed(slots, main_slots, local + external, capped=False) + spare > free:
            return None

        if any(hits) or external:
            self.adopt(name, hits, local, external)
        taken = [
            group.take_new(name, encoder if isinstance(group, Cross) else slots, main_slots) for group in self.groups
        ]
        if not op.get("delay_cache"):
            self.register(request, min(total + new, len(request.tokens)))
        return taken

    def adopt(self, name: str, hits: Hits, local: int, external: int) -> None:
        """All groups hold their hits before any group takes a block. Only for a request that no group has started."""
        if any(name in group.registered for group in self.groups):
            assert not any(hits), "hits for a request that has started"
            return
        for group in self.groups:
            group.adopt(name, hits[group.index], local, external)
        if external:
            for group in self.groups:
                group.take_external(name, local, external)

    # -- registering

    def op_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        self.register(self.request(op), op["num_tokens"])
        return {}

    def register(self, request: Request, tokens: int) -> None:
        if self.caching:
            for group in self.groups:
                group.register(request, self.registrable(group, tokens))

    def registrable(self, group: Group, tokens: int) -> int:
        """How much of ``tokens`` a later hit could make use of."""
        settled = max(0, tokens - self.unsettled)
        if not self.hybrid:
            return settled
        if self.fine:
            return settled if group.eagle and tokens else tokens
        usable = floor(tokens, self.scheduler_size)
        if group.eagle and usable:  # one block more is looked at, then dropped
            return min(settled, floor(settled, self.scheduler_size) + group.size)
        return usable

    def resume_points(self, request: Request) -> list[int]:
        """Token positions from which a later request will want to resume, whatever else is thinned out."""
        if self.any_eagle:
            unit = self.scheduler_size
            ends = [floor(request.prompt - 1, unit) - unit, floor(request.prompt, unit) - unit]
            points = [max(end, 0) for end in ends]
        else:
            points = [request.prompt - 1]
        return points + ([request.shared_boundary] if request.shared_boundary else [])

    # -- giving back, and the rest

    def op_preempt(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.request(op)
        for group in self.groups:
            group.release(request.name)
        request.running = False
        request.computed = request.in_flight = 0
        return {}

    def op_free(self, op: dict[str, Any]) -> dict[str, Any]:
        del self.requests[op["req"]]
        for group in self.groups:
            group.release(op["req"])
        return {}

    def op_remove_skipped(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.request(op)
        for group in self.groups:
            group.drop_skipped(request, op["num_tokens"])
        return {"blocks": self.tables(request.name)}

    def op_evict(self, op: dict[str, Any]) -> dict[str, Any]:
        assert max(op["blocks"], default=0) < self.pool.count
        for block in set(op["blocks"]):  # a set, as in vLLM: its order is the order of the events
            self.pool.evict(block)
        return {}

    def op_new_step(self, op: dict[str, Any]) -> dict[str, Any]:
        for group in self.groups:
            if isinstance(group, Mamba):
                group.written_now.clear()
        return {}

    def op_take_copies(self, op: dict[str, Any]) -> dict[str, Any]:
        copies = [pair for group in self.groups for pair in group.copies]
        for group in self.groups:
            group.copies.clear()
        self.pool.release([block for pair in copies for block in pair])
        return {"copies": [list(pair) for pair in copies]}

    def op_reset(self, op: dict[str, Any]) -> dict[str, Any]:
        done = self.pool.clear()
        if done:
            for request in self.requests.values():
                request.pending = None
        return {"reset": done}

    def op_take_events(self, op: dict[str, Any]) -> dict[str, Any]:
        events = [without_defaults(event) for event in self.pool.events or []]
        if self.pool.events is not None:
            self.pool.events = []
        result: dict[str, Any] = {"events": plain(events)}
        if op.get("wire"):
            batch = [op.get("ts", 0.0), events, op.get("dp_rank")]
            result["wire"] = msgspec.msgpack.encode(batch).hex()
        return result

    def op_state(self, op: dict[str, Any]) -> dict[str, Any]:
        usable = self.pool.count - 1
        return {
            "usage": 1.0 - len(self.pool.queue) / usable if usable else 0,
            "requests": {
                name: {
                    "blocks": self.tables(name),
                    "num_cached": [group.registered.get(name) for group in self.groups],
                    "num_computed": request.computed,
                    "num_tokens": len(request.tokens),
                    "hashes": [h.hex() for h in request.hashes],
                }
                for name, request in self.requests.items()
            },
            "cached": {f"{group}:{h.hex()}": sorted(held) for (group, h), held in self.pool.holders.items()},
            **self.trace(),
        }


def expand(tokens: Any) -> list[int]:
    """Tokens as an operation gives them: a list, or {"seq": [first, count]}."""
    if isinstance(tokens, dict):
        first, count = tokens["seq"]
        return list(range(first, first + count))
    return list(tokens)


def without_defaults(event: dict[str, Any]) -> dict[str, Any]:
    """An event as it goes out: fields that came with later versions are left out where they say nothing."""
    optional = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    return {k: v for k, v in event.items() if not (k in optional and v is None)}


def plain(value: Any) -> Any:
    """A copy that JSON can carry; bytes become hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
