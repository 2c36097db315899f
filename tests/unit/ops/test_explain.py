"""`octavo explain`: what it prints, and what it says when there is nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from octavo.v1 import fleet_pb2
from ops import explain
from ops.explain import command, story

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTE = fleet_pb2.RouteRecord(
    request_id="r1",
    policy="prefix",
    index="exact",
    prompt_tokens=1500,
    answer_tokens=64,
    predicted_cached_tokens=1280,
    chosen=1,
    candidates=[
        fleet_pb2.Candidate(
            worker="w0", prefill_s=1.5, decode_s=0.5, verdict="costlier", prefill_tokens_per_s=1000, step_ms=8
        ),
        fleet_pb2.Candidate(
            worker="w1",
            held_tokens=1024,
            stored_tokens=256,
            jobs=2,
            prefill_tokens=250,
            wait_s=0.25,
            prefill_s=0.22,
            fetch_s=0.125,
            decode_s=0.625,
            verdict="chosen",
            prefill_tokens_per_s=1000,
            step_ms=8,
            sequence_ms=1.25,
        ),
    ],
)
FOUND = fleet_pb2.ExplainResponse(
    route=ROUTE, worker="w1", state="ended", attempt=1, prompt_tokens=1500, cached_tokens=1280, started=True
)


def serving(monkeypatch: pytest.MonkeyPatch, found: fleet_pb2.ExplainResponse | None) -> None:
    async def answer(*_: object) -> fleet_pb2.ExplainResponse | None:
        return found

    monkeypatch.setattr(explain, "from_gateway", answer)
    monkeypatch.setattr(explain, "from_redis", answer)


def test_a_table_of_all_that_were_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, FOUND)
    ran = CliRunner().invoke(command, ["r1"])
    assert (ran.exit_code, [" ".join(line.split()) for line in ran.output.splitlines()]) == (
        0,
        [
            "ended on worker w1; attempt 1",
            "sent to w1 by policy prefix; prefix index exact",
            "expected: 1280 of 1500 prompt tokens cached, 64 tokens of answer",
            "found: 1280 of 1500 prompt tokens cached",
            "",
            "worker held stored jobs waiting wait prefill fetch decode cost verdict prefill/s step sequence",
            "w0 0 0 0 0 0.000 1.500 0.000 0.500 2.000 costlier 1000 8.00 ms 0.00 ms",
            "w1 1024 256 2 250 0.250 0.220 0.125 0.625 1.220 chosen 1000 8.00 ms 1.25 ms",
        ],
    )


def test_json_is_the_services_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, FOUND)
    ran = CliRunner().invoke(command, ["r1", "--json", "--redis", "redis://nowhere"])
    told: dict[str, Any] = json.loads(ran.output)
    assert (told["worker"], told["cached_tokens"], told["route"]["chosen"]) == ("w1", 1280, 1)
    assert told["route"]["candidates"][1]["held_tokens"] == 1024


@pytest.mark.parametrize(
    ("change", "line", "text"),
    [
        (lambda f: f.__setattr__("stolen_from", "w0"), 0, "ended on worker w1, which took it from w0; attempt 1"),
        (
            lambda f: f.MergeFrom(fleet_pb2.ExplainResponse(stolen_from="w0", predicted_cached_tokens=512)),
            3,
            "expected by w1: 512 of 1500 prompt tokens cached",
        ),
        (
            lambda f: f.__setattr__("fetched_tokens", 256),
            3,
            "found: 1280 of 1500 prompt tokens cached, 256 of them from the page store",
        ),
        (lambda f: f.ClearField("route"), 1, "its decision is not kept: it came without one, or many came later"),
        (lambda f: f.ClearField("started"), 3, "found: not known before its first token"),
        (
            lambda f: f.route.__setattr__("predicted_cached_tokens", 1024),
            2,
            "expected: 1024 of 1500 prompt tokens cached, 64 tokens of answer",
        ),
    ],
)
def test_the_story(change: Callable[[fleet_pb2.ExplainResponse], None], line: int, text: str) -> None:
    found = fleet_pb2.ExplainResponse()
    found.CopyFrom(FOUND)
    change(found)
    assert story(found)[line] == text


def test_a_job_that_is_unknown_to_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, None)
    ran = CliRunner().invoke(command, ["r1", "--redis", "redis://nowhere"])
    assert (ran.exit_code, ran.output) == (
        1,
        "Error: the job is unknown, or ended too long ago; what is known of it is kept for ten minutes after its end\n",
    )
