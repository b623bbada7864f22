"""HTTP conventions of all servers here: typed request and response bodies, and refusals that name the fix.

A route is an ``Operation``: its types check the body and are published as its schema, so the two can't drift apart. A body
that is too long, late, no JSON or not of its type is answered with 4xx and a ``RefusalBody`` that names the field and the fix.
Request bodies are never logged.
"""

import difflib
import hmac
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.openai import ErrorBody, ErrorInfo
from kvyard.server.weight import LARGE

if TYPE_CHECKING:
    from kvyard.server.request import HttpRequest

JSON = "application/json"
_JSON_TYPE = (b"content-type", JSON.encode())
FORMS = ("text/plain", "multipart/form-data")


class RefusalBody(msgspec.Struct, kw_only=True):
    """Why a request was refused."""

    error: str
    field: str = ""
    """Path in the body; empty if it isn't about one field."""
    fix: str = ""


class Refusal(Exception):
    """A request that can't be answered, with its status."""

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
    """Return status and body of a refusal in vLLM's form. A body of the wrong type is a 400 here, with its own error type."""
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
    """Return the attributes ``names`` of ``source`` as keyword arguments."""
    return {name: getattr(source, name) for name in names.split()}


def openai_error_response(refusal: Refusal) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return a refusal in OpenAI's form: status, headers and body."""
    status, problem = openai_error(refusal)
    return status, [_JSON_TYPE, *header_pairs(refusal.headers)], msgspec.json.encode(problem)


def header_pairs(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as bytes, names in lower case."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


class Response:
    """An answer. Streamed answers override ``send``."""

    def __init__(self, status: int, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b"") -> None:
        self.status = status
        self.headers = headers
        self.body = body

    async def send(self, request: "HttpRequest") -> None:
        """Write the answer. Raises ``ClientGone``, and ``ResponseBroken`` if it can't be completed."""
        request.respond(self.status, self.headers, self.body)


class ResponseBroken(Exception):
    """An answer that had begun can't be completed; its connection is closed without the answer's proper end."""


class Raw(msgspec.Struct):
    """An answer that isn't JSON."""

    content: bytes
    media_type: str
    status: int | None = None
    """Status, if it differs from the operation's."""


GuardCheck = Callable[[str, Mapping[str, str], bool], None]
"""Takes method, headers and whether a token is wanted; raises ``Refusal`` for what a page of another site sends. See
``Guard``."""
Handler = Callable[..., Awaitable[Any]]
"""Takes the decoded body (``None`` if there is none) and the ``HttpRequest``; returns a value to encode, ``Raw``, or a
``Response``. Raises ``Refusal``."""
ANY_METHOD = "*"


class Operation(msgspec.Struct, kw_only=True, frozen=True):
    """One route."""

    method: str
    path: str
    summary: str
    handler: Handler
    body: Any = None
    """The type of its body; ``None`` if it has none."""
    raw: bool = False
    """True if the handler gets the body's bytes and reads them itself."""
    reply: Any = None
    """The type of its answer; ``None`` if that isn't JSON."""
    status: int = 200
    media_types: tuple[str, ...] = (JSON,)
    refusals: tuple[int, ...] = ()
    """Statuses of its own refusals, beyond those that every route may answer with."""
    open: bool = False
    """True if it answers without a token."""
    token: str | None = None
    """Its own token, if it isn't the server's."""
    door: Callable[[str], None] | None = None
    """Takes the Authorization header and raises ``Refusal`` if access is denied; replaces all tokens."""
    as_vllm: bool = False
    """True if bodies are accepted as by vLLM: only with a JSON content type, and with types that nearly fit."""
    guarded: bool = False
    """True if pages of other sites may not send it even with a token. Without one they never may, unless it is ``open``."""
    abandoned_with_client: bool = False
    """True if its work ends when the client disconnects."""
    closed: str = ""
    """Reason for answering every request with 403; empty if the route is open."""


def get(path: str, handler: Handler, reply: Any = None, **more: Any) -> Operation:
    """Return a route without a body. Its summary is the handler's docstring."""
    return Operation(
        method="GET", path=path, summary=inspect.getdoc(handler) or "", handler=handler, reply=reply, **more
    )


def post(path: str, handler: Handler, body: Any, reply: Any = None, **more: Any) -> Operation:
    """Return a route with a body. Its summary is the handler's docstring."""
    return msgspec.structs.replace(get(path, handler, reply, **more), method="POST", body=body)


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a single request."""

    body_bytes: int = 16 << 20
    body_seconds: float = 30.0
    """Seconds within which the whole body must arrive."""
    tokens: int = 2_000_000
    """Per prompt."""
    batch: int = 64
    """Prompts per request."""


def check_token(header: str, token: str) -> None:
    """Raise ``Refusal`` unless ``header`` has ``token``. Compares in constant time."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refusal(
            401, "the token is missing or wrong", fix="send Authorization: Bearer TOKEN", WWW_Authenticate="Bearer"
        )


def check_is_no_form(content_type: str) -> None:
    """Raise ``Refusal`` for content types of web forms, which a page of any site may send. curl's default,
    ``application/x-www-form-urlencoded``, is accepted: browsers send their origin with it.
    """
    if content_type.partition(";")[0].strip().lower() in FORMS:
        raise Refusal(415, "this is what forms of web pages send", fix="send Content-Type: application/json")


def decode(type_: Any, body: bytes) -> Any:
    """Decode ``body`` as a ``type_``. Raises ``Refusal`` that names the field and the fix."""
    try:
        return msgspec.json.decode(body, type=type_)
    except (ValueError, *DECODE_ERRORS) as error:
        raise _unreadable(error, type_) from None


def _unreadable(error: Exception, type_: Any) -> Refusal:
    if isinstance(error, msgspec.ValidationError):
        return Refusal(422, **explained(str(error), type_))
    text = re.sub(r"^JSON is malformed: ", "", str(error))
    return Refusal(400, f"the body is not JSON: {text}", fix="send a JSON object in UTF-8")


def decode_as_vllm(type_: Any, body: bytes, content_type: str) -> Any:
    """Decode ``body`` as a ``type_``. Raises ``Refusal`` where vLLM would, also for another content type than JSON's. Types
    that nearly fit are converted, such as a number written as text.
    """
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise Refusal(422, "Unsupported Media Type: Only 'application/json' is allowed", field=NOT_JSON)
    if not body:
        raise Refusal(422, "the body is missing")
    try:
        return msgspec.json.decode(body, type=type_)
    except (ValueError, *DECODE_ERRORS) as error:
        if len(body) >= LARGE:  # reading it a second and third time takes too long
            raise _unreadable(error, type_) from None
        try:
            value = json.loads(body)
            json.dumps(value, ensure_ascii=False).encode()  # half a character is no text
        except (ValueError, RecursionError) as malformed:
            place = str(getattr(malformed, "pos", getattr(malformed, "start", 0)))
            raise Refusal(422, f"the body is not JSON: {malformed}"[:300], field=place) from None
        try:
            return msgspec.convert(value, type_, strict=False)
        except msgspec.ValidationError:
            raise Refusal(422, **explained(str(error), type_)) from None


_AT = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")
_UNKNOWN = re.compile(r"unknown field `(.*)`")


def explained(message: str, type_: Any) -> dict[str, str]:
    """Return msgspec's message about a value that isn't a ``type_``, as error, field and fix."""
    position = _AT.search(message)
    where = position[1] if position else ""
    what = message[: position.start()] if position else message
    missing, unknown = _MISSING.search(what), _UNKNOWN.search(what)
    prefix = f"{where}." if where else ""
    if missing:
        field = prefix + missing[1]
        return {"error": f"{field} is missing", "field": field, "fix": f"add {missing[1]}"}
    if unknown:
        field = prefix + unknown[1]
        known = [] if where else [field.encode_name for field in msgspec.structs.fields(type_)]
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
    """Return the values that the field at ``where``, a path of msgspec's, may have; empty if any value is allowed."""
    types = [msgspec.inspect.type_info(type_)]
    for name in re.findall(r"[^.\[\]]+|\[[^\]]*\]", where):
        inside: list[msgspec.inspect.Type] = []
        for kind in types:
            if isinstance(kind, msgspec.inspect.StructType):
                inside += [field.type for field in kind.fields if field.encode_name == name]
            elif isinstance(kind, msgspec.inspect.ListType):
                inside.append(kind.item_type)
            elif isinstance(kind, msgspec.inspect.DictType):
                inside.append(kind.value_type)
        types = [
            part for kind in inside for part in (kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,))
        ]
    listed = [kind for kind in types if isinstance(kind, msgspec.inspect.LiteralType)]
    return [str(value) for literal in listed for value in literal.values] if len(listed) == len(types) else []
