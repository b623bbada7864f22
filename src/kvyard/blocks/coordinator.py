"""The coordinator: the order in which groups act, and their common hit (its rule is in ``agreement``).

**Two-phase allocation.** Every group pins and adopts its local hits before any group takes a block for external tokens.
If a group took blocks while another's hits were looked up but not pinned, it could be given the blocks that the other is
about to adopt, and two groups would write the same memory (vLLM #33775, #43884, fixed in #44409).
"""

from collections.abc import Sequence

from kvyard.blocks.agreement import EqualGroups, agree, equal_groups
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.fine import match_prefix_inside, match_state_inside
from kvyard.blocks.geometry import Geometry
from kvyard.blocks.group import NO_HIT, Demand, Group, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.rule import RuleMatch
from kvyard.blocks.spans import Spans, intersect
from kvyard.hashing import Keys
from kvyard.integers import ceil_div


class Hit:
    """Result of a lookup for one request. Valid until a cached block is evicted or moved; then it is refused."""

    __slots__ = ("groups", "request", "shared_prefix_boundary", "tokens", "version")

    def __init__(
        self, request: Request, tokens: int, groups: Sequence[GroupHit], boundary: int = 0, version: int = 0
    ) -> None:
        self.request = request
        self.tokens = tokens
        """Tokens that need not be computed."""
        self.groups = groups
        self.shared_prefix_boundary = boundary
        """Length to which another group has this text, where a sparser one stops the hit earlier; 0 otherwise."""
        self.version = version

    def block_ids(self) -> list[list[int]]:
        """Return the physical ids per group, 0 for null."""
        return [group.ids() for group in self.groups]


class _Members(EqualGroups):
    """Equal groups of one manager, and how they are looked up in its maps."""

    def __init__(self, groups: list[Group], members: list[int], alignment: int) -> None:
        first = self.first = groups[members[0]]
        drops = any(groups[index].eagle for index in members)
        super().__init__(first.spec, members, drops, alignment)
        self.groups = [groups[index] for index in members]
        self._inside = first.spec.checkpoint_unit is not None or (
            alignment < first.block_size and (first.spec.is_full or first.spec.is_state)
        )
        """True if a hit may end inside a block, or be known by a mark."""
        for group in self.groups:
            group.eagle = drops

    def look(self, request: Request, limit: int) -> tuple[Spans, list[list[Node]]]:
        """Return the intervals that every member has, and each member's nodes."""
        spans, nodes = self.first.spans(request, limit)
        all_nodes = [nodes]
        for group in self.groups[1:]:
            others, nodes = group.spans(request, limit)
            spans = intersect(spans, others)
            all_nodes.append(nodes)
        return spans, all_nodes

    def match(self, spans: Spans, limit: int, drop: bool, keys: Keys | None) -> RuleMatch:
        if self._inside and keys is not None:
            if self.is_full:
                return match_prefix_inside(self.groups, keys, self.alignment, spans, limit, drop)
            return match_state_inside(self.groups, keys, self.first.hash_block_size, self.alignment, spans, limit)
        return self.rule.match(spans, limit, self.alignment, drop)

    def hits(self, match: RuleMatch, all_nodes: list[list[Node]]) -> list[GroupHit]:
        """Return the match as each member's hit."""
        count = ceil_div(match.tokens, self.first.block_size)
        tails: Sequence[Extent | None] = match.tails or [None] * len(all_nodes)
        return [GroupHit(count, match.low, nodes, tail) for nodes, tail in zip(all_nodes, tails)]


class Coordinator:
    """Lookup and order of action over all groups of one manager."""

    def __init__(
        self, groups: list[Group], geometry: Geometry, *, use_eagle: bool, retention: int | None, margin: int
    ) -> None:
        """``margin`` is how many of the last computed tokens may still be computed again (multi-module drafts)."""
        self.groups = groups
        self.geometry = geometry
        self.margin = margin
        self.alignment = geometry.hash_block_size if geometry.fine_hits else geometry.scheduler_block_size
        drafts = [group.spec.eagle for group in groups]
        if use_eagle and not any(drafts):
            drafts = [True] * len(groups)
        for group, draft in zip(groups, drafts):
            group.eagle = draft
            group.eagle_unit = geometry.scheduler_block_size if any(drafts) else 0
            group.use_eagle = use_eagle
        several = len(groups) > 1
        self.parts = [
            _Members(groups, members, self.alignment)
            for members in equal_groups([group.spec for group in groups])
            if groups[members[0]].spec.shares or not several
        ]
        self._one_full = len(groups) == 1 and groups[0].spec.is_full and not groups[0].eagle
        self.keep_every(retention)
        for group in groups:
            if not group.registers_always:
                group.register_unit = 1 if len(groups) == 1 or group.eagle or geometry.fine_hits else self.alignment
        self._unit = 1 if len(groups) == 1 or geometry.fine_hits else geometry.scheduler_block_size
        """Granularity, in tokens, of what all groups together can reuse."""
        self.estimates = any(group.estimates for group in groups)
        """True if ``need`` alone doesn't decide if an allocation will succeed."""

    def keep_every(self, retention: int | None) -> None:
        """Set the interval at which windows and states are kept; ``None`` keeps all."""
        self.retention = retention
        for group in self.groups:
            group.alignment, group.retention = self.alignment, retention
            group.keeps_all = group.rule.keeps_all(self.alignment, group.eagle, retention)

    def lookup(self, request: Request) -> Hit:
        """Return the longest prefix that every group can use, without the last token. Changes nothing."""
        limit = request.num_tokens - 1
        version = self.groups[0].pool.version
        keys = request.chain.keys
        if self._one_full:
            # The most common model. One group has nothing to agree on: its cached prefix is the hit.
            group = self.groups[0]
            nodes, index = group.map.walk(keys, min(limit // group.block_size, len(keys)), through_holes=False)
            return Hit(request, index * group.block_size, (GroupHit(index, 0, nodes),), 0, version)
        end = len(keys) * self.geometry.hash_block_size
        several = len(self.groups) > 1
        seen = [part.look(request, end if part.drops and several else limit) for part in self.parts]
        tokens, matches, longest = agree(self.parts, [spans for spans, _ in seen], limit, end, keys)
        hits: list[GroupHit] = [NO_HIT] * len(self.groups)
        for part, match, (_, all_nodes) in zip(self.parts, matches, seen):
            if part.is_full:
                size = part.first.block_size
                kept = ceil_div(tokens, size) == ceil_div(match.tokens, size)
                match = RuleMatch(min(match.tokens, tokens), 0, match.tails if kept else None)
            for index, group_hit in zip(part.members, part.hits(match, all_nodes)):
                hits[index] = group_hit
        return Hit(request, tokens, hits, longest if longest > tokens else 0, version)

    def lookup_each(self, request: Request) -> tuple[list[GroupHit], list[int]]:
        """Return the longest prefix that each group has by itself, and its tokens. Changes nothing."""
        limit = request.num_tokens - 1
        keys = request.chain.keys
        end = len(keys) * self.geometry.hash_block_size
        hits: list[GroupHit] = [NO_HIT] * len(self.groups)
        lengths = [0] * len(self.groups)
        for part in self.parts:
            reach = min(limit + part.beyond, end) if part.drops else limit
            spans, all_nodes = part.look(request, reach)
            match = part.match(spans, reach, part.drops, keys)
            for index, group_hit in zip(part.members, part.hits(match, all_nodes)):
                hits[index], lengths[index] = group_hit, match.tokens
        return hits, lengths

    def fits(self, request: Request, hits: Sequence[GroupHit], demand: Demand, spare: int) -> bool:
        """Return true if ``demand`` can be met while ``spare`` blocks stay free."""
        free = self.groups[0].pool.free
        if self.need(request, hits, demand) + spare > free:
            return False
        if not self.estimates:
            return True
        if self.has_adopted(request):
            demand = demand.unloaded()  # external tokens have no blocks of their own
        # Free blocks that meeting the demand takes. One group's surplus is no help to another.
        each = zip(self.groups, request.tables, hits)
        return sum([group.uses(request, table, hit, demand) for group, table, hit in each]) <= free

    def need(self, request: Request, hits: Sequence[GroupHit], demand: Demand) -> int:
        """Return the number of free blocks that all groups together need to meet ``demand``, as counted for admission."""
        need = 0
        for group, table, hit in zip(self.groups, request.tables, hits):
            need += group.need(request, table, hit, demand)
        return need

    def adopt(self, request: Request, hits: Sequence[GroupHit], local: int, external: int) -> None:
        """Run both phases, once per request: a request of which any group has registered blocks keeps them."""
        if self.has_adopted(request):
            return
        tables = request.tables
        for group, table, hit in zip(self.groups, tables, hits):
            group.adopt(table, hit, local, external)
        if external > 0:
            for group, table in zip(self.groups, tables):
                group.take_external(table, local + external, external)

    def has_adopted(self, request: Request) -> bool:
        """Return true if any group has blocks of the request or has registered any, adopted hits included.

        One answer for all groups: with blocks of different size one may have registered something while another has not.
        """
        return any(table.registered is not None or table.length > 0 for table in request.tables)

    def register(self, request: Request, tokens: int) -> None:
        """Offer the blocks of the first ``tokens`` tokens to every group's map."""
        for group, table in zip(self.groups, request.tables):
            if group.shares:
                group.register(request, table, self.cacheable(tokens, group))

    def cacheable(self, tokens: int, group: Group) -> int:
        """Return how many of ``tokens`` can be part of a future hit of ``group``."""
        final = max(0, tokens - self.margin)
        if len(self.groups) == 1:
            return final
        aligned = self._align(tokens)
        if not group.eagle or not aligned:
            return aligned
        # One block past the boundary is matched and then dropped.
        return min(final, self._align(final) + group.block_size)

    def _align(self, tokens: int) -> int:
        return tokens - tokens % self._unit
