"""A remote index: scores from a ``kvyard index`` service, in the form that ``Router.route`` takes.

A router doesn't wait, so the scores are fetched before and passed with the request. The service decides on trust: streams
without trust earn no credit. If the service doesn't answer, requests are routed by load.
"""

import logging
from collections.abc import Sequence
from itertools import accumulate

import aiohttp
import msgspec

from kvyard.clock import SECOND, Clock
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.hashing import Namespace
from kvyard.index import Holder, Identity
from kvyard.router import Reach
from kvyard.router.overlaps import Known
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.http_client import read_body
from kvyard.server.indexer.config import TIERS
from kvyard.server.indexer.schemas import PromptScores, WorkerScore

log = logging.getLogger(__name__)

PAUSE = SECOND
"""Time for which a service that failed isn't asked again, so that it doesn't slow every request."""


MOST_BYTES = 16 << 20
"""Of an answer: 10,000 workers take three."""


class _RemoteScores(msgspec.Struct):
    block_size: int
    results: list[PromptScores]


class RemoteIndex:
    """One model's index elsewhere."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: GatewayConfig,
        token: str | None,
        model: str,
        identity: Identity,
        clock: Clock,
    ) -> None:
        assert config.index_url is not None
        self.identity = identity
        self.failures = 0
        self.error = ""
        """Why it couldn't be asked the last time; empty where it could."""
        self._session = session
        self._url = f"{config.index_url.rstrip('/')}/score"
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=config.index_seconds)
        self._clock = clock
        self._not_before = 0
        self._decode = msgspec.json.Decoder(_RemoteScores).decode

    async def ask(self, tokens: Sequence[int], namespace: Namespace) -> Known | None:
        """Return the service's answer for a prompt; ``None`` if it has none."""
        if self._clock.now() < self._not_before:
            return None
        body = {
            "model_name": self._model,
            "token_ids": tokens,
            "lora_name": namespace.lora_name,
            "cache_salt": namespace.salt,
        }
        try:
            async with self._session.post(
                self._url,
                data=msgspec.json.encode(body),
                headers=self._headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as reply:
                content = await read_body(reply, MOST_BYTES)
                if reply.status == 404:  # no worker of this model is registered there yet
                    self._fail("it has no worker of this model")
                    return None
                if reply.status != 200:
                    raise ValueError(f"it answered {reply.status}")
                scoring = self._decode(content)
                if not scoring.results:
                    raise ValueError("it answered without a result")
                if scoring.block_size != self.identity.block_size:
                    raise ValueError(
                        f"its blocks have {scoring.block_size} tokens, ours {self.identity.block_size}: set block_size"
                    )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, *DECODE_ERRORS) as error:
            self.failures += 1
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            self._fail(f"{kind}{error}"[:200])
            self._not_before = self._clock.now() + PAUSE
            return None
        if self.error:
            log.info("the index at %s answers again for %s", self._url, self._model)
            self.error = ""
        return {
            Holder(str(worker.instance_id), worker.dp_rank): _reach(worker)
            for worker in scoring.results[0].workers
            if worker.confidence > 0
        }

    def _fail(self, why: str) -> None:
        if not self.error:
            log.warning(
                "the index at %s doesn't answer for %s, so requests are routed by load: %s", self._url, self._model, why
            )
        self.error = why


def _reach(worker: WorkerScore) -> Reach:
    """Return blocks that each tier reaches, down to the last one that the worker has: no less than the closer ones."""
    blocks = [worker.tiers[name].blocks if name in worker.tiers else 0 for name in TIERS]
    while len(blocks) > 1 and not blocks[-1]:
        blocks.pop()
    return Reach(tuple(accumulate(blocks)), worker.confidence)
