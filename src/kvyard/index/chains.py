"""An index of whole chains, for a simulation, where caches and prompts live in one process.

``MemoryIndex`` receives keys and must keep each of them. Here a store names blocks of a chain, so that only the chain's own
keys are kept: a run of it is one node, found by its first key and distinguished by its last. Cost goes by the number of
runs and rows, not by blocks, and the block size hardly matters.

It answers ``lookup`` as every backend does, and so is a ``RowSource``. It is no ``IndexBackend``: a backend receives keys,
which mean nothing here without their chain.
"""

from bisect import bisect_right

from kvyard.hashing import Chain, Key, TokenChain
from kvyard.hashing.keys import Keys
from kvyard.hashing.prefix_tree import agree_until, paint
from kvyard.index.backend import Rows, Usage
from kvyard.index.rows import joined


class WholeChain(TokenChain):
    """Real tokens, kept for as long as anything of them is cached: ``ChainIndex`` needs a chain's beginning."""

    __slots__ = ()

    def cut(self, start: int, stop: int, with_tokens: bool = True) -> Chain:
        return self


class _ChainNode:
    """Blocks ``start`` to ``stop`` of ``chain``, where nothing branches off, and who holds which of them."""

    __slots__ = ("chain", "children", "masks", "parent", "start", "stop", "stops")

    def __init__(self, chain: Chain, start: int, stop: int, parent: "_ChainNode | None") -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.parent = parent
        self.children: dict[int, _ChainNode] | None = None
        """Nodes that follow it, by ``id``, as there may be thousands: a split needs them."""
        # Rows by runs: where each ends, counted from the chain's start, and its places.
        self.stops = [stop]
        self.masks = [0]

    def follow(self, child: "_ChainNode") -> None:
        """``child`` follows it, too."""
        if self.children is None:
            self.children = {id(child): child}
        else:
            self.children[id(child)] = child

    def lengthen(self, stop: int) -> None:
        """Go on to ``stop``; no place holds what is added."""
        self.stop = stop
        if self.masks[-1]:
            self.stops.append(stop)
            self.masks.append(0)
        else:
            self.stops[-1] = stop


def _hold(node: _ChainNode, start: int, stop: int, bit: int, repeated: list[tuple[int, int]]) -> None:
    """Set ``bit`` for the blocks ``start`` to ``stop``, as far as they lie in ``node``; notes in ``repeated`` which had it."""
    low = start if start > node.start else node.start
    for begin, stopped, before in paint(node.stops, node.masks, node.start, low, stop, bit, 0):
        if before & bit:
            repeated.append((begin, stopped))


class ChainIndex:
    """Rows of chains. ``place`` is a small number, as everywhere in the index."""

    def __init__(self) -> None:
        self._nodes: dict[Key, _ChainNode] = {}
        """By the key of the first block."""
        self._removed: dict[int, _ChainNode] = {}
        """Node from which each place last removed something: a cache evicts a chain from its end, block by block."""

    # -- changes ----------------------------------------------------------------------------------------------------

    def store_run(self, place: int, chain: Chain, start: int, stop: int) -> list[tuple[int, int]]:
        """``place`` now holds blocks ``start`` to ``stop`` of ``chain``. Returns those that it held before, as intervals."""
        repeated: list[tuple[int, int]] = []
        if start >= stop:
            return repeated
        bit = 1 << place
        keys = chain.keys
        nodes = self._nodes
        last: _ChainNode | None = None
        block = 0
        while block < stop:
            node = nodes.get(keys[block])
            if node is None:
                break
            if last is not None and block > start:
                _hold(last, start, block, bit, repeated)
            last = node
            block = node.stop
        if last is not None:
            end = last.stop if last.stop < stop else stop
            block = agree_until(last.chain.keys, keys, last.start, end)
            if block < end:
                self._split(last, block)
            if block > start:
                _hold(last, start, block, bit, repeated)
        if block >= stop:
            return repeated
        if last is not None and last.stop == block and not last.children and last.chain is chain:
            last.lengthen(stop)
            paint(last.stops, last.masks, last.start, block if block > start else start, stop, bit, 0)
            return repeated
        new = _ChainNode(chain, block, stop, last)
        paint(new.stops, new.masks, block, block if block > start else start, stop, bit, 0)
        if last is not None:
            last.follow(new)
        self._nodes[keys[block]] = new
        return repeated

    def remove_run(self, place: int, chain: Chain, start: int, stop: int) -> None:
        """``place`` no longer holds blocks ``start`` to ``stop`` of ``chain``; what it didn't hold is no error."""
        bit = 1 << place
        keys = chain.keys
        last = self._removed.get(place)
        if last is not None:
            if last.start <= start < stop <= last.stop and (
                last.chain is chain or last.chain.keys[stop - 1] == keys[stop - 1]
            ):
                paint(last.stops, last.masks, last.start, start, stop, 0, bit)
                if not last.masks[-1] and not last.children:
                    self._shorten(last)
                return
            del self._removed[place]
        for node, low, high in self._along(keys, stop, start):
            paint(node.stops, node.masks, node.start, low if low > start else start, high, 0, bit)
            if low <= start:
                self._removed[place] = node
            if not node.masks[-1] and not node.children:
                self._shorten(node)

    def clear(self, place: int) -> None:
        """Clear ``place``. Looks at everything."""
        bit = 1 << place
        self._removed.pop(place, None)
        for node in self._nodes.values():
            paint(node.stops, node.masks, node.start, node.start, node.stop, 0, bit)
        for key, node in list(self._nodes.items()):
            # Freeing one may have freed those before it.
            if key in self._nodes and not node.masks[-1] and not node.children:
                self._shorten(node)

    # -- questions --------------------------------------------------------------------------------------------------

    def lookup(self, keys: Keys, through_holes: bool = False) -> Rows:
        """Return the rows of a prompt; see ``IndexBackend.lookup``."""
        rows: list[tuple[int, int]] = []
        for node, _, high in self._along(keys, len(keys)):
            for stop, mask in zip(node.stops, node.masks):
                if not mask and not through_holes:
                    return joined(rows)
                if stop >= high:
                    rows.append((high, mask))
                    break
                rows.append((stop, mask))
        return joined(rows)

    def usage(self) -> Usage:
        """Return size and counters."""
        blocks = rows = 0
        for node in self._nodes.values():
            for start, stop, mask in zip([node.start, *node.stops], node.stops, node.masks):
                if mask:
                    blocks += stop - start
                    rows += 1
        return Usage(blocks=blocks, rows=rows, bytes=600 * len(self._nodes) + 100 * rows)

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless the index agrees with itself."""
        children: dict[int, set[int]] = {}
        for key, node in self._nodes.items():
            assert node.chain.keys[node.start] == key, "a node is filed under another's key"
            assert node.start < node.stop == node.stops[-1], "a node is out of shape"
            assert node.stops == sorted(set(node.stops)) and node.stops[0] > node.start, "runs are out of order"
            assert all(a != b for a, b in zip(node.masks, node.masks[1:], strict=False)), "equal rows side by side"
            assert node.children or node.masks[-1], "a dead end is kept"
            if node.parent is None:
                assert node.start == 0, "a node hangs in the air"
            else:
                assert node.parent.stop == node.start, "a node doesn't follow its parent"
                children.setdefault(id(node.parent), set()).add(id(node))
        for node in self._nodes.values():
            assert set(node.children or ()) == children.get(id(node), set()), "children are miscounted"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _along(self, keys: Keys, stop: int, start: int = 0) -> list[tuple[_ChainNode, int, int]]:
        """Return the nodes along a prompt's path up to block ``stop``, each with the blocks that are the prompt's. Nodes
        that end by ``start`` are left out.
        """
        nodes = self._nodes
        path: list[tuple[_ChainNode, int, int]] = []
        block = 0
        while block < stop:
            node = nodes.get(keys[block])
            if node is None:
                break
            end = node.stop if node.stop < stop else stop
            if end > start:
                path.append((node, block, end))
            block = end
        if path:
            last, low, high = path.pop()
            high = agree_until(last.chain.keys, keys, low, high)
            if high > start:
                path.append((last, low, high))
        return path

    def _split(self, node: _ChainNode, position: int) -> None:
        """Split ``node`` at ``position``, where another chain branches off."""
        rest = _ChainNode(node.chain, position, node.stop, node)
        rest.children, node.children = node.children, {id(rest): rest}
        run = bisect_right(node.stops, position - 1)
        rest.stops, rest.masks = node.stops[run:], node.masks[run:]
        if node.stops[run] == position:
            del rest.stops[0], rest.masks[0]
        del node.stops[run + 1 :], node.masks[run + 1 :]
        node.stops[run] = node.stop = position
        if rest.children:
            for other in rest.children.values():
                other.parent = rest
        self._nodes[rest.chain.keys[position]] = rest

    def _shorten(self, shortened: _ChainNode) -> None:
        """Free the end of ``shortened``, which no place holds and nothing follows, and ancestors that this leaves empty."""
        node: _ChainNode | None = shortened
        while node is not None and not node.masks[-1] and not node.children:
            if len(node.masks) > 1:
                node.stops.pop()
                node.masks.pop()
                node.stop = node.stops[-1]
                return
            gone = node
            del self._nodes[node.chain.keys[node.start]]
            node.stop = node.start  # a place that last removed from it finds nothing in it
            node = node.parent
            if node is not None and node.children is not None:
                del node.children[id(gone)]
