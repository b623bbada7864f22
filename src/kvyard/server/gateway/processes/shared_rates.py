"""Rates of keys and models that hold for all processes together: the hub keeps them, and is asked for each request.

So there is no more let in than by one process. A question takes one round trip over a socket of this machine.
"""

import msgspec

from kvyard.server.gateway.access import AccessKey, KeyRing
from kvyard.server.gateway.access.rates import Allowance
from kvyard.server.gateway.processes.channel import Channel, encode
from kvyard.server.gateway.processes.frames import HUB, FrameKind
from kvyard.server.http import Refusal

_decode = msgspec.msgpack.Decoder(tuple[str, str, dict[str, str]]).decode


class SharedTicket:
    """A request that was let in, with what it takes of rates that the hub keeps."""

    def __init__(self, channel: Channel, rates: list[tuple[str, int | None, int | None]], tokens: int) -> None:
        self.taken = tokens
        self._channel = channel
        self._rates = rates
        self.quota: dict[str, str] = {}
        """Remaining quota at admission, for the rate-limit headers."""

    def settle(self, tokens: int) -> None:
        """Settle the request's quota with the tokens it used."""
        if tokens != self.taken:
            self._channel.send(FrameKind.SETTLE, HUB, encode((self._rates, tokens - self.taken)))
            self.taken = tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the remaining quota at admission, as rate-limit headers."""
        return [(name.encode(), value.encode()) for name, value in self.quota.items()]


class SharedRates:
    """Lets requests in."""

    def __init__(self, channel: Channel, keys: KeyRing) -> None:
        self._channel = channel
        self._keys = keys

    async def admit(self, key: AccessKey, model: str, tokens: int) -> SharedTicket:
        """See ``KeyRing.admit``. Raises ``Refusal``."""
        rates = [_named(allowance) for allowance in self._keys.allowances(key, model) if allowance.bounded]
        ticket = SharedTicket(self._channel, rates, tokens)
        if not rates:
            return ticket
        try:
            error, fix, ticket.quota = _decode(await self._channel.ask_hub("admit", encode((rates, tokens))))
        except ConnectionError:
            raise Refusal(503, "rates can't be looked up now", fix="try again", Retry_After="1") from None
        if error:
            self._keys.count_refused(key)
            raise Refusal(
                429, error, fix=fix, **{name.replace("-", "_"): value for name, value in ticket.quota.items()}
            )
        return ticket


def _named(allowance: Allowance) -> tuple[str, int | None, int | None]:
    return allowance.whose, allowance.rate.requests_per_minute, allowance.rate.tokens_per_minute
