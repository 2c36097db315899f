"""What a step costs beside the model, measured on little: the figures add up, and the command tells them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from bench import core
from bench.core import MODES, MOST_UNUSED, PARTS, CoreConfig, Kind, core_cells, measure_steps, run_core
from bench.standin import Clock, StandIn, made_up_table, peaked_logits, prepared_tokenizer
from bench.waste import measure_waste, occupancy
from ops.cli import main
from worker.detokenize import TextStream
from worker.model.room import Memory
from worker.params import SamplingParams, StopParams
from worker.sampling.sampler import TorchSampler
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Request, Sequence, Status
from worker.step import StepRow

if TYPE_CHECKING:
    from pathlib import Path

SMALL = CoreConfig(sequences=(3, 9), steps=4, prompt_tokens=20, vocabulary=400, requests=12)


def test_every_mode_at_every_size_and_the_parts_make_up_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    notes: list[str] = []
    results = run_core(SMALL, notes.append)
    assert [(level["mode"], level["sequences"]) for level in results["levels"]] == [
        (mode, count) for mode in MODES for count in (3, 9)
    ]
    for level in results["levels"]:
        for part in ("step", *PARTS):
            assert 0 <= level[part]["least"] <= level[part]["p50"] <= level[part]["p99"]
        assert level["step"]["least"] >= sum(level[part]["least"] for part in PARTS) * 0.999
        assert level["step"]["p99"] <= sum(level[part]["p99"] for part in PARTS) * 4
        assert len(core_cells(level)) == 11
    assert (results["tokenizer"], results["vocabulary"], results["steps"]) == ("made-up tokens", 400, 4)
    assert results["waste"]["requests"] == 12
    assert notes[0] == "text of made-up tokens"
    json.dumps(results)


def test_the_models_own_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only these parts move: the model 1 s, a draw 100 ms, a schedule 10 ms, a token's text 1 ms."""
    now = 0.0

    def taking(seconds: float, owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def slow(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return inner(*arguments)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    taking(1.0, StandIn, "_next")
    taking(0.1, TorchSampler, "draw")
    taking(0.01, Scheduler, "schedule")
    taking(0.001, TextStream, "push")
    found = measure_steps(SMALL, "greedy", 3, peaked_logits(8, 400, 0), made_up_table(400), None)
    assert {part: times["p50"] for part, times in found.items()} == {
        "step": pytest.approx(113.0),
        "scheduler": pytest.approx(10.0),
        "sampler": pytest.approx(100.0),
        "text": pytest.approx(3.0),
    }


def test_who_ends_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings turn up in what is drawn; only steps of all sequences count."""
    kinds = (Kind(SamplingParams(temperature=2.0), stop=("e", "t")), Kind(SamplingParams()))
    monkeypatch.setitem(MODES, "ending", kinds)
    found = measure_steps(replace(SMALL, steps=6), "ending", 4, peaked_logits(8, 400, 0), made_up_table(400), None)
    assert found["step"]["p50"] > 0


def test_a_stand_in_gives_other_rows_each_time_and_as_many_as_are_wanted() -> None:
    bank = torch.arange(4.0)[:, None].expand(4, 10).contiguous()
    clock = Clock()
    runner = StandIn(bank, num_blocks=2, block_size=4, most_rows=6, clock=clock)
    rows = [StepRow([1, 2], 0, [0], 2), StepRow([3], 0, [1], 0), StepRow([3], 0, [1], 1)]
    assert runner.forward(rows)[:, 0].tolist() == [1, 2, 3]
    assert runner.forward(rows)[:, 9].tolist() == [2, 3, 0]
    assert clock.take()["model"] > 0
    assert clock.take() == {}


def test_logits_are_peaked_like_a_models() -> None:
    logits = peaked_logits(60, 49152, 1)
    assert torch.equal(logits, logits.bfloat16().float())
    assert torch.equal(logits[:3], peaked_logits(60, 49152, 1)[:3])
    falling = torch.softmax(logits, -1).sort(dim=-1, descending=True).values
    nucleus = (falling.cumsum(-1) < 0.9).sum(-1) + 1
    middle, most = nucleus.float().quantile(torch.tensor([0.5, 0.95])).tolist()
    assert nucleus.min() <= 3
    assert 8 < middle < 100
    assert 300 < most < 5000


def test_made_up_tokens_have_texts_and_some_are_parts_of_characters() -> None:
    table = made_up_table(1000)
    assert len(table) == 1000
    assert len({table[token] for token in range(1000)}) > 900
    assert any(table.texts[token] is None for token in range(1000))


def test_a_prepared_models_tokenizer_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert prepared_tokenizer() is None
    for age, name in ((5, "new"), (9, "old")):
        path = tmp_path / "models" / name / "tokenizer.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    assert prepared_tokenizer() == tmp_path / "models" / "new" / "tokenizer.json"


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "c": 2, "d": 3}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(path))
    with pytest.raises(ValueError, match="has 4 tokens, more than the vocabulary's 3"):
        run_core(replace(SMALL, vocabulary=3, tokenizer=path), print)
    path.write_text('{"model": 5}')
    ran = CliRunner().invoke(main, ["bench", "core", "--tokenizer", str(path)])
    assert ran.exit_code == 1
    assert ran.output.startswith(f"Error: {path}: ")


def sequence_of(pool: BlockPool, tokens: int, table: list[int]) -> Sequence:
    request = Request("a", tuple(range(tokens + 1)), SamplingParams(), StopParams(max_tokens=5))
    sequence = Sequence(request, root=b"root", block_size=pool.block_size)  # type: ignore[arg-type]
    sequence.block_table = table
    sequence.num_computed = tokens
    sequence.status = Status.RUNNING
    sequence.standing = (0, tokens)
    return sequence


def test_a_shared_block_counts_once_and_with_the_most_that_is_in_it() -> None:
    pool = BlockPool(10, 4)
    scheduler = Scheduler(pool, max_running=4, token_budget=8, context_length=40)
    assert occupancy(scheduler) == (0, 0)
    blocks = pool.allocate(4)
    assert blocks is not None
    first, second, third, spare = blocks
    pool.share([first, second])
    scheduler.running.add(sequence_of(pool, 7, [first, second]))
    scheduler.running.add(sequence_of(pool, 6, [first, second]))
    assert occupancy(scheduler) == (16, 7)
    scheduler.running.add(sequence_of(pool, 2, [third]))
    assert occupancy(scheduler) == (16, 9)
    pool.free([spare])
    assert occupancy(scheduler) == (12, 9)


def test_little_memory_holds_nothing() -> None:
    assert measure_waste(requests=4, seed=1, longest=50) == measure_waste(requests=4, seed=1, longest=50)
    found = measure_waste(requests=25, seed=1, longest=250)
    assert found.requests == 25
    assert found.choices > 25
    assert 0.005 < found.unused < MOST_UNUSED
    assert found.sequences > 5
    assert 0.1 < found.cached < 0.5


def test_the_command_prints_a_table_or_json() -> None:
    few = ("--sequences", "2", "--steps", "2", "--vocabulary", "300", "--prompt-tokens", "5", "--requests", "3")
    ran = CliRunner().invoke(main, ["bench", "core", *few])
    assert ran.exit_code == 0, ran.output
    assert [line.split("  ")[0] for line in ran.stdout.splitlines()][:5] == ["mode", *MODES]
    assert "allocated slots unused (at most 4% is the aim); 3 requests" in ran.stdout
    ran = CliRunner().invoke(main, ["bench", "core", *few, "--json"])
    assert ran.exit_code == 0, ran.output
    assert [level["mode"] for level in json.loads(ran.stdout)["levels"]] == [*MODES]
    ran = CliRunner().invoke(main, ["bench", "core", "--sequences", "0"])
    assert ran.exit_code == 2
    assert "'0' is no list of positive numbers" in ran.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--vocabulary", "99999999999"), "99999999999 is not in the range 2<=x<=1048576."),
        (("--prompt-tokens", "99999999999"), "99999999999 is not in the range 1<=x<=1048576."),
        (("--sequences", "8,5000"), "5000 is more than 4096"),
        (("--sequences", "9" * 5000), f"{'9' * 5000} is more than 4096"),
    ],
)
def test_sizes_have_limits(words: tuple[str, str], said: str) -> None:
    ran = CliRunner().invoke(main, ["bench", "core", *words])
    assert ran.exit_code == 2, ran.output
    assert said in ran.output


def test_what_memory_has_no_room_for_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "machine", lambda: Memory(1 << 20, "this machine has"))
    ran = CliRunner().invoke(main, ["bench", "core", "--sequences", "2,4", "--prompt-tokens", "100"])
    assert ran.exit_code == 1
    assert ran.output.startswith("Error: 4 sequences of 100 tokens over a vocabulary of 49152 take 26,010,016 bytes, ")
    assert ran.output.endswith("this machine has 0.0 GiB: take fewer --sequences, --prompt-tokens or --vocabulary\n")
