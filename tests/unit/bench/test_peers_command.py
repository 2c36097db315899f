"""`octavo bench peers`: its names and options, and what its files promise."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bench.offline import Load
from bench.peers import run
from bench.peers.catalog import PEERS, variants
from bench.peers.compare import CHILD
from bench.peers.results import short
from ops.cli import main

if TYPE_CHECKING:
    from pathlib import Path

LOAD = Load("D2", count=2, shared=0, own=3, new=10, decoding=True)


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
    ran = CliRunner().invoke(main, ["bench", "peers", "--ours", "", "--cache", str(tmp_path)])
    assert (ran.exit_code, ran.output) == (
        1,
        "Error: --ours names no mode of ours to compare with; there are bfloat16, int8, float32, auto\n",
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
