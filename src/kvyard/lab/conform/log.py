"""Logs of a real vLLM block manager: reading them, replaying them, and finding the first difference.

The format is that of the oracle they were recorded with: JSON lines of an operation and its result, the first a
configuration. vLLM's class names and version are not compared; every operation and result is.
"""

import json
import lzma
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvyard.blocks.coordinator import Hit
from kvyard.blocks.integrity import reference_counts
from kvyard.blocks.manager import BlockManager
from kvyard.blocks.request import Request
from kvyard.blocks.spec import GroupSpec
from kvyard.errors import KvyardError
from kvyard.hashing import PLAIN, Media, Namespace, Run, TokenChain, algorithm
from kvyard.lab.conform.recorder import VllmRecorder

ABOUT_VLLM = ("vllm", "coordinator", "managers")
"""Fields of a configuration's result that name vLLM's own parts."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions of a replay for lines with other fields than a log's, or with other values in them."""

Record = dict[str, Any]


def in_words(bad: Exception) -> str:
    """Return what is wrong with a log, by one of ``MALFORMED``."""
    return f"a line has no {bad}" if isinstance(bad, KeyError) else str(bad)


class LogError(KvyardError):
    """A log that can't be read or replayed; the message names the place."""


class Replayer:
    """Carries out logged operations on a ``BlockManager``. One method per operation, named ``op_...``.

    It plays the scheduler's part too, as far as the oracle does: it advances what is computed once an allocation stands.
    """

    def __init__(self, config: Record) -> None:
        known = {name: value for name, value in config.items() if name not in ("op", "tag")}
        events = known.pop("events", False)
        self._trace = known.pop("trace", False)
        self.algorithm = algorithm(known.pop("hash_algo", "sha256_cbor"), known.pop("hash_seed", None), environ={})
        self.recorder = VllmRecorder(known.pop("event_hash", "int") == "bytes") if events else None
        size = known.pop("block_size", 16)
        groups = [_group(group, size) for group in known.pop("groups", [{"type": "full"}])]
        self.manager = BlockManager(known.pop("num_blocks", 64), groups, sink=self.recorder, **known)
        if self.recorder is not None:
            self.recorder.watch(self.manager.groups)
        self.requests: dict[str, Request] = {}
        self.hits: dict[str, Hit] = {}
        self._reports: set[str] = set()

    def configured(self) -> Record:
        geometry = self.manager.geometry
        return {
            "hash_block_size": geometry.hash_block_size,
            "scheduler_block_size": geometry.scheduler_block_size,
            "none_hash": _plain(self.algorithm.root),
            "num_free": self.manager.pool.free,
        }

    def apply(self, op: Record) -> Record:
        """Return the result of one operation, in the shape of the log. An operation that we refuse yields ``error``."""
        act: Callable[[Record], Record | None] | None = getattr(self, f"op_{op['op']}", None)
        if act is None:
            raise LogError(f"unknown operation {op['op']!r}")
        try:
            result = act(op) or {}
        except (KvyardError, KeyError, ValueError) as refused:
            return {"error": str(refused)}
        finally:
            if self.recorder is not None:
                self.recorder.flush()
        result["num_free"] = self.manager.pool.free
        if self._trace and op["op"] != "state":
            result.update(self._traced())
        return result

    def op_new(self, op: Record) -> Record:
        chain = TokenChain(_tokens(op["tokens"]), self.manager.geometry.hash_block_size, self.algorithm, _namespace(op))
        request = self.requests[op["req"]] = Request(op["req"], chain)
        if op.get("report") == "full":
            self._reports.add(request.id)
        return {"num_tokens": request.num_tokens, "hashes": _plain(chain.hashes(0, len(chain.keys)))}

    def _request(self, op: Record) -> Request:
        if op["req"] not in self.requests and "tokens" in op:
            self.op_new(op)
        return self.requests[op["req"]]

    def op_get_computed(self, op: Record) -> Record:
        request = self._request(op)
        hit = self.hits[request.id] = self.manager.lookup(request)
        if hit.tokens and self.recorder is not None and request.id in self._reports:
            self.recorder.reported(request, self.manager.groups, hit)
        return {
            "hit_tokens": hit.tokens,
            "hit_blocks": hit.block_ids(),
            "shared_prefix_boundary": hit.shared_prefix_boundary,
        }

    def op_allocate(self, op: Record) -> Record:
        request = self._request(op)
        begun = request.running or request.num_computed_tokens
        hit = None if begun else self.hits.get(request.id)
        new, external = op["num_new_tokens"], op.get("num_external", 0)
        taken = self.manager.allocate(
            request,
            new,
            hit,
            external=external,
            lookahead=op.get("num_lookahead", 0),
            encoder=op.get("num_encoder", 0),
            delay_caching=op.get("delay_cache", False),
            must_fit=op.get("must_fit", False),
            reserved=op.get("reserved", 0),
            has_running=op.get("has_running", True),
        )
        if taken is None:
            return {"allocated": False}
        self.hits.pop(request.id, None)
        if op.get("advance", True):
            request.num_computed_tokens += (hit.tokens if hit is not None else 0) + external + new
            request.num_in_flight_tokens += op.get("in_flight", 0)
            request.running = True
        return {
            "allocated": True,
            "new_blocks": [list(ids) for ids in taken],
            "blocks": self.manager.block_ids(request),
            "num_computed": request.num_computed_tokens,
        }

    def op_append(self, op: Record) -> Record:
        request = self._request(op)
        request.append(_tokens(op["tokens"]))
        return {"num_tokens": request.num_tokens}

    def op_settle(self, op: Record) -> Record:
        request = self._request(op)
        request.num_in_flight_tokens -= op["n"]
        return {"num_in_flight": request.num_in_flight_tokens}

    def op_rollback(self, op: Record) -> Record:
        request = self._request(op)
        self.manager.rollback(request, op["n"])
        return {"num_computed": request.num_computed_tokens}

    def op_cache(self, op: Record) -> None:
        self.manager.cache(self._request(op), op["num_tokens"])

    def op_preempt(self, op: Record) -> None:
        request = self._request(op)
        if request.id in self.manager.requests:
            self.manager.preempt(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.running = False

    def op_free(self, op: Record) -> None:
        request = self.requests.pop(op["req"])
        self.hits.pop(request.id, None)
        if request.id in self.manager.requests:
            self.manager.free(request)

    def op_remove_skipped(self, op: Record) -> Record:
        request = self._request(op)
        if request.id in self.manager.requests:
            self.manager.drop_stale(request, op["num_tokens"])
        return {"blocks": self.manager.block_ids(request)}

    def op_evict(self, op: Record) -> None:
        self.manager.evict(set(op["blocks"]))

    def op_new_step(self, op: Record) -> None:
        self.manager.begin_step()

    def op_take_copies(self, op: Record) -> Record:
        return {"copies": [list(pair) for pair in self.manager.take_copies()]}

    def op_reset(self, op: Record) -> Record:
        done = self.manager.reset()
        if done:
            self.hits.clear()
        return {"reset": done}

    def op_take_events(self, op: Record) -> Record:
        events = self.recorder.take() if self.recorder is not None else []
        result: Record = {"events": _plain(events)}
        if op.get("wire"):
            batch = (float(op.get("ts", 0.0)), events, op.get("dp_rank"))
            result["wire"] = msgspec.msgpack.encode(batch).hex()
        return result

    def op_state(self, op: Record) -> Record:
        manager = self.manager
        cached: dict[str, list[int]] = {}
        for group, key, block in manager.pool.cached_blocks():
            cached.setdefault(f"{group}:{_plain(key)}", []).append(block)
        return {
            "usage": manager.usage,
            "requests": {
                name: {
                    "blocks": manager.block_ids(request),
                    "num_cached": [table.registered for table in request.tables] or [None] * len(manager.groups),
                    "num_computed": request.num_computed_tokens,
                    "num_tokens": request.num_tokens,
                    "hashes": _plain(Run(request.chain).hashes),
                }
                for name, request in self.requests.items()
            },
            "cached": {name: sorted(blocks) for name, blocks in cached.items()},
            **self._traced(),
        }

    def _traced(self) -> Record:
        counts = reference_counts(self.manager.pool, self.manager.requests.values())
        refs = {str(block): counts[block] for block in sorted(counts)}
        return {"refs": refs, "queue": list(self.manager.pool.line())}


def _group(group: Record, size: int) -> GroupSpec:
    known = dict(group)
    return GroupSpec(kind=known.pop("type"), block_size=known.pop("block_size", size), **known)


def _namespace(op: Record) -> Namespace:
    lora = op.get("lora")
    media = tuple(Media(item["hash"], item["offset"], item["length"]) for item in op.get("mm") or ())
    if not (lora or media or op.get("salt")):
        return PLAIN
    if not lora:
        return Namespace(salt=op.get("salt"), media=media)
    path, number = lora.get("path", "/adapter"), lora.get("id", 1)
    return Namespace(lora_name=lora["name"], lora_path=path, lora_id=number, salt=op.get("salt"), media=media)


def _tokens(tokens: list[int] | dict[str, list[int]]) -> list[int]:
    if isinstance(tokens, dict):
        first, count = tokens["seq"]
        return list(range(first, first + count))
    return tokens


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON has it: bytes in hex, tuples as lists."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


class LogDifference(msgspec.Struct, frozen=True):
    """The first operation whose result is not the recorded one."""

    line: int
    op: Record
    field: str
    recorded: object
    ours: object
    before: list[Record]
    """The operations that led there, the last few."""


class LogVerdict(msgspec.Struct, frozen=True):
    """Result of comparing one log."""

    name: str
    operations: int
    difference: LogDifference | None
    unit: str = "operations"


def conform(path: Path) -> LogVerdict:
    """Replay one log (plain or .xz). Raises ``LogError`` for a file that isn't one."""
    name = path.name.removesuffix(".xz").removesuffix(".jsonl")
    replayer: Replayer | None = None
    before: deque[Record] = deque(maxlen=5)
    number = 0
    for number, record in _records(path):
        op, recorded = record["op"], record["result"]
        if replayer is None:
            if op["op"] != "config":
                raise LogError(f"{path}:{number}: the first operation must be config, not {op['op']!r}")
            try:
                replayer = Replayer(op)
            except (KvyardError, *MALFORMED) as refused:
                raise LogError(f"{path}:{number}: this configuration can't be replayed: {refused}") from refused
            ours = replayer.configured()
            recorded = {key: value for key, value in recorded.items() if key not in ABOUT_VLLM}
        else:
            try:
                ours = replayer.apply(op)
            except (LogError, *MALFORMED) as refused:
                raise LogError(f"{path}:{number}: this operation can't be replayed: {refused}") from refused
        field = _first_difference(recorded, ours)
        if field is not None:
            return LogVerdict(
                name, number, LogDifference(number, op, field, recorded.get(field), ours.get(field, ours), list(before))
            )
        before.append(op)
    if replayer is None:
        raise LogError(f"{path}: the log is empty")
    return LogVerdict(name, number, None)


def _first_difference(recorded: Record, ours: Record) -> str | None:
    if "error" in recorded and "error" in ours:
        return None
    absent = object()
    fields = sorted(recorded.keys() | ours.keys())
    return next((field for field in fields if recorded.get(field, absent) != ours.get(field, absent)), None)


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    if not (isinstance(record["op"]["op"], str) and isinstance(record["result"], dict)):
                        raise TypeError
                except (ValueError, KeyError, TypeError, RecursionError) as bad:
                    raise LogError(f'{path}:{number}: expected a line of {{"op": ..., "result": ...}}') from bad
                yield number, record
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as bad:
        raise LogError(f"{path}: can't be read: {bad}") from bad
