"""Role of a worker: prompts and answers may be computed by different workers."""

from typing import Literal, TypeAlias

Role: TypeAlias = Literal["both", "prefill", "decode"]
