"""Block hashes: pinned, as other processes and later versions must find what this one stored."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block_hash import BlockHash, chain, child, root

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_pinned_vectors() -> None:
    start = root("sha256:abc", 4)
    found = [
        start,
        root("sha256:abc", 4, salt="tenant", adapter="lora"),
        *chain(start, range(9), 4),
        child(start, [2**32 - 1, 0, 1, 2]),
    ]
    assert [each.hex() for each in found] == [
        "eb3013137d72e07879cc5c33eee55d540da2f266195a60cd1b171f0593657ab6",
        "b344a94e541f82e9ff58e2e2a3dd21d187872a589495b0ac7d8f7d4c49718a1e",
        "b8de5946f1dd9380455ca34a2681ff2c36db6cdb803803a1c5926fc6a4df4e6e",
        "85c6ddae3c5ffecee5ff92822b40572e6b1c50fb23c73ed581cf34006800bb89",
        "6345ebb9197f9444a6ea57744d0413b764cfd0ddfdbd09ba246a7918c78c512f",
    ]


def test_the_documented_encoding() -> None:
    fields = (b"octavo/1", b"f", struct.pack("<I", 16), b"s", b"")
    expected = hashlib.sha256(b"".join(struct.pack("<I", len(field)) + field for field in fields)).digest()
    assert root("f", 16, "s") == expected
    assert child(BlockHash(expected), [1, 258]) == hashlib.sha256(expected + b"\1\0\0\0\2\1\0\0").digest()


def test_every_field_counts_and_none_runs_into_the_next() -> None:
    variants = [
        root("a", 16),
        root("b", 16),
        root("a", 32),
        root("a", 16, "x"),
        root("a", 16, "", "x"),
        root("ax", 16),
        root("a", 16, "xy"),
        root("a", 16, "x", "y"),
        root("", 16, "a"),
    ]
    assert len(set(variants)) == len(variants)


@given(TOKENS, st.integers(1, 17))
def test_a_chain_is_its_children(tokens: list[int], block_size: int) -> None:
    start = root("f", block_size)
    hashes = chain(start, tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    parent = start
    for number, found in enumerate(hashes):
        parent = child(parent, tokens[number * block_size : (number + 1) * block_size])
        assert found == parent


@given(TOKENS, TOKENS, TOKENS)
def test_a_chain_tells_exactly_the_common_prefix(common: list[int], left: list[int], right: list[int]) -> None:
    one, other = (chain(root("f", 4), common + rest, 4) for rest in (left, right))
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        end = 4 * (number + 1)
        assert (a == b) == ((common + left)[:end] == (common + right)[:end])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_fits_no_u32(token: int) -> None:
    with pytest.raises(OverflowError):
        child(root("f", 1), [token])


def test_a_block_has_tokens() -> None:
    with pytest.raises(ValueError, match="below 1"):
        root("f", 0)
    with pytest.raises(ValueError, match="below 1"):
        chain(root("f", 1), [1], 0)
