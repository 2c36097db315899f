"""What keys and values are kept as: the option, who can have it, and what is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest
import torch

from kvstore.client import BrokerConfig
from tests.support.tiny_model import save_tiny_llama
from tests.unit.worker.kernels.native import NATIVE
from worker import assemble
from worker.__main__ import command, config_of
from worker.config import WorkerConfig
from worker.model.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

fused = pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A worker leaves torch one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def built(directory: Path, cache: Path, kernels: str = "auto", block_size: int = 16, **flags: str) -> tuple[str, str]:
    """A worker's fingerprint, and all that it said while it started."""
    config = WorkerConfig(
        id="w0",
        broker=BrokerConfig("redis://127.0.0.1:1"),
        model=str(directory),
        dtype="bfloat16",
        device="cpu",
        cache_dir=cache,
        kv_tokens=512,
        block_size=block_size,
        kernels=kernels,
        **flags,
    )
    lines: list[str] = []
    made = assemble.build(config, "i0", "", lines.append)
    return made.info.fingerprint, "\n".join(lines)


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(*arguments: str) -> str:
        return config_of(command.make_context("worker", list(arguments)).params).kv_dtype

    assert given() == "auto"
    assert given("--kv-dtype", "int8") == "int8"
    monkeypatch.setenv("OCTAVO_KV_DTYPE", "int8")
    assert given() == "int8"
    with pytest.raises(click.BadParameter, match="'bfloat16' is not one of 'auto', 'int8'"):
        given("--kv-dtype", "bfloat16")


@fused
def test_the_kind_and_what_a_token_takes_are_told(directory: Path, tmp_path: Path) -> None:
    """Two layers of two key/value heads, of 32 numbers each with what they are padded with."""
    wide, told = built(directory, tmp_path)
    assert "32 blocks of 16, K/V bfloat16, 512 bytes a token" in told
    small, told = built(directory, tmp_path, kv_dtype="int8")
    assert "32 blocks of 16, K/V int8, 288 bytes a token" in told
    assert wide != small


def test_transformers_models_have_none(directory: Path, tmp_path: Path) -> None:
    reason = (
        "--kv-dtype int8 needs the fused decoder, which can't run tiny here: "
        "there are no native kernels; take --kv-dtype auto"
    )
    with pytest.raises(ModelUnsupported) as refused:
        built(directory, tmp_path, kernels="none", kv_dtype="int8")
    assert str(refused.value) == reason


@fused
def test_the_reason_is_told(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="blocks of 8 tokens are no multiple of 16; take --kv-dtype auto"):
        built(directory, tmp_path, block_size=8, kv_dtype="int8")


def test_other_kinds_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="kv-dtype 'int4' is not one of auto, int8"):
        built(directory, tmp_path, kv_dtype="int4")
