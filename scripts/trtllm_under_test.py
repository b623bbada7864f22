"""TensorRT-LLM's Python schedulers without TensorRT-LLM: real classes from a checkout over stand-ins for what is C++.

Real: ``PyCapacityScheduler`` with its policies, ``PyMicroBatchScheduler`` and ``SimpleUnifiedScheduler``
(``_torch/pyexecutor/scheduler/scheduler.py``), and of ``PyExecutor`` the methods ``_schedule``, ``_waiting_requests`` and
``_compute_scheduled_tokens``, which are taken out of their file since importing that needs CUDA.

Stand-ins: requests (``LlmRequest``) and the KV cache manager with one window and whole-block reuse, written from the documented
behaviour of their C++ originals; the executor's loop, in virtual time. The manager never has to evict: workloads with reuse
have a pool for all their blocks.
"""

from __future__ import annotations

import ast
import enum
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

METHODS = ("_schedule", "_waiting_requests", "_compute_scheduled_tokens")
"""Methods of ``PyExecutor`` that are run as they are."""


class LlmRequestState(enum.Enum):
    """States of a request that the schedulers know."""

    UNKNOWN = 0
    ENCODER_INIT = 1
    DISAGG_GENERATION_INIT = 8
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class CapacitySchedulerPolicy(enum.StrEnum):
    """Values of the setting of that name."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class StandInRequest:
    """In the place of ``LlmRequest``: one beam, no drafts, no adapters."""

    num_draft_tokens = 0
    lora_task_id = None
    is_encoder_init_state = False
    is_disagg_generation_init_state = False
    is_attention_dp_dummy = False

    def __init__(self, number: int, name: str, prompt: list[int], answer: list[int]) -> None:
        self.request_id = self.py_request_id = number
        self.name = name
        self.tokens = list(prompt)
        self.answer = answer
        self.prompt_len = len(prompt)
        self.max_new_tokens = len(answer)
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = 0
        self.prepopulated = 0
        self._chunk = self.prompt_len
        self.estimated_reusable_tokens = 0
        self.produced = 0
        self.pauses = 0

    @property
    def state_value(self) -> int:
        return self.state.value

    @property
    def is_context_init_state(self) -> bool:
        return self.state is LlmRequestState.CONTEXT_INIT

    @property
    def is_generation_in_progress_state(self) -> bool:
        return self.state in (LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE)

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self) -> int:
        return self._chunk

    @context_chunk_size.setter
    def context_chunk_size(self, size: int) -> None:
        self._chunk = min(size, self.context_remaining_length)

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self._chunk == self.prompt_len

    def has_draft_tokens(self) -> bool:
        return False

    def get_num_tokens(self, beam: int) -> int:
        return len(self.tokens)

    def get_beam_width_by_iter(self, for_next_iteration: bool) -> int:
        return 1

    def get_unique_tokens(self, beam: int) -> list[int]:
        return self.tokens

    def set_prepopulated_prompt_len(self, length: int, tokens_per_block: int) -> None:
        """Begin after what is cached; a chunk that isn't the last ends at the end of a block."""
        self.prepopulated = length
        if length:
            size = self._chunk
            if length + size < self.prompt_len:
                size = (length + size) // tokens_per_block * tokens_per_block - length
            self.context_current_position = length
            self.context_chunk_size = size

    def move_to_next_context_chunk(self) -> None:
        self.context_current_position += self._chunk
        self._chunk = 0

    def will_complete_next_iteration(self) -> bool:
        return len(self.tokens) - self.prompt_len + 1 >= self.max_new_tokens

    def produce(self) -> None:
        """The next token of the answer is known."""
        self.tokens.append(self.answer[self.produced])
        self.produced += 1

    def pause(self) -> None:
        """What was produced becomes part of the prompt, which is computed again."""
        generated = len(self.tokens) - self.prompt_len
        self.max_new_tokens -= generated
        self.prompt_len = len(self.tokens)
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = self.prepopulated = 0
        self._chunk = self.prompt_len
        self.pauses += 1


class StandInManager:
    """In the place of the KV cache manager: blocks of one window, found again by their whole prefix if reuse is on."""

    is_variable_window = False

    def __init__(self, num_blocks: int, tokens_per_block: int, enable_block_reuse: bool, max_seq_len: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_block_reuse = enable_block_reuse
        self.max_attention_window_vec = [max_seq_len]
        self.references: dict[Any, int] = {}
        """Block -> sequences that hold it. A stored block is named by its prefix, another one by its sequence."""
        self.stored: set[tuple[int, ...]] = set()
        self.sequences: dict[int, list[Any]] = {}
        self.lengths: dict[int, int] = {}
        self._scheduled: dict[Any, int] = {}
        self._scheduling_free = 0

    # -- asked by the schedulers ----------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.num_blocks - len(self.references)

    def get_kv_cache_stats(self) -> Any:
        return SimpleNamespace(num_free_blocks_per_window_size={self.max_attention_window_vec[0]: self.free})

    def analyze_prefix_reuse(self, tokens: list[int], request: StandInRequest) -> Any:
        size = self.tokens_per_block
        allocated = known = 0
        for index in range(len(tokens) // size):
            name = tuple(tokens[: (index + 1) * size])
            if name not in self.stored:
                return SimpleNamespace(
                    reusable_blocks_allocated=allocated, reusable_blocks_all=known, first_new_block=name[-size:]
                )
            known += 1
            allocated += name in self.references
        return SimpleNamespace(reusable_blocks_allocated=allocated, reusable_blocks_all=known, first_new_block=None)

    def get_remaining_blocks_to_completion(
        self, request: StandInRequest, window: int, cached_summary: Any = None
    ) -> int:
        size = self.tokens_per_block
        request.estimated_reusable_tokens = 0
        context = request.prompt_len // size
        total = -(-(request.prompt_len + request.max_new_tokens) // size)
        held = len(self.sequences.get(request.request_id, ()))
        reused = 0
        if self.enable_block_reuse and request.is_context_init_state and request.is_first_context_chunk and not held:
            summary = cached_summary or self.analyze_prefix_reuse(request.tokens, request)
            most = min(context, (request.prompt_len - 1) // size)
            reused = min(summary.reusable_blocks_allocated, most)
            request.estimated_reusable_tokens = min(summary.reusable_blocks_all, most) * size
        return total - reused - held

    def start_scheduling(self) -> None:
        self._scheduled = dict(self.references)
        self._scheduling_free = self.free

    def get_needed_blocks_one_step(
        self, request: StandInRequest, two_steps: bool, window: int, cached_summary: Any = None
    ) -> int:
        size = self.tokens_per_block
        request.estimated_reusable_tokens = 0
        if request.is_context_init_state and request.is_first_context_chunk:
            needed = -(-request.prompt_len // size)
            if self.enable_block_reuse:
                summary = cached_summary or self.analyze_prefix_reuse(request.tokens, request)
                most = min(request.prompt_len // size, (request.prompt_len - 1) // size)
                reused = min(summary.reusable_blocks_allocated, most)
                needed -= reused
                request.estimated_reusable_tokens = reused * size
            return needed
        if request.is_generation_in_progress_state:
            length = self.lengths[request.request_id]
            left = request.max_new_tokens - (length - request.prompt_len)
            return -(-(length + min(2 if two_steps else 1, left)) // size) - -(-length // size)
        return 0

    def scheduling_has_free_blocks(self, required: int, window: int) -> bool:
        return self._scheduling_free >= required

    def scheduling_remove_sequence(self, number: int) -> None:
        for name in self.sequences[number]:
            self._scheduled[name] -= 1
            if not self._scheduled[name]:
                self._scheduling_free += 1

    # -- asked by the executor ------------------------------------------------------------------------------------------

    def add_sequences(self, requests: list[StandInRequest]) -> None:
        """Give blocks for the whole prompt of each request: first what is cached of all of them, then new ones."""
        size = self.tokens_per_block
        matched = []
        for request in requests:
            held: list[Any] = []
            while self.enable_block_reuse and (len(held) + 1) * size < request.prompt_len:
                name = tuple(request.tokens[: (len(held) + 1) * size])
                if name not in self.stored:
                    break
                held.append(name)
                self.references[name] = self.references.get(name, 0) + 1
            matched.append(held)
        for request, held in zip(requests, matched, strict=True):
            if self.enable_block_reuse:
                request.set_prepopulated_prompt_len(len(held) * size, size)
                request.estimated_reusable_tokens = 0
            self.sequences[request.request_id] = held
            self.lengths[request.request_id] = request.prompt_len
            while len(held) * size < request.prompt_len:
                self._append(request)

    def add_token(self, request: StandInRequest) -> None:
        number = request.request_id
        self.lengths[number] += 1
        if (self.lengths[number] - 1) // self.tokens_per_block >= len(self.sequences[number]):
            self._append(request)

    def _append(self, request: StandInRequest) -> None:
        held = self.sequences[request.request_id]
        name = (request.request_id, request.pauses, len(held), "new")
        self.references[name] = 1
        held.append(name)
        assert len(self.references) <= self.num_blocks, "the schedulers let in more than fits"

    def store(self, request: StandInRequest, tokens: int) -> None:
        """What is computed of the first ``tokens`` tokens can be found again, in whole blocks."""
        if not self.enable_block_reuse:
            return
        size, held = self.tokens_per_block, self.sequences[request.request_id]
        for index in range(min(tokens // size, len(held))):
            name = tuple(request.tokens[: (index + 1) * size])
            if held[index] != name and name not in self.stored:
                self.stored.add(name)
                self.references[name] = self.references.pop(held[index])
                held[index] = name

    def remove_sequence(self, request: StandInRequest) -> None:
        for name in self.sequences.pop(request.request_id):
            self.references[name] -= 1
            if not self.references[name]:
                del self.references[name]
        del self.lengths[request.request_id]


class _Names:
    """C++ names that annotations mention."""

    def __getattr__(self, name: str) -> Any:
        return _Names() if name.islower() else object


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def load(checkout: Path) -> tuple[Any, type]:
    """Import the schedulers of ``checkout``; returns their module and a class with ``METHODS`` of ``PyExecutor``."""
    root = checkout / "tensorrt_llm"
    _module("strenum", StrEnum=enum.StrEnum)
    silent = SimpleNamespace(debug=lambda text: None, warning=lambda text: None, info=lambda text: None)
    for name, path in (
        ("tensorrt_llm", root),
        ("tensorrt_llm._torch", root / "_torch"),
        ("tensorrt_llm._torch.pyexecutor", root / "_torch/pyexecutor"),
        ("tensorrt_llm._torch.pyexecutor.scheduler", root / "_torch/pyexecutor/scheduler"),
        ("tensorrt_llm.llmapi", root / "llmapi"),
    ):
        _module(name, __path__=[str(path)])
    _module("tensorrt_llm.bindings", internal=_Names())
    _module("tensorrt_llm.logger", logger=silent)
    _module("tensorrt_llm.llmapi.llm_args", CapacitySchedulerPolicy=CapacitySchedulerPolicy)
    _module("tensorrt_llm._torch.pyexecutor.llm_request", LlmRequest=StandInRequest, LlmRequestState=LlmRequestState)
    schedulers = importlib.import_module("tensorrt_llm._torch.pyexecutor.scheduler.scheduler")
    file = root / "_torch/pyexecutor/py_executor.py"
    executor = next(
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "PyExecutor"
    )
    kept = [node for node in executor.body if isinstance(node, ast.FunctionDef) and node.name in METHODS]
    assert {node.name for node in kept} == set(METHODS), f"{file} has no longer all of {', '.join(METHODS)}"
    executor.body, executor.bases, executor.decorator_list = list(kept), [], []
    unit = ast.fix_missing_locations(ast.Module([executor], []))
    names: dict[str, Any] = {
        "nvtx_range": lambda label: lambda method: method,
        "LlmRequest": StandInRequest,
        "ScheduledRequests": schedulers.ScheduledRequests,
        # The second is what 1.3.0rc20 and later call it.
        **dict.fromkeys(("MambaHybridCacheManager", "MixedMambaHybridCacheManager"), type(None)),
    }
    exec(compile(unit, str(file), "exec"), names)
    return schedulers, names["PyExecutor"]
