"""A page: a block's keys and values outside of the pool that they were computed in, as one value of a store.

::

    magic      8  "octavopg"
    schema     4  u32, little-endian like all numbers here
    checksum  16  BLAKE2b of 128 bits over all that follows
    lengths   20  block size u32, position u32, fingerprint u16, layout u16, payload u64
    root      32  hash of the empty prefix: model, block size, salt of the tenant, adapter
    parent    32  hash of the prefix before the block; the root for the first one
    hash      32  hash of the prefix that ends with the block
    names         fingerprint and layout, UTF-8
    tokens        ids of the block, u32 each
    payload       the runner's bytes

A page is worth nothing unless all of this is what its reader expects: the same model and layout, the same place after
the same tokens under the same root, and every bit as it was written. Anything else is a miss. The checksum finds what
was damaged, not what was forged: who can write to the store is trusted as who can write to the broker is.

Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from kvstore.block_hash import BlockHash, child

MAGIC: Final = b"octavopg"
SCHEMA: Final = 1
"""Changes with this encoding."""

_OPENING: Final = struct.Struct("<8sI16s")
_FIXED: Final = struct.Struct("<IIHHQ32s32s32s")
_DIGEST_BYTES: Final = 16


class PageName(NamedTuple):
    """Which block of which prefix a page holds."""

    root: BlockHash
    parent: BlockHash
    """Equal to ``root`` for the first block."""
    hash: BlockHash
    position: int
    """Of the block in its prefix, from 0."""
    tokens: tuple[int, ...]


def names_of(root: BlockHash, tokens: tuple[int, ...], block_size: int) -> list[PageName]:
    """Of all full blocks of a prompt, in order."""
    names: list[PageName] = []
    parent = root
    for index in range(len(tokens) // block_size):
        own = tokens[index * block_size : (index + 1) * block_size]
        name = PageName(root, parent, child(parent, own), index, own)
        names.append(name)
        parent = name.hash
    return names


class Fault(Enum):
    """Why a page is none that can be used."""

    TRUNCATED = "truncated"
    """Shorter than it says, or longer."""
    NOT_A_PAGE = "not_a_page"
    SCHEMA = "schema"
    """Of another version of this encoding."""
    CHECKSUM = "checksum"
    """Damaged."""
    FINGERPRINT = "fingerprint"
    """Of another model."""
    LAYOUT = "layout"
    """Keys and values lie otherwise in it, or are of another dtype or size."""
    PLACE = "place"
    """Of another prefix: tokens, what comes before them, or the tenant."""


class PageInvalid(Exception):  # noqa: N818 - says what happened
    """Bytes that are not the page that was asked for."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"the page can't be used: {fault.value}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What all pages of a worker have in common."""

    fingerprint: str
    """Of the model, with all that decides bits."""
    layout: str
    """How keys and values lie in the payload, and their dtype."""
    block_size: int
    """Tokens."""
    page_bytes: int
    """Of the payload."""

    @property
    def value_bytes(self) -> int:
        """Of an encoded page."""
        names = len(self.fingerprint.encode()) + len(self.layout.encode())
        return _OPENING.size + _FIXED.size + names + 4 * self.block_size + self.page_bytes

    def encode(self, name: PageName, payload: bytes | memoryview) -> bytes:
        """The value of a page. ValueError when tokens or payload are of another size than all pages of this kind."""
        if len(name.tokens) != self.block_size or len(payload) != self.page_bytes:
            raise ValueError(
                f"a page has {self.block_size} tokens and {self.page_bytes} bytes, "
                f"not {len(name.tokens)} and {len(payload)}"
            )
        fingerprint, layout = self.fingerprint.encode(), self.layout.encode()
        fixed = _FIXED.pack(
            *(self.block_size, name.position, len(fingerprint), len(layout), len(payload)),
            *(name.root, name.parent, name.hash),
        )
        head = b"".join((fixed, fingerprint, layout, struct.pack(f"<{self.block_size}I", *name.tokens)))
        digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
        digest.update(payload)
        return b"".join((_OPENING.pack(MAGIC, SCHEMA, digest.digest()), head, payload))

    def decode(self, value: bytes, expected: PageName) -> memoryview:
        """The payload of just this page, without a copy. Raises PageInvalid."""
        name, payload = self.read(value)
        if name != expected:
            raise PageInvalid(Fault.PLACE)
        return payload

    def read(self, value: bytes) -> tuple[PageName, memoryview]:
        """Whose page it is, and its payload: for who has no prompt to compare it with.

        That the hash is that of the tokens after the parent is checked. Raises PageInvalid.
        """
        if value[: len(MAGIC)] != MAGIC[: len(value)]:
            raise PageInvalid(Fault.NOT_A_PAGE)
        if len(value) < _OPENING.size + _FIXED.size:
            raise PageInvalid(Fault.TRUNCATED)
        _, schema, checksum = _OPENING.unpack_from(value)
        if schema != SCHEMA:
            raise PageInvalid(Fault.SCHEMA)
        view = memoryview(value)
        (size, position, fingerprint_bytes, layout_bytes, payload_bytes, root, parent, hash_) = _FIXED.unpack_from(
            value, _OPENING.size
        )
        names = _OPENING.size + _FIXED.size
        tokens_at = names + fingerprint_bytes + layout_bytes
        payload_at = tokens_at + 4 * size
        if len(value) != payload_at + payload_bytes:
            raise PageInvalid(Fault.TRUNCATED)
        if hashlib.blake2b(view[_OPENING.size :], digest_size=_DIGEST_BYTES).digest() != checksum:
            raise PageInvalid(Fault.CHECKSUM)
        if value[names : names + fingerprint_bytes] != self.fingerprint.encode():
            raise PageInvalid(Fault.FINGERPRINT)
        layout = value[names + fingerprint_bytes : tokens_at]
        if (layout, size, payload_bytes) != (self.layout.encode(), self.block_size, self.page_bytes):
            raise PageInvalid(Fault.LAYOUT)
        tokens = struct.unpack_from(f"<{size}I", value, tokens_at)
        name = PageName(BlockHash(root), BlockHash(parent), BlockHash(hash_), position, tokens)
        if child(name.parent, tokens) != name.hash or (position == 0) != (root == parent):
            raise PageInvalid(Fault.PLACE)
        return name, view[payload_at:]
