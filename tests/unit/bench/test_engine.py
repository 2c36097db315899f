"""`octavo bench engine`, over an engine without a model."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bench import engine as measured
from bench.engine import ENGINE_COLUMNS, EngineConfig, OurEngine, engine_cells, run_engine
from bench.offline import BadAnswerError, Load
from bench.standin import Clock, StandIn, made_up_table, peaked_logits
from ops.cli import main
from worker.engine import Engine
from worker.model.errors import ModelNotFound
from worker.params import AdmissionError
from worker.sampling.sampler import TorchSampler
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from worker.config import WorkerConfig

VOCABULARY = 300
LOADS = (
    Load("A", count=3, shared=8, own=5, new=4, decoding=False),
    Load("D2", count=2, shared=0, own=5, new=6, decoding=True),
)


def built(config: WorkerConfig, *_: Any) -> Any:
    bank = peaked_logits(16, VOCABULARY, 0)
    blocks, size = config.num_blocks, config.block_size
    scheduler = Scheduler(BlockPool(blocks, size), max_running=32, token_budget=64, context_length=100)
    engine = Engine(
        StandIn(bank, num_blocks=blocks, block_size=size, most_rows=32, clock=Clock()),
        scheduler,
        sampler=TorchSampler(),
        text_stream=made_up_table(VOCABULARY).stream,
        eos_token_ids=tuple(range(VOCABULARY)),
        fingerprint="test",
    )
    card = SimpleNamespace(vocab_size=VOCABULARY)
    info = SimpleNamespace(dtype="float32", context_length=scheduler.context_length)
    return SimpleNamespace(engine=engine, card=card, info=info)


@pytest.fixture(autouse=True)
def _without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "build", built)


def test_every_workload_in_every_round() -> None:
    notes: list[str] = []
    results = run_engine(EngineConfig(threads=1, kv_tokens=256), LOADS, 2, 0, notes.append)
    assert [note.split(":")[0] for note in notes] == ["round 1, A", "round 1, D2", "round 2, A", "round 2, D2"]
    for workload in results["workloads"]:
        assert len(workload["tokens_per_s"]) == 2
        assert 0 < workload["least"] <= workload["median"] <= workload["most"]
        assert len(engine_cells(workload)) == len(ENGINE_COLUMNS)
    assert (results["config"]["threads"], results["config"]["dtype"], results["rounds"]) == (1, "float32", 2)
    json.dumps(results)


def test_answers_have_all_their_tokens_whatever_ends_a_text() -> None:
    """Every token of this model ends a text."""
    engine = OurEngine(EngineConfig(kv_tokens=256), lambda _: None)
    for _ in range(2):
        answer = engine.answer([[1, 2, 3], [4, 5]], 7)
        assert [len(tokens) for tokens in answer.tokens] == [7, 7]
        assert all(times == sorted(times) and times[0] > 0 for times in answer.times)
        assert not engine.engine.has_work


def test_a_request_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OurEngine(EngineConfig(kv_tokens=256), lambda _: None)

    def broken(*_: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(StandIn, "forward", broken)
    with pytest.raises(BadAnswerError, match="it broke"):
        engine.answer([[1, 2, 3]], 2)


def test_a_step_of_a_table_is_that_of_all_sequences() -> None:
    workload = {"name": "D8", "count": 8, "shared": 0, "own": 128, "new": 64, "decoding": True}
    cells = engine_cells({**workload, "median": 400.0, "least": 390.0, "most": 4100.0})
    assert cells == ("D8", 8, 128, 64, "400", "390", "4,100", "20.00 ms")


def test_the_command_takes_workloads_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(config: EngineConfig, loads: tuple[Load, ...], *_: Any) -> dict[str, Any]:
        asked.append([load.name for load in loads])
        raise ModelNotFound(f"no model {config.model}")

    monkeypatch.setattr(measured, "run_engine", run)
    ran = CliRunner().invoke(main, ["bench", "engine", "--workload", "D8, A", "--model", "none"])
    assert (ran.exit_code, ran.output) == (1, "Error: no model none\n")
    CliRunner().invoke(main, ["bench", "engine"])
    assert asked == [["A", "D8"], ["A", "B", "D1", "D8", "D32"]]
    ran = CliRunner().invoke(main, ["bench", "engine", "--workload", "D9"])
    assert ran.exit_code == 2
    assert "'D9' is not one of A, B, D1, D8, D32" in ran.output


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (("--block-size", "1024", "--kv-tokens", "32"), "32 tokens are less than two blocks of 1024"),
        (("--block-size", "24"), "24 is not a power of two"),
        (("--step-tokens", "4"), "4 is not in the range 16<=x<=65536."),
        (("--kernels", "abacus"), "'abacus' is not one of 'auto', 'none'"),
    ],
)
def test_sizes_that_a_worker_refuses_are_refused(sizes: tuple[str, ...], said: str) -> None:
    ran = CliRunner().invoke(main, ["bench", "engine", *sizes])
    assert ran.exit_code == 2
    assert said in ran.output


def test_a_workload_without_room_is_refused_before_any_runs() -> None:
    ran = CliRunner().invoke(main, ["bench", "engine", "--kv-tokens", "96", "--workload", "A"])
    assert (ran.exit_code, ran.output) == (
        1,
        "Error: workload A has sequences of 192 tokens; the pool and the model's context have room for 96; "
        "give more --kv-tokens, or leave out workloads\n",
    )
    load = Load("E", count=1, shared=0, own=60, new=37, decoding=False)
    assert load.longest == 97
    with pytest.raises(AdmissionError, match=r"workload E has sequences of 97 tokens; .* room for 96$"):
        run_engine(EngineConfig(kv_tokens=96), (LOADS[0], load), 1, 0, pytest.fail)
    over = replace(load, own=64)  # the model's context has 100
    with pytest.raises(AdmissionError, match=r"workload E has sequences of 101 tokens; .* room for 100$"):
        run_engine(EngineConfig(kv_tokens=512), (LOADS[0], over), 1, 0, pytest.fail)
