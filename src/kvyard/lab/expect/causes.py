"""Causes of missing hits by name, each with its sentence and its fix."""

from __future__ import annotations

from typing import NamedTuple


class CauseText(NamedTuple):
    """The words of a cause; ``sentence`` and ``fix`` are filled in with figures."""

    title: str
    sentence: str
    fix: str


LIMITS: dict[str, CauseText] = {
    "changing-text": CauseText(
        "text that changes",
        "Prompts repeat {moved:.0%} of their tokens and still part after {parting:,} tokens (median), so something that "
        "changes with every request (a date, an id, a counter) stands near the front",
        "move it behind the text that stays the same, or out of the system prompt",
    ),
    "moved-text": CauseText(
        "text at other places",
        "Prompts repeat {moved:.0%} of their tokens, at other places than before (retrieved passages in another order, a "
        "history that is cut at its front), and a cache finds equal beginnings only",
        "keep passages in one order, put what stays the same first, and cut histories seldom",
    ),
    "media": CauseText(
        "images and other media",
        "Prompts with equal text carry different images, and everything behind an image that is new is computed again",
        "put images behind the text that is shared, and send the same image with the same bytes or UUID",
    ),
    "adapters": CauseText(
        "LoRA adapters",
        "Prompts that are equal are sent with {adapters:,} different adapters, and a cached block belongs to one adapter",
        "send requests that share a prompt with the same adapter, or route by adapter",
    ),
    "salts": CauseText(
        "cache salts",
        "Prompts that are equal are sent with {salts:,} different cache_salt values in {requests:,} requests, and nothing "
        "is shared between salts",
        "use one salt per tenant, not one per request",
    ),
    "granularity": CauseText(
        "block size",
        "Hits are whole blocks of {block:,} tokens, so a shared prefix of fewer than {smallest:,} tokens never hits, and "
        "{short:.0%} of the shared prefixes are shorter",
        "share longer prefixes, or make blocks smaller (--block-size; for hybrids a smaller Mamba state or "
        "--prefix-match-unit)",
    ),
    "last-block": CauseText(
        "the last block",
        "The block with a prompt's last token is always computed, and these prompts are only {blocks:.1f} blocks long",
        "make blocks smaller (--block-size)",
    ),
    "attention": CauseText(
        "states and windows",
        "Hits of {groups} end where a state or window was kept, and prompts part between two of these points",
        "keep states more often (a smaller Mamba block), or let prompts part at multiples of {block:,} tokens",
    ),
    "draft-head": CauseText(
        "the draft head",
        "The draft head (EAGLE, MTP) has the last block of every hit computed again, blocks of {block:,} tokens",
        "make blocks smaller, or draft without hidden states",
    ),
    "caching-off": CauseText(
        "prefix caching is off",
        "Prefix caching is off in this configuration",
        "remove --no-enable-prefix-caching (vLLM), --disable-radix-cache (SGLang) or enable_block_reuse: false "
        "(TensorRT-LLM)",
    ),
    "routing": CauseText(
        "routing",
        "Prefixes are cached on another worker than the one that gets the request",
        "{better}",
    ),
    "left": CauseText(
        "loads that don't pay",
        "A lower tier has the prefix and computing it again is estimated to be quicker",
        "use a faster link or set load_policy to always",
    ),
    "pool": CauseText(
        "pool size",
        "Blocks are evicted before they are used again: {evicted:,} evictions in a pool of {tokens:,} tokens a worker",
        "give the cache more memory (--gpu-memory-utilization, an fp8 KV cache), a host tier, or more workers",
    ),
    "in-flight": CauseText(
        "requests at the same time",
        "Requests that share a prefix arrive before it is computed",
        "send the first one alone, or warm the prefix up",
    ),
}
"""Between what prompts share and what the engine owes, in the order of the waterfall."""

FAULTS: dict[str, CauseText] = {
    "asleep": CauseText(
        "the engine slept",
        "The engine sleeps (vllm:engine_sleep_state), and level 1 and 2 both discard its cache",
        "wake it up, and don't route to it before",
    ),
    "choices": CauseText(
        "n > 1",
        "The engine looked up {ratio:.1f} times the prompt tokens of this traffic: each of the n choices of a request is "
        "counted, and hits the first one's blocks",
        "put n into the trace, or divide by it: the rate of hits is not that of prompts. If it was sent more than once, take "
        "pages before and after it",
    ),
    "other-traffic": CauseText(
        "other traffic",
        "The engine looked up {queries:,} prompt tokens and this traffic has {prompts:,}",
        "take a page of metrics before and after the traffic (--metrics-before), or record all of it; vLLM doesn't look up "
        "prompts whose logprobs are asked for",
    ),
    "caching-off": CauseText(
        "prefix caching is off",
        "The engine finds nothing at all{reported}",
        "remove --no-enable-prefix-caching (vLLM), --disable-radix-cache (SGLang) or enable_block_reuse: false "
        "(TensorRT-LLM)",
    ),
    "never-shared": CauseText(
        "keys that differ by request",
        "The engine finds nothing at all and reports that caching is on, so every request has block keys of its own: a "
        "cache_salt, adapter or image per request, or text that differs from the first block on",
        "compare two requests as the engine receives them, cache_salt, model and chat template included",
    ),
    "salts": CauseText(
        "cache salts",
        "The engine finds {found}, and its events store the same text under one cache_salt after the other",
        "use one salt per tenant, not one per request",
    ),
    "adapters": CauseText(
        "LoRA adapters",
        "The engine finds {found}, and its events store the same text for one adapter after the other",
        "send requests that share a prompt with the same adapter, or route by adapter",
    ),
    "block-size": CauseText(
        "another block size",
        "{told} blocks of {block:,} tokens, and {configured:,} were configured here",
        "set block_size to {block} here and in the router, or start the engine with --block-size {configured}",
    ),
    "changing-text": CauseText(
        "text that changes",
        "The engine's hits end at token {parting:,} at the latest, where this traffic's text goes on: what the engine "
        "receives has something that changes with every request there (a date in the chat template, an id)",
        "pass the date as a fixed argument of the template, or put it behind the system prompt",
    ),
    "late-states": CauseText(
        "states at the end of prompts",
        "Hits are those of an engine that keeps states only at the last two multiples of {block:,} tokens of a prompt, and "
        "prompts part before these",
        "use a vLLM that keeps a state where prompts were seen to part (0.32 does), or make what is unique shorter",
    ),
    "answers": CauseText(
        "answers aren't found again",
        "Hits end where an earlier answer begins, so the engine doesn't cache answers, or the client sends them back with "
        "other text (reasoning taken out, another template)",
        "send the assistant's text back as it was generated, and check that the engine caches generated tokens",
    ),
    "media": CauseText(
        "images and other media",
        "The engine's hits end where the first image of a prompt begins, so it has another key for it each time",
        "send the same image with the same bytes, or with a UUID (multi_modal_uuids)",
    ),
    "store-only": CauseText(
        "a tier that never loads",
        "Hits are those of the device alone: the lower tier stores blocks and loads none ({queried:,} tokens were "
        "looked up there)",
        "check the connector's load path: its role (kv_both), its key prefix and its hash seed",
    ),
    "pool": CauseText(
        "a smaller pool",
        "Hits are those of a pool of about {blocks:,} blocks, and {configured:,} were configured here",
        "{compare}",
    ),
    "draft-head": CauseText(
        "the draft head",
        "Hits are those of an engine with {there}, which costs the last block of each hit, and {named} was configured here",
        "name the engine's --speculative-config here (num_speculative_tokens)",
    ),
    "tier": CauseText(
        "a smaller lower tier",
        "Hits are those of a host tier of about {blocks:,} blocks, and {configured:,} were configured here",
        "compare what the connector was given (cpu_bytes_to_use, --kv-offloading-size, --hicache-size) with what it reports",
    ),
    "reset": CauseText(
        "a cache that was emptied",
        "From request {request} on hits are those of a cache that began empty again ({times} times in all)",
        "look for a restart, a reset of the prefix cache or sleep (new weights), and compare what comes after it",
    ),
    "sessions-apart": CauseText(
        "sessions that share nothing",
        "Hits are those of sessions that share nothing with each other, so something near the front is each session's own: "
        "a cache_salt, a name, an id",
        "use one salt per tenant, and put text of the session behind what all share",
    ),
    "hash-seed": CauseText(
        "hash seeds differ",
        "Workers announce different hashes for the same text, so what one has can't be found by the others or their router",
        "set the same PYTHONHASHSEED for all workers, or use sha256_cbor with a fixed seed",
    ),
    "events-off": CauseText(
        "the router doesn't see caches",
        "Hits are those of routing by {policy}, and {configured} was configured: the router receives no KV events",
        "turn events on (--kv-events-config with enable_kv_cache_events), and see kvyard doctor --gateway",
    ),
    "more": CauseText(
        "more hits than owed",
        "The engine counted {more:,} tokens more than this traffic can give",
        "something warmed its cache before, or the trace understates what prompts share",
    ),
    "unknown": CauseText(
        "not explained",
        "The engine counted {missing:,} tokens fewer than it owes, and no known cause gives its counts; the first request "
        "that differs is {request}",
        "run kvyard doctor on the engine, and send it that request twice",
    ),
}
"""Between what the engine owes and what it counted, in the order in which they are tried."""


def say(cause: CauseText, **figures: object) -> str:
    """Return one sentence with the cause and its fix."""
    return f"{cause.sentence.format(**figures)}: {cause.fix.format(**figures)}."
