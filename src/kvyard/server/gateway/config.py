"""The gateway's configuration: a TOML or JSON file, and what the command line puts over it. A value: it opens nothing."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvyard.engine.role import Role
from kvyard.errors import KvyardError
from kvyard.index import Identity
from kvyard.integers import ceil_div
from kvyard.openai import EventSource
from kvyard.router import RouterConfig
from kvyard.router.deciders import DECIDERS, make_decider
from kvyard.router.flow import FlowConfig
from kvyard.server.http import Bounds, picked
from kvyard.server.indexer.config import Config as IndexConfig
from kvyard.server.indexer.config import Names, Patience, Share, settings_as
from kvyard.server.indexer.schemas import AttentionGroup, Dialect, Name, Register, Size
from kvyard.settings import Setting, Settings, settings_of, text

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Port = Annotated[int, Meta(ge=1, le=65535)]
MOST_PROCESSES = 64
Count = Annotated[int, Meta(ge=0, le=1 << 20)]

TOKEN_VARIABLE = "KVYARD_TOKEN"
ADMIN_VARIABLE = "KVYARD_ADMIN_TOKEN"
UPSTREAM_VARIABLE = "KVYARD_UPSTREAM_TOKEN"
BYTES = "bytes"
"""A tokenizer: every byte is a token, conversations are written as the mock writes them."""
ENGINE = "engine"
"""A tokenizer: the engine is asked, so template and tokens are right whatever the model."""


class _EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine, and of all behind a name."""

    model: Name | None = None
    """Pool that it belongs to. By default the engine's /v1/models decides."""
    block_size: Size | None = None
    """The engine's."""
    dp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Data-parallel ranks behind one URL; each is chosen by itself."""
    topic: str = ""
    dialect: Dialect = "auto"
    role: Role = "both"
    """Part of a request that it computes: ``prefill`` engines compute prompts for ``decode`` engines."""
    bootstrap_port: Port | None = None
    """Of an SGLang engine that computes prompts, 8998 by default."""


class GatewayEngine(_EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: a vLLM or SGLang server, or a mock."""

    url: Name
    name: Name | None = None
    """Host and port of the URL, unless it is given."""
    events: Name | list[Name] | None = None
    """Endpoint on which its rank 0 publishes KV events, such as tcp://10.0.0.1:5557; each rank is one port further, unless
    all are listed. By default the engine is asked, which vLLM answers since 0.32; otherwise nothing is known of its cache."""
    replay: Name | list[Name] | None = None
    """Endpoint for the replay of lost events, in the same form."""
    clear_scope: Literal["device", "all"] = "all"
    groups: Annotated[list[AttentionGroup], Meta(min_length=1, max_length=64)] | None = None
    alignment: Size | None = None

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or urlsplit(self.url).netloc

    def __post_init__(self) -> None:
        if self.name is not None and not self.name.isprintable():
            raise KvyardError(
                f"an engine's name {self.name!r:.200} can't be used: write what can be printed in one line"
            )

    def with_events(self, sources: Mapping[int, EventSource]) -> "GatewayEngine":
        """Return this engine with the event streams that it reported. A port without a host is on the engine's own."""
        host = urlsplit(self.url).hostname or "localhost"
        host = f"[{host}]" if ":" in host else host

        def reached(endpoint: str) -> str:
            return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):", f"tcp://{host}:", endpoint)

        replays = [reached(source.replay_endpoint) for source in sources.values() if source.replay_endpoint]
        return msgspec.structs.replace(
            self,
            events=[reached(source.endpoint) for source in sources.values()],
            replay=replays if len(replays) == len(sources) else None,
            topic=next(iter(sources.values())).topic,
            dp_size=len(sources),
        )

    def registrations(self, model: str) -> list[Register]:
        """Return the engine's event streams for the index. Raises ``KvyardError`` for lists that don't have
        one for each rank.
        """
        if self.events is None:
            return []
        facts = picked(self, "block_size topic dialect clear_scope groups alignment")
        stream = partial(Register, model_name=model, instance_id=self.called, **facts)
        if isinstance(self.events, str) and not isinstance(self.replay, list):
            return [stream(endpoint=self.events, replay_endpoint=self.replay, dp_size=self.dp_size)]
        listed = [self.events] if isinstance(self.events, str) else self.events
        replays: list[str] | list[None] = [None] * len(listed)
        if self.replay is not None:
            replays = [self.replay] if isinstance(self.replay, str) else self.replay
        if len(listed) != self.dp_size or len(replays) != self.dp_size:
            raise KvyardError(
                f"engine {self.called} has {self.dp_size} ranks: list as many endpoints in events and in replay, or one"
            )
        return [
            stream(endpoint=address, replay_endpoint=replays[rank], dp_rank=rank) for rank, address in enumerate(listed)
        ]


class _FoundEngines(_EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of engines that are discovered."""

    events_port: Port | None = None
    """Port on which each of them publishes KV events."""
    replay_port: Port | None = None

    def engine(self, netloc: str) -> GatewayEngine:
        """Return the engine at one of its addresses."""
        host = netloc.rpartition(":")[0]

        def at(port: int | None) -> str | None:
            return None if port is None else f"tcp://{host}:{port}"

        return GatewayEngine(
            url=f"http://{netloc}",
            events=at(self.events_port),
            replay=at(self.replay_port),
            **{name: getattr(self, name) for name in _EngineSettings.__struct_fields__},
        )


class NameConfig(_FoundEngines, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines behind one name: every address that it resolves to is one."""

    host: Name
    port: Port
    interval_s: Seconds = 5.0


class ServiceConfig(_FoundEngines, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines behind a service of Kubernetes: every endpoint of its EndpointSlices that is ready is one."""

    service: Name
    namespace: Name | None = None
    """Left out, that of the gateway's own pod."""
    port: Port | Name
    """Its number, or its name in the service."""
    api_url: Name | None = None
    """The API server; left out, that of the cluster in which the gateway runs."""
    api_token_file: str | None = None
    """Left out, the pod's own."""
    ca_file: str | None = None
    """Left out, the pod's own."""


class Disaggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Split of requests if engines have roles. Raises ``KvyardError`` for impossible values."""

    decider: Annotated[
        str,
        Setting(
            "Split policy, which decides which prompts a prefill engine computes: {choices}.",
            flag=True,
            choices=DECIDERS.names,
        ),
    ] = "always"
    decider_options: dict[str, float] = {}
    """Figures that only this split policy has."""
    transfer: Annotated[
        Literal["vllm", "sidecar", "sglang"],
        Setting(
            "How hand-overs are requested: kv_transfer_params, llm-d's side-car, or SGLang's rooms ({choices}).",
            name="kv_transfer",
            flag=True,
        ),
    ] = "vllm"
    decode_router: Annotated[
        RouterConfig | None,
        Setting("Routing policy among decode engines. [default: fewest blocks held]", flag=True, parse=text),
    ] = None
    tokens_per_pass: Annotated[int, Meta(ge=1)] = 8192
    """Prompt tokens that a prefill engine computes in one pass, for split policies that ask how busy it is."""
    send_us_per_token: Annotated[float, Meta(ge=0)] = 2.6
    """Time of a hand-over, for split policies that weigh it: 128 KiB at 50 GB/s."""

    def __post_init__(self) -> None:
        make_decider(self.decider, self.decider_options)


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a gateway. Raises ``KvyardError`` for what can't go together."""

    host: Annotated[str, Setting("Address to listen on.", flag=True)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Setting("Port to listen on; 0: any free port.", flag=True)] = 8080
    processes: Annotated[
        int,
        Meta(ge=1, le=MOST_PROCESSES),
        Setting("Processes that serve one port as one gateway (Linux).", flag=True),
    ] = 1
    token_file: Annotated[
        str | None, Setting(f"A file with the token that clients show; or set {TOKEN_VARIABLE}.", flag=True)
    ] = None
    keys_file: Annotated[
        str | None,
        Setting("TOML or JSON file with API keys, their models and rates, and rates per model.", flag=True),
    ] = None
    """Instead of one token for all clients, or beside it. Read again where it changes, and by SIGHUP."""
    access_log: Annotated[
        str | None,
        Setting("File for one JSON line per request, without its text; - for stderr.", flag=True),
    ] = None
    traces: Annotated[
        str | None, Setting("Send OpenTelemetry traces to this collector, such as http://localhost:4318.", flag=True)
    ] = None
    """By OTLP over HTTP; needs kvyard[otel]."""
    admin_token_file: Annotated[
        str | None, Setting(f"A file with a token of its own for /admin; or set {ADMIN_VARIABLE}.", flag=True)
    ] = None
    """Token of /explain and the dashboard too. With a token for clients and none for /admin, /admin is closed; one file for
    both lets clients in."""
    hosts: list[str] = []
    """Names by which clients may call it where no token protects it; empty: those of this machine where only that reaches it,
    any otherwise. Against names that are made to point here."""
    cors_origins: list[str] = []
    """Pages of other sites that may ask from a browser, such as https://chat.example.org; * for any. Never for /admin."""
    pass_unknown: Annotated[bool, Setting("Send requests for unknown paths to an engine, by load.", flag=True)] = False
    """All that engines answer can be asked then, what changes them too."""
    networks: list[str] = []
    """Networks of engines and their events, such as 10.0.0.0/8, that POST /admin/engines may name; empty: any."""
    tls_cert: Annotated[str | None, Setting("Certificate (PEM), to serve HTTPS.", flag=True)] = None
    tls_key: Annotated[str | None, Setting("Private key of --tls-cert (PEM).", flag=True)] = None
    upstream_token_file: Annotated[
        str | None, Setting(f"A file with the token for engines; or set {UPSTREAM_VARIABLE}.", flag=True)
    ] = None
    """Left out, the client's own is passed on, unless it was meant for us."""

    engines: list[GatewayEngine] = []
    fleets: list[str] = []
    """Addresses of mocks, whose whole fleets are taken in by /admin/workers."""
    services: list[ServiceConfig] = []
    """Services of Kubernetes whose endpoints are engines, watched by its API."""
    names: list[NameConfig] = []
    """Names whose addresses are engines, looked up again and again."""

    router: RouterConfig = RouterConfig()
    """With roles, of those that compute prompts."""
    disaggregation: Disaggregation = Disaggregation()
    seed: Annotated[int, Setting("Seed of the draw among equally good engines.", flag=True)] = 0
    block_size: Annotated[Size | None, Setting("Tokens per block of the index.", flag=True)] = None
    """Left out, that of a model's first engine that says one, else 16."""
    direct: Names | None = None
    catching_up: Share = 0.0
    streams: Patience = Patience()
    subscriptions: list[Register] = []
    """Further event streams: of offload connectors, and of pools that engines share."""
    index_url: Annotated[
        str | None, Setting("URL of a kvyard index to ask instead of following events.", name="index", flag=True)
    ] = None
    index_token_file: str | None = None
    index_seconds: Seconds = 0.5
    """Seconds that it may take. Without its answer a request is routed by load."""

    ask_for_events: bool = True
    """True if engines without a configured event endpoint are asked for it."""

    tokenizer: Annotated[
        str,
        Setting(
            "Tokenizer: engine (ask engines), a tokenizer.json, a model's folder, or bytes (for mocks).", flag=True
        ),
    ] = ENGINE
    """Conversations need a template: that of a model's folder, or the engine's."""
    tokenizers: dict[str, str] = {}
    """Tokenizers of single models."""
    tokenize_seconds: Seconds = 0.5
    """Seconds that an engine may take to tokenize a prompt, and a second more for each MiB; then another engine is asked,
    once."""
    prefix_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    """Bytes of cached prompt beginnings for each model, so that they needn't be read again; 0: none."""
    session_header: Name = "x-session-id"
    session_prefixes: bool = True
    """True: a request that names no session, response or user belongs to the session whose latest prompt it begins with."""
    tenant_header: Name = "x-gateway-inference-fairness-id"
    """Names the tenant of a request, if there are no keys; with keys, a key's name is its tenant."""

    engine_requests: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    """Requests that an engine has at a time; others wait here."""
    flow: FlowConfig = FlowConfig()
    """Says which of those that wait goes next."""
    queue: Count = 1024
    """Requests that wait at a time; others are refused with 429."""
    queue_seconds: Seconds = 30.0
    """Seconds that they wait; then they are refused with 503."""
    down_seconds: Seconds = 5.0
    """Seconds that they wait from when the last engine went down; after that they are refused at once, until one is back."""
    retries: Count = 3
    """Further engines that a request is sent to, as long as nothing of an answer went out."""
    connect_seconds: Seconds = 2.0
    silent_seconds: Seconds = 600.0
    """Seconds for which an engine may send nothing in the middle of an answer."""
    health_seconds: Seconds = 2.0
    """Between two looks at a healthy engine."""
    health_timeout: Seconds = 2.0
    unhealthy_after: Annotated[int, Meta(ge=1, le=100)] = 3
    """Looks in a row that fail before an engine gets no more requests. A refused connection is enough by itself."""
    shun_seconds: Seconds = 5.0
    """Seconds for which an engine gets nothing after it failed ``unhealthy_after`` requests in a row which others then
    answered."""
    recovery_seconds: Seconds = 0.25
    """Between two looks at an engine that is down."""
    held_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """Bytes of all bodies that are here at a time, waiting or in flight; further requests are refused with 429."""
    drain_seconds: Seconds = 30.0
    """Seconds that answers may still take after SIGTERM."""
    limits: Bounds = Bounds()

    journal: Annotated[
        str | None, Setting("File for the decision journal: all inputs and decisions of the router.", flag=True)
    ] = None
    """Further models get files of their own."""
    record: Annotated[
        str | None, Setting("File for the traffic recording: a trace for kvyard replay, without text.", flag=True)
    ] = None
    record_block_size: Size | None = None
    """Tokens per id of that trace: a multiple of the index's block size. Left out, that itself: with larger ones, short prompts
    seem to share nothing."""
    record_limit: Annotated[int, Meta(ge=1)] = 1 << 30
    """Bytes after which the recording ends, or with ``record_keep`` goes on in a new file."""
    record_keep: Count = 0
    share: Annotated[
        str | None, Setting("URL of a Redis through which gateways count each other's load.", flag=True)
    ] = None
    """A Redis or Valkey, such as redis://localhost:6379."""
    share_namespace: Name = "default"

    def __post_init__(self) -> None:
        names: set[str] = set()
        for engine in self.engines:
            check_url(engine.url, "an engine's url")
            if engine.called in names:
                raise KvyardError(f"two engines are called {engine.called}: give one of them a name")
            names.add(engine.called)
        if self.traces is not None:
            check_url(self.traces, "traces")
        for service in self.services:
            if service.api_url is not None:
                check_url(service.api_url, "a service's api_url")
        for url in self.fleets:
            check_url(url, "a fleet's url")
        if self.index_url is not None:
            check_url(self.index_url, "index_url")
            if self.journal is not None:
                raise KvyardError("a journal needs the index in this process: leave index_url or journal out")

    @property
    def has_roles(self) -> bool:
        """Return true if some engine that it names has a role."""
        return any(source.role != "both" for source in (*self.engines, *self.names, *self.services))

    def of_process(self, number: int, times: int) -> "GatewayConfig":
        """Return the configuration of one of several processes, of which ``times`` had its number before: its share of what is
        bounded for all, and a journal of its own.
        """
        journal = self.journal and f"{self.journal}.p{number}" + (f"r{times}" if times else "")
        return msgspec.structs.replace(
            self,
            queue=ceil_div(self.queue, self.processes),
            held_bytes=max(1 << 20, self.held_bytes // self.processes),
            journal=journal,
        )

    def index(self) -> IndexConfig:
        """Return the configuration of the index in this process."""
        return OwnIndexConfig(**picked(self, "block_size direct catching_up streams limits"))


class OwnIndexConfig(IndexConfig, frozen=True, kw_only=True):
    """Configuration of a gateway's index, which no client asks by hashes of its own: one hash names a block, where the service
    needs two.
    """

    def identity(self, block_size: int) -> Identity:
        return Identity(block_size) if self.direct is None else super().identity(block_size)


def check_url(url: str, where: str) -> str:
    """Return ``url`` without a slash at its end. Raises ``KvyardError`` if it isn't one of HTTP."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
        _ = parts.port
        (parts.hostname or "").encode("idna")  # as the resolver will
    except ValueError:
        fine = False
    if not fine or any(char.isspace() or not char.isprintable() for char in url):
        raise KvyardError(f"{where} {url!r:.200} can't be used: write http://HOST:PORT")
    if "@" in parts.netloc:
        # Names of engines are shown to clients, and are made of this.
        raise KvyardError(
            f"{where} has a password in it: write http://HOST:PORT, and the token into --upstream-token-file"
        )
    return url.rstrip("/")


PASSED_OVER = ("replay", "prices", "gateway", "epp")
"""Tables that are there for other commands which read the same file: fleets that are simulated and their prices, and settings
of one server alone."""


def own_part(document: Any, where: str, server: str = "gateway") -> Any:
    """Return the part of a file for ``server``: its own table, which may stand outside of tables as well, and what is in none.
    Raises ``KvyardError`` for a setting that is given twice.
    """
    if not isinstance(document, dict):
        return document
    left = {name: value for name, value in document.items() if name not in PASSED_OVER}
    own = document.get(server, {})
    if not isinstance(own, dict):
        raise KvyardError(f"{where}: {server} must be a table of settings, as in [{server}]")
    for name in own:
        if name in left:
            raise KvyardError(f"{where}: {name} is given twice, once in [{server}]: leave one of the two out")
    return {**left, **own}


def convert(document: Any, where: str) -> GatewayConfig:
    """Return ``document`` as a configuration. Raises ``KvyardError``, naming ``where`` and the key that is wrong."""
    return settings_as(document, GatewayConfig, where)


FLAGS = Settings(
    settings_of(GatewayConfig),
    settings_of(Disaggregation),
    {"router": settings_of(RouterConfig)["router"]},
    {"flow": settings_of(FlowConfig)["flow"]},
)
"""Settings with flags of their own."""
