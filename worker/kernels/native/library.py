"""The native kernels as Python calls them: which build of them, and with how many threads.

A library knows nothing of torch. Tensors are passed by address, and a kernel's caller answers for their shapes; the
wrappers here check what they are given, because a wrong one would overwrite memory that is not its own.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

log = logging.getLogger(__name__)

LEVELS: Final = ("amx", "avx512_bf16", "avx512", "avx2", "portable")
"""Builds of the kernels, best first, named by the instructions that they use. ``setup.py`` makes them."""

_FOLDER = Path(__file__).parent


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
        if not _built(level):
            raise NativeUnavailableError(f"the kernels for {level} were not built when this package was installed")
        if not _runs(level):
            raise NativeUnavailableError(f"this processor can't run the kernels for {level}")
        self.level: Final = level
        self.threads: Final = threads
        self._library = ctypes.CDLL(str(_path(level)))
        self._library.team_new.restype = ctypes.c_void_p
        self._team = ctypes.c_void_p(self._library.team_new(threads))

    def __del__(self) -> None:
        if hasattr(self, "_team"):
            self._library.team_delete(self._team)

    def call(self, name: str, argument: ctypes.Structure) -> None:
        """Call a kernel, from all threads. It does not return before all is done, and holds no lock meanwhile."""
        getattr(self._library, name)(self._team, ctypes.byref(argument))


def best(threads: int, levels: Sequence[str] = LEVELS) -> Native | None:
    """The best of ``levels`` that was built and can run here; None if there is none, which is logged."""
    for level in levels:
        if _built(level) and _runs(level):
            return Native(level, threads)
    log.info("no native kernels: none were built for this processor when the package was installed; torch does all")
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


def _built(level: str) -> bool:
    return _path(level).exists()


def _runs(level: str) -> bool:
    if not _built("portable"):
        return False
    return bool(ctypes.CDLL(str(_path("portable"))).runs_level(level.encode()))
