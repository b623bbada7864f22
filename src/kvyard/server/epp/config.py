"""The endpoint picker's configuration: a gateway's, less what the data plane does itself, and a few settings of its own."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvyard.errors import KvyardError
from kvyard.router import RouterConfig
from kvyard.server.gateway.config import GatewayConfig, Seconds
from kvyard.server.indexer.config import settings_as
from kvyard.settings import Setting, Settings, settings_of

BodyMode = Literal["streamed", "buffered", "none"]

NOT_OURS: Mapping[str, str] = {
    "keys_file": "clients talk to the data plane: have that ask for their keys",
    "access_log": "the data plane sees requests end: have that log them",
    "cors_origins": "browsers talk to the data plane: set it there",
    "pass_unknown": "all paths are placed here: leave it out",
    "processes": "a data plane asks over one connection: start several pickers, with share",
    "token_file": "clients talk to the data plane: have that ask for their tokens",
    "retries": "the data plane tries again: let it have fallbacks",
    "silent_seconds": "the data plane waits for engines: set its time-outs",
}
"""Settings of a gateway that a picker can't honour, and what to do instead."""


class EppConfig(GatewayConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of an endpoint picker. Raises ``KvyardError`` for contradictions."""

    port: Annotated[
        int, Meta(ge=0, le=65535), Setting("gRPC port for the data plane; 0: any free port.", flag=True)
    ] = 9002
    http_port: Annotated[
        int,
        Meta(ge=0, le=65535),
        Setting("HTTP port for metrics, health, admin and dashboard; 0: any free port.", flag=True),
    ] = 9090
    tls_cert: Annotated[str | None, Setting("Certificate (PEM), to serve gRPC and HTTP over TLS.", flag=True)] = None
    body_mode: Annotated[
        BodyMode, Setting("How bodies arrive, if the data plane doesn't say: {choices}.", flag=True)
    ] = "streamed"
    """Envoy says it since 1.35. ``streamed`` is FULL_DUPLEX_STREAMED, which the protocol asks for."""
    fallbacks: Annotated[
        int,
        Meta(ge=0, le=16),
        Setting("Further endpoints to name per request, least busy first.", flag=True),
    ] = 0
    read_seconds: Seconds = 1.0
    """Seconds that reading a prompt may take, including a request to an engine or a remote index; then load decides."""
    sheddable: list[str] = msgspec.field(default_factory=list)
    """Objectives (``x-gateway-inference-objective``) whose requests are refused with 429 where they would have to wait."""
    streams_at_once: Annotated[int, Meta(ge=1, le=1 << 20)] = 16_384
    """Requests that the data plane may have here at a time, answers in flight included."""
    conformance: bool = False
    """True if requests may name their destination, and answers report it, as the extension's tests do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = {field.name: field for field in msgspec.structs.fields(GatewayConfig)}
        for name, instead in NOT_OURS.items():
            default = usual[name].default
            if getattr(self, name) != ([] if default is msgspec.NODEFAULT else default):
                raise KvyardError(f"{name} isn't a setting of an endpoint picker: {instead}")
        if self.has_roles:
            raise KvyardError("engines with roles are for a gateway, which can ask two for one request: leave role out")


def convert(document: Any, where: str) -> EppConfig:
    """Return ``document`` as a configuration. Raises ``KvyardError``, naming ``where`` and the key that is wrong."""
    return settings_as(document, EppConfig, where)


_KNOWN = {name: one for name, one in settings_of(EppConfig).items() if one.field not in NOT_OURS}
FLAGS = Settings(_KNOWN, {"router": settings_of(RouterConfig)["router"]})
"""Settings with flags of their own."""
