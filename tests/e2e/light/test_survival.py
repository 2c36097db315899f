"""What is accepted is answered, whatever is killed: fleets of simulated workers, with all else real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from openai import APIError, OpenAI
from redis import Redis

from gateway import client as resilient
from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping
from ops.answer import Answer
from ops.client import Client
from tests.e2e.harness import OCTAVO, Up, eventually, octavo

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(400)

LONG = ("A book is", "--temperature", "0", "--max-tokens", "150", "--ignore-eos")
"""Three seconds of answer."""


@pytest.fixture(scope="module")
def two() -> Iterator[Up]:
    """Two of each."""
    up = Up.start(
        *("--gateways", "2", "--workers", "2", "--http-port", "0", "--model", "simulated:4000,20", "--grace", "5")
    )
    try:
        yield up.until_ready()
    finally:
        status = up.stop()
    assert status == 0, "\n".join(up.said)


@pytest.fixture
def slow() -> Iterator[Up]:
    """One worker that takes ten seconds for a prompt of 200 tokens."""
    up = Up.start("--model", "simulated:20,20", "--grace", "5")
    try:
        yield up.until_ready()
    finally:
        status = up.stop()
    assert status == 0, "\n".join(up.said)


def pid_of(up: Up, name: str) -> int:
    """Of the life that it leads now."""
    lives = [found[1] for line in up.said if (found := re.search(rf"\b{name} is back \(pid (\d+)\)", line))]
    born = [each["pid"] for each in (*up.facts["gateways"], *up.facts["workers"]) if each["name"] == name]
    return int(lives[-1] if lives else born[0])


def comes_back(up: Up, name: str, lives: int) -> None:
    """Waits until `octavo up` has started it again so often."""
    up.until(lambda: sum(f"{name} is back" in line for line in up.said) >= lives, 60)


def worker_of(answer: Answer) -> str:
    """Where it began."""
    assert answer.route is not None
    return str(answer.route.worker)


def ledger(up: Up) -> dict[str, int]:
    """As the command tells it, which fails where it does not add up."""
    told: dict[str, int] = json.loads(octavo("ledger", "--json", "--target", up.target).stdout)
    return told


def begun(up: Up, *targets: str) -> subprocess.Popen[str]:
    """An `octavo generate` whose answer has begun."""
    asked = subprocess.Popen(
        [OCTAVO, "generate", *LONG, "--target", ",".join(targets)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asked.stdout is not None
    # Of the pipe itself: what a stream has read ahead, communicate() does not give back.
    assert os.read(asked.stdout.fileno(), 1), up.said
    return asked


async def runs(client: Client, request_id: str, attempt: int) -> bool:
    """Whether a worker has taken it, so often."""
    try:
        found = await client.explain(request_id)
    except grpc.aio.AioRpcError:
        return False  # not submitted yet
    return (found.state, found.attempt) == ("running", attempt)


def whole(up: Up) -> str:
    """What nothing disturbs."""
    return octavo("generate", *LONG, "--target", up.target).stdout


@pytest.mark.parametrize("gateways", [2, 1])
def test_generate_goes_on_when_its_gateway_is_killed(two: Up, gateways: int) -> None:
    """At the other one; where it knows no other, at the same one once that is back, which it says it waits for."""
    expected = whole(two)
    lives = sum("g0 is back" in line for line in two.said)
    asked = begun(two, *two.facts["targets"][:gateways])
    os.kill(pid_of(two, "g0"), signal.SIGKILL)
    rest, error = asked.communicate(timeout=60)
    assert asked.returncode == 0, error
    if gateways == 1:
        assert error.startswith(f"octavo: no gateway at {two.facts['targets'][0]} goes on (UNAVAILABLE: "), error
        assert error.endswith("; trying for 60 s, see --patience\n"), error
    assert error.count("\n") == 2 - gateways, error
    assert expected.endswith(rest)
    assert len(rest) == len(expected) - 1
    comes_back(two, "g0", lives + 1)


async def test_a_killed_worker_is_missed_by_nobody(two: Up) -> None:
    """Its jobs go on at the other one, and `octavo up` starts it again."""
    expected = whole(two)
    request = GenerateRequest(
        text=LONG[0], sampling=Sampling(temperature=0), stopping=Stopping(max_tokens=150, ignore_eos=True)
    )
    answers = [Answer() for _ in range(6)]
    first = [asyncio.Event() for _ in answers]

    async def read(client: resilient.Client, answer: Answer, begins: asyncio.Event, salt: int) -> None:
        asked = GenerateRequest()
        asked.CopyFrom(request)
        asked.cache_salt = str(salt)
        async for response in client.generate(asked, timeout=60):
            answer.add(response, time.monotonic())
            begins.set()
        answer.end(time.monotonic())

    async with resilient.Client(two.facts["targets"]) as client, asyncio.TaskGroup() as group:
        for index, answer in enumerate(answers):
            group.create_task(read(client, answer, first[index], index))
        await asyncio.gather(*(each.wait() for each in first))
        victim = worker_of(answers[0])
        lives = sum(f"{victim} is back" in line for line in two.said)
        os.kill(pid_of(two, victim), signal.SIGKILL)
    assert {answer.text + "\n" for answer in answers} == {expected}
    for answer in answers:
        assert answer.usage is not None
        assert (answer.finish, answer.usage.completion_tokens) == ("LENGTH", 150)
        assert answer.usage.attempts == (2 if worker_of(answer) == victim else 1)
    await asyncio.to_thread(comes_back, two, victim, lives + 1)


async def runs_at(up: Up, request_id: str) -> str:
    """The worker that has it."""
    async with Client(up.target) as client:
        return str((await client.explain(request_id)).worker)


def by_http(gateway: int, up: Up) -> OpenAI:
    """OpenAI's client of one of the gateways. It tries nothing again."""
    where = up.facts["gateways"][gateway]["http"]
    return OpenAI(base_url=f"http://{where}/v1", api_key="none", max_retries=0)


def test_by_http_too_a_killed_worker_is_missed_by_nobody_and_a_killed_gateway_by_who_asks_again(two: Up) -> None:
    """Under the same id, at the other gateway. The killed one comes back on its port."""
    expected = whole(two)
    fields = {"model": "", "prompt": LONG[0], "temperature": 0, "max_tokens": 150, "stream": True}
    asked: Any = {**fields, "extra_body": {"ignore_eos": True}, "extra_headers": {"x-request-id": "by-http"}}
    with by_http(0, two) as first, by_http(1, two) as second:
        events = first.completions.create(**asked)
        text = next(events).choices[0].text
        victim = asyncio.run(runs_at(two, "by-http"))
        lives = [sum(f"{name} is back" in line for line in two.said) for name in (victim, "g0")]
        os.kill(pid_of(two, victim), signal.SIGKILL)
        text += "".join(event.choices[0].text for event, _ in zip(events, range(20), strict=False))
        os.kill(pid_of(two, "g0"), signal.SIGKILL)
        with pytest.raises(APIError):
            text += "".join(event.choices[0].text for event in events)
        assert expected.startswith(text)
        again = "".join(event.choices[0].text for event in second.completions.create(**asked))
        assert again + "\n" == expected
        comes_back(two, victim, lives[0] + 1)
        comes_back(two, "g0", lives[1] + 1)
        assert first.completions.create(**{**asked, "stream": False}).choices[0].text == again


def test_a_worker_that_is_alone_goes_on_with_its_jobs_when_it_is_back(slow: Up) -> None:
    expected = whole(slow)
    asked = begun(slow, slow.target)
    os.kill(pid_of(slow, "w0"), signal.SIGKILL)
    rest, error = asked.communicate(timeout=90)
    assert (asked.returncode, error) == (0, "")
    assert (expected.endswith(rest), len(rest)) == (True, len(expected) - 1)
    assert ledger(slow)["finished"] == 2


def test_the_ledger_adds_up_and_redis_says_the_same(two: Up) -> None:
    assert octavo("generate", *LONG[:3], "--max-tokens", "2", "--target", two.target).stdout
    told = ledger(two)
    with Redis.from_url(two.redis) as client:
        counted: dict[str, int] = {
            name.decode(): int(value) for name, value in client.hgetall("{octavo:default}:ledger").items()
        }
        workers = client.zrange("{octavo:default}:workers", 0, -1)
        waiting = sum(client.xlen(f"{{octavo:default}}:jobs:{worker.decode()}") for worker in workers)
    assert told["missing"] == 0
    assert (told["accepted"], told["finished"]) == (counted["accepted"], counted["finished"])
    assert {name: value for name, value in told.items() if value} == counted | (
        {"in_flight": waiting} if waiting else {}
    )
    assert told["accepted"] == waiting + sum(value for name, value in counted.items() if name != "accepted")


async def test_what_kills_its_worker_each_time_is_put_aside_and_can_be_tried_again(slow: Up) -> None:
    poison = GenerateRequest(request_id="poison", text="x" * 200, stopping=Stopping(max_tokens=2))
    async with Client(slow.target) as client:
        asked = asyncio.create_task(client.generate(poison))
        for death in range(3):
            await eventually(partial(runs, client, "poison", death + 1), 60)
            os.kill(pid_of(slow, "w0"), signal.SIGKILL)
            await asyncio.to_thread(comes_back, slow, "w0", death + 1)
        failed = await asyncio.gather(asked, return_exceptions=True)
        assert "3 workers died while they ran it" in str(failed[0])
        source = ("--target", slow.target)
        (dead,) = json.loads(octavo("dead", "list", "--json", *source).stdout)
        assert (dead["request_id"], dead["worker"], dead["attempts"]) == ("poison", "w0", 3)
        assert "payload" not in dead
        shown = json.loads(octavo("dead", "show", "poison", "--json", *source).stdout)
        assert shown["payload"]["stopping"]["max_tokens"] == 2
        assert (ledger(slow)["dead"], ledger(slow)["finished"]) == (1, 0)

        again = json.loads(octavo("dead", "retry", "poison", "--json", *source).stdout)["request_id"]
        assert again == "poison.retry-1"
        output = json.loads(octavo("attach", again, "--json", *source).stdout)
        assert (output["request_id"], len(output["token_ids"]), output["finish"]) == (again, 2, "LENGTH")
        assert (
            json.loads(octavo("attach", again, "--after", "1", "--json", *source).stdout)["token_ids"]
            == (output["token_ids"][1:])
        )
        assert ledger(slow)["finished"] == 1
        assert octavo("dead", "drop", "poison", *source).stdout == "dropped 1\n"
        assert json.loads(octavo("dead", "list", "--json", *source).stdout) == []
