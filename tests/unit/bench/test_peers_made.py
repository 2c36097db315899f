"""What peers are given: environments made once, and the model in other forms with the same numbers in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from bench.peers import export, install
from bench.peers.catalog import PEERS, Environment, Peer, Variant
from bench.peers.prepare import Preparation, kv_gib, llama_options
from bench.peers.process import PeerFailed
from bench.peers.tools import run_tool, shown


def test_ours_needs_no_environment(tmp_path: Path) -> None:
    assert install.installed(PEERS["octavo"], tmp_path, print) == Path(sys.prefix)
    assert not list(tmp_path.iterdir())


def test_an_environment_is_made_once_and_again_when_another_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is installed here; what would be is written down."""
    ran: list[list[str]] = []

    def take(command: list[str], *_: object, **__: object) -> None:
        ran.append(command)
        if "venv" in command:
            binary = install.python(Path(command[-1]))
            binary.parent.mkdir(parents=True)
            binary.touch()
        if command[-1] == "torch==1+cpu":
            raise PeerFailed("no such build")

    monkeypatch.setattr(install, "_run", take)
    notes: list[str] = []
    first = Peer("other", "on_other", ("bf16",), Environment(torch="torch==1", packages=("a==1",), removed=("b",)))
    made = install.installed(first, tmp_path, notes.append)
    assert made == tmp_path / "peers" / "other" / "venv"
    assert [command[4:] for command in ran[1:]] == [
        ["install", "torch==1+cpu"],
        ["install", "torch==1"],
        ["install", "torch==1", "a==1"],
        ["uninstall", "-y", "b"],
    ]
    install.installed(first, tmp_path, notes.append)
    assert (len(ran), len(notes)) == (5, 1)
    install.installed(Peer("other", "on_other", ("bf16",), Environment(packages=("a==2",))), tmp_path, notes.append)
    assert [command[4:] for command in ran[6:]] == [["install", "a==2"]]


def test_an_environment_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    peer = Peer("other", "on_other", ("bf16",), Environment(packages=("a==1",)))
    notes: list[str] = []
    with pytest.raises(PeerFailed, match=r"^not installed: venv .* ended with status 1: .*; see .*install.log$"):
        install.installed(peer, tmp_path, notes.append)
    assert notes[1].startswith("other: venv ")
    assert not (tmp_path / "peers" / "other" / "made.json").exists()


def test_without_a_debian_package_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the environment is made; that something is missing is told."""

    def take(command: list[str], *_: object, **__: object) -> None:
        if command[0] == "apt-get":
            raise PeerFailed("no such package")

    monkeypatch.setattr(install, "_run", take)
    monkeypatch.setattr("shutil.which", lambda _: "/bin/true")
    notes: list[str] = []
    install.installed(Peer("other", "on_other", ("bf16",), Environment(debian=("libfast4",))), tmp_path, notes.append)
    assert notes[1] == "other: without libfast4: no such package"
    assert (tmp_path / "peers" / "other" / "made.json").exists()


def test_a_tool_is_run_with_its_words_in_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.tools.TOLD_S", 0.01)
    told = tmp_path / "told"
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        if len(notes) > 1:
            told.touch()

    wait = f"while [ ! -e {told} ]; do :; done"
    with (tmp_path / "log").open("w") as log:
        run_tool(["/bin/sh", "-c", f"echo one; {wait}"], log, 20.0, note)
        assert (notes[0], (tmp_path / "log").read_text().splitlines()[-1]) == (f"sh -c echo one; {wait}", "one")
        assert notes[1].startswith(f"{notes[0]}: ")
        with pytest.raises(PeerFailed, match=r"ended with status 3: ERROR: no space; see .*log$"):
            run_tool(["/bin/sh", "-c", "echo ERROR: no space; echo bye; exit 3"], log, 20.0, note)
        with pytest.raises(PeerFailed, match=r"^sleep 600: not done within 0.1 s; see .*log$"):
            run_tool(["/bin/sleep", "600"], log, 0.1, note)
        with pytest.raises(PeerFailed, match=r"^nothing: .*No such file"):
            run_tool([str(tmp_path / "nothing")], log, 0.1, note)


def test_an_installer_starts_no_more_compilers_than_cores_can_run(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        run_tool(["/bin/sh", "-c", "echo $MAKEFLAGS"], log, 20.0, [].append)
    assert (tmp_path / "log").read_text().splitlines()[-1] == f"-l{(os.cpu_count() or 1) + 1}"


def test_commands_are_shown_short() -> None:
    assert shown(["/a/python", "-m", "pip", "--disable-pip-version-check", "install", "a==1"]) == "pip install a==1"
    assert shown(["/a/tool", "b" * 200]) == "tool " + "b" * 152 + "..."


def test_half_made_forms_are_made_anew(tmp_path: Path) -> None:
    made = 0

    def make(folder: Path) -> None:
        nonlocal made
        made += 1
        assert not list(folder.iterdir())
        (folder / "part").touch()
        if made == 1:
            raise PeerFailed("it broke")

    with pytest.raises(PeerFailed):
        export.once(tmp_path / "a" / "form", make)
    for _ in range(2):
        assert export.once(tmp_path / "a" / "form", make) == tmp_path / "a" / "form"
    assert made == 2


def test_int8_has_a_scale_per_row_and_says_so(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weight = torch.tensor([[1.27, -0.635, 0.01], [0.0, 0.0, 0.0], [-254.0, 2.0, 1.0]]).bfloat16()
    head = torch.ones(2, 3).bfloat16()
    save_file({"model.layers.0.q_proj.weight": weight, "lm_head.weight": head}, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "manifest.json").write_text("{}")
    made = export.int8(model, tmp_path / "int8")
    tensors = load_file(made / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], head)
    rows, scales = tensors["model.layers.0.q_proj.weight"], tensors["model.layers.0.q_proj.weight_scale"]
    assert (rows.dtype, scales.shape) == (torch.int8, (3, 1))
    assert rows[:, 0].tolist() == [127, 0, -127]
    assert (rows * scales - weight.float()).abs().max() <= scales.max() / 2
    config = json.loads((made / "config.json").read_text())
    assert (config["model_type"], config["quantization_config"]["format"]) == ("llama", "int-quantized")
    assert {path.name for path in made.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(("kind", "off"), [("bf16", 0.0), ("q8_0", 0.02), ("q4_1", 0.2), ("q4_0", 0.3)])
def test_a_gguf_of_another_type_has_the_same_fields_and_numbers(tmp_path: Path, kind: str, off: float) -> None:
    """`off`: how far its steps let a number be from what it was; the largest is 3 or so."""
    numbers = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    source = tmp_path / "source.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_block_count(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "Ã", "©", "Ã©", "bytes1"])
    writer.add_tensor("blk.0.attn_q.weight", numbers)
    writer.add_tensor("output_norm.weight", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = GGUFReader(export.gguf(source, tmp_path / "made", kind))
    assert made.fields["llama.block_count"].contents() == 3
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "bytes1_", "bytes2", "Ã©", "bytes1"]
    matrix, norm = made.tensors
    assert (matrix.tensor_type, norm.tensor_type) == (GGMLQuantizationType[kind.upper()], GGMLQuantizationType.F32)
    rounded = torch.from_numpy(numbers).bfloat16().float().numpy()
    found = dequantize(matrix.data, matrix.tensor_type)
    assert np.abs(found - rounded).max() <= off
    assert np.array_equal(norm.data, numbers[0])


def test_tokens_that_are_text_or_have_letters_of_no_byte_keep_their_names() -> None:
    tokens = ["Ġthe", "Ċ", "<|im_end|>", "Ļ", "Ã", "日", "abÃ"]
    assert export.streamable(tokens) == ["Ġthe", "Ċ", "<|im_end|>", "bytes3", "bytes4", "日", "bytes6"]


def test_only_a_gguf_becomes_another(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="only a model that comes as GGUF"):
        export.gguf(tmp_path, tmp_path / "made", "bf16")


def with_config(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (folder / "config.json").write_text(json.dumps(config))


def test_memory_for_keys_and_values() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 512}
    assert kv_gib(config, 2**18) == 1
    assert kv_gib(config, 2**18 + 1) == 2
    assert kv_gib({**config, "num_key_value_heads": 1, "head_dim": 64}, 2**21) == 1


def test_a_process_is_told_the_model_and_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "peers" / "vllm" / "venv"
    (environment / "lib").mkdir(parents=True)
    (environment / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr("bench.peers.prepare.installed", lambda *_: environment)
    with_config(tmp_path / "model")
    preparation = Preparation("smol", tmp_path / "model", tmp_path / "a.gguf", "key", tmp_path, 2, 32, print)
    theirs = preparation.prepare(Variant(PEERS["vllm"], "bf16"))
    assert theirs.command[0] == str(environment / "bin" / "python")
    assert theirs.command[-1] == "on_vllm.py"
    assert theirs.settings["model"] == str(tmp_path / "model")
    assert theirs.environment["LD_PRELOAD"] == str(environment / "lib" / "libiomp5.so")
    assert theirs.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert theirs.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    mine = preparation.prepare(Variant(PEERS["octavo"], "bfloat16"))
    assert mine.command[0] == sys.executable
    assert (mine.settings["model"], mine.settings["mode"], mine.settings["threads"]) == ("smol", "bfloat16", 2)
    assert mine.settings["cache"] == str(tmp_path)


def test_llama_cpp_does_not_reorder_weights_where_that_crashes() -> None:
    assert llama_options(["avx2", "amx_tile", "amx_int8"]) == ["--no-repack"]
    assert llama_options(["avx2", "avx512f"]) == []


def test_that_a_form_of_the_model_is_written_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.prepare.installed", lambda *_: tmp_path)
    monkeypatch.setattr("bench.peers.export.write_gguf", lambda _, target, __: target.touch())
    notes: list[str] = []
    with_config(tmp_path)
    preparation = Preparation("smol", tmp_path, tmp_path / "a.gguf", "key", tmp_path, 2, 32, notes.append)
    for _ in range(2):
        made = preparation.prepare(Variant(PEERS["llama.cpp"], "q8_0"))
        assert made.settings["model"] == str(tmp_path / "peers" / "models" / "key" / "llama.cpp-q8_0" / "model.gguf")
        assert isinstance(made.settings["options"], list)
    assert notes == [f"llama.cpp:q8_0: writing the model in its form to {tmp_path / 'peers/models/key/llama.cpp-q8_0'}"]
