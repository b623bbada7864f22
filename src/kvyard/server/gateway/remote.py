"""A remote index: what a ``kvyard index`` service says, in the shape in which a router asks an index in its own process.

A router doesn't wait, so the answer is fetched before it is asked, and laid in ``found``. Trust is the service's: what it holds
for lost earns nothing there, and so nothing here. Where it doesn't answer, nobody has anything, and load decides.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from kvyard.clock import Clock
from kvyard.events.types import Tier
from kvyard.hashing import Namespace
from kvyard.index import Holder, Identity
from kvyard.server.indexer.config import TIERS

log = logging.getLogger(__name__)

PAUSE = 1_000_000_000
"""Nanoseconds for which a service that failed isn't asked again, so that its trouble doesn't slow every request."""


class _Tier(msgspec.Struct):
    blocks: int


class _Worker(msgspec.Struct):
    instance_id: int | str
    dp_rank: int
    tiers: dict[str, _Tier]
    confidence: float


class _Scored(msgspec.Struct):
    workers: list[_Worker]


class _Scoring(msgspec.Struct):
    block_size: int
    results: list[_Scored]


Found = dict[Holder, tuple[list[int], float]]
"""Per worker, blocks up to and with each tier, and what its word is worth."""


class RemoteRoster:
    """Workers in a router's order; see ``kvyard.index.Roster``."""

    def __init__(self, workers: Sequence[Holder], block_size: int) -> None:
        # The same types as a Roster's: where the router is compiled, it takes no others.
        self.tiers = list(Tier)
        self.workers = tuple(workers)
        self.alignments = [block_size] * len(self.workers)
        self.confidence: list[float] | None = None


class RemoteIndex:
    """One model's index elsewhere."""

    def __init__(
        self, session: Any, url: str, token: str | None, model: str, identity: Identity, seconds: float, clock: Clock
    ) -> None:
        """``session`` is an aiohttp client's."""
        self.identity = identity
        self.found: Found | None = None
        """The answer for the request that is being routed."""
        self.failures = 0
        self.error = ""
        """Why it couldn't be asked the last time; empty where it could."""
        self._session = session
        self._url = f"{url.rstrip('/')}/score"
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._model = model
        self._seconds = seconds
        self._clock = clock
        self._not_before = 0
        self._decode = msgspec.json.Decoder(_Scoring).decode

    async def ask(self, tokens: Sequence[int], namespace: Namespace) -> Found | None:
        """What the service says of a prompt; ``None`` where it doesn't."""
        import aiohttp

        if self._clock.now() < self._not_before:
            return None
        body: dict[str, Any] = {"model_name": self._model, "token_ids": tokens}
        if namespace.lora_name is not None:
            body["lora_name"] = namespace.lora_name
        if namespace.salt:
            body["cache_salt"] = namespace.salt
        try:
            timeout = aiohttp.ClientTimeout(total=self._seconds)
            async with self._session.post(
                self._url,
                data=msgspec.json.encode(body),
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
            ) as reply:
                content = await reply.read()
                if reply.status == 404:  # nobody is registered for this model there yet
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
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.MsgspecError) as error:
            self.failures += 1
            said = "" if type(error) is ValueError else f"{type(error).__name__}: "
            self._fail(f"{said}{error}"[:200])
            self._not_before = self._clock.now() + PAUSE
            return None
        if self.error:
            log.info("the index at %s says again what %s has", self._url, self._model)
            self.error = ""
        return {
            Holder(str(one.instance_id), one.dp_rank): _reaches(one)
            for one in scoring.results[0].workers
            if one.confidence > 0
        }

    def _fail(self, why: str) -> None:
        if not self.error:
            log.warning("the index at %s doesn't say what %s has, so load decides: %s", self._url, self._model, why)
        self.error = why

    # -- what a router asks ---------------------------------------------------------------------------------------------

    def roster(self, workers: Sequence[Holder]) -> RemoteRoster:
        """Workers to ask ``reaches`` about."""
        return RemoteRoster(workers, self.identity.block_size)

    def reaches(self, roster: RemoteRoster, keys: Sequence[int], tokens: int | None = None) -> list[list[int]]:
        """As ``kvyard.index.Indexer.reaches``, from ``found``."""
        found = self.found
        if not found:
            return []
        nothing = ([0] * len(roster.tiers), 1.0)
        rows = [found.get(worker, nothing) for worker in roster.workers]
        sure = [confidence for _, confidence in rows]
        roster.confidence = sure if min(sure, default=1.0) < 1 else None
        return [[reach[level] for reach, _ in rows] for level in range(len(roster.tiers))]


def _reaches(worker: _Worker) -> tuple[list[int], float]:
    """What each tier reaches: no less than the closer ones."""
    longest = 0
    out: list[int] = []
    for name in TIERS:
        tier = worker.tiers.get(name)
        if tier is not None:
            longest += tier.blocks
        out.append(longest)
    return out, worker.confidence
