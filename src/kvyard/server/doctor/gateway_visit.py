"""A visit to a gateway: its view of the fleet. No judgement here."""

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.server.dashboard.view import FleetView
from kvyard.server.http_client import HttpClient, NoAnswer

PATIENCE = 10.0
"""Seconds for its answer."""


class GatewayVisit(msgspec.Struct, kw_only=True):
    """Observations of one gateway."""

    url: str
    problem: str = ""
    """Why it can't be talked to, or isn't one."""
    unauthorised: bool = False
    view: FleetView | None = None


def visit_gateway(url: str, token: str | None = None) -> GatewayVisit:
    """Ask a gateway what it sees; ``token`` is its admin token, if it has one. What fails is noted, not raised; raises
    ``KvyardError`` where aiohttp isn't installed.
    """
    seen = GatewayVisit(url=url)
    try:
        with HttpClient(url, token=token, seconds=PATIENCE) as client:
            reply = client.get("/dashboard/view")
    except NoAnswer as error:
        seen.problem = str(error)
        return seen
    if reply.status in (401, 403):
        seen.unauthorised = True
    elif reply.status != 200:
        seen.problem = f"/dashboard/view answers {reply.status}"
    else:
        try:
            seen.view = msgspec.json.decode(reply.content, type=FleetView)
        except DECODE_ERRORS:
            seen.problem = "its answer isn't a kvyard gateway's"
        else:
            if seen.view.kind != "gateway":
                seen.problem, seen.view = f"it is a kvyard {seen.view.kind}, no gateway", None
    return seen
