"""Summaries of LMCache's and production-stack's multi-round-qa benchmark: CSV with one row a question.

Users are sessions: a question is asked after the answer to the one before it, plus the recorded pause. A prompt is the whole
conversation, so it begins with the prompt before. What users share isn't in the file, and they share nothing here. Rows come
by user and not by time: all are read, and then put in order.
"""

from collections.abc import Iterator

import msgspec

from kvyard.clock import SECOND
from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.formats.agents import RecordedTurn, weave
from kvyard.replay.traces.formats.growing import GrowingPrompts, check_prompt
from kvyard.replay.traces.formats.table import Fields, integer, read_table, real
from kvyard.replay.traces.reading import Reading, checked_lengths, ns
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

COLUMNS = ("prompt_tokens", "generation_tokens", "user_id", "question_id", "launch_time", "finish_time")


class _Question(msgspec.Struct, gc=False):
    turn: RecordedTurn
    input: int
    output: int


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a pass, in order of their launch."""
    questions: dict[str, _Question] = {}

    def row(number: int, fields: Fields) -> None:
        lengths = integer(fields, "prompt_tokens"), integer(fields, "generation_tokens")
        checked_lengths(*lengths, ("prompt_tokens", "generation_tokens"))
        check_prompt(lengths[0])
        start = ns(real(fields, "launch_time"), SECOND, "launch_time")
        end = ns(real(fields, "finish_time"), SECOND, "finish_time")
        if end < start:
            raise BadRow("finish_time is before launch_time")
        user = fields["user_id"].strip()
        if not user:
            raise BadRow("user_id is empty")
        name = reading.name(number)
        questions[name] = _Question(RecordedTurn(name, user, start, end), *lengths)

    for _ in read_table(reading, COLUMNS, row):
        pass
    prompts = GrowingPrompts(reading.block_size)
    before: dict[str, int] = {}
    for turn, waits in weave(question.turn for question in questions.values()):
        question = questions.pop(turn.id)
        # A prompt that got shorter is another conversation: a user's number was given twice.
        kept = before.get(turn.session, 0)
        ids = prompts.ids(turn.session, question.input, kept if question.input >= kept else 0)
        before[turn.session] = question.input
        yield TraceRequest(
            turn.id,
            reading.arrive(turn.start) if waits.delay is None else reading.offset(turn.start),
            question.input,
            question.output,
            ids,
            prompts.block_size,
            session=turn.session,
            delay=waits.delay,
        )


FORMAT = Format(
    name="multi_round_qa",
    summary="Summary CSV of multi-round-qa (LMCache, production-stack): users ask in rounds; lengths, times.",
    recognise=lambda head: set(COLUMNS) <= set(head.columns),
    read=read,
)
