"""A kind of attention from outside the package: through manager, events, wire and index score."""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.blocks.support import cache, make
from tests.engine.driving import Row, drive
from tests.index.fleet import Engine, prompts_of

from kvyard.blocks import BlockManager, ConfigError, GroupSpec
from kvyard.blocks.attention.window import WindowRule
from kvyard.blocks.rule import NO_MATCH, Rule, RuleMatch
from kvyard.blocks.spec import ATTENTION, Attention, kind_on_wire
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.events import Stored
from kvyard.events.wire import Decoder, Encoder
from kvyard.index import Holder, Identity, Indexer, Source


class StridedRule(WindowRule):
    """A window that only ever ends on a multiple of ``chunk`` tokens."""

    def __init__(self, block_size: int, window: int, stride: int) -> None:
        super().__init__(block_size, window)
        self.stride = stride

    def match(self, spans, limit, alignment, drop) -> RuleMatch:
        found = super().match(spans, limit // self.stride * self.stride, alignment, drop)
        while found.tokens % self.stride:
            found = super().match(spans, found.tokens - self.block_size, alignment, drop)
        return found if found.tokens else NO_MATCH


def strided_rule(spec: GroupSpec) -> Rule:
    assert spec.window is not None and spec.chunk is not None
    return StridedRule(spec.block_size, spec.window, spec.chunk)


STRIDED = Attention(wire="strided_attention", is_window=True, fields=("window", "chunk"), rule=strided_rule)
FULL = GroupSpec(block_size=4)
SPEC = GroupSpec(kind="strided", window=8, chunk=16, block_size=4)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ATTENTION, "_loaded", {})  # what a test registers is gone afterwards
    ATTENTION.register("strided", STRIDED)


def test_names_on_the_wire_are_unique_and_found_again():
    kinds = [name for name in ATTENTION.names() if ATTENTION.get(name).cacheable]
    assert [kind_on_wire(ATTENTION.get(name).wire) for name in kinds] == kinds
    assert kind_on_wire("sink_full_attention") == "full"
    assert kind_on_wire("strided_attention") == "strided"
    assert kind_on_wire("cross_attention") is None, "what can't be cached is not scored"
    assert kind_on_wire("unheard_of") is None


def test_the_manager_goes_by_its_rule():
    manager = BlockManager(60, [FULL, SPEC])
    cache(manager, "a", range(28))
    assert manager.lookup(make(manager, "b", range(30))).tokens == 16, "28 tokens are there, and strides of 16"
    window = BlockManager(60, [FULL, GroupSpec(kind="sliding_window", window=8, block_size=4)])
    cache(window, "a", range(28))
    assert window.lookup(make(window, "b", range(30))).tokens == 28
    manager.check_integrity()


def test_a_field_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="strided group has no mode; leave it out or choose mamba"):
        GroupSpec(kind="strided", window=8, chunk=16, mode="all").check("here")
    with pytest.raises(ConfigError, match=r"unknown kind 'spiral': choose one of .*strided"):
        GroupSpec(kind="spiral").check("here")
    with pytest.raises(KvyardError, match="attention kind 'spiral'"):
        GroupSpec(kind="spiral").rule()


def test_an_engine_runs_it():
    core = make_core(EngineConfig(groups=(FULL, SPEC), num_gpu_blocks=400), events=True)
    drive(core, [Row(at * 1_000_000, 300, 20, (at % 2,)) for at in range(6)])
    assert core.scheduler.manager.pool.free == 400


def plain_rule(spec: GroupSpec) -> Rule:
    assert spec.window is not None
    return StridedRule(spec.block_size, spec.window, spec.block_size)


@pytest.mark.parametrize("learned", [False, True], ids=["configured", "from events"])
def test_events_carry_it_and_the_index_scores_as_the_manager_hits(learned):
    # Events say how large a window is and nothing of strides: what is to be learned from them has none.
    ATTENTION.register("plain", Attention(wire="plain", is_window=True, fields=("window",), rule=plain_rule))
    spec = GroupSpec(kind="plain", window=8, block_size=4) if learned else SPEC
    rng = random.Random(3)
    prompts = prompts_of(rng)
    engine = Engine("w", (FULL, spec), seed=5)
    indexer = Indexer(Identity(4))
    indexer.register(Source(stream="w", worker="w", groups=None if learned else (FULL, spec)))
    encoder, decoder = Encoder("vllm"), Decoder()
    found = 0
    for step in range(150):
        batch = engine.step(prompts)
        if batch is not None:
            decoded = decoder.decode(encoder.encode(batch))
            assert {event.kind for event in decoded.events if isinstance(event, Stored) and event.group == 1} <= {
                spec.attention.wire
            }
            indexer.apply_batch(msgspec.structs.replace(batch, events=decoded.events), step)
        prompt = rng.choice(prompts)
        match = indexer.score(prompt).workers[Holder("w")]
        if match.confidence:
            assert match.tokens == engine.longest(prompt)
            found += match.tokens > 0
    assert found > 20
