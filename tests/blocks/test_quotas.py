"""Quotas: against a model that keeps every block by itself, and by closed forms."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from tests.blocks.support import FULL, cache
from tests.blocks.test_eviction import Now

from kvyard.blocks import BlockManager, ConfigError, Request
from kvyard.blocks.ledger import MOST_ACCOUNTS, OTHERS, Ledger
from kvyard.blocks.pool import RadixTree
from kvyard.blocks.quotas import Quotas
from kvyard.blocks.use import RequestFacts, Use
from kvyard.events.types import Tier
from kvyard.hashing import TokenChain, algorithm
from kvyard.tiers.store import PageRange, TierStore

XXH3 = algorithm("xxh3")
SIZE = FULL.block_size


class Block:
    """One physical block of the model."""

    def __init__(self, owner: str) -> None:
        self.owner, self.text, self.refs = owner, None, 1

    text: tuple[int, ...] | None


class BlockModel:
    """A cache with quotas, one block at a time: lists and loops, nothing shared with the pool."""

    def __init__(self, capacity: int, quotas: Quotas) -> None:
        self.capacity, self.empty, self.quotas = capacity, capacity, quotas
        self.used: Counter[str] = Counter()
        self.order: list[str] = [""]
        """Tenants in the order in which they came."""
        self.idle: defaultdict[str, list[Block]] = defaultdict(list)
        self.copies: defaultdict[tuple[int, ...], list[Block]] = defaultdict(list)
        self.due: set[str] = set()

    def limit(self, tenant: str) -> int | None:
        return self.quotas.limit(tenant, self.capacity)

    def admit(self, tenant: str, blocks: list[int]) -> list[Block] | None:
        """The blocks of a request for ``blocks``, or ``None`` if it doesn't fit; all but the last may be found cached."""
        found: list[Block] = []
        for count in range(1, len(blocks)):
            copies = self.copies.get(tuple(blocks[:count]))
            if not copies:
                break
            found.append(copies[0])
        need = len(blocks) - len(found)
        free = self.empty + sum(len(line) for line in self.idle.values()) - sum(not block.refs for block in found)
        if tenant not in self.order:
            self.order.append(tenant)
        if need > free:
            return None
        for block in found:
            if not block.refs:
                self.idle[block.owner].remove(block)
            block.refs += 1
        self.used[tenant] += need
        for name in {*self.due, tenant}:
            limit = self.limit(name)
            while limit is not None and self.used[name] > limit and self.idle[name]:
                self.evict(name)
        self.due.clear()
        own = [Block(tenant) for _ in range(need)]
        while self.empty < need:
            self.evict(self.victim(tenant))
        self.empty -= need
        for at, block in enumerate(own, start=len(found) + 1):
            block.text = tuple(blocks[:at])
            self.copies[block.text].append(block)
        return found + own

    def victim(self, taker: str) -> str:
        if self.quotas.mode == "isolated" and self.idle[taker]:
            return taker
        having = [name for name in self.order if self.idle[name]]
        return max(having, key=lambda name: Fraction(self.used[name], self.quotas.weight(name)))

    def evict(self, tenant: str) -> None:
        block = self.idle[tenant].pop(0)
        assert block.text is not None
        self.copies[block.text].remove(block)
        if not self.copies[block.text]:
            del self.copies[block.text]
        self.used[tenant] -= 1
        self.empty += 1

    def release(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                self.idle[block.owner].append(block)
                limit = self.limit(block.owner)
                if limit is not None and self.used[block.owner] > limit:
                    self.due.add(block.owner)


def ask(name: str, tenant: str, blocks: list[int]) -> Request:
    """A request whose prompt is one block for each number."""
    tokens = [token for block in blocks for token in range(block * SIZE, (block + 1) * SIZE)]
    return Request(name, TokenChain(tokens, SIZE, XXH3), facts=RequestFacts(tenant=tenant))


def name_of(text: tuple[int, ...]) -> object:
    """The hash of the last of these blocks."""
    return ask("", "", list(text)).chain.hashes(len(text) - 1, len(text))[0]


@pytest.mark.parametrize("mode", ["borrowed", "hard", "isolated"])
@pytest.mark.parametrize("seed", range(6))
def test_a_pool_with_quotas_does_what_a_model_does_block_by_block(mode: str, seed: int) -> None:
    draw = random.Random(f"{mode}{seed}")
    shares = draw.choice([{}, {"a": 0.5}, {"a": 0.5, "b": 0.2, "*": 0.1}, {"*": 0.3}])
    quotas = Quotas(mode=mode, shares=shares)  # type: ignore[arg-type]
    capacity = draw.randrange(20, 60)
    manager = BlockManager(capacity + 1, [FULL], quotas=quotas, now=Now())
    model = BlockModel(capacity, quotas)
    running: list[tuple[Request, list[Block]]] = []
    hits = 0
    for number in range(400):
        if running and draw.random() < 0.5:
            request, blocks = running.pop(draw.randrange(len(running)))
            manager.free(request)
            model.release(blocks)
        else:
            tenant = draw.choice(["", "a", "a", "b", "c", "d"])
            common = draw.randrange(4)
            text = [common * 1000 + at for at in range(draw.randrange(1, 6))]
            text += [draw.randrange(4) + 10_000 * draw.randrange(3) for _ in range(draw.randrange(0, 6))]
            request = ask(f"r{number}", tenant, text)
            hit = manager.lookup(request)
            given = manager.allocate(request, request.num_tokens - hit.tokens, hit, must_fit=True)
            expected = model.admit(tenant, text)
            assert (given is None) == (expected is None)
            if expected is not None:
                hits += hit.tokens // SIZE
                assert given is not None
                assert hit.tokens // SIZE == len(text) - len(given[0])
                request.num_computed_tokens = request.num_tokens
                running.append((request, expected))
        ledger = manager.pool.ledger
        assert ledger is not None
        charged = {name: blocks for name, blocks in zip(ledger.names, ledger.used, strict=True) if blocks}
        assert charged == {name: blocks for name, blocks in model.used.items() if blocks}
        assert manager.pool.unnamed == model.empty
        if not number % 10:
            kept = Counter(key for _, key, _ in manager.pool.cached_blocks())
            assert kept == {name_of(text): len(copies) for text, copies in model.copies.items()}
        manager.check_integrity()
    assert hits > 50, "the walk must have something to lose"


def fill(manager: BlockManager, tenant: str, requests: int, blocks: int, start: int) -> None:
    for number in range(requests):
        first = start + number * blocks
        request = ask(f"{tenant}{first}", tenant, list(range(first, first + blocks)))
        assert manager.allocate(request, request.num_tokens) is not None
        manager.free(request)


def charged(manager: BlockManager) -> dict[str, int]:
    ledger = manager.pool.ledger
    assert ledger is not None
    return {name: ledger.used[ledger.account(name)] for name in ledger.names if name}


def test_borrowed_shares_converge_to_the_shares_of_those_who_want_more() -> None:
    """Closed form: while all want more than they have, cached blocks are as the shares are; others' room is lent."""
    manager = BlockManager(1001, [FULL], quotas=Quotas(shares={"gold": 0.5, "silver": 0.3, "*": 0.2}))
    fill(manager, "gold", 200, 10, 0)
    assert charged(manager) == {"gold": 1000}, "nobody else is there"
    fill(manager, "silver", 200, 10, 10_000)
    assert charged(manager) == {"gold": 625, "silver": 375}
    fill(manager, "flood", 2_000, 10, 100_000)
    assert charged(manager) == {"gold": 500, "silver": 300, "flood": 200}
    manager.check_integrity()


def test_in_a_large_pool_shares_are_kept_to_a_thousandth_of_it() -> None:
    manager = BlockManager(10_001, [FULL], quotas=Quotas(shares={"a": 0.5, "b": 0.3, "*": 0.2}))
    for tenant, start in (("a", 0), ("b", 1_000_000), ("c", 2_000_000)):
        fill(manager, tenant, 1500, 10, start)
    found = charged(manager)
    assert sum(found.values()) == 10_000
    assert abs(found["a"] - 5000) <= 20 and abs(found["b"] - 3000) <= 20 and abs(found["c"] - 2000) <= 20
    manager.check_integrity()


def test_hard_shares_are_kept_with_room_to_spare() -> None:
    manager = BlockManager(1001, [FULL], quotas=Quotas(mode="hard", shares={"*": 0.25}))
    fill(manager, "a", 100, 10, 0)
    fill(manager, "b", 100, 10, 50_000)
    assert charged(manager) == {"a": 250, "b": 250}
    assert manager.pool.unnamed == 500


@pytest.mark.parametrize("mode", ["borrowed", "hard", "isolated"])
def test_a_flood_takes_nothing_of_what_others_have_within_their_shares(mode: str) -> None:
    quotas = Quotas(mode=mode, shares={"quiet": 0.3, "flood": 0.5, "*": 0.1})  # type: ignore[arg-type]
    manager = BlockManager(1001, [FULL], quotas=quotas)
    fill(manager, "quiet", 30, 10, 0)
    fill(manager, "flood", 3_000, 10, 100_000)
    found = manager.lookup(ask("again", "quiet", [*range(10), 7]))
    assert found.tokens == 10 * SIZE, "its oldest request is there"
    assert charged(manager)["quiet"] == 300
    ledger = manager.pool.ledger
    assert ledger is not None
    assert ledger.lost[ledger.account("quiet")] == 0
    plain = BlockManager(1001, [FULL])
    fill(plain, "quiet", 30, 10, 0)
    fill(plain, "flood", 3_000, 10, 100_000)
    assert plain.lookup(ask("again", "quiet", [*range(10), 7])).tokens == 0


def test_block_seconds_add_up_to_the_pool_and_its_time() -> None:
    now = Now()
    manager = BlockManager(101, [FULL], now=now)
    draw = random.Random(1)
    empty, last = 0, 0
    running: list[Request] = []
    ledger = manager.pool.open_ledger()
    for number in range(300):
        now.time += draw.randrange(5)
        empty, last = empty + manager.pool.unnamed * (now.time - last), now.time
        if running and draw.random() < 0.5:
            manager.free(running.pop(draw.randrange(len(running))))
        request = ask(f"r{number}", draw.choice("abc"), [draw.randrange(30) for _ in range(draw.randrange(1, 9))])
        hit = manager.lookup(request)
        if manager.allocate(request, request.num_tokens - hit.tokens, hit) is not None:
            running.append(request)
    ended = now.time + 7
    empty += manager.pool.unnamed * (ended - last)
    total = sum(ledger.block_ns(account, ended) for account in range(len(ledger.names)))
    assert total + empty == 100 * ended
    manager.check_integrity()


def test_a_ledger_that_opens_late_counts_what_was_there_as_nobodys() -> None:
    manager = BlockManager(51, [FULL])
    cache(manager, "before", range(40))
    assert manager.pool.ledger is None, "no request names a tenant"
    fill(manager, "a", 1, 5, 1_000)
    ledger = manager.pool.ledger
    assert ledger is not None
    assert ledger.used == [10, 5]
    manager.check_integrity()
    assert manager.reset()
    assert ledger.used == [0, 0]


def test_tenants_without_end_share_the_last_account() -> None:
    ledger = Ledger(lambda: 0)
    numbers = [ledger.account(f"t{number}") for number in range(100_000)]
    assert max(numbers) == MOST_ACCOUNTS - 1
    assert len(ledger.names) == len(ledger.used) == MOST_ACCOUNTS
    assert ledger.names[-1] == OTHERS
    assert ledger.account("t3") == numbers[3]


def test_a_store_of_an_isolated_tenant_never_evicts_anothers_pages() -> None:
    store = TierStore(Tier.G2, 10, 1, quotas=Quotas(mode="isolated", shares={"a": 0.6, "*": 0.4}))

    def put(tenant: str, start: int, pages: int) -> bool:
        chain = ask("x", tenant, list(range(start, start + pages))).chain
        piece = PageRange(0, chain, 0, pages)
        use = Use(f"{tenant}{start}", 0, RequestFacts(tenant=tenant))
        held = store.reserve([piece], use)
        if held is None:
            return False
        store.land(piece, held[0], use=use)
        store.check_integrity()
        return True

    assert put("a", 0, 6)
    assert put("b", 100, 4)
    assert not put("b", 200, 5), "more than its share, whatever is evicted"
    assert put("b", 300, 4)
    ledger = store.pool.ledger
    assert ledger is not None
    assert dict(zip(ledger.names, ledger.used, strict=True)) == {"": 0, "a": 6, "b": 4}
    assert ledger.lost == [0, 0, 0]


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"add up to 1\.2"):
        Quotas(shares={"a": 0.6, "b": 0.6})
    with pytest.raises(ConfigError, match=r"as \*=0.05"):
        Quotas(shares={"a": 1.0})
    with pytest.raises(ConfigError, match="above 0"):
        Quotas(shares={"a": 0.0})
    with pytest.raises(ConfigError, match="lru or priority, not lfu"):
        BlockManager(11, [FULL], quotas=Quotas(), eviction="lfu")
    with pytest.raises(ConfigError, match="radix tree"):
        BlockManager(11, [FULL], quotas=Quotas(), radix=RadixTree("lru"))
