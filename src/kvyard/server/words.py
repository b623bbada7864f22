"""Refusals in the words of OpenAI's API, as vLLM writes them."""

from __future__ import annotations

import msgspec

from kvyard.server.http import Refusal


class Error(msgspec.Struct, kw_only=True):
    """What is wrong."""

    message: str
    type: str
    param: str | None = None
    code: int = 400


class Problem(msgspec.Struct, kw_only=True):
    """A refusal, as clients of OpenAI read it."""

    error: Error


TYPES = {
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


def worded(refusal: Refusal) -> tuple[int, Problem]:
    """Status and body. A body that isn't of its type is a 400 here, as in vLLM."""
    problem = refusal.problem
    status = 400 if refusal.status == 422 and not refusal.headers.get("x-mock-fault") else refusal.status
    message = f"{problem.error}; {problem.fix}" if problem.fix else problem.error
    kind = TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return status, Problem(error=Error(message=message, type=kind, param=problem.field or None, code=status))
