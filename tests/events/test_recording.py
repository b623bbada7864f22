"""Recordings: what goes in comes out, whatever it was; a file cut short is read up to the cut; others are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.errors import KvyardError
from kvyard.events.recording import MAGIC, About, Recorded, Recording, RecordingWriter
from kvyard.events.transport.frames import Frame

MESSAGES = st.lists(st.tuples(st.integers(0, 1 << 62), st.lists(st.binary(max_size=50), min_size=1, max_size=4)))


@pytest.mark.parametrize("name", ["a.kvev", "a.kvev.gz"])
def test_round_trip(tmp_path, name):
    about = About(endpoint="tcp://h:1", topic="kv@", started=123)
    with RecordingWriter(tmp_path / name, about) as writer:
        writer.write(5, [b"t", (7).to_bytes(8, "big"), b"p"])
        writer.write(9, [b"nonsense"] * 5)
    recording = Recording(tmp_path / name)
    first, second = recording
    assert recording.about == about and not recording.truncated and not recording.is_json
    assert first.frame() == Frame(b"t", 7, b"p") and first.at == 5
    assert second.frame() == "a message of 5 frames instead of 3"
    assert list(recording) == [first, second], "it can be read again"


@given(messages=MESSAGES, data=st.data())
def test_a_cut_costs_what_is_behind_it(messages, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "r"
    with RecordingWriter(path, About()) as writer:
        for at, parts in messages:
            writer.write(at, parts)
    whole = path.read_bytes()
    head = whole.index(b"\n", len(MAGIC)) + 1
    path.write_bytes(whole[: data.draw(st.integers(head, len(whole)))])
    recording = Recording(path)
    read = list(recording)
    assert read == [Recorded(at, parts) for at, parts in messages][: len(read)]
    assert recording.truncated or path.stat().st_size in (len(whole), *_ends(whole, head))


def _ends(whole: bytes, at: int) -> list[int]:
    ends = [at]
    while at < len(whole):
        at += 4 + int.from_bytes(whole[at : at + 4], "big")
        ends.append(at)
    return ends


def test_compressed_and_cut(tmp_path):
    path = tmp_path / "r.gz"
    with RecordingWriter(path, About()) as writer:
        for at in range(1000):
            writer.write(at, [bytes([at % 251]) * 50])
    path.write_bytes(path.read_bytes()[:-20])
    recording = Recording(path)
    assert 0 < len(list(recording)) <= 1000 and recording.truncated


def test_json_lines(tmp_path):
    path = tmp_path / "drains.jsonl"
    path.write_text('[{"event_id": 0, "data": {"type": "created"}}]\n\n[]\n')
    recording = Recording(path)
    assert recording.is_json and [message.bare for message in recording][1] == b"[]"


def test_refusals(tmp_path):
    path = tmp_path / "r"
    with pytest.raises(KvyardError, match="can't read"):
        Recording(path)
    path.write_text("hello")
    with pytest.raises(KvyardError, match="neither a recording"):
        Recording(path)
    with pytest.raises(KvyardError, match="exists"):
        RecordingWriter(path, About())
    with pytest.raises(KvyardError, match="can't write"):
        RecordingWriter(tmp_path / "no" / "such" / "place", About())
    path.write_bytes(MAGIC + b"oh\n")
    with pytest.raises(KvyardError, match="second line"):
        Recording(path)
    path.write_bytes(MAGIC + b"{}\n" + b"\xff" * 8)
    with pytest.raises(KvyardError, match="claims"):
        list(Recording(path))
    path.write_bytes(MAGIC + b"{}\n" + (2).to_bytes(4, "big") + b"\x93\x01")
    with pytest.raises(KvyardError, match="damaged at message 1"):
        list(Recording(path))
