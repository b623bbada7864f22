"""Sub-commands that only the tests of the root command know."""

from __future__ import annotations

import typer

from kvyard.errors import KvyardError

app = typer.Typer(no_args_is_help=True)


@app.command()
def only(times: int = 1) -> None:
    """The only command of a group."""
    print("ran" * times)


def greet(name: str, loud: bool = False) -> None:
    """Greets."""
    print(name.upper() if loud else name)


def refuse() -> None:
    raise KvyardError("the pool needs at least one block, not 0")


def interrupt() -> None:
    print("working")
    raise KeyboardInterrupt


def answer_no() -> None:
    raise typer.Exit(1)


def crash() -> None:
    raise ZeroDivisionError
