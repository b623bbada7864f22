"""A worker of Dynamo that stands before one OpenAI engine, for benchmarks/gateway.py. Run it with Dynamo's Python.

    dynamo_worker.py MODEL_FOLDER BLOCK_SIZE BLOCKS URL EVENTS      token ids in, the engine's stream out, its events relayed
    dynamo_worker.py MODEL_FOLDER BLOCK_SIZE BLOCKS at-once PACE    answers by itself, a token each PACE ms

Dynamo's frontend speaks to workers of its own kind only. They find each other by files: DYN_FILE_KV names the folder.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvloop
from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

FOLDER, BLOCK, BLOCKS, URL, LAST = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
WORD = 97


def figure(name: str, text: bytes) -> int:
    """The last one of that name."""
    found = re.findall(rb'"%b":\s*(\d+)' % name.encode(), text)
    return int(found[-1]) if found else 0


async def at_once(request: dict[str, Any], context: Any = None) -> AsyncIterator[dict[str, Any]]:
    tokens, pace = (request.get("stop_conditions") or {}).get("max_tokens") or 16, float(LAST) / 1000
    for _ in range(tokens - 1):
        yield {"token_ids": [WORD]}
        await asyncio.sleep(pace)
    yield {"token_ids": [WORD], "finish_reason": "length"}


class Relay:
    def __init__(self) -> None:
        limit, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        self.session = aiohttp.ClientSession(connector=limit, timeout=patience)

    async def generate(self, request: dict[str, Any], context: Any = None) -> AsyncIterator[dict[str, Any]]:
        ids = request["token_ids"]
        wanted = (request.get("stop_conditions") or {}).get("max_tokens") or 16
        body = {"model": "mock", "prompt": ids, "max_tokens": wanted, "ignore_eos": True, "stream": True}
        data = json.dumps(body | {"stream_options": {"include_usage": True}}, separators=(",", ":"))
        end, sent = b"", 0
        async with self.session.post(URL, data=data, headers={"content-type": "application/json"}) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status} {(await reply.read())[:200]!r}")
            async for part in reply.content.iter_any():
                end = (end + part)[-2000:]
                new = min(part.count(b'"text":'), wanted - 1 - sent)
                if new > 0:
                    sent += new
                    yield {"token_ids": [WORD] * new}
        usage = {
            "prompt_tokens": figure("prompt_tokens", end),
            "completion_tokens": wanted,
            "total_tokens": wanted + len(ids),
            "prompt_tokens_details": {"cached_tokens": figure("cached_tokens", end)},
        }
        yield {"token_ids": [WORD] * (wanted - sent), "finish_reason": "length", "completion_usage": usage}


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    settings = ModelRuntimeConfig()
    settings.total_kv_blocks, settings.max_num_seqs, settings.max_num_batched_tokens = BLOCKS, 256, 8192
    settings.enable_local_indexer = True
    serve = at_once if URL == "at-once" else Relay().generate
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        FOLDER,
        "mock",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK,
        runtime_config=settings,
        ignore_weights=True,
    )
    publisher = None
    if URL != "at-once":
        publisher = KvEventPublisher(
            endpoint, kv_block_size=BLOCK, zmq_endpoint=LAST, zmq_topic="", enable_local_indexer=True
        )
    print("serving", publisher, flush=True)
    await endpoint.serve_endpoint(serve)


uvloop.run(main())
