"""The README's commands that ask for answers, run for real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from ops.client import Client
from ops.demo_text import QUESTIONS
from tests.e2e.harness import OCTAVO, eventually, octavo
from tests.e2e.pages import blocks, meant, run_program

if TYPE_CHECKING:
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


def test_the_readmes_curl_is_answered(fleet: Up) -> None:
    (command,) = re.findall(r"^\$ (curl .+)$", README, re.MULTILINE)
    ran = subprocess.run(meant(command, fleet), shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in json.loads(ran.stdout)["choices"][0]["message"]["content"]


def test_the_readmes_programs_run(fleet: Up) -> None:
    """Against this fleet, where they name gateways."""
    programs = blocks("README.md", "python")
    assert programs
    for program in programs:
        assert run_program(program, fleet).strip(), program


def test_a_request_can_be_asked_for_again_by_its_id(fleet: Up) -> None:
    asked = ("generate", "A book is", "--max-tokens", "5", "--json", "--request-id", "again", "--target", fleet.target)
    first, second = (json.loads(octavo(*asked).stdout) for _ in range(2))
    assert (first["request_id"], second["text"]) == ("again", first["text"])  # sampled without a seed
    assert second["usage"] == first["usage"]
    other = octavo(*asked, "--seed", "1", check=False)
    cure = "choose another id, or send the same payload to get its answer"
    assert other.stderr == f"Error: ALREADY_EXISTS: --request-id 'again' is taken by another payload; {cure}\n"


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
