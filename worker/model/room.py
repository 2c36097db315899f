"""Whether memory has room for a pool, told before it is taken: what is written to later may be promised to anybody, and
whoever writes to it then is killed."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from worker.model.errors import NoRoom

if TYPE_CHECKING:
    from collections.abc import Iterator

BOOKS: Final = 180
"""Bytes of a block's accounting in the pool, while it is free."""
_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""What a container's processes may have together, in the second and the first version of control groups."""


class Memory(NamedTuple):
    """So many bytes, and whose they are."""

    size: int
    whose: str


def machine(limits: tuple[Path, ...] = _LIMITS) -> Memory:
    """What there is of memory: all of the machine's, or what its container may have of it. For what is taken bit by
    bit."""
    return _limited(psutil.virtual_memory().total, "this machine has", limits)


def left(limits: tuple[Path, ...] = _LIMITS) -> Memory:
    """What nobody uses. For what is taken at once."""
    return _limited(psutil.virtual_memory().available, "this machine has left", limits)


def check(num_blocks: int, block_size: int, block_bytes: int, memory: Memory | None = None) -> None:
    """Raises NoRoom when ``memory``, by default the machine's, can't hold a pool of blocks of so many tokens and bytes
    with its accounting."""
    memory = memory or machine()
    each = block_bytes + BOOKS
    if num_blocks * each > memory.size:
        most = memory.size // each * block_size
        raise NoRoom(num_blocks * block_size, num_blocks * each, f"{memory.whose} {gib(memory.size)}", most)


@contextmanager
def room(num_blocks: int, block_size: int, block_bytes: int, memory: Memory | None = None) -> Iterator[None]:
    """Checks, then lets its body take the memory, which may fail all the same: under `ulimit`, or on a full device.

    Raises:
        NoRoom: there is not enough.
    """
    check(num_blocks, block_size, block_bytes, memory)
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # the latter is what torch raises
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        tokens = num_blocks * block_size
        raise NoRoom(tokens, num_blocks * (block_bytes + BOOKS), "the system gives less", tokens // 2) from error


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.1f} GiB"


def _limited(size: int, whose: str, limits: tuple[Path, ...]) -> Memory:
    found = Memory(size, whose)
    for path in limits:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
        found = min(found, Memory(limit, "this container may have"))
    return found
