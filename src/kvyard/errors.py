"""The one exception type that people are meant to read."""


class KvyardError(Exception):
    """A refusal that the user can act on: its message is one clear sentence on what is wrong and what would be right.

    Packages raise it, or a subclass, for bad input: an unknown config key, an impossible combination, a malformed file.
    The command line prints the message on stderr and exits with 2, without a traceback. A broken invariant is a bug, not
    a refusal, and must not be a ``KvyardError``.
    """
