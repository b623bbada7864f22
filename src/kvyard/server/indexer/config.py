"""The service's configuration: a TOML or JSON file, and what the command line puts over it.

A key that isn't known is refused by name. What is left out has the default written here, and nothing else does.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvyard.clock import MS
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.events.transport import Limits
from kvyard.events.types import Tier
from kvyard.hashing import algorithm
from kvyard.index import DEFAULT_WEIGHTS, Identity, Trust
from kvyard.server.http import Bounds, explained
from kvyard.server.indexer.names import LocalNames
from kvyard.server.indexer.schemas import Register, Size, TierName
from kvyard.settings import Setting, read_texts

TIERS: dict[TierName, Tier] = {tier.entry.service_name: tier for tier in Tier}
TIER_NAMES: dict[Tier, TierName] = {tier: name for name, tier in TIERS.items()}

Settings = TypeVar("Settings", bound=msgspec.Struct)

Milliseconds = Annotated[int, Meta(ge=0, le=3_600_000)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Weight = Annotated[float, Meta(ge=0.0)]


class Patience(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of following streams; see ``kvyard.events.transport.Limits``."""

    patience_ms: Milliseconds = 100
    reply_ms: Milliseconds = 2000
    cooldown_ms: Milliseconds = 30_000
    probe_ms: Milliseconds = 2000
    probe_most_ms: Milliseconds = 30_000
    held_batches: Annotated[int, Meta(ge=1)] = 10_000
    queue: Annotated[int, Meta(ge=1)] = 100_000
    """Batches that ZeroMQ may hold while the service is busy. Beyond it some are lost, noticed, and asked for."""

    frame_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 16 << 20
    """Of the longest message; a publisher that sends more is disconnected, and its stream stale. No more messages wait than fit
    into 1 GiB by this measure, whatever ``queue`` says."""

    def limits(self) -> Limits:
        """Return the limits for the transport."""
        waits = ("patience", "reply", "cooldown", "probe", "probe_most")
        return Limits(held_batches=self.held_batches, **{name: getattr(self, f"{name}_ms") * MS for name in waits})


class Names(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Direct mode: the engines' hashes can be computed, with this algorithm and seed."""

    algorithm: str
    seed: str | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a service."""

    host: Annotated[str, Setting("Address to listen on.", flag=True)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Setting("Port to listen on; 0: any free port.", flag=True)] = 8090
    token_file: Annotated[str | None, Setting("A file with the bearer token; or set KVYARD_TOKEN.", flag=True)] = None
    admin_token_file: str | None = None
    """A token of its own for /register, /unregister and /dump; or set KVYARD_ADMIN_TOKEN. Left out, the clients' is wanted
    there too."""
    hosts: list[str] = []
    """Names by which clients may call it where no token protects it; empty: those of this machine where only that reaches it,
    any otherwise. Against names that are made to point here."""
    networks: list[str] = []
    """Networks of endpoints, such as 10.0.0.0/8, that POST /register may name; empty: any."""
    tls_cert: Annotated[str | None, Setting("Certificate (PEM), to serve HTTPS.", flag=True)] = None
    tls_key: Annotated[str | None, Setting("Private key of --tls-cert (PEM).", flag=True)] = None
    block_size: Annotated[Size | None, Setting("Tokens per block of the index.", flag=True)] = None
    """Left out, a model's first stream that says one decides, else 16."""
    direct: Names | None = None
    backend: Annotated[Literal["memory", "redis"], Setting("Where rows are kept: {choices}.", flag=True)] = "memory"
    backend_options: dict[str, Any] = {}
    """For a backend: ``budget`` bytes for memory; ``url`` and others for Redis."""
    tier_weights: dict[TierName, Weight] = msgspec.field(
        default_factory=lambda: {TIER_NAMES[tier]: weight for tier, weight in DEFAULT_WEIGHTS.items()}
    )
    """Weight of a block on each tier. A tier that is left out has none."""
    catching_up: Share = 0.0
    """Weight of a stream that is catching up."""
    tokenizers: dict[str, str] = {}
    """Per model the path of its tokenizer.json."""
    limits: Bounds = Bounds()
    streams: Patience = Patience()
    models: list[str] = []
    """``model`` or ``model:tenant`` to answer for although no worker is registered here, only at other replicas on Redis."""
    peers: list[str] = []
    """Other indexers to learn from at the start; the first that answers is used."""
    subscriptions: list[Register] = []

    def identity(self, block_size: int) -> Identity:
        """Return the naming of blocks. Raises ``KvyardError`` for an unknown algorithm."""
        if self.direct is None:
            return Identity(block_size, LocalNames())
        return Identity(block_size, algorithm(self.direct.algorithm, self.direct.seed), direct=True)

    @property
    def weights(self) -> dict[Tier, float]:
        """By tier."""
        return {TIERS[name]: weight for name, weight in self.tier_weights.items()}

    @property
    def trust(self) -> Trust:
        return Trust(catching_up=self.catching_up)


def load(path: Path) -> Any:
    """Read a file that ends in .toml or .json. Raises ``KvyardError`` if it can't be read."""
    try:
        raw = path.read_bytes()
        return tomllib.loads(raw.decode()) if path.suffix == ".toml" else msgspec.json.decode(raw)
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, *DECODE_ERRORS) as error:  # also of a number with more digits than Python reads
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise KvyardError(f"{path} is not {kind}: {error}") from None


def convert(document: Any, where: str) -> Config:
    """Return ``document`` as a configuration. Raises ``KvyardError``, naming ``where`` and the key that is wrong."""
    config = settings_as(document, Config, where)
    if not config.tier_weights:
        raise KvyardError(f"{where}: tier_weights is empty, so nothing would earn anything; name at least one tier")
    config.identity(config.block_size or 16)
    return config


_BOUND = re.compile(r"send (?:int|float) ([<>]=) (\S+)")


def settings_as(document: Any, kind: type[Settings], where: str) -> Settings:
    """Return ``document`` as a ``kind``. Raises ``KvyardError``, naming ``where`` and the key that is wrong."""
    try:
        return msgspec.convert(read_texts(kind, document) if isinstance(document, dict) else document, kind)
    except KvyardError as error:
        raise KvyardError(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        why = explained(str(error), kind)
        text = why["error"].replace("no field of this request", "no setting").replace("the body", "it")
        fix = why["fix"]
        if bound := _BOUND.fullmatch(fix):
            # A number out of its range: the range is all there is to say.
            text, fix = (
                f"{why['field']} is out of range",
                f"give {'at most' if bound[1] == '<=' else 'at least'} {bound[2]}",
            )
        raise KvyardError(f"{where}: {text}: {fix.replace('send ', 'give ', 1)}") from None
