"""The time line: state that a fleet's workers share below and between their devices, in one object that the fleet owns.

A shared store, its link and the copies in flight are one state for all workers. A copy can be found by all of them from the
instant it lands and not before; the worker that asked for it does its own side of it when it next ticks. A shared tier is
announced once, through the time line's own sink. A link between two workers is here too, since its landings concern both.

What arrives in a worker's own tier goes on to a shared one at that instant, even in the middle of a pass. So the time line
follows the links of private tiers too; otherwise the order in which workers happen to tick would decide who is first.

Workers must be driven in order of time: a link refuses to go back.
"""

import os
from collections.abc import Iterable, Sequence
from typing import NoReturn

from kvyard.blocks.pool import Pool
from kvyard.blocks.spec import ConfigError
from kvyard.errors import KvyardError
from kvyard.events.types import Sink, Tier
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.contract import Contract
from kvyard.tiers.copies import CopyQueue, LinkedTier, WorkerLink, make_tier, next_landing
from kvyard.tiers.layout import PageLayout
from kvyard.tiers.links import LinkConfig, make_link


class Timeline:
    """Shared tiers, and links between workers. The first worker to join fixes what all others must have in common with it."""

    def __init__(self, sink: Sink | None = None) -> None:
        """``sink`` receives changes of shared tiers."""
        self._sink = sink
        self._contract: Contract | None = None
        self.members: list[str] = []
        """Workers that have joined, in that order."""
        self.tiers: dict[Tier, LinkedTier] = {}
        """Shared tiers."""
        self._configs: dict[Tier, TierConfig] = {}
        self._private: list[LinkedTier] = []
        """The members' own tiers, in the order in which they joined."""
        self._worker_links: dict[tuple[str, str], WorkerLink] = {}
        self._queues: list[CopyQueue] = []
        """All of them, in the order in which they land what is due at one instant."""
        self._process = os.getpid()

    def join(
        self, name: str, layout: PageLayout, config: OffloadConfig, private: Sequence[LinkedTier]
    ) -> dict[Tier, LinkedTier]:
        """Add a worker, which also has ``private`` tiers. Returns the shared tiers.

        Raises ``ConfigError``, changing nothing, where it differs from those that joined before.
        """
        if os.getpid() != self._process:
            self._refuse_process()
        if not name or name in self.members:
            raise ConfigError(f"a worker that shares a tier needs a name of its own, and {name!r} is taken or empty")
        shared = {tier: wanted for tier, wanted in config.levels if wanted.scope == "shared"}
        if self._contract is None:
            for tier, wanted in shared.items():
                self.tiers[tier] = make_tier(wanted, tier, layout, self._sink, config.events)
            self._contract, self._configs = layout.contract, shared
        else:
            self._compare(name, layout.contract, shared)
        self.members.append(name)
        self._private += private
        self._order()
        return self.tiers

    def connect(self, ends: tuple[str, str], pools: tuple[Pool, Pool], config: LinkConfig) -> WorkerLink:
        """Return a link between the devices of two workers with these block pools. Raises ``ConfigError`` for a second one."""
        if ends[0] == ends[1] or ends in self._worker_links or ends[::-1] in self._worker_links:
            raise ConfigError(f"{ends[0]} and {ends[1]} are one worker, or have a link already")
        link = self._worker_links[ends] = WorkerLink(ends, pools, make_link(config))
        self._order()
        return link

    def _order(self) -> None:
        self._queues = [*self._private, *self.tiers.values(), *self._worker_links.values()]

    def _compare(self, name: str, contract: Contract, shared: dict[Tier, TierConfig]) -> None:
        """Raise ``ConfigError`` unless the newcomer has what the first worker has."""
        first = self.members[0]
        for field in Contract.__struct_fields__:
            new, old = getattr(contract, field), getattr(self._contract, field)
            if new != old:
                raise ConfigError(f"{name} can't share a tier with {first}: {field} is {new!r} here and {old!r} there")
        if shared.keys() != self._configs.keys():
            raise ConfigError(
                f"{name} shares {_names(shared)}, but {first} shares {_names(self._configs)}: give both the same tiers"
            )
        for tier, config in shared.items():
            if config != self._configs[tier]:
                raise ConfigError(
                    f"{name} and {first} configure their shared {tier.name} differently: give both the same"
                )

    @property
    def disturbances(self) -> int:
        """Changes when a shared tier has evicted something, so that cached prefixes may be shorter."""
        return sum(tier.store.reservations for tier in self.tiers.values())

    def earliest(self) -> int | None:
        """Return when the next copy lands on any link of the members, as things stand."""
        return next_landing(self._queues)

    def advance(self, now: int) -> bool:
        """Land what is due at or before ``now``, each in its turn; returns whether anything was.

        The workers that asked for it have it in their inboxes then, and are due at once. Those that waited for another's copy
        may ask again.
        """
        landed = False
        while True:
            earliest = self.earliest()
            if earliest is None or earliest > now:
                return landed
            landed = True
            for queue in self._queues:
                queue.advance(earliest)

    def fail(self, worker: str, now: int) -> None:
        """Cancel copies in flight on the links of ``worker``, which has failed, to other workers; both ends are released."""
        for ends, link in self._worker_links.items():
            if worker in ends:
                link.cancel_all(now)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every shared tier and every link between workers is sound."""
        for tier in self.tiers.values():
            tier.check_integrity()
        for link in self._worker_links.values():
            link.check_integrity()

    def __reduce__(self) -> NoReturn:
        self._refuse_process()

    def _refuse_process(self) -> NoReturn:
        raise KvyardError("a shared tier lives in one process: run the workers that share it in the same one")


def _names(tiers: Iterable[Tier]) -> str:
    return " and ".join(tier.name for tier in tiers)
