"""The routes of the indexer: requests in, answers of the service out."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvyard.clock import pause
from kvyard.index import Holder
from kvyard.server.application import Application
from kvyard.server.guard import Guard
from kvyard.server.health import Readiness, readiness, say_health
from kvyard.server.http import JSON, Operation, Raw, Refusal, get, picked, post
from kvyard.server.indexer import answers, schemas
from kvyard.server.indexer.bootstrap import MSGPACK, dump_all
from kvyard.server.indexer.conditions import conditions
from kvyard.server.indexer.config import Config
from kvyard.server.indexer.listener import IndexedModel
from kvyard.server.indexer.measures import IndexerMetrics
from kvyard.server.indexer.names import keys_of_hashes
from kvyard.server.indexer.service import Service
from kvyard.server.tokens import FileTokenizer

PROMETHEUS = "text/plain"


class IndexerRoutes:
    """Handlers of the service's routes."""

    def __init__(
        self, service: Service, measures: IndexerMetrics | None = None, admin_token: str | None = None
    ) -> None:
        """Without ``measures`` there is no /metrics to be asked. ``admin_token`` is wanted by routes that change what there
        is."""
        self._admin: dict[str, Any] = {"token": admin_token, "guarded": True}
        self.service = service
        self.measures = measures
        self._bounds = service.config.limits

    def operations(self) -> list[Operation]:
        """Return every route; what it is for is its handler's docstring."""
        return [
            post(
                "/register",
                self.register,
                schemas.Register,
                schemas.RegistrationResponse,
                status=201,
                refusals=(403, 409),
                **self._admin,
            ),
            post(
                "/unregister",
                self.unregister,
                schemas.Unregister,
                schemas.RegistrationResponse,
                refusals=(404,),
                **self._admin,
            ),
            post("/query", self.query, schemas.Query, schemas.Matches, refusals=(404,)),
            post("/query_by_hash", self.query_by_hash, schemas.QueryByHash, schemas.Matches, refusals=(404,)),
            post("/score", self.score, schemas.ScoreRequest, schemas.ScoreResponse, refusals=(404,)),
            post("/explain", self.explain, schemas.ExplainRequest, schemas.ExplainResponse, refusals=(404,)),
            get("/workers", self.workers, list[schemas.WorkerInfo]),
            get("/dump", self.dump, schemas.Rows, media_types=(JSON, MSGPACK), **self._admin),
            get("/health", self.health, schemas.IndexerHealth, open=True),
            get("/ready", self.ready, Readiness, open=True, refusals=(503,)),
            get("/metrics", self.metrics, None, media_types=(PROMETHEUS,)),
        ]

    # -- workers ----------------------------------------------------------------------------------------------------

    async def register(self, body: schemas.Register, headers: Mapping[str, str]) -> schemas.RegistrationResponse:
        """Listen to the events of a worker, one of its ranks, or a shared pool."""
        return schemas.RegistrationResponse(streams=await self.service.register(body))

    async def unregister(self, body: schemas.Unregister, headers: Mapping[str, str]) -> schemas.RegistrationResponse:
        """Stop listening, and remove all that was announced."""
        return schemas.RegistrationResponse(streams=await self.service.unregister(body))

    async def workers(self, body: None, headers: Mapping[str, str]) -> list[schemas.WorkerInfo]:
        """Registered workers, and the state of their streams."""
        return [info for model in self.service.models.values() for info in answers.workers(model)]

    # -- prompts ----------------------------------------------------------------------------------------------------

    async def query(self, body: schemas.Query, headers: Mapping[str, str]) -> schemas.Matches:
        """Tokens of a prompt that each instance has, per tier and rank, cumulative."""
        self._check_length(body.token_ids, "token_ids")
        identity = self.service.model(body).indexer.identity
        keys = await _gathered(identity.keys_by_turns(body.token_ids, body.namespace(body.media)))
        return self._matches(self.service.model(body), keys, body)

    async def query_by_hash(self, body: schemas.QueryByHash, headers: Mapping[str, str]) -> schemas.Matches:
        """Tokens that each instance has, for a prompt's block hashes."""
        identity = self.service.model(body).indexer.identity
        self._check_length(body.block_hashes, "block_hashes", self._bounds.tokens // identity.block_size)
        keys = await _gathered(keys_of_hashes(identity, body.block_hashes, body.namespace()))
        return self._matches(self.service.model(body), keys, body)

    def _matches(self, model: IndexedModel, keys: Sequence[int], body: schemas.Wanted) -> schemas.Matches:
        holders = model.holders(body.workers)
        return answers.matches(model.indexer.score_keys(keys, None, holders, self.service.clock.now()))

    async def score(self, body: schemas.ScoreRequest, headers: Mapping[str, str]) -> schemas.ScoreResponse:
        """Per rank what it could skip of a prompt, as its engine would, and how sure that is."""
        if body.batch is None:
            prompts = [schemas.BatchPrompt(token_ids=body.token_ids, text=body.text, media=body.media)]
        elif body.token_ids is not None or body.text is not None or body.media:
            raise Refusal(422, "a batch stands alone", field="batch", fix="move token_ids, text and media into it")
        elif len(body.batch) > self._bounds.batch:
            error = f"{len(body.batch)} prompts at once; at most {self._bounds.batch}"
            raise Refusal(413, error, field="batch", fix="send several requests, or raise limits.batch")
        else:
            prompts = body.batch
        model = self.service.model(body)
        results: list[schemas.PromptScores] = []
        for number, prompt in enumerate(prompts):
            where = "" if body.batch is None else f"batch[{number}]."
            tokens = await self._tokens(model, prompt.token_ids, prompt.text, where)
            identity = model.indexer.identity
            keys = await _gathered(identity.keys_by_turns(tokens, body.namespace(prompt.media)))
            await pause()
            model = self.service.model(body)  # it may be gone by now
            holders = model.holders(body.workers)
            scores = model.indexer.score_keys(keys, len(tokens), holders, self.service.clock.now())
            results.append(answers.scored(model, scores))
        return schemas.ScoreResponse(**answers.model_facts(model), results=results)

    async def explain(self, body: schemas.ExplainRequest, headers: Mapping[str, str]) -> schemas.ExplainResponse:
        """Why each rank matches as much of a prompt as it does."""
        tokens = await self._tokens(self.service.model(body), body.token_ids, body.text, "")
        identity = self.service.model(body).indexer.identity
        keys = await _gathered(identity.keys_by_turns(tokens, body.namespace(body.media)))
        model = self.service.model(body)
        now = self.service.clock.now()
        explanations: list[schemas.WorkerExplanation] = []
        for holder in self._asked_about(model, body):
            explanations.append(answers.explained(model, model.indexer.explain_keys(keys, len(tokens), holder, now)))
            await pause()
        return schemas.ExplainResponse(**answers.model_facts(model), tokens=len(tokens), explanations=explanations)

    def _asked_about(self, model: IndexedModel, body: schemas.ExplainRequest) -> Sequence[Holder]:
        if body.instance_id is None:
            if body.dp_rank is not None:
                raise Refusal(422, "a rank of which instance?", field="dp_rank", fix="add instance_id, or leave it out")
            wanted = model.holders(body.workers)
            model.indexer.refresh()
            known = [holder for holder in model.indexer.scorer.standings if not holder.shared]
            return known if wanted is None else wanted
        holders = [
            holder
            for holder in model.holders([body.instance_id]) or []
            if body.dp_rank is None or holder.rank == body.dp_rank
        ]
        if not holders:
            rank = "" if body.dp_rank is None else f" rank {body.dp_rank}"
            error = f"instance {body.instance_id}{rank} is not registered for this model"
            raise Refusal(404, error, field="instance_id", fix="see /workers")
        return holders

    async def _tokens(
        self, model: IndexedModel, token_ids: list[int] | None, text: str | None, where: str
    ) -> list[int]:
        """A prompt's token ids; the text of one is tokenized beside the loop."""
        if (token_ids is None) == (text is None):
            fix = "send one of them" if token_ids is not None else "add token_ids"
            raise Refusal(422, f"{where}token_ids or text: one of them", field=f"{where}token_ids", fix=fix)
        if token_ids is None:
            path = self.service.config.tokenizers.get(model.name)
            if path is None:
                raise Refusal(
                    422,
                    f"no tokenizer is configured for model {model.name!r}",
                    field=f"{where}text",
                    fix="send token_ids, or start the service with --tokenizer",
                )
            token_ids = await asyncio.to_thread(lambda: FileTokenizer(path).encode(text or ""))
        self._check_length(token_ids, f"{where}token_ids")
        return token_ids

    def _check_length(self, items: Sequence[int], field: str, most: int | None = None) -> None:
        most = self._bounds.tokens if most is None else most
        if len(items) > most:
            error = f"{len(items)} in {field}; at most {most}"
            raise Refusal(413, error, field=field, fix="send less, or raise limits.tokens")

    # -- the service itself -----------------------------------------------------------------------------------------

    async def dump(self, body: None, headers: Mapping[str, str]) -> Raw | schemas.Rows:
        """Blocks of every worker. As msgpack: all that another indexer needs to go on from here."""
        if MSGPACK in headers.get("accept", ""):
            return Raw(msgspec.msgpack.encode(await dump_all(self.service.models)), MSGPACK)
        rows: schemas.Rows = {}
        for model in list(self.service.models.values()):
            rows[model.label] = answers.rows(model)
            await pause()
        return rows

    async def health(self, body: None, headers: Mapping[str, str]) -> schemas.IndexerHealth:
        """Liveness, and the state of streams."""
        states: Counter[str] = Counter(
            listener.info().state for model in self.service.models.values() for listener in model.listeners.values()
        )
        how = readiness(conditions(self.service))
        return schemas.IndexerHealth(
            status="starting" if not how.ready else "degraded" if how.degraded else "ok",
            **picked(how, "live ready degraded reasons"),
            models=len(self.service.models),
            streams=dict(states),
        )

    async def ready(self, body: None, headers: Mapping[str, str]) -> Raw:
        """Readiness, and the reasons for degradation."""
        how = readiness(conditions(self.service))
        return Raw(msgspec.json.encode(how), JSON, 200 if how.ready else 503)

    async def metrics(self, body: None, headers: Mapping[str, str]) -> Raw:
        """Every figure, for Prometheus."""
        assert self.measures is not None
        return Raw(*self.measures.text())


async def _gathered(turns: Iterator[list[int]]) -> list[int]:
    """The keys of all turns; other tasks have their turn in between."""
    keys: list[int] = []
    for some in turns:
        if keys:
            await pause()
        keys += some
    return keys


def build(config: Config, token: str | None = None, admin_token: str | None = None) -> tuple[Application, Service]:
    """Return the application, and the service to be entered around serving it. Raises ``KvyardError``."""
    service = Service(config, admin_token or token)
    service.beside["health"] = partial(say_health, partial(conditions, service))
    measures = IndexerMetrics(service)
    app = Application(
        IndexerRoutes(service, measures, admin_token).operations(),
        title="kvyard indexer",
        bounds=config.limits,
        token=token,
        guard=Guard(config.host, tuple(config.hosts)).check,
        seen=measures.seen,
    )
    measures.sources.append(partial(app.held.samples, "kvyard_indexer_"))
    return app, service
