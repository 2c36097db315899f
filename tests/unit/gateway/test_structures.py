"""Structures that are tried in processes of their own: what is refused, in which words, and whom it touches: nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from gateway import structures
from gateway.errors import AdmissionError, Overloaded
from gateway.structures import TOO_MUCH, Structures
from octavo.v1.inference_pb2 import Structure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIMPLE = Structure(regex="yes|no")


@pytest.fixture
async def tried() -> AsyncIterator[Structures]:
    made = Structures()
    yield made
    await made.close()


def schema(value: Any) -> Structure:
    return Structure(json_schema=json.dumps(value))


def nested(keyword: str, depth: int) -> dict[str, Any]:
    """Two objects of the next depth each, so that there are 2^depth ways through."""
    inner: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        names = (f"a{level}", f"b{level}")
        inner = {keyword: [{"type": "object", "properties": {name: inner}, "required": [name]} for name in names]}
    return inner


BAD = {
    "a type that is none": schema({"type": "nope"}),
    "a type that is a number": schema({"type": ["object", 5]}),
    "no JSON": Structure(json_schema='{"type": '),
    "a keyword that can't be kept": schema({"type": "array", "uniqueItems": True, "contains": {}}),
    "nothing fits": schema({"type": "string", "minLength": 5, "maxLength": 3}),
    "a schema from elsewhere": schema({"$ref": "https://example.com/schema.json"}),
    "a file": schema({"$ref": "file:///etc/passwd"}),
    "an option that is none": schema({"type": "object", "x-guidance": {"nope": 1}}),
    "an open parenthesis": Structure(regex="("),
    "10,000 open parentheses": Structure(regex="(" * 10_000),
    "a look-ahead": Structure(regex="(?=a)b"),
    "a back reference": Structure(regex=r"(a)\1"),
}
MONSTERS = {
    "oneOf, 12 deep": schema(nested("oneOf", 12)),
    "anyOf, 12 deep": schema(nested("anyOf", 12)),
    "(a|a)*b, 30 times": Structure(regex="(a|a)*b" * 30),
    "a thousand of a thousand of a thousand": Structure(regex="((a{1000}){1000}){1000}"),
    "many counts": Structure(regex="(x{0,1000}y{0,1000}){500}"),
    "a thousand objects in each other": schema(
        {
            "$defs": {
                f"d{level}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{level + 1}"}}}
                for level in range(1000)
            }
            | {"d1000": {"type": "string"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "a hundred million items": schema({"type": "array", "items": {"type": "object"}, "minItems": 100_000_000}),
}


async def refusal(tried: Structures, structure: Structure) -> str:
    """In the caller's words; empty: there is none."""
    try:
        await tried.check(structure)
    except AdmissionError as refused:
        return str(refused)
    return ""


async def test_what_cannot_be_compiled_is_refused_with_the_reason(tried: Structures) -> None:
    for name, structure in BAD.items():
        said = await refusal(tried, structure)
        assert said.startswith(f"structure.{structure.WhichOneof('kind')} is "), name
        assert len(said) < 500
        assert TOO_MUCH not in said
        await tried.check(SIMPLE)


async def test_what_takes_too_much_harms_nobody(tried: Structures) -> None:
    """Whatever comes of it comes soon, and is remembered; others are served beside it."""
    asked = {name: asyncio.create_task(refusal(tried, structure)) for name, structure in MONSTERS.items()}
    for beside in range(3):
        await tried.check(Structure(regex=f"{beside}"))
    said = {name: await task for name, task in asked.items()}
    assert all(len(each) < 500 for each in said.values())
    assert TOO_MUCH in said["a thousand objects in each other"]
    assert "oneOf constraints are not supported" in said["oneOf, 12 deep"]
    tried._turn = asyncio.Semaphore(0)  # nothing is tried any more
    assert {name: await refusal(tried, structure) for name, structure in MONSTERS.items()} == said


async def test_processor_time_is_bounded(tried: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "CPU_S", 0.02)
    assert TOO_MUCH in await refusal(tried, MONSTERS["anyOf, 12 deep"])
    assert not tried._idle
    await tried.check(SIMPLE)


async def test_one_process_tries_many_and_what_came_out_is_remembered(tried: Structures) -> None:
    for _ in range(3):
        await tried.check(SIMPLE)
        await tried.check(Structure(json_object=True))
    (child,) = tried._idle
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    await tried.check(SIMPLE)
    assert len(tried._known) == 2


async def test_a_process_that_dies_of_a_structure_is_followed_by_another(tried: Structures) -> None:
    await tried.check(SIMPLE)
    (child,) = tried._idle
    os.kill(child.pid, signal.SIGSTOP)
    asking = asyncio.create_task(refusal(tried, Structure(regex="a")))
    await asyncio.sleep(0)
    for number in (signal.SIGABRT, signal.SIGCONT):  # as of an allocation that fails
        os.kill(child.pid, number)
    assert await asking == f"structure.regex is 'a': {TOO_MUCH}"
    assert await refusal(tried, Structure(regex="b")) == ""
    assert [each.pid == child.pid for each in tried._idle] == [False]


async def test_no_structure_is_to_blame_when_somebody_ends_its_process(tried: Structures) -> None:
    await tried.check(SIMPLE)
    (child,) = tried._idle
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    await tried.check(Structure(regex="a"))
    (child,) = tried._idle
    os.kill(child.pid, signal.SIGSTOP)
    asking = asyncio.create_task(tried.check(Structure(regex="b")))
    await asyncio.sleep(0)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(Overloaded, match="the process that compiles structures was ended; try again later"):
        await asking
    await tried.check(Structure(regex="b"))


async def test_a_process_that_stands_still_is_given_up_and_its_structure_may_be_tried_again(
    tried: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tried.check(SIMPLE)
    (child,) = tried._idle
    os.kill(child.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(structures, "WALL_S", 0.05)
        with pytest.raises(Overloaded, match="could not be compiled in time; try again later"):
            await tried.check(Structure(regex="a"))
    assert await child.wait() == -signal.SIGKILL
    await tried.check(Structure(regex="a"))


async def test_a_caller_that_leaves_takes_its_process_along(tried: Structures) -> None:
    await tried.check(SIMPLE)
    (child,) = tried._idle
    os.kill(child.pid, signal.SIGSTOP)
    asking = asyncio.create_task(tried.check(Structure(regex="a")))
    await asyncio.sleep(0)
    assert not tried._idle
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await child.wait() == -signal.SIGKILL
    await tried.check(Structure(regex="a"))


async def test_no_more_wait_than_there_is_room_for(tried: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "MOST_WAITING", 3)
    asked = [asyncio.create_task(refusal(tried, Structure(regex=f"{each}"))) for each in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="3 requests wait for their structures to be compiled"):
        await tried.check(Structure(regex="a"))
    assert await asyncio.gather(*asked) == [""] * 3
    await tried.check(Structure(regex="a"))
    assert len(tried._idle) == 2


async def test_what_was_tried_long_ago_is_tried_again(tried: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "KNOWN", 2)
    for regex in ("a", "b", "c"):
        await tried.check(Structure(regex=regex))
    assert len(tried._known) == 2


async def test_processes_end_with_their_gateway(tried: Structures) -> None:
    """It may have been killed: then nobody closes the pipe but the system."""
    await tried.check(SIMPLE)
    (child,) = tried._idle
    assert child.stdin is not None
    child.stdin.close()
    assert await child.wait() == 0
