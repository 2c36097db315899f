"""A model on pages is the same model: the same logits as transformers' own, the same bits as itself."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.model import tiny
from tests.unit.worker.model.tiny import BLOCK, CONFIGS, Text
from worker.model import hf
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Loaded = Callable[[str, torch.dtype], hf.HfRunner]

DTYPES = (torch.float32, torch.bfloat16)
FAMILIES = pytest.mark.parametrize("family", CONFIGS)


def tables(count: int, blocks: int, num_blocks: int = 160) -> list[list[int]]:
    """Disjoint block tables, scattered over the pool."""
    order = random.Random(count).sample(range(num_blocks), count * blocks)
    return [order[at : at + blocks] for at in range(0, len(order), blocks)]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@FAMILIES
class TestAgainstTransformers:
    """Float32 logits, relative error under 1e-4 (it is about 1e-6)."""

    def test_whole_prompts(self, family: str, models: dict[str, Path], loaded: Loaded) -> None:
        ids = tiny.tokens(200)
        expected = tiny.eager(models[family], ids)
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 3, 200):
            text = tiny.feed(loaded(family, torch.float32), Text(ids[:length], tables(1, 13)[0]))
            assert relative(text.logits[length], expected[length - 1]) < 1e-4

    def test_chunks_cut_at_odd_places(self, family: str, models: dict[str, Path], loaded: Loaded) -> None:
        ids = tiny.tokens(200)
        expected = tiny.eager(models[family], ids)
        for pieces in ((1, 2, 3, 29, 31, 62), (15, 1, 1, 17, 100), (127, 1, 1), (199,)):
            text = tiny.feed(loaded(family, torch.float32), Text(ids, tables(1, 13)[0]), *pieces)
            for length, logits in text.logits.items():
                assert relative(logits, expected[length - 1]) < 1e-4

    def test_several_sequences_in_one_batch(self, family: str, models: dict[str, Path], loaded: Loaded) -> None:
        runner = loaded(family, torch.float32)
        lengths = (3, 40, 130, 200)
        texts = [Text(tiny.tokens(length, length), table) for length, table in zip(lengths, tables(4, 13), strict=True)]
        while share := [(text, 1 + len(text.ids) // 3) for text in texts if text.done < len(text.ids)]:
            tiny.step(runner, *((text, min(count, len(text.ids) - text.done)) for text, count in share))
        for text in texts:
            expected = tiny.eager(models[family], text.ids)
            for length, logits in text.logits.items():
                assert relative(logits, expected[length - 1]) < 1e-4


@FAMILIES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestBits:
    """Every path to the logits of a position gives the same bits, pages poisoned throughout."""

    def test_any_chunking_and_decoding(self, family: str, dtype: torch.dtype, loaded: Loaded) -> None:
        runner, ids = loaded(family, dtype), tiny.tokens(150)
        table, other, third = tables(3, 11)
        decoded = tiny.feed(runner, Text(ids, table), *[1] * 36, 87, *[1] * 8)
        chunked = tiny.feed(runner, Text(ids, other), 3, 1, 11, 1, 1, 16, 90, 5, 1)
        for length, logits in chunked.logits.items():
            assert length not in decoded.logits or torch.equal(logits, decoded.logits[length])
        assert len(chunked.logits.keys() & decoded.logits.keys()) == 10
        for length in (1, 15, 16, 17, 31, 33, 127, 128, 129, 150):
            whole = tiny.feed(runner, Text(ids[:length], third))
            assert torch.equal(whole.logits[length], decoded.logits[length])

    def test_any_company(self, family: str, dtype: torch.dtype, loaded: Loaded) -> None:
        runner, ids = loaded(family, dtype), tiny.tokens(150)
        chance = random.Random(3)
        mine, other, *others = tables(9, 13)
        text, alone = Text(ids, mine), Text(ids, other)
        company = [Text(tiny.tokens(200, 10 + index), table) for index, table in enumerate(others)]
        while text.done < 150:
            count = min(chance.choice([1, 1, 5, 40]), 150 - text.done)
            share = [(text, count)]
            for neighbour in chance.sample([near for near in company if near.done < 200], chance.randint(0, 7)):
                place = chance.randint(0, len(share))
                share.insert(place, (neighbour, min(chance.choice([1, 1, 1, 30]), 200 - neighbour.done)))
            tiny.step(runner, *share)
            tiny.step(runner, (alone, count))
        assert all(torch.equal(logits, alone.logits[length]) for length, logits in text.logits.items())

    def test_a_prefix_that_another_sequence_wrote(self, family: str, dtype: torch.dtype, loaded: Loaded) -> None:
        runner, prefix = loaded(family, dtype), tiny.tokens(6 * BLOCK)
        first, second, alone = tables(3, 9)
        tiny.feed(runner, Text(prefix + tiny.tokens(20, 1), first), 50, 1, 1)
        ids = prefix + tiny.tokens(30, 2)
        shared = Text(ids, first[:6] + second[6:], done=6 * BLOCK)
        tiny.step(runner, (shared, 10))
        tiny.step(runner, (shared, 20))
        cold = tiny.feed(runner, Text(ids, alone), 106)
        assert shared.logits.keys() == cold.logits.keys()
        assert all(torch.equal(logits, cold.logits[length]) for length, logits in shared.logits.items())


@FAMILIES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestCopies:
    """A block that is copied is as good as the block."""

    def test_a_last_token_computed_again_into_a_copy(self, family: str, dtype: torch.dtype, loaded: Loaded) -> None:
        """As when a whole prompt is found in the cache: all but the last token are there, in blocks that are shared."""
        runner, ids = loaded(family, dtype), tiny.tokens(3 * BLOCK)
        first = tiny.feed(runner, Text(ids, [3, 1, 9]), 20)
        runner.copy_blocks([(9, 70)])
        again = tiny.feed(runner, Text(ids, [3, 1, 70], done=3 * BLOCK - 1))
        assert torch.equal(again.logits[3 * BLOCK], first.logits[3 * BLOCK])
        for pages in runner.attention.pages:
            assert torch.equal(pages[70], pages[9])

    def test_two_go_on_from_one_block(self, family: str, dtype: torch.dtype, loaded: Loaded) -> None:
        """As choices of one request do: a copy of the block that is partly filled, then each its own tokens."""
        runner, prompt = loaded(family, dtype), tiny.tokens(BLOCK + 5)
        parent = tiny.feed(runner, Text(prompt, [3, 1]))
        children = [
            Text(prompt + tiny.tokens(20, table[1]), table, done=BLOCK + 5) for table in ([3, 1, 8], [3, 40, 41])
        ]
        runner.copy_blocks([(1, 40)])
        for _ in range(20):
            tiny.step(runner, *((child, 1) for child in children))
        for child, table in zip(children, ([50, 51, 52], [53, 54, 55]), strict=True):
            alone = tiny.feed(runner, Text(child.ids, table), BLOCK + 5)
            assert torch.equal(alone.logits[BLOCK + 5], parent.logits[BLOCK + 5])
            assert torch.equal(alone.logits[len(child.ids)], child.logits[len(child.ids)])


def test_many_blocks_are_copied_and_none_is(loaded: Loaded) -> None:
    runner = loaded("gemma2", torch.float32)
    tiny.feed(runner, Text(tiny.tokens(BLOCK), [0]))
    runner.copy_blocks([(0, block) for block in range(1, 150)])
    runner.copy_blocks([])
    for pages in runner.attention.pages:
        assert all(torch.equal(pages[block], pages[0]) for block in (1, 64, 65, 149))
        assert pages[150].isnan().all()


@FAMILIES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_several_tokens_are_those_of_each(family: str, dtype: torch.dtype, loaded: Loaded) -> None:
    runner, ids = loaded(family, dtype), tiny.tokens(150)
    tables_of_three = tables(3, 10)
    each = tiny.feed(runner, Text(ids, tables_of_three[0]), 20, *[1] * 130).logits
    chunk = StepRow(ids[:150], 0, tables_of_three[1], 128)
    near = StepRow(tiny.tokens(9, 5), 0, tables_of_three[2], 4)
    logits = runner.forward([near, chunk, near])
    assert logits.shape == (136, tiny.VOCAB)
    assert torch.equal(logits[4:132], torch.stack([each[length] for length in range(23, 151)]))
    assert torch.equal(logits[:4], logits[132:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_and_fingerprint_do_not_depend_on_the_pool(dtype: torch.dtype, models: dict[str, Path]) -> None:
    ids = tiny.tokens(100)
    small = tiny.runner(models["llama"], dtype, num_blocks=8)
    large = tiny.runner(models["llama"], dtype, num_blocks=40, block_size=4)
    expected = tiny.feed(small, Text(ids, list(range(7))), 40).logits[100]
    assert torch.equal(tiny.feed(large, Text(ids, list(range(30, 5, -1))), 77).logits[100], expected)
    assert small.fingerprint == large.fingerprint


def test_a_runner_keeps_to_its_number_of_threads(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which threads of Python's have each for themselves, and which decides bits."""
    runner, seen, before = loaded("llama", torch.float32), [], torch.get_num_threads()
    monkeypatch.setattr(runner, "_threads", before + 1)
    hook = runner.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    with ThreadPoolExecutor(1) as executor:
        executor.submit(runner.forward, [StepRow([1, 2], 0, [0], 1)]).result()
    hook.remove()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


class TestForward:
    """The runner's contract, apart from numbers."""

    @pytest.fixture
    def runner(self, loaded: Loaded) -> hf.HfRunner:
        return loaded("llama", torch.float32)

    def test_logits_come_for_rows_that_ask_in_their_order(self, runner: hf.HfRunner) -> None:
        rows = [StepRow(tiny.tokens(5, seed), 0, [seed], logits) for seed, logits in enumerate((1, 0, 1))]
        logits = runner.forward(rows)
        assert logits.shape == (2, tiny.VOCAB)
        assert torch.equal(logits[1], runner.forward(rows[2:])[0])
        assert runner.forward(rows[1:2]).shape == (0, tiny.VOCAB)

    def test_a_repeated_call_writes_the_same(self, runner: hf.HfRunner) -> None:
        text = tiny.feed(runner, Text(tiny.tokens(50), [3, 1, 9, 4]), 40)
        before = [pages[[3, 1, 9, 4]].clone() for pages in runner.attention.pages]
        text.done = 40
        again = runner.forward([text.next(10)])
        assert torch.equal(again[0], text.logits[50])
        for pages, kept in zip(runner.attention.pages, before, strict=True):
            assert torch.equal(pages[[3, 1, 9, 4]], kept)

    def test_a_broken_sequence_leaves_its_neighbours_alone(self, runner: hf.HfRunner) -> None:
        """NaN in one sequence's pages: its logits say so, and nobody else's change a bit."""
        good, bad = Text(tiny.tokens(40), [0, 1, 2]), Text(tiny.tokens(40, 1), [3, 4, 5])
        tiny.step(runner, (good, 30), (bad, 30))
        expected = runner.forward([good.next(1)])[0].clone()
        for pages in runner.attention.pages:
            pages[3] = torch.nan
        tiny.step(runner, (bad, 1), (good, 1))
        assert torch.isnan(bad.logits[31]).all()
        assert torch.equal(good.logits[31], expected)
        fresh = Text(tiny.tokens(10, 2), [3])
        tiny.step(runner, (fresh, 5), (good, 1))
        tiny.step(runner, (fresh, 5))
        assert torch.isfinite(fresh.logits[10]).all()

    def test_rows_beyond_the_tokenizer_are_never_offered(self, models: dict[str, Path]) -> None:
        files = tiny.files(models["llama"], torch.float32, vocab_size=100)
        made = hf.load(files, num_blocks=4, block_size=BLOCK, progress=lambda _: None)
        assert made.vocab_size == 100
        assert made.forward([StepRow([1, 2], 0, [0], 1)]).shape == (1, 100)

    def test_a_tokenizer_larger_than_the_model_changes_nothing(self, models: dict[str, Path]) -> None:
        files = tiny.files(models["llama"], torch.float32, vocab_size=1000)
        assert hf.load(files, num_blocks=4, block_size=BLOCK, progress=lambda _: None).vocab_size == tiny.VOCAB


class TestFingerprint:
    """It names what decides the bits of a page."""

    def test_it_is_the_same_for_the_same_files(self, models: dict[str, Path]) -> None:
        made = [tiny.runner(models["gpt2"], torch.float32).fingerprint for _ in range(2)]
        assert made[0] == made[1]
        assert len(bytes.fromhex(made[0])) == 32

    def test_it_differs_with_weights_dtype_config_and_tokenizer(self, models: dict[str, Path], tmp_path: Path) -> None:
        original = tiny.files(models["llama"], torch.float32)
        other_rope = {"rope_type": "default", "rope_theta": 5000.0}
        moved = tiny.save(type(CONFIGS["llama"])(**{**tiny._SIZES, "rope_parameters": other_rope}), tmp_path)
        changed = [
            original,
            dataclasses.replace(original, digest="1" * 64),
            dataclasses.replace(original, dtype=torch.bfloat16),
            dataclasses.replace(original, directory=moved),
            dataclasses.replace(original, tokenizer_json=b"[]"),
            dataclasses.replace(original, tokenizer_config=b"[]"),
        ]
        made = {hf.load(given, num_blocks=4, block_size=16, progress=lambda _: None).fingerprint for given in changed}
        assert len(made) == len(changed)

    @pytest.mark.parametrize("other", ["chip", "capability", "torch", "cuda", "cudnn"])
    def test_on_cuda_it_differs_with_chip_and_libraries(self, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
        chip: dict[str, object] = {"name": "H200", "major": 9, "minor": 0}

        def described(_: torch.device) -> SimpleNamespace:
            return SimpleNamespace(**chip)

        monkeypatch.setattr(torch.cuda, "get_device_properties", described)
        before = hf._device(torch.device("cuda", 0))
        assert before == hf._device(torch.device("cuda", 1)), "two of a kind"
        if other == "chip":
            chip["name"] = "H100"
        elif other == "capability":
            chip["minor"] = 1
        elif other == "torch":
            monkeypatch.setattr(torch, "__version__", "0.1")
        elif other == "cuda":
            monkeypatch.setattr(torch.version, "cuda", "0.1")
        elif other == "cudnn":
            monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)
        assert hf._device(torch.device("cuda", 0)) != before

    def test_what_computes_is_part_of_it(self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        before = tiny.runner(models["gpt2"], torch.float32).fingerprint
        monkeypatch.setattr(hf, "_device", lambda _: ["cuda", "H200"])
        assert tiny.runner(models["gpt2"], torch.float32).fingerprint != before
