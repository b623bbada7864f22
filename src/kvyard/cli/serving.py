"""What commands that serve or ask over HTTP share: the bearer token, the log, and a warning about open doors."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from kvyard.errors import KvyardError

TOKEN_VARIABLE = "KVYARD_TOKEN"

Verbose = Annotated[bool, typer.Option("--verbose", help="Say more on stderr; never what a request says.")]


def read_token(file: str | Path | None, variable: str | None = TOKEN_VARIABLE) -> str | None:
    """The token in ``file``, or in the environment without one; ``None`` where neither is. Raises ``KvyardError``."""
    if file is not None:
        try:
            token, where = Path(file).read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise KvyardError(f"can't read the token in {file}: {why}") from None
    elif variable is not None and variable in os.environ:
        token, where = os.environ[variable], variable
    else:
        return None
    if not token or len(token) > 4096 or not token.isascii() or not token.isprintable() or " " in token:
        raise KvyardError(f"{where} holds no token: write one line of printable characters without spaces")
    return token


def log_to_stderr(verbose: bool) -> None:
    """Log warnings, or with ``verbose`` what goes on too."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def warn_if_open(host: str, token: str | None) -> None:
    """Say so where others than this machine can use a server without a token."""
    from kvyard.server.running import is_loopback

    if token is None and not is_loopback(host):
        typer.echo(f"warning: everybody who reaches {host} can use this: set a token with --token-file", err=True)
