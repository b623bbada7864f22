"""Requests, good, odd and bad, with what a real vLLM answered; and answers in a form that two servers can be compared by.

``vectors/vllm_corpus.json`` has both. What was generated isn't compared, nor are ids, times and words of errors: status,
content type, the fields of bodies and their types, errors' ``type``, ``param`` and ``code``, the order of chunks, usage and
names of metrics are.
``tests/real/test_mock.py`` sends the corpus to a real engine again, and writes the file where it is told to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).with_name("vectors")
CORPUS = HERE / "vllm_corpus.json"
DIFFERENCES = HERE / "vllm_differences.json"
TOKENIZER = HERE / "tiny_tokenizer.json"
"""As ``scripts/tiny_models.py`` makes it; what it learned from is our copy of the Apache licence."""
MODEL, LORAS, LONGEST, BLOCK_SIZE = "tiny", ("lora-a", "lora-b"), 4096, 32
"""The engine that was asked."""

# Values that are compared; of all others only the type is.
_KEPT = {
    *("object", "finish_reason", "stop_reason", "role", "index", "prompt_tokens", "completion_tokens", "total_tokens"),
    *("model", "count", "max_model_len", "parent", "echo", "tokens", "type", "status", "input_tokens", "output_tokens"),
}
_MADE = {"bytes", "top_logprobs", "text_offset"}
"""Fields that go by what was generated."""
_LONG = {"$long": [5] * 5000, "$longtext": "so " * 6000, "$all": list(range(1024))}
_ID = re.compile(r"^(cmpl|chatcmpl|chatcmpl-tool|modelperm|resp|msg)[-_](?!my-own)[-\w]+$")


def read_corpus() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CORPUS.read_text())
    return found


def write_corpus(corpus: Mapping[str, Any]) -> None:
    """One request a line, so that a change is a readable diff."""
    lines = ",\n".join(json.dumps(one) for one in corpus["requests"])
    CORPUS.write_text(f'{{"source": {json.dumps(corpus["source"])}, "requests": [\n{lines}\n]}}\n')


def send(client: httpx.Client, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send one request of the corpus. Returns the answer as it is compared."""
    headers = dict(request.get("headers", {}))
    content: bytes | None = None
    if "text" in request:
        content = request["text"].encode()
    elif "body" in request:
        headers.setdefault("content-type", "application/json")
        content = json.dumps(_long(request["body"])).encode()
    reply = client.request(request["method"], request["path"], headers=headers, content=content)
    return view(reply)


def _long(value: Any) -> Any:
    """Prompts that would be too long to write down."""
    if isinstance(value, str):
        return _LONG.get(value, value)
    if isinstance(value, dict):
        return {name: _long(one) for name, one in value.items()}
    return [_long(one) for one in value] if isinstance(value, list) else value


def view(reply: httpx.Response) -> dict[str, Any]:
    """An answer, less what differs from one run to the next."""
    kind = reply.headers.get("content-type", "").partition(";")[0]
    found: dict[str, Any] = {"status": reply.status_code, "type": kind}
    if "allow" in reply.headers:
        found["allow"] = sorted(reply.headers["allow"].split(", "))
    path = reply.request.url.path
    if kind == "text/event-stream":
        found["stream"] = _stream(reply.text)
    elif path == "/metrics" and reply.text:
        found["families"] = _families(reply.text)
    elif path == "/openapi.json":
        pass
    elif kind == "application/json" and reply.text:
        value = reply.json()
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            found["error"] = _error(value["error"])
            found["message"] = str(value["error"].get("message"))[:200]
        else:
            found["body"] = _shape(value)
    else:
        found["text"] = reply.text[:100]
    return found


def _shape(value: Any, name: str = "") -> Any:
    """Fields and types of a value, and the values that are compared."""
    if name in _MADE or (name == "tokens" and value and isinstance(value, list) and isinstance(value[0], str)):
        return "made"
    if name == "id" and isinstance(value, str):
        return _ID.sub(r"\1", value)
    if name == "stop_reason" and value is not None:
        return type(value).__name__
    if isinstance(value, dict):
        return {key: _shape(one, key) for key, one in sorted(value.items())}
    if isinstance(value, list):
        shapes = [_shape(one, name if name in _KEPT else "") for one in value]
        if name in _KEPT or name in ("choices", "data"):
            return shapes
        return {"count": len(shapes), "of": shapes[-1] if shapes else None}
    if name in _KEPT:
        return value
    return "null" if value is None else "number" if isinstance(value, float) else type(value).__name__


def _stream(text: str) -> dict[str, Any]:
    """Chunks by choice: the first with a role, one in the middle, the last. How many there are is a matter of timing."""
    if text.startswith("event: "):
        return _named_stream(text)
    events = text.split("\n\n")
    framed = events[-1] == "" and all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
    choices: dict[str, dict[str, Any]] = {}
    tail: list[Any] = []
    for event in events[:-1]:
        if event == "data: [DONE]":
            tail.append("[DONE]")
            continue
        chunk = json.loads(event.removeprefix("data: "))
        shape = _shape(chunk)
        if not chunk.get("choices"):
            tail.append({"error": _error(chunk["error"])} if "error" in chunk else shape)
            continue
        if isinstance(shape.get("usage"), dict):
            shape["usage"] = sorted(shape["usage"])  # as far as it got
        (choice,) = shape["choices"]
        for made in ("token_ids", "logprobs"):
            if choice.get(made) not in (None, "null"):
                choice[made] = "some"
        found = choices.setdefault(str(choice["index"]), {})
        prompt = choice.pop("prompt_token_ids", None)
        if not found:
            found["prompt_token_ids"] = prompt
        if "role" in choice.get("delta", {}):
            found["role"] = shape
        else:
            assert "last" not in found, "something follows the last chunk"
            found["middle" if choice["finish_reason"] is None else "last"] = shape
    return {"framed": framed, "choices": choices, "tail": tail}


def _named_stream(text: str) -> dict[str, Any]:
    """Events that have names: their order, those that repeat once, and the last of each."""
    events = text.split("\n\n")
    order: list[str] = []
    last: dict[str, Any] = {}
    for event in events[:-1]:
        name, data = re.fullmatch(r"event: (\S+)\ndata: (.*)", event).groups()  # type: ignore[union-attr]
        if not order or order[-1] != name:
            order.append(name)
        last[name] = _shape(json.loads(data))
    return {"framed": events[-1] == "", "order": order, "events": last}


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one if name != "message" else "str" for name, one in error.items()}


def _families(text: str) -> dict[str, str]:
    """Names of metrics with their types; what a library or the system adds is left out."""
    found = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    return {name: kind for name, kind in sorted(found) if name.startswith("vllm:")}


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two views differ: the place, and both values. Words of messages are no promise, and where a stream was so fast
    that all came at once there is no chunk in the middle.
    """
    if path == "message" or (path.endswith(".middle") and "(missing)" in (ours, theirs)):
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from differences(
                ours.get(key, "(missing)"), theirs.get(key, "(missing)"), f"{path}.{key}" if path else key
            )
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(one, other, f"{path}[{number}]")
    elif ours != theirs:
        yield path, ours, theirs
