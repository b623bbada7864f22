"""The protocol's messages: what is read of those that Envoy sends, and the answers to them. Decides nothing.

Names and places are those of the Gateway API Inference Extension's endpoint picker protocol, version 1.0.0.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvyard.server.epp.config import BodyMode
from kvyard.server.epp.ext_proc import (
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpStatus,
    ImmediateResponse,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    Struct,
    TrailersResponse,
)

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
OBJECTIVE = "x-gateway-inference-objective"
BALANCER = "envoy.lb"
"""Metadata key of destinations."""
HINT = "envoy.lb.subset_hint"
"""Metadata key of a subset."""
WANTED = "test-epp-endpoint-selection"
"""The header by which the extension's tests name the destination of a request."""
WENT = "x-conformance-test-served-endpoint"
"""The header in which they look for where it went."""

STREAMED: int = ProcessingMode.FULL_DUPLEX_STREAMED
PIECES: int = ProcessingMode.STREAMED
"""Each piece is answered before the next; headers have gone on by then."""
BUFFERED: int = ProcessingMode.BUFFERED
PARTIAL: int = ProcessingMode.BUFFERED_PARTIAL
NONE: int = ProcessingMode.NONE
MODES: Mapping[BodyMode, int] = {"streamed": STREAMED, "buffered": BUFFERED, "none": NONE}

OVERWRITE: int = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
"""A client may send this header too, and ours must win."""


HEADER_BYTES = 256 << 10
"""Limit of a message beside the body in it. Envoy's own for headers is 60 KiB unless it is set, and 8 MiB at most."""
HEADERS = 1024
"""Limit of the number of headers."""
TOO_LARGE = f"headers, or what comes with a body, are longer than {HEADER_BYTES} bytes, or more than {HEADERS}"
_BODIES = (4, 5)
"""Numbers of the fields that have a body in them."""
_MOST_FIELDS = 16
"""Fields that a message is looked through for a body; Envoy writes five."""


def read_message(data: bytes) -> Any:
    """Return a message of the data plane; ``None`` for one that has too much beside a body, which isn't parsed: millions of
    small headers would take seconds.
    """
    if len(data) > HEADER_BYTES and len(data) - _body_bytes(data) > HEADER_BYTES:
        return None
    message = ProcessingRequest.FromString(data)
    kind = message.WhichOneof("request")
    if kind in ("request_headers", "response_headers") and len(getattr(message, kind).headers.headers) > HEADERS:
        return None
    return message


def _body_bytes(data: bytes) -> int:
    """Return bytes of the first field that has a body in it; 0 if none is found among the first fields."""
    offset = 0
    for _ in range(_MOST_FIELDS):
        tag, offset = _number(data, offset)
        length, offset = _number(data, offset)
        if tag & 7 == 2:
            if tag >> 3 in _BODIES:
                return min(length, len(data) - offset)
            offset += length
        elif tag & 7:
            break
    return 0


def _number(data: bytes, start: int) -> tuple[int, int]:
    """Return the number of variable length at a place, and the place behind it."""
    value = 0
    for shift, byte in enumerate(data[start : start + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, start + shift + 1
    return 0, len(data)


def read_headers(message: Any) -> dict[str, str]:
    """Return headers by their names in small letters; of one that comes twice, the last."""
    return {
        header.key: header.raw_value.decode("utf-8", "replace") or header.value for header in message.headers.headers
    }


def modes(message: Any, usual: int) -> tuple[int, int]:
    """Return the body modes of the request and of the answer; ``usual`` if the first message doesn't state them."""
    if not message.HasField("protocol_config"):
        return usual, usual
    return message.protocol_config.request_body_mode, message.protocol_config.response_body_mode


def _metadata(message: Any, namespace: str, key: str) -> Any:
    """Return a value of the filters' metadata; ``None`` if there is none."""
    if not message.HasField("metadata_context"):
        return None
    metadata = message.metadata_context.filter_metadata
    if namespace not in metadata:
        return None
    fields = metadata[namespace].fields
    return fields.get(key)


def subset(message: Any) -> list[str] | None:
    """Return the endpoints that may be chosen; ``None`` where any may. Some data planes write a list, some one text."""
    value = _metadata(message, HINT, SUBSET)
    if value is None:
        return None
    parts = (
        [item.string_value for item in value.list_value.values]
        if value.HasField("list_value")
        else [value.string_value]
    )
    return endpoints_in(",".join(parts))


def endpoints_in(text: str) -> list[str]:
    """Return endpoints with commas between."""
    return [endpoint for part in text.split(",") if (endpoint := part.strip())]


def served(message: Any) -> str | None:
    """Return the endpoint that answered, where the data plane says."""
    value = _metadata(message, BALANCER, SERVED)
    return None if value is None else value.string_value or None


# -- answers ------------------------------------------------------------------------------------------------------------


def _set(headers: Iterable[tuple[str, str]], remove: Iterable[str] = ()) -> Any:
    options = [
        HeaderValueOption(
            header=HeaderValue(key=key, raw_value=value.encode("utf-8", "replace")), append_action=OVERWRITE
        )
        for key, value in headers
    ]
    return HeaderMutation(set_headers=options, remove_headers=remove)


def destination(endpoints: str, more: Iterable[tuple[str, str]] = (), remove: Iterable[str] = (), *, body: bool) -> Any:
    """Return the destination of a request, in the answer to its body, or to its headers."""
    mutation = _set([(DESTINATION, endpoints), *more], remove)
    response = CommonResponse(header_mutation=mutation, clear_route_cache=True)
    metadata = Struct()
    metadata.fields[BALANCER].struct_value.fields[DESTINATION].string_value = endpoints
    if body:
        return ProcessingResponse(request_body=BodyResponse(response=response), dynamic_metadata=metadata)
    return ProcessingResponse(request_headers=HeadersResponse(response=response), dynamic_metadata=metadata)


def request_headers_pass() -> Any:
    """Let a request's headers go on; its destination follows with its body."""
    return ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))


def response_headers(more: Iterable[tuple[str, str]]) -> Any:
    """Let an answer's headers pass, with ``more``."""
    return ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse(header_mutation=_set(more))))


def body_pass(*, request: bool) -> Any:
    """Let a body, or a piece of it, pass unchanged."""
    response = BodyResponse(response=CommonResponse())
    return ProcessingResponse(request_body=response) if request else ProcessingResponse(response_body=response)


def piece(body: bytes, end: bool, *, request: bool) -> Any:
    """Return a piece of a body, handed back: in full-duplex streaming only what is handed back goes on."""
    message = ProcessingResponse()  # filled from inside: messages made of others copy them
    handed = (message.request_body if request else message.response_body).response.body_mutation.streamed_response
    handed.SetInParent()
    handed.body, handed.end_of_stream = body, end
    return message


def trailers_pass(*, request: bool) -> Any:
    """Let trailers pass unchanged."""
    return (
        ProcessingResponse(request_trailers=TrailersResponse())
        if request
        else ProcessingResponse(response_trailers=TrailersResponse())
    )


def immediate(status: int, headers: Iterable[tuple[str, str]], body: bytes, details: str) -> Any:
    """Return the client gets this, and no engine the request."""
    immediate_response = ImmediateResponse(
        status=HttpStatus(code=status), headers=_set(headers), body=body, details=details
    )
    return ProcessingResponse(immediate_response=immediate_response)
