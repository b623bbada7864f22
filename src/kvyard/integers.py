"""Whole numbers."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up, such as the blocks that some tokens fill."""
    return -(-dividend // divisor)
