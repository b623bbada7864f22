"""Where responses live, for all processes: the hub knows all of it, and is asked for what isn't known here."""

import msgspec

from kvyard.server.gateway.homes import ResponseHome, ResponseHomes
from kvyard.server.gateway.processes.channel import Channel, encode
from kvyard.server.gateway.processes.frames import HUB, FrameKind

_decode = msgspec.msgpack.Decoder(ResponseHome).decode


class SharedHomes(ResponseHomes):
    """Those of one process. The hub is told of a response before its client is."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def remember(self, id_: str, home: ResponseHome) -> None:
        super().remember(id_, home)
        self._channel.send(FrameKind.SEEN, HUB, encode((id_, home)))

    async def look_up(self, id_: str) -> ResponseHome | None:
        found = self.find(id_)
        if found is None and len(id_) < 256:
            try:
                told = await self._channel.ask_hub("home", id_.encode("utf-8", "replace"))
            except ConnectionError:
                return None
            found = _decode(told) if told else None
        return found
