"""`octavo bench kernels`, on a tiny model."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench import kernels, kernels_ceiling, kernels_model
from bench.kernels import KernelsConfig, fill, loads, run_kernels, time_step
from bench.kernels_ceiling import Memory, ideal_shape, peak
from bench.kernels_model import chosen_kernels, made_up, needed_kernels
from bench.kernels_table import Peak
from bench.kernels_work import Load
from ops.cli import main
from tests.unit.bench import quality_models
from tests.unit.worker.kernels.native import NATIVE, TEAMS
from worker.model.decoder.native import SECTIONS
from worker.model.errors import ModelUnsupported
from worker.step import StepRow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")
SMALL: dict[str, Any] = {
    "sequences": (1, 3),
    "contexts": (20,),
    "prompts": (17,),
    "attention": (5,),
    "turns": 2,
    "read_mib": 1,
    "threads": 1,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quality_models.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of what takes no time."""
    monkeypatch.setattr(kernels_ceiling, "WIDTHS", (64, 128))
    monkeypatch.setattr(kernels_ceiling, "ROWS", 32)
    monkeypatch.setattr(kernels, "CHUNK", 7)


def test_all_parts_of_all_steps_in_every_dtype(directory: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    results = run_kernels(KernelsConfig(model=str(directory), cache_dir=tmp_path, **SMALL), notes.append)
    lines = results["lines"]
    for dtype in ("bfloat16", "float32", "int8"):
        ours = [line for line in lines if line["dtype"] == dtype and not line["step"].startswith("choose")]
        steps = list(dict.fromkeys(line["step"] for line in ours))
        assert steps == ["decode 1 at 20", "decode 3 at 20", "prompt of 17", "decode 8 at 5", "prompt of 7 after 5"]
        parts = {line["part"] for line in ours if line["step"] == "prompt of 17"}
        assert parts == {*SECTIONS, "call", "whole step"} - ({"halve"} if dtype != "int8" else set())
        assert [line["part"] for line in ours if line["step"] == "decode 8 at 5"] == ["write", "attend"]
    assert [line["step"] for line in lines[-6:]] == ["choose 1", "choose 3"] * 3
    for line in lines:
        assert 0 <= line["seconds"]["least"] <= line["seconds"]["median"]
        assert line["ceiling"] is None or line["ceiling"] > 0
    assert set(results["ceilings"]["peaks"]) == {"bfloat16", "float32", "int8"}
    assert "int8: prompt of 17" in notes
    json.dumps(results)


@pytest.mark.parametrize("team", [NATIVE, TEAMS], ids=["1 thread", "3 threads"])
def test_the_parts_are_the_whole(team: dict[str, Any]) -> None:
    """What the kernels tell of a step's parts is less than what passes outside and, undisturbed, nearly all of it."""
    runner = made_up(next(iter(team.values())), ideal_shape(512), torch.bfloat16, quantized=True, tokens=256)
    row = StepRow(list(range(64)) * 4, 0, list(range(16)), 1)
    shares = []
    for _ in range(10):
        runner.nanoseconds = np.zeros(len(SECTIONS), dtype=np.int64)
        begin = time.perf_counter_ns()
        runner.forward([row])
        whole = time.perf_counter_ns() - begin
        assert (runner.nanoseconds > 0).all()
        shares.append(int(runner.nanoseconds.sum()) / whole)
    assert max(shares) <= 1
    assert max(shares) > 0.5


def test_nothing_is_measured_unasked() -> None:
    """And a step that is measured has the same bits."""
    runner = made_up(NATIVE[next(iter(NATIVE))], ideal_shape(64), torch.float32, quantized=False, tokens=32)
    row = StepRow([1, 2, 3], 0, [0], 3)
    plain = runner.forward([row]).clone()
    time_step(runner, Load(1, 3, 0), 1)
    assert runner.nanoseconds is None
    assert torch.equal(runner.forward([row]), plain)


def test_all_memory_is_read() -> None:
    native = next(iter(TEAMS.values()))
    memory = Memory(native, 3 << 20)
    assert memory.bytes == 3 << 20
    assert memory.read() == memory.best > 0
    assert memory.read() >= memory.best


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_peak_says_what_reached_it(dtype: str) -> None:
    found = peak(next(iter(NATIVE.values())), dtype)
    assert found.operations_per_s > 0
    assert found.by.startswith("our " if dtype == "int8" else ("our ", "torch's "))


@pytest.mark.parametrize(("multiplies", "product"), [(True, "bfloat16"), (False, "float32")])
def test_torch_multiplies_bfloat16_only_where_the_processor_does(
    monkeypatch: pytest.MonkeyPatch, multiplies: bool, product: str
) -> None:
    asked: list[str] = []

    def torch_peak(dtype: str) -> Peak:
        asked.append(dtype)
        return Peak(1.0, dtype)

    monkeypatch.setattr(kernels_ceiling, "multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(kernels_ceiling, "_torch_peak", torch_peak)
    peak(next(iter(NATIVE.values())), "bfloat16")
    assert asked == [product]


def test_pages_are_filled_everywhere() -> None:
    runner = made_up(next(iter(NATIVE.values())), ideal_shape(64), torch.bfloat16, quantized=False, tokens=64)
    fill(runner.model.pages)
    assert bool((runner.model.pages != 0).float().mean() > 0.9)
    assert torch.equal(runner.model.pages[0, 0], runner.model.pages[-1, -1])


def test_steps_that_the_context_has_no_room_for_are_left_out_and_told() -> None:
    notes: list[str] = []
    config = KernelsConfig(sequences=(2,), contexts=(30, 31), prompts=(32, 33), attention=(25, 26))
    found = loads(config, 31 + 1, notes.append)
    assert [load.name for load, _ in found] == [
        *("decode 2 at 30", "decode 2 at 31", "prompt of 32", "decode 8 at 25", "decode 8 at 26"),
        "prompt of 7 after 25",
    ]
    assert [note.split(":")[1] for note in notes] == [
        *(" prompt of 33, the model has 32 positions", " prompt of 7 after 26, the model has 32 positions"),
    ]


def test_kernels_by_name() -> None:
    assert chosen_kernels("none", 1) is None
    found = chosen_kernels("portable", 1)
    assert found is not None
    assert found.level == "portable"
    with pytest.raises(ModelUnsupported, match=r"--kernels best: no kernels are called 'best'; there are amx"):
        chosen_kernels("best", 1)


def test_models_that_the_decoder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_SIZE", 8)
    directory = quality_models.save(tmp_path / "model")
    with pytest.raises(ModelUnsupported, match="not run by the fused decoder: blocks of 8 tokens"):
        run_kernels(KernelsConfig(model=str(directory), cache_dir=tmp_path, **SMALL), lambda _: None)


def test_the_command_prints_a_table_and_writes_json(directory: Path, tmp_path: Path) -> None:
    options = ["--model", str(directory), "--dtypes", "bfloat16", "--cache", str(tmp_path), "--threads", "1"]
    for name in ("sequences", "contexts", "prompts", "attention"):
        options += [f"--{name}", "3"]
    options += ["--turns", "1", "--read-mib", "1", "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(main, ["bench", "kernels", *options])
    assert ran.exit_code == 0, ran.output
    rows = [line.split()[:1] for line in ran.stdout.splitlines()]
    assert 2 * 5 < rows.count(["bfloat16"]) <= 2 * (10 + 2) + 2 * 2
    assert "ceiling of products in bfloat16: " in ran.stdout
    written = json.loads((tmp_path / "out" / "kernels.json").read_text())
    assert written["config"]["sequences"] == [3]
    assert written["machine"]["cpu"]


def test_the_command_without_kernels_or_model(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["bench", "kernels", "--kernels", "none", "--out", str(tmp_path)])
    assert (ran.exit_code, ran.output) == (
        1,
        "Error: --kernels none: they are what is measured; take --kernels auto\n",
    )
    ran = CliRunner().invoke(main, ["bench", "kernels", "--attention", "64,x"])
    assert ran.exit_code == 2
    assert "'64,x' is no list of positive numbers" in ran.output


def test_kernels_that_were_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_model, "best", lambda _: None)
    with pytest.raises(
        ModelUnsupported, match=r"^no native kernels are here: some words; install a compiler, then octavo again$"
    ):
        needed_kernels("auto", 1, "some words")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--read-mib", "1000000"), "Error: --read-mib 1000000: this machine has left "),
        (("--sequences", "1000000", "--read-mib", "1"), "Error: a pool of "),
    ],
)
def test_what_memory_has_no_room_for(directory: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    options = ["--model", str(directory), "--cache", str(tmp_path), "--threads", "1"]
    ran = CliRunner().invoke(
        main, ["bench", "kernels", *options, "--contexts", "100", *words, "--out", str(tmp_path), "--dtypes", "float32"]
    )
    assert ran.exit_code == 1, ran.output
    assert ran.output.splitlines()[-1].startswith(said)
