"""What commands that serve or ask over HTTP share: the bearer token, the log, and a warning about open doors."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvyard.cli.settings import Command, parameter, with_group
from kvyard.errors import KvyardError

TOKEN_VARIABLE = "KVYARD_TOKEN"

Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]
Lora = Annotated[str | None, typer.Option(help="The adapter's name.")]
Salt = Annotated[str | None, typer.Option(help="The cache salt.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say more on stderr; never what a request says.")]


def with_prompt(tokenizer: str = "The model's tokenizer.json.") -> Callable[[Command], Command]:
    """Gives a command the ways to give a prompt. It gets them as one mapping, ``prompt``: arguments of ``gather_prompt``."""
    return with_group(
        "prompt",
        parameter("tokens", str | None, typer.Option(help="The prompt's token ids, with commas or spaces between.")),
        parameter("tokens_file", Path | None, typer.Option(help="A file with token ids: a JSON list, or numbers.")),
        parameter("text", str | None, typer.Option(help="The prompt's text, after the chat template.")),
        parameter("text_file", Path | None, typer.Option(help="A file with that text.")),
        parameter("tokenizer_file", Path | None, typer.Option("--tokenizer", help=tokenizer)),
        parameter("special", bool, typer.Option(help="Let the tokenizer add its special tokens."), default=True),
    )


def pairs(endpoints: list[str], replays: list[str] | None) -> list[tuple[str, str | None]]:
    """Endpoints with their replay endpoints. Raises ``KvyardError`` where these don't fit each other."""
    if not replays:
        return [(one, None) for one in endpoints]
    if len(replays) != len(endpoints):
        raise KvyardError(f"{len(endpoints)} endpoints and {len(replays)} replay endpoints: give one for each, or none")
    return list(zip(endpoints, replays, strict=True))


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
    """Log warnings, or with ``verbose`` what goes on too; each kind of line a few times within some seconds."""
    from kvyard.server.log_limit import LogLimit

    level = logging.INFO if verbose else logging.WARNING
    handler = logging.StreamHandler()
    handler.addFilter(LogLimit())
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler])


def warn_if_open(host: str, token: str | None) -> None:
    """Say so where others than this machine can use a server without a token."""
    from kvyard.server.running import is_loopback

    if token is None and not is_loopback(host):
        typer.echo(f"warning: all who reach {host} can use this: set a token with --token-file", err=True)
