"""What can go wrong before a model serves.

::

    ModelError                the worker can't start with this model
    ├── ModelNotFound         nothing is where the specification points
    ├── ModelDamaged          files that are cut short, altered, or lack (or have too many) tensors
    ├── ModelUnsupported      a model, or a setting of one, that this worker can't run right
    └── NoRoom                a pool that memory can't hold
"""

from __future__ import annotations

from typing import Final


class ModelError(Exception):
    """The worker can't start with this model. The message says which file or setting, and what to do."""


class ModelNotFound(ModelError):  # noqa: N818 - reads as a fact, like FileNotFound
    """Nothing is where the specification points."""


class ModelDamaged(ModelError):  # noqa: N818
    """Files that are cut short, altered, or whose tensors are not those that the configuration asks for."""


class ModelUnsupported(ModelError):  # noqa: N818
    """A model, or a setting of one, that this worker can't run right."""


NO_KERNELS: Final = "there are no native kernels"
INT8_NEEDS_FUSED: Final = "--dtype int8 needs the fused decoder and its native kernels; take bfloat16 or float32"


def needs_fused(name: str, why_not: str) -> ModelUnsupported:
    """K/V in eight bits of a model that isn't run by the fused decoder, which alone has them."""
    return ModelUnsupported(
        f"--kv-dtype int8 needs the fused decoder, which can't run {name} here: {why_not}; take --kv-dtype auto"
    )


class NoRoom(ModelError):  # noqa: N818
    """Memory can't hold a pool."""

    def __init__(self, tokens: int, needed: int, given: str, most: int) -> None:
        """``needed``: bytes of a pool of so many tokens. ``given``: what there is, in words. ``most``: tokens that may
        have room."""
        super().__init__(f"a pool of {tokens} tokens takes {self._told(needed)}, and {given}")
        self._needed, self._given, self._most = needed, given, most

    def as_option(self, kv_tokens: int) -> ModelError:
        """The same about the option that sets the size, with what to do."""
        cure = f"take --kv-tokens {self._most} or fewer"
        return ModelError(
            f"--kv-tokens {kv_tokens}: the pool takes {self._told(self._needed)}, and {self._given}; {cure}"
        )

    @staticmethod
    def _told(size: int) -> str:
        return f"{size:,} bytes ({size / 2**30:,.1f} GiB)"
