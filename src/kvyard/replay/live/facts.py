"""An engine's description of itself over HTTP, as far as it shapes a replay: vLLM's metrics, and SGLang's or vLLM's
settings. Everything may be missing.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.openai import ListedModel, ListedModels
from kvyard.replay.live.endpoint import Endpoint

PATIENCE = 60.0
"""Seconds for a page: vLLM looks at the whole machine before it reports its settings."""
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_AWAKE = re.compile(r'^vllm:engine_sleep_state\{.*sleep_state="awake".*\} (\S+)', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RUNNING = re.compile(r"^(?:vllm:num_requests_running|sglang:num_running_reqs)(?:\{.*\})? (\S+)$", re.MULTILINE)
_SERVED = re.compile(
    r"^vllm:request_(?:queue|prefill)_time_seconds_(sum|count)(?:\{.*\})? (\S+)$", re.MULTILINE
)  # what an engine itself counts from a request's arrival to its first token
_ENGINE = re.compile(r'^vllm:\w+\{(?:.*,)?engine="([^"]*)"', re.MULTILINE)
_PREEMPTED = re.compile(r"^vllm:num_preemptions_total(?:\{.*\})? (\S+)$", re.MULTILINE)


class EngineFacts(msgspec.Struct, kw_only=True):
    """One engine. ``None`` is: it didn't say."""

    model: str
    engine: str = ""
    """Name of the engine, if its answers reveal it."""
    version: str = ""
    max_model_len: int | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    """Without vLLM's null block, which holds nothing."""
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    async_scheduling: bool | None = None
    engines: int = 1
    """Number of engines at this address: vLLM has one per data-parallel rank."""
    running: int = 0
    """Requests that ran when it was asked."""
    preemptions: int | None = None
    """Preemptions so far."""

    @property
    def capacity(self) -> int | None:
        """Tokens that its cache holds."""
        return None if self.num_gpu_blocks is None or self.block_size is None else self.num_gpu_blocks * self.block_size


def cache_labels(page: str) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info`` in a page of metrics."""
    found = _CACHE.search(page)
    return dict(_LABEL.findall(found[1])) if found else {}


def is_asleep(page: str) -> bool:
    """True if a page of metrics has ``vllm:engine_sleep_state`` and no engine on it is awake."""
    awake = _AWAKE.findall(page)
    return bool(awake) and all(value in ("0", "0.0") for value in awake)


async def engine_facts(endpoint: Endpoint, model: str | None) -> EngineFacts:
    """Ask. ``model`` is the one meant, or the first that is served.

    Raises ``KvyardError`` where the endpoint can't be reached, serves nothing, or not that model.
    """
    served = await _models(endpoint)
    chosen = next((entry for entry in served if entry.id == model), None) if model is not None else served[0]
    if chosen is None:
        names = ", ".join(entry.id for entry in served)
        raise KvyardError(f"{endpoint.url} doesn't serve {model}: it has {names}")
    facts = EngineFacts(model=chosen.id, max_model_len=chosen.max_model_len)
    facts.version = str(_member(await _page(endpoint, "/version"), "version") or "")[:100]
    page = await metrics_page(endpoint)
    labels = cache_labels(page)
    facts.engine = "vLLM" if labels else ""
    facts.block_size = _number(labels.get("block_size"))
    blocks = _number(labels.get("num_gpu_blocks"))
    facts.num_gpu_blocks = None if blocks is None else blocks - 1
    facts.engines = max(1, len(set(_ENGINE.findall(page))))
    facts.running = round(_sum(_RUNNING.findall(page)))
    facts.preemptions = preemptions(page)
    _from_vllm(facts, await _page(endpoint, "/server_info?config_format=json"))
    if not labels:
        _from_sglang(facts, await _page(endpoint, "/get_server_info"))
    return facts


async def metrics_page(endpoint: Endpoint) -> str:
    """Return its metrics, empty if it has none."""
    return await _page(endpoint, "/metrics") or ""


def preemptions(page: str) -> int | None:
    """Return the preemptions in a page of metrics, ``None`` if it has no such counter."""
    found = _PREEMPTED.findall(page)
    return round(_sum(found)) if found else None


def served(page: str) -> tuple[int, float] | None:
    """Requests that ended, and the seconds that the engine says it took to their first tokens, all together."""
    found = _SERVED.findall(page)
    if not found:
        return None
    count = _sum([value for what, value in found if what == "count"])
    return round(count / 2), _sum([value for what, value in found if what == "sum"])


def _sum(values: Sequence[str]) -> float:
    """Sum up samples in a page of metrics. Values that aren't finite count as nothing: NaN means "not yet"."""
    total = 0.0
    for value in values:
        try:
            number = float(value)
        except ValueError:
            continue
        total += number if math.isfinite(number) else 0.0
    return total


async def _page(endpoint: Endpoint, path: str) -> str | None:
    """A page that needn't be there, or come in time."""
    try:
        return await endpoint.text(path, PATIENCE)
    except KvyardError:
        return None


async def _models(endpoint: Endpoint) -> list[ListedModel]:
    page = await endpoint.text("/v1/models")
    if page is None:
        await endpoint.models()  # says why not
    try:
        served = msgspec.json.decode(page or "", type=ListedModels).data
    except DECODE_ERRORS as error:
        raise KvyardError(f"{endpoint.url}/v1/models is no list of models: {error}") from None
    if not served:
        raise KvyardError(f"{endpoint.url} serves no model: start one")
    return served


def _from_vllm(facts: EngineFacts, text: str | None) -> None:
    """Read vLLM's development endpoint (VLLM_SERVER_DEV_MODE=1)."""
    scheduler = _member(text, "vllm_config", "scheduler_config")
    if isinstance(scheduler, dict):
        facts.max_num_batched_tokens = _number(scheduler.get("max_num_batched_tokens"))
        facts.max_num_seqs = _number(scheduler.get("max_num_seqs"))
        on = scheduler.get("async_scheduling")
        facts.async_scheduling = on if isinstance(on, bool) else None


def _from_sglang(facts: EngineFacts, text: str | None) -> None:
    info = _member(text)
    if not isinstance(info, dict):
        return
    facts.engine = "SGLang"
    facts.version = facts.version or str(info.get("version", ""))[:100]
    facts.block_size = _number(info.get("page_size"))
    tokens = _number(info.get("max_total_num_tokens"))
    if tokens is not None and facts.block_size:
        facts.num_gpu_blocks = tokens // facts.block_size
    facts.max_num_batched_tokens = _number(info.get("chunked_prefill_size"))
    facts.max_num_seqs = _number(info.get("max_running_requests"))
    off = info.get("disable_overlap_schedule")
    facts.async_scheduling = not off if isinstance(off, bool) else None


def _member(text: str | None, *names: str) -> Any:
    """Return the value of a JSON text under nested ``names``; ``None`` if there is none."""
    try:
        value = msgspec.json.decode(text or "null")
    except DECODE_ERRORS:
        return None
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _number(value: object) -> int | None:
    """Return a whole number above 0, given as number or text."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
