"""What an answer says of its tokens."""

from __future__ import annotations

from kvyard.server.gateway.traffic import AnswerTokens, answer_tokens


def test_usage_is_read_from_the_end() -> None:
    whole = b'{"choices":[{"text":"\\"usage\\": {\\"cached_tokens\\": 9}"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
    assert answer_tokens(whole) == AnswerTokens(5, 2, None)
    detailed = b'"usage": {"prompt_tokens" : 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}'
    assert answer_tokens(detailed) == AnswerTokens(5, 2, 3)
    stream = b'data: {"usage":null}\n\ndata: {"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    assert answer_tokens(stream) == AnswerTokens(7, 1, None)
    assert answer_tokens(b"") == answer_tokens(b'{"usage":null}') == AnswerTokens()
    for strange in (b"9223372036854775807", b"1.5", b"1e9", b"-1"):
        assert answer_tokens(b'{"usage":{"prompt_tokens":%s,"completion_tokens":2}}' % strange) == AnswerTokens(None, 2)
