"""The mock's routes: those of a vLLM server, and a few under ``/admin`` that make it misbehave."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from kvyard import __version__, openai
from kvyard.clock import SECOND, WallClock, pause
from kvyard.events.transport.endpoint import reachable
from kvyard.server.application import Application
from kvyard.server.hinting import session_name
from kvyard.server.http import JSON, GuardCheck, Operation, Raw, Refusal, get, post
from kvyard.server.mock import schemas
from kvyard.server.mock.batches import BatchShape, EmbeddingShape, take_batch, take_texts
from kvyard.server.mock.config import Lora
from kvyard.server.mock.faults import Fate, MockFaults, changed, fate
from kvyard.server.mock.intake import MockIntake, Taken, refuse, transfer_wish
from kvyard.server.mock.messages import (
    CountTokens,
    MessagesRequest,
    MessagesShape,
    TokenCount,
    as_anthropic,
    conversation,
)
from kvyard.server.mock.messages import take as take_messages
from kvyard.server.mock.reply import MockReply
from kvyard.server.mock.responses import ResponseShape, ResponseStore
from kvyard.server.mock.responses import take as take_response
from kvyard.server.mock.shapes import ChatShape, ReplyShape, TextShape
from kvyard.server.mock.worker import MockWorker
from kvyard.server.request import HttpRequest
from kvyard.server.tokens import Tokenizer

if TYPE_CHECKING:
    from kvyard.server.mock.fleet import MockFleet

Headers = Mapping[str, str]
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class MockRoutes:
    """One worker's routes."""

    def __init__(self, worker: MockWorker, fleet: MockFleet, tokenizer: Tokenizer) -> None:
        self._worker = worker
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._intake = MockIntake(worker, tokenizer)
        self._created = WallClock.since_epoch().now() // SECOND
        self._loras = 1000
        self._responses = ResponseStore()

    # -- completions ----------------------------------------------------------------------------------------------------

    async def completions(self, body: openai.CompletionRequest, headers: Headers) -> Any:
        """Go on with a text."""
        what = await self._befall(headers)
        with self._lets_go(body):
            taken = self._intake.completion(body, headers)
        return await self._reply(taken, TextShape, what, headers)

    async def chat(self, body: openai.ChatRequest, headers: Headers) -> Any:
        """Answer a conversation."""
        what = await self._befall(headers)
        with self._lets_go(body):
            taken = self._intake.chat(body, headers)
        return await self._reply(taken, ChatShape, what, headers)

    async def batch(self, body: openai.BatchChatRequest, headers: Headers) -> Any:
        """Answer several conversations."""
        what = await self._befall(headers)
        return await self._reply(take_batch(self._intake, body, headers), BatchShape, what, headers)

    async def embeddings(self, body: openai.EmbeddingRequest, headers: Headers) -> Any:
        """Vectors of texts."""
        what = await self._befall(headers)
        taken = take_texts(self._intake, body, headers)
        return await self._reply(taken, partial(EmbeddingShape, asked=body), what, headers)

    async def responses(self, body: openai.ResponsesRequest, headers: Headers) -> Any:
        """OpenAI's responses."""
        what = await self._befall(headers)
        before: list[openai.ChatMessage] = []
        if body.previous_response_id is not None:
            kept = self._responses.find(body.previous_response_id)
            if kept is None:
                return _no_response(body.previous_response_id)
            before = kept.messages
        taken_response = take_response(self._intake, body, before, headers)

        def shape(taken: Taken, name: str, tokenizer: Tokenizer) -> ReplyShape:
            return ResponseShape(taken_response, name, tokenizer, self._responses)

        return await self._reply(taken_response.taken, shape, what, headers)

    async def response(self, body: None, request: HttpRequest) -> Any:
        """A response that was made here."""
        id_ = request.path.rpartition("/")[2]
        kept = self._responses.find(id_)
        return _no_response(id_) if kept is None else kept.value

    async def cancel_response(self, body: None, request: HttpRequest) -> Raw:
        """Cancel a response: none is made in the background here."""
        id_ = request.path.split("/")[-2]
        if self._responses.find(id_) is None:
            return _no_response(id_)
        return _odd_response("Cannot cancel a synchronous response.", 400)

    async def messages(self, body: MessagesRequest, headers: Headers) -> Any:
        """Anthropic's messages."""
        what = await self._befall(headers)

        async def answered() -> Any:
            return await self._reply(take_messages(self._intake, body, headers), MessagesShape, what, headers)

        return await _as_anthropic(answered())

    async def count_tokens(self, body: CountTokens, headers: Headers) -> Any:
        """Number of tokens of Anthropic's messages."""

        async def counted() -> TokenCount:
            self._intake.namespace(body.model)
            count = len(self._intake.conversation(conversation(body), None, True))
            return TokenCount(input_tokens=count, context_management={"original_input_tokens": count})

        return await _as_anthropic(counted())

    @contextmanager
    def _lets_go(self, body: openai.GenerationRequest) -> Iterator[None]:
        """Release the prompt that another worker keeps for this request, if the request is refused within the context; as in
        vLLM.
        """
        try:
            yield
        except Refusal:
            if self._fleet.handovers is not None:
                wish = transfer_wish(body, self._worker.role)
                self._fleet.handovers.decline(wish, self._worker.number)
            raise

    async def _befall(self, headers: Headers) -> Fate:
        """Return the faults of this request, after those that act at once."""
        worker = self._worker
        what = fate(worker.faults, headers, worker.random)
        # A hang-up that is there already is noticed a turn of the loop later, a reset two: a prompt costs more than these.
        await pause()
        await pause(what.latency_ms / 1000 / worker.config.speed)
        if what.kill:
            self._kill(worker.number)
        if what.error is not None:
            raise Refusal(what.error, "this error was asked for", x_mock_fault="error")
        if not worker.alive:
            raise refuse("the server is shutting down", status=503)
        return what

    async def _reply(
        self, taken: Taken, shape: Callable[[Taken, str, Tokenizer], ReplyShape], what: Fate, headers: Headers
    ) -> Any:
        worker, given = self._worker, headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else ""  # what the client calls its request
        chains = await self._intake.hash_long(taken)
        incoming = None
        if taken.transfer is not None and taken.transfer.fetch is not None and self._fleet.handovers is not None:
            try:
                incoming = await self._fleet.handovers.claim(taken.transfer, worker.number)
            except asyncio.CancelledError:
                self._fleet.handovers.decline(taken.transfer, worker.number)
                raise
            if incoming is None and worker.config.kv_load_failure_policy == "fail":
                raise refuse("the prompt is not where kv_transfer_params say", "kv_transfer_params", 500)
        try:
            if not worker.alive:  # it died while its source was asked
                raise refuse("the server is shutting down", status=503)
            flow = self._intake.submit(taken, chains, name, incoming)
        except Refusal:
            if self._fleet.handovers is not None:
                self._fleet.handovers.decline(taken.transfer, worker.number)
            raise
        return MockReply(
            flow,
            shape(taken, name or uuid4().hex, self._tokenizer),
            fate=what,
            gone=worker.give_up,
            headers={"x-mock-worker": worker.name, "x-mock-rank": str(flow.choices[0].rank)},
        )

    # -- models and tokens ----------------------------------------------------------------------------------------------

    async def models(self, body: None, headers: Headers) -> openai.ModelList:
        """The model and its adapters."""
        worker = self._worker
        base = worker.config.served_model_name
        card = partial(openai.ModelCard, created=self._created, permission=[_permission(self._created)])
        cards = [card(id=base, root=base, parent=None, max_model_len=worker.longest)]
        cards += [card(id=lora.name, root=lora.path, parent=base, max_model_len=None) for lora in worker.loras.values()]
        return openai.ModelList(data=cards)

    async def tokenize(self, body: schemas.Tokenize, headers: Headers) -> schemas.Tokenized:
        """Text or a conversation as ids."""
        self._intake.namespace(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise refuse("give either prompt or messages", "prompt", 422)
        if body.prompt is not None:
            ids = self._intake.encode(body.prompt, body.add_special_tokens is not False)
        else:
            special = bool(body.add_special_tokens)
            ids = self._intake.conversation(
                body.messages or [], body.tools, body.add_generation_prompt, special=special
            )
        strings = None
        if body.return_token_strs:
            strings = await asyncio.to_thread(lambda: [self._tokenizer.word(token) for token in ids])
        return schemas.Tokenized(count=len(ids), max_model_len=self._worker.longest, tokens=ids, token_strs=strings)

    async def detokenize(self, body: schemas.Detokenize, headers: Headers) -> schemas.Detokenized:
        """Ids as text."""
        self._intake.namespace(body.model)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < 1 << 32:
            raise refuse("token ids are whole numbers from 0 to 4294967295", "tokens[0]", 422)
        return schemas.Detokenized(prompt=await asyncio.to_thread(self._tokenizer.decode, body.tokens))

    async def load_lora(self, body: schemas.LoadLora, headers: Headers) -> Raw:
        """Load an adapter."""
        worker = self._worker
        name = body.lora_name
        if not name or not body.lora_path:
            raise refuse("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        if name == worker.config.served_model_name or (name in worker.loras and not body.load_inplace):
            raise refuse(f"The lora adapter '{name[:200]}' has already been loaded.", "lora_name")
        if name not in worker.loras and len(worker.loras) >= worker.config.max_loras:
            raise refuse(f"there is room for {worker.config.max_loras} adapters: unload one first", "lora_name")
        self._loras += 1
        worker.loras[name] = Lora(name=name, path=body.lora_path, number=self._loras)
        return Raw(f"Success: LoRA adapter '{name}' added successfully.".encode("utf-8", "replace"), "text/plain")

    async def unload_lora(self, body: schemas.UnloadLora, headers: Headers) -> Raw:
        """Unload one."""
        if self._worker.loras.pop(body.lora_name, None) is None:
            raise refuse(f"The lora adapter '{body.lora_name[:200]}' cannot be found.", "lora_name", 404)
        message = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return Raw(message.encode("utf-8", "replace"), "text/plain")

    # -- the server -----------------------------------------------------------------------------------------------------

    async def health(self, body: None, headers: Headers) -> Raw:
        """Liveness."""
        if not self._worker.alive:
            raise refuse("the engine is down", status=503)
        return Raw(b"", "")

    async def is_sleeping(self, body: None, headers: Headers) -> openai.SleepState:
        """True while the engine sleeps."""
        return openai.SleepState(is_sleeping=self._worker.faults.asleep)

    async def load(self, body: None, headers: Headers) -> schemas.ServerLoad:
        """Number of requests in flight."""
        return schemas.ServerLoad(
            server_load=sum(state.running for state in self._fleet.states() if state.name == self._worker.name)
        )

    async def kv_event_sources(self, body: None, headers: Headers) -> dict[str, openai.EventSource]:
        """Endpoint on which each rank publishes its events."""
        config, name = self._worker.config, self._worker.name
        return {
            str(publisher.rank): openai.EventSource(
                endpoint=reachable(publisher.endpoint),
                replay_endpoint=None if publisher.replay_endpoint is None else reachable(publisher.replay_endpoint),
                buffer_steps=config.buffer_steps,
                topic=config.topic.replace("{worker}", name),
            )
            for publisher in self._worker.publishers
        }

    async def version(self, body: None, headers: Headers) -> schemas.Version:
        """Version."""
        return schemas.Version(version=f"kvyard-{__version__}")

    async def metrics(self, body: None, headers: Headers) -> Raw:
        """Metrics for Prometheus."""
        return Raw(*self._worker.measures.text())

    async def kv_transfer(self, body: schemas.PromptClaim, headers: Headers) -> schemas.PromptsHeld:
        """Prompts that are kept here for decode workers of other mocks."""
        if self._fleet.handovers is None or not self._worker.alive:
            return schemas.PromptsHeld(held=[])
        return await self._fleet.handovers.serve(self._worker.number, body)

    async def reset(self, body: None, headers: Headers) -> Raw:
        """Reset the prefix cache."""
        if not self._worker.alive:
            raise refuse("the engine is down", status=503)
        try:
            async with asyncio.timeout(5.0):
                was = await self._worker.reset()
        except TimeoutError:
            was = False  # frozen: vLLM says nothing either
        return Raw(b"" if was else b"blocks are in use; nothing was reset", "text/plain")

    async def close_session(self, body: openai.EndedSession, headers: Headers) -> Raw:
        """A session is over: what it alone has used is evicted first."""
        if not self._worker.alive:
            raise refuse("the engine is down", status=503)
        if not body.session_id:
            raise refuse("session_id must not be empty", "session_id")
        self._worker.end_session(session_name(body.session_id))
        return Raw(b"", "text/plain")

    # -- misbehaviour ---------------------------------------------------------------------------------------------------

    async def workers(self, body: None, headers: Headers) -> list[schemas.WorkerState]:
        """The fleet."""
        return self._fleet.states()

    async def faults(self, body: None, headers: Headers) -> Any:
        """Faults of this worker."""
        return self._worker.faults

    async def set_faults(self, body: msgspec.Struct, headers: Headers) -> Any:
        """Let something else go wrong here."""
        self._worker.faults = changed(self._worker.faults, msgspec.to_builtins(body))
        return self._worker.faults

    async def kill(self, body: schemas.Outage, headers: Headers) -> schemas.MockDone:
        """Let a worker die."""
        self._kill(self._which(body), self._seconds(body))
        return schemas.MockDone()

    async def revive(self, body: schemas.Outage, headers: Headers) -> schemas.MockDone:
        """Start a dead worker again."""
        await self._fleet.revive(self._which(body))
        return schemas.MockDone()

    async def stall(self, body: schemas.Outage, headers: Headers) -> schemas.MockDone:
        """Let an engine stand still."""
        worker = self._fleet.workers[self._which(body)]
        seconds = self._seconds(body)
        if seconds is None:
            raise refuse("say for how many seconds", "seconds")
        if worker.alive:
            worker.stall(seconds)
        return schemas.MockDone()

    def _kill(self, number: int, seconds: float | None = None) -> None:
        # Once this request is answered, or cut.
        self._fleet.do_later(0.05, self._fleet.kill, number, seconds)

    def _which(self, body: schemas.Outage) -> int:
        number = self._worker.number if body.worker is None else body.worker
        if not 0 <= number < len(self._fleet.workers):
            raise refuse(f"there is no worker {number}: they are 0 to {len(self._fleet.workers) - 1}", "worker")
        return number

    def _seconds(self, body: schemas.Outage) -> float | None:
        if body.seconds is not None and not 0 <= body.seconds <= 86_400:
            raise refuse("seconds must be from 0 to 86400", "seconds")
        return body.seconds

    def operations(self) -> list[Operation]:
        """Return every route."""
        text, both = ("text/plain",), ("application/json", "text/event-stream")
        s = schemas
        as_vllm = partial(post, as_vllm=True, abandoned_with_client=True)
        return [
            as_vllm(openai.CHAT, self.chat, openai.ChatRequest, media_types=both, refusals=(404, 503)),
            as_vllm(
                openai.COMPLETIONS, self.completions, openai.CompletionRequest, media_types=both, refusals=(404, 503)
            ),
            as_vllm(f"{openai.CHAT}/batch", self.batch, openai.BatchChatRequest, refusals=(404, 503)),
            as_vllm("/v1/embeddings", self.embeddings, openai.EmbeddingRequest, refusals=(404, 503)),
            as_vllm("/v1/responses", self.responses, openai.ResponsesRequest, media_types=both, refusals=(404, 503)),
            get("/v1/responses/{response_id}", self.response, refusals=(404,)),
            post("/v1/responses/{response_id}/cancel", self.cancel_response, None, refusals=(404,)),
            as_vllm("/v1/messages", self.messages, MessagesRequest, media_types=both, refusals=(404, 503)),
            as_vllm("/v1/messages/count_tokens", self.count_tokens, CountTokens, TokenCount, refusals=(404,)),
            get("/v1/models", self.models, openai.ModelList),
            post("/v1/load_lora_adapter", self.load_lora, s.LoadLora, media_types=text),
            post("/v1/unload_lora_adapter", self.unload_lora, s.UnloadLora, media_types=text, refusals=(404,)),
            as_vllm("/tokenize", self.tokenize, s.Tokenize, s.Tokenized, refusals=(404,)),
            as_vllm("/detokenize", self.detokenize, s.Detokenize, s.Detokenized, refusals=(404,)),
            get("/health", self.health, media_types=(), refusals=(503,), open=True),
            get("/ping", self.health, media_types=(), refusals=(503,), open=True),
            post("/ping", self.health, None, media_types=(), refusals=(503,), open=True),
            get("/is_sleeping", self.is_sleeping, openai.SleepState, open=True),
            get("/load", self.load, s.ServerLoad, open=True),
            get("/kv_event_sources", self.kv_event_sources, dict[str, openai.EventSource]),
            get("/version", self.version, s.Version, open=True),
            get("/metrics", self.metrics, media_types=text, open=True),
            post("/kv_transfer", self.kv_transfer, s.PromptClaim, s.PromptsHeld),
            post("/reset_prefix_cache", self.reset, None, media_types=text, refusals=(503,)),
            post("/close_session", self.close_session, openai.EndedSession, media_types=text, refusals=(503,)),
            get("/admin/workers", self.workers, list[s.WorkerState]),
            get("/admin/faults", self.faults, MockFaults),
            post("/admin/faults", self.set_faults, s.FaultPatch, MockFaults),
            post("/admin/kill", self.kill, s.Outage, s.MockDone),
            post("/admin/revive", self.revive, s.Outage, s.MockDone),
            post("/admin/stall", self.stall, s.Outage, s.MockDone),
        ]


def build(
    worker: MockWorker, fleet: MockFleet, tokenizer: Tokenizer, token: str | None, guard: GuardCheck | None = None
) -> Application:
    """Return the application of one worker."""
    return Application(
        MockRoutes(worker, fleet, tokenizer).operations(),
        title="kvyard mock",
        bounds=worker.config.limits,
        held=fleet.held,
        token=token,
        guard=guard,
        seen=worker.seen,
        openai=True,
        vllm=True,
    )


async def _as_anthropic(answer: Awaitable[Any]) -> Any:
    """``answer``, or its refusal in Anthropic's words; those of bodies with wrong types are worded as everywhere."""
    try:
        return await answer
    except Refusal as refusal:
        if refusal.status == 422:
            raise
        status, problem = as_anthropic(refusal)
        return Raw(msgspec.json.encode(problem), JSON, status)


def _no_response(id_: str) -> Raw:
    return _odd_response(f"Response with id '{id_[:200]}' not found.", 404)


def _odd_response(message: str, status: int) -> Raw:
    error = openai.ErrorInfo(message=message, type="invalid_request_error", param="response_id", code=status)
    return Raw(msgspec.json.encode(openai.ErrorBody(error=error)), JSON, status)


def _permission(created: int) -> dict[str, Any]:
    """Return fields that old clients of OpenAI's API look for in a model."""
    permission: dict[str, Any] = {
        "id": f"modelperm-{uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
    }
    permission |= dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    permission |= dict.fromkeys(
        ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False
    )
    return permission | {"organization": "*", "group": None}
