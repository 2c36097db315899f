"""A GGUF file becomes the model and the tokenizer that it was made from, or is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf as format_library
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.unit.worker.model import tiny_gguf
from worker.model import gguf
from worker.model.errors import ModelDamaged, ModelUnsupported

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "converted").mkdir()
    return tmp_path / "converted"


def convert(path: Path, target: Path, dtype: torch.dtype = torch.float32) -> list[str]:
    lines: list[str] = []
    gguf.convert(path, target, dtype, lines.append)
    return lines


def test_every_weight_arrives(path: Path, target: Path) -> None:
    expected = tiny_gguf.write(path).state_dict()
    lines = convert(path, target)
    found = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert lines == [f"tensor 0 of {len(expected)}"]


def test_weights_are_rounded_once(path: Path, target: Path) -> None:
    expected = tiny_gguf.write(path).state_dict()
    convert(path, target, torch.bfloat16)
    found = load_file(target / "model.safetensors")
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q5_0", 0.06), ("Q4_0", 0.12), ("Q4_1", 0.12)])
def test_quantized_weights_are_close(kind: str, error: float, path: Path, target: Path) -> None:
    expected = tiny_gguf.write(path, kind=format_library.GGMLQuantizationType[kind]).state_dict()
    convert(path, target)
    for name, found in load_file(target / "model.safetensors").items():
        assert (found - expected[name]).norm() / expected[name].norm() < error


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        ("smollm", ["it", "Ġis", "Ġ", "2", "0", "2", "4", ",", "Ġnot", "Ġ", "1", "9", "8", "4", "Ġor", "Ġx", "3", "y"]),
        ("gpt-2", ["it", "Ġis", "Ġ2024", ",", "Ġnot", "Ġ1984", "Ġor", "Ġx", "3", "y"]),
        ("llama-bpe", ["it", "Ġis", "Ġ", "202", "4", ",", "Ġnot", "Ġ", "198", "4", "Ġor", "Ġx", "3", "y"]),
    ],
)
def test_text_is_cut_into_words_as_the_file_says(words: str, pieces: list[str], path: Path, target: Path) -> None:
    tiny_gguf.write(path, words=words)
    convert(path, target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    found = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it is 2024, not 1984 or x3y")]
    assert found == pieces
    text = "it is 2024, 日本 <|end|>\n  x"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|end|>").ids == [0]


class TestRefused:
    """Each of these would be served almost right."""

    def test_a_vocabulary_of_unknown_kind(self, path: Path, target: Path) -> None:
        tiny_gguf.write(path, words="elvish")
        with pytest.raises(ModelUnsupported, match="vocabularies of kind 'elvish' are not known"):
            convert(path, target)

    def test_scaled_rotary_embeddings(self, path: Path, target: Path) -> None:
        tiny_gguf.write(path, settings={"llama.rope.scaling.type": "yarn"})
        with pytest.raises(ModelUnsupported, match="rotary embedding scaled as 'yarn'"):
            convert(path, target)

    def test_a_missing_tensor(self, path: Path, target: Path) -> None:
        tiny_gguf.write(path, change=lambda tensors: tensors.pop("blk.1.ffn_up.weight"))
        with pytest.raises(ModelDamaged, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
            convert(path, target)

    def test_a_tensor_that_would_not_be_used(self, path: Path, target: Path) -> None:
        tiny_gguf.write(
            path, change=lambda tensors: tensors.update({"rope_freqs.weight": tensors["output_norm.weight"]})
        )
        with pytest.raises(ModelDamaged, match=r"tensors that the model would not use: rope_freqs\.weight"):
            convert(path, target)

    def test_a_renamed_tensor(self, path: Path, target: Path) -> None:
        def rename(tensors: dict[str, object]) -> None:
            tensors["blk.1.ffn_upper.weight"] = tensors.pop("blk.1.ffn_up.weight")

        tiny_gguf.write(path, change=rename)
        with pytest.raises(ModelDamaged, match=r"up_proj"):
            convert(path, target)

    @pytest.mark.parametrize("keep", [0, 3, 100, 20_000, -100])
    def test_a_file_cut_short(self, keep: int, path: Path, target: Path) -> None:
        tiny_gguf.write(path)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelDamaged, match=r"tiny\.gguf"):
            convert(path, target)

    def test_an_architecture_that_the_library_does_not_read(self, path: Path, target: Path) -> None:
        writer = format_library.GGUFWriter(path, "unheard")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises((ModelDamaged, ModelUnsupported), match=r"tiny\.gguf.*unheard"):
            convert(path, target)
