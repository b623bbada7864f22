"""The one exception type that people are meant to read, and a help for writing it."""

from collections.abc import Iterable
from difflib import get_close_matches

MANY = 40
"""Beyond this many names, a refusal that has near ones doesn't list them all."""


class KvyardError(Exception):
    """A refusal that the user can act on: its message is one clear sentence on what is wrong and what would be right.

    Packages raise it, or a subclass, for bad input: an unknown config key, an impossible combination, a malformed file.
    The command line prints the message on stderr and exits with 2, without a traceback. A broken invariant is a bug, not
    a refusal, and must not be a ``KvyardError``.
    """


def suggest(name: object, known: Iterable[str], listed: str = "", otherwise: str = "") -> str:
    """Return the suggestion that ends the refusal of ``name``: near names first, then all that are ``known``.

    ``listed`` says where the names are, in place of a list that would be too long; ``otherwise`` what else would do.
    """
    names = list(known)
    spelled = {known_name.lower(): known_name for known_name in names}
    near = [spelled[match] for match in get_close_matches(str(name).lower(), spelled, 3, 0.62)]
    if not names:
        return "there are none"
    every = listed or f"choose one of {', '.join(names)}"
    hint = every
    if near:
        hint = f"did you mean {' or '.join(near)}?"
        if not listed and len(names) <= MANY:
            hint += f" {every[0].upper()}{every[1:]}"
    return f"{hint}{' Or' if hint.endswith('?') else ', or'} {otherwise}" if otherwise else hint
