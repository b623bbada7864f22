"""Commands of ``kvyard`` in a test's own process."""

from __future__ import annotations

from typing import Any

import pytest

from kvyard.cli.app import main


def exit_code(*argv: object, **options: Any) -> int | str | None:
    """The exit code of ``kvyard`` with these arguments."""
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, argv)], **options)
    return exit_.value.code
