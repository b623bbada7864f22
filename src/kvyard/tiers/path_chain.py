"""The chain of a cached prefix, put together from the nodes of a cache map."""

from bisect import bisect_right
from collections.abc import Sequence

from kvyard.blocks.cache_map import Node
from kvyard.hashing import Chain, Key, Keys


def whole_chain(node: Node) -> Chain:
    """Return a chain that answers for everything up to the end of ``node``.

    What stays cached after its request keeps no more of the chain than its own run. The runs before it are in the
    tree as well, as nodes with or without copies, each with its own hashes; so the way up gives the whole prefix back.
    """
    return node.chain if node.chain.reaches(0) else PathChain(node)


class PathChain(Chain):
    """The chain from the root of a cache map to one of its nodes, as it was when this was made."""

    __slots__ = ("_chains", "_starts")

    def __init__(self, node: Node) -> None:
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        path.reverse()
        self.block_size = node.chain.block_size
        self.namespace = node.chain.namespace
        self._starts = [ancestor.start for ancestor in path]
        self._chains = [ancestor.chain for ancestor in path]
        self.keys = _PathKeys(self._starts, [ancestor.keys for ancestor in path], node.stop)

    def cut(self, start: int, stop: int, with_tokens: bool = True) -> Chain:
        """Return the chain of the run itself, where one node has it all."""
        index = bisect_right(self._starts, start) - 1
        if index + 1 == len(self._starts) or stop <= self._starts[index + 1]:
            return self._chains[index]
        return self

    def words_of(self, start: int, stop: int) -> Sequence[int] | None:
        index = bisect_right(self._starts, start) - 1
        if index + 1 == len(self._starts) or stop <= self._starts[index + 1]:
            return self._chains[index].words_of(start, stop)
        return None


class _PathKeys:
    __slots__ = ("keys", "starts", "stop")

    def __init__(self, starts: Sequence[int], keys: Sequence[Keys], stop: int) -> None:
        self.starts = starts
        self.keys = keys
        self.stop = stop

    def __len__(self) -> int:
        return self.stop

    def __getitem__(self, index: int) -> Key:
        return self.keys[bisect_right(self.starts, index) - 1][index]
