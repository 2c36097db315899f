"""What the transcript takes for lost or changed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from bench.containers import background
from bench.containers.load import TOKENS, Answer, Progress, faults, requests
from gateway.batch.lines import parse
from octavo.v1.inference_pb2 import FinishReason

GOOD = Answer(list(range(TOKENS)), "text", [FinishReason.LENGTH])


def test_answers_as_alone_are_no_fault() -> None:
    other = Answer([7] * TOKENS, "other", [FinishReason.LENGTH])
    assert faults([GOOD, other, GOOD, other], [GOOD, other]) == []


def test_each_fault_is_told_with_its_stream() -> None:
    changed = [1, *GOOD.tokens[1:]]
    results = [
        OSError("gone"),
        replace(GOOD, tokens=GOOD.tokens[:-1]),
        replace(GOOD, finishes=[]),
        replace(GOOD, finishes=[FinishReason.LENGTH] * 2),
        replace(GOOD, finishes=[FinishReason.ERROR]),
        replace(GOOD, tokens=changed),
        replace(GOOD, text="texd"),
        GOOD,
    ]
    assert faults(results, [GOOD]) == [
        "stream 0: lost: gone",
        f"stream 1: {TOKENS - 1} tokens, ends [2]",
        f"stream 2: {TOKENS} tokens, ends []",
        f"stream 3: {TOKENS} tokens, ends [2, 2]",
        f"stream 4: {TOKENS} tokens, ends [4]",
        "stream 5: other tokens than alone",
        "stream 6: other tokens than alone",
    ]


def test_each_run_asks_the_same_under_other_names() -> None:
    one, other = requests("one"), requests("other")
    assert {each.request_id for each in one}.isdisjoint(each.request_id for each in other)
    for left, right in zip(one, other, strict=True):
        right.request_id = left.request_id
        assert left == right
    assert {each.sampling.temperature > 0 for each in one} == {True, False}


def test_a_batch_asks_the_same_and_its_results_are_held_to_the_same() -> None:
    asked = requests("run")
    for line, request in zip(background.lines(asked).splitlines(), asked, strict=True):
        parsed = parse(1, line.encode())
        assert parsed is not None
        assert (parsed.request.text, parsed.request.stopping) == (request.text, request.stopping)
        assert (parsed.request.sampling.temperature, parsed.request.sampling.seed) == (
            request.sampling.temperature,
            request.sampling.seed,
        )
    good = {"token_ids": GOOD.tokens, "text": GOOD.text}
    whole = "".join(json.dumps({"id": str(index), **good}) + "\n" for index in range(2))
    assert background.faults(whole, [GOOD, GOOD]) == []
    harmed = [{"id": "0", **good}, {"id": "0", **good}, {"id": "2", "error": "gone"}, {"id": "3", **good, "text": "x"}]
    assert background.faults("\n".join(map(json.dumps, harmed)), [GOOD] * 4) == [
        "line 0: 2 results",
        "line 1: 0 results",
        "line 2: gone",
        "line 3: other tokens than alone",
    ]


async def test_who_waits_for_tokens_hears_of_them() -> None:
    progress = Progress()
    soon, late = asyncio.create_task(progress.reaches(3)), asyncio.create_task(progress.reaches(4))
    await asyncio.sleep(0)
    progress.add(2)
    progress.add(1)
    await soon
    assert not late.done()
    progress.add(5)
    await late
