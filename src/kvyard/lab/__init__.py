"""The lab: studies over many replays, timing fitted to and checked against real runs, and proofs against real engines.

The outermost ring. It uses the core and the servers; neither imports it.
"""
