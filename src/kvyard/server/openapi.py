"""The OpenAPI document of a server, made from the types that check its requests and write its answers.

Nothing is described by hand that a type knows. So the document is as true as the code, and a test sends it against the
running server.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from kvyard import __version__
from kvyard.server.http import JSON, Operation

_EVERY_BODY = (400, 408, 413, 422)
"""Statuses with which any route with a body may refuse it."""


def document(operations: Sequence[Operation], *, title: str, secured: bool, problem: Any) -> dict[str, Any]:
    """Return OpenAPI 3.1 of ``operations``. ``secured``: those that aren't open want a bearer token.

    ``problem`` is the type of refusals.
    """
    types = [problem]
    for operation in operations:
        types += [kind for kind in (operation.body, operation.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    refused = schema_of[id(problem)]
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        refusals = [*operation.refusals, 500]
        if operation.body is not None:
            refusals += _EVERY_BODY
        guarded = (secured or operation.token is not None) and not operation.open
        if guarded:
            refusals.append(401)
        if operation.guarded:
            refusals.append(403)
        reply = schema_of[id(operation.reply)] if operation.reply is not None else None
        content = {
            kind: {"schema": reply} if reply is not None and kind == JSON else {} for kind in operation.media_types
        }
        responses: dict[str, Any] = {
            str(operation.status): {"description": HTTPStatus(operation.status).phrase, "content": content}
        }
        for status in sorted(set(refusals)):
            # What is passed on may not be there at all, and then the other server says so in its own way.
            elsewhere = operation.raw and status in (404, 405)
            refusal = {} if elsewhere else {"schema": refused}
            responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": {JSON: refusal}}
        described: dict[str, Any] = {
            "summary": operation.summary,
            "operationId": f"{operation.method.lower()}_{operation.path.strip('/').replace('.', '_')}",
            "responses": responses,
        }
        if operation.body is not None:
            described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[id(operation.body)]}}}
        if guarded:
            described["security"] = [{"token": []}]
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    parts: dict[str, Any] = {"schemas": components}
    if secured or any(operation.token is not None for operation in operations):
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {"openapi": "3.1.0", "info": {"title": title, "version": __version__}, "paths": paths, "components": parts}
