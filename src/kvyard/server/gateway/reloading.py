"""Reading the configuration again while the gateway runs: by SIGHUP, and where a file has changed.

A file that can't be used changes nothing; log and health say why. Of one that can, settings that may change while requests
are in flight are applied: engines, keys and figures. All others need a restart, and the log names them.
"""

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.server.gateway.access import KeyFile, KeyRing, read_keys
from kvyard.server.gateway.access_log import AccessLog
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine
from kvyard.server.gateway.members import Membership
from kvyard.server.http import Refusal

log = logging.getLogger(__name__)

LIVE = frozenset(
    {
        *("engines", "session_header", "tenant_header", "engine_requests", "queue", "queue_seconds", "down_seconds"),
        *("flow", "retries", "held_bytes", "health_seconds", "health_timeout", "unhealthy_after", "shun_seconds"),
        "recovery_seconds",
    }
)
"""Settings that are taken over."""
LOOK_SECONDS = 1.0
"""Between two looks at the files."""

Stamp = tuple[tuple[int, int, int] | None, ...]


class Reloading:
    """Watches the files of one gateway."""

    def __init__(self, config: GatewayConfig, members: Membership, keys: KeyRing | None) -> None:
        self.config = config
        """Configuration in force."""
        self.error = ""
        """Why the files as they are now can't be used; empty if they can."""
        self.reloads = 0
        """Number of successful reloads."""
        self.read: Callable[[], GatewayConfig] | None = None
        """Reads the configuration again, as it was read at the start. Raises ``KvyardError``."""
        self.files: list[str] = [] if config.keys_file is None else [config.keys_file]
        self.changed: list[Callable[[GatewayConfig], None]] = []
        """Told of a configuration that is in force from now on."""
        self.access_log: AccessLog | None = None
        """Begun again by its name at SIGHUP."""
        self._members = members
        self._keys = keys
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Read all again soon, changed or not."""
        if self.access_log is not None:
            self.access_log.reopen()
        self._asked.set()

    async def watch(self) -> None:
        """Watch the file until cancelled."""
        seen = self._stamp()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._asked.wait()
            now = self._stamp()
            if now != seen or self._asked.is_set():
                self._asked.clear()
                seen = now
                await self.reload()

    async def reload(self) -> None:
        """Read the files and take them over, or keep what there was."""
        try:
            self._check_not_empty()
            fresh = self.config if self.read is None else self.read()
            keys = None if self._keys is None or self.config.keys_file is None else read_keys(self.config.keys_file)
        except KvyardError as error:
            self.error = str(error)
            log.warning("the configuration can't be read again, and stays as it was: %s", error)
            return
        self.error = ""
        if keys is not None:
            self.take_over_keys(keys)
        taken = await self.take_over(fresh)
        self.reloads += 1
        log.warning(
            "the configuration was read again: %s", ", ".join(taken) or ("nothing new" if keys is None else "keys")
        )

    def _check_not_empty(self) -> None:
        """Raise ``KvyardError`` where a file has nothing in it: an empty configuration would remove every engine, and a file
        is empty for a moment where something writes it anew.
        """
        for path in self.files:
            with suppress(OSError):
                about = os.stat(path)
                if stat.S_ISREG(about.st_mode) and not about.st_size:
                    raise KvyardError(f"{path} is empty: write it beside and move it here")

    def take_over_keys(self, keys: KeyFile) -> None:
        """Have ``keys`` in force."""
        if self._keys is not None:
            self._keys.replace(keys)

    async def take_over(self, fresh: GatewayConfig) -> list[str]:
        """Apply ``fresh``, as far as that is possible while requests are in flight. Returns the settings that changed."""
        names = GatewayConfig.__struct_fields__
        differing = [name for name in names if getattr(fresh, name) != getattr(self.config, name)]
        if fixed := [name for name in differing if name not in LIVE]:
            log.warning("changed, and needs a restart: %s", ", ".join(fixed))
        old, live = self.config.engines, [name for name in differing if name in LIVE]
        self.config = msgspec.structs.replace(self.config, **{name: getattr(fresh, name) for name in live})
        for notify in self.changed:
            notify(self.config)
        await self._exchange(old, self.config.engines)
        return live

    async def _exchange(self, old: Iterable[GatewayEngine], new: Iterable[GatewayEngine]) -> None:
        before, after = {engine.called: engine for engine in old}, {engine.called: engine for engine in new}
        for name, engine in before.items():
            if after.get(name) != engine:
                with suppress(Refusal):  # it was removed by hand
                    await self._members.remove(name)
        for name, engine in after.items():
            if before.get(name) != engine:
                try:
                    await self._members.add(engine)
                except (KvyardError, Refusal) as error:
                    log.warning("%s can't be applied: %s", name, error)

    def _stamp(self) -> Stamp:
        """Return the stamp by which changes of files are noticed."""
        stamps: list[tuple[int, int, int] | None] = []
        for path in self.files:
            try:
                about = os.stat(path)
                stamps.append((about.st_mtime_ns, about.st_size, about.st_ino))
            except OSError:
                stamps.append(None)
        return tuple(stamps)


def live_settings(config: GatewayConfig) -> dict[str, Any]:
    """Return the settings that may change while requests are in flight."""
    return {name: getattr(config, name) for name in sorted(LIVE)}


def with_settings(config: GatewayConfig, settings: dict[str, Any]) -> GatewayConfig:
    """Return ``config`` with what was ``live_settings`` of another, and encoded since."""
    built = msgspec.to_builtins(config)
    return msgspec.convert({**built, **settings}, GatewayConfig)
