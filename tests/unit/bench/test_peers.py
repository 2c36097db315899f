"""The comparison with peers: real processes of made-up peers, one of which is as fast as it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.offline import BadAnswerError, Load
from bench.peers import run
from bench.peers.catalog import Peer, Variant
from bench.peers.compare import CHILD, Plan, Prepared, compare, read_answer, read_turn
from bench.peers.process import PeerFailed, PeerProcess, parsed
from bench.peers.results import Asked, Found, standing, table, told
from bench.plot_peers import draw_peers

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD = Load("D2", count=2, shared=0, own=3, new=10, decoding=True)
WHOLE = Load("A", count=2, shared=0, own=3, new=2, decoding=False)

SCRIPT = """
import os, sys, time

class Peer:
    versions = {"made up": "1"}

    def __init__(self, settings):
        self.settings, self.turns = settings, 0
        print("not a message")

    def answer(self, prompts, new):
        self.turns += 1
        act = self.settings.get(f"turn {self.turns}", "")
        if act:
            exec(act)
        new = self.settings.get("new", new)
        step = 1 / self.settings["rate"]
        times = [[step * (index + 1) for index in range(new)] for _ in prompts]
        return [[prompt[0] + self.settings["off"]] * new for prompt in prompts], times

def start(settings):
    if settings.get("broken"):
        raise ImportError("no such library")
    return Peer(settings)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "made_up.py"
    path.write_text(SCRIPT)
    return path


def made_up(script: Path, rate: float, *, off: int = 0, **more: Any) -> Prepared:
    command = (sys.executable, "-P", str(CHILD / "main.py"), str(script))
    return Prepared(command, {"PYTHONUNBUFFERED": "1"}, {"rate": rate, "off": off, **more})


def variant(name: str, mode: str = "bf16") -> Variant:
    return Variant(Peer(name, "", (mode,), None), mode)


def plan(tmp_path: Path, *names: str, **more: Any) -> Plan:
    made: dict[str, Any] = {"loads": (LOAD,), "rounds": 2, "turn_s": 20.0, **more}
    asked = Asked([variant(name) for name in names], made["loads"], made["rounds"], seed=0)
    return Plan(asked, vocab_size=1000, turn_s=made["turn_s"], logs=tmp_path)


def test_peers_that_fail_are_told_and_the_others_are_measured(script: Path, tmp_path: Path) -> None:
    prepared = {
        "octavo": made_up(script, 100.0),
        "slow": made_up(script, 50.0, off=1),
        "broken": made_up(script, 1.0, broken=True),
        "dying": made_up(script, 200.0, **{"turn 3": "print('out of breath', file=sys.stderr); os._exit(7)"}),
        "lazy": made_up(script, 1.0, **{"turn 1": "self.settings['new'] = 3"}),
        "hanging": made_up(script, 1.0, **{"turn 1": "time.sleep(600)"}),
        "nowhere": Prepared((str(tmp_path / "none"),), {}, {}),
    }

    def prepare(wanted: Variant) -> Prepared:
        if wanted.peer.name == "missing":
            raise PeerFailed("not installed: no such package")
        return prepared[wanted.peer.name]

    notes: list[str] = []
    asked = plan(tmp_path, *prepared, "missing", turn_s=3.0)
    results = compare(asked, prepare, made_up(script, 1.0), notes.append)
    engines = {engine["name"].partition(":")[0]: engine for engine in results["engines"]}

    slow = engines["slow"]
    assert slow["workloads"]["D2"]["tokens_per_s"] == [pytest.approx(100.0)] * 2
    assert slow["workloads"]["D2"]["ours_to_this"]["median"] == pytest.approx(2.0)
    assert (slow["agreement"], slow["failed"], slow["versions"]) == (0.0, "", {"made up": "1"})
    assert engines["octavo"]["agreement"] == 1.0
    assert engines["dying"]["workloads"]["D2"]["tokens_per_s"] == [pytest.approx(400.0), None]
    assert (engines["dying"]["agreement"], engines["dying"]["answers_compared"]) == (1.0, 2)
    assert (engines["lazy"]["agreement"], engines["lazy"]["answers_compared"]) == (None, 0)
    assert (slow["answers_compared"], results["interrupted"]) == (4, False)
    reasons = {name: engine["failed"] for name, engine in engines.items() if engine["failed"]}
    assert reasons.keys() == {"broken", "dying", "lazy", "hanging", "nowhere", "missing"}
    assert reasons["broken"] == "ImportError: no such library"
    assert reasons["dying"].startswith("D2, round 2: ended with status 7: ")
    assert reasons["dying"].endswith("out of breath")
    assert reasons["lazy"] == "D2, round 0: answer 0 has 3 tokens, not 10"
    assert reasons["hanging"] == "D2, round 0: no answer within 3 s"
    assert reasons["nowhere"].startswith("not started: ")
    assert reasons["missing"] == "not installed: no such package"
    assert "round 2, D2, slow:bf16: 100 tokens/s" in notes
    assert "slow:bf16: loading (2 of 8)" in notes
    assert "lazy:bf16 failed: D2, round 0: answer 0 has 3 tokens, not 10" in notes


def test_what_was_measured_before_ctrl_c_is_kept(script: Path, tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []

    def interrupt(note: str) -> None:
        if note == "round 2, D2, octavo:bf16: 200 tokens/s":
            raise KeyboardInterrupt

    asked = plan(tmp_path, "octavo", "other", rounds=3)
    prepared = {"octavo": made_up(script, 100.0), "other": made_up(script, 50.0)}
    results = compare(asked, lambda each: prepared[each.peer.name], made_up(script, 1.0), interrupt, kept.append)
    rates = {engine["name"]: engine["workloads"]["D2"]["tokens_per_s"] for engine in results["engines"]}
    assert rates == {
        "octavo:bf16": [pytest.approx(200.0)] * 2 + [None],
        "other:bf16": [pytest.approx(100.0), None, None],
    }
    assert results["engines"][1]["workloads"]["D2"]["ours_to_this"]["median"] == pytest.approx(2.0)
    assert [engine["agreement"] for engine in results["engines"]] == [1.0, 1.0]
    assert told(results)[-1] == "interrupted: not all of 3 rounds were done"
    assert [(each["interrupted"], each["engines"][1]["workloads"]["D2"]["most"]) for each in kept] == [
        (True, pytest.approx(100.0))
    ]


def test_ctrl_c_before_anything_was_measured_is_just_that(script: Path, tmp_path: Path) -> None:
    def interrupt(note: str) -> None:
        if note.startswith("warm-up, D2, octavo:bf16: "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(plan(tmp_path, "octavo"), lambda _: made_up(script, 9.0), made_up(script, 1.0), interrupt)


def test_every_round_begins_with_another(script: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    asked = plan(tmp_path, "octavo", "other", loads=(WHOLE, LOAD))
    compare(asked, lambda _: made_up(script, 10.0), made_up(script, 10.0), notes.append)
    order = [note.split(",")[2].split(":")[0].strip() for note in notes if note.startswith("round") and "," in note]
    assert order == ["other", "octavo"] * 2 + ["octavo", "other"] * 2


def test_without_a_reference_there_is_no_agreement(script: Path, tmp_path: Path) -> None:
    asked = plan(tmp_path, "octavo", rounds=1)
    results = compare(asked, lambda _: made_up(script, 10.0), made_up(script, 1.0, broken=True), lambda _: None)
    assert results["compared"]["failed"] == "ImportError: no such library"
    assert results["engines"][0]["agreement"] is None
    assert results["engines"][0]["workloads"]["D2"]["median"] == pytest.approx(20.0)
    assert results["best"] == {"bf16": {"D2": None}, "any": {"D2": None}}


@pytest.fixture
def process(script: Path, tmp_path: Path) -> Iterator[PeerProcess]:
    prepared = made_up(script, 1.0)
    with PeerProcess(prepared.command, prepared.environment, tmp_path / "log") as started:
        started.ask(prepared.settings, 20.0)
        yield started


def test_a_process_is_stopped_while_nobody_asks(process: PeerProcess) -> None:
    def state() -> str:
        return Path(f"/proc/{process._process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    assert process.ask({"prompts": [[4]], "new": 2}, 20.0) == {"tokens": [[4, 4]], "times": [[1.0, 2.0]]}
    while state() != "T":  # the signal was sent; when it is delivered the system decides
        pass
    process.close()
    assert process._process.returncode == 0


def test_that_an_answer_takes_long_is_told(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes only when the waiting has been told."""
    monkeypatch.setattr("bench.peers.process.TOLD_S", 0.01)
    told_it = tmp_path / "told"
    act = f"while not os.path.exists({str(told_it)!r}): time.sleep(0.01)"
    prepared = made_up(script, 1.0, **{"turn 1": act})
    with PeerProcess(prepared.command, prepared.environment, tmp_path / "log") as process:
        process.ask(prepared.settings, 20.0)
        answer = process.ask({"prompts": [[4]], "new": 1}, 20.0, lambda _: told_it.touch())
    assert answer["tokens"] == [[4]]


def test_a_message_that_is_none() -> None:
    assert parsed('{"tokens": []}\n') == {"tokens": []}
    with pytest.raises(PeerFailed, match=r"^it broke$"):
        parsed('{"error": "it broke"}')
    for line in ("Loading ...\n", "[1]\n"):
        with pytest.raises(PeerFailed, match="no message: "):
            parsed(line)


@pytest.mark.parametrize(
    "message", [{}, {"tokens": [[1]]}, {"tokens": [1], "times": [2]}, {"tokens": [["a"]], "times": [[1]]}]
)
def test_an_answer_that_is_none(message: dict[str, Any]) -> None:
    with pytest.raises(BadAnswerError, match="not lists of token ids"):
        read_answer(message)
    assert read_answer({"tokens": [[1]], "times": [[0.5]]}).times == [[0.5]]


def test_a_tool_may_tell_only_how_fast_it_was_or_that_it_can_not() -> None:
    assert read_turn(LOAD, {"rate": 12.5}) == (12.5, [])
    assert read_turn(LOAD, {"rate": None}) == (None, [])
    for rate in (0, "12", [1]):
        with pytest.raises(BadAnswerError, match="is no rate"):
            read_turn(LOAD, {"rate": rate})
    message = {"tokens": [[*range(10)]] * 2, "times": [[*range(1, 11)], [*range(1, 11)]]}
    assert read_turn(LOAD, message) == (pytest.approx(2.0), [[*range(8)]] * 2)


def test_the_best_of_both_sides_is_compared() -> None:
    names = (("octavo", "bfloat16"), ("octavo", "int8"), ("a", "bf16"), ("b", "bf16"), ("b", "int4"), ("c", "bf16"))
    asked = Asked([variant(*name) for name in names], (LOAD,), rounds=1, seed=0)
    rates = dict(zip(names, (100.0, 300.0, 80.0, 50.0, 200.0, None), strict=True))
    found = {f"{name}:{mode}": Found(rates={"D2": [rate]}) for (name, mode), rate in rates.items()}
    assert standing(asked, found, "D2", full=True) == {"ours": "octavo:bfloat16", "peer": "a:bf16", "ratio": 1.25}
    assert standing(asked, found, "D2", full=False) == {"ours": "octavo:int8", "peer": "b:int4", "ratio": 1.5}


def test_results_are_written_told_and_drawn(script: Path, tmp_path: Path) -> None:
    fails = made_up(script, 1.0, broken=True)
    prepared = {"octavo": made_up(script, 100.0), "slow": made_up(script, 50.0), "broken": fails}
    asked = plan(tmp_path, *prepared, loads=(WHOLE, LOAD))
    measured = compare(asked, lambda each: prepared[each.peer.name], made_up(script, 1.0), lambda _: None)
    results = {"model": {"name": "made up"}, "threads": 2, **measured}
    columns, rows = table(results)
    assert columns == ("engine", "A", "ours/it", "D2", "ours/it", "as float32", "failed")
    assert rows == [
        ("octavo:bf16", "200", "1.00", "200", "1.00", "100%", ""),
        ("slow:bf16", "100", "2.00", "100", "2.00", "100%", ""),
        ("broken:bf16", "-", "-", "-", "-", "-", "ImportError: no such library"),
    ]
    assert told(results) == [
        "bfloat16 weights, A: octavo:bf16 is 2.00 times slow:bf16",
        "bfloat16 weights, D2: octavo:bf16 is 2.00 times slow:bf16",
        "any mode, A: octavo:bf16 is 2.00 times slow:bf16",
        "any mode, D2: octavo:bf16 is 2.00 times slow:bf16",
        "broken:bf16 failed: ImportError: no such library",
    ]
    notes: list[str] = []
    run.write(results, tmp_path / "out", "svg", notes.append)
    assert json.loads((tmp_path / "out" / "peers.json").read_text())["best"]["any"]["A"]["ratio"] == pytest.approx(2.0)
    assert (tmp_path / "out" / "peers.svg").read_bytes().startswith(b"<?xml")
    draw_peers(results, "a title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
