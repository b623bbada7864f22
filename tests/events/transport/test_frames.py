"""Frames: what goes where in a message, and that nothing that arrives raises."""

from hypothesis import example, given
from hypothesis import strategies as st

from kvyard.events.transport import frames
from kvyard.events.transport.frames import Frame, ReplyKind, StreamHead, read_live, read_reply

SEQ = (7).to_bytes(8, "big")
PARTS = st.lists(
    st.one_of(st.binary(max_size=20), st.sampled_from([b"", SEQ, frames.HEAD_WORD, frames.PART_WORD, b"\xff" * 8])),
    max_size=6,
)


def test_live():
    frame = Frame(b"t", 7, b"p")
    assert frame.parts() == [b"t", SEQ, b"p"] and read_live(frame.parts()) == frame
    assert read_live([b"t", SEQ]) == "a message of 2 frames instead of 3"
    assert read_live([b"t", b"123", b"p"]) == "a sequence of 3 bytes instead of 8"
    assert "out of range" in read_live([b"t", b"\xff" * 8, b"p"])


def test_replay_with_and_without_topic():
    """vLLM since 0.23 has the topic, SGLang and older vLLM don't."""
    assert read_reply(frames.reply_parts(b"t", 7, b"p")) == frames.Reply(ReplyKind.BATCH, b"t", 7, b"p")
    assert read_reply([b"", SEQ, b"p"]) == frames.Reply(ReplyKind.BATCH, None, 7, b"p")
    assert read_reply(frames.end_reply()) == read_reply([b"", b"\xff" * 8, b""]) == frames.Reply(ReplyKind.END)


def test_requests_are_numbers_that_no_sequence_reaches():
    """vLLM reads whatever it is asked as a number, and answers with what lies at or beyond it."""
    assert frames.request(7) == [b"", SEQ]
    for word in (frames.HEAD_WORD, frames.SNAPSHOT_WORD):
        assert frames.request(word) == [b"", word]
        assert int.from_bytes(word, "big") > 1 << 64 and int.from_bytes(word[:8], "big") > 1 << 62
        assert len(word) != 8


def test_heads():
    head = StreamHead(epoch=1 << 60, seq=-1, digest=(1 << 64) - 1, first=None, parts=3)
    reply = read_reply(frames.reply_parts(b"t", frames.SNAPSHOT_WORD, frames.write_head(head)))
    assert (reply.kind, reply.head, reply.topic) == (ReplyKind.HEAD, head, b"t")
    assert read_reply(frames.reply_parts(b"t", frames.PART_WORD, b"p")) == frames.Reply(
        ReplyKind.PART, b"t", payload=b"p"
    )
    assert "can't be read" in read_reply([b"", b"t", frames.HEAD_WORD, b"\xc1"])


@given(parts=PARTS)
@example(parts=[b"", b"t", frames.HEAD_WORD, b"\x81\xa5epoch\xa1x"])
def test_nothing_raises(parts):
    assert isinstance(read_live(parts), Frame | str)
    assert isinstance(read_reply(parts), frames.Reply | str)


@given(payloads=st.lists(st.binary(max_size=8), max_size=6), other=st.lists(st.binary(max_size=8), max_size=6))
def test_the_digest_speaks_for_all_payloads(payloads, other):
    def digest(items: list[bytes]) -> int:
        value = 0
        for item in items:
            value = frames.chained(value, frames.fingerprint(item))
        return value

    assert (digest(payloads) == digest(other)) == (payloads == other)
