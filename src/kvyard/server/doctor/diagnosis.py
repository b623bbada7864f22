"""Diagnosis: what was seen of a case, as findings. Each says what was seen, what it means, and what to do about it.

The links of the chain, in the order in which they break: a publisher is there, something is sent, it can be read, it is whole,
its blocks have the size that is expected, the prompt fills one, its text is what the engine saw, so are its adapter and salt,
and every attention group agrees. The first broken one usually explains those after it.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvyard.events.check import Finding
from kvyard.server.doctor import case_rules
from kvyard.server.doctor.case import Case
from kvyard.server.doctor.engine_rules import Local, about_engines, device_blocks
from kvyard.server.doctor.finding import Expected
from kvyard.server.doctor.gateway_rules import about_gateway
from kvyard.server.doctor.gateway_visit import GatewayVisit
from kvyard.server.doctor.visit import Visit


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All cases, judged."""

    findings: list[Finding]
    matched: dict[str, int]
    """Per source the longest match of the prompt, in tokens."""
    tokens: int | None
    """Tokens of the prompt."""
    device_blocks: dict[str, int] = {}
    """Blocks of the device per source, from metrics. Capacity isn't checked for those that aren't here."""
    engines: list[Visit] = []
    """Engines that were asked over HTTP, with all their answers."""
    gateway: GatewayVisit | None = None
    """The gateway that was asked, with its answers."""

    @property
    def healthy(self) -> bool:
        return not any(finding.broken for finding in self.findings)


def diagnose(
    cases: Sequence[Case],
    expected: Expected,
    visits: Sequence[Visit] = (),
    local: Local | None = None,
    gateway: GatewayVisit | None = None,
) -> Diagnosis:
    """Return faults and notes. Changes nothing."""
    findings = list(about_engines(visits, cases, expected, local or Local()))
    if gateway is not None:
        findings += about_gateway(gateway)
    matched: dict[str, int] = {}
    prompt = None
    for case in cases:
        prompt = case.prompt
        matched[case.name] = max((match.tokens for match in case.matches()), default=0)
        if not case.checker.facts().messages and not case.announced:
            findings += case_rules.silence(case)
            continue
        for rule in RULES:
            findings += rule(case, expected)
    findings += case_rules.seeds_differ(cases)
    findings.sort(key=lambda finding: not finding.broken)
    tokens = None if prompt is None else len(prompt)
    blocks = device_blocks([seen for seen in visits if seen.answered], [case for case in cases if case.live])
    return Diagnosis(
        findings=findings,
        matched=matched,
        tokens=tokens,
        device_blocks=blocks,
        engines=list(visits),
        gateway=gateway,
    )


RULES: list[Callable[[Case, Expected], Iterator[Finding]]] = [
    case_rules.stream,
    case_rules.trust,
    case_rules.clears,
    case_rules.block_size,
    case_rules.namespace,
    case_rules.text,
    case_rules.groups,
    case_rules.hashes,
]
"""In the order of the links."""
