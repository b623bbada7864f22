"""The gateway whose recording is watched: its CPU time, which limits the watcher's, and its dashboard."""

from __future__ import annotations

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.live.metrics_page import MetricsPage
from kvyard.server.dashboard.view import ExpectationView
from kvyard.server.http_client import HttpClient, NoAnswer

PATIENCE_S = 10.0
"""Seconds for an answer."""
CPU_SHARE = 0.02
"""Share of the gateway's processor time that a watcher takes at most; of one core if there is no gateway to ask."""
LONGEST_PAUSE_S = 3600.0
SAVED_S = 10.0
"""Processor time that a watcher saves up at most."""
FEWEST = 50
"""Requests of the smallest look."""
CPU = "kvyard_gateway_cpu_seconds_total"


class GatewayLink:
    """Asks a gateway, and sends it results. For any thread, one call at a time."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._token = token

    def cpu_seconds(self) -> float:
        """Return the gateway's processor time, of all its processes. Raises ``KvyardError`` if it isn't available."""
        page = MetricsPage(self._ask("GET", "/metrics"))
        if CPU not in page:
            raise KvyardError(f"{self.url}/metrics has no processor time: is it a kvyard gateway?")
        return page.total(CPU)

    def show(self, view: ExpectationView) -> None:
        """Show a result on the gateway's dashboard. Raises ``KvyardError`` where the gateway refuses it."""
        self._ask("POST", "/admin/expectation", msgspec.to_builtins(view))

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
    """Processor time of a watcher, kept at a share of the gateway's: how many requests a look may have, and when it begins."""

    def __init__(self, share: float = CPU_SHARE) -> None:
        self.share = share
        self.spent_s = 0.0
        """Processor time of the watcher."""
        self.earned_s = 0.0
        """Processor time that the gateway's allows."""
        self.request_s = 0.0
        """Processor time of a request in the latest look; 0 before the first."""
        self._last: float | None = None
        self._rate = 1.0
        """Processor time of the gateway in a second."""

    def observe(self, gateway_cpu_s: float, elapsed_s: float) -> None:
        """Earn a share of what the gateway has used: ``gateway_cpu_s`` in all, ``elapsed_s`` seconds after the previous call.

        A counter that fell began again.
        """
        if self._last is not None and elapsed_s > 0:
            used = gateway_cpu_s - self._last if gateway_cpu_s >= self._last else gateway_cpu_s
            self._earn(used, elapsed_s)
        self._last = gateway_cpu_s

    def observe_core(self, elapsed_s: float) -> None:
        """Earn a share of one core that was busy for ``elapsed_s``, where no gateway can be asked."""
        self._earn(elapsed_s, elapsed_s)

    def _earn(self, used_s: float, elapsed_s: float) -> None:
        self.earned_s = min(self.earned_s + self.share * used_s, self.spent_s + SAVED_S)
        if elapsed_s > 0:
            self._rate = used_s / elapsed_s

    def requests(self, most: int) -> int:
        """Return how many requests the next look may compare, at most ``most``; 0 if it has to wait."""
        if not self.request_s:
            return min(FEWEST, most)  # nothing is known yet: a small one, at once
        affordable = int((self.earned_s - self.spent_s) / self.request_s)
        return min(affordable, most) if affordable >= min(FEWEST, most) else 0

    def pause_s(self, every_s: float, most: int) -> float:
        """Return the seconds until the next look: at least ``every_s``, and until the smallest look is earned at the latest
        rate."""
        missing = self.spent_s + min(FEWEST, most) * self.request_s - self.earned_s
        rate = self.share * self._rate
        if missing <= 0:
            return every_s
        return max(every_s, min(LONGEST_PAUSE_S, missing / rate if rate > 0 else LONGEST_PAUSE_S))
