"""An application: the operations of one server, with the common checking, handling and answering of requests."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.openai import ErrorBody
from kvyard.server.held import HeldBytes
from kvyard.server.http import (
    JSON,
    Bounds,
    GuardCheck,
    Operation,
    Raw,
    Refusal,
    RefusalBody,
    Response,
    ResponseBroken,
    check_is_no_form,
    check_token,
    decode,
    decode_as_vllm,
    get,
    header_pairs,
    openai_error,
)
from kvyard.server.openapi import document
from kvyard.server.request import ClientGone, HttpRequest
from kvyard.server.weight import FIX, HEAVY, LARGE, too_heavy

log = logging.getLogger(__name__)

_PART = re.compile(r"\\\{[^/]*\\\}")


class Application:
    """The operations of one server, with their own description at ``/openapi.json``."""

    def __init__(
        self,
        operations: Sequence[Operation],
        *,
        title: str,
        bounds: Bounds,
        held: HeldBytes | None = None,
        token: str | None = None,
        door: Callable[[str], None] | None = None,
        guard: GuardCheck | None = None,
        unknown: Operation | None = None,
        seen: Callable[[str, int, float], None] | None = None,
        openai: bool = False,
        vllm: bool = False,
    ) -> None:
        """``held`` bounds the bytes of all requests. ``door`` takes the Authorization header and raises ``Refusal`` for
        clients that may not enter; with it, ``token`` isn't checked. ``guard`` is asked about requests that no token
        protects. ``unknown``, of any method, handles paths without an operation. ``seen`` receives the path, status and
        seconds of every answered request. With ``openai``, refusals have the form of OpenAI's API. With ``vllm``, unknown
        routes and methods are answered as by vLLM, whose routes don't take HEAD.
        """
        self.bounds = bounds
        self.held = held or HeldBytes()
        self._token = token
        self._door = door
        self._guard = guard
        self._unknown = unknown
        self._seen = seen
        self._openai = openai
        self._vllm = vllm
        self._by_path: dict[str, dict[str, Operation]] = {}
        """Operations by path and method."""
        self._paths = ", ".join(operation.path for operation in operations)
        self._patterns: list[tuple[re.Pattern[str], dict[str, Operation]]] = []
        """Operations of paths with a part in braces."""
        secured = token is not None or door is not None
        described = document(operations, title=title, secured=secured, problem=ErrorBody if openai else RefusalBody)

        async def describe(body: None, request: HttpRequest) -> Any:
            """Return this document."""
            return described

        self.add([*operations, get("/openapi.json", describe, open=True)])

    def add(self, operations: Sequence[Operation]) -> None:
        """Answer these too; they aren't described."""
        for operation in operations:
            if "{" in operation.path:
                self._patterns.append((re.compile(_PART.sub("[^/]+", re.escape(operation.path))), {}))
                methods = self._patterns[-1][1]
            else:
                methods = self._by_path.setdefault(operation.path, {})
            methods[operation.method] = operation
            if operation.method == "GET" and not self._vllm:
                methods["HEAD"] = operation

    async def __call__(self, request: HttpRequest) -> None:
        """Answer a request. Whatever goes wrong, before or after the first byte, is handled here."""
        try:
            try:
                response = await self._response(request)
                await response.send(request)
            except asyncio.CancelledError:
                if request.gone or not request.ending:
                    raise
                if request.task is not None:
                    request.task.uncancel()
                if request.began:
                    raise ResponseBroken("the server ends") from None
                ends = Refusal(503, "the server ends", fix="try again", Retry_After="1", Connection="close")
                await self._refusal(ends).send(request)
        except ResponseBroken:
            request.abort()
        except ClientGone:
            pass
        except Exception:
            log.exception("the answer to %s %s failed", request.method, request.path[:100])
            if request.began:
                request.abort()
            else:
                await self._refusal(_OURS).send(request)

    # -- the response ---------------------------------------------------------------------------------------------------

    async def _response(self, request: HttpRequest) -> Response:
        operation = self._find(request)
        if isinstance(operation, Response):
            return operation
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            self._check(operation, request)
            response = self._made(await self._handled(operation, request), operation.status)
        except Refusal as refusal:
            response = self._refusal(refusal)
        except ClientGone:
            raise
        except KvyardError as error:
            response = self._refusal(Refusal(422, str(error)))
        except Exception:
            # Our fault. The traceback goes to the log without the body; the client learns only that.
            log.exception("%s %s failed", operation.method, operation.path)
            response = self._refusal(_OURS)
        if self._seen is not None:
            self._seen(operation.path, response.status, loop.time() - began)
        return response

    def _check(self, operation: Operation, request: HttpRequest) -> None:
        """Raise ``Refusal`` for a request that may not be sent."""
        wanted, door = operation.token or self._token, self._door if operation.token is None else None
        door = operation.door or door
        protected = wanted is not None or door is not None
        if self._guard is not None and (operation.guarded or (not protected and not operation.open)):
            self._guard(request.method, request, protected)
            if not protected and operation.body is not None and not operation.as_vllm:
                check_is_no_form(request.get("content-type", ""))
        if operation.closed:
            raise Refusal(403, operation.closed)
        if protected and not operation.open:
            if door is not None:
                door(request.get("authorization", ""))
            elif wanted is not None:
                check_token(request.get("authorization", ""), wanted)

    async def _handled(self, operation: Operation, request: HttpRequest) -> Any:
        if operation.abandoned_with_client:
            request.abandon_with_client()
        body: Any = None
        if operation.body is not None:
            content = await request.body(self.bounds)
            if len(content) >= LARGE:
                await pause()  # each pass over it is a turn of its own
                if not operation.raw and await too_heavy(content):
                    request.refused("body")
                    raise Refusal(413, HEAVY, fix=FIX)
            if operation.as_vllm:
                body = decode_as_vllm(operation.body, content, request.get("content-type", ""))
            else:
                body = content if operation.raw else decode(operation.body, content)
            if not operation.raw and len(content) >= LARGE:
                await pause()
        return await operation.handler(body, request)

    def _made(self, value: Any, status: int, headers: Mapping[str, str] | None = None) -> Response:
        if isinstance(value, Response):
            return value
        pairs = [] if headers is None else header_pairs(headers)
        if isinstance(value, Raw):
            if value.media_type:
                kind = value.media_type
                text = kind.startswith("text/") and "charset" not in kind
                pairs.append((b"content-type", f"{kind}; charset=utf-8".encode() if text else kind.encode()))
            return Response(value.status or status, pairs, value.content)
        pairs.append((b"content-type", JSON.encode()))
        return Response(status, pairs, msgspec.json.encode(value))

    def _refusal(self, refusal: Refusal) -> Response:
        status, problem = openai_error(refusal) if self._openai else (refusal.status, refusal.problem)
        return self._made(problem, status, refusal.headers)

    # -- routes ---------------------------------------------------------------------------------------------------------

    def _methods(self, path: str) -> Mapping[str, Operation] | None:
        by_method = self._by_path.get(path)
        if by_method is None and self._patterns:
            matches = [methods for pattern, methods in self._patterns if pattern.fullmatch(path)]
            by_method = {
                method: operation for methods in reversed(matches) for method, operation in methods.items()
            } or None
        return by_method

    def _find(self, request: HttpRequest) -> Operation | Response:
        """Return the operation of a request, or why there is none."""
        path, method = request.path, request.method
        methods = self._methods(path)
        if methods is not None:
            operation = methods.get(method)
            return self._not_for(request, methods) if operation is None else operation
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        if path != "/" and self._methods(other) is not None:
            # Relative, as Host is any client's invention.
            query = f"?{request.query.decode('latin-1')}" if request.query else ""
            return Response(307, [(b"location", f"{quote(other)}{query}".encode("latin-1"))])
        if self._vllm:
            return self._made({"detail": "Not Found"}, 404)
        if self._unknown is not None:
            return self._unknown
        return self._refusal(Refusal(404, f"there is no {path[:100]}", fix=f"there are {self._paths}"))

    def _not_for(self, request: HttpRequest, methods: Mapping[str, Operation]) -> Response:
        allowed = ", ".join(methods)
        if self._vllm:  # which names the method of the first route of that path
            return self._made({"detail": "Method Not Allowed"}, 405, {"allow": next(iter(methods))})
        error = f"{request.method} isn't for {request.path}"
        return self._refusal(Refusal(405, error, fix=f"use {allowed}", Allow=allowed))


_OURS = Refusal(500, "something went wrong here: see the server's log")
