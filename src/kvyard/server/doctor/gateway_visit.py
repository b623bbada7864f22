"""A visit to a gateway: the fleet as it sees it. No judgement here."""

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.server.dashboard.view import FleetView

PATIENCE = 10.0
"""Seconds for its answer."""


class GatewayVisit(msgspec.Struct, kw_only=True):
    """What was seen of one gateway."""

    url: str
    problem: str = ""
    """Why it can't be talked to, or isn't one."""
    unauthorised: bool = False
    view: FleetView | None = None


def visit_gateway(url: str, token: str | None = None) -> GatewayVisit:
    """Ask a gateway what it sees; ``token`` is its admin token, where it has one. What fails is noted, not raised; raises
    ``KvyardError`` where httpx isn't installed.
    """
    try:
        import httpx
    except ImportError:
        raise KvyardError("visiting a gateway needs httpx: pip install 'kvyard[server]'") from None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    seen = GatewayVisit(url=url)
    try:
        with httpx.Client(headers=headers, timeout=PATIENCE, trust_env=False) as client:
            reply = client.get(f"{url.rstrip('/')}/dashboard/view")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        seen.problem = str(error) or type(error).__name__
        return seen
    if reply.status_code in (401, 403):
        seen.unauthorised = True
    elif reply.status_code != 200:
        seen.problem = f"/dashboard/view answers {reply.status_code}"
    else:
        try:
            seen.view = msgspec.json.decode(reply.content, type=FleetView)
        except DECODE_ERRORS:
            seen.problem = "its answer isn't a kvyard gateway's"
        else:
            if seen.view.kind != "gateway":
                seen.problem, seen.view = f"it is a kvyard {seen.view.kind}, no gateway", None
    return seen
