"""A real run beside its replay: how far the simulated times are from the measured ones.

``reading`` reads runs, ``compare`` replays one and compares, ``show`` has the table and the page.
"""
