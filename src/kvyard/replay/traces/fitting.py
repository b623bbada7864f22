"""A workload of agents with the statistics of a given trace, and figures by which the two are compared.

Numbers are fitted as tables: the means of a hundred equal parts of what was seen, in order. So a table has the mean of what was
seen, and its percentiles to one in a hundred. Turns of a session and its first prompt are drawn together, since sessions that
begin with long prompts tend to be short; all else is independent.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.replay.traces.agents import AgentWorkload
from kvyard.replay.traces.formats.growing import MOST_TOKENS
from kvyard.replay.traces.identity import prefix_ids
from kvyard.replay.traces.prefixes import PromptPrefixes
from kvyard.replay.traces.request import TraceRequest

PARTS = 100
"""Numbers of a table, at most."""
REWRITTEN = 0.8
"""A turn that keeps less than this share of the prompt before has rewritten its context."""
MOST_PAIRS = 1_000
"""Sessions whose first prompts and turns are written down, at most."""
ARRIVALS = "poisson:rate=0.1"
"""Of programs, if the given trace has no common clock."""


class AgentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a trace of agents."""

    sessions: int
    requests: int
    turns: float
    """Of a session that no other called, on average."""
    prompt_mean: float
    prompt_p50: float
    prompt_p90: float
    output_mean: float
    tools: float
    """Share of answers that call a tool."""
    tool_p50: float
    """Seconds."""
    tool_mean: float
    think_p50: float
    think_mean: float
    restarts: float
    """Share of turns that rewrite their context."""
    sub_agents: float
    """Called by a session, on average."""
    agent_turns: float
    reuse: float
    """Share of prompt tokens that an earlier prompt of the same session or of another one began with."""


class AgentSamples:
    """Everything that is fitted, gathered in one pass over a trace."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        """Raises ``KvyardError`` for a trace without sessions or without ids."""
        self.prompts: list[int] = []
        self.outputs: list[int] = []
        self.first: list[int] = []
        """Tokens of first prompts that no other session had."""
        self.shared: list[int] = []
        """Tokens of first prompts that another session had."""
        self.agent_first: list[int] = []
        self.agent_shared: list[int] = []
        self.growth: list[int] = []
        self.kept: list[int] = []
        self.restart: list[int] = []
        self.tool_time: list[float] = []
        self.think: list[float] = []
        self.turns: Counter[str] = Counter()
        self.agent_turns: Counter[str] = Counter()
        self.called: Counter[tuple[str, ...]] = Counter()
        """Sub-agents by the requests that they were called by."""
        self.starts: list[int] = []
        self.roots: Counter[int] = Counter()
        """First prompts that share something, by their first block."""
        self.tools = self.reused = 0
        self.block_size = 0
        self._known = PromptPrefixes()
        self._latest: dict[str, tuple[TraceRequest, Sequence[int]]] = {}
        for request in requests:
            self._add(request)
        if not self.turns:
            raise KvyardError("no sessions to fit agents to: choose a trace with sessions, or generate without --fit")

    def _add(self, request: TraceRequest) -> None:
        ids, size = prefix_ids(request)
        if request.session is None or ids is None:
            raise KvyardError(
                f"request {request.id} has no {'session' if request.session is None else 'ids'}: agents are fitted to traces "
                "with sessions and shared prefixes"
            )
        self.block_size = size
        self.prompts.append(request.input_length)
        self.outputs.append(request.output_length)
        self.tools += request.tool_call
        known = self._known.touch(ids, 0)[1]
        self.reused += min(known * size, request.input_length)
        (self.turns if request.root is None else self.agent_turns)[request.session] += 1
        before = self._latest.get(request.session)
        self._latest[request.session] = request, ids
        if before is None:
            self._begin(request, ids, min(known * size, request.input_length - 1))
        else:
            self._continue(request, ids, *before)

    def _begin(self, request: TraceRequest, ids: Sequence[int], shared: int) -> None:
        if shared:
            self.roots[ids[0]] += 1
        if request.root is None:
            self.first.append(request.input_length - shared)
            self.shared.append(shared)
            if request.delay is None:
                self.starts.append(request.arrival)
        else:
            self.agent_first.append(request.input_length - shared)
            self.agent_shared.append(shared)
            self.called[request.after] += 1

    def _continue(self, request: TraceRequest, ids: Sequence[int], before: TraceRequest, former: Sequence[int]) -> None:
        both = min(len(ids), len(former))
        same = bisect_left(range(both), True, key=lambda index: ids[index] != former[index])
        kept = min(same * self.block_size, before.input_length, request.input_length)
        if kept < REWRITTEN * before.input_length - self.block_size:
            self.kept.append(kept)
            self.restart.append(request.input_length)
        else:
            # What isn't in a whole block is new in the ids alone.
            self.growth.append(max(1, request.input_length - before.input_length))
        if not request.after and request.delay is not None:
            (self.tool_time if before.tool_call else self.think).append(request.delay / SECOND)

    def figures(self) -> AgentFigures:
        """Return the statistics."""
        sessions, requests = len(self.turns), len(self.prompts)
        continued = len(self.growth) + len(self.kept)
        return AgentFigures(
            sessions=sessions,
            requests=requests,
            turns=sum(self.turns.values()) / sessions,
            prompt_mean=_mean(self.prompts),
            prompt_p50=_percentile(self.prompts, 50),
            prompt_p90=_percentile(self.prompts, 90),
            output_mean=_mean(self.outputs),
            tools=self.tools / requests,
            tool_p50=_percentile(self.tool_time, 50),
            tool_mean=_mean(self.tool_time),
            think_p50=_percentile(self.think, 50),
            think_mean=_mean(self.think),
            restarts=len(self.kept) / continued if continued else 0.0,
            sub_agents=len(self.agent_turns) / sessions,
            agent_turns=_mean(list(self.agent_turns.values())),
            reuse=self.reused / sum(self.prompts),
        )

    def workload(self) -> AgentWorkload:
        """Return a workload with these statistics, of as many requests."""
        continued = sum(self.turns.values()) - len(self.turns)
        agents = len(self.agent_turns)
        pairs = sorted(zip(self.turns.values(), self.first, strict=True))
        if len(pairs) > MOST_PAIRS:
            pairs = [pairs[len(pairs) * number // MOST_PAIRS] for number in range(MOST_PAIRS)]
        return AgentWorkload(
            requests=len(self.prompts),
            arrivals=self._arrivals(),
            tree=self._tree(self.shared),
            zipf=_zipf(self.roots),
            first=_listed(first for _, first in pairs),
            growth=table(self.growth or [1]),
            output=table(self.outputs),
            turns=_listed(turns for turns, _ in pairs),
            paired=True,
            tools=self._tool_share(),
            tool_time=table(self.tool_time or [0]),
            think=table(self.think or [0]),
            restarts=len(self.kept) / max(1, len(self.growth) + len(self.kept)),
            kept=table(self.kept or [1]),
            restart=table(self.restart or [1]),
            context=min(MOST_TOKENS, max(self.prompts)),
            sub_agents=min(1.0, len(self.called) / continued) if agents and continued else 0.0,
            fan_out=table(list(self.called.values()) or [1]),
            agent_tree=self._tree(self.agent_shared),
            agent_first=table(self.agent_first or [1]),
            agent_turns=table(list(self.agent_turns.values()) or [1]),
            block_size=self.block_size,
        )

    def _tool_share(self) -> float:
        """Return share of calls of tools among answers that others follow."""
        followed = len(self.tool_time) + len(self.think)
        return len(self.tool_time) / followed if followed else 0.0

    def _arrivals(self) -> str:
        gaps = [later - earlier for earlier, later in pairwise(self.starts)]
        mean = _mean(gaps)
        if not mean:
            return ARRIVALS
        deviation = math.sqrt(_mean([(gap - mean) ** 2 for gap in gaps]))
        return f"gamma:rate={SECOND / mean:.6g},cv={max(0.01, deviation / mean):.4g}"

    def _tree(self, shared: list[int]) -> str:
        """Return a level of shared prefixes: their number, and the middle length of what sessions share."""
        lengths = [length for length in shared if length]
        if not lengths:
            return ""
        return f"{max(1, len(self.roots))}x{round(_percentile(lengths, 50))}"


def table(values: Sequence[float]) -> str:
    """Return a law with the distribution of ``values``: the means of equal parts of them, in order."""
    ordered = sorted(values)
    parts = min(PARTS, len(ordered))
    cuts = [len(ordered) * part // parts for part in range(parts + 1)]
    means = [_mean(ordered[start:stop]) for start, stop in pairwise(cuts)]
    return _listed(means)


def _listed(values: Iterable[float]) -> str:
    return "table:" + ",".join(f"{value:.6g}" for value in values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        return 0.0
    import numpy

    return float(numpy.percentile(values, percent))


def _zipf(counts: Counter[int]) -> float:
    """Return the exponent that fits how often prefixes are used, by least squares of logarithms; 1 if there are too few."""
    if len(counts) < 3:
        return 1.0
    points = [(math.log(rank), math.log(uses)) for rank, (_, uses) in enumerate(counts.most_common(), 1)]
    x, y = _mean([point[0] for point in points]), _mean([point[1] for point in points])
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return max(0.0, -round(slope, 3))
