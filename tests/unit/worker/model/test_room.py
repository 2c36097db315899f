"""Pools that memory can't hold: told in one line, before anything is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from click.testing import CliRunner

from bench import tune_model
from kvstore.client import BrokerConfig
from ops.cli import main
from tests.support.tiny_model import save_tiny_llama
from tests.unit.worker.kernels.native import NATIVE
from worker import assemble
from worker.config import WorkerConfig
from worker.model import room
from worker.model.errors import ModelError, NoRoom
from worker.model.room import BOOKS, Memory

if TYPE_CHECKING:
    from pathlib import Path

MANY = 99999999999999
"""Tokens."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def config(directory: Path | str, **more: object) -> WorkerConfig:
    broker = BrokerConfig(url="redis://127.0.0.1:1")
    return WorkerConfig(id="w", broker=broker, model=str(directory), kv_tokens=MANY, **more)  # type: ignore[arg-type]


def test_a_pool_that_fits_to_the_byte() -> None:
    memory = Memory(10 * (1000 + BOOKS), "this machine has")
    room.check(10, 16, 1000, memory)
    with pytest.raises(NoRoom) as refused:
        room.check(11, 16, 1000, memory)
    assert str(refused.value) == (
        f"a pool of 176 tokens takes {11 * (1000 + BOOKS):,} bytes (0.0 GiB), and this machine has 0.0 GiB"
    )
    assert str(refused.value.as_option(180)) == (
        f"--kv-tokens 180: the pool takes {11 * (1000 + BOOKS):,} bytes (0.0 GiB), and this machine has 0.0 GiB; "
        "take --kv-tokens 160 or fewer"
    )


def test_memory_is_the_machines_or_what_its_container_may_have(tmp_path: Path) -> None:
    whole = psutil.virtual_memory().total
    first, second = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    assert room.machine((first, second)) == Memory(whole, "this machine has")
    first.write_text("max\n")
    second.write_text(f"{2**63 - 4096}\n")
    assert room.machine((first, second)) == Memory(whole, "this machine has")
    first.write_text("4096\n")
    assert room.machine((first, second)) == room.left((first, second)) == Memory(4096, "this container may have")
    assert room.left(()).size < whole


def test_what_fails_while_it_is_taken_is_told_as_well() -> None:
    for error in (MemoryError("no room"), RuntimeError("CUDA out of memory. Tried to allocate")):
        with pytest.raises(NoRoom, match="a pool of 64 tokens takes 720 bytes"), room.room(4, 16, 0):
            raise error
    with pytest.raises(RuntimeError, match="another reason"), room.room(4, 16, 0):
        raise RuntimeError("another reason")
    with pytest.raises(NoRoom, match="the system gives less"), room.room(1, 16, 1):
        torch.empty(1 << 60)


@pytest.mark.parametrize(
    "kernels", ["none", pytest.param("auto", marks=pytest.mark.skipif(not NATIVE, reason="no native kernels"))]
)
def test_a_worker_says_it_whichever_way_the_model_runs(directory: Path, tmp_path: Path, kernels: str) -> None:
    said: list[str] = []
    given = config(directory, kernels=kernels, cache_dir=tmp_path, dtype="float32", device="cpu", threads=1)
    with pytest.raises(ModelError, match=rf"^--kv-tokens {MANY}: the pool takes [\d,]+ bytes \(.*--kv-tokens \d+"):
        assemble.build(given, "i", "", said.append)
    # The fused decoder has read no weights by then.
    assert (kernels == "auto") == (not [line for line in said if line.startswith("reading")])


def test_a_simulated_worker_says_it() -> None:
    with pytest.raises(ModelError, match=f"--kv-tokens {MANY}: the pool takes "):
        assemble.build(config("simulated"), "i", "", print)


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
def test_measuring_commands_say_it(directory: Path, tmp_path: Path) -> None:
    options = ["--model", str(directory), "--cache", str(tmp_path), "--dtype", "float32", "--kv-tokens", str(MANY)]
    folders = ["--out", str(tmp_path / "out"), "--plot", "none"]
    for words in (["tune", *folders], ["bench", "engine"]):
        before = torch.get_num_threads()
        try:
            ran = CliRunner().invoke(main, [*words, *options, "--threads", "1"])
        finally:
            torch.set_num_threads(before)
        assert ran.exit_code == 1, ran.output
        assert ran.output.splitlines()[-1].startswith(f"Error: --kv-tokens {MANY}: the pool takes ")


def test_tokens_that_were_asked_for_are_what_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those that are left when they are cut into blocks."""
    refused = NoRoom(160, 1000, "this machine has 0.0 GiB", 32)

    def load(*_: object, **__: object) -> None:
        raise refused

    monkeypatch.setattr(tune_model.decoder, "load", load)
    monkeypatch.setattr(tune_model.loader, "resolve", lambda *_, **__: None)
    monkeypatch.setattr(tune_model, "needed_kernels", lambda *_: object())
    with pytest.raises(ModelError, match=r"^--kv-tokens 167: .* take --kv-tokens 32 or fewer$"):
        tune_model.load("m", dtype="auto", kernels="auto", threads=0, kv_tokens=167, cache_dir=tmp_path, note=print)


def test_tune_takes_no_more_than_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker's pages are written to bit by bit, those here at once."""
    runner = SimpleNamespace(num_blocks=8, page_bytes=820)
    monkeypatch.setattr(tune_model.decoder, "load", lambda *_, **__: runner)
    monkeypatch.setattr(tune_model.loader, "resolve", lambda *_, **__: None)
    monkeypatch.setattr(tune_model, "needed_kernels", lambda *_: object())
    monkeypatch.setattr(tune_model, "left", lambda: Memory(7999, "this machine has left"))
    with pytest.raises(ModelError, match=r"--kv-tokens 128: .* 8,000 bytes .* --kv-tokens 112 or fewer"):
        tune_model.load("m", dtype="auto", kernels="auto", threads=0, kv_tokens=128, cache_dir=tmp_path, note=print)
