"""What commands that serve or ask over HTTP share: the bearer token, the log, and a warning about open doors."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

TOKEN_VARIABLE = "KVYARD_TOKEN"

Verbose = Annotated[bool, typer.Option("--verbose", help="Say more on stderr; never what a request says.")]


def read_token(file: str | Path | None, variable: str | None = TOKEN_VARIABLE) -> str | None:
    """The token in ``file``, or in the environment without one; ``None`` where neither is. Raises ``KvyardError``."""
    from kvyard.server.indexer.config import check_token_text
    from kvyard.server.indexer.config import read_token as read

    if file is not None:
        return read(str(file))
    if variable is not None and variable in os.environ:
        return check_token_text(os.environ[variable], variable)
    return None


def log_to_stderr(verbose: bool) -> None:
    """Log warnings, or with ``verbose`` what goes on too."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def warn_if_open(host: str, token: str | None) -> None:
    """Say so where others than this machine can use a server without a token."""
    from kvyard.server.running import is_loopback

    if token is None and not is_loopback(host):
        typer.echo(f"warning: everybody who reaches {host} can use this: set a token with --token-file", err=True)
