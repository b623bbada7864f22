"""Certificates for tests, made by openssl for 127.0.0.1 and localhost."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path) -> tuple[str, str]:
    """The files of a certificate that vouches for itself, and of its key. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    alternative = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *alternative], check=True, capture_output=True)
    return str(cert), str(key)
