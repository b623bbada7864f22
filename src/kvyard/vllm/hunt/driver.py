"""Drives the scheduler of the installed vLLM through one case, without a model, and says what went wrong.

Time is counted in engine steps. The model is a memory that remembers which text was written to which slot of which block, so
that a block which holds another text than its reader expects is noticed. This file and ``storms`` use nothing else of kvyard:
reproducers are made from them.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from kvyard.lab.hunt.storms import Storms

STUCK_AFTER = 64
"""Steps in a row that schedule nothing, with nothing left to wait for."""
MOST_STEPS = 5_000

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""A configuration that is never loaded: the scheduler asks it for limits."""

Case = dict[str, Any]
Finding = dict[str, Any]


class Memory:
    """Text in each slot of each block: a number that stands for a token and all that came before it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._failed: dict[int, int] = {}
        """Blocks whose load failed, and the step that reported it."""
        self._texts: dict[tuple[int, int], int] = {}
        """By block and place in it. Groups share the pool, never a block."""

    def write(self, tables: list[list[int]], positions: range, texts: list[int]) -> None:
        for group, table in zip(self._groups, tables, strict=True):
            size = group["block_size"]
            for at in positions:
                if at // size < len(table) and table[at // size]:
                    self._texts[table[at // size], at % size] = texts[at] if at < len(texts) else -1
                    self._failed.pop(table[at // size], None)

    def fail(self, blocks: set[int], step: int) -> None:
        """A load that was to fill ``blocks`` is reported as failed at ``step``."""
        self._failed |= dict.fromkeys(blocks, step)

    def wrong(self, tables: list[list[int]], before: int, texts: list[int], excused: int) -> str | None:
        """Return the first position that attention reads for the token at ``before`` whose slot holds another text.

        Of blocks whose load failed at step ``excused`` or later, vLLM couldn't know.
        """
        for number, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            size = group["block_size"]
            first = max(0, before - group["window"] + 1) if group["type"] == "sliding_window" else 0
            for at in range(first, before):
                block = table[at // size] if at // size < len(table) else None
                if not block:
                    return f"group {number}, token {at}: its table has no block there"
                if self._texts.get((block, at % size)) != texts[at] and self._failed.get(block, -1) < excused:
                    return f"group {number}, token {at}: block {block} holds another text"
        return None


class Requests:
    """The requests of a case: their tokens, and which text each position stands for."""

    def __init__(self, case: Case) -> None:
        self.by_name = {f"r{at}": request for at, request in enumerate(case["requests"])}
        self.tokens: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        known: dict[tuple[int, int], int] = {}
        for at, (name, request) in enumerate(self.by_name.items()):
            tokens = [token for first, count in request["prompt"] for token in range(first, first + count)]
            self.tokens[name] = tokens + [1_000_000 + 10_000 * at + each for each in range(request["output"] + 16)]
            self.texts[name] = []
            text = -2 - request.get("salt", 0)
            for token in self.tokens[name]:
                text = known.setdefault((text, token), len(known))
                self.texts[name].append(text)

    def prompt_tokens(self, name: str) -> int:
        return sum(count for _, count in self.by_name[name]["prompt"])


class World:
    """One run: vLLM's scheduler, the clients, the memory, and transfers in flight."""

    current: World
    """The run that vLLM's connector belongs to: vLLM makes connectors by itself."""

    def __init__(self, case: Case) -> None:
        World.current = self
        self.case = case
        self.now = 0
        self.requests = Requests(case)
        self.memory = Memory(case["groups"])
        self.loads: dict[str, dict[str, Any]] = {}
        self.sends: dict[str, dict[str, Any]] = {}
        self.asked: dict[str, int] = {}
        """Number of times that vLLM has asked the connector about a request."""
        self.loaded: dict[str, int] = {}
        """Loads of a request that have begun."""
        self.tables: dict[str, list[list[int]]] = {}
        self.outputs: dict[str, int] = {}
        self.undecided = False
        """True if the connector couldn't answer yet about a request, since this was last read."""
        self.executed = 0
        self.scheduled_tokens = 0
        self.storms = Storms()
        self.longest_idle = 0
        self.scheduler = make_scheduler(case)
        preempt = self.scheduler._preempt_request

        def count_preemption(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.storms.preempt(request.request_id)
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = count_preemption

    # -- the loop of EngineCore -------------------------------------------------------------------------------------

    def run(self) -> Finding | None:
        """From the first arrival until everything has ended; returns what went wrong."""
        arrivals = deque(sorted((request["at"], name) for name, request in self.requests.by_name.items()))
        aborts = deque(sorted((r["abort"], name) for name, r in self.requests.by_name.items() if r.get("abort")))
        resets = deque(sorted(self.case.get("resets", ())))
        queue: deque[Any] = deque()
        idle = 0
        for self.now in range(MOST_STEPS):
            while arrivals and arrivals[0][0] <= self.now:
                self._add(arrivals.popleft()[1])
            while aborts and aborts[0][0] <= self.now:
                self._abort(aborts.popleft()[1])
            while resets and resets[0] <= self.now:
                self.scheduler.reset_prefix_cache()
                resets.popleft()
            has_requests = self.scheduler.has_requests()
            if not has_requests and not queue and not arrivals and not self.loads and not self.sends:
                return self._leak()
            made = 0
            if has_requests:
                output = self.scheduler.schedule()
                made = sum(output.num_scheduled_tokens.values())
                self.scheduled_tokens += made
                queue.append(output)
                if self.case["async_scheduling"] and len(queue) < 2 and made:
                    continue
            wrong = self._execute(queue.popleft()) if queue else self._report()
            if wrong is not None:
                return wrong
            waits = arrivals or aborts or self.loads or self.sends or any(each.num_scheduled_tokens for each in queue)
            if (storm := self.storms.finding()) is not None:
                return storm
            idle = 0 if made or waits or self.undecided else idle + 1
            self.undecided = False
            self.longest_idle = max(self.longest_idle, idle)
            if idle >= STUCK_AFTER:
                return self._stuck()
        return {"kind": "endless", "detail": f"not over after {MOST_STEPS} steps"}

    @property
    def _excused(self) -> int:
        """Return the step from which on failed loads were reported after the step in flight was scheduled."""
        return self.executed - (1 if self.case["async_scheduling"] else 0)

    def _add(self, name: str) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = self.requests.by_name[name]
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=self.requests.tokens[name][: self.requests.prompt_tokens(name)],
                sampling_params=SamplingParams(max_tokens=request["output"], ignore_eos=True),
                pooling_params=None,
                arrival_time=float(request["at"]),
                priority=request.get("priority", 0),
                cache_salt=str(request["salt"]) if request.get("salt") else None,
                block_hasher=self.scheduler.hunt_hasher,
            )
        )

    def _abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _execute(self, output: Any) -> Finding | None:
        """Do the work of a step: read what was computed before, write what is new, sample, report transfers."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        self.executed += 1
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self.outputs.setdefault(new.req_id, 0)
            starts[new.req_id] = new.num_computed_tokens
        known = output.scheduled_cached_reqs
        for at, name in enumerate(known.req_ids):
            starts[name] = known.num_computed_tokens[at]
            blocks = known.new_block_ids[at]
            if name in known.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in blocks]
                self.outputs[name] = known.num_output_tokens[at]
            elif blocks is not None:
                for table, ids in zip(self.tables[name], blocks, strict=True):
                    table.extend(ids)
        ended, wrong = self._transfers(now=set(output.num_scheduled_tokens))
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            start, texts = starts[name], self.requests.texts[name]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            have = self.requests.prompt_tokens(name) + self.outputs[name]
            if name in self.scheduler.requests:
                wrong = wrong or _about(name, self.memory.wrong(self.tables[name], start, texts, self._excused))
            held = min(drafts, self.requests.by_name[name].get("holds", 0))
            right = max(min(start + count, have + held), start)
            self.memory.write(self.tables[name], range(start, right), texts)
            self.storms.compute(name, right)
            self.memory.write(self.tables[name], range(right, start + count), [])
            tokens = []
            if start + count >= have:
                tokens = self.requests.tokens[name][have : have + held + 1]
                self.outputs[name] += len(tokens)
            sampled.append(tokens)
        if wrong is not None:
            return {"kind": "wrong text", "detail": wrong}
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=ended,
            ),
        )
        if names and self.case["num_speculative_tokens"]:
            drafts_of = [[0] * self.case["num_speculative_tokens"] for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts_of))
        return None

    def _report(self) -> Finding | None:
        """Report transfers that have ended with an empty step: no step is in flight."""
        from vllm.v1.core.sched.output import SchedulerOutput

        return self._execute(SchedulerOutput.make_empty()) if self.scheduler.connector is not None else None

    def _transfers(self, now: set[str]) -> tuple[Any, str | None]:
        """Return transfers that end with this step: what workers report, and what is wrong with what they sent."""
        if self.scheduler.connector is None:
            return None, None
        from vllm.v1.outputs import KVConnectorOutput

        loaded, failed, wrong = set(), set(), None
        for name, load in list(self.loads.items()):
            if load["ends"] > self.now or (load["ends"] < 0 and name not in now):
                continue
            del self.loads[name]
            if load["fails"]:
                sizes = [group["block_size"] for group in self.case["groups"]]
                for size, table in zip(sizes, load["tables"], strict=True):
                    failed |= set(table[load["first"] // size : -(-load["stop"] // size)]) - {0}
                self.memory.fail(failed, self.executed)
            else:
                self.memory.write(load["tables"], range(load["first"], load["stop"]), self.requests.texts[name])
            if load["ends"] >= 0:
                loaded.add(name)
        sent = {name for name, send in self.sends.items() if send["ends"] <= self.now}
        for name in sent:
            send = self.sends.pop(name)
            texts = self.requests.texts[name]
            if len(send["tables"]) == 1:  # of windows, what a receiver still needs depends on what it computes
                wrong = wrong or _about(name, self.memory.wrong(send["tables"], send["tokens"], texts, self._excused))
        return KVConnectorOutput(finished_recving=loaded, finished_sending=sent, invalid_block_ids=failed), wrong

    # -- what can go wrong ------------------------------------------------------------------------------------------

    def _stuck(self) -> Finding:
        manager = self.scheduler.kv_cache_manager
        lines = []
        for name, request in self.scheduler.requests.items():
            held = sum(block != 0 for table in manager.get_block_ids(name) for block in table)
            lines.append(
                f"{name} {request.status.name} computed {request.num_computed_tokens} of {request.num_tokens}, "
                f"holds {held}"
            )
        free = manager.block_pool.get_num_free_blocks()
        return {
            "kind": "stuck",
            "detail": f"{STUCK_AFTER} steps scheduled nothing; {len(self.scheduler.running)} running, {free} blocks free; "
            + "; ".join(lines),
        }

    def _leak(self) -> Finding | None:
        pool = self.scheduler.kv_cache_manager.block_pool
        missing = self.case["num_blocks"] - 1 - pool.get_num_free_blocks()
        if missing:
            return {"kind": "leak", "detail": f"{missing} blocks are not free after every request has ended"}
        return None

    def pressure(self) -> float:
        """Return the nearness of a case to trouble: a search goes on from the nearest."""
        needed = sum(self.requests.prompt_tokens(name) for name in self.requests.by_name)
        return self.longest_idle + self.storms.preemptions + self.scheduled_tokens / max(1, needed)


def _about(name: str, wrong: str | None) -> str | None:
    return None if wrong is None else f"{name}: {wrong}"


def connector_class() -> Any:
    """Return the connector that carries out a case's requests."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
    from vllm.v1.request import RequestStatus

    class HuntConnector(KVConnectorBase_V1, SupportsHMA):
        """The scheduler's side; the worker's is ``World``."""

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            world, name = World.current, request.request_id
            load = world.requests.by_name[name].get("load")
            if load is None or (load.get("once") and name in world.loaded):
                return 0, False
            world.asked[name] = world.asked.get(name, 0) + 1
            if world.asked[name] <= load.get("unknown", 0):
                world.undecided = True
                return None, False
            sync = load["steps"] is None
            most, size = world.requests.prompt_tokens(name), world.case["groups"][0]["block_size"]
            if not load.get("once") or sync:
                # A store has whole blocks, and leaves a token to compute.
                most = min(load["tokens"], most - 1) // size * size
            found = max(0, min(load["tokens"], most) - num_computed_tokens)
            self._matched = {**getattr(self, "_matched", {}), name: num_computed_tokens}
            return found, bool(found) and not sync

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if not num_external_tokens:
                return
            world, name = World.current, request.request_id
            load, first = world.requests.by_name[name]["load"], self._matched[name]
            world.loaded[name] = world.loaded.get(name, 0) + 1
            fails = world.loaded[name] <= load.get("fails", 0)
            world.loads[name] = {
                "ends": -1 if load["steps"] is None else world.now + load["steps"],
                "tables": [list(ids) for ids in blocks.get_block_ids()],
                "first": first,
                "stop": first + num_external_tokens,
                "fails": fails,
            }

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
            return self.request_finished_all_groups(request, (block_ids,))

        def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
            world, name = World.current, request.request_id
            steps = world.requests.by_name[name].get("send")
            if not steps or request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
                return False, None
            tables = [list(ids) for ids in block_ids]
            # What was sampled last was never computed.
            tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            world.sends[name] = {"ends": world.now + steps, "tables": tables, "tokens": tokens}
            return True, None

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return KVConnectorMetadata()

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
        def wait_for_layer_load(self, layer_name: str) -> None: ...
        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
        def wait_for_save(self) -> None: ...

    return HuntConnector


def __getattr__(name: str) -> Any:
    """vLLM looks for the connector by its name in this module."""
    if name == "HuntConnector":
        return connector_class()
    raise AttributeError(name)


def make_scheduler(case: Case) -> Any:
    """Return vLLM's scheduler for the settings of a case. Settings that this version doesn't have are left out."""
    import torch
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1 import kv_cache_interface as kv
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    def settings(of: Any, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: case[name] for name in names if name in of.__dataclass_fields__ and name in case}

    of_scheduler = (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "policy",
        "scheduler_reserve_full_isl",
        "enable_chunked_prefill",
    )
    drafts = case["num_speculative_tokens"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        config = VllmConfig(
            model_config=ModelConfig(
                model=folder, skip_tokenizer_init=True, max_model_len=case["max_model_len"], dtype="float32", seed=0
            ),
            scheduler_config=SchedulerConfig(
                is_encoder_decoder=False, async_scheduling=False, **settings(SchedulerConfig, of_scheduler)
            ),
            cache_config=CacheConfig(
                block_size=case["groups"][0]["block_size"], enable_prefix_caching=case["enable_prefix_caching"]
            ),
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=4)
            if drafts
            else None,
        )
    if drafts:
        # Of a drafter the scheduler asks for no more than its kind; a real one would need a second model.
        config.speculative_config.method = "eagle"
    # The CPU platform turns this off, which an engine on a GPU has.
    config.scheduler_config.async_scheduling = case["async_scheduling"]
    config.cache_config.num_gpu_blocks = case["num_blocks"]
    if case["connector"]:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="HuntConnector",
            kv_role="kv_both",
            kv_connector_module_path=__name__,
            kv_load_failure_policy=case.get("kv_load_failure_policy", "recompute"),
        )
    groups = []
    for at, group in enumerate(case["groups"]):
        shape = {"block_size": group["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        spec = (
            kv.SlidingWindowSpec(**shape, sliding_window=group["window"])
            if group["type"] == "sliding_window"
            else kv.FullAttentionSpec(**shape)
        )
        groups.append(kv.KVCacheGroupSpec([f"layer{at}"], spec))
    cache = kv.KVCacheConfig(num_blocks=case["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
    block_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
    kind = AsyncScheduler if case["async_scheduling"] else Scheduler
    made = kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        **({"hash_block_size": hash_size} if "hash_block_size" in inspect.signature(Scheduler).parameters else {}),
    )
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(hash_fn)
    caches = case["enable_prefix_caching"]
    made.hunt_hasher = kv_cache_utils.get_request_block_hasher(hash_size, hash_fn) if caches else None
    return made


def run(case: Case) -> tuple[Finding | None, float]:
    """Run a case: what went wrong, and how near it came to trouble.

    What vLLM raises while it schedules is a finding; that it refuses the settings of a case isn't.
    """
    try:
        world = World(case)
    except ValueError:
        return None, 0.0
    try:
        finding = world.run()
    except Exception as raised:
        frame = traceback.extract_tb(raised.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        finding = {"kind": "crash", "detail": f"{type(raised).__name__} at {place}: {raised}"}
    return finding, world.pressure()


def import_engine() -> str:
    """Import vLLM quietly, which takes 10 to 30 s; returns its version. Raises ``ImportError`` if there is none."""
    os.environ.update(
        VLLM_LOGGING_LEVEL="CRITICAL", CUDA_VISIBLE_DEVICES="", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"
    )
    import vllm
    import vllm.v1.core.sched.async_scheduler

    return str(vllm.__version__)
