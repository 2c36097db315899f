"""A real decoder whose pages are cut into blocks of any size, on tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from bench.tune_model import Subject, cut, load
from tests.unit.worker.kernels.native import NATIVE
from tests.unit.worker.model import tiny
from worker.model import loader
from worker.model.decoder import runner as decoder
from worker.model.errors import ModelUnsupported
from worker.step import StepRow

if TYPE_CHECKING:
    from pathlib import Path

BEST = next(iter(NATIVE), "")
needs_native = pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny.save(tiny.CONFIGS[name], tmp_path_factory.mktemp(name)) for name in ("llama", "gpt2")}


def runner_of(directory: Path, block_size: int, num_blocks: int) -> decoder.DecoderRunner:
    files = tiny.files(directory, torch.bfloat16)
    return decoder.load(files, NATIVE[BEST], num_blocks=num_blocks, block_size=block_size, progress=lambda _: None)


def logits(runner: decoder.DecoderRunner) -> torch.Tensor:
    """After each of 300 tokens, in two chunks."""
    ids = [(11 + 7 * index) % tiny.VOCAB for index in range(300)]
    table = [*range(-(-300 // runner.block_size))][::-1]
    first = runner.forward([StepRow(ids[:200], 0, table, 200)]).clone()
    return torch.cat([first, runner.forward([StepRow(ids[200:], 200, table, 100)])])


@needs_native
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_a_model_whose_pages_are_cut_anew_is_the_same_model(directories: dict[str, Path], block_size: int) -> None:
    made = runner_of(directories["llama"], 16, 35)
    again = decoder.DecoderRunner(
        made.native,
        cut(made.model, block_size),
        vocab_size=made.vocab_size,
        block_size=block_size,
        context_length=made.context_length,
    )
    assert again.num_blocks == 35 * 16 // block_size
    expected = runner_of(directories["llama"], block_size, 35 * 16 // block_size)
    assert torch.equal(logits(again), logits(expected))
    assert torch.equal(logits(made), logits(runner_of(directories["llama"], 16, 35)))
    assert again.model.pages.data_ptr() == made.model.pages.data_ptr()


@needs_native
def test_steps_of_every_size_run_on_one_memory(directories: dict[str, Path]) -> None:
    subject = Subject(runner_of(directories["llama"], 16, 40))
    assert (subject.kv_tokens, subject.context_length) == (640, tiny.CONTEXT)
    assert [subject.num_blocks(size) for size in (16, 64, 128)] == [40, 10, 5]
    assert subject.step(16, [[5, 1, 2], [39, 7, 0]], 40) > 0
    assert subject.step(128, [[4, 0]], 200) > 0
    with pytest.raises(ValueError, match="a block is not 0 to 4"):
        subject.step(128, [[5]], 20)


@needs_native
def test_a_model_is_loaded_as_a_worker_does(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(spec: str, **_: Any) -> loader.ModelFiles:
        return tiny.files(directories[spec], torch.float32)

    def loaded(model: str, kernels: str) -> Subject:
        monkeypatch.setattr(loader, "resolve", resolve)
        return load(
            model,
            dtype="float32",
            kernels=kernels,
            threads=1,
            kv_tokens=200,
            cache_dir=directories["llama"],
            note=lambda _: None,
        )

    threads = torch.get_num_threads()
    try:
        subject = loaded("llama", BEST)
        assert (subject.level, subject.threads, subject.dtype, subject.kv_tokens) == (BEST, 1, "float32", 192)
        with pytest.raises(ModelUnsupported, match="doesn't run in the fused decoder"):
            loaded("gpt2", "auto")
        with pytest.raises(ModelUnsupported, match="--kernels abacus: no kernels are called 'abacus'"):
            loaded("llama", "abacus")
        with pytest.raises(ModelUnsupported, match="--kernels none: blocks are tuned for them; take --kernels auto"):
            loaded("llama", "none")
    finally:
        torch.set_num_threads(threads)
