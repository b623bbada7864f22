"""Token ids from engines: the choice of the engine that tokenizes a prompt, its time limit, and pauses of failing engines."""

from typing import Any

import msgspec

from kvyard.clock import Clock, from_seconds
from kvyard.server.gateway.client import EngineClient
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.failures import EngineFailed
from kvyard.server.gateway.pool import EnginePool

TRIES = 2
"""Engines that are asked for one prompt."""
BYTES_PER_SECOND = 1 << 20
"""Rate of tokenizing a long prompt: its engine has this much more time for each second's worth."""
BACKOFF_SECONDS = 1.0
"""For which an engine isn't asked after a failure; twice as long after each further one."""
LONGEST_BACKOFF_SECONDS = 60.0


class TokenizeRecord(msgspec.Struct):
    """Requests to one engine's tokenizer."""

    in_flight: int = 0
    failures: int = 0
    """In a row."""
    not_before: int = 0


class EngineTokenizer:
    """Asks the engines of one pool."""

    def __init__(self, pool: EnginePool, client: EngineClient, clock: Clock) -> None:
        self._pool = pool
        self._client = client
        self._clock = clock
        self._records: dict[str, TokenizeRecord] = {}

    async def __call__(self, body: dict[str, Any]) -> list[int] | None:
        """Return token ids of the prompt in ``body``; ``None`` where no engine gives any."""
        data = msgspec.json.encode(body)
        seconds = self._pool.config.tokenize_seconds + len(data) / BYTES_PER_SECOND
        asked: set[str] = set()
        while len(asked) < TRIES and (engine := self._choose(body.get("model"), asked)) is not None:
            asked.add(engine.name)
            record = self._records.setdefault(engine.name, TokenizeRecord())
            record.in_flight += 1
            try:
                tokens = await self._client.tokenize(engine.url, data, seconds)
            except EngineFailed:
                wait_s = min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0**record.failures)
                record.failures = min(record.failures + 1, 16)
                record.not_before = self._clock.now() + from_seconds(wait_s)
            else:
                record.failures = 0
                return tokens
            finally:
                record.in_flight -= 1
        return None

    def _choose(self, model: object, asked: set[str]) -> Engine | None:
        """Return the engine with the fewest questions, then the fewest requests in flight. Engines that drain, are down or
        failed a moment ago aren't asked, nor are suspects where another engine is well.
        """
        pool, now = self._pool, self._clock.now()
        if len(self._records) > 2 * len(pool.engines) + 8:
            self._records = {
                name: record for name, record in self._records.items() if name in pool.engines or record.in_flight
            }
        best: Engine | None = None
        least: tuple[bool, int, int] | None = None
        for engine in pool.engines.values():
            if not engine.up or engine.draining or engine.name in asked:
                continue
            if isinstance(model, str) and model != pool.model and not engine.serves(model):
                continue
            record = self._records.get(engine.name)
            if record is not None and (record.not_before > now or (record.failures and record.in_flight)):
                continue  # after a failure, one question at a time says whether it is well again
            load = (engine.state != "ready", 0 if record is None else record.in_flight, engine.in_flight)
            if least is None or load < least:
                best, least = engine, load
        return best
