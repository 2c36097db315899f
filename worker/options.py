"""The options of a worker that are also those of a whole fleet: declared here, for `octavo worker` and `octavo up`.

Loads little, so that a supervisor can have it.
"""

from __future__ import annotations

from typing import Any, Final

import click

from kvstore.page_store import TTL_S
from kvstore.ranges import Finite
from worker.kernels.native.library import LEVELS

SHARED: Final[dict[str, dict[str, Any]]] = {
    "--model": {
        "default": "smollm2-135m",
        "help": "Directory of safetensors, GGUF file, smollm2-135m, "
        "or simulated[:PREFILL_TOK_S,DECODE_MS[,SEQUENCE_MS]].",
    },
    "--dtype": {
        "type": click.Choice(["auto", "bfloat16", "float32", "int8"]),
        "default": "auto",
        "help": "Weights; K/V too, unless --kv-dtype says otherwise. auto: bfloat16 on CUDA and where the processor "
        "multiplies it, else float32. int8: weights alone.",
    },
    "--kv-dtype": {
        "type": click.Choice(["auto", "int8"]),
        "default": "auto",
        "help": "K/V. int8: about half the memory of a token; for models of the fused decoder.",
    },
    "--device": {
        "type": click.Choice(["auto", "cpu", "cuda"]),
        "default": "auto",
        "help": "auto: CUDA where there is one.",
    },
    "--kernels": {
        "type": click.Choice(["auto", "none", *LEVELS]),
        "default": "auto",
        "help": "Build of the native kernels. auto: the best that this processor runs.",
    },
    "--kv-tokens": {"type": click.IntRange(min=32), "default": 32768, "help": "Size of a worker's pool, in tokens."},
    "--cache-tokens": {
        "type": click.IntRange(min=0),
        "default": None,
        "help": "Unused tokens that stay cached. Default: all.",
    },
    "--block-size": {"type": click.IntRange(1, 1024), "default": 16, "help": "Tokens per block, a power of two."},
    "--block-run": {
        "type": click.IntRange(1, 4096),
        "default": 1,
        "help": "Neighbouring blocks that a sequence gets in one run, at most.",
    },
    "--max-running": {"type": click.IntRange(1, 4096), "default": 32, "help": "Sequences in one step, at most."},
    "--step-tokens": {"type": click.IntRange(16, 65536), "default": 512, "help": "Tokens in one step, at most."},
    "--chunk-tokens": {
        "type": click.IntRange(min=1),
        "default": 256,
        "help": "Tokens of prompts in one step beside running streams, at most.",
    },
    "--pages": {
        "default": "none",
        "help": "Where blocks go when they leave a pool, to be fetched again: none, redis, or dir:PATH.",
    },
    "--pages-redis": {
        "default": "",
        "help": "With it pages are in this server. Default, with --pages redis: the broker's.",
    },
    "--pages-bytes": {"type": click.IntRange(min=1), "default": 1 << 30, "help": "Of all pages together, at most."},
    "--pages-ttl": {
        "type": Finite(min=1),
        "default": TTL_S,
        "help": "Seconds without use after which a page is forgotten.",
    },
    "--spill-buffer": {
        "type": click.IntRange(min=1),
        "default": 64 << 20,
        "help": "Bytes of pages that wait to be stored, of one worker, at most; and of those that were fetched.",
    },
    "--steal/--no-steal": {
        "default": True,
        "help": "A free worker takes jobs that another one has not read yet.",
    },
}
"""By name: what click's Option takes."""


def setting(option: str) -> str:
    """The name of what an option sets: `--steal/--no-steal` sets `steal`."""
    return option.split("/")[0].lstrip("-").replace("-", "_")


def pages_place(pages: str, pages_redis: str, broker: str) -> tuple[str, str] | None:
    """Where pages are: a server's URL and "", or "" and a folder; None: nowhere. Raises click.BadParameter."""
    kind, _, path = pages.partition(":")
    if kind == "dir" and path:
        if pages_redis:
            raise click.BadParameter(f"pages can't be both in {pages} and in a server", param_hint="--pages-redis")
        return "", path
    if pages not in ("none", "redis"):
        raise click.BadParameter(f"{pages!r} is not none, redis or dir:PATH", param_hint="--pages")
    return (pages_redis or broker, "") if pages == "redis" or pages_redis else None


def check_sizes(kv_tokens: int | None, block_size: int | None) -> None:
    """Sizes that fit each other; None is the default. Raises click.BadParameter."""
    pool = SHARED["--kv-tokens"]["default"] if kv_tokens is None else kv_tokens
    block = SHARED["--block-size"]["default"] if block_size is None else block_size
    if block & (block - 1):
        raise click.BadParameter(f"{block} is not a power of two", param_hint="--block-size")
    if pool < 2 * block:
        raise click.BadParameter(f"{pool} tokens are less than two blocks of {block}", param_hint="--kv-tokens")
