"""What a league recommends, in plain words, and what that costs: another policy needs no card, but may slow something else."""

from statistics import fmean

from kvyard.lab.league.league import League, LeaguePlace
from kvyard.replay.report.words import measured


def advice(league: League) -> list[str]:
    """Which policy to route by, over all cells whose queues don't decide; nothing where none has run."""
    cells = {cell: table for cell, table in league.cells.items() if cell not in league.overloaded} or league.cells
    if not cells:
        return []
    behind: dict[str, dict[str, float]] = {}
    for cell, table in cells.items():
        least = _figure(table[0], "ttft_mean_ms")
        for place in table:
            if least:
                behind.setdefault(place.policy, {})[cell] = _figure(place, "ttft_mean_ms") / least - 1
    whole = {policy: found for policy, found in behind.items() if len(found) == len(cells)}
    if not whole:
        return []
    policy = min(whole, key=lambda name: (fmean(whole[name].values()), name))
    said = [_why(policy, whole[policy], cells)]
    cell, table = next(iter(cells.items()))
    own = next(place for place in table if place.policy == policy)
    calm = min(table, key=lambda place: (_figure(place, "itl_p99_ms"), place.policy))
    where = f" at {cell}" if len(cells) > 1 else ""
    if calm.policy == policy:
        said.append(
            f"It costs nothing{where}: its ITL p99, {measured(_figure(own, 'itl_p99_ms'))} ms, is the lowest too."
        )
    else:
        said.append(
            f"What it costs{where}: an ITL p99 of {measured(_figure(own, 'itl_p99_ms'))} ms, where {calm.policy} has "
            f"{measured(_figure(calm, 'itl_p99_ms'))} ms and a first token after {measured(_figure(calm, 'ttft_mean_ms'))} ms."
        )
    if len(cells) < len(league.cells):
        said.append("Overloaded loads are left out of this: their queues decide, and not the router.")
    return said


def _why(policy: str, behind: dict[str, float], cells: dict[str, list[LeaguePlace]]) -> str:
    table = next(iter(cells.values()))
    mine = next(place for place in table if place.policy == policy)
    if len(cells) == 1:
        if len(table) == 1:
            own = measured(_figure(mine, "ttft_mean_ms"))
            return f"Only {policy} has played: its first token comes after {own} ms on average."
        second = table[1] if table[0].policy == policy else table[0]
        own, next_ = (measured(_figure(place, "ttft_mean_ms")) for place in (mine, second))
        if own == next_:
            return f"{policy} and {second.policy} give first tokens equally soon, after {own} ms: choose by the rest."
        soonest = f"its first token comes soonest, after {own} ms on average"
        return f"Route by {policy}: {soonest}; the next is {second.policy} with {next_} ms."
    worst = max(behind, key=lambda name: behind[name])
    if behind[worst] <= 0:
        return f"Route by {policy}: its first token comes soonest at all {len(cells)} loads."
    return (
        f"Route by {policy}: over {len(cells)} loads its first token is {fmean(behind.values()):.1%} behind the soonest on "
        f"average, and {behind[worst]:.1%} at worst ({worst})."
    )


def _figure(place: LeaguePlace, name: str) -> float:
    return place.figures[name] or 0.0
