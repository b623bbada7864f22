"""Starting passes of engines that share tiers, at one instant and in their order.

What one engine does there may concern the plans of others: a copy lands, or something is evicted to make room. An engine that
steps would see it at the start of its next pass; one with a plan must have the plan cut there, which may be at this instant.
"""

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush

from kvyard.engine.core import EngineCore
from kvyard.engine.ranks import Ranks
from kvyard.tiers.timeline import Timeline

Engine = EngineCore | Ranks


def begin_together(engines: Mapping[int, Engine], due: Collection[int], now: int, timeline: Timeline) -> None:
    """Let those of ``engines`` that are ``due`` begin at ``now``, by number, and trim the plans of all others.

    All of them have been advanced to ``now`` if they were due, and what was to land has. Afterwards every engine's
    ``next_decision`` may be another.
    """
    ready = [number for number in due if number in engines]
    known = set(ready)
    ready += _ending(engines, known, now)
    heapify(ready)
    while ready:
        number = heappop(ready)
        before = timeline.disturbances
        engines[number].begin(now)
        if timeline.disturbances != before:
            for later in _ending(engines, known, now, after=number):
                heappush(ready, later)
    for engine in engines.values():
        engine.trim(engine.uncertain_from(now), now, begun=True)


def _ending(engines: Mapping[int, Engine], known: set[int], now: int, after: int = -1) -> list[int]:
    """Return the engines behind number ``after`` that have to form a pass at ``now``, in the middle of their plans; they become
    ``known``.
    """
    numbers: list[int] = []
    planned = [number for number, engine in engines.items() if number > after and number not in known and engine.busy]
    for number in planned:
        engine = engines[number]
        engine.trim(engine.uncertain_from(now), now)
        if engine.busy and engine.next_decision() == now:
            engine.advance(now)
        if not engine.busy:
            known.add(number)
            numbers.append(number)
    return numbers
