"""Made-up agents: programs of turns that call tools and sub-agents, share system prompts and skills, and fork into rollouts.

A program starts from a path through a tree of shared prefixes: the system prompt, below it the skills. Each turn's prompt goes
on from the one before; a few rewrite their context and keep only its front. An answer calls a tool, or a person replies. A turn
may call sub-agents, which run side by side from system prompts of their own, and the next turn waits for all of them. A program
with several rollouts forks at a turn: each samples an answer of the same prompt, and goes on apart. Seeded, the same anywhere.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Annotated

import msgspec

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.replay.traces.formats.growing import MOST_TOKENS, GrowingPrompts
from kvyard.replay.traces.generate import MOST_REQUESTS, prefix_levels, whole
from kvyard.replay.traces.laws import arrival_law, arrival_times, number_law, table_numbers
from kvyard.replay.traces.reading import ReadingTally
from kvyard.replay.traces.request import TraceRequest
from kvyard.replay.traces.trace import Trace
from kvyard.settings import Setting

LAWS = (
    *("first", "growth", "output", "turns", "tool_time", "think", "kept", "restart"),
    *("fan_out", "agent_first", "agent_turns", "rollouts", "fork"),
)
SHARES = ("tools", "restarts", "sub_agents")


class AgentWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Programs to generate. Laws are written as in ``Workload``, or as ``table:3,5,9``: one of these numbers."""

    requests: Annotated[
        int, Setting("How many requests; without this those of a fitted trace, or 1000.", flag=True)
    ] = 1000
    """In all; the last program is cut short if need be."""
    arrivals: Annotated[str, Setting("Of programs, as for other generated traces.", flag=True)] = "poisson:rate=0.1"
    tree: Annotated[
        str, Setting("System prompt and skills: 1x8000/20x1500 is one of 8000 tokens, below it 20 of 1500.", flag=True)
    ] = "1x8192/20x2048"
    zipf: Annotated[float, Setting("How unequal siblings in the trees are; 0 is equal.", flag=True)] = 1.0
    first: Annotated[str, Setting("Tokens of a first prompt behind its skills.", flag=True)] = (
        "lognormal:median=1500,sigma=1"
    )
    growth: Annotated[
        str, Setting("Tokens that each prompt adds to the one before, the answer to that included.", flag=True)
    ] = "lognormal:median=800,sigma=1.2"
    output: Annotated[str, Setting("Tokens of an answer.", flag=True)] = "lognormal:median=240,sigma=1"
    turns: Annotated[str, Setting("Turns of a program.", flag=True)] = "geometric:mean=20"
    paired: Annotated[
        bool, Setting("Draw first and turns together, from the same place of two tables of one length.", flag=True)
    ] = False
    tools: Annotated[float, Setting("Share of answers that call a tool.", flag=True)] = 0.8
    tool_time: Annotated[str, Setting("Seconds of a tool.", flag=True)] = "lognormal:median=5,sigma=1.5,max=600"
    think: Annotated[str, Setting("Seconds until a person replies.", flag=True)] = (
        "lognormal:median=60,sigma=1.5,max=3600"
    )
    restarts: Annotated[float, Setting("Share of turns that rewrite their context.", flag=True)] = 0.02
    kept: Annotated[str, Setting("Tokens at its front that a rewritten context keeps.", flag=True)] = "fixed:8192"
    restart: Annotated[str, Setting("Tokens of a rewritten context.", flag=True)] = "lognormal:median=20000,sigma=0.5"
    context: Annotated[int, Setting("Longest prompt: a longer one is rewritten.", flag=True)] = 200_000
    sub_agents: Annotated[float, Setting("Share of turns that call sub-agents.", flag=True)] = 0.03
    fan_out: Annotated[str, Setting("Sub-agents called at a time.", flag=True)] = "geometric:mean=1.7"
    agent_tree: Annotated[str, Setting("System prompts of sub-agents, as the tree.", flag=True)] = "4x6144"
    agent_first: Annotated[str, Setting("Tokens of a sub-agent's first prompt behind it.", flag=True)] = (
        "lognormal:median=1000,sigma=0.8"
    )
    agent_turns: Annotated[str, Setting("Turns of a sub-agent.", flag=True)] = "geometric:mean=10"
    rollouts: Annotated[str, Setting("Continuations of a program, as in reinforcement learning.", flag=True)] = (
        "fixed:1"
    )
    fork: Annotated[str, Setting("Turn whose prompt its rollouts sample each on their own.", flag=True)] = "fixed:1"
    block_size: Annotated[int, Setting("Tokens an id stands for.", flag=True)] = 64
    seed: Annotated[int, Setting("Another seed makes another trace.", flag=True)] = 0


def generate_agents(workload: AgentWorkload) -> Trace:
    """Return a trace of programs, generated again on each pass. Raises ``KvyardError`` for a workload that makes no sense."""
    for name in ("requests", "block_size", "context"):
        if getattr(workload, name) < 1:
            raise KvyardError(f"{name} must be at least 1, not {getattr(workload, name)}")
    if workload.requests > MOST_REQUESTS:
        raise KvyardError(f"requests must be at most {MOST_REQUESTS:,}, not {workload.requests:,}")
    if workload.context > MOST_TOKENS:
        raise KvyardError(f"context must be at most {MOST_TOKENS:,}, not {workload.context:,}")
    for name in SHARES:
        if not 0 <= getattr(workload, name) <= 1:
            raise KvyardError(f"{name} is a share of turns, from 0 to 1, not {getattr(workload, name)}")
    longest = max(sum(tokens for _, tokens in levels) for levels in _Programs(workload).levels.values())
    if longest >= workload.context:
        raise KvyardError(f"shared prefixes of {longest:,} tokens don't fit into a context of {workload.context:,}")

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        return _Programs(workload).requests()

    return Trace(f"generated agents, seed {workload.seed}", "generated", rows)


class _TurnLine(msgspec.Struct):
    """A line of turns, at its next one: a program, a rollout of it, or a sub-agent."""

    session: str
    root: str | None
    length: int
    ids: Sequence[int]
    arrival: int | None = None
    """Of a first turn that waits for no other."""
    after: tuple[str, ...] = ()
    wait: float = 0.0
    """Seconds from the end of those it waits for."""
    latest: str = ""
    """Id of its turn before."""


class _Programs:
    """One pass: laws, generators of random numbers, and the prompts so far."""

    def __init__(self, workload: AgentWorkload) -> None:
        self.workload = workload
        self.gaps = arrival_law(workload.arrivals)
        self.laws = {name: number_law(getattr(workload, name), name) for name in LAWS}
        self.pairs = _pairs(workload) if workload.paired else None
        uses = (*LAWS, *SHARES, "tree", "agent_tree", "arrivals")
        self.random = {use: Random(f"{workload.seed} agents {use}") for use in uses}
        self.levels = {name: prefix_levels(getattr(workload, name), name) for name in ("tree", "agent_tree")}
        self.weights = {
            (name, level): list(accumulate((rank + 1) ** -workload.zipf for rank in range(children)))
            for name, levels in self.levels.items()
            for level, (children, _) in enumerate(levels)
        }
        self.prompts = GrowingPrompts(workload.block_size)
        self.lengths: dict[tuple[object, ...], int] = {}
        """Tokens of the shared prefixes used so far, by their place in a tree."""
        self.made = 0

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests of all programs, one program after the other."""
        for number, arrival in enumerate(arrival_times(self.gaps, self.random["arrivals"])):
            for request in self._program(f"s{number}", arrival):
                yield request
                if self.made == self.workload.requests:
                    return

    def _program(self, name: str, arrival: int) -> Iterator[TraceRequest]:
        turns, first = self._turns_and_first()
        line = self._begin(name, None, "tree", first)
        line.arrival = arrival
        rollouts = self._whole("rollouts")
        fork = min(self._whole("fork"), turns) if rollouts > 1 else 1
        yield from self._turns(line, fork - 1, more=True)
        others = [self._forked(line, f"{name}.{number}") for number in range(1, rollouts)]
        yield from self._turns(line, turns - fork + 1)
        self.prompts.end(name)
        for other in others:
            yield from self._turns(other, max(1, self._whole("turns") - fork + 1))
            self.prompts.end(other.session)

    def _turns(
        self, line: _TurnLine, turns: int, *, more: bool = False, helper: bool = False
    ) -> Iterator[TraceRequest]:
        """Yield the next turns of a line, and those of its sub-agents. ``more`` says that others follow."""
        for left in range(turns - 1, -1, -1):
            ends = not left and not more
            spawns = not helper and not ends and self._happens("sub_agents")
            tool = not ends and (spawns or self._happens("tools"))
            yield self._request(line, tool)
            if ends:
                return
            waits: list[str] = []
            for number in range(self._whole("fan_out") if spawns else 0):
                agent = self._begin(
                    f"{line.session}/{line.latest}.{number}",
                    line.root or line.session,
                    "agent_tree",
                    self._whole("agent_first"),
                )
                agent.after = (line.latest,)
                yield from self._turns(agent, self._whole("agent_turns"), helper=True)
                self.prompts.end(agent.session)
                waits.append(agent.latest)
            line.after = tuple(waits)
            line.wait = 0.0 if waits else self._draw("tool_time" if tool else "think")
            self._advance(line)

    def _request(self, line: _TurnLine, tool: bool) -> TraceRequest:
        self.made += 1
        waits = line.latest or line.after
        request = TraceRequest(
            str(self.made),
            line.arrival or 0,
            line.length,
            self._whole("output"),
            line.ids,
            self.workload.block_size,
            session=line.session,
            delay=round(max(0.0, line.wait) * SECOND) if waits else None,
            after=line.after,
            root=line.root,
            tool_call=tool,
        )
        line.latest, line.arrival = request.id, None
        return request

    def _advance(self, line: _TurnLine) -> None:
        """Make a line's next prompt."""
        length = line.length + self._whole("growth")
        kept = line.length
        if self._happens("restarts") or length > self.workload.context:
            length = min(self._whole("restart"), self.workload.context)
            kept = min(self._whole("kept"), line.length)
        line.length, line.ids = length, self.prompts.ids(line.session, length, kept)

    def _turns_and_first(self) -> tuple[int, int]:
        """Return a program's number of turns, and the tokens of its first prompt."""
        if self.pairs is None:
            return self._whole("turns"), self._whole("first")
        turns, first = self.pairs[self.random["turns"].randrange(len(self.pairs))]
        return max(1, round(turns)), max(1, round(first))

    def _begin(self, session: str, root: str | None, tree: str, first: int) -> _TurnLine:
        """Return a line at its first prompt, behind a path through a tree of shared prefixes."""
        node: tuple[object, ...] = (tree,)
        shared = 0
        for level, (_, tokens) in enumerate(self.levels[tree]):
            weights = self.weights[tree, level]
            child = (*node, bisect(weights, self.random[tree].random() * weights[-1]))
            if child not in self.lengths:
                self.prompts.fork(node, child)
                self.prompts.ids(child, shared + tokens, shared)
                self.lengths[child] = shared + tokens
            node, shared = child, self.lengths[child]
        self.prompts.fork(node, session)
        length = min(shared + first, self.workload.context)
        return _TurnLine(session, root, length, self.prompts.ids(session, length, shared))

    def _forked(self, line: _TurnLine, session: str) -> _TurnLine:
        """Return a rollout that samples the same prompt once more and goes on apart."""
        self.prompts.fork(line.session, session)
        after = (*line.after, line.latest) if line.latest else line.after
        return _TurnLine(session, line.session, line.length, line.ids, line.arrival, after, line.wait)

    def _whole(self, law: str) -> int:
        return whole(self.laws[law], self.random[law])

    def _draw(self, law: str) -> float:
        return self.laws[law](self.random[law])

    def _happens(self, share: str) -> bool:
        return bool(self.random[share].random() < getattr(self.workload, share))


def _pairs(workload: AgentWorkload) -> list[tuple[float, float]]:
    turns, first = table_numbers(workload.turns, "turns"), table_numbers(workload.first, "first")
    if len(turns) != len(first):
        raise KvyardError(f"turns has {len(turns)} numbers and first {len(first)}: to be paired they need equally many")
    return list(zip(turns, first, strict=True))
