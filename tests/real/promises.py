"""Promised and reported cached tokens of prompts: asked, kept, and explained."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from tests.real.engine import NAME
from tests.real.watching import EventWatch

_HIT = re.compile(r"worker=(\S+)@\d+; .*hit=(\d+)/(\d+)")
_PREDICTED = re.compile(r"predicted=(\d+)")
EVICTED = "evicted between decision and start"
ON_THE_WAY = "evicted before, the event still on its way"
ANNOUNCED = "stored before, the event still on its way"
AT_ONCE = "two prompts that part there were computed at once, and neither kept the window before it"
"""Of an engine whose events don't tell what its windows have."""
PROMPT_FIRST = "asked for n answers: the engine computes the prompt by itself first, and every answer finds all of it"
"""Of SGLang; which is then the hit of no request that a promise was about."""
UNEXPLAINED = "not explained"
LATE = 2.0
"""Seconds by which an eviction's event may come after the answer that it was felt by: others use the machine too."""
STORED_LATE = 20.0
"""Seconds that a stored block's event is waited for. One that comes after the decision can't have been known, however late."""


class Promise(msgspec.Struct):
    """One request."""

    kind: str
    engine: str
    prompt: int
    """Its tokens."""
    promised: int
    delivered: int
    predicted: int
    """Blocks of the promise that no event had told of."""
    decision: str
    """As the gateway put it."""
    why: str = ""
    """Of one that wasn't kept to the token."""

    @property
    def exact(self) -> bool:
        return self.promised == self.delivered


class Asker:
    """Sends requests through a gateway, and keeps what was promised and delivered."""

    def __init__(self, url: str, block_size: int, watches: Mapping[str, EventWatch]) -> None:
        self.block_size, self.watches = block_size, watches
        self.promises: list[Promise] = []
        self.refused = 0
        self.cancelled = 0
        self._lock = threading.Lock()
        self.client = httpx.Client(base_url=url, timeout=240.0, trust_env=False)

    def ask(self, kind: str, path: str, **body: Any) -> dict[str, Any]:
        """A request whose answer is read to its end. Returns the answer, or the last chunk of a stream."""
        body = {"model": NAME, "temperature": 0, "max_tokens": 8, "return_token_ids": True, **body}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        began = time.monotonic()
        reply = self.client.post(path, json=body)
        assert reply.status_code == 200, (reply.status_code, reply.text)
        if body.get("stream"):
            chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
            answer, ids = chunks[-1], self.prompt_ids(body, chunks[0])
        else:
            answer = reply.json()
            ids = self.prompt_ids(body, answer)
        self._keep(kind, reply.headers["x-kvyard-decision"], answer["usage"], ids, began)
        return answer

    def prompt_ids(self, body: Mapping[str, Any], answer: Mapping[str, Any]) -> list[int]:
        """The prompt's ids as the engine read it; of several prompts those of the last, which ``cached_tokens`` is about."""
        found = answer.get("prompt_token_ids")
        if found is None:
            found = answer["choices"][-1].get("prompt_token_ids")
        return list(found or ())

    def refuse(self, path: str, **body: Any) -> None:
        """A request that the gateway can read and the engine refuses."""
        reply = self.client.post(path, json={"model": NAME, "max_tokens": 1_000_000, **body})
        assert reply.status_code == 400, (reply.status_code, reply.text)
        with self._lock:
            self.refused += 1

    def cancel(self, path: str, chunks: int, **body: Any) -> None:
        """A stream that is left after some chunks."""
        body = {"model": NAME, "temperature": 0, "max_tokens": 200, "ignore_eos": True, **body, "stream": True}
        with self.client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200
            for number, _ in enumerate(reply.iter_raw()):
                if number >= chunks:
                    break
        with self._lock:
            self.cancelled += 1

    def _keep(self, kind: str, decision: str, usage: Mapping[str, Any], ids: Sequence[int], began: float) -> None:
        found = _HIT.search(decision)
        assert found is not None, decision
        predicted = _PREDICTED.search(decision)
        delivered = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        promise = Promise(
            kind=kind,
            engine=found[1],
            prompt=len(ids),
            promised=int(found[2]) * self.block_size,
            delivered=delivered,
            predicted=int(predicted[1]) if predicted else 0,
            decision=decision,
        )
        if not promise.exact:
            promise.why = self._why(promise, ids, began)
        with self._lock:
            self.promises.append(promise)

    def _why(self, promise: Promise, ids: Sequence[int], began: float) -> str:
        """Why less was there than promised, or more: by what the engine announced, and when it came here."""
        watch, size = self.watches[promise.engine], self.block_size
        stop = time.monotonic() + (LATE if promise.promised > promise.delivered else STORED_LATE)
        while time.monotonic() < stop:
            if promise.promised > promise.delivered:
                if watch.evicted(ids[: promise.promised], size, began, time.monotonic()):
                    return EVICTED
                if watch.evicted(ids[: promise.promised], size, began - LATE, began):
                    return ON_THE_WAY
            elif watch.announced(ids[: promise.delivered], size, began - LATE):
                return ANNOUNCED
            time.sleep(0.05)
        return "predicted, and not computed yet" if promise.predicted else UNEXPLAINED

    # -- what came of it ------------------------------------------------------------------------------------------------

    def tally(self) -> dict[str, Any]:
        """The figures."""
        return {
            "requests": len(self.promises),
            "exact": sum(one.exact for one in self.promises),
            "over": dict(Counter(one.why for one in self.promises if one.promised > one.delivered)),
            "under": dict(Counter(one.why for one in self.promises if one.promised < one.delivered)),
            "odd": [msgspec.to_builtins(one) for one in self.promises if not one.exact],
            "cancelled": self.cancelled,
            "refused": self.refused,
            "prompt tokens": sum(one.prompt for one in self.promises),
            "promised tokens": sum(one.promised for one in self.promises),
            "cached tokens": sum(one.delivered for one in self.promises),
            "evicted blocks": sum(len(watch.removed) for watch in self.watches.values()),
            "kinds": {kind: [sum(one.exact for one in group), len(group)] for kind, group in _by_kind(self.promises)},
        }


def _by_kind(promises: Sequence[Promise]) -> Iterator[tuple[str, list[Promise]]]:
    for kind in sorted({one.kind for one in promises}):
        yield kind, [one for one in promises if one.kind == kind]
