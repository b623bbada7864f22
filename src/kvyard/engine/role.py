"""What a worker does of a request. Prompts and answers may be computed by different workers; today every worker does both."""

from __future__ import annotations

from typing import Literal, TypeAlias

Role: TypeAlias = Literal["both", "prefill", "decode"]
