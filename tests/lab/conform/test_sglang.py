"""Our engine decides what SGLang's scheduler decided, batch by batch, and admits what its prefill adder admits."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvyard.blocks import Hit, host_pages
from kvyard.blocks.eviction.radix import NodePart, RadixOrder
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.host_pages import HostPages
from kvyard.blocks.host_windows import HostWindows
from kvyard.blocks.radix import NOTHING, Held, RadixGroup, held_of
from kvyard.blocks.request import Request
from kvyard.blocks.state_slots import StateSlots, StateTracking
from kvyard.blocks.table import BlockTable
from kvyard.blocks.tree_eviction import TreeEviction
from kvyard.blocks.window_pages import WindowPages
from kvyard.cli.app import main
from kvyard.engine.decode_blocks import DecodeBlocks
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.passes import Pass
from kvyard.engine.policies import sglang_budget, sglang_decoding, sglang_tree
from kvyard.engine.policies.sglang_admission import Admission
from kvyard.engine.policies.sglang_budget import NO_TOKENS, Budget, KnownEnds, NewTokenRatio, WindowBudget
from kvyard.engine.policies.sglang_decoding import DecodeSide
from kvyard.engine.policies.sglang_drafts import DraftSide
from kvyard.engine.policies.sglang_order import QueueOrder
from kvyard.engine.policies.sglang_passes import SglangPasses
from kvyard.engine.speculative import ReservedDrafts
from kvyard.lab.conform import LogError
from kvyard.lab.conform.scheduler import Record, read_lines
from kvyard.lab.conform.sglang import SglangLog, SglangRun, conform
from kvyard.tiers import hicache
from kvyard.tiers.hicache import HiCache

TESTS = Path(__file__).resolve().parents[2]
GOLDEN = TESTS / "golden" / "sglang"
LOGS = sorted(path for path in GOLDEN.glob("*.xz") if "@" in path.name)
CLIP = 4096


def load_families() -> ModuleType:
    """``scripts/sglang_families``, which makes states from their numbers."""
    folder = TESTS.parent / "scripts" / "sglang_families"
    spec = importlib.util.spec_from_file_location(
        "sglang_families", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its modules import each other by its name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def test_our_engine_decides_what_sglang_decided(path: Path) -> None:
    """One pass at a time and with plans."""
    verdict = conform(path)
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == sum("step" in line for line in read_lines(path))


class CheckedRun(SglangRun):
    """A run whose engine is checked after every decision."""

    def decided(self, made: Pass, now: int) -> None:
        super().decided(made, now)
        self.core.check_integrity(alone=False)


@pytest.mark.parametrize("name", ["hicache-p64@1", "write-back-p64@2", "swa-hicache-p64@11"])
def test_device_and_host_agree_after_every_decision(name: str) -> None:
    run = CheckedRun(SglangLog(GOLDEN / f"{name}.jsonl.xz"), plans=False)
    run.go()
    run.core.check_integrity()
    assert run.core.offload is not None
    assert run.core.offload.counters.hits > 0


@pytest.mark.parametrize("name", ["mamba-few@11", "mamba-lazy-few-p64@5", "mamba-eagle-lazy-few@2", "mamba-swa-lazy@3"])
def test_state_slots_add_up_after_every_decision(name: str) -> None:
    run = CheckedRun(SglangLog(GOLDEN / f"{name}.jsonl.xz"), plans=False)
    run.go()
    run.core.check_integrity()


def admitted(state: dict[str, Any]) -> list[list[Any]]:
    """Return our budget's answers to the prompts of a state, in the words of SGLang's adder."""
    page, off, eos = state["page"], state["disable_radix_cache"], not state["ignore_eos"]
    left = [min(answer - output, CLIP) for _, output, answer in state["running"]]
    aside = 0.0
    for tokens in left:
        aside += tokens * (state["ratio"] if eos else 1.0)
    pages = state["free"] + state["evictable"]
    mixed = len(state["running"]) if state["mixed"] else 0
    budget = Budget(pages * page, page, aside, state["inputs"], state["chunk"], mixed)
    answers: list[list[Any]] = []
    ends: list[tuple[float, int]] = [(answer - out, prompt + out) for prompt, out, answer in state["running"]]
    if state["chunked"] is not None:
        prompt, past, answer = state["chunked"]
        room = budget.continued()
        whole = prompt - past <= room
        budget.charge(min(prompt - past, room), min(answer, CLIP) if whole else 0)
        answers.append([min(prompt - past, room), "LAST" if whole else "CONTINUED"])
        ends.append((answer, prompt))
    known = KnownEnds(ends) if not eos and off else None
    for prompt, output, answer, cached in state["waiting"]:
        if budget.spent:
            break
        length = prompt + output
        if known is not None:
            new = budget.price_known(length, answer - output, answer - output, length, known)
        else:
            new = budget.price(length - cached, min(answer - output, CLIP), cached // page, first=not answers)
        if new <= 0:
            answers.append([0, "NO_TOKEN" if new == NO_TOKENS else "OTHER"])
            break
        budget.free -= cached
        budget.charge(new, min(answer, CLIP) if new == length - cached else 0)
        answers.append([new, "CONTINUE" if budget.open else "OTHER" if budget.spent else "NO_TOKEN"])
        if not budget.open:
            break
    return answers


def test_our_budget_admits_what_the_prefill_adder_admits() -> None:
    families = load_families()
    lines = read_lines(GOLDEN / "admission.jsonl.xz")[1:]
    differing = [
        line["state"] for line in lines if admitted(families.admission_state(line["state"])) != line["answers"]
    ]
    assert len(lines) == 8000
    assert differing == []


def changed(tmp_path: Path, kind: str, number: int, **fields: object) -> Path:
    """A log with one of its lines of a kind changed."""
    lines = read_lines(next(path for path in LOGS if path.name.startswith("admit-bold")))
    of_kind: list[Record] = [line for line in lines if kind in line]
    of_kind[number].update(fields)
    path = tmp_path / "changed@1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("step", {"free": 1}, "free"),
        ("step", {"evictable": 1}, "evictable"),
        ("step", {"ratio": 0.5}, "ratio"),
        ("step", {"events": [["removed", "device", [[0, 1]]]]}, "events"),
        ("end", {"cached": -1}, "cached of r3"),
    ],
)
def test_a_difference_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, fields: dict[str, object], field: str
) -> None:
    path = changed(tmp_path, kind, 3, **fields)
    with pytest.raises(SystemExit) as exit_:
        main(["conform", str(path)])
    assert exit_.value.code == 1
    assert f"in {field}\n" in capsys.readouterr().out


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = TESTS / "golden" / "scheduler" / "light@1.jsonl.xz"
    with pytest.raises(LogError, match="is of format 'scheduler-log/1', not 'sglang-log/1'"):
        conform(other)
    with pytest.raises(LogError, match="is no log of SGLang's scheduler"):
        conform(changed(tmp_path, "format", 0, config={}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda lines: lines[:1], r"its last line isn't the last of a log \(rest\): the log was cut off"),
        (lambda lines: lines[:-1], r"its last line isn't the last of a log \(rest\): the log was cut off"),
        (lambda lines: [lines[0], lines[1], *lines[1:]], "2 requests are called r0: the log is damaged"),
        (
            lambda lines: [_with(lines[0], "config", {"page_size": 0}), *lines[1:]],
            "page_size must be at least 1, got 0",
        ),
        (lambda lines: [_with(lines[0], "config", {"beam": 4}), *lines[1:]], "nothing here stands for beam"),
        (lambda lines: [_with(lines[0], "timing", {"odd": 1}), *lines[1:]], "Unexpected keyword argument 'odd'"),
        (lambda lines: [lines[0], {**lines[1], "prompt": [[0, -4]]}, *lines[2:]], "request r0 has an empty prompt"),
        (lambda lines: [lines[0], {**lines[1], "prompt": [[0, 1 << 40]]}, *lines[2:]], "more than 16,777,216 tokens"),
        (lambda lines: [_without(line, "tokens") for line in lines], "a line has no 'tokens'"),
    ],
)
def test_a_damaged_log_is_refused_in_one_sentence(
    damage: Callable[[list[Any]], list[Any]], reason: str, tmp_path: Path
) -> None:
    lines: list[Any] = read_lines(GOLDEN / "admit-p64@1.jsonl.xz")
    path = tmp_path / "damaged@1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in damage(lines)))
    with pytest.raises(LogError, match=reason):
        conform(path)


def _with(header: Any, key: str, changes: dict[str, Any]) -> Any:
    return {**header, key: {**header[key], **changes}}


def _without(line: Any, key: str) -> Any:
    return {name: value for name, value in line.items() if name != key}


def _no_page_to_spare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Budget,
        "fits",
        lambda self, left, answer, locked: left + answer < self.free - locked * self.page - self.total,
    )


def _only_a_chunk_must_fit(patch: pytest.MonkeyPatch) -> None:
    fits = Budget.fits
    patch.setattr(
        Budget,
        "fits",
        lambda self, left, answer, locked: fits(
            self, min(left, self.chunk), answer if left <= self.chunk else 0, locked
        ),
    )


def _less_look_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sglang_budget, "LOOK_AHEAD", 10)


def _splits_touch_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixOrder, "split", lambda self, front, extent: None)


def _answers_stay_with_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixGroup, "_use_prompt", lambda self, path, prompt, priority: None)


def _prompts_evict_what_they_need(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TreeEviction, "make_room", lambda self, count, make=TreeEviction.make_room: make(self, count - 1))


def _decodes_evict_what_they_need(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeBlocks, "make_headroom", lambda self: None)


def _waiting_requests_touch_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QueueOrder, "_refresh", lambda self, jobs: None)


def _longest_answers_are_retracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSide, "produced", lambda self, job: -job.max_tokens + self.remaining(job))


def _full_batches_are_tried_again(patch: pytest.MonkeyPatch) -> None:
    merge = SglangPasses._merge

    def forgetful(self: SglangPasses) -> None:
        merge(self)
        self._decode.full = False

    patch.setattr(SglangPasses, "_merge", forgetful)


def _every_insert_is_a_hit(patch: pytest.MonkeyPatch) -> None:
    along = RadixOrder.insert_along
    patch.setattr(
        RadixOrder,
        "insert_along",
        lambda self, extent, priority, counts, used=True: along(self, extent, priority, True, used),
    )
    held = RadixOrder.insert_held
    patch.setattr(RadixOrder, "insert_held", lambda self, nodes, priority, counted: held(self, nodes, priority, -1))


def _idle_keeps_the_ratio(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NewTokenRatio, "reset", lambda self: None)


def _tokens_in_flight_survive_retraction(patch: pytest.MonkeyPatch) -> None:
    preempt = Lifecycle.preempt
    patch.setattr(
        Lifecycle,
        "preempt",
        lambda self, job, now, to_front=True, keeps_in_flight=True: preempt(self, job, now, to_front, True),
    )


def _mixed_batches_keep_their_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lifecycle, "renumber", lambda self, jobs: None)


def _aborts_take_effect_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lifecycle, "cancel", Lifecycle.drop)


def _aborted_chunks_go_on(patch: pytest.MonkeyPatch) -> None:
    def abort(self: SglangPasses, now: int) -> None:
        for job in self._aborted:
            if job.state is JobState.DECODE:
                self.jobs.batch.abort(job)
        self._aborted.clear()

    patch.setattr(SglangPasses, "_abort", abort)


def _aborts_with_overlap_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lifecycle, "_part", lambda self, done: [])


def _any_prefix_has_a_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowPages, "usable", lambda self, nodes: len(nodes))


def _windows_slide_with_every_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sglang_decoding, "SLIDE_INTERVAL", 1)


def _windows_are_not_locked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowPages, "lock", lambda self, node: node.stop)


def _windows_are_evicted_first_in_first_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowPages, "use", lambda self, node: None)


def _lost_windows_stay_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixGroup, "_recover", lambda self, node, path, held, windows: None)


def _prompts_need_no_window_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowBudget, "longest", lambda self, left, answer, hit, windows: self.chunk)


def _window_pages_are_promised_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowBudget, "charge", Budget.charge)


def _answers_need_no_window(patch: pytest.MonkeyPatch) -> None:
    needed = WindowBudget.needed
    patch.setattr(WindowBudget, "needed", lambda self, tokens, answer: needed(self, tokens, 0))


def _branches_are_not_inserted_first(patch: pytest.MonkeyPatch) -> None:
    match = RadixGroup.match
    patch.setattr(
        RadixGroup,
        "match",
        lambda self, request, tokens: match(self, request, tokens)._replace(shared_prefix_boundary=0),
    )


def _windows_in_use_are_not_free_to_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowPages, "lockable", lambda self, nodes: 0)


def _short_prefixes_are_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hicache, "LEAST_LOADED", 1)


def _pages_being_written_are_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_pages, "path_to", lambda node: [])


def _nodes_are_written_before_their_ancestors(patch: pytest.MonkeyPatch) -> None:
    inserted = HostPages.inserted

    def alone(self: HostPages, node: Node) -> None:
        if node.parent is None or self.below(node.parent) is not None:
            inserted(self, node)

    patch.setattr(HostPages, "inserted", alone)


def _nodes_are_written_with_their_first_insert(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(hicache.THRESHOLDS, "after_hits", 1)


def _matches_dont_use_the_host(patch: pytest.MonkeyPatch) -> None:
    use_path = RadixOrder.use_path
    patch.setattr(RadixOrder, "use_path", lambda self, nodes, beyond=None, lower=None: use_path(self, nodes))


def _the_host_is_not_counted_as_cached(patch: pytest.MonkeyPatch) -> None:
    sort, match = QueueOrder._sort_by_cache, RadixGroup.match

    def nothing_below(self: RadixGroup, request: Request, tokens: int) -> Hit:
        hit = match(self, request, tokens)
        self.beyond = NOTHING
        return hit

    def without(self: QueueOrder, jobs: list[Job]) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RadixGroup, "match", nothing_below)
            sort(self, jobs)

    patch.setattr(QueueOrder, "_sort_by_cache", without)


def _passes_end_before_their_loads(patch: pytest.MonkeyPatch) -> None:
    load = HiCache.load
    patch.setattr(HiCache, "load", lambda self, now: load(self, now) * 0)


def _computed_pages_stay_with_the_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixGroup, "_restore", lambda self, request, path, at, last, priority, host: at)


def _writes_are_announced_at_once(patch: pytest.MonkeyPatch) -> None:
    write = HostPages._write

    def announced(self: HostPages, node: Node, extent: Extent, held: BlockTable, windows: list[Node]) -> None:
        write(self, node, extent, held, windows)
        self._announce(node)

    patch.setattr(HostPages, "_write", announced)


def _nobody_waits_for_what_is_written_back(patch: pytest.MonkeyPatch) -> None:
    write = HiCache._write_now

    def at_once(self: HiCache) -> None:
        before = self.clock
        write(self)
        self.clock = before

    patch.setattr(HiCache, "_write_now", at_once)


def _the_host_keeps_what_the_device_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostPages, "_reclaim", lambda self, pages: None)


def _what_was_written_back_is_last_to_be_given_up(patch: pytest.MonkeyPatch) -> None:
    note = HostPages.note

    def again(self: HostPages, node: Node) -> None:
        self._duplicates.pop(node, None)
        note(self, node)

    patch.setattr(HostPages, "note", again)


def _write_back_counts_hits(patch: pytest.MonkeyPatch) -> None:
    along = RadixOrder.insert_along

    def counting(self: RadixOrder, extent: Extent, priority: int, counts: bool, used: bool = True) -> None:
        self.counts_hits = True
        along(self, extent, priority, counts, used)

    patch.setattr(RadixOrder, "insert_along", counting)


def _write_back_copies_what_the_host_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostPages, "_demote", lambda self, node: self.pool.discard(self.below(node).copies[0]))


def _windows_on_the_host_are_not_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowPages, "usable_below", WindowPages.usable)


def _the_host_gets_no_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowPages, "unwritten", lambda self, node: [])


def _windows_go_to_the_host_with_their_pages_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostPages, "insert_ended", lambda self, node: None)


def _windows_on_the_host_are_evicted_latest_first(patch: pytest.MonkeyPatch) -> None:
    def earliest(windows: HostWindows, part: NodePart) -> None:
        part.present = True
        windows.line.link(part, windows.line.ends.newer)

    patch.setattr(HostWindows, "lost", earliest)


def _loaded_windows_take_no_room(patch: pytest.MonkeyPatch) -> None:
    longest = WindowBudget.longest
    patch.setattr(WindowBudget, "longest", lambda self, left, answer, hit, windows: longest(self, left, answer, hit, 0))


def _whole_windows_are_written_twice(patch: pytest.MonkeyPatch) -> None:
    split = HostWindows.split
    patch.setattr(HostWindows, "split", lambda self, front, later, extent: split(self, later, front, extent))


def _any_prefix_has_a_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "usable", lambda self, nodes: len(nodes))


def _states_are_evicted_first_in_first_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "use", lambda self, node: None)


def _inserts_copy_no_state(patch: pytest.MonkeyPatch) -> None:
    def give_own(self: RadixGroup, held: Held, states: StateSlots, *, finished: bool) -> None:
        if held.slots:
            held.slots -= 1
        else:
            states.free -= 1

    patch.setattr(RadixGroup, "_fork_state", give_own)


def _leaves_keep_their_pages_without_states(patch: pytest.MonkeyPatch) -> None:
    def states_alone(self: TreeEviction, count: int) -> None:
        states = self.pool.states
        assert states is not None
        while states.free < count and (extent := states.first()) is not None:
            states.evict(extent)

    patch.setattr(TreeEviction, "make_state_room", states_alone)


def _splits_copy_states(patch: pytest.MonkeyPatch) -> None:
    split = RadixGroup._split

    def copying(self: RadixGroup, node: Node, position: int) -> Node:
        front = split(self, node, position)
        if self.pool.states is not None and self.pool.states.free:
            self.pool.states.free -= 1
            self.pool.states.give(front.copies[0])
        return front

    patch.setattr(RadixGroup, "_split", copying)


def _branches_get_no_state(patch: pytest.MonkeyPatch) -> None:
    in_prompt = StateTracking.in_prompt
    patch.setattr(StateTracking, "in_prompt", lambda self, past, new, branch: in_prompt(self, past, new, 0))


def _states_of_mixed_passes_are_kept(patch: pytest.MonkeyPatch) -> None:
    in_answer = StateTracking.in_answer
    patch.setattr(StateTracking, "in_answer", lambda self, prompt, tokens, missed: in_answer(self, prompt, tokens, []))


def _answers_have_no_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateTracking, "in_answer", lambda self, prompt, tokens, missed: 0)


def _slots_are_reserved_for_one_pass(patch: pytest.MonkeyPatch) -> None:
    make = ReservedDrafts.__init__

    def half(self: ReservedDrafts, *given: Any, width: int, reserve: int) -> None:
        make(self, *given, width=width, reserve=reserve // 2)

    patch.setattr(ReservedDrafts, "__init__", half)


def _eagle_caches_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixGroup, "chain_of", lambda self, request: request.chain)


def _accepted_tokens_beyond_the_end_are_not_cached(patch: pytest.MonkeyPatch) -> None:
    verify = ReservedDrafts.verify

    def capped(self: ReservedDrafts, job: Job, tokens: int) -> int:
        produced = verify(self, job, tokens)
        job.num_computed_tokens = min(job.num_computed_tokens, job.num_tokens - 1)
        return produced

    patch.setattr(ReservedDrafts, "verify", capped)


def _last_tokens_of_mixed_passes_are_cached(patch: pytest.MonkeyPatch) -> None:
    verify = ReservedDrafts.verify

    def committed(self: ReservedDrafts, job: Job, tokens: int) -> int:
        produced = verify(self, job, tokens)
        job.num_computed_tokens = max(job.num_computed_tokens, job.num_tokens - 1)
        return produced

    patch.setattr(ReservedDrafts, "verify", committed)


def _aborted_answers_end_at_their_limit(patch: pytest.MonkeyPatch) -> None:
    emit = Job.emit
    patch.setattr(Job, "emit", lambda self, count: emit(self, min(count, self.max_tokens - self.output)))


def _requests_about_to_end_are_drafted_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftSide, "_leave_ending", lambda self: False)


def _branches_of_drafts_share_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sglang_tree, "ceil_div", lambda tokens, page: 0)


def _refused_requests_keep_their_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_return_state", lambda self, hit: None)


def _windows_before_states_slide_away(patch: pytest.MonkeyPatch) -> None:
    slide = RadixGroup.slide
    patch.setattr(RadixGroup, "slide", lambda self, table, tokens, state=0: slide(self, table, tokens))


def _states_outlast_their_windows(patch: pytest.MonkeyPatch) -> None:
    def alone(self: TreeEviction, count: int) -> None:
        windows = self.pool.windows
        assert windows is not None
        while windows.free < count and (extent := windows.first()) is not None:
            assert extent.node is not None
            if extent.refs or extent.node.kids:
                windows.evict(extent)
            else:
                self.evict_leaf(extent)

    patch.setattr(TreeEviction, "make_window_room", alone)


def _states_need_no_window(patch: pytest.MonkeyPatch) -> None:
    usable = WindowPages.usable
    patch.setattr(WindowPages, "usable", lambda self, nodes: usable(self, nodes) or len(nodes))


def _states_beyond_answers_are_kept(patch: pytest.MonkeyPatch) -> None:
    note = DraftSide._note_state

    def forget(self: DraftSide, job: Job, accepted: int) -> None:
        note(self, job, accepted)
        held_of(job.tables[0]).cut = False

    patch.setattr(DraftSide, "_note_state", forget)


def _one_slot_holds_the_state_before(patch: pytest.MonkeyPatch) -> None:
    note = DraftSide._note_state

    def remember(self: DraftSide, job: Job, accepted: int) -> None:
        held = held_of(job.tables[0])
        before = held.kept
        note(self, job, accepted)
        if held.kept != before:
            held.kept = (held.kept[0], before[0])

    patch.setattr(DraftSide, "_note_state", remember)


def _second_slots_are_always_free(patch: pytest.MonkeyPatch) -> None:
    def write(self: DecodeSide, due: list[tuple[Job, int]]) -> None:
        self._writing = [(held_of(job.tables[0]), tokens) for job, tokens in due]

    patch.setattr(DecodeSide, "_write_states", write)


def _mixed_passes_keep_second_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSide, "_free_written", lambda self, written: None)


def _last_drafts_keep_their_states(patch: pytest.MonkeyPatch) -> None:
    note = DraftSide._note_lazily
    patch.setattr(
        DraftSide,
        "_note_lazily",
        lambda self, held, place, tokens, state, *, ends: note(self, held, place, tokens, state, ends=False),
    )


def _states_are_written_where_drafts_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftSide, "_may_write", lambda self, tokens: False)


@pytest.mark.source
@pytest.mark.parametrize(
    ("mutate", "families"),
    [
        (_no_page_to_spare, ["admit-p64", "admit-p16"]),
        (_only_a_chunk_must_fit, ["chunk-tight-p16", "chunk-tight-p64"]),
        (_less_look_ahead, ["outgrow-p16"]),
        (_splits_touch_nothing, ["radix-split"]),
        (_answers_stay_with_prompts, ["evict-priority-p1", "outgrow-p1"]),
        (_prompts_evict_what_they_need, ["evict-lru-p16"]),
        (_decodes_evict_what_they_need, ["evict-lru-p16"]),
        (_waiting_requests_touch_nothing, ["refresh"]),
        (_longest_answers_are_retracted, ["outgrow-p16"]),
        (_full_batches_are_tried_again, ["admit-p16"]),
        (_every_insert_is_a_hit, ["evict-lfu-p16", "evict-lfu-p1"]),
        (_idle_keeps_the_ratio, ["evict-lru-p1"]),
        (_tokens_in_flight_survive_retraction, ["overlap-outgrow-p16"]),
        (_mixed_batches_keep_their_order, ["mixed-p64", "mixed-tight-p1", "mixed-tight-p16"]),
        (_aborts_take_effect_at_once, ["abort-p16"]),
        (_aborted_chunks_go_on, ["abort-chunk-p64"]),
        (_aborts_with_overlap_are_forgotten, ["abort-overlap-p16"]),
        (_any_prefix_has_a_window, ["abort-swa"]),
        (_windows_slide_with_every_token, ["abort-swa"]),
        (_windows_are_not_locked, ["abort-swa"]),
        (_windows_are_evicted_first_in_first_out, ["swa-chunk-p16"]),
        (_lost_windows_stay_lost, ["abort-swa"]),
        (_prompts_need_no_window_pages, ["swa-scarce-p64"]),
        (_window_pages_are_promised_twice, ["swa-scarce-p64"]),
        (_answers_need_no_window, ["swa-wide"]),
        (_branches_are_not_inserted_first, ["abort-swa"]),
        (_windows_in_use_are_not_free_to_lock, ["swa-scarce-p16"]),
        (_short_prefixes_are_loaded, ["hicache-large-p1"]),
        (_pages_being_written_are_evicted, ["hicache-slow-p16"]),
        (_nodes_are_written_before_their_ancestors, ["hicache-small-p16"]),
        (_nodes_are_written_with_their_first_insert, ["hicache-selective-p1"]),
        (_matches_dont_use_the_host, ["hicache-p16"]),
        (_the_host_is_not_counted_as_cached, ["hicache-lpm"]),
        (_passes_end_before_their_loads, ["hicache-slow-p16"]),
        (_computed_pages_stay_with_the_request, ["hicache-chunk-p1"]),
        (_writes_are_announced_at_once, ["hicache-p16"]),
        (_nobody_waits_for_what_is_written_back, ["write-back-slow"]),
        (_the_host_keeps_what_the_device_has, ["write-back-small-p16"]),
        (_what_was_written_back_is_last_to_be_given_up, ["write-back-overlap-p16"]),
        (_write_back_counts_hits, ["write-back-lfu"]),
        (_write_back_copies_what_the_host_has, ["write-back-p64"]),
        (_windows_on_the_host_are_not_found, ["swa-hicache-p16"]),
        (_the_host_gets_no_windows, ["swa-hicache-p16"]),
        (_windows_go_to_the_host_with_their_pages_only, ["swa-hicache-p16"]),
        (_windows_on_the_host_are_evicted_latest_first, ["swa-hicache-p16"]),
        (_loaded_windows_take_no_room, ["swa-hicache-p16"]),
        (_whole_windows_are_written_twice, ["swa-hicache-p16"]),
        (_any_prefix_has_a_state, ["mamba"]),
        (_states_are_evicted_first_in_first_out, ["mamba-few"]),
        (_inserts_copy_no_state, ["mamba-few"]),
        (_leaves_keep_their_pages_without_states, ["mamba-few"]),
        (_splits_copy_states, ["mamba"]),
        (_refused_requests_keep_their_slots, ["mamba-lpm"]),
        (_branches_get_no_state, ["mamba-tracked-p16"]),
        (_states_of_mixed_passes_are_kept, ["mamba-tracked-mixed", "mamba-tracked-overlap-mixed"]),
        (_answers_have_no_states, ["mamba-tracked-p16"]),
        (_windows_before_states_slide_away, ["mamba-swa-tracked-few"]),
        (_states_outlast_their_windows, ["mamba-swa-tracked-p64"]),
        (_states_need_no_window, ["mamba-swa-eagle-overlap"]),
        (_states_beyond_answers_are_kept, ["mamba-eagle-abort"]),
        (_one_slot_holds_the_state_before, ["mamba-ngram-tracked"]),
        (_second_slots_are_always_free, ["mamba-lazy-few-p64"]),
        (_mixed_passes_keep_second_slots, ["mamba-lazy-mixed"]),
        (_last_drafts_keep_their_states, ["mamba-eagle-lazy-p16"]),
        (_states_are_written_where_drafts_end, ["mamba-eagle-lazy-abort"]),
        (_slots_are_reserved_for_one_pass, ["ngram-p16"]),
        (_eagle_caches_tokens, ["eagle-p64"]),
        (_accepted_tokens_beyond_the_end_are_not_cached, ["eagle-tree-p1", "eagle-p64"]),
        (_last_tokens_of_mixed_passes_are_cached, ["eagle-mixed-p16"]),
        (_aborted_answers_end_at_their_limit, ["eagle-abort"]),
        (_requests_about_to_end_are_drafted_for, ["eagle-overlap-p16"]),
        (_branches_of_drafts_share_pages, ["eagle-tree-p64"]),
    ],
)
def test_a_rule_that_is_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], families: list[str]
) -> None:
    mutate(monkeypatch)
    logs = [path for path in LOGS if path.name.split("@", maxsplit=1)[0] in families]
    assert len(logs) == len(families)
    assert any(_differs(path) for path in logs)


def _differs(path: Path) -> bool:
    try:
        return conform(path).difference is not None
    except LogError as bad:
        assert not isinstance(bad.__cause__, TypeError), "the mutant doesn't fit the code"
        return True
    except AssertionError:
        return True
