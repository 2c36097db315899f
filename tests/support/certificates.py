"""Certificates for tests: an authority of its own, and what it signs for 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates. Its own is ``certificate``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        paths = ("-keyout", self._key, "-out", self.certificate)
        _openssl("req", "-x509", *_NEW_KEY, *paths, "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign")

    def sign(self, name: str) -> Pair:
        """A key, and its certificate for 127.0.0.1 and localhost."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-CA", self.certificate, "-CAkey", self._key),
            *("-keyout", pair.key, "-out", pair.certificate, "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"),
        )
        return pair


def _openssl(*arguments: str | Path) -> None:
    found = shutil.which("openssl")
    if found is None:
        message = "openssl is not on PATH"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    subprocess.run([found, *map(str, arguments)], check=True, capture_output=True, timeout=20)
