"""What a worker does of a request. Prompts and answers may be computed by different workers; today every worker does both."""

from typing import Literal, TypeAlias

Role: TypeAlias = Literal["both", "prefill", "decode"]
