"""Headers of proxied messages: hop-by-hop headers and the gateway's own tokens aren't passed on."""

from collections.abc import Iterable
from typing import TypeAlias

from kvyard.router import Decision
from kvyard.router.flow import FlowWait

Pairs: TypeAlias = Iterable[tuple[bytes, bytes]]

DECISION = "x-kvyard-decision"
REQUEST_ID = b"x-request-id"
RANK = b"x-data-parallel-rank"

PREFILL = b"x-kvyard-prefill"
"""Engine that computed a prompt for the engine that answers."""
PREFILLER = b"x-prefiller-host-port"
"""Address from which a decode engine's side-car fetches a prompt: set by the gateway, and by no client."""
_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
_USUAL = (b"keep-alive", b"close")
_NOT_UP = _HOP | {b"host", b"content-length", b"expect", b"accept-encoding", REQUEST_ID, RANK, PREFILLER}
"""``accept-encoding`` among them: usage in a compressed answer couldn't be counted."""
_NOT_DOWN = _HOP | {b"content-length", b"date", b"server"}
_NOT_TOLD = _NOT_DOWN | {DECISION.encode(), PREFILL}


def upstream(
    headers: Pairs, id_: str, authorization: str | None, keep_authorization: bool
) -> list[tuple[bytes, bytes]]:
    """Return the headers for an engine. ``authorization`` replaces the client's, which is passed on only if allowed."""
    out = [(REQUEST_ID, id_.encode())]
    if authorization is None and keep_authorization:
        out += _without_hop(headers, _NOT_UP)
        return out
    out += [pair for pair in _without_hop(headers, _NOT_UP) if pair[0] != b"authorization"]
    if authorization is not None:
        out.append((b"authorization", authorization.encode()))
    return out


def _without_hop(headers: Pairs, dropped: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Return headers by their names in small letters, less ``dropped`` and those that ``Connection`` names."""
    out: list[tuple[bytes, bytes]] = []
    hop: set[bytes] = set()
    for name, value in headers:
        name = name.lower()
        if name not in dropped:
            out.append((name, value))
        elif name == b"connection" and value not in _USUAL:
            hop.update(part.strip().lower() for part in value.split(b","))
    return [pair for pair in out if pair[0] not in hop] if hop else out


def downstream(headers: Pairs, decision: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers for the client, with the decision unless it is ``None``: then also none that another gateway made."""
    if decision is None:
        return _without_hop(headers, _NOT_TOLD)
    out = _without_hop(headers, _NOT_DOWN)
    out.append((b"x-kvyard-decision", decision.encode("latin-1", "replace")))
    return out


def decision_header(decision: Decision, tries: int, wait: FlowWait | None = None) -> str:
    """Return a decision in one line: who, why, how much of the prompt was there (and of that: was predicted), what it cost; and
    why the request waited before.
    """
    text = (
        f"worker={decision.worker}; policy={decision.policy}; why={decision.why}; hit={decision.overlap}/{decision.blocks}; "
        f"best={decision.best}; cost={decision.cost:.3f}"
    )
    if decision.predicted:
        text += f"; predicted={decision.predicted}"
    if wait is not None:
        text += wait_header(wait)
    return f"{text}; tries={tries}" if tries > 1 else text


def wait_header(wait: FlowWait) -> str:
    """Return why a request waited, to go on from a decision."""
    return (
        f"; flow={wait.policy}; waited_ms={wait.waited_ms:.1f}; ahead={wait.ahead}; overtaken={wait.overtaken}; "
        f'waited_because="{wait.why}"'
    )
