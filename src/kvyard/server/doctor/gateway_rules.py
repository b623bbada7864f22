"""Faults of a gateway, from its view of the fleet: its engines, their streams, its policy, and promised prefixes that
engines lack.
"""

from collections.abc import Iterator

from kvyard.events.check import Finding
from kvyard.server.dashboard.view import FleetView, PromisesView
from kvyard.server.doctor.finding import broken, note
from kvyard.server.doctor.gateway_visit import GatewayVisit

KEPT = 0.9
"""The share of promised tokens below which something is wrong, and not merely late."""
ENOUGH = 1000
"""Prompt tokens from which shares mean anything."""
OFTEN = 20
"""Broken promises from which it matters how many are broken, however little is missing of each."""
ALWAYS_WRONG = ("block-size", "tokens", "phantom")
"""Reasons that no load or timing explains."""
FEW = 8
"""Names that a finding lists."""


def about_gateway(seen: GatewayVisit) -> Iterator[Finding]:
    """Yield all findings about a gateway. Changes nothing."""
    if seen.view is None:
        name = "gateway-token" if seen.unauthorised else "gateway-unreachable"
        yield broken(name, seen.url, problem=seen.problem[:200])
        return
    for rule in (engines, roles, crossed, streams, block_sizes, policy, promises):
        yield from rule(seen.url, seen.view)


def engines(url: str, view: FleetView) -> Iterator[Finding]:
    if not any(worker.state in ("ready", "busy", "suspect") for worker in view.workers):
        reasons = "; ".join(f"{worker.name} is {worker.state}: {worker.reason}" for worker in view.workers[:FEW])
        yield broken("gateway-no-engine", url, reasons=reasons or "it has none")
        return
    for worker in view.workers:
        if worker.state in ("down", "suspect", "starting"):
            yield broken(
                "gateway-engine", url, engine=worker.name, state=worker.state, reason=worker.reason or "no reason"
            )


def roles(url: str, view: FleetView) -> Iterator[Finding]:
    for model in sorted({worker.model for worker in view.workers}):
        there = [worker for worker in view.workers if worker.model == model]
        for role, missing in (("prefill", "gateway-no-decode"), ("decode", "gateway-no-prefill")):
            if all(worker.role == role for worker in there):
                yield broken(
                    missing,
                    url,
                    model=model or "no model yet",
                    engines=_names([engine.name for engine in there]),
                )


def crossed(url: str, view: FleetView) -> Iterator[Finding]:
    names = [worker.name for worker in view.workers if worker.announced_by]
    if names:
        yield broken("gateway-crossed", url, engines=_names(names))


def streams(url: str, view: FleetView) -> Iterator[Finding]:
    for stream in view.streams:
        if stream.state in ("stale", "failed"):
            endpoint = f" ({stream.endpoint})" if stream.endpoint else ""
            yield broken(
                "gateway-stream",
                url,
                stream=stream.worker or stream.name,
                at=endpoint,
                state=stream.state,
                reason=stream.reason,
            )
        elif stream.gaps or stream.restarts > 1:
            yield note("gateway-gaps", url, stream=stream.worker or stream.name, gaps=stream.gaps, missed=stream.missed)
    if view.reads == "index" and not view.remote_index:
        heard = {stream.worker for stream in view.streams}
        deaf = [worker.name for worker in view.workers if worker.name not in heard]
        if deaf and len(deaf) < len(view.workers):
            yield broken("gateway-deaf", url, count=len(deaf), engines=_names(deaf), all=len(view.workers))


def block_sizes(url: str, view: FleetView) -> Iterator[Finding]:
    for stream in view.streams:
        if stream.block_sizes:
            sizes = ", ".join(map(str, stream.block_sizes))
            yield broken("gateway-block-size", url, stream=stream.worker or stream.name, sizes=sizes)


def policy(url: str, view: FleetView) -> Iterator[Finding]:
    heard, prompts = bool(view.streams) or view.remote_index, view.totals.prompts
    if view.reads == "index" and not heard and view.workers:
        yield broken("gateway-policy.blind", url, policy=view.policy)
    elif view.reads == "memory" and heard:
        yield note("gateway-policy.memory", url, policy=view.policy)
    elif view.reads == "load" and view.totals.promises is not None:
        elsewhere = prompts.get("elsewhere", 0)
        if elsewhere and elsewhere >= (1 - KEPT) * max(ENOUGH, sum(prompts.values())):
            yield note(
                "gateway-policy.load",
                url,
                policy=view.policy,
                tokens=elsewhere,
                share=elsewhere / sum(prompts.values()),
            )
        elif not heard and view.totals.promises.unpromised >= ENOUGH:
            yield note("gateway-policy.unused", url, policy=view.policy, tokens=view.totals.promises.unpromised)


def promises(url: str, view: FleetView) -> Iterator[Finding]:
    all_ = view.totals.promises
    if all_ is None:
        return
    routed = sum(view.totals.prompts.values())
    if view.reads and view.reads != "load" and not all_.promised and all_.unpromised >= ENOUGH:
        yield broken("gateway-nothing-matches", url, tokens=all_.unpromised, routed=routed)
    for worker in view.workers:
        counted = worker.promises
        if counted is None or counted.promised < ENOUGH or worker.announced_by:
            continue
        reported = counted.promised - counted.missing.get("unreported", 0)
        reason = _main(counted)
        often = counted.broken > counted.kept and counted.broken >= OFTEN and reason in ALWAYS_WRONG
        if not reported:
            yield note("gateway-unreported", url, engine=worker.name, tokens=counted.promised)
        elif reason and (often or counted.delivered < KEPT * reported):
            yield broken(
                f"gateway-promises.{_of_phantoms(worker.name, view) if reason == 'phantom' else reason}",
                url,
                engine=worker.name,
                delivered=counted.delivered,
                promised=reported,
                share=counted.delivered / reported,
                tokens=counted.missing[reason],
                words=view.reasons.get(reason, reason),
            )


def _of_phantoms(engine: str, view: FleetView) -> str:
    """Describe why an engine announces blocks that it doesn't have, from its streams."""
    streams = [stream for stream in view.streams if stream.worker == engine]
    stored, removed = sum(listened.stored for listened in streams), sum(listened.removed for listened in streams)
    return "never-removes" if stored and not removed else "phantom"


def _main(promises: PromisesView) -> str:
    """Return the reason that explains most of what is missing."""
    reasons = {reason: tokens for reason, tokens in promises.missing.items() if reason != "unreported"}
    return max(reasons, key=lambda reason: reasons[reason], default="")


def _names(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (", ..." if len(names) > FEW else "")
