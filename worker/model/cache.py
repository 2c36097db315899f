"""What is kept between starts: digests of large files, and directories of converted weights.

::

    <cache>/digests/<name>.json     {"path", "size", "mtime_ns", "sha256"} of one source file
    <cache>/models/<key>/           converted weights and tokenizer, with a manifest written last
    <cache>/models/<key>.lock       held while somebody converts
    <cache>/models/<key>.new/       a conversion under way, or one that was killed

Any number of processes may share a cache. Files and directories appear by renaming, so a reader sees all or nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from typing import TYPE_CHECKING

from filelock import FileLock

from worker.model.errors import ModelDamaged, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def file_digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 (hex) of a file. Read again only when its size or time of change is not what it was."""
    path = path.resolve()
    state = path.stat()
    known = {"path": str(path), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    record = cache_dir / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        found = json.loads(record.read_bytes())
        if isinstance(found, dict) and {**found, **known} == found and isinstance(found.get("sha256"), str):
            return str(found["sha256"])
    except (OSError, ValueError):
        pass  # no record, or one cut short: made anew below
    with path.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    try:
        _write(record, json.dumps({**known, "sha256": digest}))
    except OSError as error:
        log.warning("can't keep the digest of %s, it will be computed at each start: %s", path, error)
    return digest


def converted(key: str, cache_dir: Path, convert: Callable[[Path], None]) -> Path:
    """The directory for ``key``, made by ``convert(directory)`` the first time; processes wait for each other.

    Raises:
        ModelDamaged: the directory is there and not as it was written.
        ModelError: it can't be written.
    """
    models = cache_dir / "models"
    target, fresh = models / key, models / f"{key}.new"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f"{key}.lock"):
            if not target.exists():
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir()
                try:
                    convert(fresh)
                    _write_manifest(fresh)
                    fresh.rename(target)
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"can't keep the converted model in {models}: {error}") from error
    _verify(target, cache_dir)
    return target


def _write_manifest(directory: Path) -> None:
    files = {path.name: _entry(path) for path in sorted(directory.iterdir())}
    _write(directory / MANIFEST, json.dumps(files, indent=1))


def _entry(path: Path) -> dict[str, object]:
    with path.open("rb") as source:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(source, "sha256").hexdigest()}


def _verify(directory: Path, cache_dir: Path) -> None:
    """Compares every file with the manifest. Cheap after the first time, thanks to the kept digests."""
    advice = f"delete {directory} and start again to convert it anew"
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        for name, entry in manifest.items():
            path = directory / name
            if path.stat().st_size != entry["size"] or file_digest(path, cache_dir) != entry["sha256"]:
                raise ModelDamaged(f"{path} is not as it was written; {advice}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelDamaged(f"{directory} is damaged: {error}; {advice}") from error


def _write(path: Path, text: str) -> None:
    """Writes a file so that it is there completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
