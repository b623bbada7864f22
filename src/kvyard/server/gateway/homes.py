"""Engines of responses: an engine that made one keeps it, and no other engine knows it.

OpenAI's responses go on from an earlier one by its id, and can be asked for later. So the engine that answered is kept for
each id that passes, the latest ones of them, with the key that the response belongs to: ids are no secrets.
"""

import re

import msgspec

MOST = 1 << 16
"""Ids that are remembered."""
HEAD = 1 << 13
"""Bytes of an answer in which its id is looked for."""
_ID = re.compile(rb'"id" ?: ?"(resp_[A-Za-z0-9_-]{1,200})"')


class ResponseHome(msgspec.Struct, frozen=True, gc=False):
    """Engine and key of one response."""

    model: str
    """Of the pool."""
    engine: str
    key: str = ""
    """The name of the key that made it; empty if there are no keys."""
    session: str | None = None
    """The session that it belongs to."""


class ResponseHomes:
    """The home of each response, by id."""

    def __init__(self) -> None:
        self._known: dict[str, ResponseHome] = {}
        """The oldest first."""

    def saw(self, answer: bytes, home: ResponseHome) -> str:
        """Note the beginning of an answer to /v1/responses from ``home``. Returns its id, empty if it has none."""
        matched = _ID.search(answer, 0, HEAD)
        if matched is None:
            return ""
        id_ = matched[1].decode()
        self.remember(id_, home)
        return id_

    def remember(self, id_: str, home: ResponseHome) -> None:
        """Remember the home of a response."""
        self._known.pop(id_, None)
        self._known[id_] = home
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]

    def find(self, id_: str) -> ResponseHome | None:
        """Return the home of a response; ``None`` if unknown."""
        return self._known.get(id_)

    async def look_up(self, id_: str) -> ResponseHome | None:
        """Like ``find``, asking all processes."""
        return self.find(id_)
