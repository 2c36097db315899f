"""Names of token prefixes: a SHA-256 chain that is the same in every process, on every machine.

::

    root     = sha256("octavo/1" | fingerprint | block size | salt | adapter [| tenant])
               each field with its length before it; tenant: only where there is one
    child(i) = sha256(child(i - 1) | token ids of block i, little-endian u32)

Two equal hashes mean equal prefixes (everything before the block too) under one model, block size, salt, adapter and
tenant: no tenant's request finds, or can be made to find, what another one's has left.
Changing this encoding means a new version string, as caches of both versions may live side by side.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from typing import TYPE_CHECKING, Final, NewType, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

BlockHash = NewType("BlockHash", bytes)
"""32 bytes."""

VERSION = b"octavo/1"

TOKEN_BYTES: Final = 4

# array("I") is 4 bytes on every platform CPython supports, but C only promises 2.
_NATIVE_U32 = array("I").itemsize == TOKEN_BYTES


def root(fingerprint: str, block_size: int, salt: str = "", adapter: str = "", tenant: str = "") -> BlockHash:
    """Hash of the empty prefix.

    Each field is preceded by its length (u32, little-endian), so that no two different field lists have one encoding.
    Raises ValueError when ``block_size`` is below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size} is below 1")
    digest = hashlib.sha256()
    fields = [VERSION, fingerprint.encode(), struct.pack("<I", block_size), salt.encode(), adapter.encode()]
    if tenant:
        fields.append(tenant.encode())
    for field in fields:
        digest.update(struct.pack("<I", len(field)))
        digest.update(field)
    return BlockHash(digest.digest())


def child(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of the prefix that ``parent`` names plus one block of ``token_ids``.

    Raises OverflowError or ValueError when an id does not fit u32.
    """
    return BlockHash(hashlib.sha256(parent + encode(token_ids)).digest())


def chain(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of all full blocks of ``token_ids``, in order; a partly filled last block has none."""
    return chain_of(root, encode(token_ids), block_size)


def chain_of(root: BlockHash, encoded: bytes, block_size: int) -> list[BlockHash]:
    """The same, of token ids that are encoded already."""
    if block_size < 1:
        raise ValueError(f"block_size {block_size} is below 1")
    stride = TOKEN_BYTES * block_size
    whole = len(encoded) - len(encoded) % stride
    hashes: list[bytes] = []
    # A copy of an empty hash is made sooner than another one, for which the library looks up the algorithm anew.
    parent, empty = bytes(root), hashlib.sha256()
    for (block,) in struct.iter_unpack(f"{stride}s", memoryview(encoded)[:whole]):
        digest = empty.copy()
        digest.update(parent + block)
        parent = digest.digest()
        hashes.append(parent)
    return cast("list[BlockHash]", hashes)


def encode(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are hashed: TOKEN_BYTES each. Raises OverflowError or ValueError when one does not fit u32."""
    if not _NATIVE_U32:
        return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in token_ids)
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
