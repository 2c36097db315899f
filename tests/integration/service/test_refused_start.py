"""A worker whose model is not whole does not start: K04."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from click.testing import CliRunner

from kvstore.client import BrokerConfig, connect
from kvstore.registry import Registry, WorkerInfo
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
