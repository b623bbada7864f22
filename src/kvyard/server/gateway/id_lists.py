"""Lists of token ids as JSON, read piece by piece: a long one at once would hold the loop."""

import msgspec

_DECODE_IDS = msgspec.json.Decoder(list[int]).decode


def cut_ids(raw: bytes, size: int) -> list[bytes | memoryview]:
    """Cut a JSON list of numbers, without its brackets, into pieces of about ``size`` bytes that each begin with a comma, but
    for the first.
    """
    view = memoryview(raw)
    pieces: list[bytes | memoryview] = []
    begin, end = 1, len(raw) - 1
    while (cut := raw.find(b",", begin + size, end)) >= 0:
        pieces.append(view[begin:cut])
        begin = cut
    pieces.append(view[begin:end])
    return pieces


def read_ids(piece: bytes | memoryview) -> list[int]:
    """Return the ids of a piece. Raises ``MsgspecError`` for what is no list of whole numbers."""
    text = bytes(piece)
    return _DECODE_IDS(b"[%b]" % (text[1:] if text[:1] == b"," else text))
