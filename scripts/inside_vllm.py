#!/usr/bin/env python3
"""Serve the same requests from a real vLLM with its own KV cache manager and with kvyard's, and compare all that comes out.

Run it with the Python of an environment that has vLLM 0.32 (``make peers ARGS=vllm`` makes one), kvyard on its path:

    PYTHONPATH=src build/peers/vllm/bin/python scripts/inside_vllm.py                     both models, 1,000 requests each
    PYTHONPATH=src build/peers/vllm/bin/python scripts/inside_vllm.py --mutants           and broken managers, which must show

One engine per model, in this process, on CPU, with random weights, at temperature 0. Requests are added at fixed step numbers,
so that no clock decides. The pool is small: blocks are evicted, requests preempted, long prompts computed in chunks, prefixes
shared. vLLM goes first, twice: what differs between its own two runs can't be asked of anyone else. Each further run gets a
scheduler of its own over the same engine; kvyard's is the one that ``--scheduler-cls kvyard.vllm.Scheduler`` has made. The
last is vLLM's own again, with the recorder: it must change nothing, and shows what it costs.

Compared are the token ids of every answer, ``cached_tokens``, every KV event with the step it came in, and, more than a client
can see, the block ids of every step as the model runner got them. Exit status 1 if anything differs or a mutant passes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MODELS = {
    "dense": SHAPE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
    },
    "hybrid": SHAPE
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
    },
}
"""Tiny shapes: full attention only, and Gemma's mix of full attention and sliding windows of 128 tokens."""

BLOCKS = {"dense": 97, "hybrid": 193}
BLOCK_SIZE = 32
LONGEST = 1024


@dataclass
class Asked:
    """One request."""

    name: str
    step: int
    """When it is added."""
    prompt: list[int]
    output: int


@dataclass
class Seen:
    """All that came out of one run."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    """With the step they came in."""
    steps: list[str] = field(default_factory=list)
    """What the model runner was told: tokens and block ids."""
    micros: list[float] = field(default_factory=list)
    """Processor time of scheduling, a step each: deciding, and taking the output in."""
    preempted: int = 0
    chunked: int = 0
    error: str | None = None

    def differs(self, other: Seen) -> list[str]:
        """In what ``other`` isn't the same."""
        fields = []
        if self.error or other.error:
            fields.append("error")
        for what in ("tokens", "cached", "events", "steps"):
            if getattr(self, what) != getattr(other, what):
                fields.append(what)
        return fields

    def first_difference(self, other: Seen) -> str:
        """Where ``other`` parts from this one, in words."""
        if other.error:
            return other.error
        for what in ("steps", "events"):
            ours, theirs = getattr(self, what), getattr(other, what)
            for index, (mine, two) in enumerate(zip(ours, theirs, strict=False)):
                if mine != two:
                    return f"{what} {index}:\n    {mine!s:.300}\n    {two!s:.300}"
            if len(ours) != len(theirs):
                return f"{what}: {len(ours)} and {len(theirs)}"
        names = [name for name in self.tokens if self.tokens[name] != other.tokens.get(name)]
        return f"tokens of {len(names)} requests, the first of them {names[:1]}"


def workload(count: int, seed: int) -> list[Asked]:
    """Requests with shared prefixes, resends, long and short prompts, in bursts."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, SHAPE["vocab_size"]) for _ in range(length)]

    prefixes = [text(rng.randint(40, 320)) for _ in range(10)]
    asked: list[Asked] = []
    step = 0
    for number in range(count):
        step += rng.choice([0, 0, 0, 1, 1, 2, 2, 5])
        kind = rng.random()
        if kind < 0.12 and asked:
            prompt = rng.choice(asked[-60:]).prompt
        elif kind < 0.7:
            prefix = rng.choice(prefixes)
            prompt = prefix[: rng.choice([len(prefix), len(prefix), rng.randint(1, len(prefix))])] + text(
                rng.randint(1, 120)
            )
        else:
            prompt = text(rng.choice([rng.randint(1, 60), rng.randint(60, 300), rng.randint(300, 700)]))
        asked.append(Asked(f"r{number:04d}", step, prompt, rng.choice([1, rng.randint(2, 20), rng.randint(20, 80)])))
    return asked


def write_model(place: Path, config: dict[str, Any]) -> None:
    """A model whose answers depend on all of the prompt.

    vLLM's own random weights (``--load-format dummy``) are so small that attention hardly counts: an answer would survive a
    wrong block.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            weight.data.fill_(0.0 if "gemma" in config["model_type"] else 1.0)  # Gemma adds 1 to it
        else:
            gain = 2.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            weight.data.normal_(0.0, gain / weight.shape[-1] ** 0.5, generator=generator)
    model.save_pretrained(place)


class Collector:
    """In the place of vLLM's event publisher."""

    def __init__(self) -> None:
        self.step = 0
        self.seen: list[tuple[int, str]] = []

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            self.seen.append((self.step, f"{type(event).__name__} {fields}"))

    def shutdown(self) -> None:
        """Nothing to end."""


class Engine:
    """One real engine, whose scheduler is replaced for each run."""

    def __init__(self, model: str, folder: Path) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig

        write_model(folder / model, MODELS[model])
        self.llm = LLM(
            model=str(folder / model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            max_num_seqs=16,
            max_num_batched_tokens=192,
            num_gpu_blocks_override=BLOCKS[model],
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            scheduler_cls="kvyard.vllm.Scheduler",
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.flagged = self.core.scheduler
        """The scheduler that the flag made."""

    def _runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    def scheduler(self, scheduler_class: type) -> Any:
        """A new one over the same cache."""
        first = self.flagged
        return scheduler_class(
            vllm_config=self.core.vllm_config,
            kv_cache_config=first.kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            block_size=first.block_size,
            hash_block_size=first.hash_block_size,
            include_finished_set=False,
            log_stats=True,
        )

    def serve(self, scheduler: Any, asked: list[Asked], patience: int = 20_000) -> Seen:
        """Every request of ``asked``, to its end. What a broken scheduler raises is part of the result."""
        from vllm import SamplingParams

        seen = Seen()
        collector = scheduler.kv_event_publisher = Collector()
        self.core.scheduler = _timed(scheduler, seen)
        waiting = list(reversed(asked))
        step = 0
        try:
            while waiting or self.engine.has_unfinished_requests():
                while waiting and (waiting[-1].step <= step or not self.engine.has_unfinished_requests()):
                    request = waiting.pop()
                    how = SamplingParams(
                        temperature=0.0, max_tokens=request.output, min_tokens=request.output, ignore_eos=True
                    )
                    self.engine.add_request(request.name, {"prompt_token_ids": request.prompt}, how)
                collector.step = step
                for answer in self.engine.step():
                    if answer.finished:
                        seen.tokens[answer.request_id] = list(answer.outputs[0].token_ids)
                        seen.cached[answer.request_id] = answer.num_cached_tokens
                step += 1
                if step > patience:
                    raise TimeoutError(f"not done after {patience} steps")
        except Exception as problem:  # a broken manager may break anything
            seen.error = f"{type(problem).__name__}: {problem}"
            self._abandon(asked)
        else:
            while self.core.scheduler.has_requests():
                self.core.step()
        seen.events = collector.seen
        return seen

    def _abandon(self, asked: list[Asked]) -> None:
        """Have the model runner forget what a broken run left behind."""
        from vllm.v1.core.sched.scheduler import Scheduler

        names = {request.name for request in asked}
        self.engine.output_processor.abort_requests(names, internal=True)
        clean = self.scheduler(Scheduler)
        clean.finished_req_ids = {*self._runner().requests}
        self.core.scheduler = clean
        self.core.step()


def _timed(scheduler: Any, seen: Seen) -> Any:
    """Note what ``scheduler`` decides and how long it takes."""
    schedule, update = scheduler.schedule, scheduler.update_from_output
    pending = [0.0]

    def timed_schedule(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time_ns()
        output = schedule(*args, **kwargs)
        pending[0] = time.thread_time_ns() - began
        known = output.scheduled_cached_reqs
        # vLLM adds something random to each name.
        counts = {name.partition("-")[0]: count for name, count in output.num_scheduled_tokens.items()}
        new = [
            (data.req_id.partition("-")[0], data.num_computed_tokens, data.block_ids)
            for data in output.scheduled_new_reqs
        ]
        rows = zip(known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True)
        old = [(name.partition("-")[0], computed, ids) for name, computed, ids in rows]
        seen.steps.append(f"{counts} new {new} old {old}")
        seen.preempted += len(output.preempted_req_ids or ())
        whole = [len(data.prompt_token_ids) for data in output.scheduled_new_reqs]
        seen.chunked += sum(hit + counts[name] < size for (name, hit, _), size in zip(new, whole, strict=True))
        return output

    def timed_update(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time_ns()
        outputs = update(*args, **kwargs)
        seen.micros.append((pending[0] + time.thread_time_ns() - began) / 1000)
        return outputs

    scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update
    return scheduler


# -- broken managers ---------------------------------------------------------------------------------------------------


def too_long_hit(manager: Any) -> None:
    """A hit claims one block more than was found."""
    find = manager.get_computed_blocks

    def get_computed_blocks(request: Any) -> Any:
        blocks, tokens, boundary = find(request)
        longer = tokens + BLOCK_SIZE
        return (
            (blocks, longer, boundary) if tokens and longer < request.num_prompt_tokens else (blocks, tokens, boundary)
        )

    manager.get_computed_blocks = get_computed_blocks


def newest_first(manager: Any) -> None:
    """What was released last is evicted first."""
    order = manager.blocks.pool.order

    class NewestFirst(type(order)):
        __slots__ = ()
        push = type(order).push_front

    order.__class__ = NewestFirst


def block_in_use(manager: Any) -> None:
    """Now and then a new block is one that another request is using."""
    allocate = manager.allocate_slots
    count = [0]

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        from kvyard.vllm.block_lists import BlockIds

        got = allocate(request, *args, **kwargs)
        ids = got.get_block_ids(allow_none=True) if got is not None else None
        count[0] += ids is not None
        if ids is None or count[0] % 50 or kwargs.get("new_computed_blocks") is not None:
            return got
        for name in manager.blocks.requests:
            others = manager.get_block_ids(name)[0]
            if name != request.request_id and others and ids[0]:
                return BlockIds(([*ids[0][:-1], others[-1]], *ids[1:]))
        return got

    manager.allocate_slots = allocate_slots


def one_window_short(manager: Any) -> None:
    """Windowed groups give their oldest block back a block too early."""
    for group in manager.blocks.groups:
        rule = group.rule
        if rule.forgets:
            stale, fresh = rule.stale, rule.fresh_until
            rule.stale = lambda computed, stale=stale: stale(computed + BLOCK_SIZE)
            rule.fresh_until = lambda position, fresh=fresh: fresh(position) - BLOCK_SIZE


def registered_too_early(manager: Any) -> None:
    """A block is announced and found a block before it is computed."""
    coordinator = manager.blocks.coordinator
    register = coordinator.register
    coordinator.register = lambda request, tokens: register(
        request, min(tokens + BLOCK_SIZE, request.num_tokens, *(t.length * BLOCK_SIZE for t in request.tables))
    )


def silent_eviction(manager: Any) -> None:
    """Every tenth removal isn't announced."""
    events = manager._events
    removed, count = events.removed, [0]

    def sometimes(key: Any, group: int) -> None:
        count[0] += 1
        if count[0] % 10:
            removed(key, group)

    events.removed = sometimes


MUTANTS: dict[str, Callable[[Any], None]] = {
    "a hit of one block too many": too_long_hit,
    "evicts the newest first": newest_first,
    "hands out a block in use": block_in_use,
    "window a block too short": one_window_short,
    "registers a block too early": registered_too_early,
    "leaves removals unsaid": silent_eviction,
}
WINDOWS_ONLY = {"window a block too short"}
MUTANT_REQUESTS = 150
"""As many requests show each of them."""
SENSITIVITY_REQUESTS = 60


# -- the table -----------------------------------------------------------------------------------------------------------


def row(cells: list[str], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


WIDTHS = [8, 30, 9, 9, 9, 9, 9, 9, 9, 22]
TITLES = [
    "model",
    "manager",
    "requests",
    "steps",
    "cached",
    "evicted",
    "preempted",
    "chunked",
    "us/step",
    "against vLLM",
]


def line(model: str, name: str, seen: Seen, verdict: str) -> str:
    cells = [
        model,
        name,
        str(len(seen.tokens)),
        str(len(seen.micros)),
        str(sum(seen.cached.values())),
        str(sum("BlockRemoved" in event for _, event in seen.events)),
        str(seen.preempted),
        str(seen.chunked),
        f"{statistics.mean(seen.micros):.0f}" if seen.micros else "-",
        verdict,
    ]
    return row(cells, WIDTHS)


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Schedulers made in here record to ``folder``."""
    os.environ["KVYARD_RECORD"] = str(folder)
    try:
        yield
    finally:
        del os.environ["KVYARD_RECORD"]


def sensitivity(engine: Engine, asked: list[Asked], served: Seen, scheduler_class: type) -> float:
    """The share of answers that change where one token near the prompt's start does: what token identity can show."""
    longer = [request for request in asked if len(request.prompt) > 64 and request.output > 8][:SENSITIVITY_REQUESTS]
    changed = [
        Asked(one.name, one.step, [*one.prompt[:4], one.prompt[4] ^ 1, *one.prompt[5:]], one.output) for one in longer
    ]
    others = engine.serve(engine.scheduler(scheduler_class), changed).tokens
    return sum(others[request.name] != served.tokens[request.name] for request in longer) / len(longer)


def compare(
    model: str, folder: Path, count: int, seed: int, with_mutants: bool, turns: int
) -> tuple[int, dict[str, Any]]:
    """All runs of one model. Returns how many were not as they should be, and the figures."""
    from vllm.v1.core.sched.scheduler import Scheduler

    import kvyard.vllm

    engine = Engine(model, folder)
    asked = workload(count, seed)
    wrong = 0
    figures: dict[str, Any] = {"requests": count}
    engine.serve(engine.scheduler(Scheduler), asked[:20])  # what is only slow the first time
    vllm = engine.serve(engine.scheduler(Scheduler), asked)
    print(line(model, "vLLM", vllm, vllm.error or ""), flush=True)
    again = engine.serve(engine.scheduler(Scheduler), asked)
    kvyard_run = engine.serve(engine.flagged, asked)
    with recording(folder / f"recording-{model}"):
        recorder = engine.scheduler(kvyard.vllm.RecordingScheduler)
        recorded = engine.serve(recorder, asked)
        recorder.shutdown()
    for name, seen in (("vLLM again (control)", again), ("kvyard", kvyard_run), ("vLLM, recorded", recorded)):
        differs = vllm.differs(seen)
        wrong += bool(differs)
        print(line(model, name, seen, "differs: " + ", ".join(differs) if differs else "identical"), flush=True)
        if differs:
            print(f"  {vllm.first_difference(seen)}")
    times: dict[str, list[float]] = {
        "vLLM": [*vllm.micros, *again.micros],
        "kvyard": [*kvyard_run.micros],
        "vLLM, recorded": [*recorded.micros],
    }
    for _ in range(turns):
        for name, scheduler_class in (("vLLM", Scheduler), ("kvyard", kvyard.vllm.Scheduler)):
            times[name] += engine.serve(engine.scheduler(scheduler_class), asked).micros
        with recording(folder / f"recording-{model}"):
            recorder = engine.scheduler(kvyard.vllm.RecordingScheduler)
            times["vLLM, recorded"] += engine.serve(recorder, asked).micros
            recorder.shutdown()
    for name, micros in times.items():
        figures[f"us per step, {name}"] = round(statistics.mean(micros), 1)
        figures[f"median us per step, {name}"] = round(statistics.median(micros), 1)
    figures |= {
        "answers that an early token changes": sensitivity(engine, asked, vllm, Scheduler),
        "steps": len(vllm.micros),
        "prompt tokens": sum(len(request.prompt) for request in asked),
        "output tokens": sum(map(len, vllm.tokens.values())),
        "cached tokens": sum(vllm.cached.values()),
        "events": len(vllm.events),
        "evicted": sum("BlockRemoved" in event for _, event in vllm.events),
        "preempted": vllm.preempted,
        "chunked": vllm.chunked,
        "control": vllm.differs(again),
        "kvyard": vllm.differs(kvyard_run),
        "recorded": vllm.differs(recorded),
        "mutants": {},
    }
    share = figures["answers that an early token changes"]
    print(f"  {share:.0%} of answers change where one token near the start of the prompt does", flush=True)
    few = asked[:MUTANT_REQUESTS]
    vllm = engine.serve(engine.scheduler(Scheduler), few) if with_mutants else vllm
    for name, breaks in MUTANTS.items() if with_mutants else ():
        if name in WINDOWS_ONLY and model == "dense":
            continue
        scheduler = engine.scheduler(kvyard.vllm.Scheduler)
        breaks(scheduler.kv_cache_manager)
        seen = engine.serve(scheduler, few)
        differs = vllm.differs(seen)
        wrong += not differs
        figures["mutants"][name] = differs
        print(line(model, name, seen, "caught: " + ", ".join(differs) if differs else "NOT CAUGHT"), flush=True)
    return wrong, figures


def set_environment() -> None:
    """What vLLM has to be told before it is imported: one process, one thread for the model, no network."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated: dense, hybrid")
    parser.add_argument("--mutants", action="store_true", help="run broken managers too, each of which must be caught")
    parser.add_argument("--turns", type=int, default=0, help="further runs of both, by turns, for the times alone")
    parser.add_argument("--json", type=Path, help="write the figures to this file, which must not exist")
    args = parser.parse_args()
    models = args.models.split(",")
    if unknown := [model for model in models if model not in MODELS]:
        parser.error(f"no model {unknown[0]!r}: choose from {', '.join(MODELS)}")
    if args.json is not None and args.json.exists():
        parser.error(f"{args.json} is there already")
    set_environment()
    wrong = 0
    figures = {}
    print(row(TITLES, WIDTHS), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            failures, figures[model] = compare(model, Path(folder), args.requests, args.seed, args.mutants, args.turns)
            wrong += failures
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print("all as it should be" if not wrong else f"{wrong} runs were not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
