"""Answers with a form, through a real gateway and a real worker with a tiny model that says nothing of the kind."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from octavo.v1 import job_pb2
from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping, Structure

if TYPE_CHECKING:
    from ops.client import Client
    from tests.integration.worker.one_worker import Fleet

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "leaves": {"type": "integer", "minimum": 1, "maximum": 999},
        "bound": {"type": "boolean"},
        "by": {"type": "array", "items": {"enum": ["Virgil", "Homer"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["title", "leaves", "bound", "by"],
    "additionalProperties": False,
}


def asked(structure: Structure, *, seed: int | None = None, n: int = 1, **stopping: Any) -> GenerateRequest:
    return GenerateRequest(
        text="a book",
        sampling=Sampling(temperature=0.0) if seed is None else Sampling(temperature=1.0, seed=seed),
        stopping=Stopping(max_tokens=300, **stopping),
        n=n,
        structure=structure,
    )


def is_a_book(text: str) -> bool:
    book = json.loads(text)
    return (
        list(book) == list(BOOK["properties"])
        and isinstance(book["title"], str)
        and len(book["title"]) <= 12
        and type(book["leaves"]) is int
        and 1 <= book["leaves"] <= 999
        and type(book["bound"]) is bool
        and 1 <= len(book["by"]) <= 2
        and {*book["by"]} <= {"Virgil", "Homer"}
    )


async def test_answers_are_what_the_schema_describes_whoever_else_is_served(client: Client, fleet: Fleet) -> None:
    schema = Structure(json_schema=json.dumps(BOOK))
    requests = [asked(schema), *(asked(schema, seed=seed, n=3) for seed in range(2))]
    alone = [await client.generate(request, timeout=20) for request in requests]
    plain = GenerateRequest(text="a book", stopping=Stopping(max_tokens=100), sampling=Sampling(seed=1))
    together = await asyncio.gather(*(client.generate(request, timeout=20) for request in [plain, *requests]))
    for one, again in zip(alone, together[1:], strict=True):
        assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in one.choices]
        for choice in one.choices:
            assert choice.finish == "STOP"
            assert is_a_book(choice.text), choice.text
    assert len({choice.text for answer in alone for choice in answer.choices}) > 3
    await fleet.idle()


@pytest.mark.parametrize("pattern", ["(yes|no)", r"[a-f]{3}(-\d{2}){2,4}", "é{2}語?"])
async def test_answers_match_the_expression(client: Client, pattern: str) -> None:
    for seed in range(5):
        answer = await client.generate(asked(Structure(regex=pattern), seed=seed), timeout=20)
        assert answer.finish == "STOP"
        assert re.fullmatch(pattern, answer.text), answer.text


async def test_any_object_may_be_cut_off_by_a_limit_or_a_stop_string(client: Client) -> None:
    answer = await client.generate(asked(Structure(json_object=True), seed=3), timeout=20)
    assert answer.text.lstrip().startswith("{")
    if answer.finish == "STOP":
        assert isinstance(json.loads(answer.text), dict)
    stopped = await client.generate(asked(Structure(regex="(ab){20}"), stop=["ba"]), timeout=20)
    assert (stopped.finish, stopped.text, stopped.choices[0].stop_match) == ("STOP", "a", "ba")
    short = asked(Structure(regex="(ab){200}"))
    short.stopping.max_tokens = 5
    assert (await client.generate(short, timeout=20)).finish == "LENGTH"


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (Structure(), "structure is empty: one of"),
        (Structure(json_object=False), "structure.json_object is false: must be true"),
        (Structure(regex=""), "structure.regex is 0 bytes: must have 1 to 65536"),
        (Structure(json_schema="{" + " " * 65536), "structure.json_schema is 65537 bytes: must have 1 to 65536"),
        (Structure(regex="("), "structure.regex is '('"),
        (Structure(json_schema='{"type": "nope"}'), 'structure.json_schema is \'{"type": "nope"}\': '),
    ],
    ids=["nothing", "false", "empty", "too long", "(", "nope"],
)
async def test_what_is_no_form_is_refused_and_nothing_is_queued(
    client: Client, fleet: Fleet, structure: Structure, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(asked(structure), timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(reason)
    assert not fleet.worker.engine.has_work


async def test_a_worker_refuses_what_no_gateway_has_tried(client: Client, fleet: Fleet) -> None:
    """And runs the others, before and after."""

    def spoilt(job: job_pb2.Job) -> None:
        job.structure.regex, job.stopping.ignore_eos = "(", False

    def contradictory(job: job_pb2.Job) -> None:
        job.structure.regex = "a"

    for name, edit, reason in (("a", spoilt, "structure: "), ("b", contradictory, "ignore_eos is true; it must be")):
        await fleet.submit(name, [5, 6, 7], 10, n=2, edit=edit)
        log = await fleet.ended(name)
        assert [(each.chunk.choice, each.failure) for each in log] == [(c, job_pb2.FAILURE_INVALID) for c in (0, 1)]
        assert all(each.chunk.error.startswith(reason) for each in log)
        answer = await client.generate(asked(Structure(regex="(yes|no)")), timeout=20)
        assert answer.text in ("yes", "no")
    await fleet.idle()
