"""Rehearsals: a mock fleet behind a gateway in this process, driven by a trace, and its comparison with virtual time.

``stage`` is the live part, ``offline`` the same run in virtual time, ``log`` compares what both decided, ``proof`` joins them.
"""
