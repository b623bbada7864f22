"""Serving: a gateway as this process, or as several with this one as their parent. Blocks until interrupted."""

import asyncio
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvyard.clock import VirtualClock
from kvyard.server.garbage import settle, stay_settled
from kvyard.server.gateway.access import KeyFile, read_keys
from kvyard.server.gateway.access_log import AccessLog
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.processes.channel import Channel
from kvyard.server.gateway.processes.frames import HUB, FrameKind
from kvyard.server.gateway.processes.hub import Hub
from kvyard.server.gateway.processes.process_group import ProcessGroup
from kvyard.server.gateway.recording import TrafficRecorder
from kvyard.server.gateway.routes import build
from kvyard.server.running import Running, TlsFiles, listen, take_hangups, tls_files, url_of

KEEP_ALIVE = 75
"""Seconds that a client's connection is kept between requests: longer than balancers keep theirs, so that they go first."""


class GatewayServing(msgspec.Struct, eq=False):
    """Parts needed to serve. Making it raises ``KvyardError`` for a certificate or keys that can't be used."""

    config: GatewayConfig
    read: Callable[[], GatewayConfig]
    """Reads the configuration again. Raises ``KvyardError``."""
    file: Path | None
    """From which it was read, to see when that changes."""
    token: str | None = None
    upstream_token: str | None = None
    index_token: str | None = None
    admin_token: str | None = None
    _tls: TlsFiles | None = None
    _keys: KeyFile | None = None
    """Keys as of the start: a process that is started later may find the file broken."""

    def __post_init__(self) -> None:
        self._tls = tls_files(self.config.tls_cert, self.config.tls_key)
        if self.config.keys_file is not None:
            self._keys = read_keys(self.config.keys_file)

    def serve(
        self,
        bound: socket.socket,
        ready: Callable[[str, int], object],
        channel: Channel | None = None,
        times: int = 0,
    ) -> None:
        """Serve in this process; ``ready`` receives the address, and the number of engines. With a ``channel`` it is one
        process of several, of which ``times`` had its number before. Raises ``KvyardError``.
        """

        def own(config: GatewayConfig) -> GatewayConfig:
            return config if channel is None else config.of_process(channel.number, times)

        app, served = build(
            own(self.config),
            token=self.token,
            upstream_token=self.upstream_token,
            index_token=self.index_token,
            admin_token=self.admin_token,
            channel=channel,
            keys=self._keys,
        )
        served.reloading.read = lambda: own(self.read())
        if self.file is not None:
            served.reloading.files.append(str(self.file))
        if times:
            served.follow()

        def begun(url: str) -> None:
            settle()
            if hasattr(signal, "SIGHUP") and channel is None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, served.reloading.ask)
                take_hangups()
            served.supervisor.keep("garbage", partial(stay_settled, lambda: not served.traffic.counters.under_way))
            ready(url, len(served.members.engines))

        running = Running(
            app,
            bound,
            around=served,
            ready=begun,
            ending=served.drain,
            drain_seconds=self.config.drain_seconds,
            keep_alive_seconds=KEEP_ALIVE,
            tls=self._tls,
            patient=channel is not None,
        )
        if channel is not None:
            channel.heard[FrameKind.END] = lambda peer, body: running.interrupt()
            channel.heard[FrameKind.HURRY] = lambda peer, body: running.hurry()
            channel.on_lost = running.interrupt
        running.run()

    def serve_by_processes(
        self, bound: socket.socket, ready: Callable[..., object], begun: Callable[[int], None]
    ) -> int:
        """Serve by several processes at the address of ``bound``, which is closed. ``ready`` is called as by ``serve``,
        with their ids as ``processes``; ``begun`` is called in each, with its number. Returns the exit code. Raises
        ``KvyardError``.
        """
        config = self.config
        url, port = url_of(bound, "http" if self._tls is None else "https"), bound.getsockname()[1]
        clock = VirtualClock()
        recorder = access_log = None
        if config.record is not None:
            recorder = TrafficRecorder(
                config.record,
                block_size=config.record_block_size,
                clock=clock,
                limit=config.record_limit,
                keep=config.record_keep,
            )
        if config.access_log is not None:
            access_log = AccessLog(config.access_log)
        hub = Hub(config.processes, recorder, clock, access_log)

        def process(channel: Channel, times: int) -> None:
            begun(channel.number)
            with listen(config.host, port, shared=True) as own:
                self.serve(own, lambda _, engines: channel.send(FrameKind.READY, HUB, b"%d" % engines), channel, times)

        group = ProcessGroup(
            config.processes,
            hub,
            process,
            drain_seconds=config.drain_seconds,
            ready=lambda pids: ready(url, hub.engines, processes=pids),
        )
        # It was bound by itself first, so no other server is at this address. Now it is kept for our own processes.
        bound.close()
        with listen(config.host, port, shared=True):
            return group.run()
