"""Prefill and decode on different engines: an exchange in two parts.

If the split policy decides for both stages, a prefill engine computes the prompt and a decode engine answers:

    vllm      a request for one token with ``kv_transfer_params`` to the prefill engine, then the client's own to a decode
              engine with what came back, as vLLM's proxies do it
    sidecar   one request to a decode engine, whose side-car does the same (``x-prefiller-host-port``, as in llm-d)
    sglang    both at once, with the number of a room where they meet

Until the first byte went to the client nothing is lost: another prefill engine is tried, and where none is left the decode
engine computes the prompt itself, unless it is one that can't (SGLang's). A decode engine that fails is followed by another
one; what the first may have fetched is computed once more, mostly from cache.
"""

import asyncio
import re
import secrets
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from kvyard.clock import MS, pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.openai import CHAT, COMPLETIONS
from kvyard.router import Decision
from kvyard.router.deciders import Prospect, SplitInput
from kvyard.server.gateway.client import ELSEWHERE
from kvyard.server.gateway.connections import EngineConnection, read_up_to
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.exchange import BREATH, WHOLE, Exchange
from kvyard.server.gateway.failures import EngineFailed
from kvyard.server.gateway.headers import PREFILL, PREFILLER, RANK, wait_header
from kvyard.server.gateway.pool import EnginePool, EngineRequest, Exhausted, Placed
from kvyard.server.gateway.usage import answer_tokens
from kvyard.server.http import Refusal, Response

BOOTSTRAP_PORT = 8998
"""SGLang's default."""
_NULL = msgspec.Raw(b"null")
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_REMOTE_DECODE = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)

_SEVERAL = re.compile(rb'\[\s*["\[]')
"""Start of a list that isn't of token ids: of prompts, even if it has only one."""

BodyFields = dict[str, msgspec.Raw]
"""A body's fields, each as it was sent."""


class _SplitFields(msgspec.Struct, kw_only=True):
    """Fields that decide if a request can be answered in two parts."""

    n: Any = None
    best_of: Any = None
    echo: Any = None
    prompt: msgspec.Raw = _NULL
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    kv_transfer_params: Any = None
    bootstrap_room: Any = None


_fields = msgspec.json.Decoder(BodyFields)
_split_fields = msgspec.json.Decoder(_SplitFields)
_encode = msgspec.json.Encoder().encode


class PrefillAnswer(msgspec.Struct):
    """Fields of a prefill engine's answer that are read."""

    kv_transfer_params: msgspec.Raw = _NULL


def divisible(path: str, body: bytes) -> bool:
    """Return true if a request can be answered in two parts: one prompt, one answer, nothing about the prompt itself, and a
    client that doesn't do it on its own.
    """
    if path not in (COMPLETIONS, CHAT):
        return False
    try:
        asked = _split_fields.decode(body)
    except DECODE_ERRORS:
        return False
    return (
        not _SEVERAL.match(bytes(asked.prompt))
        and asked.n in (None, 1)
        and asked.best_of in (None, 1)
        and not asked.echo
        and not asked.use_beam_search
        and asked.prompt_logprobs is None
        and asked.kv_transfer_params is None
        and asked.bootstrap_room is None
    )


def prefill_body(body: bytes) -> bytes:
    """Return the request that has a prompt computed, and nothing more, for another engine."""
    fields = _one_token(_fields.decode(body))
    fields["kv_transfer_params"] = _REMOTE_DECODE
    return _encode(fields)


def _one_token(fields: BodyFields) -> BodyFields:
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    fields["stream"] = _FALSE
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    return fields


def decode_body(body: bytes, params: msgspec.Raw) -> bytes:
    """Return the client's request, with where its prompt is."""
    fields = _fields.decode(body)
    fields["kv_transfer_params"] = params
    return _encode(fields)


def room_bodies(body: bytes, host: str, port: int, room: int) -> tuple[bytes, bytes]:
    """Return both parts for SGLang, which meet in ``room`` of the prefill engine: the body for that engine, and for the one
    that decodes."""
    fields = _fields.decode(body)
    for name, value in (("bootstrap_host", host), ("bootstrap_port", port), ("bootstrap_room", room)):
        fields[name] = msgspec.Raw(_encode(value))
    decode = _encode(fields)
    fields["stream"] = _FALSE
    fields.pop("stream_options", None)
    return _encode(fields), decode


class PrefillFailed(EngineFailed):
    """A prefill engine failed while a decode engine waited for it: no fault of the latter."""

    @property
    def busy(self) -> bool:
        return True


def splits(pool: EnginePool, place: EngineRequest, prefill: EngineRequest) -> tuple[bool, Decision | None]:
    """Return true if a prefill engine is to compute a prompt, and its decision, if the split policy looked. Books nothing."""
    prefill_pool, config = pool.prefill_pool, pool.config.disaggregation
    if prefill_pool is None or pool.decider is None or not prefill_pool.may_take(prefill):
        return False, None
    if config.transfer == "sglang":
        return True, None  # those engines have no way to keep one
    if not pool.decider.looks:
        return pool.decider.splits(None), None
    try:
        decode, first = pool.preview(place), prefill_pool.preview(prefill)
    except KvyardError:
        return False, None
    here = Prospect(decode, pool.router.pace(decode.worker), config.tokens_per_pass)
    there = Prospect(first, prefill_pool.router.pace(first.worker), config.tokens_per_pass)
    send_ms = here.uncached * config.send_us_per_token / 1000
    return pool.decider.splits(SplitInput(place.request.num_tokens, here, there, send_ms)), first


def would_split(pool: EnginePool, place: EngineRequest, name: str) -> tuple[bool | None, Decision | None]:
    """Return true if a request for the model ``name`` would be handed over, and the engine that would compute its prompt;
    ``None`` if engines have no roles. Books nothing.
    """
    prefill_pool = pool.prefill_pool
    if prefill_pool is None:
        return None, None
    prefill = EngineRequest(request=place.request, shut=prefill_pool.without(name), known=place.known)
    over, first = splits(pool, place, prefill)
    if over and first is None:
        first = prefill_pool.preview(prefill)
    return over, first if over else None


class SplitExchange(Exchange, kw_only=True, eq=False):
    """One request that may take both ways."""

    _whole_body: bytes = b""
    _decided: bool = False
    _prefill_place: EngineRequest | None = None
    _booked: Placed | None = None
    """The prefill engine that has the prompt, if it is still computing when the decode engine is asked."""
    _by: str = ""
    """Engine that computed the prompt."""
    _cached: int = 0
    """Tokens of the prompt that it had cached, as far as it says."""
    _room: bytes = b""
    """Body for a prefill engine at the same time as the decode engine."""
    _computed_at: int = 0
    _computing: asyncio.Task[bytes | None] | None = None
    """The prefill engine's part, where it was sent at the same time."""

    async def respond(self) -> Response:
        """Answer like other requests, with the prompt computed elsewhere if that is decided."""
        self._whole_body = self.body
        self.proxied.at_end = self._end
        return await super().respond()

    def _end(self) -> None:
        computing, self._computing = self._computing, None
        if computing is not None:
            computing.cancel()
        self._let_go(computed=False)
        if self.handed_over and self.proxied.first:
            self.proxy.traffic.staged(self.proxied, "decode", self.proxy.clock.now() - self.proxied.first)

    @property
    def _must(self) -> bool:
        """Return true if the decode engine can't compute a prompt: SGLang's have no way to."""
        return self.proxied.pool.config.disaggregation.transfer == "sglang"

    async def _before_placing(self, last: EngineFailed | None) -> None:
        if last is None:
            self._prefill_place = self._placement()
            self._decided = self._must or splits(self.proxied.pool, self.proxied.place, self._prefill_place)[0]
            if not self._decided:
                self.proxy.traffic.split(self.proxied, "kept")
        elif isinstance(last, PrefillFailed):
            self.proxied.place.tried.clear()
        elif not last.reached and not self._must:
            return  # what was computed is still where it was
        if self._decided:
            self._let_go(computed=False)
            if not await self._hand_over():
                self.body, self.handed_over, self._by, self._room = self._whole_body, False, "", b""
                self.headers = [pair for pair in self.headers if pair[0] != PREFILLER]
                if self._must:
                    raise Refusal(
                        503, "no prefill engine could compute the prompt", fix="try again later", Retry_After="1"
                    )
                self._decided = False
                self.proxy.traffic.split(self.proxied, "fell-back")

    def _placement(self) -> EngineRequest:
        prefill_pool, place = self.proxied.pool.prefill_pool, self.proxied.place
        shut = frozenset() if prefill_pool is None else prefill_pool.without(self.proxied.model)
        flow = None if place.flow is None else replace(place.flow, output=1)  # its answer is the decode engine's
        return EngineRequest(request=place.request, shut=shut, known=place.known, flow=flow)

    # -- the prefill engine ---------------------------------------------------------------------------------------------

    async def _hand_over(self) -> bool:
        """Have a prefill engine compute the prompt, or be about to. Returns whether one does."""
        prefill_pool, place, proxy = self.proxied.pool.prefill_pool, self._prefill_place, self.proxy
        assert prefill_pool is not None and place is not None
        for _ in range(proxy.retries + 1):
            try:
                if not self._must and not prefill_pool.may_take(place):
                    return False
                decision, engine = await prefill_pool.place(place)
            except Refusal:
                if self._must:
                    raise
                return False
            except Exhausted:
                if not self._must:
                    return False
                place.tried.clear()
                await pause(BREATH)
                continue
            transfer = self.proxied.pool.config.disaggregation.transfer
            if transfer == "vllm":
                if await self._compute(engine, decision):
                    return True
                continue
            self._booked, self._computed_at = (decision, engine), proxy.clock.now()
            self._prefilled_by(decision)
            if transfer == "sglang":
                host, port = urlsplit(engine.url).hostname or "", engine.config.bootstrap_port or BOOTSTRAP_PORT
                self._room, self.body = room_bodies(self._whole_body, host, port, secrets.randbits(63))
            else:
                self.headers = [pair for pair in self.headers if pair[0] != PREFILLER]
                self.headers.append((PREFILLER, urlsplit(engine.url).netloc.encode()))
            return True
        return False

    def _prefilled_by(self, decision: Decision) -> None:
        if not self.handed_over:
            self.proxy.traffic.split(self.proxied, "handed-over")
        self.handed_over = self.proxied.handed_over = True
        self._by = f"worker={decision.worker}; why={decision.why}; hit={decision.overlap}/{decision.blocks}"
        if self._prefill_place is not None and self._prefill_place.wait is not None:
            self._by += wait_header(self._prefill_place.wait)

    async def _compute(self, engine: Engine, decision: Decision) -> bool:
        """Have ``engine`` compute the prompt, and keep what it says. Returns whether it did."""
        prefill_pool, proxy, place = self.proxied.pool.prefill_pool, self.proxy, self._prefill_place
        assert prefill_pool is not None and place is not None
        began, computed = proxy.clock.now(), False
        self.proxied.prefill_tried = True
        try:
            answer = await self._ask(engine, decision, prefill_body(self._whole_body))
            if answer is None:
                # It refuses the request; the decode engine will say why.
                self.body, self.handed_over = self._whole_body, False
                return True
            computed = True
            prefill_pool.first_token(self.proxied.id)
            self._keep(engine, decision, answer)
            self._computed_at = proxy.clock.now()
            proxy.traffic.staged(self.proxied, "prefill", self._computed_at - began)
            return True
        except EngineFailed as failed:
            self._blame(engine, failed)
            return False
        finally:
            self._return((decision, engine), computed)

    def _keep(self, engine: Engine, decision: Decision, answer: bytes) -> None:
        try:
            params = msgspec.json.decode(answer, type=PrefillAnswer).kv_transfer_params
        except DECODE_ERRORS:
            raise EngineFailed("its answer can't be read") from None
        # An engine whose caches are shared by other means says nothing.
        self.body = self._whole_body if params == _NULL else decode_body(self._whole_body, params)
        self._prefilled_by(decision)
        usage = answer_tokens(answer)
        if usage.cached is not None:
            self._by += f"; cached={usage.cached}"
            self._cached = usage.cached
        self.proxy.traffic.prefilled(self.proxied, engine, decision, usage)
        self.proxy.health.served(engine, [])

    async def _ask(self, engine: Engine, decision: Decision, body: bytes) -> bytes | None:
        """Return an engine's whole answer; ``None`` where it refuses. Raises ``EngineFailed``."""
        connections = self.proxy.client.connections
        if connections is None or connections.closed:
            raise asyncio.CancelledError  # the gateway didn't wait for us
        headers = self.headers
        if engine.config.dp_size > 1:
            headers = [*headers, (RANK, b"%d" % decision.worker.rank)]
        answer = await connections.take(engine.address)
        try:
            await answer.ask("POST", self.path.encode(), headers, body)
            if answer.status in ELSEWHERE or not 200 <= answer.status < 500:
                raise EngineFailed(f"it answered {answer.status}", answer=await self._error(answer))
            content = await read_up_to(answer, WHOLE, self.room)
            if not answer.complete:
                raise EngineFailed("its answer has no end")
        except BaseException:
            answer.close()
            raise
        answer.release()
        return content if answer.status < 400 else None

    def _blame(self, engine: Engine, failed: EngineFailed) -> None:
        assert self._prefill_place is not None
        self._prefill_place.tried.add(engine.name)
        if not failed.busy:
            self.proxy.health.failed(engine, failed.reason, gone=failed.gone)

    def _let_go(self, computed: bool) -> None:
        """Release a prefill engine that is done, or no longer needed."""
        booked, self._booked = self._booked, None
        prefill_pool = self.proxied.pool.prefill_pool
        if booked is None or prefill_pool is None:
            return
        if computed:
            prefill_pool.first_token(self.proxied.id, seen=False)
        self._return(booked, computed)

    def _return(self, booked: Placed, computed: bool) -> None:
        """Give a prefill engine's booking back, and tell flow control whether it ``computed`` the prompt."""
        prefill_pool, place = self.proxied.pool.prefill_pool, self._prefill_place
        assert prefill_pool is not None and place is not None
        if not computed:
            prefill_pool.take_back(place)
        prefill_pool.release(booked[1], self.proxied.id, refused=not computed)
        if computed:
            prefill_pool.ended(place, max(0, place.request.num_tokens - self._cached), 1)
        self._cached = 0

    # -- the decode engine ----------------------------------------------------------------------------------------------

    async def _attempt(self, engine: Engine, decision: Decision) -> Response:
        if self.handed_over:
            self.proxied.pool.first_token(self.proxied.id, seen=False)  # it has none to compute
        if not self._room:
            return await super()._attempt(engine, decision)
        assert self._booked is not None
        first, source = self._booked
        loop = asyncio.get_running_loop()
        computing = self._computing = loop.create_task(self._ask(source, first, self._room))
        answering = loop.create_task(super()._attempt(engine, decision))
        try:
            await asyncio.wait({computing, answering}, return_when=asyncio.FIRST_COMPLETED)
            if computing.done() and not answering.done():
                failed = computing.exception()
                if isinstance(failed, EngineFailed):
                    self._blame(source, failed)
                    raise PrefillFailed(f"the prefill engine failed: {failed.reason}", answer=failed.answer)
                if failed is None and (answer := computing.result()) is not None:
                    usage = answer_tokens(answer)
                    self.proxy.traffic.prefilled(self.proxied, source, first, usage)
            return await answering
        except BaseException:
            for task in (computing, answering):
                task.cancel()
            await asyncio.gather(computing, answering, return_exceptions=True)
            raise

    def _begin(
        self, answer: EngineConnection, body: bytes, decision: Decision, streamed: bool = True
    ) -> list[tuple[bytes, bytes]]:
        headers = super()._begin(answer, body, decision, streamed)
        if self.handed_over and self.proxied.explained:
            headers.append((PREFILL, self._by.encode("latin-1", "replace")))
        self._let_go(computed=True)
        proxied = self.proxied
        if self.handed_over:
            self.proxy.traffic.staged(proxied, "hand-over", proxied.first - self._computed_at)
        if proxied.pool.decider is not None:
            proxied.pool.decider.served((proxied.first - proxied.received) / MS)
        return headers
