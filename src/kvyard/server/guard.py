"""The guard: protection of a server on this machine or network against pages in browsers.

A browser sends forms to any address, one of this machine too, and says so: by ``Origin``, ``Sec-Fetch-Site``, and a type of
content that forms have. A name may also be made to point at this machine (DNS rebinding), and then the page is of the same
site; but its name is in ``Host``. A token helps against both, because no page has it: if one is wanted, ``Host`` isn't
looked at.
"""

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

from kvyard.server.http import Refusal
from kvyard.server.running import is_loopback

LONGEST_ADDRESS = 64
"""Characters of a name that may be an address."""


class Guard(msgspec.Struct, frozen=True):
    """Whom a server listens to."""

    host: str = ""
    """Host that it listens on."""
    hosts: tuple[str, ...] = ()
    """Names by which it may be called; empty: any where others than this machine reach it, else those of this machine."""

    def check(self, method: str, headers: Mapping[str, str], has_token: bool = False) -> None:
        """Raise ``Refusal`` where a browser says that a page of another site sends this, or calls us by a strange name."""
        called = headers.get("host", "")
        if not has_token:
            self._check_host(called)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != called and _host_of(origin) not in self.hosts:
            raise Refusal(403, "a page of another site may not do this", fix="send it without Origin")
        if method == "GET":
            return
        if headers.get("sec-fetch-site") == "cross-site":
            raise Refusal(403, "a page of another site may not do this", fix="send it from here")

    def _check_host(self, called: str) -> None:
        name = _name_of(called)
        if not name or name in self.hosts or name in ("localhost", self.host) or name.endswith(".localhost"):
            return
        if (len(name) < LONGEST_ADDRESS and is_address(name)) or (not self.hosts and not is_loopback(self.host)):
            return
        error = f"this server isn't called {name[:200]!r}"
        raise Refusal(403, error, fix="use its address, or add the name to its setting hosts")


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


@lru_cache(maxsize=256)
def is_address(name: str) -> bool:
    """True if a host is written as an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
