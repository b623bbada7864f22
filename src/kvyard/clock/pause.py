"""A pause of real time, for servers: between two looks at something that no event tells of, or to let others have a turn."""

from __future__ import annotations


async def pause(seconds: float = 0.0) -> None:
    """Suspend the task for so long; 0 lets the other tasks have a turn."""
    import asyncio  # slow to load, and most commands never wait

    await asyncio.sleep(seconds)
