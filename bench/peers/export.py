"""The one model in the forms that peers read. Made once, kept in the cache, all from the same bfloat16 weights.

========================  ==========================================================================
form                      who reads it
========================  ==========================================================================
bfloat16 safetensors      all but the next ones
int8, compressed-tensors  vllm:int8. One scale per row of a weight; activations per token, in flight
GGUF, by type             llama.cpp; only of a model that came as GGUF
OpenVINO, by weights      openvino; exported in its own environment
========================  ==========================================================================
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, Final

from filelock import FileLock

from bench.peers.process import PeerFailed
from bench.peers.tools import run_tool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

EXPORT_S: Final = 3600.0
_LINEAR: Final = ("_proj.weight",)
"""How the names of linear layers end; embeddings and the head stay as they are."""


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by ``make(folder)`` the first time; a half-made one is made anew."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            fresh = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            make(fresh)
            fresh.rename(folder)
    return folder


def openvino(model: Path, target: Path, environment: Path, weights: str, note: Callable[[str], None]) -> Path:
    """`weights`: ``fp16``, ``int8`` or ``int4``.

    Raises:
        PeerFailed: the exporter did.
    """

    def make(folder: Path) -> None:
        arguments = ("export", "openvino", "--model", str(model), "--task", "text-generation-with-past")
        groups = ("--group-size", "64") if weights == "int4" else ()  # it must divide the width of every layer
        tool = str(environment / "bin" / "optimum-cli")
        command = [tool, *arguments, "--weight-format", weights, *groups, str(folder)]
        with target.with_name(f"{target.name}.log").open("w") as log:
            try:
                run_tool(command, log, EXPORT_S, note)
            except PeerFailed as reason:
                raise PeerFailed(f"not exported: {reason}") from reason

    return once(target, make)


def int8(model: Path, target: Path) -> Path:
    """As other tools write "W8A8": int8 weights with a scale per row, activations quantised per token as they come."""
    from safetensors.torch import load_file, save_file

    def make(folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(model.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                tensors.update(quantised(name, tensor) if name.endswith(_LINEAR) else {name: tensor})
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for path in model.iterdir():
            if path.suffix in {".json", ".jinja"} and "safetensors" not in path.name and path.name != "manifest.json":
                shutil.copy(path, folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = _INT8
        (folder / "config.json").write_text(json.dumps(config, indent=1))

    return once(target, make)


def quantised(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`weight` ``[out, in]`` as int8 of the same shape, and its scales, float32 ``[out, 1]``."""
    import torch

    wide = weight.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return {
        name: (wide / scale).round().clamp(-127, 127).to(torch.int8),
        f"{name}_scale": scale,
    }


_INT8: Final = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def gguf(source: Path, target: Path, kind: str) -> Path:
    """`source` with matrices as `kind` (``bf16``, ``q8_0``, ``q4_1``, ``q4_0``), of the bfloat16 numbers that all have.

    Raises:
        PeerFailed: `source` is no GGUF file.
    """
    if source.suffix.lower() != ".gguf":
        raise PeerFailed("only a model that comes as GGUF can be given to it")

    def make(folder: Path) -> None:
        write_gguf(source, folder / "model.gguf", kind)

    return once(target, make) / "model.gguf"


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Every field and tensor of `source`, matrices as `kind`, and tokens that `streamable` lets be streamed."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    wanted = GGMLQuantizationType[kind.upper()]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", "general.file_type"}:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            value = field.contents()
            if name == "tokenizer.ggml.tokens" and reader.fields["tokenizer.ggml.model"].contents() == "gpt2":
                value = streamable(value)
            writer.add_key_value(name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if numbers.ndim == 2:
            rounded = dequantize(quantize(numbers, GGMLQuantizationType.BF16), GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, quantize(rounded, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, numbers.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def streamable(tokens: Sequence[str]) -> list[str]:
    """The tokens of a byte-level vocabulary, those that are no text by themselves under names of ASCII letters.

    llama.cpp's server streams a token when the text so far is whole; the ids of tokens before that, which are the first
    bytes of a character, it never tells. Only ids go in and out here, and no number of the model is another.
    """
    values = _byte_values()
    taken = set(tokens)
    named: list[str] = []
    for index, token in enumerate(tokens):
        name = token
        if all(letter in values for letter in token) and not _is_text(bytes(values[letter] for letter in token)):
            name = f"bytes{index}"
            while name in taken:
                name += "_"
        named.append(name)
    return named


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_values() -> dict[str, int]:
    """The byte that each letter stands for in such a vocabulary: printable ones themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    letters = {chr(value): value for value in printable}
    letters.update({chr(256 + place): value for place, value in enumerate(others)})
    return letters
