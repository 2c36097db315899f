"""The comparison with peers: real processes of made-up peers, one of which is as fast as it says."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bench.offline import BadAnswerError, Load
from bench.peers import run
from bench.peers.catalog import PEERS, Peer, Variant, variants
from bench.peers.compare import CHILD, Plan, Prepared, compare, read_answer, read_turn
from bench.peers.process import PeerFailed, PeerProcess, parsed
from bench.peers.results import Asked, Found, short, standing, table, told
from bench.plot_peers import draw_peers
from ops.cli import main

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


def test_names_of_peers_and_modes() -> None:
    assert [each.name for each in variants(["octavo:int8", "vllm", "openvino:int8", "vllm:bf16"])] == [
        *("octavo:int8", "vllm:bf16", "vllm:int8", "openvino:int8")
    ]
    with pytest.raises(
        ValueError, match=r"'tgi' is not one of octavo, vllm, openvino, llama.cpp, llama.cpp-bench, transformers"
    ):
        variants(["tgi"])
    with pytest.raises(ValueError, match="vllm has no mode 'q8_0', only bf16, int8"):
        variants(["vllm:q8_0"])


def test_modes_of_peers_that_have_none_of_their_own() -> None:
    def names(given: str, modes: str) -> str:
        return " ".join(each.name for each in variants(given.split(), modes.split()))

    assert names("vllm llama.cpp transformers", "bf16") == "vllm:bf16 llama.cpp:bf16 transformers:bf16"
    assert names("vllm openvino llama.cpp", "int8 int4") == (
        "vllm:int8 openvino:int8 openvino:int4 llama.cpp:q8_0 llama.cpp:q4_1 llama.cpp:q4_0"
    )
    assert names("llama.cpp vllm:int8", "q4_0") == "llama.cpp:q4_0 vllm:int8"
    with pytest.raises(ValueError, match="no peer has a mode 'fp8'; there are auto, bf16"):
        variants(["vllm"], ["fp8"])
    with pytest.raises(ValueError, match="none of transformers has a mode of int8"):
        variants(["transformers"], ["int8"])


def config(tmp_path: Path, **more: Any) -> run.PeersConfig:
    given: dict[str, Any] = {"names": "vllm,llama.cpp", "modes": "", "ours": "bfloat16", "check": False, **more}
    paths = {"cache": tmp_path, "out": tmp_path / "out"}
    return run.PeersConfig.of(
        loads=(LOAD,), model="smol", rounds=3, seed=0, threads=2, turn_limit=60.0, **paths, **given
    )


def test_options_of_the_command(tmp_path: Path) -> None:
    found = config(tmp_path, modes="int8", ours="bfloat16, int8")
    assert [each.name for each in found.variants] == [
        *("octavo:bfloat16", "octavo:int8", "vllm:int8", "llama.cpp:q8_0")
    ]
    assert (found.rounds, found.out) == (3, tmp_path / "out")
    checked = config(tmp_path, check=True, names="")
    assert [each.name for each in checked.variants] == ["octavo:bfloat16"]
    assert (checked.rounds, checked.out) == (1, tmp_path / "out" / "check")


def test_a_check_has_small_workloads_of_the_same_kind() -> None:
    shared = Load("B", count=32, shared=512, own=32, new=32, decoding=False)
    assert run.reduced(shared) == Load("B", count=4, shared=64, own=8, new=4, decoding=False)
    single = Load("D1", count=1, shared=0, own=128, new=128, decoding=True)
    assert run.reduced(single) == Load("D1", count=1, shared=0, own=32, new=16, decoding=True)


def test_reasons_in_the_table_are_short() -> None:
    assert short("ended with status 1: one\ntwo") == "ended with status 1: one"
    assert short("a" * 61) == "a" * 57 + "..."


def test_the_command_refuses_unknown_peers_before_anything_is_made(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["bench", "peers", "--peers", "vllm,tgi", "--cache", str(tmp_path)])
    assert (ran.exit_code, ran.output) == (
        1,
        "Error: 'tgi' is not one of octavo, vllm, openvino, llama.cpp, llama.cpp-bench, transformers\n",
    )
    assert not list(tmp_path.iterdir())


def test_scripts_of_peers_import_nothing_of_ours() -> None:
    ours = {"octavo", "kvstore", "gateway", "worker", "ops", "bench"}
    scripts = {f"{peer.script}.py" for peer in PEERS.values()}
    assert scripts <= {path.name for path in CHILD.glob("*.py")}
    for path in CHILD.glob("*.py"):
        named = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert path.name == "on_octavo.py" or not named & ours, path


def test_every_version_is_pinned() -> None:
    for peer in PEERS.values():
        if peer.environment is not None:
            wanted = [peer.environment.torch or "torch==0", *peer.environment.packages]
            assert all("==" in package for package in wanted), peer.name
