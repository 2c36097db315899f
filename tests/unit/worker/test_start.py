"""What `octavo worker` tells before it waits for a broker: none answers in these tests."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

from kvstore.client import BrokerConfig
from worker import __main__ as process
from worker import assemble
from worker.__main__ import command, loaded
from worker.config import WorkerConfig
from worker.errors import StoppedError, StuckError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections: bound, so that nobody takes it, but not listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What looks like a model as long as nobody reads it."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def said(closed_port: int, *arguments: str, redis: str = "") -> str:
    """What a start that fails says."""
    redis = redis or f"redis://127.0.0.1:{closed_port}/0"
    ran = CliRunner().invoke(command, ["--id", "w9", "--redis", redis, "--device", "cpu", *arguments])
    assert ran.exit_code == 1, ran.output
    assert ran.output.count("\n") == 1, ran.output
    return ran.output.removeprefix("Error: ").rstrip("\n")


def test_a_model_that_cannot_be_loaded(closed_port: int, tmp_path: Path) -> None:
    other = tmp_path / "weights.bin"
    other.touch()
    kinds = "a directory of safetensors, a GGUF file, smollm2-135m, or simulated"
    for model, words in (
        ("/no/such/model", f"no model '/no/such/model': give {kinds}"),
        ("smollm2-136m", f"no model 'smollm2-136m': give {kinds}"),
        (str(tmp_path), f"{tmp_path} has no config.json"),
        (str(other), f"{other} is neither a GGUF file nor a directory of safetensors"),
        ("simulated:500", "model 'simulated:500' is not of the form simulated:PREFILL_TOK_S,DECODE_MS[,SEQUENCE_MS]"),
    ):
        assert said(closed_port, "--model", model) == words


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_device_that_is_not_there(closed_port: int, folder: Path) -> None:
    told = said(closed_port, "--model", str(folder), "--device", "cuda")
    assert told == "device cuda: PyTorch finds none here"


def test_a_port_that_is_taken(closed_port: int, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = said(closed_port, "--model", str(folder), "--metrics-port", str(port))
    assert told == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port with --metrics-port, or any free one with --metrics-port 0"
    )


def test_what_is_no_url_of_a_broker(closed_port: int, folder: Path) -> None:
    told = said(closed_port, "--model", str(folder), redis="nonsense:secret")
    assert told == "not a URL of a broker: redis://, rediss:// or unix://, host, port and database"


def test_a_folder_for_pages_that_can_not_be_made(closed_port: int, folder: Path) -> None:
    told = said(closed_port, "--model", str(folder), "--pages", "dir:/proc/nope")
    assert told == "--pages dir:/proc/nope: that folder can't be made: No such file or directory"


async def test_who_is_told_to_stop_while_the_model_is_loaded_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(assemble, "build", lambda *_: (begun.set(), goes_on.wait()))
    config = WorkerConfig(id="w9", broker=BrokerConfig("unused"), model="m", cache_dir=tmp_path)
    stop = asyncio.Event()
    loading = asyncio.create_task(loaded(config, "i", "", stop))
    try:
        await asyncio.to_thread(begun.wait, 10)
        assert not loading.done()
        stop.set()
        async with asyncio.timeout(5):
            with pytest.raises(StoppedError, match="told to stop while the model was loaded"):
                await loading
    finally:
        goes_on.set()


@pytest.mark.parametrize(
    ("error", "status"), [(StoppedError("a step has not come back"), 0), (StuckError("a step has not returned"), 70)]
)
def test_who_was_told_to_leave_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: WorkerError, status: int
) -> None:
    """Both leave without waiting for their threads."""
    left: list[int] = []

    async def serve(_: WorkerConfig, incarnation: str) -> None:
        raise error

    monkeypatch.setattr(process, "serve", serve)
    monkeypatch.setattr(process, "leave", left.append)
    CliRunner().invoke(command, ["--model", "simulated"], catch_exceptions=False)
    assert left == [status]
    assert str(error) in caplog.text
