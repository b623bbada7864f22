"""The one exception type that people are meant to read, and a help for writing it."""

from collections.abc import Iterable
from difflib import get_close_matches


class KvyardError(Exception):
    """A refusal that the user can act on: its message is one clear sentence on what is wrong and what would be right.

    Packages raise it, or a subclass, for bad input: an unknown config key, an impossible combination, a malformed file.
    The command line prints the message on stderr and exits with 2, without a traceback. A broken invariant is a bug, not
    a refusal, and must not be a ``KvyardError``.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """For a refusal of ``name``: up to three names of ``known`` that are like it, in brackets; empty where none is."""
    found = get_close_matches(name, list(known), 3, 0.6)
    return f" (nearest: {', '.join(found)})" if found else ""
