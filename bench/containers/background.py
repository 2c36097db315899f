"""The same prompts as a batch, for the fleet's worker of batches: it runs while containers are killed."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

from ops.console import emit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.containers.load import Answer
    from octavo.v1.inference_pb2 import GenerateRequest

BATCH = ("exec", "-T", "batch", "octavo", "batch")
"""After compose's own arguments: the command in the container."""


def lines(requests: Sequence[GenerateRequest]) -> str:
    """A file of the short form; a line's id is its number."""
    return "".join(
        json.dumps(
            {
                "id": str(index),
                "prompt": each.text,
                "temperature": each.sampling.temperature,
                "seed": each.sampling.seed,
                "max_tokens": each.stopping.max_tokens,
                "ignore_eos": each.stopping.ignore_eos,
            }
        )
        + "\n"
        for index, each in enumerate(requests)
    )


def submit(compose: Sequence[str], requests: Sequence[GenerateRequest]) -> str:
    """The batch's id. Raises CalledProcessError."""
    batch_id = str(json.loads(_told(compose, "submit", "-", "--json", given=lines(requests)))["id"])
    emit(f"# {len(requests)} lines as a batch: {batch_id}")
    return batch_id


def ended(compose: Sequence[str], batch_id: str) -> bool:
    """Raises CalledProcessError."""
    return str(json.loads(_told(compose, "status", batch_id, "--json"))["state"]) in (
        "completed",
        "cancelled",
        "failed",
    )


def results(compose: Sequence[str], batch_id: str) -> str:
    """Its file of results. Raises CalledProcessError."""
    return _told(compose, "results", batch_id)


def faults(told: str, expected: Sequence[Answer]) -> list[str]:
    """What of a file of results is not as it was promised, a line each."""
    found = [json.loads(line) for line in told.splitlines()]
    times = Counter(each["id"] for each in found)
    wrong = [f"line {index}: {times[str(index)]} results" for index in range(len(expected)) if times[str(index)] != 1]
    for each in found:
        wanted = expected[int(each["id"])]
        if (each.get("token_ids"), each.get("text")) != (wanted.tokens, wanted.text):
            wrong.append(f"line {each['id']}: {each.get('error', 'other tokens than alone')}")
    return wrong


def _told(compose: Sequence[str], *command: str, given: str = "") -> str:
    ran = subprocess.run([*compose, *BATCH, *command], check=True, input=given, stdout=subprocess.PIPE, text=True)
    return ran.stdout
