"""A model that is ready to run, whichever kind it is of, and the native kernels that it may run on. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.detokenize import TokenBytes, UnsupportedTokenizer
from worker.kernels.native.library import Native, NativeUnavailableError, best
from worker.model.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.sampling.draw import Sampler
    from worker.step import PagedRunner


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that an engine and a gateway need of a model."""

    name: str
    runner: PagedRunner
    sampler: Sampler
    texts: TokenBytes
    fingerprint: str
    """Names the bits of its pages and of what is made from them."""
    device: str
    dtype: str
    context_length: int
    """In tokens; the model's own limit."""
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    tokenizer_config: bytes


def kernels_of(level: str, threads: int, progress: Callable[[str], None]) -> Native | None:
    """Those that ``--kernels`` names, for so many threads; None: there are none, or none are wanted.

    Raises:
        ModelUnsupported: they were asked for by name and can't be had.
    """
    if level == "none":
        return None
    if level != "auto":
        try:
            return Native(level, threads)
        except NativeUnavailableError as error:
            raise ModelUnsupported(f"--kernels {level}: {error}") from error
    found = best(threads)
    progress("no native kernels: torch does all, slower" if found is None else f"native kernels: {found.level}")
    return found


def texts_of(name: str, tokenizer_json: bytes) -> TokenBytes:
    """The bytes of a model's tokens. Raises ModelUnsupported for a tokenizer whose tokens aren't bytes."""
    try:
        return TokenBytes.from_json(tokenizer_json)
    except UnsupportedTokenizer as error:
        raise ModelUnsupported(f"{name}: {error}") from error
