"""``kvyard expect``: prefix-cache hits that an engine owes by its own rules, beside those it counted.

``traffic`` has what prompts share, ``owed`` replays it, ``counted`` reads an engine's counters, ``expectation`` is the
waterfall between them, and ``search`` finds the cause of a difference.
"""

from kvyard.lab.expect.expectation import Expectation, expect

__all__ = ["Expectation", "expect"]
