"""Virtual environments of peers, each made once and kept in the cache.

::

    <cache>/peers/<name>/venv/            the environment
    <cache>/peers/<name>/debian/          what Debian packages were unpacked
    <cache>/peers/<name>/made.json        what it was made of, written last: another wish makes it anew
    <cache>/peers/<name>/install.log      what the installers said
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import FileLock

from bench.peers.process import PeerFailed
from bench.peers.tools import run_tool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

    from bench.peers.catalog import Environment, Peer

INSTALL_S: Final = 5400.0
"""Limit of one installer's run: some peers are compiled from source."""


def installed(peer: Peer, cache: Path, note: Callable[[str], None]) -> Path:
    """The folder of the peer's environment, made first where it has to be. Returns for ours where we are.

    Raises:
        PeerFailed: it can't be made; the log says why.
    """
    if peer.environment is None:
        return Path(sys.prefix)
    folder = cache / "peers" / peer.folder
    folder.mkdir(parents=True, exist_ok=True)
    wish = recipe(peer.environment)
    with FileLock(folder / "made.lock"):
        if not _is_made(folder, wish):
            note(f"{peer.name}: making its environment in {folder}")
            with (folder / "install.log").open("w") as log:
                _make(folder, peer.environment, log, lambda line: note(f"{peer.name}: {line}"))
            (folder / "made.json").write_text(wish)
    return folder / "venv"


def python(environment: Path) -> Path:
    """Its interpreter."""
    return environment / "bin" / "python"


def recipe(environment: Environment) -> str:
    """All that decides what an environment becomes."""
    return json.dumps({**asdict(environment), "python": platform.python_version()}, indent=1)


def _is_made(folder: Path, wish: str) -> bool:
    made = folder / "made.json"
    return made.is_file() and made.read_text() == wish and python(folder / "venv").exists()


def _make(folder: Path, environment: Environment, log: TextIO, note: Callable[[str], None]) -> None:
    (folder / "made.json").unlink(missing_ok=True)
    for old in ("venv", "debian"):
        shutil.rmtree(folder / old, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder / "venv")], log, note)
    pip = [str(python(folder / "venv")), "-m", "pip", "--disable-pip-version-check"]
    if environment.torch:
        try:
            _run([*pip, "install", f"{environment.torch}+cpu"], log, note)
        except PeerFailed:  # not every index has builds for CPUs alone
            _run([*pip, "install", environment.torch], log, note)
    if environment.packages:
        torch = [environment.torch] if environment.torch else []
        _run([*pip, "install", *torch, *environment.packages], log, note)
    if environment.removed:
        _run([*pip, "uninstall", "-y", *environment.removed], log, note)
    for package in environment.debian:
        _unpack(package, folder / "debian", log, note)


def _unpack(package: str, target: Path, log: TextIO, note: Callable[[str], None]) -> None:
    """A Debian package's files under `target`; none where this isn't Debian, or its index has not the package."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        note(f"no apt-get and dpkg: without {package}")
        return
    target.mkdir(exist_ok=True)
    try:
        _run(["apt-get", "download", package], log, note, where=target)
    except PeerFailed as reason:
        note(f"without {package}: {reason}")
        return
    for archive in target.glob("*.deb"):
        _run(["dpkg", "-x", str(archive), str(target)], log, note)
        archive.unlink()


def _run(command: Sequence[str], log: TextIO, note: Callable[[str], None], where: Path | None = None) -> None:
    try:
        run_tool(command, log, INSTALL_S, note, where)
    except PeerFailed as reason:
        raise PeerFailed(f"not installed: {reason}") from reason
