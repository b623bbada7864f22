"""Facts of a trace about a request besides its tokens, for eviction policies that use them; and its hints.

Its category is made of model, adapter and priority; its turn is counted where the trace has sessions. For the oracle there
is also the future: which request uses each part of the prompt next. That takes the whole trace at once.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from msgspec.structs import replace

from kvyard.blocks import NO_HINTS, BlockManager, Hints
from kvyard.blocks.use import RequestFacts
from kvyard.replay.traces.identity import prefix_ids, token_ids
from kvyard.replay.traces.request import TraceRequest

NextUses = tuple[tuple[int, int], ...]


class TraceFacts:
    """Facts of the requests of one trace, asked for in the order in which they are dispatched."""

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}
        self._next_uses: dict[str, NextUses] = {}

    def foresee(self, rows: Sequence[TraceRequest], block_size: int) -> None:
        """Look at the whole trace, for engines with blocks of ``block_size`` tokens."""
        self._numbers = {row.id: number for number, row in enumerate(rows)}
        self._next_uses = next_uses(rows, block_size)

    def of(self, row: TraceRequest) -> RequestFacts:
        """Return the facts of ``row``, which is dispatched now. Asked again, as after a worker's failure, the turn counts
        on."""
        turn = 0
        if row.session is not None:
            self._turns[row.session] += 1
            turn = self._turns[row.session]
        parts = (row.model, row.lora, str(row.priority) if row.priority else None)
        category = "/".join(part for part in parts if part is not None)
        return RequestFacts(category, turn, self._numbers.get(row.id, -1), self._next_uses.get(row.id, ()))


def next_uses(rows: Sequence[TraceRequest], block_size: int) -> dict[str, NextUses]:
    """By request, ``RequestFacts.next_uses``. Ids are cumulative, so what comes later in a prompt is used again no earlier."""
    uses: dict[str, NextUses] = {}
    following: dict[Hashable, int] = {}
    for number in range(len(rows) - 1, -1, -1):
        row = rows[number]
        ids, per_id = prefix_ids(row, block_size)
        if not ids:
            continue
        own: Sequence[int] = ids
        length = row.input_length
        if row.ids is None and row.tokens is not None and row.output_tokens:
            own = token_ids([*row.tokens, *row.output_tokens], per_id)
            length += len(row.output_tokens)
        space = (row.lora, row.salt)
        runs: list[tuple[int, int]] = []
        for index, name in enumerate(own):
            after = following.get((space, name))
            if after is None:
                break
            if runs and runs[-1][1] == after:
                runs.pop()
            runs.append((min((index + 1) * per_id, length), after))
        uses[row.id] = tuple(runs)
        following.update(_named(space, ids, number))
    return uses


def _named(space: Hashable, ids: Iterable[int], number: int) -> Iterable[tuple[Hashable, int]]:
    return (((space, name), number) for name in ids)


def hints_of(row: TraceRequest) -> Hints:
    """Return the hints of a row, with the name of its session in any case: engines note whose blocks are whose."""
    if row.session is None or row.hints.session:
        return row.hints
    return replace(row.hints, session=row.session)


def heeded(hints: Hints, manager: BlockManager) -> Hints:
    """Return the part of ``hints`` that the engine of ``manager`` heeds."""
    if hints is NO_HINTS or manager.hints:
        return hints
    if manager.keeps_by_priority and hints.retention:
        return Hints(retention=hints.retention)
    return NO_HINTS
