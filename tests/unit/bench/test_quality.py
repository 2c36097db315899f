"""`octavo bench quality`, on tiny models and on some whose every answer is known."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner

from bench.kernels_model import check_runnable, chosen_kernels
from bench.quality import (
    QUALITY_COLUMNS,
    TEXT,
    Likeness,
    QualityConfig,
    Task,
    compare,
    continue_greedily,
    cut,
    measure,
    quality_cells,
    run_quality,
    score,
)
from ops.cli import main
from tests.unit.bench import quality_models
from tests.unit.bench.quality_models import FRONT, ids
from tests.unit.worker.kernels.native import NATIVE
from tests.unit.worker.model import tiny
from worker.model import loader
from worker.model.errors import ModelUnsupported
from worker.step import NotFinite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.step import StepRow

needs_kernels = pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")
WORDS = "".join(chr(ord("a") + (index * index + index // 7) % 26) for index in range(100))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quality_models.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(directory: Path, tmp_path: Path) -> QualityConfig:
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    return QualityConfig(
        model=str(directory),
        text=text,
        window=40,
        prompts=20,
        prompt_tokens=9,
        new=3,
        threads=1,
        cache_dir=tmp_path / "cache",
    )


def changed(config: QualityConfig, **changes: Any) -> QualityConfig:
    return replace(config, **changes)


class Counting:
    """A model that holds the next number for likeliest, by ``lead``, and all others for equally likely."""

    vocab_size = 50
    block_size = 16
    num_blocks = 100

    def __init__(self, lead: float, broken: bool = False) -> None:
        self.lead = lead
        self.broken = broken
        self.lengths: dict[int, int] = {}
        """By first block: positions that are written."""

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        logits = []
        for row in rows:
            assert row.start in (0, self.lengths.get(row.block_table[0]))
            self.lengths[row.block_table[0]] = row.start + len(row.token_ids)
            assert self.lengths[row.block_table[0]] <= len(row.block_table) * self.block_size
            one = torch.zeros(len(row.token_ids), self.vocab_size)
            for index, token in enumerate(row.token_ids):
                one[index, (token + 1) % self.vocab_size] = math.nan if self.broken else self.lead
            logits.append(one[len(one) - row.logits :])
        return torch.cat(logits)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError(pairs)


def test_every_token_has_the_log_probability_that_the_model_gives_it() -> None:
    likely, other = math.log(49 / (49 + 49)), math.log(1 / (49 + 49))
    counted = score(Counting(math.log(49)), [7, 8, 9, 30, 31], unscored=1)
    assert counted.dtype == torch.float64
    assert counted.tolist() == pytest.approx([likely, likely, other, likely], rel=1e-6)
    assert score(Counting(math.log(49)), [7, 8, 9, 30, 31], unscored=3).tolist() == counted[2:].tolist()
    assert len(score(Counting(1.0), [index % 50 for index in range(300)], unscored=1)) == 299


def test_prompts_are_continued_by_the_likeliest_tokens_each_in_blocks_of_its_own() -> None:
    model = Counting(1.0)
    prompts = [[1, 2, 3], [20] * 15, [48]]
    assert continue_greedily(model, prompts, 4) == [(4, 5, 6, 7), (21, 22, 23, 24), (49, 0, 1, 2)]
    assert model.lengths == {0: 6, 2: 18, 4: 4}


def test_more_prompts_than_run_at_once_and_several_windows() -> None:
    task = Task(windows=([1, 2, 3], [1, 5]), unscored=1, prompts=tuple([number] for number in range(40)), new=2)
    notes: list[str] = []
    likeness = measure(Counting(0.0), task, notes.append)
    assert likeness.logprobs.tolist() == pytest.approx([-math.log(50)] * 3)
    assert likeness.continued == ((0, 0),) * 40  # the first of equals
    assert notes == ["window 1 of 2", "window 2 of 2", *(f"prompt {done} of 40" for done in (16, 32, 40))]
    assert (task.scored, task.longest, task.blocks) == (3, 3, 16)


def test_logits_that_are_no_numbers_are_no_measurement() -> None:
    with pytest.raises(NotFinite, match="not finite"):
        score(Counting(1.0, broken=True), [1, 2, 3], 1)


def test_a_text_is_cut_into_windows_and_prompts(config: QualityConfig, directory: Path) -> None:
    files = loader.resolve(
        str(directory), cache_dir=config.cache_dir, dtype="float32", device="cpu", progress=lambda _: None
    )
    task = cut("abcdefghij", files, changed(config, window=4, prompts=3, prompt_tokens=4))
    assert task.windows == tuple([FRONT, *ids(part)] for part in ("abcd", "efgh", "ij"))
    assert task.prompts == tuple([FRONT, *ids(part)] for part in ("abcd", "defg", "ghij"))
    assert (task.unscored, task.scored) == (1, 10)
    with pytest.raises(ValueError, match="has 10 tokens, too few for 8 prompts that differ"):
        cut("abcdefghij", files, changed(config, prompts=8, prompt_tokens=4))


def test_figures_of_known_answers() -> None:
    reference = Likeness(torch.tensor([-1.0, -2.0, -3.0, -2.0]).double(), ((1, 2), (3, 4), (5, 6), (7, 8)))
    other = Likeness(torch.tensor([-1.5, -2.0, -3.5, -2.0]).double(), ((1, 2), (3, 9), (0, 6), (7, 8)))
    found = compare(reference, other)
    assert found == pytest.approx(
        {
            "perplexity": math.exp(2.25),
            "ratio": math.exp(0.25),
            "ratio_error": math.exp(0.25) * 0.25 / 2,
            "mean_abs_logprob_difference": 0.25,
            "first_token_agreement": 0.75,
            "agreement": 0.5,
        }
    )
    cells = quality_cells({"dtype": "int8", "by": "fused decoder", **found})
    assert cells == ("int8", "fused decoder", "9.4877", "+28.40%", "16.05%", "0.2500", "75.0%", "50.0%")
    assert len(cells) == len(QUALITY_COLUMNS)


@needs_kernels
def test_a_model_beside_itself(config: QualityConfig, directory: Path) -> None:
    results = run_quality(changed(config, dtypes=("float32",)), lambda _: None)
    (found,) = results["dtypes"]
    perplexity = found.pop("perplexity")
    assert found == {
        "dtype": "float32",
        "by": "fused decoder",
        "ratio": 1.0,
        "ratio_error": 0.0,
        "mean_abs_logprob_difference": 0.0,
        "first_token_agreement": 1.0,
        "agreement": 1.0,
    }
    expected = []
    for part in (WORDS[:40], WORDS[40:80], WORDS[80:]):
        window = [FRONT, *ids(part)]
        rows = tiny.eager(directory, window)[:, : quality_models.VOCABULARY].double().log_softmax(-1)
        expected += [row[token].item() for row, token in zip(rows, window[1:], strict=False)]
    assert len(expected) == results["text"]["scored_tokens"] == 100
    assert perplexity == pytest.approx(math.exp(-sum(expected) / 100), rel=1e-5)


@needs_kernels
def test_fewer_bits_are_less_like_it(config: QualityConfig) -> None:
    results = run_quality(config, lambda _: None)
    assert [found["dtype"] for found in results["dtypes"]] == ["float32", "bfloat16", "int8"]
    exact, half, eight = (found["mean_abs_logprob_difference"] for found in results["dtypes"])
    assert exact == 0 < half < eight < 1
    assert results["text"]["prompts"] == 20
    json.dumps(results)


def test_without_kernels_transformers_model_is_measured(config: QualityConfig) -> None:
    results = run_quality(changed(config, dtypes=("bfloat16",), kernels="none"), lambda _: None)
    assert [found["by"] for found in results["dtypes"]] == ["transformers"] * 2
    assert 0 < results["dtypes"][1]["mean_abs_logprob_difference"] < 0.1
    assert results["kernels"] is None
    with pytest.raises(ModelUnsupported, match="int8 needs the fused decoder"):
        run_quality(changed(config, dtypes=("int8",), kernels="none"), lambda _: None)


def test_a_window_that_the_model_has_no_positions_for(config: QualityConfig) -> None:
    assert config.text
    config.text.write_text(WORDS * 3)
    with pytest.raises(ValueError, match="128 positions, too few for 201 tokens"):
        run_quality(changed(config, window=200), lambda _: None)


def test_the_text_is_always_the_same() -> None:
    """Figures on another text could not be compared with older ones."""
    text = TEXT.read_text(encoding="utf-8")
    assert 2000 <= len(text.split()) <= 4000
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "865188dcb0c668d149fec4f9d58026f5d0f9cc48e97f85b29e8f7ee868df5b9b"
    )


@needs_kernels
def test_the_command_prints_a_table_and_writes_json(config: QualityConfig, tmp_path: Path) -> None:
    options = ["--model", config.model, "--text", str(config.text), "--dtypes", "int8, bfloat16", "--prompts", "5"]
    options += ["--window", "40", "--prompt-tokens", "9", "--threads", "1", "--cache", str(config.cache_dir)]
    ran = CliRunner().invoke(main, ["bench", "quality", *options, "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert lines[-1] == "100 tokens scored, in 3 windows; 5 prompts continued"
    assert [line.split()[0] for line in lines[-4:-1]] == ["float32", "int8", "bfloat16"]
    assert "octavo: int8: window 3 of 3" in ran.stderr
    written = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert written["machine"]["cpu"]
    assert written["config"]["new"] == 8


def test_the_command_tells_what_is_wrong(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["bench", "quality", "--dtypes", "int8,int3"])
    assert ran.exit_code == 2
    assert "'int3' is not one of bfloat16, float32, int8" in ran.output
    damaged = tmp_path / "text.txt"
    damaged.write_bytes(b"\xff\xfe")
    ran = CliRunner().invoke(main, ["bench", "quality", "--text", str(damaged), "--out", str(tmp_path)])
    assert ran.exit_code == 1
    assert ran.output.startswith(f"Error: {damaged} can't be read: 'utf-8' codec")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--dtypes", "bfloat16", "--kv-dtype", "int8", "--kernels", "none"),
            "--kv-dtype int8 needs the fused decoder, which can't run {name} here: there are no native kernels; "
            "take --kv-dtype auto",
        ),
        (
            ("--dtypes", "bfloat16,int8", "--kernels", "none"),
            "--dtype int8 needs the fused decoder and its native kernels; take bfloat16 or float32",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_measured(
    config: QualityConfig, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    options = ["--model", config.model, "--text", str(config.text), "--cache", str(config.cache_dir), "--threads", "1"]
    ran = CliRunner().invoke(main, ["bench", "quality", *options, *words, "--out", str(tmp_path)])
    assert ran.exit_code == 1
    assert ran.output.splitlines()[-1] == f"Error: {said.format(name=Path(config.model).name)}"
    assert "window" not in ran.output


@needs_kernels
def test_a_model_that_is_not_fused_is_refused_before_anything_is_measured(tmp_path: Path, directory: Path) -> None:
    files = replace(tiny.files(tiny.save(tiny.CONFIGS["gpt2"], tmp_path), torch.float32), name="other")
    native = chosen_kernels("auto", 1)
    check_runnable(files, native, eight_bit_pages=False)
    check_runnable(tiny.files(directory, torch.float32), native, eight_bit_pages=True)
    with pytest.raises(ModelUnsupported, match=r"^--kv-dtype int8 needs .* can't run other here: .*auto$"):
        check_runnable(files, native, eight_bit_pages=True)
