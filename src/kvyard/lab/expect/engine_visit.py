"""A running engine: its configuration as settings, and its counters."""

from __future__ import annotations

import asyncio

import msgspec

from kvyard.engine.models.fields import hub_preset
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.live.facts import EngineFacts, engine_facts, metrics_text


class EngineVisit(msgspec.Struct, kw_only=True):
    """Answers of a running engine."""

    facts: EngineFacts
    settings: dict[str, object]
    page: str


def visit_engine(url: str, token: str | None = None) -> EngineVisit:
    """Ask a running engine for its configuration and counters. Raises ``KvyardError`` if it can't be reached."""

    async def ask() -> EngineVisit:
        async with Endpoint(url, token=token) as endpoint:
            facts = await engine_facts(endpoint, None)
            return EngineVisit(facts=facts, settings=settings_of(facts), page=await metrics_text(endpoint))

    return asyncio.run(ask())


def settings_of(facts: EngineFacts) -> dict[str, object]:
    """Return the settings that an engine reported."""
    settings: dict[str, object] = {"backend": "sglang"} if facts.engine == "SGLang" else {}
    preset = next((preset for name in (facts.root, facts.model) if (preset := hub_preset(name)) is not None), None)
    if preset is not None:
        settings["model"] = preset
    for name in ("block_size", "num_gpu_blocks", "max_model_len", "max_num_seqs"):
        if getattr(facts, name) is not None:
            settings[name] = getattr(facts, name)
    if facts.max_num_batched_tokens is not None and facts.engine != "SGLang":
        settings["max_num_batched_tokens"] = facts.max_num_batched_tokens
    if facts.engines > 1:
        settings |= {"dp_size": facts.engines, "router": "least-loaded"}
    return settings
