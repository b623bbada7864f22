"""The gateway whose recording is watched: its processor time, of which a watcher takes a share, and its dashboard."""

from __future__ import annotations

import re

import msgspec

from kvyard.errors import KvyardError
from kvyard.server.dashboard.view import ExpectationView
from kvyard.server.http_client import HttpClient, NoAnswer

PATIENCE_S = 10.0
"""Seconds for an answer."""
CPU_SHARE = 0.02
"""Share of the gateway's processor time that a watcher takes at most; of one core if there is no gateway to ask."""
LONGEST_PAUSE_S = 3600.0
_CPU = re.compile(r"^kvyard_gateway_cpu_seconds_total(?:\{\})? (\S+)$", re.MULTILINE)


class GatewayLink:
    """Asks a gateway, and sends it results. For any thread, one call at a time."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._token = token

    def cpu_seconds(self) -> float:
        """Return the gateway's processor time, of all its processes. Raises ``KvyardError`` where it can't be had."""
        found = _CPU.search(self._ask("GET", "/metrics"))
        if found is None:
            raise KvyardError(f"{self.url}/metrics has no processor time: is it a kvyard gateway?")
        return float(found.group(1))

    def show(self, found: ExpectationView) -> None:
        """Show a result on the gateway's dashboard. Raises ``KvyardError`` where the gateway refuses it."""
        self._ask("POST", "/admin/expectation", msgspec.to_builtins(found))

    def _ask(self, method: str, path: str, json: object = None) -> str:
        try:
            with HttpClient(self.url, token=self._token, seconds=PATIENCE_S) as client:
                reply = client.get(path) if method == "GET" else client.post(path, json)
        except NoAnswer as error:
            raise KvyardError(f"the gateway at {self.url} doesn't answer: {error}") from None
        if reply.status != 200:
            fix = ": name its admin token with KVYARD_ADMIN_TOKEN" if reply.status in (401, 403) else ""
            raise KvyardError(f"the gateway at {self.url} answers {reply.status} to {path}{fix}")
        return reply.text


class CpuBudget:
    """Pauses of a watcher that keep its processor time at a share of the gateway's."""

    def __init__(self, share: float = CPU_SHARE) -> None:
        self.share = share
        self.spent_s = 0.0
        """Processor time of the watcher."""
        self.earned_s = 0.0
        """Processor time that the gateway's allows."""
        self._last: float | None = None
        self._rate = 1.0
        """Processor time of the gateway in a second."""

    def observe(self, gateway_cpu_s: float, elapsed_s: float) -> None:
        """The gateway has used ``gateway_cpu_s`` in all, ``elapsed_s`` after the last call. A counter that fell began again."""
        if self._last is not None and elapsed_s > 0:
            used = gateway_cpu_s - self._last if gateway_cpu_s >= self._last else gateway_cpu_s
            self.earned_s += self.share * used
            self._rate = used / elapsed_s
        self._last = gateway_cpu_s

    def observe_core(self, elapsed_s: float) -> None:
        """No gateway can be asked: one core is taken to have been busy for ``elapsed_s``."""
        self.earned_s += self.share * elapsed_s
        self._rate = 1.0

    def pause_s(self, every_s: float) -> float:
        """Return the seconds until the next look, ``every_s`` at least: until what was spent is earned, at today's rate."""
        missing = self.spent_s - self.earned_s
        if missing <= 0:
            return every_s
        rate = self.share * self._rate
        return max(every_s, min(LONGEST_PAUSE_S, missing / rate if rate > 0 else LONGEST_PAUSE_S))

    @property
    def covered(self) -> bool:
        """True if the next look may begin."""
        return self.spent_s <= self.earned_s
