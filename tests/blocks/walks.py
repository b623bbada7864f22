"""Our block manager and the model side by side: one operation for both, equal answers, and sound books after each.

``Explorer`` is the walker that records golden logs, made a little bolder: it also keeps lookups for later, looks up
requests that run, and looks at the whole state. ``draw_family`` invents configurations for it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from tests.blocks.model import Hits, Mamba, Model, NoneLeft, Request
from tests.blocks.record_golden import Family, Job, Record, Walker

from kvyard.lab.conform import Replayer

T = TypeVar("T")
Pick = Callable[[Sequence[T]], T]

Operation = dict[str, Any]


class Mismatch(AssertionError):
    """The two disagree; the message has the configuration, what led there, and both answers."""


class Pair:
    """Both sides behind one ``apply``, which raises ``Mismatch`` as soon as they differ in anything."""

    def __init__(self, model: Model | None = None) -> None:
        self.model = model or CarefulModel()
        self.ours: Replayer | None = None
        self.operations = 0
        self.recent: deque[Operation] = deque(maxlen=12)
        self.lookups: dict[str, dict[int, list[Any]]] = {}
        """Request -> the blocks it was last told of, and the keys these had then."""

    def apply(self, op: Operation) -> Operation:
        self.operations += 1
        self.recent.append(op)
        if op["op"] == "config":
            self.ours = Replayer(op)
            expected, ours = self.model.apply(op), self.ours.configured()
            self.config = op
        else:
            assert self.ours is not None
            expected, ours = self.model.apply(op), self.ours.apply(op)
        if expected != ours:
            raise Mismatch(f"{self.story()}\n{difference(expected, ours)}")
        if op["op"] == "get_computed":
            self.lookups[op["req"]] = self.names(op["req"])
        try:
            self.ours.manager.check_integrity()
        except AssertionError as broken:
            raise Mismatch(f"{self.story()}\n  {broken}") from broken
        return expected

    def story(self) -> str:
        lines = "\n".join(f"  {op}" for op in self.recent)
        return f"operation {self.operations} under {self.config}, after\n{lines}"

    def fresh_hit(self, name: str) -> bool:
        """Return true if the hit looked up for this request may still be allocated: nothing of it was handed out or renamed."""
        assert self.ours is not None
        hit = self.ours.hits.get(name)
        if hit is None or hit.version != self.ours.manager.pool.version:
            return False
        return self.lookups[name] == self.names(name)

    def names(self, name: str) -> dict[int, list[Any]]:
        """The keys of the blocks that the model found for this request."""
        pending = self.model.requests[name].pending
        blocks = [block for column in pending[0] for block in column] if pending else []
        return {block: list(self.model.pool.keys.get(block, [])) for block in blocks if block}


class CarefulModel(Model):
    """vLLM but for the one point where we leave it on purpose: what it would raise on half-way is refused.

    Aligned states make it predict too little: a surplus of theirs, left by rejected drafts, counts as blocks for other
    groups, and a state to be loaded is not counted. Mostly there are enough blocks all the same.
    """

    def allocate(
        self, request: Request, new: int, hits: Hits, hit: int, external: int, op: dict[str, Any]
    ) -> Hits | None:
        if not any(isinstance(group, Mamba) and group.aligned for group in self.groups):
            return super().allocate(request, new, hits, hit, external, op)
        tokens = len(request.tokens) + new + external + op.get("num_lookahead", 0)
        if sum(tokens // group.size + 8 for group in self.groups) < len(self.pool.queue):
            return super().allocate(request, new, hits, hit, external, op)  # more than it can ever take
        before = deepcopy(self.__dict__, {id(self): self})
        try:
            return super().allocate(request, new, hits, hit, external, op)
        except NoneLeft:
            self.__dict__.update(before)
            request = self.requests[request.name]
            total = min(request.computed + hit + external, self.max_length)
            for group in self.groups:
                group.drop_skipped(request, max(0, total - request.in_flight))
            return None


def difference(expected: Any, ours: Any, where: str = "result") -> str:
    """The first place where two answers differ, and what each has there."""
    if isinstance(expected, dict) and isinstance(ours, dict):
        for name in sorted(expected.keys() | ours.keys()):
            if expected.get(name) != ours.get(name) or (name in expected) != (name in ours):
                return difference(expected.get(name), ours.get(name), f"{where}.{name}")
    if (
        isinstance(expected, list)
        and isinstance(ours, list)
        and any(isinstance(item, dict | list) for item in expected)
    ):
        for at, (one, other) in enumerate(zip(expected, ours, strict=False)):
            if one != other:
                return difference(one, other, f"{where}[{at}]")
        extra = expected[len(ours) :] or ours[len(expected) :]
        return f"  {where}: the model has {len(expected)}, ours {len(ours)}; in excess are {str(extra)[:600]}"
    return f"  {where}: model {str(expected)[:600]}\n  {where}: ours  {str(ours)[:600]}"


class Explorer(Walker):
    """A walk over a ``Pair`` that asks for more than a scheduler would, though nothing that is wrong."""

    def __init__(self, family: Family, seed: int, model: Model | None = None) -> None:
        self.pair = Pair(model)
        super().__init__(self.pair.apply, family, seed)
        self.lookups: dict[str, Operation] = {}

    def do(self, op: str, **fields: Any) -> Operation:
        name = fields.get("req", "")
        if op == "get_computed":
            if name in self.lookups and self.pair.fresh_hit(name) and self.chance(0.7):
                return self.lookups[name]  # nothing was handed out since: what was found is still there
            self.lookups[name] = super().do(op, **fields)
            return self.lookups[name]
        return super().do(op, **fields)

    def step(self) -> None:
        roll = self.rng.random()
        if roll < 0.12:
            self.peek()
        elif roll < 0.14:
            self.do("state")
        else:
            super().step()

    def peek(self) -> None:
        """Look up without allocating."""
        jobs: list[Job] = [job for job in [*self.waiting, *self.running] if not job.cold]
        if jobs:
            self.do("get_computed", req=self.rng.choice(jobs).name)

    def operations(self, count: int) -> Iterator[Record]:
        """At least ``count`` operations, ``config`` included."""
        self.do("config", **self.family.config)
        while self.pair.operations < count:
            self.do("new_step")
            self.step()
            self.do("take_copies")
            if self.chance(0.03):
                self.do("take_events", wire=self.chance(0.2))
            yield from self.flush()
        self.do("state")
        yield from self.flush()


ATTENTION = (
    "full",
    "full",
    "mla",
    "sliding_window",
    "sliding_window",
    "sliding_window_mla",
    "chunked_local",
    "all",
    "align",
)


def draw_family(pick: Pick[Any]) -> Family:
    """A configuration that makes sense, and what to do with it. ``pick`` chooses one of a sequence."""
    caching = pick([True, True, True, True, False])
    unit = pick([1, 2, 4, 8])
    kinds = [pick(ATTENTION) for _ in range(pick([1, 2, 2, 2, 3, 4]))]
    scales = [1] * len(kinds)
    if len(kinds) > 1 and (not caching or "chunked_local" not in kinds):
        scales = [pick([1, 1, 2, 4]) if mixed else 1 for mixed in [pick([False, False, True])] * len(kinds)]
    groups = [_group(pick, kind, unit * scale) for kind, scale in zip(kinds, scales, strict=True)]
    if not caching:
        extra = pick([None, None, {"type": "cross"}, {"type": "mamba", "mode": "none", "block_size": 64 * unit}])
        groups += [extra] if extra else []
    sizes = [group.get("block_size", unit) for group in groups]
    aligned = math.lcm(*sizes)
    hash_size = math.gcd(*sizes)
    if len(groups) > 1 and hash_size > 1:
        hash_size = pick([hash_size, hash_size, hash_size // 2])
    config: dict[str, Any] = {
        "num_blocks": pick([24, 48, 48, 90]) + 12 * len(groups),
        "block_size": unit,
        "groups": groups,
        "caching": caching,
        "hash_block_size": hash_size,
        "events": pick([False, True]),
        "trace": True,
        "watermark": pick([0.0, 0.0, 0.06, 0.2]),
        "max_in_flight_tokens": pick([None, None, 4 * aligned]),
        "max_model_len": pick([1 << 20, 1 << 20, max(12 * aligned, 64 * unit)]),
    }
    has_states = any(group["type"] == "mamba" for group in groups)
    if caching and any(kind not in ("full", "mla", "chunked_local") for kind in kinds):
        config["retention_interval"] = pick([None, None, 0, 0, aligned, 3 * aligned])
    elif caching:
        config["retention_interval"] = pick([None, 0])
    drafting = caching and "chunked_local" not in kinds and pick([False, False, True])
    if drafting:
        if pick([False, True]):
            config["use_eagle"] = True
        else:
            pick(groups)["eagle"] = True
        # States that may be hit inside their blocks can't wait for more than one draft token (nor can vLLM's).
        finer = any(group.get("mode") == "align" and group["block_size"] > hash_size for group in groups)
        config["num_prefill_lookahead"] = pick([0, 0, 1 if finer else min(3, aligned)])
    drafts = pick([0, 0, 2, 4])
    return Family(
        config,
        drafts=drafts,
        lookahead=pick([0, drafts, drafts + 1]),
        overlap=pick([0, 0, 1] if has_states else [0, 0, 1, 2]),
        external=pick([0.0, 0.25, 0.6]),
        loads_states=pick([False, True]),
        cold=pick([0.0, 0.0, 0.3]),
        reserve=pick([0.0, 0.0, 0.3]),
        keys=pick([False, False, False, True]),
        report=pick([0.0, 0.0, 0.3]) if hash_size == aligned else 0.0,
        encoder=pick([1, 9]) * unit if any(group["type"] == "cross" for group in groups) else 0,
        prompt=pick([2, 4, 7]) if aligned == unit else pick([2, 4]),
        texts=pick([1, 2, 3]),
    )


def _group(pick: Pick[Any], kind: str, size: int) -> dict[str, Any]:
    group: dict[str, Any] = {"type": kind, "block_size": size}
    if kind.startswith("sliding_window"):
        group["window"] = pick([1, size, size + 1, 2 * size + 1, 3 * size, 5 * size - 1, 12 * size])
    elif kind == "chunked_local":
        group["chunk"] = pick([size, 2 * size, 3 * size, 4 * size])
    elif kind in ("all", "align"):
        group |= {"type": "mamba", "mode": kind, "spec_blocks": pick([0, 0, 2])}
    return group


def random_walk(seed: int, count: int) -> int:
    """``count`` operations under a configuration that ``seed`` decides; returns how many allocations succeeded."""
    rng = random.Random(seed)
    explorer = Explorer(draw_family(rng.choice), seed)
    return sum(result.get("allocated", False) for _, result in explorer.operations(count))
