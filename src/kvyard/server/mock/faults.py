"""Faults of an engine on demand, which a router must survive. By flag for all requests, by header for one, by route at run
time.

Values and draws only; ``routes`` and ``fleet`` hang up, stall or die.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.tier import Tier
from kvyard.events.types import Cleared, Event, Removed, Stored
from kvyard.hashing import Namespace
from kvyard.hashing.namespace import Media
from kvyard.tiers.config import OffloadConfig

HEADER = "x-mock-fault"
STATUSES = (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504)


class MockFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault rates. Times are nominal: they pass ``speed`` times as fast."""

    error_rate: float = 0.0
    """The share of requests that are refused."""
    error_status: int = 500
    latency_ms: float = 0.0
    """Added before a request is taken in."""
    abort_rate: float = 0.0
    """The share of requests whose connection is cut ..."""
    abort_after: int = 1
    """... after this many tokens."""
    stall_rate: float = 0.0
    """The share of requests that go silent ..."""
    stall_after: int = 1
    """Stall after this many tokens until the client disconnects."""
    event_loss: float = 0.0
    """The share of KV-event batches that are not sent; a replay still has them."""
    kill_after_s: float = 0.0
    """Seconds from a worker's start to its death; 0 for never."""
    salt_per_request: bool = False
    """Every request has a cache salt of its own."""
    adapter_per_request: bool = False
    """Every request has block keys of an adapter of its own."""
    image_per_request: bool = False
    """Tokens 16 to 32 of every prompt stand for an image that is like no other."""
    changing_text: bool = False
    """Tokens 16 to 20 of every prompt are new, as a date in a template is."""
    hash_seed: bool = False
    """Each worker's block hashes have a seed of its own, whatever ``hash_seed`` of the fleet is; from its next start on."""
    pool_share: float = 1.0
    """The share of the reported blocks that a worker has; from its next start on."""
    store_only: bool = False
    """Lower tiers store and announce blocks, and none is ever loaded; from its next start on."""
    told_block_size: int = 0
    """The block size that metrics report, if not the real one."""
    choices: int = 1
    """Counters of hits count every request as if it asked for this many choices."""
    asleep: bool = False
    """Metrics report that the engine sleeps."""
    events_off: bool = False
    """No events are published."""
    never_removes: bool = False
    """Events never report a removal."""
    never_clears: bool = False
    """Events never report that a cache was cleared."""
    wrong_tier: bool = False
    """Events name host memory where a block is on the device, and the other way round."""
    crossed_events: bool = False
    """Events are published at the endpoint of the next worker."""
    repeat_events: bool = False
    """Every stored block is announced twice."""

    def __post_init__(self) -> None:
        """Raises ``KvyardError`` for what makes no sense."""
        for name in ("error_rate", "abort_rate", "stall_rate", "event_loss"):
            if not 0 <= getattr(self, name) <= 1:
                raise KvyardError(f"{name} is a share from 0 to 1, got {getattr(self, name)}")
        if not 0 < self.pool_share <= 1:
            raise KvyardError(f"pool_share is a share above 0 and at most 1, got {self.pool_share}")
        if self.choices < 1:
            raise KvyardError(f"choices must be at least 1, got {self.choices}")
        for name in ("latency_ms", "abort_after", "stall_after", "kill_after_s", "told_block_size"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise KvyardError(f"{name} can't be negative, got {getattr(self, name)}")
        if self.error_status not in STATUSES:
            raise KvyardError(f"error_status is {self.error_status}: choose one of {', '.join(map(str, STATUSES))}")


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of one request."""

    error: int | None = None
    latency_ms: float = 0.0
    abort_after: int | None = None
    stall_after: int | None = None
    kill: bool = False


def draw(faults: MockFaults, random: Random) -> Fate:
    """Return the fate of a request that doesn't ask for one. It always draws three numbers: rates that change leave the rest as
    is.
    """
    error, abort, stall = random.random(), random.random(), random.random()
    return Fate(
        error=faults.error_status if error < faults.error_rate else None,
        latency_ms=faults.latency_ms,
        abort_after=faults.abort_after if abort < faults.abort_rate else None,
        stall_after=faults.stall_after if stall < faults.stall_rate else None,
    )


def is_lost(faults: MockFaults, stream: str, seq: int) -> bool:
    """Return true if batch ``seq`` of ``stream`` is not sent. Drawn from the two alone: publisher threads ask in any order."""
    return faults.event_loss > 0 and Random(f"{stream} {seq}").random() < faults.event_loss


FRONT = 16
"""Tokens of a prompt before those that a fault changes."""


def as_received(
    faults: MockFaults, prompt: Sequence[int], namespace: Namespace, serial: int
) -> tuple[Sequence[int], Namespace]:
    """Return prompt and namespace of request number ``serial`` as an engine with ``faults`` hashes them."""
    if faults.changing_text and len(prompt) > FRONT + 4:
        prompt = [*prompt[:FRONT], *divmod(serial, 100), serial % 7, serial % 5, *prompt[FRONT + 4 :]]
    if faults.salt_per_request:
        namespace = msgspec.structs.replace(namespace, salt=f"{namespace.salt or ''}#{serial}")
    if faults.adapter_per_request:
        namespace = msgspec.structs.replace(namespace, lora_name=f"adapter{serial}")
    if faults.image_per_request and len(prompt) > 2 * FRONT:
        namespace = msgspec.structs.replace(namespace, media=(Media(f"image{serial}", FRONT, FRONT),))
    return prompt, namespace


def as_loaded(faults: MockFaults, tiers: OffloadConfig | None) -> OffloadConfig | None:
    """Return ``tiers`` as an engine with ``faults`` uses them: with ``store_only`` no prompt is long enough to be
    worth a load.
    """
    if tiers is None or not faults.store_only:
        return tiers
    return msgspec.structs.replace(tiers, load_policy="threshold", load_options={"tokens": float(1 << 40)})


def as_published(faults: MockFaults, events: Sequence[Event]) -> list[Event]:
    """Return ``events`` as an engine with ``faults`` publishes them."""
    published: list[Event] = []
    for event in events:
        if faults.never_removes and isinstance(event, Removed):
            continue
        if faults.never_clears and isinstance(event, Cleared):
            continue
        if faults.wrong_tier and isinstance(event, Stored | Removed):
            event = msgspec.structs.replace(event, tier=Tier.G2 if event.tier is Tier.G1 else Tier.G1)
        published += [event, event] if faults.repeat_events and isinstance(event, Stored) else [event]
    return published


def asked(text: str) -> Fate:
    """Return the fate that a header asks for, such as ``error=503`` or ``latency_ms=200, abort_after=3``.

    Raises ``KvyardError`` for what isn't one.
    """
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "kill" and not value:
            given[name] = True
            continue
        try:
            given[name] = float(value) if name == "latency_ms" else int(value)
        except ValueError:
            raise KvyardError(f"{HEADER} is {text[:80]!r}: {WAYS}") from None
    unknown = set(given) - set(Fate.__struct_fields__)
    if unknown or any(not 0 <= value < float("inf") for value in given.values()):
        raise KvyardError(f"{HEADER} is {text[:80]!r}: {WAYS}")
    if given.get("error", 500) not in STATUSES:
        raise KvyardError(f"{HEADER} asks for status {given['error']}: choose one of {', '.join(map(str, STATUSES))}")
    return Fate(**given)


WAYS = "write error=503, latency_ms=200, abort_after=3, stall_after=3 or kill, with commas between"


def fate(faults: MockFaults, headers: Mapping[str, str], random: Random) -> Fate:
    """Return the faults of a request with these headers. Raises ``KvyardError`` for a header that can't be read."""
    text = headers.get(HEADER)
    return draw(faults, random) if text is None else asked(text)


def changed(faults: MockFaults, given: Mapping[str, Any]) -> MockFaults:
    """Return ``faults`` with what was ``given`` put over it. Raises ``KvyardError``."""
    try:
        return msgspec.convert({**msgspec.structs.asdict(faults), **given}, MockFaults)
    except msgspec.ValidationError as error:
        raise KvyardError(f"faults can't be read: {error}") from None
