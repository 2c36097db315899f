"""The real model on pages: transformers' logits in float32, one set of bits in bfloat16, and sense in what it says."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import TYPE_CHECKING

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from tests.unit.worker.model import tiny
from tests.unit.worker.model.tiny import Text
from worker.step import StepRow

if TYPE_CHECKING:
    from tests.integration.worker_model.conftest import Loaded
    from worker.model.loader import ModelFiles

pytestmark = pytest.mark.timeout(300)

PROSE = (
    "An octavo is a book whose sheets are folded into eight leaves. In 1501 Aldus Manutius printed Virgil in this "
    "small format, so that readers could carry the poet about with them; 3,000 copies were sold within a few years. "
)


def tables(count: int, blocks: int) -> list[list[int]]:
    order = random.Random(count).sample(range(400), count * blocks)
    return [order[at : at + blocks] for at in range(0, len(order), blocks)]


@cache
def tokenizer(given: bytes) -> Tokenizer:
    """Made once: it takes seconds."""
    return Tokenizer.from_str(given.decode())


def encode(files: ModelFiles, text: str) -> list[int]:
    found: list[int] = tokenizer(files.tokenizer_json).encode(text).ids
    return found


class TestFiles:
    """What the conversion made of the file."""

    def test_description(self, smollm2: Loaded) -> None:
        files, runner = smollm2(torch.bfloat16)
        assert (files.name, files.eos_token_ids, files.vocab_size) == ("smollm2-135m", (2,), 49152)
        assert (files.context_length, runner.vocab_size) == (8192, 49152)
        assert runner.num_blocks == 400

    def test_the_template_brings_its_own_system_prompt(self, smollm2: Loaded) -> None:
        files, _ = smollm2(torch.bfloat16)
        template = jinja2.Template(json.loads(files.tokenizer_config)["chat_template"])
        text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        ids = encode(files, text)
        assert ids[:2] == [1, 9690]
        assert ids.count(2) == 2

    def test_numbers_are_cut_into_digits(self, smollm2: Loaded) -> None:
        files, _ = smollm2(torch.bfloat16)
        pieces = tokenizer(files.tokenizer_json).encode("in 2024: 10,000").tokens
        assert pieces == ["in", "Ġ", "2", "0", "2", "4", ":", "Ġ", "1", "0", ",", "0", "0", "0"]


def test_logits_are_those_of_transformers(smollm2: Loaded) -> None:
    files, runner = smollm2(torch.float32)
    ids = encode(files, PROSE * 6)[:300]
    expected = tiny.eager(files.directory, ids)
    prompts = [Text(ids[:length], table) for length, table in zip((1, 15, 16, 17, 300), tables(5, 19), strict=True)]
    tiny.step(runner, *((text, len(text.ids)) for text in prompts[:-1]))
    tiny.feed(runner, prompts[-1], 1, 14, 1, 1, 30, 81, 1, 1, 100)
    for text in prompts:
        for length, logits in text.logits.items():
            assert (logits - expected[length - 1]).norm() / expected[length - 1].norm() < 1e-4


@pytest.mark.parametrize(("dtype", "threads"), [(torch.bfloat16, 1), (torch.float32, 2)], ids=str)
def test_every_path_gives_the_same_bits(dtype: torch.dtype, threads: int, smollm2: Loaded) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        files, runner = smollm2(dtype)
        ids = encode(files, PROSE * 8)[:410]
        whole_table, chunked_table, mixed_table, *others = tables(9, 40)
        whole = {length: tiny.feed(runner, Text(ids[:length], whole_table)) for length in (17, 128, 129, 390, 410)}
        chunked = tiny.feed(runner, Text(ids, chunked_table), 16, 1, 90, 20, 1, 1, 1, 255, 5, *[1] * 18)
        mixed, chance = Text(ids, mixed_table), random.Random(1)
        company = [Text(encode(files, PROSE[seed:] * 9)[:600], table) for seed, table in enumerate(others)]
        for count in (16, 1, 111, 1, 261, 1, 1, 1, 16, 1):
            share = [(near, chance.choice([1, 1, 7, 30])) for near in chance.sample(company, chance.randint(1, 6))]
            share.insert(chance.randint(0, len(share)), (mixed, count))
            tiny.step(runner, *share)
        shared = Text(ids, chunked_table[:20] + whole_table[20:], done=320)
        tiny.step(runner, (shared, 70))
        tiny.step(runner, (shared, 20))
        for length, text in whole.items():
            assert torch.equal(chunked.logits[length], text.logits[length])
            assert length not in mixed.logits or torch.equal(mixed.logits[length], text.logits[length])
        assert mixed.logits.keys() >= {17, 129, 390, 410}
        assert torch.equal(shared.logits[390], whole[390].logits[390])
        assert torch.equal(shared.logits[410], whole[410].logits[410])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_thirty_one_neighbours_change_nothing(dtype: torch.dtype, smollm2: Loaded) -> None:
    """Decoding among them, on a copied block, and all at once: logits of many tokens, as prompts are scored by."""
    files, runner = smollm2(dtype)
    assert getattr(runner, "doubts", ()) == ()
    ids = encode(files, PROSE * 3)[:112]
    solo_table, mixed_table, scored_table, *others = tables(34, 8)
    solo = tiny.feed(runner, Text(ids, solo_table), 90, *[1] * 22)
    company = [Text(encode(files, PROSE[seed:] * 2)[: 40 + seed], table) for seed, table in enumerate(others)]
    tiny.step(runner, *((near, 20 + seed) for seed, near in enumerate(company)))
    mixed = Text(ids, [*solo_table[:5], mixed_table[0], mixed_table[1], mixed_table[2]], done=95)
    runner.copy_blocks([(solo_table[5], mixed_table[0])])
    for _ in range(17):
        tiny.step(runner, *((near, 1) for near in company[:17]), (mixed, 1), *((near, 1) for near in company[17:]))
    whole = runner.forward([StepRow(ids, 0, scored_table, 112)])
    assert len(mixed.logits) == 17
    for length, logits in solo.logits.items():
        assert torch.equal(whole[length - 1], logits)
        assert length not in mixed.logits or torch.equal(mixed.logits[length], logits)
    assert torch.equal(torch.log_softmax(whole, -1)[111:], torch.log_softmax(whole[111:], -1))


def test_it_knows_the_capital_of_france(smollm2: Loaded) -> None:
    files, runner = smollm2(torch.bfloat16)
    template = jinja2.Template(json.loads(files.tokenizer_config)["chat_template"])
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = Text(encode(files, template.render(messages=question, add_generation_prompt=True)), list(range(8)))
    start = len(text.ids)
    tiny.feed(runner, text)
    while (token := int(text.logits[text.done].argmax())) not in files.eos_token_ids and text.done < start + 40:
        text.ids.append(token)
        tiny.step(runner, (text, 1))
    answer = tokenizer(files.tokenizer_json).decode(text.ids[start:])
    assert "Paris" in answer
