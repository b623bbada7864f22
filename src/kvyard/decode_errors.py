"""Exceptions of decoding bytes from outside. Apart from ``errors``, since msgspec takes time to load."""

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Text that is no UTF-8 and values nested too deep have errors of their own: who catches msgspec's alone lets those through."""
