"""Shared options of commands that serve or query over HTTP: bearer token, log, and a warning about servers without a token."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

import msgspec
import typer

from kvyard.cli.app import OUTPUT
from kvyard.cli.settings import Command, parameter, with_group
from kvyard.errors import KvyardError
from kvyard.files import check_outputs, encode_json, is_regular, write_whole

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TOKEN_VARIABLE = "KVYARD_TOKEN"
ADMIN_VARIABLE = "KVYARD_ADMIN_TOKEN"

Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.", rich_help_panel=OUTPUT)]
Lora = Annotated[str | None, typer.Option(help="The adapter's name.")]
Salt = Annotated[str | None, typer.Option(help="The cache salt.")]
TlsCert = Annotated[str | None, typer.Option(help="Certificate (PEM), to serve HTTPS.")]
TlsKey = Annotated[str | None, typer.Option(help="Private key of --tls-cert (PEM).")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more on stderr, but never the text of requests.")]

ReadyFile = Annotated[
    Path | None,
    typer.Option(help="JSON file with pid and urls that exists while requests are answered.", rich_help_panel=OUTPUT),
]
PortFile = Annotated[
    Path | None,
    typer.Option(help="File like --ready-file with the ports alone, one per line.", rich_help_panel=OUTPUT),
]


class Announced:
    """Files that announce a server's address. They exist from ``ready`` to the end of the ``with`` block."""

    def __init__(self, ready_file: Path | None, port_file: Path | None) -> None:
        """Raises ``KvyardError`` if they can't be written."""
        check_outputs(ready_file, port_file)
        self._files = [path for path in (ready_file, port_file) if path is not None]
        self._ready_file, self._port_file = ready_file, port_file

    def ready(self, urls: list[str], **more: object) -> None:
        """Write the files. ``more`` goes into the JSON beside ``pid`` and ``urls``."""
        if self._port_file is not None:
            write_whole(self._port_file, "".join(f"{urlsplit(url).port}\n" for url in urls))
        if self._ready_file is not None:
            value = {"pid": os.getpid(), "urls": urls, **more}
            write_whole(self._ready_file, msgspec.json.format(encode_json(value), indent=2) + b"\n")

    def __enter__(self) -> Self:
        self._remove()  # a file left by a killed server would announce a server that is gone
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for path in self._files:
            if is_regular(path):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.realpath(path))


def with_prompt(tokenizer: str = "The model's tokenizer.json.") -> Callable[[Command], Command]:
    """Add the options for a prompt to a command, which receives them as one mapping, ``prompt``, for ``gather_prompt``."""
    return with_group(
        "prompt",
        parameter("tokens", str | None, typer.Option(help="Token ids of the prompt, separated by commas or spaces.")),
        parameter("tokens_file", Path | None, typer.Option(help="File with token ids: a JSON list, or numbers.")),
        parameter("text", str | None, typer.Option(help="Text of the prompt, after the chat template.")),
        parameter("text_file", Path | None, typer.Option(help="File with the prompt's text.")),
        parameter("tokenizer_file", Path | None, typer.Option("--tokenizer", help=tokenizer)),
        parameter("special", bool, typer.Option(help="Let the tokenizer add its special tokens."), default=True),
    )


def pairs(endpoints: list[str], replays: list[str] | None) -> list[tuple[str, str | None]]:
    """Return endpoints with their replay endpoints. Raises ``KvyardError`` if their numbers differ."""
    if not replays:
        return [(endpoint, None) for endpoint in endpoints]
    if len(replays) != len(endpoints):
        raise KvyardError(f"{len(endpoints)} endpoints and {len(replays)} replay endpoints: give one for each, or none")
    return list(zip(endpoints, replays, strict=True))


def read_token(file: str | Path | None, variable: str | None = TOKEN_VARIABLE) -> str | None:
    """Return the token of ``file``, else of the environment; ``None`` if neither is set. Raises ``KvyardError``."""
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
    """Log warnings, with ``verbose`` also information; repeated lines are rate-limited."""
    from kvyard.server.line_writer import LineHandler
    from kvyard.server.log_limit import LogLimit

    level = logging.INFO if verbose else logging.WARNING
    handler: logging.Handler
    try:
        handler = LineHandler()
    except (OSError, ValueError, AttributeError):  # stderr is no file
        handler = logging.StreamHandler()
    handler.addFilter(LogLimit())
    logging.basicConfig(level=level, format=LOG_FORMAT, handlers=[handler])


def log_as(who: str) -> None:
    """Prefix each line of the log with the name of this process."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT.replace("%(name)s", f"{who}: %(name)s")))


def warn_if_open(host: str, token: str | None) -> None:
    """Warn if other machines can use a server without a token."""
    from kvyard.server.running import is_loopback

    if token is None and not is_loopback(host):
        typer.echo(f"warning: all who reach {host} can use this: set a token with --token-file", err=True)
