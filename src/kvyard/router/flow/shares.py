"""What each tenant has had lately, by its weight: who has had more than its share is known without looking at all others.

Service is tokens that fade by half in ten minutes, so that a burst isn't taken for a share. All fade alike, so amounts are kept
as of one time and only grow; ``_renew`` moves that time on.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvyard.clock import SECOND

HALF_LIFE = 600 * SECOND
FORGOTTEN = 6 * HALF_LIFE
"""A tenant that has had nothing for so long has no share, so that others share what it leaves."""
MOST_TENANTS = 65_536
_LONGEST = 100 * HALF_LIFE
"""Amounts are taken to another time after this one, before they grow out of bounds."""


class TenantShares:
    """Service of tenants. The mean of those that had some lately is a share."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._epoch = 0
        self._service: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By tenant, tokens for a weight of 1 as of the epoch and the time of the latest, the longest quiet first."""
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._service)

    def charge(self, tenant: str, tokens: float, now: int) -> None:
        """Add service of a tenant."""
        self._renew(now)
        gained = tokens / self._weights.get(tenant, 1.0) * 2.0 ** ((now - self._epoch) / HALF_LIFE)
        before, _ = self._service.pop(tenant, (0.0, 0))
        self._service[tenant] = (before + gained, now)
        self._total += gained
        while True:
            oldest, (amount, latest) = next(iter(self._service.items()))
            if len(self._service) <= MOST_TENANTS and now - latest < FORGOTTEN:
                break
            del self._service[oldest]
            self._total -= amount

    def above(self, tenant: str) -> bool:
        """True if a tenant has had more than its share."""
        amount, _ = self._service.get(tenant, (0.0, 0))
        return amount * len(self._service) > self._total * (1 + 1e-9)

    def _renew(self, now: int) -> None:
        if now - self._epoch > _LONGEST:
            factor = 0.5 ** ((now - self._epoch) / HALF_LIFE)
            self._epoch = now
            for tenant, (amount, latest) in self._service.items():
                self._service[tenant] = (amount * factor, latest)
            self._total = sum(amount for amount, _ in self._service.values())
