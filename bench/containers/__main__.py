"""Brings up the fleet of compose.yaml, kills a worker's and a gateway's container under load, and checks every answer.

    python -m bench.containers            # as root, to kill what runs in containers

What is printed is the transcript. Each answer under load, and each line of a batch that runs beside it, is compared
with the one that the same request had alone, token by token. The exit status is 1 where one differs, is lost, or has no
end. Containers are killed from outside, all of their processes at once: after `docker kill` Docker takes them for
stopped on purpose, and restarts nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import click

from bench.containers import background
from bench.containers.docker import PROJECT, Container, all_healthy, compose, containers, kill, show, until
from bench.containers.load import PROMPTS, TOKENS, Answer, Progress, alone, answer, faults, requests
from gateway.client import Client
from ops.console import emit

if TYPE_CHECKING:
    from collections.abc import Sequence

OCTAVO = Path(sys.executable).with_name("octavo")
WORKERS = 4
STRUCK_S = 10.0
"""From the end of the last stream until what was still to be killed is given up."""
ROUNDS = 4
"""How often all prompts are asked at once."""
WORKER_AT, GATEWAY_AT = 0.15, 0.4
"""Which part of all tokens has come when a container is killed."""


async def under_load(targets: Sequence[str], run: str) -> tuple[list[Answer | BaseException], list[Container]]:
    """All answers, or what became of them, and the containers that were killed meanwhile."""
    progress, killed = Progress(), list[Container]()
    asked = [request for turn in range(ROUNDS) for request in requests(f"{run}-load{turn}")]
    answers = [Answer() for _ in asked]
    clients = [Client([*targets[first:], *targets[:first]]) for first in range(len(targets))]
    streams = [
        asyncio.create_task(answer(clients[index % len(clients)], request, into, progress))
        for index, (request, into) in enumerate(zip(asked, answers, strict=True))
    ]

    async def strike() -> None:
        everything = len(asked) * TOKENS
        await progress.reaches(int(WORKER_AT * everything))
        busiest = Counter(each.worker for each in answers if not each.finishes).most_common()[0][0]
        worker = next(each for each in await asyncio.to_thread(containers, "worker") if each.id in busiest)
        emit(f"# {progress.tokens} of {everything} tokens have come")
        kill(worker)
        killed.append(worker)
        await progress.reaches(int(GATEWAY_AT * everything))
        gateway = next(each for each in await asyncio.to_thread(containers, "gateway") if each.target == targets[0])
        emit(
            f"# {progress.tokens} of {everything} tokens have come, {sum(not a.finishes for a in answers)} streams open"
        )
        kill(gateway)
        killed.append(gateway)

    striking = asyncio.create_task(strike())
    try:
        results = await asyncio.gather(*streams, return_exceptions=True)
        # Where all failed before, too few tokens come for a strike: fewer are killed, which is told.
        await asyncio.wait([striking], timeout=STRUCK_S)
        striking.cancel()
    finally:
        for client in clients:
            await client.close()
    return results, killed


def by_http(port: str) -> str:
    """The first prompt's answer by OpenAI's API."""
    body = {"model": "", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "seed": 0}
    with urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as response:
        body["model"] = json.load(response)["data"][0]["id"]
    asked = Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(asked, timeout=120) as response:
        told: dict[str, Any] = json.load(response)
    return str(told["choices"][0]["text"])


def ledger(targets: Sequence[str]) -> dict[str, int]:
    """Raises CalledProcessError where it does not add up."""
    asked = [str(OCTAVO), "ledger", "--json", "--target", ",".join(targets)]
    found: dict[str, int] = json.loads(subprocess.run(asked, check=True, capture_output=True).stdout)
    return {name: int(count) for name, count in found.items()}


def main() -> int:
    """Returns the exit status. Raises ClickException where something does not come about."""
    os.chdir(Path(__file__).parents[2])
    command, run = compose(), f"{os.getpid()}-{time.time_ns():x}"
    try:
        show(*command, "up", "-d", quiet=True)
        until("all containers are healthy", all_healthy)
        show(*command, "up", "-d", "--scale", f"worker={WORKERS}", quiet=True)
        until(f"all are healthy with {WORKERS} workers", all_healthy)
        return checked(command, run)
    finally:
        show("docker", "ps", "-a", "--filter", f"name={PROJECT}", "--format", "table {{.Names}}\t{{.Status}}")
        show(*command, "down", "-v", quiet=True)
        emit(f"# containers left: {len(containers())}")


def checked(compose_command: Sequence[str], run: str) -> int:
    """Returns the exit status."""
    gateways = containers("gateway")
    targets = [each.target for each in gateways]
    expected = asyncio.run(alone(targets, run))
    emit(f"# {len(expected)} requests, each alone: {sum(each.whole for each in expected)} whole")
    wrong = [f"alone: {index}" for index, each in enumerate(expected) if not each.whole]
    told = by_http(gateways[0].ports["8000"])
    emit(f"# by HTTP the same text: {told == expected[0].text}")
    wrong += [f"by HTTP: {told!r}"] if told != expected[0].text else []
    batch = background.submit(compose_command, requests(run))
    began = time.monotonic()
    results, killed = asyncio.run(under_load(targets, run))
    wrong += faults(results, expected)
    resumed = sum(isinstance(each, Answer) and each.attempts > 1 for each in results)
    emit(f"# {len(results)} streams at once, in {time.monotonic() - began:.0f} s; {resumed} went on at another worker")
    until("the batch has ended", lambda: background.ended(compose_command, batch))
    wrong += background.faults(background.results(compose_command, batch), expected)
    emit(f"# lost, repeated or changed, of these and the batch's {len(expected)}: {len(wrong)}")
    for line in wrong:
        emit(line)
    names = {each.name for each in killed}
    until(
        f"{', '.join(sorted(names))} are back and healthy",
        lambda: all_healthy() and all(each.restarts for each in containers() if each.name in names),
    )
    targets = [each.target for each in containers("gateway")]
    until("no job is in flight", lambda: ledger(targets)["in_flight"] == 0, 30)
    emit(f"# octavo ledger: {ledger(targets)}")
    again = asyncio.run(alone(targets[::-1], f"{run}-after"))
    same = [each.tokens for each in again] == [each.tokens for each in expected]
    emit(f"# afterwards, each alone: the same tokens: {same}")
    return 0 if same and not wrong and len(killed) == 2 else 1


@click.command("containers")
def command() -> None:
    """Bring up the fleet of deploy/compose.yaml, kill containers under load, check every answer, take it down."""
    if status := main():
        raise SystemExit(status)


if __name__ == "__main__":
    command()
