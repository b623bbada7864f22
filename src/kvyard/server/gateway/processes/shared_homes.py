"""Engines of responses, for all processes: the hub knows all of them, and is asked for those unknown here."""

import msgspec

from kvyard.server.gateway.homes import ResponseHome, ResponseHomes
from kvyard.server.gateway.processes.channel import Channel, encode
from kvyard.server.gateway.processes.frames import HUB, FrameKind
from kvyard.server.http import Refusal

_decode = msgspec.msgpack.Decoder(ResponseHome).decode


class SharedHomes(ResponseHomes):
    """Engines of responses of one process. The hub receives a response before its client does."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def remember(self, id_: str, home: ResponseHome) -> None:
        super().remember(id_, home)
        self._channel.send(FrameKind.SEEN, HUB, encode((id_, home)))

    async def look_up(self, id_: str) -> ResponseHome | None:
        """See ``ResponseHomes.look_up``. Raises ``Refusal`` if the hub doesn't answer."""
        home = self.find(id_)
        if home is None and len(id_) < 256:
            try:
                answer = await self._channel.ask_hub("home", id_.encode("utf-8", "replace"))
            except ConnectionError:
                raise Refusal(503, "responses can't be looked up now", fix="try again", Retry_After="1") from None
            home = _decode(answer) if answer else None
        return home
