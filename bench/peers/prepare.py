"""What each peer's process is started with: its environment made, the model in its form, its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.peers import export
from bench.peers.catalog import OURS
from bench.peers.compare import Prepared, command, ours
from bench.peers.install import installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
        extra = _VARIABLES.get(variant.peer.name, _none)(environment, self.threads)
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
        }

    def _form(self, variant: Variant, environment: Path) -> Path:
        """The model as this variant reads it."""
        folder = self.cache / "peers" / "models" / self.key
        match variant.peer.folder, variant.mode:
            case "vllm", "int8":
                return export.int8(self.directory, folder / "int8")
            case "openvino", mode:
                weights = "fp16" if mode == "bf16" else mode
                return export.openvino(self.directory, folder / f"openvino-{weights}", environment, weights)
            case "llama.cpp", mode:
                return export.gguf(self.source, folder / f"gguf-{mode}", mode)
        return self.directory


def _none(environment: Path, threads: int) -> Mapping[str, str]:
    return {}


def _vllm(environment: Path, threads: int) -> Mapping[str, str]:
    """Its own advice for processors: an allocator and an OpenMP that are loaded before all else, threads bound."""
    wanted = [
        *environment.parent.glob("debian/usr/lib/*/libtcmalloc_minimal.so.4"),
        environment / "lib" / "libiomp5.so",
    ]
    return {
        "LD_PRELOAD": ":".join(str(path) for path in wanted if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(environment.parent / "compiled"),
    }


_VARIABLES: Final[dict[str, Callable[[Path, int], Mapping[str, str]]]] = {
    "vllm": _vllm,
    "transformers": lambda _, threads: {"OMP_NUM_THREADS": str(threads)},
}
