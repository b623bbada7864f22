"""Steps towards a simpler case, common to all engines: fewer requests, and smaller ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Request = dict[str, Any]


def fewer_requests(requests: list[Request]) -> Iterator[list[Request]]:
    """Yield ``requests`` without some that stand together, half of them first; never an empty list."""
    size = len(requests) // 2
    while size:
        for first in range(0, len(requests), size):
            rest = requests[:first] + requests[first + size :]
            if rest:
                yield rest
        size //= 2


def without_each(request: Request, names: Iterable[str]) -> Iterator[Request]:
    """Yield ``request`` without one of ``names``, for each that it has."""
    for name in names:
        if name in request:
            yield {key: value for key, value in request.items() if key != name}


def earlier(request: Request) -> Iterator[Request]:
    """Yield ``request`` with earlier arrivals."""
    for arrival in (0, request["at"] // 2):
        if arrival < request["at"]:
            yield {**request, "at": arrival}


def shorter_prompts(request: Request) -> Iterator[Request]:
    """Yield ``request`` with its prompt's parts made one, then with shorter parts."""
    parts = request["prompt"]
    if len(parts) > 1:
        yield {**request, "prompt": [[parts[0][0], sum(count for _, count in parts)]]}
    for number, (first, count) in enumerate(parts):
        for less in (count // 2, count - 16, count - 1):
            if 0 < less < count:
                yield {**request, "prompt": [*parts[:number], [first, less], *parts[number + 1 :]]}
