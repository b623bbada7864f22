"""Rates: requests and tokens per minute, and what is left of them.

A rate is a bucket that fills evenly and holds a minute's worth. A request takes its prompt's tokens when it comes, if they
are known, and the rest when it ends: the length of an answer isn't known before. So a bucket of tokens may run into debt,
by the requests in flight, and then nothing more is admitted until that is paid.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from kvyard.clock import SECOND
from kvyard.server.http import Refusal

Figure = Annotated[int, Meta(ge=1, le=1 << 40)]
Now = Callable[[], int]
"""Nanoseconds."""


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one minute; ``None``: unlimited."""

    requests_per_minute: Figure | None = None
    tokens_per_minute: Figure | None = None


class TokenBucket:
    """One figure of a rate."""

    def __init__(self, limit: int, now: Now) -> None:
        self.limit = limit
        self._now = now
        self._level = float(limit)
        self._at = now()

    @property
    def level(self) -> float:
        """Return the remaining amount; below 0 if there is a debt."""
        now = self._now()
        self._level = min(self.limit, self._level + (now - self._at) / (60 * SECOND) * self.limit)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Take ``amount``, available or not; less than 0 gives back."""
        self._level = min(self.limit, self.level - amount)

    def wait(self, amount: float) -> float:
        """Return the seconds until ``amount`` is available, or the bucket full."""
        return max(0.0, (min(amount, self.limit) - self.level) * 60 / self.limit)


class Allowance:
    """The buckets of one rate, and whose they are."""

    def __init__(self, whose: str, rate: Rate, now: Now) -> None:
        self.whose = whose
        self.rate = rate
        self.requests = None if rate.requests_per_minute is None else TokenBucket(rate.requests_per_minute, now)
        self.tokens = None if rate.tokens_per_minute is None else TokenBucket(rate.tokens_per_minute, now)

    @property
    def bounded(self) -> bool:
        """Return true if it has any limit."""
        return self.requests is not None or self.tokens is not None

    @property
    def full(self) -> bool:
        """Return true if nothing is used: as good as new."""
        return all(bucket is None or bucket.level >= bucket.limit for bucket in (self.requests, self.tokens))


class RateAdmission(Protocol):
    """A request that was let in, with what it draws on."""

    taken: int
    """Tokens that it took so far."""

    def settle(self, tokens: int) -> None:
        """Settle the request's quota with the tokens it used."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the remaining quota as rate-limit headers."""
        ...


class RateTicket:
    """A request that was let in, with all the allowances that it draws on."""

    def __init__(self, allowances: Sequence[Allowance], tokens: int) -> None:
        """Take one request and ``tokens`` tokens. Raises ``Refusal`` with 429, and takes nothing, if one has too few."""
        self._allowances = allowances
        self.taken = tokens
        """Tokens that it took so far."""
        for allowance in allowances:
            for kind, bucket, amount in (
                ("requests", allowance.requests, 1),
                ("tokens", allowance.tokens, max(1, tokens)),
            ):
                if bucket is not None and (wait := bucket.wait(amount)) > 0:
                    raise Refusal(
                        429,
                        f"{allowance.whose} may have {bucket.limit} {kind} a minute",
                        fix=f"try again in {wait:.1f} s",
                        Retry_After=str(max(1, round(wait + 0.5))),
                        **{name.replace("-", "_"): value for name, value in rate_headers(allowances).items()},
                    )
        for allowance in allowances:
            if allowance.requests is not None:
                allowance.requests.take(1)
            if allowance.tokens is not None:
                allowance.tokens.take(tokens)

    def settle(self, tokens: int) -> None:
        """Settle the request's quota with the tokens it used."""
        for allowance in self._allowances:
            if allowance.tokens is not None:
                allowance.tokens.take(tokens - self.taken)
        self.taken = tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the remaining quota as rate-limit headers."""
        return [(name.encode(), value.encode()) for name, value in rate_headers(self._allowances).items()]


def rate_headers(allowances: Iterable[Allowance]) -> dict[str, str]:
    """Return rate-limit headers as OpenAI names them; of several allowances, those of the one with the least left."""
    headers: dict[str, str] = {}
    listed = list(allowances)
    for kind in ("requests", "tokens"):
        buckets = [allowance.requests if kind == "requests" else allowance.tokens for allowance in listed]
        least = min((bucket for bucket in buckets if bucket is not None), key=lambda bucket: bucket.level, default=None)
        if least is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(least.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(least.level)))
            headers[f"x-ratelimit-reset-{kind}"] = f"{least.wait(least.limit):.3f}s"
    return headers
