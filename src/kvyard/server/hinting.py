"""Hints as requests give them, by the names that engines have for them.

| whose | name | read as |
|---|---|---|
| vLLM 0.32 | ``session_id``, header ``X-Session-ID``, ``vllm_xargs.session_id`` | whose session it is |
| vLLM, pull request 38514 | ``retention_directives``, ``retention_scope`` | ranges of tokens; whose session |
| vLLM, issue 52113 | ``agent_hint.cache_control.ttl``, ``agent_hint.session_id`` | time to live; whose session |
| SGLang | ``session_id``, ``POST /close_session`` | whose session; its end |
| Dynamo | ``nvext.cache_control.ttl``, header ``X-Dynamo-Session-ID`` | time to live; whose session |
| kvyard | ``cache_control.then`` | ``first``: evicted before all others once its time to live is over |
| Dynamo | ``nvext.session_control`` with ``session_id`` and ``action`` | whose session; ``close``: its end |
| Dynamo | ``nvext.agent_hints.priority`` | a priority for all tokens, counted from the usual one |
| TensorRT-LLM | ``kv_cache_retention_config`` | ranges of tokens, and the answer |
"""

import re
from collections.abc import Mapping

import msgspec
import xxhash

from kvyard.blocks import NO_HINTS, ConfigError, Hints, Retention
from kvyard.blocks.extent import DEFAULT_PRIORITY
from kvyard.clock import MS, SECOND
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.openai import CacheControl, HintFields
from kvyard.server.http import Refusal

LONGEST_SESSION = 256
"""Characters of a session's name that are kept as they are."""
USUAL_TTL = 300
"""Seconds by default: five minutes, in Anthropic's API and in those made after it."""
_TIME = re.compile(r"([0-9]{1,6})(s|m|h)", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600}
MOST_SECONDS = 10**7


class AskedHints(msgspec.Struct, frozen=True):
    """The hints of a request, apart from what its answer is worth, which begins where a prompt ends."""

    hints: Hints = NO_HINTS
    answer: Retention | None = None

    def of(self, prompt_tokens: int) -> Hints:
        """Return the hints for a prompt of ``prompt_tokens`` tokens."""
        if self.answer is None:
            return self.hints
        wish = msgspec.structs.replace(self.answer, start=prompt_tokens)
        return msgspec.structs.replace(self.hints, retention=(*self.hints.retention, wish))


NOTHING_ASKED = AskedHints()


def peek_hints(body: bytes, headers: Mapping[str, str], prompt_tokens: int) -> Hints:
    """Return the hints of a request that is only passed on; none where they make no sense, which its engine will say."""
    try:
        return read_hints(msgspec.json.decode(body, type=HintFields), headers).of(prompt_tokens)
    except (Refusal, *DECODE_ERRORS):
        return NO_HINTS


def read_hints(body: HintFields, headers: Mapping[str, str]) -> AskedHints:
    """Read the hints of ``body`` and ``headers``. Raises ``Refusal`` for contradictions."""
    session, ends = _session(body, headers), False
    nvext, config = body.nvext, body.kv_cache_retention_config
    control = body.agent_hint.cache_control if body.agent_hint is not None else None
    field = "agent_hint"
    if nvext is not None:
        field = "nvext"
        control = nvext.cache_control or control
        ends = nvext.session_control is not None and nvext.session_control.action == "close"
    answer = None
    try:
        hints = Hints(session, ends, None if control is None else _ttl(control), retention=_ranges(body))
        if control is not None:
            hints = msgspec.structs.replace(hints, ttl_then=control.then)
        if config is not None and config.decode_retention_priority is not None:
            answer = Retention(0, None, config.decode_retention_priority, _duration(config.decode_duration_ms, MS))
    except ConfigError as wrong:
        raise Refusal(400, f"{wrong}.", field=field if control is not None or ends else _place(body)) from None
    if hints == NO_HINTS and answer is None:
        return NOTHING_ASKED
    return AskedHints(hints, answer)


def _session(body: HintFields, headers: Mapping[str, str]) -> str:
    """Return the name of the session, by the first that says one."""
    control = body.nvext.session_control if body.nvext is not None else None
    extra = (body.vllm_xargs or {}).get("session_id")
    name = (
        body.session_id
        or headers.get("x-session-id")
        or (extra if isinstance(extra, str) else None)
        or (control.session_id if control is not None else None)
        or headers.get("x-dynamo-session-id")
        or body.retention_scope
        or (body.agent_hint.session_id if body.agent_hint is not None else None)
        or ""
    )
    return session_name(name)


def session_name(name: str) -> str:
    """Return the internal name of a session: a long name is replaced by its hash. Raises ``Refusal`` for one with a NUL in
    it."""
    if "\0" in name:
        raise Refusal(400, "a session's name must not have a NUL in it.")
    return name if len(name) <= LONGEST_SESSION else xxhash.xxh3_128_hexdigest(name.encode())


def _ranges(body: HintFields) -> tuple[Retention, ...]:
    ranges: list[Retention] = []
    hints = body.nvext.agent_hints if body.nvext is not None else None
    if hints is not None and hints.priority is not None:
        ranges.append(Retention(0, None, max(0, min(100, DEFAULT_PRIORITY + hints.priority))))
    for directive in body.retention_directives or ():
        ranges.append(
            Retention(directive.start, directive.end, directive.priority, _duration(directive.duration, SECOND))
        )
    if body.kv_cache_retention_config is not None:
        for part in body.kv_cache_retention_config.token_range_retention_configs:
            ranges.append(Retention(part.token_start, part.token_end, part.priority, _duration(part.duration_ms, MS)))
    return tuple(ranges)


def _place(body: HintFields) -> str:
    return "retention_directives" if body.retention_directives else "kv_cache_retention_config"


def _duration(given: float | None, unit: int) -> int | None:
    if given is None:
        return None
    if not 0 <= given * unit < MOST_SECONDS * SECOND:
        raise ConfigError(f"a retention lasts from 0 to {MOST_SECONDS} seconds, not {given:g}")
    return round(given * unit)


def _ttl(control: CacheControl) -> int:
    ttl = USUAL_TTL if control.ttl is None else control.ttl
    if isinstance(ttl, str):
        match = _TIME.fullmatch(ttl)
        if match is None:
            raise ConfigError(f"cache_control.ttl is a time such as 30s, 5m or 1h, not {ttl[:40]!r}")
        ttl = int(match[1]) * _UNITS[match[2]]
    if not 0 < ttl < MOST_SECONDS:
        raise ConfigError(f"cache_control.ttl is above 0 and below {MOST_SECONDS} seconds, not {ttl:g}")
    return round(ttl * SECOND)
