"""Configuration of one worker process, read once from flags and ``OCTAVO_*``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.logs import TEXT

if TYPE_CHECKING:
    from kvstore.client import BrokerConfig

MAX_ID_LENGTH = 64


@dataclass(frozen=True, slots=True)
class PagesConfig:
    """Where pages are kept."""

    redis: str = ""
    """URL of a server; empty: they are in ``folder``."""
    folder: str = ""
    budget: int = 1 << 30
    """Bytes of all pages in the store."""
    ttl: float = 86400.0
    """Seconds without use after which a page is forgotten."""
    buffer: int = 64 << 20
    """Bytes of pages that wait to be stored, and of those that wait to be taken in."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told. Sizes are in tokens, times in seconds."""

    id: str
    broker: BrokerConfig
    model: str
    model_name: str = ""
    """Name that clients ask for; empty: the loader's name of the model."""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    """What keys and values are kept as: ``auto``, as the model's numbers are, or ``int8``."""
    device: str = "auto"
    cache_dir: Path = Path("~/.cache/octavo")
    kv_tokens: int = 32768
    cache_tokens: int | None = None
    """How many tokens that nobody uses may stay cached; None: as many as the pool has room for."""
    block_size: int = 16
    block_run: int = 1
    """How many neighbouring blocks a sequence gets in one run, at most; 1: the free block that was freed last."""
    max_running: int = 32
    step_tokens: int = 512
    """Token budget of one step."""
    chunk_tokens: int = 256
    """Tokens of prompts in one step beside running streams: what bounds how long a prompt delays them."""
    pages: PagesConfig | None = None
    """None: blocks that leave the pool are gone."""
    steal: bool = True
    """Whether jobs that a full worker can't read yet may be taken by others with the same pages, this one included."""
    threads: int = 0
    """Threads of a product; 0: one per core."""
    kernels: str = "auto"
    """Which build of the native kernels: ``auto``, ``none``, or one of ``worker.kernels.native.library.LEVELS``."""
    otlp: str = ""
    """URL of the collector that gets traces; empty: nothing is traced."""
    log_format: str = TEXT
    """One of ``kvstore.logs.FORMATS``."""
    host: str = "127.0.0.1"
    metrics_port: int = 0
    grace: float = 30.0
    """How long running jobs may go on after SIGTERM."""
    orphan_grace: float = 45.0
    """How long a job goes on when its gateway has died, or is cut off from the broker, before it is ended: clients need
    up to 15 s to leave one that stands still, and a stream bears with a broker for 30 s."""

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_size

    @property
    def cache_blocks(self) -> int | None:
        return None if self.cache_tokens is None else self.cache_tokens // self.block_size
