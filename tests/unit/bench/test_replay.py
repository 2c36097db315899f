"""Recorded decisions under other policies, and their files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bench.replay import candidate_of, replay, work_of
from bench.replay_records import NoRecords, read_records, write_records
from gateway.cost import Work, cost
from gateway.router import Policy
from octavo.v1 import fleet_pb2
from ops.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def candidate(worker: str, *, held: int = 0, tokens: int = 0, prefill: int = 0, **more: Any) -> fleet_pb2.Candidate:
    """A worker that computes 100 prompt tokens in a second and decodes in 10 ms."""
    return fleet_pb2.Candidate(
        worker=worker,
        incarnation=f"{worker}/1",
        held_tokens=held,
        jobs=int(tokens > 0),
        tokens=tokens,
        prefill_tokens=prefill,
        prefill_tokens_per_s=100,
        step_ms=10,
        **more,
    )


def record(policy: str, chosen: int, *candidates: fleet_pb2.Candidate, **more: Any) -> fleet_pb2.RouteRecord:
    return fleet_pb2.RouteRecord(
        policy=policy, chosen=chosen, candidates=candidates, prompt_tokens=400, answer_tokens=100, choices=2, **more
    )


HOLDER = candidate("b", held=320, tokens=500, prefill=60, verdict="chosen")
IDLE = candidate("a", verdict="costlier")
PREFIX = record("prefix", 1, IDLE, HOLDER)
"""Where the prefix is, 0.6 s of waiting and 0.8 s of work lie before the first token; elsewhere 4 s of work."""


def test_what_a_decision_was_made_from_is_read_back() -> None:
    work = work_of(PREFIX)
    assert work == Work(prompt=400, answer=50, others=0, choices=2)
    holder = candidate_of(HOLDER)
    assert (holder.held, holder.load.jobs, holder.load.tokens, holder.load.prefill) == (320, 1, 500, 60)
    found = cost(work, holder)
    assert (found.wait_s, found.prefill_s, found.fetch_s) == pytest.approx((0.6, 0.8, 0.0))


def test_the_policy_that_decided_decides_the_same_again() -> None:
    [found] = replay([PREFIX] * 3, [Policy.PREFIX])
    assert (found.recorded_policy, found.policy, found.decisions, found.differ) == ("prefix", "prefix", 3, 0)
    assert found.recorded == found.replayed
    assert found.recorded.first_token_s == pytest.approx(1.4)
    assert found.recorded.cached == 0.8


def test_another_policy_would_have_chosen_another_worker() -> None:
    [found] = replay([PREFIX, record("prefix", 0, IDLE, HOLDER)], [Policy.LEAST_LOADED])
    assert (found.decisions, found.differ) == (2, 1)
    assert found.recorded.first_token_s == pytest.approx((1.4 + 4.0) / 2)
    assert found.replayed.first_token_s == pytest.approx(4.0)
    assert (found.recorded.cached, found.replayed.cached) == (0.4, 0.0)
    assert found.replayed.cost_s > found.recorded.cost_s


def test_a_tie_is_no_other_choice() -> None:
    twin = candidate("c", verdict="tied")
    [found] = replay([record("least-loaded", 0, candidate("a", verdict="chosen"), twin)] * 8, [Policy.LEAST_LOADED])
    assert found.differ == 0


def test_chance_chooses_another_as_often_as_there_are_others() -> None:
    """Whatever they cost; who could not be chosen is none of them."""
    workers = [IDLE, HOLDER, candidate("c", verdict="costlier"), candidate("d", verdict="is draining")]
    made = [record("prefix", 1, *workers), PREFIX, record("random", 0, candidate("a", verdict="chosen"))]
    first, second = replay(made, [Policy.RANDOM])
    assert (first.decisions, first.differ) == (2, pytest.approx(2 / 3 + 1 / 2))
    assert (second.decisions, second.differ) == (1, 0)
    drawn = [record("random", 0, candidate("a", verdict="chosen"), candidate("b", verdict="not drawn"))] * 4
    assert [each.differ for each in replay(drawn, [Policy.RANDOM, Policy.LEAST_LOADED])] == [2, 0]


def test_round_robin_goes_on_from_its_own_last_choice() -> None:
    workers = [candidate(name, verdict="tied") for name in "abc"]
    made = [record("random", 0, *workers) for _ in range(6)]
    [found] = replay(made, [Policy.ROUND_ROBIN])
    # Of a, b, c, a, b, c two are the recorded a.
    assert found.differ == 4


def test_who_could_not_be_chosen_still_can_not() -> None:
    draining = candidate("a", held=384, verdict="is draining")
    [found] = replay([record("prefix", 1, draining, HOLDER)], [Policy.PREFIX])
    assert (found.differ, found.replayed.cached) == (0, 0.8)


def test_records_are_told_by_the_policy_that_made_them() -> None:
    nobody = record("prefix", 0)
    found = replay([PREFIX, nobody, record("random", 0, IDLE)], [Policy.PREFIX, Policy.RANDOM])
    assert [(each.recorded_policy, each.policy, each.decisions) for each in found] == [
        ("prefix", "prefix", 1),
        ("prefix", "random", 1),
        ("random", "prefix", 1),
        ("random", "random", 1),
    ]
    assert replay([nobody], [Policy.PREFIX]) == []


def test_rates_stay_as_they_were_recorded() -> None:
    """Two that differ by a little would be put on a level again: the pair's median is not what either had."""
    near = candidate("a", verdict="costlier")
    near.prefill_tokens_per_s = 110
    [found] = replay([record("prefix", 1, near, candidate("b", verdict="chosen"))], [Policy.PREFIX])
    assert found.differ == 1
    assert found.recorded.first_token_s == pytest.approx(4.0)
    assert found.replayed.first_token_s == pytest.approx(400 / 110)


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    write_records([PREFIX, record("random", 0, IDLE)], path)
    assert len(path.read_text().splitlines()) == 2
    assert read_records(path) == [PREFIX, record("random", 0, IDLE)]
    path.write_text(path.read_text() + "{}\nnonsense\n")
    with pytest.raises(NoRecords, match="line 4, is no recorded decision"):
        read_records(path)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "nonsense",
            "",
            "12",
            "[]",
            "null",
            '"a"',
            '{"no": "field"}',
            '{"chosen": "x"}',
            '{"candidates": 3}',
            "\0\xff",
        ),
        *('{"policy": NaN}', "[" * 100_000, '{"a":' * 100_000, '{"chosen": 1e400}', '{"chosen": -1}', "9" * 5000),
    ],
)
def test_a_file_that_is_no_record_is_told_in_one_plain_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text + "\n")
    ran = invoke(str(path))
    assert ran.exit_code == 1
    assert ran.output == (
        f"Error: {path}, line 1, is no recorded decision: octavo bench routing --routes writes such files\n"
    )


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", "replay", *arguments])


def test_the_command(tmp_path: Path) -> None:
    path, copy = tmp_path / "routes.jsonl", tmp_path / "copy.jsonl"
    write_records([PREFIX], path)
    ran = invoke(str(path), "--policies", "least-loaded,prefix", "--save", str(copy))
    assert ran.exit_code == 0, ran.output
    [_, first, second] = ran.stdout.splitlines()
    assert first.split()[:4] == ["prefix", "least-loaded", "1", "100.0%"]
    assert second.split()[:4] == ["prefix", "prefix", "1", "0.0%"]
    assert copy.read_text() == path.read_text()
    told = json.loads(invoke(str(path), "--json", "--policies", "prefix").stdout)
    assert [(each["policy"], each["differ"]) for each in told] == [("prefix", 0)]


def test_what_the_command_refuses(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    path.write_text("")
    assert "there are no decisions" in invoke(str(path)).output
    assert "give either a FILE or --redis URL" in invoke().output
    assert "give either a FILE or --redis URL" in invoke(str(path), "--redis", "redis://x").output
    assert "'best' is none of prefix, least-loaded" in invoke(str(path), "--policies", "best").output
