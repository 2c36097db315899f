"""`octavo bench path`: its engine under clocks, its requests, and the command; no fleet, no model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bench import path as measured
from bench.engine import EngineConfig
from bench.offline import BadAnswerError
from bench.path import FIRST_TOKENS, PathConfig, engine_config
from bench.path_engine import TimedEngine, as_engine_takes_it
from bench.path_figures import ENGINE_PARTS, first_figures, stream_figures
from bench.standin import Clock, StandIn, made_up_table, peaked_logits
from ops.child import ChildFailed
from ops.cli import main
from ops.config import FleetConfig
from tests.unit.bench.test_path_figures import FIRST, STREAMS
from worker.engine import Engine
from worker.params import SamplingParams, StopParams
from worker.sampling.sampler import TorchSampler
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from worker.step import StepRow

VOCABULARY = 300


@pytest.fixture
def engine() -> Engine:
    bank = peaked_logits(16, VOCABULARY, 0)
    return Engine(
        StandIn(bank, num_blocks=64, block_size=16, most_rows=8, clock=Clock()),
        Scheduler(BlockPool(64, 16), max_running=8, token_budget=16, context_length=100),
        sampler=TorchSampler(),
        text_stream=made_up_table(VOCABULARY).stream,
        eos_token_ids=tuple(range(VOCABULARY)),
        fingerprint="test",
    )


def requests(count: int, prompt: int = 5, new: int = 4) -> list[Request]:
    stopping = StopParams(max_tokens=new, ignore_eos=True)
    return [
        Request(str(index), tuple(range(index + 1, index + 1 + prompt)), SamplingParams(temperature=0.0), stopping)
        for index in range(count)
    ]


def test_the_parts_of_steps_add_up_and_each_takes_its_time(engine: Engine) -> None:
    ran = TimedEngine(engine).run(requests(3))
    for parts in (ran.parts, ran.first_parts):
        assert set(parts) == {*ENGINE_PARTS, "step"}
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts[name] for name in ENGINE_PARTS) == pytest.approx(parts["step"])
    assert ran.first_parts["step"] < ran.first_token < ran.wall
    assert ran.parts["step"] <= ran.wall
    assert not engine.has_work


def test_the_first_token_may_take_several_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens a step: the prompt's 40 take three, of which the last one is told."""
    seen: list[int] = []
    forward = StandIn.forward

    def noted(self: StandIn, rows: Sequence[StepRow]) -> torch.Tensor:
        seen.append(sum(len(row.token_ids) for row in rows))
        return forward(self, rows)

    monkeypatch.setattr(StandIn, "forward", noted)
    ran = TimedEngine(engine).run(requests(1, prompt=40, new=1))
    assert seen == [16, 16, 8]
    assert ran.first_token > ran.first_parts["step"]
    assert ran.parts["step"] > ran.first_parts["step"]


def test_a_request_that_fails_is_no_measurement(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(StandIn, "forward", broken)
    with pytest.raises(BadAnswerError, match="it broke"):
        TimedEngine(engine).run(requests(1))


def test_no_request_finds_another_ones_prompt_in_a_cache() -> None:
    config = PathConfig(prompt_tokens=16, streams=3, output_tokens=5)
    first, again = (config.requests_of("first", 1, 3, FIRST_TOKENS) for _ in range(2))
    assert first == again
    streams = config.requests_of("streams", 2, 3, 5)
    salts = [each.cache_salt for each in (*first, *streams)]
    assert len(set(salts)) == len(salts) == 6
    assert [each.stopping.max_tokens for each in (*first, *streams)] == [8, 8, 8, 5, 5, 5]
    taken = as_engine_takes_it(streams[0], "1/0", [4, 5])
    assert (taken.request_id, taken.prompt, taken.salt) == ("1/0", (4, 5), streams[0].cache_salt)
    assert (taken.stopping.max_tokens, taken.stopping.ignore_eos, taken.sampling.temperature) == (5, True, 0.0)


def test_the_engine_is_built_as_the_fleets_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/cache")
    config = engine_config(
        FleetConfig(
            model="m",
            dtype="int8",
            kv_dtype="int8",
            device="cpu",
            kernels="none",
            threads=3,
            kv_tokens=64,
            cache_tokens=32,
            block_run=4,
            max_running=8,
            chunk_tokens=8,
        )
    )
    assert config == EngineConfig(
        model="m",
        dtype="int8",
        kv_dtype="int8",
        device="cpu",
        kernels="none",
        threads=3,
        cache_dir=Path("/cache"),
        kv_tokens=64,
        cache_tokens=32,
        block_run=4,
        max_running=8,
        chunk_tokens=8,
    )


def test_the_command_prints_tables_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PathConfig] = []

    async def run(config: PathConfig, *_: Any) -> dict[str, Any]:
        asked.append(config)
        return {"first_token": first_figures([FIRST]), "streams": stream_figures([STREAMS], 2)}

    monkeypatch.setattr(measured, "run_path", run)
    ran = CliRunner().invoke(main, ["bench", "path", "--requests", "3", "--streams", "2", "--seed", "7"])
    assert (ran.exit_code, asked) == (0, [PathConfig(requests=3, streams=2, seed=7)])
    assert "2 streams" in ran.output
    assert "worker's event loop" in ran.output
    assert ran.output.endswith("(80.0% to 80.0%; the aim is at least 90%).\n")
    ran = CliRunner().invoke(main, ["bench", "path", "--json"])
    assert ran.output.startswith('{\n  "first_token": {')


def test_the_command_measures_one_gateway_and_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any) -> dict[str, Any]:
        raise ChildFailed("w0 ended")

    monkeypatch.setattr(measured, "run_path", run)
    ran = CliRunner().invoke(main, ["bench", "path", "--workers", "2"])
    assert ran.exit_code == 2
    assert "what is measured is one gateway and one worker" in ran.output
    ran = CliRunner().invoke(main, ["bench", "path"])
    assert (ran.exit_code, ran.output) == (1, "Error: w0 ended\n")
