"""A server in a process of its own, whose output is read as it comes."""

from __future__ import annotations

import subprocess
import threading
from typing import Self

from tests.server.support import PATIENCE


class ReadProcess:
    """A process, and what it has said on its one pipe. It is killed at the end, if it still runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self.said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        pipe = self.process.stdout or self.process.stderr
        assert pipe is not None
        pipe.close()

    def _read(self) -> None:
        for line in self.process.stdout or self.process.stderr or ():
            self.said.append(line)
