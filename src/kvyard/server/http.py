"""HTTP the way every server here speaks it: typed bodies in, typed bodies out, and refusals that say what to change.

A route is an ``Operation``: its types check the body and are published as its schema, so the two can't drift apart. A body
that is too long, late, no JSON or not of its type is answered with 4xx and a ``RefusalBody`` that names the field and the fix.
What a request said is never logged.
"""

import asyncio
import difflib
import hmac
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvyard.clock import pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.openai import ErrorBody, ErrorInfo

log = logging.getLogger(__name__)

JSON = "application/json"
LOST = "kvyard.lost"
"""In a scope: a set of what is called where the client hangs up, where the protocol has one."""
TRANSPORT = "kvyard.transport"
"""In a scope: the client's connection, where the protocol tells; see ``chunk_writer``."""
WHOLE = "kvyard.whole"
"""In a scope: whether all of the body is here, so that reading it can't take long."""
FORMS = ("text/plain", "multipart/form-data")


class RefusalBody(msgspec.Struct, kw_only=True):
    """Why a request was refused."""

    error: str
    field: str = ""
    """Where in the body; empty where it isn't about one field."""
    fix: str = ""


class Refusal(Exception):
    """A request that can't be answered, with the status to say so."""

    def __init__(self, status: int, error: str, *, field: str = "", fix: str = "", **headers: str) -> None:
        super().__init__(error)
        self.status = status
        self.problem = RefusalBody(error=error, field=field, fix=fix)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


OPENAI_ERRORS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    503: "ServiceUnavailableError",
}


def openai_error(refusal: Refusal) -> tuple[int, ErrorBody]:
    """Status and body of a refusal, as vLLM words them. A body that isn't of its type is a 400 here, of a type of its own."""
    problem = refusal.problem
    message = f"{problem.error}; {problem.fix}" if problem.fix else problem.error
    param, status = problem.field or None, refusal.status
    kind = OPENAI_ERRORS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    if status == 422 and not refusal.headers.get("x-mock-fault"):
        status, kind = 400, "Bad Request"
        param = None if problem.field == NOT_JSON else ".".join(["body", *_PLACE.findall(problem.field)])
    return status, ErrorBody(error=ErrorInfo(message=message, type=kind, param=param, code=status))


NOT_JSON = "content-type"
_PLACE = re.compile(r"[^.\[\]]+")
"""Parts of a field's name: of ``messages[0].role`` they are messages, 0 and role."""


def picked(source: object, names: str) -> dict[str, Any]:
    """Attributes of ``source``, for a body that has them under the same ``names``."""
    return {name: getattr(source, name) for name in names.split()}


class RequestHeaders(Mapping[str, str]):
    """The headers of a request, by their names in small letters; the first counts where one comes twice."""

    __slots__ = ("_found", "raw")

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self.raw = raw
        """As they came."""
        self._found: dict[str, str] | None = None

    def _all(self) -> dict[str, str]:
        found = self._found
        if found is None:
            found = self._found = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.raw)
            }
        return found

    def get(self, name: str, default: Any = None) -> Any:
        found = self._found
        return (self._all() if found is None else found).get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return self._all()[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class ClientGone(Exception):
    """The client hung up before its request was whole."""


class Raw(msgspec.Struct):
    """An answer that isn't JSON."""

    content: bytes
    media_type: str
    status: int | None = None
    """Another than the operation's."""


GuardCheck = Callable[[str, Mapping[str, str], bool], None]
"""Takes method, headers and whether a token is wanted; raises ``Refusal`` for what a page of another site sends. See
``Guard``."""
Handler = Callable[..., Awaitable[Any]]
"""Takes the decoded body (``None`` where there is none) and the headers; returns a value to encode, ``Raw``, or an ASGI
application with a ``status_code``."""


ANY_METHOD = "*"
"""Of an operation whose handler gets the method as a fourth argument, behind the path."""


class Operation(msgspec.Struct, kw_only=True, frozen=True):
    """One route."""

    method: str
    path: str
    summary: str
    handler: Handler
    body: Any = None
    """The type of its body; ``None`` where it has none."""
    raw: bool = False
    """Whether the handler gets the body's bytes and reads them itself."""
    reply: Any = None
    """The type of its answer; ``None`` where that isn't JSON."""
    status: int = 200
    media_types: tuple[str, ...] = (JSON,)
    refusals: tuple[int, ...] = ()
    """Statuses of its own refusals, beyond those that every route may answer with."""
    open: bool = False
    """Whether it answers without a token."""
    token: str | None = None
    """Its own token, where it isn't the server's."""
    as_vllm: bool = False
    """Whether bodies are taken as vLLM takes them: only where they say that they are JSON, and with types that nearly fit."""
    guarded: bool = False
    """Whether pages of other sites may not send it even where a token is wanted. Without one they never may, unless it is
    ``open``."""
    by_path: bool = False
    """Whether its path has a part that differs, in braces; the handler gets the path as a third argument then."""
    closed: str = ""
    """Why it is answered with 403, whoever asks; empty where it isn't."""


def get(path: str, handler: Handler, reply: Any = None, **more: Any) -> Operation:
    """A route without a body. What it is for is its handler's docstring."""
    return Operation(
        method="GET", path=path, summary=inspect.getdoc(handler) or "", handler=handler, reply=reply, **more
    )


def post(path: str, handler: Handler, body: Any, reply: Any = None, **more: Any) -> Operation:
    """A route with a body. What it is for is its handler's docstring."""
    return msgspec.structs.replace(get(path, handler, reply, **more), method="POST", body=body)


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a single request may take."""

    body_bytes: int = 16 << 20
    body_seconds: float = 30.0
    """Until the whole body has to be here."""
    tokens: int = 2_000_000
    """Per prompt."""
    batch: int = 64
    """Prompts per request."""


def application(
    operations: Sequence[Operation],
    *,
    title: str,
    bounds: Bounds,
    token: str | None = None,
    door: Callable[[str], None] | None = None,
    guard: GuardCheck | None = None,
    unknown: Operation | None = None,
    seen: Callable[[str, int, float], None] | None = None,
    openai: bool = False,
    vllm: bool = False,
) -> Any:
    """A Starlette application of ``operations``, with its own description at ``/openapi.json``.

    ``door`` takes the Authorization header and raises ``Refusal`` for those who may not enter; with it, ``token`` isn't looked
    at. ``guard`` is asked about requests that no token protects. ``unknown``, of any method, is for paths that no other is
    for. ``seen`` is told the path, status and seconds of every answered request. With ``openai``, refusals are written as
    clients of OpenAI read them. With ``vllm``, routes that aren't there and methods that aren't for them are answered as vLLM
    does, whose routes don't take HEAD. Raises ``KvyardError`` where Starlette isn't installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError:
        raise KvyardError("serving needs Starlette and uvicorn: pip install 'kvyard[server]'") from None
    from kvyard.server.openapi import document

    def answer(value: Any, status: int, headers: Mapping[str, str] | None = None) -> Any:
        if callable(value):
            return value
        if isinstance(value, Raw):
            return Response(value.content, value.status or status, headers=headers, media_type=value.media_type or None)
        return Response(msgspec.json.encode(value), status, headers=headers, media_type=JSON)

    def refuse(refusal: Refusal) -> Any:
        status, said = openai_error(refusal) if openai else (refusal.status, refusal.problem)
        return answer(said, status, refusal.headers)

    direct: dict[tuple[str, str], Callable[[Any, Any], Awaitable[Any]]] = {}

    class Application(Starlette):
        """Finds what it was made with by one look, past Starlette's routing, which takes longer than many answers do."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            endpoint = direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
            if endpoint is None:
                await super().__call__(scope, receive, send)
                return
            response = await endpoint(scope, receive)
            await response(scope, receive, send)

    def endpoint_of(operation: Operation) -> Callable[[Any, Any], Awaitable[Any]]:
        wanted = operation.token or token
        by_door = door if operation.token is None else None
        protected = wanted is not None or by_door is not None

        async def endpoint(scope: Any, receive: Any) -> Any:
            loop = asyncio.get_running_loop()
            began = loop.time()
            headers = RequestHeaders(scope["headers"])
            try:
                if guard is not None and (operation.guarded or (not protected and not operation.open)):
                    guard(scope["method"], headers, protected)
                    if not protected and operation.body is not None and not operation.as_vllm:
                        check_is_no_form(headers.get("content-type", ""))
                if operation.closed:
                    raise Refusal(403, operation.closed)
                if protected and not operation.open:
                    if by_door is not None:
                        by_door(headers.get("authorization", ""))
                    elif wanted is not None:
                        check_token(headers.get("authorization", ""), wanted)
                body = None
                if operation.body is not None:
                    content = await _read(scope, receive, headers, bounds)
                    if operation.as_vllm:
                        body = decode_as_vllm(operation.body, content, headers.get("content-type", ""))
                    else:
                        body = content if operation.raw else decode(operation.body, content)
                more: tuple[str, ...] = (scope["path"],) if operation.by_path else ()
                if operation.method == ANY_METHOD:
                    more = (*more, scope["method"])
                found = await operation.handler(body, headers, *more)
                response = answer(found, operation.status)
            except Refusal as refusal:
                response = refuse(refusal)
            except KvyardError as error:
                response = refuse(Refusal(422, str(error)))
            except ClientGone:
                response = refuse(Refusal(400, "the client hung up"))
            except Exception:
                # Our fault. The traceback goes to the log without the body; the client learns only that.
                log.exception("%s %s failed", operation.method, operation.path)
                response = refuse(Refusal(500, "something went wrong here: see the server's log"))
            if seen is not None:
                seen(operation.path, response.status_code, loop.time() - began)
            return response

        return endpoint

    def route(operation: Operation) -> Route:
        endpoint = endpoint_of(operation)
        if not operation.by_path:
            direct[operation.method, operation.path] = endpoint

        async def by_route(request: Request) -> Any:
            return await endpoint(request.scope, request.receive)

        made = Route(operation.path, by_route, methods=[operation.method])
        if vllm and made.methods is not None:
            made.methods.discard("HEAD")
        return made

    async def refused(request: Request, error: Exception) -> Any:
        assert isinstance(error, HTTPException)
        if vllm and error.status_code in (404, 405):
            return answer({"detail": error.detail}, error.status_code, error.headers)
        if error.status_code == 404 and pass_on is not None:
            return await pass_on(request.scope, request.receive)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            refusal = Refusal(
                405, f"{request.method} isn't for {request.url.path}", fix=f"use {allowed}", Allow=allowed
            )
        elif error.status_code == 404:
            paths = ", ".join(operation.path for operation in operations)
            refusal = Refusal(404, f"there is no {request.url.path[:100]}", fix=f"there are {paths}")
        else:
            refusal = Refusal(error.status_code, str(error.detail))
        return refuse(refusal)

    pass_on = None if unknown is None else endpoint_of(unknown)
    problem = ErrorBody if openai else RefusalBody
    described = document(operations, title=title, secured=token is not None or door is not None, problem=problem)

    async def describe(body: None, headers: Mapping[str, str]) -> Any:
        """This document."""
        return described

    routes = [route(operation) for operation in (*operations, get("/openapi.json", describe, open=True))]
    return Application(routes=routes, exception_handlers={HTTPException: refused})


def check_token(header: str, token: str) -> None:
    """Raise ``Refusal`` unless ``header`` brings ``token``. Takes as long for a near miss as for any other."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refusal(
            401, "the token is missing or wrong", fix="send Authorization: Bearer TOKEN", WWW_Authenticate="Bearer"
        )


def check_is_no_form(content_type: str) -> None:
    """Raise ``Refusal`` for what a form of a web page sends, wherever the page is from. What curl says of a body by itself,
    ``application/x-www-form-urlencoded``, is let through: with it browsers say where they are.
    """
    if content_type.partition(";")[0].strip().lower() in FORMS:
        raise Refusal(415, "this is what forms of web pages send", fix="send Content-Type: application/json")


async def _read(scope: Any, receive: Any, headers: RequestHeaders, bounds: Bounds) -> bytes:
    """The body, up to the bounds. Raises ``ClientGone``."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > bounds.body_bytes:
        raise _too_long(bounds)
    if scope.get(WHOLE):
        return await _parts(receive, bounds)
    try:
        async with asyncio.timeout(bounds.body_seconds):
            return await _parts(receive, bounds)
    except TimeoutError:
        raise Refusal(408, f"the body took longer than {bounds.body_seconds:g} s", Connection="close") from None
    except asyncio.CancelledError:  # as servers do at their end with what is under way for too long
        raise Refusal(503, "the server ends", fix="try again", Retry_After="1", Connection="close") from None


async def _parts(receive: Any, bounds: Bounds) -> bytes:
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > bounds.body_bytes:
            raise _too_long(bounds)
        parts.append(part)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_long(bounds: Bounds) -> Refusal:
    fix = "send less at once, or raise limits.body_bytes"
    return Refusal(413, f"the body is longer than {bounds.body_bytes} bytes", fix=fix, Connection="close")


def decode(type_: Any, body: bytes) -> Any:
    """``body`` as a ``type_``. Raises ``Refusal`` that names the field and the fix."""
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise Refusal(422, **explained(str(error), type_)) from None
    except (ValueError, *DECODE_ERRORS) as error:
        text = re.sub(r"^JSON is malformed: ", "", str(error))
        raise Refusal(400, f"the body is not JSON: {text}", fix="send a JSON object in UTF-8") from None


def decode_as_vllm(type_: Any, body: bytes, content_type: str) -> Any:
    """``body`` as a ``type_``. Raises ``Refusal`` where vLLM would: also for another content type than JSON's. A number that is
    written as text, say, is taken for a number.
    """
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise Refusal(422, "Unsupported Media Type: Only 'application/json' is allowed", field=NOT_JSON)
    if not body:
        raise Refusal(422, "the body is missing")
    try:
        return msgspec.json.decode(body, type=type_)
    except (ValueError, *DECODE_ERRORS) as error:
        try:
            found = json.loads(body)
            json.dumps(found, ensure_ascii=False).encode()  # half a character is no text
        except (ValueError, RecursionError) as malformed:
            place = str(getattr(malformed, "pos", getattr(malformed, "start", 0)))
            raise Refusal(422, f"the body is not JSON: {malformed}"[:300], field=place) from None
        try:
            return msgspec.convert(found, type_, strict=False)
        except msgspec.ValidationError:
            raise Refusal(422, **explained(str(error), type_)) from None


_AT = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")
_UNKNOWN = re.compile(r"unknown field `(.*)`")


def explained(message: str, type_: Any) -> dict[str, str]:
    """What msgspec says of a value that isn't a ``type_``, as error, field and fix."""
    found = _AT.search(message)
    where = found[1] if found else ""
    what = message[: found.start()] if found else message
    missing, unknown = _MISSING.search(what), _UNKNOWN.search(what)
    prefix = f"{where}." if where else ""
    if missing:
        field = prefix + missing[1]
        return {"error": f"{field} is missing", "field": field, "fix": f"add {missing[1]}"}
    if unknown:
        field = prefix + unknown[1]
        known = [] if where else [one.encode_name for one in msgspec.structs.fields(type_)]
        near = difflib.get_close_matches(unknown[1], known, 1)
        if near:
            fix = f"did you mean {near[0]}?"
        else:
            fix = f"leave it out; there are {', '.join(known)}" if known else "leave it out"
        return {"error": f"{field[:200]} is no field of this request", "field": field[:200], "fix": fix}
    wanted = what.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    fix = f"send {wanted}" if what.startswith("Expected ") else "send another value"
    if choices := _choices(type_, where):
        fix = f"choose {', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else f"send {choices[0]}"
    what = what[:1].lower() + what[1:]
    return {"error": f"{where or 'the body'}: {what}", "field": where, "fix": fix}


def _choices(type_: Any, where: str) -> list[str]:
    """The values that the field at ``where`` may have, as msgspec names places; empty where it may have any."""
    at = [msgspec.inspect.type_info(type_)]
    for name in re.findall(r"[^.\[\]]+|\[[^\]]*\]", where):
        inside: list[msgspec.inspect.Type] = []
        for one in at:
            if isinstance(one, msgspec.inspect.StructType):
                inside += [field.type for field in one.fields if field.encode_name == name]
            elif isinstance(one, msgspec.inspect.ListType):
                inside.append(one.item_type)
            elif isinstance(one, msgspec.inspect.DictType):
                inside.append(one.value_type)
        at = [part for one in inside for part in (one.types if isinstance(one, msgspec.inspect.UnionType) else (one,))]
    listed = [one for one in at if isinstance(one, msgspec.inspect.LiteralType)]
    return [str(value) for one in listed for value in one.values] if len(listed) == len(at) else []


async def until_disconnect(receive: Any) -> None:
    """Wait until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Any, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``, which is cancelled where the client hangs up. Raises what it raises."""
    watching, working = asyncio.create_task(until_disconnect(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait((watching, working), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)


async def send_response(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Answer with a body that is complete."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def chunk_writer(scope: Any) -> Callable[[bytes], bool] | None:
    """What writes a chunk of an answer whose head was sent without a length, as ``send`` would but without a task's turn:
    returns whether it did, which it doesn't where the client is slow or gone. ``None`` where the protocol has none.
    """
    transport = scope.get(TRANSPORT)
    return None if transport is None or scope["method"] == "HEAD" else transport.write_chunk


async def close_connection(scope: Any) -> None:
    """End the client's connection without its answer's proper end."""
    transport = scope.get(TRANSPORT)
    if transport is not None:
        transport.close()
        await pause()
