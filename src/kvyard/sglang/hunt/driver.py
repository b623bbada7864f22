"""Drives the scheduler of the installed SGLang through one case, without a model, and says what went wrong.

Time is counted in batches. The model is a memory that remembers which text was written to which slot of the pool, so that a
slot which holds another text than its reader expects is noticed. This file, ``storms`` and ``under_test`` use nothing else
of kvyard: reproducers are made from them.
"""

from __future__ import annotations

import random
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from kvyard.lab.hunt.storms import Storms
from kvyard.sglang.absent import import_sglang
from kvyard.sglang.under_test import SglangUnderTest

STUCK_AFTER = 64
"""Decisions in a row without a batch, with nothing left to wait for."""
MOST_STEPS = 5_000
BEYOND = 64
"""Tokens after the end of an answer that an overlapped batch may compute."""

Case = dict[str, Any]
Finding = dict[str, Any]


class Texts:
    """Text of each position of a request: a number for a token and all that came before it."""

    def __init__(self, case: Case) -> None:
        self.requests = {request["request"]: request for request in case["requests"]}
        self.of: dict[str, list[int]] = {}
        known: dict[tuple[object, int], int] = {}
        for name, request in self.requests.items():
            first, count = request["output"]
            tokens = [token for low, length in request["prompt"] for token in range(low, low + length)]
            tokens += range(first, first + count + BEYOND)
            text: object = f"salt {request.get('salt')}"
            self.of[name] = []
            for token in tokens:
                text = known.setdefault((text, token), len(known))
                self.of[name].append(text)


class Memory:
    """The text in each slot of the full pool, and of the window pool by the slot that the allocator maps it to."""

    def __init__(self, allocator: Any, window: int | None) -> None:
        self._allocator = allocator
        self._window = window
        self._full: dict[int, int] = {}
        self._swa: dict[int, int] = {}

    def read(self, slots: list[int], texts: list[int]) -> str | None:
        """Return the first position whose slot attention reads for the next token, and that holds another text."""
        for at, slot in enumerate(slots):
            if self._full.get(slot) != texts[at]:
                return f"token {at}: slot {slot} holds another text"
        if self._window is None:
            return None
        first = max(0, len(slots) - self._window + 1)
        for at, slot in zip(range(first, len(slots)), self._mapped(slots[first:]), strict=True):
            if slot <= 0:
                return f"token {at}: it has left the window pool"
            if self._swa.get(slot) != texts[at]:
                return f"token {at}: slot {slot} of the window pool holds another text"
        return None

    def write(self, slots: list[int], texts: list[int]) -> None:
        self._full.update(zip(slots, texts, strict=True))
        if self._window is not None:
            self._swa.update(zip(self._mapped(slots), texts, strict=True))

    def _mapped(self, slots: list[int]) -> list[int]:
        mapping = self._allocator.full_to_swa_index_mapping
        return [int(slot) for slot in mapping[slots]]


class World:
    """One run: SGLang's scheduler, the clients and the memory."""

    def __init__(self, case: Case) -> None:
        self._case = case
        settings = case["settings"]
        random.seed(settings["seed"])
        self._sglang = SglangUnderTest(settings)
        self._scheduler = self._sglang.of_sglang
        self._texts = Texts(case)
        self._memory = Memory(self._scheduler.token_to_kv_pool_allocator, settings.get("sliding_window_size"))
        self._sizes = self._free_sizes()
        self._now = 0
        self._left = set(self._texts.requests)
        """Requests that have not ended."""
        self._reqs: dict[str, Any] = {}
        """SGLang's requests that have arrived, by name."""
        self._storms = Storms()
        self.computed = 0
        self.longest_idle = 0

    # -- the loops of Scheduler ---------------------------------------------------------------------------------------

    def run(self) -> Finding | None:
        """From the first arrival until everything has ended; returns what went wrong."""
        requests = self._texts.requests.values()
        inbox = deque(
            sorted(
                [(request["at"], 0, request["request"]) for request in requests]
                + [(request["abort"], 1, request["request"]) for request in requests if "abort" in request]
            )
        )
        in_flight: deque[Any] = deque()
        overlap = self._case["settings"]["overlap"]
        idle = 0
        for self._now in range(MOST_STEPS):
            while inbox and inbox[0][0] <= self._now:
                _, aborts, name = inbox.popleft()
                self._receive(name, bool(aborts))
            batch = self._sglang.next_batch()
            for _, name in self._sglang.take_requeued():
                self._storms.preempt(name)
            if batch is not None:
                wrong = self._execute(batch)
                if wrong is not None:
                    return {"kind": "wrong text", "detail": wrong}
                in_flight.append(batch.copy() if overlap else batch)
                if overlap:
                    self._scheduler.result_queue.append((in_flight[-1], None))
            if in_flight and (not overlap or self._scheduler.last_batch is not None):
                if overlap:
                    self._scheduler.result_queue.popleft()
                self._process(in_flight.popleft())
            elif batch is None:
                self._sglang.reset_if_idle()
            self._scheduler.last_batch = batch
            # Also of those that SGLang gives up by itself, as it does where a retraction doesn't make enough room.
            self._left -= {name for name in self._left if name in self._reqs and self._reqs[name].finished()}
            self._sglang.take_events()
            if not self._left and not inbox and not in_flight and batch is None:
                return self._leak()
            if (storm := self._storms.finding()) is not None:
                return storm
            idle = 0 if batch is not None or in_flight or inbox else idle + 1
            self.longest_idle = max(self.longest_idle, idle)
            if idle >= STUCK_AFTER:
                return self._stuck()
        return {"kind": "endless", "detail": f"not over after {MOST_STEPS} batches"}

    def _receive(self, name: str, aborts: bool) -> None:
        if not aborts:
            request = self._texts.requests[name]
            self._reqs[name] = self._sglang.add({"ignore_eos": True, "priority": None, **request})
        elif name in self._left and self._sglang.abort(name):
            self._left.discard(name)

    # -- a batch ------------------------------------------------------------------------------------------------------

    def _execute(self, batch: Any) -> str | None:
        """Read what the batch's requests have in the pool, and write what it computes; returns what is wrong."""
        decode = batch.forward_mode.is_decode()
        lengths = [1] * len(batch.reqs) if decode else list(batch.extend_lens)
        starts = [int(length) - 1 for length in batch.seq_lens_cpu] if decode else list(batch.prefix_lens)
        table = self._scheduler.req_to_token_pool.req_to_token
        rows = batch.req_pool_indices.tolist()
        for req, row, start, length in zip(batch.reqs, rows, starts, lengths, strict=True):
            self.computed += length
            texts = self._texts.of[req.rid]
            slots = table[row, : start + length].tolist()
            if len(set(slots)) < len(slots):
                return f"{req.rid}: one slot stands for two of its tokens"
            wrong = self._memory.read(slots[:start], texts)
            if wrong is not None and not req.finished():
                return f"{req.rid}, {start} tokens computed before: {wrong}"
            self._memory.write(slots[start:], texts[start : start + length])
            self._storms.compute(req.rid, start + length)
        return None

    def _process(self, batch: Any) -> None:
        """The model has run a batch: every request that isn't in the middle of its prompt has a token."""
        sampled = [self._texts.requests[req.rid]["output"][0] + len(req.output_ids) for req in batch.reqs]
        self._sglang.process(batch, self._sglang.result([[token] for token in sampled]))

    # -- what can go wrong --------------------------------------------------------------------------------------------

    def _stuck(self) -> Finding:
        scheduler = self._scheduler
        waiting = {req.rid for req in scheduler.waiting_queue}
        running = {req.rid for req in scheduler.running_batch.reqs}
        chunked = {scheduler.chunked_req.rid} if scheduler.chunked_req is not None else set()
        lost = sorted(self._left - waiting - running - chunked)
        if lost:
            return {"kind": "lost", "detail": f"{', '.join(lost)} neither waits nor runs, and never ended"}
        state = {name: value for name, value in self._sglang.state().items() if name != "ratio"}
        held = f"waiting {sorted(waiting)}, running {sorted(running)}, in the middle of its prompt {sorted(chunked)}"
        return {"kind": "stuck", "detail": f"{STUCK_AFTER} decisions without a batch; {held}; pages: {state}"}

    def _free_sizes(self) -> dict[str, int]:
        """Return tokens that are free or could be, by pool, and free rows of requests."""
        allocator, tree = self._scheduler.token_to_kv_pool_allocator, self._scheduler.tree_cache
        found = {"rows": self._scheduler.req_to_token_pool.available_size()}
        if self._scheduler.is_hybrid_swa:
            found["full"] = allocator.full_available_size() + tree.full_evictable_size()
            found["window"] = allocator.swa_available_size() + tree.swa_evictable_size()
        else:
            found["full"] = allocator.available_size() + tree.full_evictable_size()
        return found

    def _leak(self) -> Finding | None:
        now = self._free_sizes()
        missing = {name: size - now[name] for name, size in self._sizes.items() if now[name] != size}
        if not missing:
            return None
        said = ", ".join(f"{count} of {self._sizes[name]} ({name})" for name, count in missing.items())
        return {"kind": "leak", "detail": f"after the end of all requests are missing: {said}"}

    def pressure(self) -> float:
        """Return the nearness of the run to trouble: retractions, tokens computed again, decisions without a batch."""
        requests = self._texts.requests.values()
        tokens = sum(sum(count for _, count in each["prompt"]) + each["output"][1] for each in requests)
        return float(self._storms.preemptions + self.computed / max(1, tokens) + self.longest_idle / 8)


def run(case: Case) -> tuple[Finding | None, float]:
    """Run a case: what went wrong, and how near it came to trouble.

    What SGLang raises while it schedules is a finding; that it refuses a request or the settings of a case isn't.
    """
    try:
        world = World(case)
    except (ValueError, AssertionError):
        return None, 0.0
    try:
        finding = world.run()
    except Exception as raised:
        frame = traceback.extract_tb(raised.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        if frame.name == "add":
            return None, 0.0  # it clips the answer: the case asks for more than the pool has room for
        lines = str(raised).strip().splitlines()
        finding = {"kind": "crash", "detail": f"{type(raised).__name__} at {place}: {lines[0] if lines else ''}"}
    return finding, world.pressure()


def import_engine() -> str:
    """Import SGLang quietly, which takes 10 to 30 s; returns its version. Raises ``ImportError`` if there is none."""
    version = import_sglang()
    import torch

    torch.set_num_threads(1)  # tensors are tiny: threads would wait for each other
    return version
