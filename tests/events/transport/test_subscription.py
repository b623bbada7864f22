"""Sorting what arrives into streams: topics, strangers and nonsense."""

from kvyard.events.transport import subscription as module
from kvyard.events.transport.frames import Frame, end_reply, reply_parts
from kvyard.events.transport.state import State
from kvyard.events.transport.subscription import Subscription
from kvyard.events.types import EventBatch, Stored
from kvyard.events.wire import encode


def payload(key: int) -> bytes:
    event = Stored(hashes=[key], parent=None, tokens=[key], block_size=1)
    return encode(EventBatch(stream="", seq=0, events=[event], ts=float(key)))


def live(subscription: Subscription, topic: bytes, seq: int) -> None:
    subscription.message(Frame(topic, seq, payload(seq)).parts(), 0)


def test_a_stream_per_topic():
    subscription = Subscription("s", source=False)
    assert subscription.state == State.STALE and subscription.due is None
    for seq in range(3):
        live(subscription, b"a", seq)
        live(subscription, b"b", seq)
    assert [status.counters.batches for status in subscription.statuses()] == [3, 3]
    assert subscription.state == State.FRESH
    live(subscription, b"b", 7)
    assert subscription.state == State.CATCHING_UP, "the worst counts"


def test_the_first_answer_names_the_stream():
    subscription = Subscription("s", source=True)
    subscription.start(0)
    (number,) = subscription.requests
    subscription.reply(number, end_reply(), 0)  # knows no snapshots
    (number,) = subscription.requests
    subscription.reply(number, reply_parts(b"a", 0, payload(0)), 0)
    subscription.reply(number, end_reply(), 0)
    assert subscription.state == State.FRESH and not subscription.requests
    live(subscription, b"a", 1)
    (status,) = subscription.statuses()
    assert (status.topic, status.seq) == ("a", 1)
    live(subscription, b"b", 4)
    assert len(subscription.statuses()) == 2 and len(subscription.requests) == 1


def test_answers_about_others_are_none():
    subscription = Subscription("s", source=True, prefix="b")
    subscription.start(0)
    for _ in range(2):
        (number,) = subscription.requests
        subscription.reply(number, reply_parts(b"a", 0, payload(0)), 0)
        subscription.reply(number, end_reply(), 0)
    (status,) = subscription.statuses()
    assert status.counters.foreign == 2 and status.counters.batches == 0


def test_nonsense_is_counted():
    subscription = Subscription("s", source=True)
    subscription.start(0)
    subscription.message([b"only", b"two"], 0)
    subscription.reply(1, [b"x"], 0)
    subscription.reply(99, end_reply(), 0)
    counters = subscription.counters
    assert (counters.malformed, counters.malformed_replies) == (1, 1)
    assert counters.last_malformed == "a reply of 1 frames"


def test_topics_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_TOPICS", 2)
    subscription = Subscription("s", source=False)
    for topic in (b"a", b"b", b"c"):
        live(subscription, topic, 0)
    assert subscription.counters.too_many_topics == 1 and len(subscription.statuses()) == 2
