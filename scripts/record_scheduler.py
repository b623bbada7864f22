#!/usr/bin/env python3
"""Record what the scheduler of an installed vLLM decides, step by step, in virtual time, for ``kvyard conform`` to compare.

Run it with the Python of an environment that has vLLM (``make peers`` makes one). No GPU, no model: the real scheduler and
the real KV cache manager, a made-up output for every step, and a clock that moves by a formula. The loop around them is that
of vLLM's ``EngineCore.step`` and ``step_with_batch_queue``.

    record_scheduler.py --list
    record_scheduler.py --all OUT                      one log of every family
    record_scheduler.py --all OUT --seeds 5-9          five of every family
    record_scheduler.py OUT preempt@3 lora-tight@1     these logs

The format is described in tests/golden/scheduler/README.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from recorded_logs import Arguments, pass_ns, write_log
from scheduler_families import FAMILIES, workload
from scheduler_under_test import MODEL, SchedulerUnderTest, import_vllm

FORMAT = "scheduler-log/1"
LONGEST_LINE = 8192
"""The order of free blocks is left out for larger pools."""

Step = dict[str, Any]


class Recording:
    """One workload through one scheduler."""

    def __init__(
        self,
        settings: dict[str, Any],
        timing: dict[str, int],
        requests: list[dict[str, Any]],
        scheduler: SchedulerUnderTest,
    ) -> None:
        self._settings = settings
        self._timing = timing
        self._scheduler = scheduler
        self._requests = {request["request"]: request for request in requests}
        sent = [(r["arrival"], 0, index, r["request"]) for index, r in enumerate(requests)]
        sent += [(r["abort"], 1, index, r["request"]) for index, r in enumerate(requests) if r["abort"] is not None]
        self._inbox = deque(sorted(sent))
        """What clients send: when, whether they give up, a number to order by, and the request."""
        self._now = 0
        self._preempted: list[str] = []
        """By steps that computed nothing; to be written down with the next that does."""
        self._gone: list[str] = []
        self._loading: dict[str, int] = {}
        self._samples: dict[int, dict[str, int]] = {}
        """Of each step under way, who samples, and how many drafts of each are in it."""
        self.steps: list[Step] = []
        self.ends: dict[str, dict[str, Any]] = {
            name: {
                "end": name,
                "reason": "unfinished",
                "at": None,
                "first_token": None,
                "output": 0,
                "cached": None,
                "preemptions": 0,
            }
            for name in self._requests
        }

    def run(self) -> None:
        """From the first arrival to the last end."""
        if self._settings["async_scheduling"]:
            self._run_ahead()
        else:
            self._run_in_turn()

    # -- the loops of EngineCore ------------------------------------------------------------------------------------

    def _run_in_turn(self) -> None:
        """A step is scheduled when the one before it is over."""
        while True:
            self._receive()
            if not self._scheduler.has_requests():
                if not self._skip_idle():
                    return
                continue
            output, step, preempted = self._schedule()
            if step is not None:
                step["start"] = self._now
                self._now += step["ns"]
                self._finish(output, step, self._now)
                continue
            self._finish(output, None, self._now)
            if not preempted and self._scheduler.has_requests():
                if not self._skip_idle():
                    return
                self._report()

    def _run_ahead(self) -> None:
        """With a queue of two: a step is scheduled when the one before it starts."""
        queue: deque[tuple[Any, Step | None, int]] = deque()
        free_at = 0
        while True:
            self._receive()
            if self._scheduler.has_requests():
                output, step, preempted = self._schedule()
                start = max(self._now, free_at)
                if step is not None:
                    step["scheduled"], step["start"] = self._now, start
                    free_at = start + step["ns"]
                    queue.append((output, step, free_at))
                else:
                    queue.append((output, None, start))
                if len(queue) < 2 and (step is not None or self._scheduler.has_requests()):
                    if step is None and not preempted:
                        # Nothing can run and nothing is under way: only what clients send can change that.
                        self._finish(*queue.popleft())
                        if not self._skip_idle():
                            return
                    continue
            elif not queue:
                if not self._skip_idle():
                    return
                continue
            output, step, end = queue.popleft()
            self._now = max(self._now, end)
            self._finish(output, step, self._now)

    def _skip_idle(self) -> bool:
        """Go on to what clients send next, or to the end of a transfer; false if there is neither."""
        comes = [self._inbox[0][0]] if self._inbox else []
        landing = self._scheduler.next_transfer()
        if landing is not None:
            comes.append(landing)
        if not comes:
            return False
        self._now = max(self._now, min(comes))
        return True

    def _report(self) -> None:
        """Transfers that are over by now. vLLM's loop goes on with empty steps until there are such."""
        landing = self._scheduler.next_transfer()
        if landing is not None and landing <= self._now:
            self._scheduler.tell_time(self._now)
            self._scheduler.report()

    def _receive(self) -> None:
        """What clients have sent by now reaches the scheduler."""
        while self._inbox and self._inbox[0][0] <= self._now:
            _, gives_up, _, name = self._inbox.popleft()
            if gives_up:
                self._scheduler.abort(name)
            else:
                self._scheduler.add(self._requests[name])

    # -- a step -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[Any, Step | None, bool]:
        """vLLM's decision, what is written down of it (``None`` if it computes nothing), and whether it preempted anyone."""
        scheduler = self._scheduler
        self._note_ends(None, self._now)
        scheduler.tell_time(self._now)
        output = scheduler.schedule()
        preempted = scheduler.take_preempted()
        for name in preempted:
            self.ends[name]["preemptions"] += 1
        self._preempted += preempted
        self._loading |= scheduler.take_loading()
        tokens = dict(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        self._samples[id(output)] = {
            # Drafts that were made up to fill a step are never right.
            name: sum(token >= 0 for token in drafts.get(name, ()))
            for name in tokens
            if not scheduler.computes_prompt(name)
        }
        if not tokens:
            return output, None, bool(preempted)
        known = output.scheduled_cached_reqs
        computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        resumed = {name: computed[name] for name in known.req_ids if name in known.resumed_req_ids}
        new = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        computed |= new
        for name, hit in new.items():
            self.ends[name]["cached"] = hit
        context = sum(computed[name] + count for name, count in tokens.items())
        step: Step = {
            "step": len(self.steps),
            "start": None,
            "ns": pass_ns(self._timing, sum(tokens.values()), len(tokens), context),
            "tokens": tokens,
            **scheduler.state(with_line=self._settings["num_blocks"] <= LONGEST_LINE),
        }
        noted = {"preempted": self._preempted, "gone": self._gone, "loading": self._loading}
        for key, value in ({"new": new, "resumed": resumed} | noted).items():
            if value:
                step[key] = value
        self._preempted, self._gone, self._loading = [], [], {}
        self.steps.append(step)
        return output, step, bool(preempted)

    def _finish(self, output: Any, step: Step | None, end: int) -> None:
        """The model has run: first what was given up meanwhile goes, then its output is looked at.

        vLLM frees what was given up in one step in the order of a set, which differs from process to process; here it is
        in the order in which it was sent.
        """
        scheduler = self._scheduler
        scheduler.tell_time(end)
        if step is not None:
            for when, gives_up, _, name in self._inbox:
                if when >= end:
                    break
                if gives_up:
                    scheduler.abort(name)
        before = scheduler.outputs()
        after = scheduler.follow(before)
        sampled: dict[str, list[int]] = {name: [] for name in output.num_scheduled_tokens}
        for name, drafts in self._samples.pop(id(output)).items():
            if name in before:
                sampled[name] = self._sample(name, before[name], drafts)
        scheduler.update(output, sampled)
        for name, count in after().items():
            if count > before[name]:
                self.ends[name]["output"] = count
                if self.ends[name]["first_token"] is None:
                    self.ends[name]["first_token"] = end
        self._note_ends(step, end)

    def _sample(self, name: str, position: int, drafts: int) -> list[int]:
        """What the model makes of a request's next tokens: one more than drafts hold."""
        request = self._requests[name]
        holds = request.get("holds", [0])
        first = request["output"][0] + position
        return list(range(first, first + min(drafts, holds[position % len(holds)]) + 1))

    def _note_ends(self, step: Step | None, now: int) -> None:
        for name, reason in self._scheduler.take_freed():
            self.ends[name].update(reason=reason, at=now)
            if step is None:
                self._gone.append(name)
            else:
                step.setdefault("finished" if reason == "length" else "aborted", []).append(name)


def record(name: str, seed: int, out: Path, model: str, version: str) -> str:
    """Write one log; returns what there is to say about it."""
    settings, timing, requests = workload(name, seed)
    recording = Recording(settings, timing, requests, SchedulerUnderTest(settings, model))
    recording.run()
    header = {
        "format": FORMAT,
        "vllm": version,
        "family": name,
        "seed": seed,
        "config": settings,
        "timing": timing,
    }
    lines = [header, *requests, *recording.steps, *recording.ends.values()]
    file = write_log(out, f"{name}@{seed}", lines)
    preempted = sum(len(step.get("preempted", ())) for step in recording.steps)
    aborted = sum(end["reason"] == "aborted" for end in recording.ends.values())
    left = sum(end["reason"] == "unfinished" for end in recording.ends.values())
    summary = (
        f"{file}: {len(requests)} requests, {len(recording.steps)} steps, {preempted} preempted, {aborted} aborted"
    )
    return summary + (f", {left} UNFINISHED" if left else "")


def main() -> int:
    parsed = Arguments(__doc__ or "", FAMILIES).parse()
    if parsed is None:
        return 0
    args, jobs = parsed
    version = import_vllm()
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        for name, seed in jobs:
            print(record(name, seed, args.out, model, version), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
