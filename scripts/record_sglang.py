#!/usr/bin/env python3
"""Record what the scheduler of an installed SGLang decides, batch by batch, in virtual time, for ``kvyard conform`` to compare.

Run it with the Python of an environment that has SGLang (tests/golden/sglang/README.md says how to make one). No GPU and no
model: the real scheduler, schedule policy, prefill adder, radix tree, allocators and result processing, made-up tokens for
every batch, and a clock that moves by a formula. ``kvyard.sglang.under_test`` names every part that is real and every stand-in.
The loops are those of ``Scheduler.event_loop_normal`` and ``event_loop_overlap``.

    record_sglang.py --list
    record_sglang.py --all OUT                      one log of every family
    record_sglang.py --all OUT --seeds 5-9          five of every family
    record_sglang.py OUT --family retract-p16 --seed 3
    record_sglang.py OUT retract-p16@3 lpm@1        these logs
    record_sglang.py OUT --admission 8000           answers of the prefill adder in random states

The format is described in tests/golden/sglang/README.md.
"""

from __future__ import annotations

import random
import sys
import traceback
import zlib
from collections import deque
from pathlib import Path
from typing import Any

from recorded_logs import Arguments, pass_ns, write_log
from sglang_families import FAMILIES, admission_state, workload

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # run by SGLang's Python, which has no kvyard
from kvyard.sglang.absent import import_sglang
from kvyard.sglang.adder import admit
from kvyard.sglang.storage import StorageFolder
from kvyard.sglang.under_test import SglangUnderTest

FORMAT = "sglang-log/1"
TIERS = {"GPU": "device", "CPU_PINNED": "host", "DISK": "storage"}

Step = dict[str, Any]


class NotRecorded(Exception):
    """SGLang did something that no log can state."""


class EventNumbers:
    """Events with block hashes replaced by numbers in order of first appearance, so that logs don't depend on the hash."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def write(self, events: list[Any]) -> list[list[Any]]:
        """Each event as ``["stored", tier, parent, numbers, CRC-32 of the tokens]`` or ``["removed", tier, numbers]``."""
        written: list[list[Any]] = []
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                parent = None if event.parent_block_hash is None else self._number(event.parent_block_hash)
                tokens = ",".join(map(str, _raw(event.token_ids)))
                numbers = self._runs(event.block_hashes)
                written.append(["stored", _tier(event), parent, numbers, zlib.crc32(tokens.encode())])
            elif kind == "BlockRemoved":
                written.append(["removed", _tier(event), self._runs(event.block_hashes)])
        return written

    def _number(self, block_hash: int) -> int:
        return self._numbers.setdefault(block_hash, len(self._numbers))

    def _runs(self, hashes: list[int]) -> list[list[int]]:
        runs: list[list[int]] = []
        for number in map(self._number, hashes):
            if runs and sum(runs[-1]) == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        return runs


def _raw(tokens: list[Any]) -> list[int]:
    """The tokens of an event, which a drafter with hidden states has as pairs of neighbours."""
    return [*(first for first, _ in tokens), tokens[-1][1]] if tokens and isinstance(tokens[0], tuple) else tokens


def _tier(event: Any) -> str:
    return TIERS[getattr(event.medium, "value", event.medium)]


class Recording:
    """One workload through one scheduler."""

    def __init__(
        self,
        settings: dict[str, Any],
        timing: dict[str, int],
        requests: list[dict[str, Any]],
        scheduler: SglangUnderTest,
    ) -> None:
        self._settings = settings
        self._drafts = settings.get("speculative")
        self._timing = timing
        self._scheduler = scheduler
        self._requests = {request["request"]: request for request in requests}
        sent = [(request["arrival"], 0, index, request) for index, request in enumerate(requests)]
        sent += [(request["abort"], 1, index, request) for index, request in enumerate(requests) if "abort" in request]
        self._inbox = deque(sorted(sent, key=lambda message: message[:3]))
        self._time = 0
        self._numbers = EventNumbers()
        self._requeued: list[tuple[str, str]] = []
        self._sent_back = False
        """True if requests went back to the queue with the latest decision."""
        self._past: dict[str, int] = {}
        """Tokens of each request that have keys and values, as far as steps computed them."""
        self.steps: list[Step] = []
        self.ends = {
            name: {"end": name, "at": None, "first_token": None, "output": 0, "cached": None, "retractions": 0}
            for name in self._requests
        }
        self.rest: list[list[Any]] = []
        """Events after the last step was decided on."""

    @property
    def _now(self) -> int:
        copies = self._scheduler.copies
        return copies.now if copies is not None else self._time

    @_now.setter
    def _now(self, now: int) -> None:
        self._time = now
        if self._scheduler.copies is not None:
            self._scheduler.copies.now = now

    def run(self) -> None:
        """From the first arrival to the last end."""
        random.seed(self._settings["seed"])
        if self._settings["overlap"]:
            self._run_overlapped()
        else:
            self._run_in_turn()
        self.rest = self._numbers.write(self._scheduler.take_events())

    # -- the loops of Scheduler -------------------------------------------------------------------------------------

    def _run_in_turn(self) -> None:
        scheduler = self._scheduler
        while True:
            self._receive()
            decided = self._now
            batch, step = self._decide()
            if batch is not None:
                step["start"] = self._now
                if self._now > decided:
                    step["scheduled"] = decided
                self._wait_for_loads(batch, step)
                self._now += step["ns"]
                self._process(batch, batch, step, self._now)
            else:
                scheduler.reset_if_idle()
                # The last request of the decode batch may just have been given up, which makes room for the prompt under way.
                cut = scheduler.of_sglang.chunked_req is not None and scheduler.of_sglang.last_batch is not None
                if not cut and not self._skip_idle():
                    return
            scheduler.of_sglang.last_batch = batch

    def _run_overlapped(self) -> None:
        """A batch is decided on when the one before it starts, which is when the result of the one before that is known."""
        scheduler = self._scheduler
        queue = scheduler.of_sglang.result_queue
        running: deque[tuple[Any, Any, Step, int]] = deque()
        free_at = 0
        while True:
            self._receive()
            decided = self._now
            batch, step = self._decide()
            if batch is not None:
                start = max(self._now, free_at)
                step["scheduled"], step["start"] = decided, start
                self._wait_for_loads(batch, step)
                free_at = start + step["ns"]
                running.append((batch, batch.copy(), step, free_at))
                queue.append((running[-1][1], None))
            if scheduler.of_sglang.last_batch is not None:
                done, copy, done_step, end = running.popleft()
                queue.popleft()
                if self._now > end:
                    # The decision waited for copies, and nobody looked at the result before that.
                    done_step["ns"] = self._now - done_step["start"]
                self._now = max(self._now, end)
                self._process(done, copy, done_step, self._now)
            elif batch is None:
                scheduler.reset_if_idle()
                if not self._skip_idle():
                    return
            scheduler.of_sglang.last_batch = batch

    def _wait_for_loads(self, batch: Any, step: Step) -> None:
        """A batch doesn't end before what it loads from the host has come: its layers wait for theirs."""
        queue = self._scheduler.loading()
        if queue and getattr(batch, "hicache_consumer_index", -1) >= 0:
            step["ns"] = max(step["ns"], queue[-1].finish_event.end - step["start"])

    def _skip_idle(self) -> bool:
        """Go on to the next arrival or end of a copy; false if there is none. Where requests have just gone back to the queue,
        they are tried at once.
        """
        if self._sent_back:
            return True
        waits = [self._inbox[0][0]] if self._inbox else []
        for waited_for in (self._scheduler.copies, self._scheduler.storage):
            if waited_for is not None and (end := waited_for.next_end()) is not None:
                waits.append(end)
        if not waits:
            return False
        self._now = max(self._now, min(waits))
        return True

    def _receive(self) -> None:
        while self._inbox and self._inbox[0][0] <= self._now:
            _, aborts, _, request = self._inbox.popleft()
            if not aborts:
                self._scheduler.add(request)
            elif self._scheduler.abort(request["request"]):
                self.ends[request["request"]]["at"] = self._now

    # -- a batch ----------------------------------------------------------------------------------------------------

    def _decide(self) -> tuple[Any, Step]:
        """SGLang's next batch, if there is one, and a description of it."""
        scheduler = self._scheduler
        if scheduler.storage is not None:
            scheduler.storage.advance()
        batch = scheduler.next_batch()
        requeued = scheduler.take_requeued()
        self._sent_back = bool(requeued)
        for _, name in requeued:
            self.ends[name]["retractions"] += 1
        self._requeued = [*self._requeued, *requeued]
        if batch is None:
            return None, {}
        decode = batch.forward_mode.is_decode()
        width = self._drafts["num_draft_tokens"] if self._drafts else 1
        lengths = [width] * len(batch.reqs) if decode else list(batch.extend_lens)
        prefixes = [] if decode else list(batch.prefix_lens)
        tokens = {req.rid: count for req, count in zip(batch.reqs, lengths, strict=True)}
        extending = 0 if decode else len(batch.reqs) - len(batch.decoding_reqs or ())
        past: dict[str, int] = {}
        cut = [req.rid for req in batch.reqs[:extending] if req.extend_end < len(req.full_untruncated_fill_ids)]
        if len(cut) > 1:
            # Of two prompts that are cut to fit the window pool, SGLang forgets to go on with the first.
            raise NotRecorded(f"SGLang cut two prompts in one batch, {cut}: choose another seed")
        for index, req in enumerate(batch.reqs):
            if index < extending:
                past[req.rid] = self._past[req.rid] = prefixes[index]
                if self.ends[req.rid]["cached"] is None:
                    self.ends[req.rid]["cached"] = prefixes[index]
        context = 0
        for index, (req, count) in enumerate(zip(batch.reqs, lengths, strict=True)):
            if self._drafts and index >= extending:
                # How many of them will have been accepted isn't known yet.
                self._past[req.rid] = req.kv.kv_committed_len
            self._past[req.rid] += count
            context += self._past[req.rid]
        counted = len(lengths) if decode else sum(lengths)
        step: Step = {
            "step": len(self.steps),
            "start": None,
            "ns": pass_ns(self._timing, counted, len(tokens), context),
            "mode": batch.forward_mode.name.lower(),
            "tokens": tokens,
            **scheduler.state(),
        }
        for key, value in (
            ("past", past),
            ("retracted", [name for kind, name in self._requeued if kind == "retracted"]),
            ("preempted", [name for kind, name in self._requeued if kind == "preempted"]),
            ("events", self._numbers.write(scheduler.take_events())),
        ):
            if value:
                step[key] = value
        self._requeued = []
        self.steps.append(step)
        return batch, step

    def _process(self, batch: Any, copy: Any, step: Step, end: int) -> None:
        """The model has run a batch: every request that is not in the middle of its prompt has a token."""
        before = {req.rid: len(req.output_ids) for req in copy.reqs}
        verifies = self._drafts is not None and copy.forward_mode.is_decode()
        sampled: list[list[int]] = []
        for req in copy.reqs:
            request, known = self._requests[req.rid], before[req.rid]
            holds = request["holds"][known % len(request["holds"])] if verifies else 0
            first = request["output"][0] + known
            sampled.append(list(range(first, first + 1 + holds)))
        finished = {req.rid for req in copy.reqs if req.finished()}
        self._scheduler.process(copy, self._scheduler.result(sampled, verifies=verifies))
        for req in copy.reqs:
            note = self.ends[req.rid]
            if len(req.output_ids) > before[req.rid]:
                note["output"] = len(req.output_ids_through_stop)
                if note["first_token"] is None:
                    note["first_token"] = end
            if req.finished() and req.rid not in finished:
                note["at"] = end
                step.setdefault("finished", []).append(req.rid)


def record(name: str, seed: int, out: Path, version: str) -> str:
    """Write one log; returns a line about it."""
    settings, timing, requests = workload(name, seed)
    files = StorageFolder()
    try:
        recording = Recording(settings, timing, requests, SglangUnderTest(settings))
        recording.run()
    finally:
        files.remove()
    header = {
        "format": FORMAT,
        "sglang": version,
        "family": name,
        "seed": seed,
        "config": settings,
        "timing": timing,
    }
    lines = [header, *requests, *recording.steps, *recording.ends.values(), {"rest": recording.rest}]
    file = write_log(out, f"{name}@{seed}", lines)
    retracted = sum(end["retractions"] for end in recording.ends.values())
    removed = sum(
        count
        for step in recording.steps
        for event in step.get("events", ())
        if event[0] == "removed"
        for _, count in event[-1]
    )
    aborted = sum("abort" in request for request in requests)
    left = sum(end["at"] is None for end in recording.ends.values())
    line = f"{file}: {len(requests)} requests, {len(recording.steps)} steps, {retracted} retracted, {removed} evicted"
    line += f", {aborted} to abort" if aborted else ""
    return line + (f", {left} UNFINISHED" if left else "")


def record_admission(states: int, out: Path, version: str) -> str:
    """Write the answers of ``PrefillAdder`` in random states, which ``admission_state`` makes from their numbers."""
    lines = [{"format": "sglang-admission/1", "sglang": version}]
    lines += [{"state": seed, "answers": admit(admission_state(seed))} for seed in range(states)]
    return f"{write_log(out, 'admission', lines)}: {states} states"


def main() -> int:
    arguments = Arguments(__doc__ or "", FAMILIES)
    arguments.parser.add_argument(
        "--admission", type=int, metavar="STATES", help="answers of the prefill adder in random states"
    )
    parsed = arguments.parse(instead="admission")
    if parsed is None:
        return 0
    args, jobs = parsed
    version = import_sglang()
    if args.admission:
        SglangUnderTest(workload("radix-p16", 1)[0])  # publishes a configuration
        print(record_admission(args.admission, args.out, version), flush=True)
    failed = 0
    for name, seed in jobs:
        try:
            print(record(name, seed, args.out, version), flush=True)
        except Exception as error:
            if not isinstance(error, NotRecorded):
                traceback.print_exc()
            print(f"{name}@{seed}: NOT RECORDED: {error!r}", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
