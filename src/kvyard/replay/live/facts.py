"""An engine's description of itself over HTTP, as far as it shapes a replay: vLLM's metrics, and SGLang's or vLLM's
settings. Everything may be missing.
"""

from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.openai import ListedModel, ListedModels
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.live.metrics_page import MetricsPage

PATIENCE = 60.0
"""Seconds for a page: vLLM looks at the whole machine before it reports its settings."""


class EngineFacts(msgspec.Struct, kw_only=True):
    """One engine. ``None`` is: it didn't say."""

    model: str
    root: str = ""
    """Source of its weights, if it reports one: a name on the hub or a folder."""
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


def cache_labels(page: MetricsPage) -> dict[str, str]:
    """Return the labels of ``vllm:cache_config_info``; empty if there is none."""
    return next((labels for labels, _ in page.labels("vllm:cache_config_info")), {})


def is_asleep(page: MetricsPage) -> bool:
    """True if a page has ``vllm:engine_sleep_state`` and no engine on it is awake."""
    states = page.labels("vllm:engine_sleep_state")
    awake = [value for labels, value in states if labels.get("sleep_state") == "awake"]
    return bool(awake) and not any(awake)


async def engine_facts(endpoint: Endpoint, model: str | None) -> EngineFacts:
    """Ask. ``model`` is the one meant, or the first that is served.

    Raises ``KvyardError`` where the endpoint can't be reached, serves nothing, or not that model.
    """
    served = await _models(endpoint)
    chosen = next((entry for entry in served if entry.id == model), None) if model is not None else served[0]
    if chosen is None:
        names = ", ".join(entry.id for entry in served)
        raise KvyardError(f"{endpoint.url} doesn't serve {model}: it has {names}")
    facts = EngineFacts(model=chosen.id, root=chosen.root or "", max_model_len=chosen.max_model_len)
    facts.version = str(_member(await _page(endpoint, "/version"), "version") or "")[:100]
    page = await metrics_page(endpoint)
    labels = cache_labels(page)
    facts.engine = "vLLM" if labels else ""
    facts.block_size = _number(labels.get("block_size"))
    blocks = _number(labels.get("num_gpu_blocks"))
    facts.num_gpu_blocks = None if blocks is None else blocks - 1
    facts.engines = max(1, len(page.label_values("engine", "vllm:")))
    facts.running = round(page.total("vllm:num_requests_running", "sglang:num_running_reqs"))
    facts.preemptions = preemptions(page)
    _from_vllm(facts, await _page(endpoint, "/server_info?config_format=json"))
    if not labels:
        _from_sglang(facts, await _page(endpoint, "/get_server_info"))
    return facts


async def metrics_page(endpoint: Endpoint) -> MetricsPage:
    """Return its metrics, an empty page if it has none."""
    return MetricsPage(await metrics_text(endpoint))


async def metrics_text(endpoint: Endpoint) -> str:
    """Return its metrics as they are written, empty if it has none."""
    return await _page(endpoint, "/metrics") or ""


def preemptions(page: MetricsPage) -> int | None:
    """Return the preemptions so far, ``None`` if the page has no such counter."""
    name = "vllm:num_preemptions_total"
    return round(page.total(name)) if name in page else None


def served(page: MetricsPage) -> tuple[int, float] | None:
    """Return the requests that ended, and the seconds that the engine says it took to their first tokens, all together;
    ``None`` if it doesn't say.
    """
    parts = ("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds")
    counts, sums = ([f"{part}_{what}" for part in parts] for what in ("count", "sum"))
    if not any(name in page for name in (*counts, *sums)):
        return None
    return round(page.total(*counts) / 2), page.total(*sums)


async def _page(endpoint: Endpoint, path: str) -> str | None:
    """Return a page that needn't be there, or come in time."""
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
