"""`octavo batch tidy`: throw away what is too old."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from kvstore.page_store import TTL_S, PageLimits
from kvstore.ranges import Finite
from ops.batch.options import broker_options, folder_option, opened
from ops.config import option
from ops.console import note

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.batches import BatchStore

DAY_S: Final = 86_400.0
KEPT_DAYS: Final = 30.0
NO_BUDGET: Final = 2**53
"""Bytes. How much pages may take is the workers' to say."""


@click.command("tidy")
@option("--keep-files", type=Finite(min=0.01), default=KEPT_DAYS, help="Days that files and results are kept.")
@option("--pages", default="none", help="Where workers keep pages: none, redis, or dir:PATH.")
@option("--pages-redis", default="", help="With it pages are in this server.")
@option("--pages-ttl", type=Finite(min=1), default=TTL_S, help="Seconds without use after which one is forgotten.")
@folder_option
@broker_options
def tidy(
    keep_files: float, pages: str, pages_redis: str, pages_ttl: float, batches: Path, redis: str, namespace: str
) -> None:
    """Throw away uploaded files and results that are too old, batches that nobody knows any more, and pages that nobody
    has used.

    `octavo batch worker` does it every hour.
    """
    from gateway.batch.batches import Place

    with opened(redis, namespace) as store:
        files = sum(each.forget(keep_files * DAY_S) for each in Place(store, batches).all_files())
        folders = forgotten(store, batches, keep_files * DAY_S)
        note(f"threw away {files} files and {folders} batches")
        if pages != "none" or pages_redis:
            left = asyncio.run(tended(pages, pages_redis or redis, namespace, pages_ttl))
            note(f"pages: {left[0]} left, {left[1]} bytes")


def forgotten(store: BatchStore, folder: Path, older_s: float) -> int:
    """Deletes the folders of batches that the broker does not know, if they are older; how many. Those that it knows
    are kept however old they are. Raises BrokerError, OSError."""
    gone = 0
    for each in folder.glob("batch_*"):
        with suppress(FileNotFoundError):
            newest = max(path.stat().st_mtime for path in (each, *each.iterdir()))
            if time.time() - newest > older_s and store.get(each.name) is None:
                shutil.rmtree(each)
                gone += 1
    return gone


async def tended(pages: str, url: str, namespace: str, ttl_s: float) -> tuple[int, int]:
    """How many pages are left of those that were used within `ttl_s`, and their bytes. Raises KvError."""
    from kvstore.page_dir import DirPages, require_folder
    from kvstore.page_redis import RedisPages

    limits, kind = PageLimits(NO_BUDGET, ttl_s), pages.partition(":")
    if pages != "none" and pages != "redis" and not (kind[0] == "dir" and kind[2]):
        raise click.ClickException(f"--pages {pages} is not none, redis or dir:PATH")
    store = DirPages(require_folder(kind[2]), limits) if kind[2] else RedisPages(url, namespace, limits)
    try:
        return await store.tend()
    finally:
        await store.close()
