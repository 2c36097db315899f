"""What each peer's process is started with: its environment made, the model in its form, its settings."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.machine import describe_machine
from bench.peers import export
from bench.peers.catalog import OURS
from bench.peers.compare import Prepared, command, ours
from bench.peers.install import installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.peers.catalog import Variant

ROOT: Final = Path(__file__).parents[2]
CONTEXT: Final = 1024
"""Tokens of a sequence, at most: more than any workload has."""
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Preparation:
    """What all are prepared for."""

    model: str
    """As the user named it."""
    directory: Path
    """Its bfloat16 safetensors."""
    source: Path
    """What it came as."""
    key: str
    """Names its content."""
    cache: Path
    threads: int
    max_running: int
    note: Callable[[str], None]

    def prepare(self, variant: Variant) -> Prepared:
        """Raises PeerFailed where its environment or its form of the model can't be made."""
        if variant.peer.name == OURS:
            return self._ours(variant.peer.script, variant.mode)
        environment = installed(variant.peer, self.cache, self.note)
        settings = self._settings(variant.mode, self._form(variant, environment), environment)
        if variant.peer.folder == "llama.cpp":
            settings["options"] = llama_options(describe_machine()["instruction_sets"])
        extra = _VARIABLES.get(variant.peer.name, _none)(environment, settings)
        return Prepared(command(environment, variant.peer.script), {**OFFLINE, **extra}, settings)

    def reference(self) -> Prepared:
        """float32 by transformers, in our own environment."""
        return Prepared(ours("on_reference"), OFFLINE, self._settings("float32", self.directory, Path()))

    def _ours(self, script: str, mode: str) -> Prepared:
        settings = {**self._settings(mode, Path(), Path()), "model": self.model, "cache": str(self.cache)}
        return Prepared(ours(script), {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}, settings)

    def _settings(self, mode: str, model: Path, environment: Path) -> dict[str, Any]:
        return {
            "mode": mode,
            "model": str(model),
            "environment": str(environment),
            "threads": self.threads,
            "max_running": self.max_running,
            "context": CONTEXT,
            "kv_gib": self._kv_gib(),
        }

    def _kv_gib(self) -> int:
        """Memory for keys and values in bfloat16: enough for all, and no more, since all engines are loaded at once."""
        config = json.loads((self.directory / "config.json").read_text())
        return kv_gib(config.get("text_config", config), self.max_running * CONTEXT)

    def _form(self, variant: Variant, environment: Path) -> Path:
        """The model as this variant reads it."""
        folder = self.cache / "peers" / "models" / self.key
        match variant.peer.folder, variant.mode:
            case "vllm", "int8":
                self._tell(variant, folder / "int8")
                return export.int8(self.directory, folder / "int8")
            case "openvino", mode:
                weights = "fp16" if mode == "bf16" else mode
                self._tell(variant, folder / f"openvino-{weights}")
                return export.openvino(self.directory, folder / f"openvino-{weights}", environment, weights, self.note)
            case "llama.cpp", mode:
                self._tell(variant, folder / f"llama.cpp-{mode}")
                return export.gguf(self.source, folder / f"llama.cpp-{mode}", mode)
        return self.directory

    def _tell(self, variant: Variant, form: Path) -> None:
        if not form.exists():
            self.note(f"{variant.name}: writing the model in its form to {form}")


def llama_options(sets: Sequence[str]) -> list[str]:
    """On processors with AMX its kernels for reordered weights crash, in the version pinned: there, without."""
    return ["--no-repack"] if "amx_int8" in sets else []


def kv_gib(config: Mapping[str, Any], tokens: int) -> int:
    """GiB for bfloat16 keys and values of so many tokens, rounded up, of a model with such a `config.json`."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    per_token: int = 2 * 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    return math.ceil(per_token * tokens / 2**30)


def _none(environment: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    return {}


def _vllm(environment: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Its own advice for processors: an allocator and an OpenMP that are loaded before all else, threads bound."""
    wanted = [
        *environment.parent.glob("debian/usr/lib/*/libtcmalloc_minimal.so.4"),
        environment / "lib" / "libiomp5.so",
    ]
    return {
        "LD_PRELOAD": ":".join(str(path) for path in wanted if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": str(settings["kv_gib"]),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings['threads'] - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(environment.parent / "compiled"),
    }


_VARIABLES: Final[dict[str, Callable[[Path, Mapping[str, Any]], Mapping[str, str]]]] = {
    "vllm": _vllm,
    "transformers": lambda _, settings: {"OMP_NUM_THREADS": str(settings["threads"])},
}
