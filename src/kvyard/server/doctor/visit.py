"""A visit: an engine's own information over HTTP, and its answers to a few short requests. No judgement here.

Every visit asks the same questions, so that engines can be compared. The prompts are generated and begin at random, so no
cached prefix interferes, and no real traffic is needed.
"""

import secrets
import statistics
import threading
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from kvyard.clock import MS, SECOND, WallClock
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.openai import ListedModels, TokenIds, TokenUsage
from kvyard.replay.live.facts import cache_labels, is_asleep
from kvyard.replay.live.metrics_page import MetricsPage
from kvyard.server.http_client import HttpClient, HttpReply, NoAnswer

TEXT = "The quick brown fox – naïve, 中文, 🙂 –\n\tjumps over  12345 lazy dogs.\n\n"
"""Text in which tokenizers differ: case, spaces, digits, accents, other scripts."""
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Say ok."},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": TEXT.strip()},
)
PATIENCE = 30.0
"""Seconds for one answer."""
CONNECT = 5.0
ROUNDS = 5
HITS = "vllm:prefix_cache_hits_total"


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """Questions to all engines."""

    model: str | None = None
    """Left out, or not there, the first that an engine names."""
    messages: Sequence[dict[str, Any]] = MESSAGES
    probe: bool = True
    """True if requests are sent, and not only questions."""
    block_size: int = 16
    """Expected block size: prompts must fill a few."""
    common: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """A text that all engines get."""

    def text(self, start: str, seen: "Visit") -> str:
        """Return a prompt that begins with ``start`` and fills a few blocks, whatever the tokenizer, as far as the engine takes
        it.
        """
        words = "once upon a time there was a doctor who asked every engine the same thing twice "
        text = f"{start} " + words * (1 + 6 * max(self.block_size, seen.block_size or 0) // 16)
        return text if seen.max_model_len is None else text[: max(1, seen.max_model_len - 8)]


class Visit(msgspec.Struct, kw_only=True):
    """Observations of one engine. Missing answers are ``None`` or empty."""

    url: str
    problem: str = ""
    """Why it can't be talked to."""
    unauthorised: bool = False
    health: int | None = None
    """The status of /health."""
    version: str = ""
    models: list[str] = []
    max_model_len: int | None = None
    round_trip_ms: float | None = None
    """The median of a few."""
    skew_s: float | None = None
    """Seconds by which its clock is ahead of ours."""
    cache: dict[str, str] = {}
    """Labels of vllm:cache_config_info."""
    ranks: int = 1
    """Data-parallel ranks behind this address, as its metrics have it. All requests ask for the first."""
    asleep: bool = False
    """As its metrics have it."""
    text_ids: list[int] | None = None
    chat_ids: list[int] | None = None
    chat_tokens: int | None = None
    """Tokens of the prompt, as counted when the messages were sent as a request."""
    probe_ids: list[int] = []
    """A prompt that only this engine got."""
    prompt_tokens: int | None = None
    """Tokens of the prompt that all engines got."""
    cached: list[int | None] = []
    """Cached tokens of it: at first, the second time, and with a salt."""
    hits: float | None = None
    """By how much vllm:prefix_cache_hits_total grew the second time."""
    failed: dict[str, str] = {}
    """Other questions that failed, and the answers."""

    @property
    def answered(self) -> bool:
        """Return true if it answered anything."""
        return not self.problem and not self.unauthorised

    @property
    def block_size(self) -> int | None:
        """As its metrics have it."""
        return self._number("block_size")

    @property
    def device_blocks(self) -> int | None:
        """Blocks of each rank's device, without vLLM's null block, which holds nothing."""
        blocks = self._number("num_gpu_blocks")
        return None if blocks is None else max(0, blocks - 1)

    def _number(self, label: str) -> int | None:
        text = self.cache.get(label, "")
        return int(text) if text.isdecimal() else None


def visit(url: str, ask: Questions, token: str | None = None, wait: Callable[[], None] = lambda: None) -> Visit:
    """Visit one engine. ``wait`` is called before the first request is sent. What fails is noted, not raised; raises
    ``KvyardError`` where aiohttp isn't installed.
    """
    seen = Visit(url=url, models=[], cache={}, probe_ids=[], cached=[], failed={})
    try:
        with HttpClient(url, token=token, seconds=PATIENCE, connect_seconds=CONNECT) as client:
            _Visitor(client, seen, ask).all(wait)
    except NoAnswer as error:
        seen.problem = str(error)
    return seen


class _Visitor:
    """The steps of one visit. ``NoAnswer`` ends it."""

    def __init__(self, client: HttpClient, seen: Visit, ask: Questions) -> None:
        self._client = client
        self._seen = seen
        self._ask = ask
        self._model = ask.model

    def all(self, wait: Callable[[], None]) -> None:
        self._distance()
        models = self._read(self._client.get("/v1/models"), "/v1/models")
        if models is not None:
            self._models(models)
        if self._seen.unauthorised:
            return
        version = self._read(self._client.get("/version"), "/version")
        if isinstance(version, dict):
            self._seen.version = str(version.get("version", ""))[:100]
        self._metrics()
        self._seen.text_ids = self._tokenize("text", prompt=TEXT)
        self._seen.chat_ids = self._tokenize("chat", messages=self._ask.messages)
        if self._ask.probe:
            wait()
            self._probe()

    def _distance(self) -> None:
        clock, seen = WallClock.since_epoch(), self._seen
        took: list[float] = []
        for _ in range(ROUNDS + 1):
            began = clock.now()
            reply = self._client.get("/health")
            ended = clock.now()
            took.append((ended - began) / MS)
        seen.health = reply.status
        seen.round_trip_ms = statistics.median(took[1:])  # the first one connects
        try:
            date = parsedate_to_datetime(reply.headers["date"]).timestamp()
        except (LookupError, ValueError, TypeError):
            return
        # It says whole seconds, cut off.
        ours = (began + ended) / 2 / SECOND
        seen.skew_s = min(date + 1 - ours, 0.0) if date < ours else date - ours

    def _models(self, answer: Any) -> None:
        seen = self._seen
        try:
            entries = msgspec.convert(answer, ListedModels).data
        except msgspec.ValidationError:
            seen.failed["/v1/models"] = "its answer isn't a list of models"
            return
        seen.models = [entry.id for entry in entries]
        if entries:
            # Where the model that is asked for isn't there, another one shows what else is wrong.
            mine = next((entry for entry in entries if entry.id == self._model), entries[0])
            self._model = mine.id
            seen.max_model_len = mine.max_model_len

    def _metrics(self) -> None:
        page = self._page()
        self._seen.cache = cache_labels(page)
        self._seen.asleep = is_asleep(page)
        self._seen.ranks = max(1, len(page.label_values("engine", "vllm:num_requests_running")))

    def _page(self) -> MetricsPage:
        reply = self._client.get("/metrics", redirects=True)
        return MetricsPage(reply.text if reply.status == 200 else "")

    def _tokenize(self, what: str, **body: Any) -> list[int] | None:
        reply = self._post("/tokenize", f"/tokenize ({what})", {"model": self._model, **body})
        try:
            return msgspec.convert(reply, TokenIds).tokens
        except msgspec.ValidationError:
            return None

    def _probe(self) -> None:
        seen, ask = self._seen, self._ask
        chat = self._usage("/v1/chat/completions", "a chat", messages=ask.messages)
        seen.chat_tokens = None if chat is None else chat.prompt_tokens
        text = ask.text(ask.common, seen)
        prompt = self._tokenize("probe", prompt=text) or text
        self._send("the first", prompt)
        before = _hits(self._page())
        for _ in range(2 * seen.ranks):  # where ranks are chosen behind our back, the next one may be another
            seen.cached = seen.cached[:1]
            if self._send("the second", prompt) != 0:
                break
        after = _hits(self._page())
        seen.hits = None if before is None or after is None else after - before
        self._send("the salted", prompt, cache_salt=secrets.token_hex(8))
        own = self._tokenize("probe", prompt=ask.text(secrets.token_hex(8), seen))
        if own is not None and self._usage("/v1/completions", "another completion", prompt=own) is not None:
            seen.probe_ids = own

    def _send(self, what: str, prompt: Any, **more: Any) -> int | None:
        """Return a completion of the prompt that all engines get; returns what was cached of it."""
        usage = self._usage("/v1/completions", f"{what} completion", prompt=prompt, **more)
        cached = None if usage is None else usage.cached_tokens
        self._seen.cached.append(cached)
        if usage is not None:
            self._seen.prompt_tokens = usage.prompt_tokens
        return cached

    def _usage(self, path: str, what: str, **body: Any) -> TokenUsage | None:
        reply = self._post(path, what, {"model": self._model, "max_tokens": 1, "temperature": 0, **body})
        if reply is None:
            return None
        try:
            usage = msgspec.convert(reply, _Completed).usage
            if usage.prompt_tokens is not None:
                return usage
        except msgspec.ValidationError:
            pass
        self._seen.failed[what] = "its answer has no usage"
        return None

    def _post(self, path: str, what: str, body: dict[str, Any]) -> Any:
        given = {name: value for name, value in body.items() if value is not None}
        return self._read(self._client.post(path, given, headers={"X-data-parallel-rank": "0"}), what)

    def _read(self, reply: HttpReply, what: str) -> Any:
        if reply.status in (401, 403):
            self._seen.unauthorised = True
        if reply.status == 200:
            try:
                return reply.json()
            except DECODE_ERRORS:
                self._seen.failed[what] = "its answer is no JSON"
                return None
        self._seen.failed[what] = f"{reply.status} {' '.join(reply.text[:200].split())}".strip()
        return None


class _Completed(msgspec.Struct):
    usage: TokenUsage


def _hits(page: MetricsPage) -> float | None:
    return page.total(HITS) if HITS in page else None


SETTLE = 300 * MS
"""Until a subscription has reached a publisher that was just connected to; and until the last events are here."""
FOR_LISTENERS = 3 * SECOND
"""Time to wait for listeners before asking nevertheless."""


class Round(threading.Thread):
    """Visits to all of ``urls``. It is alive until the last answer, and a little longer."""

    def __init__(
        self, urls: Sequence[str], ask: Questions, token: str | None, listening: Callable[[], bool] | None = None
    ) -> None:
        """``listening`` says whether listeners are connected; left out, there are none."""
        super().__init__(daemon=True)
        self.visits: list[Visit] = []
        """Visits so far, in order."""
        self._urls = urls
        self._ask = ask
        self._token = token
        self._listening = listening
        self._clock = WallClock()
        self._failure: BaseException | None = None

    def wait(self) -> None:
        """Wait until it is done. Raises what a visit raised."""
        while self.is_alive():
            self.join(0.2)  # so that Ctrl-C gets through
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        try:
            for url in self._urls:
                self.visits.append(visit(url, self._ask, self._token, self._wait_for_listeners))
            if self._listening is not None:
                self._sleep(SETTLE)
        except BaseException as error:  # raised by ``wait``
            self._failure = error

    def _wait_for_listeners(self) -> None:
        if self._listening is None or self.visits:
            return
        end = self._clock.now() + FOR_LISTENERS
        while not self._listening() and self._clock.now() < end:
            self._sleep(20 * MS)
        self._sleep(SETTLE)

    def _sleep(self, ns: int) -> None:
        self._clock.sleep_until(self._clock.now() + ns)
