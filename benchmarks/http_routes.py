"""What a small JSON route costs: ours, and the libraries that could take its place, under the same uvicorn, by turns.

    pip install litestar blacksheep
    .venv/bin/python benchmarks/http_routes.py [ours starlette litestar blacksheep]

A body of a hundred token ids is checked against a type, a bearer token is asked for, and a typed answer goes back; ``wrk`` asks
over eight connections. CPU time of the server's process per request; the wall clock would show what else runs here.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

ROUNDS = 3
TOKEN = "Bearer sesame"
LUA = f"""wrk.method = "POST"
wrk.headers["authorization"] = "{TOKEN}"
wrk.headers["content-type"] = "application/json"
wrk.body = '{{"model_name":"m","token_ids":[{",".join(map(str, range(5000, 5100)))}]}}'
"""


class Ask(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model_name: str
    token_ids: list[int]
    salt: str | None = None


class Found(msgspec.Struct, kw_only=True):
    workers: dict[str, int]
    block_size: int


def find(ask: Ask) -> Found:
    return Found(workers={"a": len(ask.token_ids), "b": 3}, block_size=16)


def ours() -> Any:
    from kvyard.server.http import Bounds, Operation, application

    async def handler(body: Ask, headers: object) -> Found:
        return find(body)

    score = Operation(method="POST", path="/score", summary="x", handler=handler, body=Ask, reply=Found)
    return application([score], title="x", version="1", bounds=Bounds(), token="sesame")


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    async def score(request: Any) -> Response:
        if request.headers.get("authorization") != TOKEN:
            return Response(b"", 401)
        found = find(msgspec.json.decode(await request.body(), type=Ask))
        return Response(msgspec.json.encode(found), media_type="application/json")

    return Starlette(routes=[Route("/score", score, methods=["POST"])])


def litestar() -> Any:
    from litestar import Litestar, post
    from litestar.exceptions import NotAuthorizedException

    def guard(connection: Any, handler: Any) -> None:
        if connection.headers.get("authorization") != TOKEN:
            raise NotAuthorizedException

    async def score(data: Ask) -> Found:
        return find(data)

    score.__annotations__ = {"data": Ask, "return": Found}
    return Litestar([post("/score", status_code=200, guards=[guard])(score)])


def blacksheep() -> Any:
    from blacksheep import Application, Content, Request, Response

    app = Application()

    async def score(request: Request) -> Response:
        if request.get_first_header(b"authorization") != TOKEN.encode():
            return Response(401)
        found = find(msgspec.json.decode(await request.read(), type=Ask))
        return Response(200, content=Content(b"application/json", msgspec.json.encode(found)))

    score.__annotations__ = {"request": Request, "return": Response}
    app.router.add_post("/score", score)
    return app


def serve(kind: str, port: int) -> None:
    import uvicorn

    from kvyard.server.heads import protocol

    app, lifespan = globals()[kind](), "on" if kind == "blacksheep" else "off"
    uvicorn.run(app, port=port, http=protocol(), lifespan=lifespan, access_log=False, log_level="warning", ws="none")


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, port: int, script: str) -> float:
    """Microseconds of CPU time per request."""
    server = subprocess.Popen([sys.executable, __file__, "serve", kind, str(port)])
    wrk = ["wrk", "-t1", "-c8", "-s", script, f"http://127.0.0.1:{port}/score"]
    try:
        time.sleep(3)
        subprocess.run([*wrk, "-d1"], check=True, capture_output=True)
        before = cpu(server.pid)
        said = subprocess.run([*wrk, "-d4"], check=True, capture_output=True, text=True).stdout
        spent = cpu(server.pid) - before
    finally:
        server.terminate()
        server.wait()
    assert "Non-2xx" not in said, said
    found = re.search(r"(\d+) requests in", said)
    assert found is not None, said
    return spent / int(found[1]) * 1e6


def main(kinds: list[str]) -> None:
    figures: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA)
        script.flush()
        for _ in range(ROUNDS):
            for at, kind in enumerate(kinds):
                figures[kind].append(measure(kind, 18300 + at, script.name))
    for kind, found in figures.items():
        print(
            f"{kind:12} {statistics.median(found):6.1f} µs of CPU per request  ({min(found):.1f} to {max(found):.1f})"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1:] or ["ours", "starlette", "litestar", "blacksheep"])
