"""The real model kept to a form: JSON that parses and fits its schema, the same bits in a crowd and when it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer

from kvstore.model_card import ModelCard
from octavo.v1.inference_pb2 import Structure
from tests.integration.worker_model.test_resume import cut_off, go_on, take
from tests.integration.worker_model.traffic import alone, engine_over
from tests.unit.worker.model import tiny
from worker.detokenize import TokenBytes
from worker.grammar import Compiler
from worker.params import SamplingParams, StopParams
from worker.sequence import Finish, Request

if TYPE_CHECKING:
    from tests.integration.worker_model.conftest import Loaded

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
ASK = "<|im_start|>user\nDescribe the capital of France as JSON.<|im_end|>\n<|im_start|>assistant\n"


def is_a_city(text: str) -> bool:
    city = json.loads(text)
    return (
        list(city) == list(CITY["properties"])
        and isinstance(city["city"], str)
        and len(city["city"]) <= 12
        and type(city["inhabitants"]) is int
        and 0 <= city["inhabitants"] <= 99_999_999
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("smollm2", ["fused"], indirect=True)
def test_json_fits_its_schema_in_a_crowd_and_cut_off_anywhere(smollm2: Loaded) -> None:
    files, runner = smollm2(torch.bfloat16)
    card = ModelCard("f", runner.vocab_size, files.eos_token_ids, files.tokenizer_json, files.tokenizer_config)
    table = TokenBytes.from_json(files.tokenizer_json)
    prompt = tuple(Tokenizer.from_str(files.tokenizer_json.decode()).encode(ASK).ids)
    compiled = Compiler(card).compile(Structure(json_schema=json.dumps(CITY)))
    greedy = Request("0", prompt, SamplingParams(temperature=0.0), StopParams(90), grammar=compiled)
    seeded = replace(greedy, request_id="1", sampling=SamplingParams(temperature=1.0, seed=1), n=2, logprobs=1)
    asked = [greedy, seeded]
    free = replace(greedy, request_id="free", grammar=None)
    first, second = (
        engine_over(runner, table, eos_token_ids=files.eos_token_ids, context_length=files.context_length)
        for _ in range(2)
    )
    expected = {request.request_id: alone(first, request) for request in asked}
    for request in asked:
        for answer in expected[request.request_id].values():
            assert answer.finish is Finish.STOP
            assert is_a_city(answer.text), answer.text
    assert "Paris" in expected["0"]["0", 0].text
    answers, left = cut_off(first, [*asked, free], 8)
    assert left == [*asked, free]
    tiny.poison(runner)
    for request in left:
        go_on(second, request, answers)
    while second.has_work:
        take(second, answers)
    for request in asked:
        for key, whole in expected[request.request_id].items():
            assert answers[key] == whole
