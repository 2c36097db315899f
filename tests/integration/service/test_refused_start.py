"""Workers that do not start: one whose model is not whole (K04), one whose name is taken."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from click.testing import CliRunner

from kvstore.client import BrokerConfig, connect
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from tests.unit.worker.model import tiny_gguf
from worker.__main__ import command

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


def rename(tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_upper.weight"] = tensors.pop("blk.1.ffn_up.weight")


async def registered(url: str, namespace: str) -> list[WorkerInfo]:
    broker = await connect(BrokerConfig(url, namespace))
    try:
        return await Registry(broker).workers()
    finally:
        await broker.close()


def test_a_worker_says_what_its_model_lacks_and_never_registers(
    broker_url: str, namespace: str, tmp_path: Path
) -> None:
    """Not in a process of its own, which would take its time to import everything."""
    tiny_gguf.write(tmp_path / "tiny.gguf", change=rename)
    options = {"model": tmp_path / "tiny.gguf", "cache": tmp_path / "cache", "redis": broker_url}
    options |= {"namespace": namespace, "dtype": "float32", "device": "cpu", "id": "w9"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: "), result.output
    assert "missing: model.layers.1.mlp.up_proj.weight" in result.output
    assert '{"' not in result.stdout
    assert asyncio.run(registered(broker_url, namespace)) == []
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


async def hold(url: str, namespace: str, worker: str) -> str:
    """Takes the name for a minute; the holder."""
    broker = await connect(BrokerConfig(url, namespace))
    try:
        info = WorkerInfo(id=worker, incarnation=new_incarnation(), model="m", fingerprint="f")
        await Registry(broker, lease_ttl_ms=60_000).register(info)
    finally:
        await broker.close()
    return info.incarnation


def test_a_name_that_is_taken_is_told_before_the_model_is_read(broker_url: str, namespace: str, tmp_path: Path) -> None:
    """Which would be told as well: it can't be loaded."""
    tiny_gguf.write(tmp_path / "tiny.gguf", change=rename)
    holder = asyncio.run(hold(broker_url, namespace, "w9"))
    words = ["--model", str(tmp_path / "tiny.gguf"), "--cache", str(tmp_path / "cache"), "--id", "w9"]
    result = CliRunner().invoke(command, [*words, "--redis", broker_url, "--namespace", namespace, "--device", "cpu"])
    assert (result.exit_code, result.output) == (
        1,
        f"Error: worker id 'w9' is held by a live process (incarnation {holder})\n",
    )
    assert not (tmp_path / "cache").exists()


def test_a_pool_that_memory_cannot_hold_is_told_in_one_line(broker_url: str, namespace: str) -> None:
    words = ["--model", "simulated", "--id", "w9", "--redis", broker_url, "--namespace", namespace]
    result = CliRunner().invoke(command, [*words, "--kv-tokens", "99999999999999"])
    assert result.exit_code == 1, result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("Error: --kv-tokens 99999999999999: the pool takes "), result.output
    assert asyncio.run(registered(broker_url, namespace)) == []
