"""A worker's flags, and the engine that they make."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kvstore.client import BrokerConfig
from worker.__main__ import command, config_of
from worker.config import PagesConfig, WorkerConfig


def config(*arguments: str) -> WorkerConfig:
    context = command.make_context("worker", list(arguments))
    return config_of(context.params)


def test_the_defaults() -> None:
    default = config("--id", "w0")
    assert (default.kv_tokens, default.block_size, default.num_blocks) == (32768, 16, 2048)
    assert (default.cache_tokens, default.cache_blocks, default.block_run) == (None, None, 1)
    assert config("--block-run", "16").block_run == 16
    assert (default.step_tokens, default.chunk_tokens, default.max_running) == (512, 256, 32)
    assert (default.grace, default.orphan_grace) == (30.0, 45.0)
    assert WorkerConfig("w0", BrokerConfig("redis://x"), "m").orphan_grace == default.orphan_grace


def test_cached_tokens_are_bounded_in_whole_blocks() -> None:
    given = config("--cache-tokens", "100", "--block-size", "16", "--chunk-tokens", "64")
    assert (given.cache_tokens, given.cache_blocks, given.chunk_tokens) == (100, 6, 64)
    assert config("--cache-tokens", "0").cache_blocks == 0


def test_the_environment_sets_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_TOKENS", "512")
    monkeypatch.setenv("OCTAVO_CHUNK_TOKENS", "32")
    given = config("--cache", "/somewhere")
    assert (given.cache_tokens, given.chunk_tokens, given.cache_dir) == (512, 32, Path("/somewhere"))


@pytest.mark.parametrize(
    "arguments", [("--cache-tokens", "-1"), ("--chunk-tokens", "0"), ("--block-size", "12"), ("--block-run", "0")]
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, str]) -> None:
    with pytest.raises(click.BadParameter):
        config(*arguments)


def test_pages_stay_nowhere_unless_they_are_told_to() -> None:
    assert config().pages is None
    given = config("--redis", "redis://there", "--pages", "redis").pages
    assert given == PagesConfig("redis://there", "", 1 << 30, 86400.0, 64 << 20)
    assert config("--redis", "redis://there", "--pages-redis", "redis://pages").pages == PagesConfig("redis://pages")
    assert config("--pages", "redis", "--pages-redis", "redis://pages").pages == PagesConfig("redis://pages")
    sizes = ("--pages-bytes", "1000", "--pages-ttl", "60", "--spill-buffer", "10")
    assert config("--pages", "dir:/some/where", *sizes).pages == PagesConfig("", "/some/where", 1000, 60.0, 10)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pages", "disk"),
        ("--pages", "dir:"),
        ("--pages", "dir"),
        ("--pages", "dir:/there", "--pages-redis", "redis://pages"),
        ("--pages-bytes", "0"),
        ("--pages-ttl", "0"),
        ("--spill-buffer", "0"),
    ],
)
def test_places_and_sizes_of_pages_that_make_no_sense(arguments: tuple[str, ...]) -> None:
    with pytest.raises(click.BadParameter):
        config(*arguments)
