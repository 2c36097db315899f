"""`octavo bench index` on real servers: each part finds what it wrote, and the servers tell what they spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.index import IndexConfig, run_index

if TYPE_CHECKING:
    from pathlib import Path


async def test_every_part_is_measured(broker_binary: Path) -> None:
    config = IndexConfig(workers=12, prompt_tokens=320, held=50, calls=10, chunks=3, steps=20, server=broker_binary)
    notes: list[str] = []
    results = await run_index(config, notes.append)
    assert notes == ["12 workers, prompts of 20 blocks"]
    assert results["server"].startswith(("Valkey ", "Redis "))
    assert (results["workers"], results["blocks"]) == (12, 20)
    parts = {part["name"]: part for part in results["parts"]}
    assert [*parts] == [
        "hashes of the prompt",
        "match: nobody holds it",
        "match: all hold a quarter, some more",
        "match: all hold it",
        "match: each holds another part",
        "submit",
        "match and submit",
        "a gateway's decision",
        "commit of 3 tokens",
        "commit of 3 tokens, 4 blocks in and out",
    ]
    for name, part in parts.items():
        assert part["calls"] == (20 if name.startswith("commit") else 10), name
        assert 0 < part["p50_ms"] <= part["p90_ms"] <= part["p99_ms"], name
        assert (part["script_us"] > 0) == (name != "hashes of the prompt"), name
        assert (part["tokens_per_cpu_s"] or 0) > 0 or not name.startswith("commit"), name
