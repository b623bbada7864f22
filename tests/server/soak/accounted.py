"""A load whose every request is accounted for: answered whole, refused with a reason, cut with an honest end, or left by us."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import aiohttp

PROMPTS = 60
FAMILIES = 8


def prompt_of(number: int) -> list[int]:
    """Prompts of families that share their beginnings; none ends where a block does."""
    rng = random.Random(number)
    shared = random.Random(-1 - number % FAMILIES)
    ids = [shared.randrange(1 << 15) for _ in range(16 * (4 + number % FAMILIES * 4))]
    return ids + [rng.randrange(1 << 15) for _ in range(rng.randint(2, 24) * 16 + 5)]


class AccountedLoad:
    """Requests at a steady rate, whatever becomes of those before."""

    def __init__(self, url: str, seed: int, per_second: float) -> None:
        self._url, self._rng, self._pause = url, random.Random(seed), 1 / per_second
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.unaccounted: list[str] = []
        self._ending = False

    def end(self) -> None:
        self._ending = True

    async def run(self) -> None:
        """Ask until told to end; then wait for what is under way."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=180)) as session,
            asyncio.TaskGroup() as group,
        ):
            while not self._ending:
                group.create_task(self._one(session))
                await asyncio.sleep(self._pause * self._rng.uniform(0.2, 1.8))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        rng = self._rng
        self.sent += 1
        streamed, leaves = rng.random() < 0.7, rng.random() < 0.04
        body = {
            "prompt": prompt_of(rng.randrange(PROMPTS)),
            "max_tokens": rng.randint(2, 40),
            "ignore_eos": True,
            "stream": streamed,
        }
        began = False
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as reply:
                began = True
                if reply.status != 200:
                    self._refused(reply.status, await reply.text())
                elif streamed and leaves:
                    await reply.content.readany()
                    self.outcomes["left"] += 1
                else:
                    self._answered(streamed, await reply.text())
        except aiohttp.ClientPayloadError:
            # It began, and its end never came, which HTTP shows.
            self.outcomes["cut"] += 1
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.unaccounted.append(f"{type(error).__name__} {error}, {'' if began else 'not '}begun")

    def _refused(self, status: int, text: str) -> None:
        try:
            said = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            self.unaccounted.append(f"{status} without a reason: {text[:200]!r}")
            return
        assert said
        self.outcomes["refused"] += 1
        self.reasons[f"{status} {said.partition(':')[0][:60]}"] += 1

    def _answered(self, streamed: bool, text: str) -> None:
        if not streamed:
            whole = json.loads(text)["usage"]["completion_tokens"] > 0
            self.outcomes["answered" if whole else "empty"] += 1
        elif text.endswith("data: [DONE]\n\n") and '{"error"' not in text:
            self.outcomes["answered"] += 1
        elif '{"error"' in text:
            self.outcomes["cut"] += 1
        else:
            self.unaccounted.append(f"an answer that just ends: {text[-200:]!r}")
