"""Commands for operators; the redis-cli lines and the metrics of the page about operating, for real."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis import Redis

from octavo.v1.inference_pb2 import GenerateRequest, Stopping
from ops.client import Client
from tests.e2e.harness import DTYPE, eventually, octavo
from worker.intake import READ_AHEAD
from worker.page_metrics import PageMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Up

pytestmark = pytest.mark.timeout(400)

PAGE = (Path(__file__).parents[2] / "docs/operating.md").read_text()


def test_health_is_about_a_live_worker(fleet: Up) -> None:
    for arguments in ((), ("--alive",)):
        assert octavo("health", *arguments, "--target", fleet.target).stdout == f"{fleet.target}: SERVING\n"
    (told,) = json.loads(octavo("health", "--json", "--target", fleet.target).stdout)
    assert told == {"address": fleet.target, "healthy": True, "status": "SERVING", "reason": ""}


def test_workers_from_gateway_and_redis_agree(fleet: Up) -> None:
    moving = {"heartbeat_age_ms", "running", "waiting", "blocks_free", "blocks_cached", "blocks_used"}
    moving |= {"prefill_tokens_per_s", "step_ms", "sequence_ms", "heartbeat_unix_ms", "steps", "busy_s"}
    moving |= {"computed_tokens", "output_tokens", "prefix_queried_tokens", "prefix_hit_tokens"}
    seen = []
    for source in fleet_sources(fleet):
        rows = json.loads(octavo("workers", "--json", *source).stdout)
        seen.append([{name: value for name, value in row.items() if name not in moving} for row in rows])
    assert [row["id"] for row in seen[0]] == ["w0", "w1"]
    assert seen[0] == seen[1]
    table = octavo("workers", "--target", fleet.target).stdout.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [
        ["w0", "ready", "smollm2-135m"],
        ["w1", "ready", "smollm2-135m"],
    ]


def test_explain_tells_what_a_request_met(fleet: Up) -> None:
    asked = octavo("generate", "A book is", "--max-tokens", "2", "--request-id", "why", "--target", fleet.target)
    assert asked.stdout
    seen = [json.loads(octavo("explain", "why", "--json", *source).stdout) for source in fleet_sources(fleet)]
    assert seen[0] == seen[1]
    route = seen[0]["route"]
    assert [each["worker"] for each in route["candidates"]] == ["w0", "w1"]
    assert (seen[0]["state"], seen[0]["started"], route["policy"], route["index"]) == ("ended", True, "prefix", "exact")
    assert all(each["prefill_tokens_per_s"] > 0 and each["prefill_s"] > 0 for each in route["candidates"])
    lines = octavo("explain", "why", "--target", fleet.target).stdout.splitlines()
    assert lines[0].startswith("ended on worker w")
    assert [line.split()[0] for line in lines[-3:]] == ["worker", "w0", "w1"]
    unknown = octavo("explain", "nobody", "--target", fleet.target, check=False)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr == "Error: NOT_FOUND: job 'nobody' is unknown, or ended too long ago\n"


def fleet_sources(fleet: Up) -> tuple[tuple[str, str], tuple[str, str]]:
    """Where operators' commands may ask."""
    return ("--target", fleet.target), ("--redis", fleet.redis)


def shown_redis_commands(redis: str) -> Iterator[tuple[str, Any]]:
    """(name, reply) of every redis-cli line of the page, run against this server."""
    lines = re.findall(r"^\$? ?(redis-cli .*)$", PAGE, re.MULTILINE)
    assert lines
    with Redis.from_url(redis) as client:
        for line in lines:
            words = shlex.split(line, comments=True)
            assert words[:3] == ["redis-cli", "-u", "$URL"], line
            reply: Any = client.execute_command(*words[3:])  # type: ignore[no-untyped-call]
            if shutil.which("redis-cli"):
                ran = subprocess.run(
                    ["redis-cli", "-u", redis, *words[3:]], capture_output=True, check=True, timeout=20
                )
                assert b"ERR" not in ran.stdout
            yield words[3], reply


async def test_queue_and_the_pages_redis_commands_give_the_same_numbers(narrow: Up) -> None:
    """Long answers on a worker with room for two, which reads a few more ahead: three wait in its stream."""
    taken = 2 + READ_AHEAD
    request = GenerateRequest(text="A book is", stopping=Stopping(max_tokens=100, ignore_eos=True))

    async def read(client: Client) -> None:
        await client.generate(request)

    async with Client(narrow.target) as client:

        async def full() -> bool:
            return [(queue.undelivered, queue.pending) for queue in await client.queues()] == [(3, taken)]

        calls = [asyncio.create_task(read(client)) for _ in range(taken + 3)]
        await eventually(full, 30)
        replies = dict(shown_redis_commands(narrow.redis))
        told = [
            json.loads((await asyncio.to_thread(octavo, "queue", "--json", *source)).stdout)
            for source in (("--target", narrow.target), ("--redis", narrow.redis))
        ]
        again = dict(shown_redis_commands(narrow.redis))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert set(replies) >= {"XLEN", "XPENDING", "XRANGE", "TIME"}
    assert (
        (replies["XLEN"], replies["XPENDING"]["pending"])
        == (again["XLEN"], again["XPENDING"]["pending"])
        == (taken + 3, taken)
    )
    oldest_ms = int(replies["XRANGE"][0][0].split(b"-")[0])
    ages = [clock[0] * 1000 + clock[1] // 1000 - oldest_ms for clock in (replies["TIME"], again["TIME"])]
    for rows in told:
        assert len(rows) == 1
        assert (rows[0]["worker"], rows[0]["undelivered"], rows[0]["pending"]) == ("w0", 3, taken)
        assert rows[0]["stream"] == "{octavo:default}:jobs:w0"
        assert ages[0] <= rows[0]["oldest_age_ms"] <= ages[1]


def test_queue_as_a_table(fleet: Up) -> None:
    table = octavo("queue", "--target", fleet.target).stdout.splitlines()
    assert [line.split() for line in table] == [
        ["worker", "undelivered", "pending", "oldest"],
        ["w0", "0", "0", "0"],
        ["w1", "0", "0", "0"],
    ]


def test_bench_writes_figures_and_a_plot(fleet: Up, tmp_path: Path) -> None:
    sizes = ("--prompt-tokens", "16:48", "--output-tokens", "4", "--shared-prefix", "16", "--requests", "6")
    ran = octavo(
        *("bench", "--target", fleet.target, "--concurrency", "1,3", *sizes, "--out", str(tmp_path), "--json"),
    )
    told = json.loads((tmp_path / "bench.json").read_text())
    assert json.loads(ran.stdout) == told
    assert [(level["concurrency"], level["requests"], level["errors"]) for level in told["levels"]] == [
        (1, 6, {}),
        (3, 6, {}),
    ]
    assert all(level["output_tokens"] == 24 for level in told["levels"])
    assert told["machine"]["cpu"]
    assert {worker["dtype"] for worker in told["fleet"]["workers"]} == {DTYPE}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_every_process_serves_the_metrics_of_the_page(fleet: Up) -> None:
    told = PAGE.partition("## Metrics")[2].partition("\n## ")[0]
    gateway, _, rest = told.partition("| worker |")
    worker, _, rest = rest.partition("| with pages |")
    pages, _, both = rest.partition("| both |")
    for sections, process in ((gateway + both, fleet.facts["gateways"][0]), (worker + both, fleet.facts["workers"][0])):
        with urllib.request.urlopen(f"http://{process['metrics']}/metrics", timeout=10) as page:
            families = families_of(page.read().decode())
        promised = promised_in(sections)
        assert len(promised) >= 9
        assert promised <= families
    registry = CollectorRegistry()
    PageMetrics(registry)
    assert promised_in(pages) == {
        each for each in families_of(generate_latest(registry).decode()) if "_created" not in each
    }


def families_of(page: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))


def promised_in(section: str) -> set[str]:
    return set(re.findall(r"`(octavo_[a-z_]+)", section))
