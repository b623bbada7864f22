"""The time line: what a fleet shares below its devices, in one object that the fleet owns and lends to its workers.

A shared store, its link and the copies under way are one state, whoever looks at it. A copy is there for everybody from the
instant it lands, and for nobody before; the worker that asked for it does its own side of it when it next ticks. A shared
tier is announced once, through the time line's own sink.

What arrives in a worker's own host goes on to shared storage at that instant, even in the middle of a pass. So the time line
follows the links of private hosts too; else the order in which workers happen to tick would decide who is first.

Workers must be driven in order of time: a link refuses to go back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NoReturn

from kvyard.blocks.spec import ConfigError
from kvyard.errors import KvyardError
from kvyard.events.types import Sink, Tier
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.depot import Depot, make_depot
from kvyard.tiers.layout import Contract, Layout


class Timeline:
    """Shared tiers. The first worker to join fixes what all others must have in common with it."""

    def __init__(self, sink: Sink | None = None) -> None:
        """``sink`` is told what shared tiers hold."""
        self._sink = sink
        self._contract: Contract | None = None
        self._members: list[str] = []
        self._tiers: dict[Tier, tuple[TierConfig, Depot]] = {}
        self._depots: list[Depot] = []
        """Private ones first, by member, then the shared."""
        self._process = os.getpid()

    @property
    def members(self) -> tuple[str, ...]:
        """Who has joined, in that order."""
        return tuple(self._members)

    def join(self, name: str, layout: Layout, config: OffloadConfig, private: Sequence[Depot]) -> dict[Tier, Depot]:
        """Let a worker in, which has ``private`` tiers besides; returns the tiers that are shared.

        Raises ``ConfigError``, letting nobody in, where it differs from those that joined before.
        """
        if os.getpid() != self._process:
            self._refuse_process()
        if not name or name in self._members:
            raise ConfigError(f"a worker that shares a tier needs a name of its own, and {name!r} is taken or empty")
        wanted = {Tier.G2: config.host, Tier.G3: config.storage}
        shared = {tier: it for tier, it in wanted.items() if it is not None and it.scope == "shared"}
        if self._contract is None:
            self._tiers = {tier: (it, self._make(tier, it, layout, config.events)) for tier, it in shared.items()}
            self._contract = layout.contract
        else:
            self._compare(name, layout.contract, shared)
        self._members.append(name)
        shared_depots = [depot for _, depot in self._tiers.values()]
        self._depots = [*(depot for depot in self._depots if not depot.shared), *private, *shared_depots]
        return {tier: depot for tier, (_, depot) in self._tiers.items()}

    def _make(self, tier: Tier, config: TierConfig, layout: Layout, events: str) -> Depot:
        depot = make_depot(config, tier, layout, self._sink, events)
        depot.origins = {}
        return depot

    def _compare(self, name: str, contract: Contract, shared: dict[Tier, TierConfig]) -> None:
        """Raise ``ConfigError`` unless the newcomer has what the first worker has."""
        first = self._members[0]
        for field in Contract.__struct_fields__:
            new, old = getattr(contract, field), getattr(self._contract, field)
            if new != old:
                raise ConfigError(f"{name} can't share a tier with {first}: {field} is {new!r} here and {old!r} there")
        if shared.keys() != self._tiers.keys():
            raise ConfigError(
                f"{name} shares {_names(shared)}, but {first} shares {_names(self._tiers)}: give both the same tiers"
            )
        for tier, config in shared.items():
            if config != self._tiers[tier][0]:
                raise ConfigError(
                    f"{name} and {first} configure their shared {tier.name} differently: give both the same"
                )

    def depot(self, tier: Tier) -> Depot | None:
        """The shared tier, if there is one."""
        found = self._tiers.get(tier)
        return found[1] if found is not None else None

    @property
    def disturbances(self) -> int:
        """Changes when a shared tier has made room for something, for whomever."""
        return sum(depot.store.reservations for _, depot in self._tiers.values())

    def earliest(self) -> int | None:
        """When the next copy lands on any link of the members, private ones too, as things stand: what lands in a private
        host goes on to a shared tier.
        """
        times = [depot.link.earliest() for depot in self._depots if depot.under_way]
        return min((at for at in times if at is not None), default=None)

    def advance(self, now: int) -> bool:
        """Land what is due at or before ``now``, each in its turn; returns whether anything was.

        Its askers have it in their inboxes then, and are due at once. Whoever only waited may ask again.
        """
        landed = False
        while True:
            at = self.earliest()
            if at is None or at > now:
                return landed
            landed = True
            for depot in self._depots:
                depot.advance(at)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every shared tier is sound."""
        for _, depot in self._tiers.values():
            depot.check_integrity()

    def __reduce__(self) -> NoReturn:
        self._refuse_process()

    def _refuse_process(self) -> NoReturn:
        raise KvyardError("a shared tier lives in one process: run the workers that share it in the same one")


def _names(tiers: Iterable[Tier]) -> str:
    return " and ".join(tier.name for tier in tiers)
