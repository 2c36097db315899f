"""The native kernels as Python calls them: which build of them, and with how many threads.

A library knows nothing of torch. Tensors are passed by address, and a kernel's caller answers for their shapes; the
wrappers here check what they are given, because a wrong one would overwrite memory that is not its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import logging
import os
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

log = logging.getLogger(__name__)

LEVELS: Final = ("amx", "avx512_bf16", "avx512", "avx2", "portable")
"""Builds of the kernels, best first, named by the instructions that they use. ``setup.py`` makes them."""

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER / "src"


class NativeUnavailableError(Exception):
    """A build of the kernels that was asked for is not there, or this processor can't run it."""


class Native:
    """One build of the kernels, and its team of threads. One caller at a time.

    Args:
        level: one of `LEVELS`.
        threads: how many work on a call, the caller's own among them.

    Raises:
        NativeUnavailableError: the build is not there, or can't run here.
    """

    def __init__(self, level: str, threads: int) -> None:
        assert threads >= 1, threads
        if level not in LEVELS:
            raise NativeUnavailableError(f"no kernels are called {level!r}; there are {', '.join(LEVELS)}")
        self._library = _load(level)
        if not _load("portable").runs_level(level.encode()):
            raise NativeUnavailableError(f"this processor can't run the kernels for {level}")
        self.level: Final = level
        self._library.team_new.restype = ctypes.c_void_p
        self._team = ctypes.c_void_p(self._library.team_new(threads))
        self.threads: Final[int] = self._library.team_size(self._team)
        if self.threads < threads:
            log.warning("%d threads for the native kernels, not %d: the system gives no more", self.threads, threads)
        self._busy = threading.Lock()
        weakref.finalize(self, _delete, self._library.team_delete, self._team.value or 0, os.getpid())

    def call(self, name: str, argument: ctypes.Structure) -> None:
        """Call a kernel, from all threads. It does not return before all is done, and holds no lock meanwhile.

        Raises:
            MemoryError: there is none for what it works in.
            RuntimeError: another call is under way.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{name} was called while these kernels are at work for another caller")
        try:
            failed = getattr(self._library, name)(self._team, ctypes.byref(argument))
        finally:
            self._busy.release()
        if failed:
            raise MemoryError(f"no memory for what the native kernel {name} works in")

    def new_run(self) -> Run:
        """Room for a decoder's steps."""
        return Run(self._library)


class Run:
    """What the steps of one decoder work in; it grows with them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.run_new.restype = ctypes.c_void_p
        self.address: Final[int] = library.run_new()
        weakref.finalize(self, _delete, library.run_delete, self.address, os.getpid())


def _delete(call: Callable[[ctypes.c_void_p], object], address: int, process: int) -> None:
    if process == os.getpid():  # a child of a fork has no threads to end
        call(ctypes.c_void_p(address))


def best(threads: int, levels: Sequence[str] = LEVELS) -> Native | None:
    """The best of ``levels`` that was built and can run here; None if there is none.

    Logged as a warning: that there is none, and better ones that this processor could run but that aren't there.
    """
    reasons, missed = [], []
    for level in levels:
        try:
            found = Native(level, threads)
        except NativeUnavailableError as error:
            reasons.append(str(error))
            if _may_run(level):
                missed.append(str(error))
            continue
        log.info("native kernels: %s, %d thread(s)", found.level, found.threads)
        if missed:
            log.warning("native kernels for %s, not better ones: %s", found.level, "; ".join(missed))
        return found
    log.warning("no native kernels, torch does all, slower: %s", "; ".join(reasons))
    return None


def address(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Of a tensor's first number, after a look at what it is.

    Raises:
        ValueError: it isn't on the CPU, not of this dtype or shape, or its last dimension isn't contiguous.
    """
    if tensor.device.type != "cpu" or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"a {tensor.dtype} {list(tensor.shape)} on {tensor.device} is no {dtype} {list(shape)}")
    if shape and shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of a {list(tensor.shape)} is not contiguous")
    return tensor.data_ptr()


def _path(level: str) -> Path:
    return _FOLDER / f"{level}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _may_run(level: str) -> bool:
    """Whether this processor can run a level, as far as is known: the portable build tells."""
    try:
        return bool(_load("portable").runs_level(level.encode()))
    except NativeUnavailableError:
        return True


def _load(level: str) -> ctypes.CDLL:
    if not _path(level).exists():
        raise NativeUnavailableError(f"the kernels for {level} were not built when this package was installed")
    try:
        library = ctypes.CDLL(str(_path(level)))
        library.built_from.restype = ctypes.c_char_p
        built_from = library.built_from().decode()
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"the kernels for {level} can't be loaded: {error}") from error
    if _SOURCES.is_dir() and built_from != sources_digest():
        raise NativeUnavailableError(f"the kernels for {level} are older than their sources: install the package again")
    return library


@cache
def sources_digest() -> str:
    """As ``setup.py`` makes it. An installation has no sources, and nothing that could be older than they are."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_SOURCES.iterdir()))).hexdigest()
