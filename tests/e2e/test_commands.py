"""The README's commands, run for real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis import Redis

from octavo.v1.inference_pb2 import GenerateRequest, Stopping
from ops.client import Client
from ops.demo_text import QUESTIONS
from tests.e2e.harness import OCTAVO, eventually, octavo
from worker.intake import READ_AHEAD
from worker.page_metrics import PageMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Up

pytestmark = pytest.mark.timeout(400)

README = (Path(__file__).parents[2] / "README.md").read_text()
PARIS = ("--chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "20")


def test_the_demo_answers_eight_questions_and_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK_OF_THIS_TEST", mark := secrets.token_hex(8))
    ran = octavo("demo", timeout=380)
    answers, _, table = ran.stdout.partition("\nrequest")
    assert "1 | The capital of France is Paris" in answers
    rows = table.splitlines()[1:]
    assert [row[: len(question) + 2] for row, question in zip(rows, QUESTIONS, strict=True)] == [
        f"{number} {question}" for number, question in enumerate(QUESTIONS, 1)
    ]
    found = [re.search(r"(w\d) +(\d+) +(\d+) +(\d+) ms +([\d.]+)$", row) for row in rows]
    assert all(found), table
    cells = [match.groups() for match in found if match]
    assert {cell[0] for cell in cells} <= {"w0", "w1"}
    assert all(600 < int(prompt) < 800 for _, prompt, *_ in cells)
    # The first four start together; the second four go where the shared prompt is.
    assert all(int(cached) >= 600 for _, _, cached, *_ in cells[4:]), table
    processes = [each.info for each in psutil.process_iter(["pid", "cmdline", "environ"])]
    left = [each["cmdline"] for each in processes if mark in str(each["environ"]) and each["pid"] != os.getpid()]
    assert left == []


def test_generate_streams_text(fleet: Up) -> None:
    assert "Paris" in octavo("generate", *PARIS, "--target", fleet.target).stdout


def readme_examples() -> list[tuple[str, str]]:
    """The README's `octavo generate` commands, each with the line that it shows."""
    found = re.findall(r"^\$ (octavo generate [^\n]+)\n([^$`\n][^\n]*)\n", README, re.MULTILINE)
    return [(command, shown) for command, shown in found]


def test_the_readmes_examples_answer_what_it_shows(fleet: Up) -> None:
    examples = readme_examples()
    assert len(examples) == len(re.findall(r"^\$ octavo generate ", README, re.MULTILINE)) >= 3
    for command, shown in examples:
        _, *arguments = shlex.split(command)
        assert octavo(*arguments, "--target", fleet.target).stdout == shown + "\n"


def test_the_readmes_programs_run(fleet: Up) -> None:
    """Against this fleet, where they name gateways."""
    programs = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert programs
    for program in programs:
        for port, target in zip(("50051", "50052"), fleet.facts["targets"], strict=True):
            program = program.replace(f"127.0.0.1:{port}", target)
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stderr) == (0, ""), program
        assert ran.stdout.strip(), program


def test_health_is_about_a_live_worker(fleet: Up) -> None:
    for arguments in ((), ("--alive",)):
        assert octavo("health", *arguments, "--target", fleet.target).stdout == f"{fleet.target}: SERVING\n"
    (told,) = json.loads(octavo("health", "--json", "--target", fleet.target).stdout)
    assert told == {"address": fleet.target, "healthy": True, "status": "SERVING", "reason": ""}


def test_a_request_can_be_asked_for_again_by_its_id(fleet: Up) -> None:
    asked = ("generate", "A book is", "--max-tokens", "5", "--json", "--request-id", "again", "--target", fleet.target)
    first, second = (json.loads(octavo(*asked).stdout) for _ in range(2))
    assert (first["request_id"], second["text"]) == ("again", first["text"])  # sampled without a seed
    assert second["usage"] == first["usage"]
    other = octavo(*asked, "--seed", "1", check=False)
    assert other.stderr == "Error: ALREADY_EXISTS: --request-id 'again' is taken by another payload\n"


def test_generate_json_has_all_there_is_to_know(fleet: Up) -> None:
    told = json.loads(octavo("generate", *PARIS, "--json", "--target", fleet.target).stdout)
    assert "Paris" in told["text"]
    assert told["finish"] == "STOP"
    assert told["usage"]["completion_tokens"] == len(told["token_ids"])
    assert told["route"]["worker"] in ("w0", "w1")
    assert 0 < told["timings"]["first_token_s"] <= told["timings"]["total_s"]


def test_generate_stops_and_repeats_with_a_seed(fleet: Up) -> None:
    arguments = ("generate", "Once upon a time", "--seed", "7", "--max-tokens", "12", "--target", fleet.target)
    first, second = octavo(*arguments).stdout, octavo(*arguments).stdout
    assert first == second
    stop = first.split()[1]
    assert stop not in octavo(*arguments, "--stop", stop).stdout


async def test_ctrl_c_cancels_generate(fleet: Up) -> None:
    process = await asyncio.create_subprocess_exec(
        *(OCTAVO, "generate", "A book is", "--max-tokens", "2000", "--target", fleet.target),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, said) == (130, b"octavo: interrupted\n")
    async with Client(fleet.target) as client:

        async def empty() -> bool:
            return not any(queue.undelivered or queue.pending for queue in await client.queues())

        await eventually(empty, 5)


def test_json_of_a_call_that_timed_out_has_what_came(fleet: Up) -> None:
    long = ("generate", "A book is", "--max-tokens", "2000", "--ignore-eos", "--json", "--target", fleet.target)
    cut = octavo(*long, "--timeout", "3", check=False)
    told = json.loads(cut.stdout)
    assert (cut.returncode, told["finish"]) == (1, "ERROR")
    assert cut.stderr == f"Error: {told['error']}\n"
    assert told["text"]
    assert len(told["token_ids"]) < 2000


def test_generate_tells_errors_on_stderr(fleet: Up) -> None:
    refused = octavo("generate", "x", "--max-tokens", "999999", "--target", fleet.target, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("Error: INVALID_ARGUMENT: --max-tokens is 999999 after a prompt of 1 tokens: ")
    nobody = octavo("generate", "x", "--target", "127.0.0.1:1", check=False)
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert nobody.stderr.startswith("Error: UNAVAILABLE: ")


def test_workers_from_gateway_and_redis_agree(fleet: Up) -> None:
    moving = {"heartbeat_age_ms", "running", "waiting", "blocks_free", "blocks_cached", "blocks_used"}
    moving |= {"prefill_tokens_per_s", "step_ms", "sequence_ms"}
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


def readme_redis_commands(redis: str) -> Iterator[tuple[str, Any]]:
    """(name, reply) of every redis-cli line in the README, run against this server."""
    lines = re.findall(r"^\$? ?(redis-cli .*)$", README, re.MULTILINE)
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


async def test_queue_and_the_readmes_redis_commands_give_the_same_numbers(narrow: Up) -> None:
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
        replies = dict(readme_redis_commands(narrow.redis))
        told = [
            json.loads((await asyncio.to_thread(octavo, "queue", "--json", *source)).stdout)
            for source in (("--target", narrow.target), ("--redis", narrow.redis))
        ]
        again = dict(readme_redis_commands(narrow.redis))
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
    assert {worker["dtype"] for worker in told["fleet"]["workers"]} == {"bfloat16"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_every_process_serves_the_metrics_of_the_readme(fleet: Up) -> None:
    told = README.partition("## Metrics")[2].partition("\n## ")[0]
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
