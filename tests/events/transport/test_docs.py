"""The examples in the documentation run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytestmark = pytest.mark.zmq

PAGE = Path(__file__).parents[3] / "docs" / "explain" / "event-streams.md"


def test_examples_of_the_page() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert examples
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
