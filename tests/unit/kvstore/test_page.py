"""Pages: what is written comes back, and nothing but just that page does."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block_hash import BlockHash, chain, root
from kvstore.page import MAGIC, Fault, PageFormat, PageInvalid, PageName, names_of

if TYPE_CHECKING:
    from collections.abc import Callable

BS = 4
FORMAT = PageFormat("f" * 64, "octavo-kv/3 torch.bfloat16", BS, 24)
ROOT = root("f" * 64, BS, "tenant")
TOKENS = tuple(range(100, 113))
NAMES = names_of(ROOT, TOKENS, BS)
PAYLOAD = bytes(range(24))


def fault(value: bytes, name: PageName = NAMES[1], form: PageFormat = FORMAT) -> Fault:
    with pytest.raises(PageInvalid) as caught:
        form.decode(value, name)
    return caught.value.fault


def test_names_are_those_of_the_chain() -> None:
    assert [name.hash for name in NAMES] == chain(ROOT, TOKENS, BS)
    assert [name.parent for name in NAMES] == [ROOT, NAMES[0].hash, NAMES[1].hash]
    assert [(name.position, name.tokens) for name in NAMES] == [
        (index, TOKENS[4 * index : 4 * index + 4]) for index in range(3)
    ]
    assert names_of(ROOT, TOKENS[:3], BS) == []


def test_the_bytes_are_pinned() -> None:
    """Stores outlive versions: a change here is a new schema."""
    value = FORMAT.encode(NAMES[1], PAYLOAD)
    assert len(value) == FORMAT.value_bytes == 28 + 116 + 64 + 26 + 16 + 24
    assert value[:12] == b"octavopg\x01\0\0\0"
    assert value[12:28].hex() == "34f97448aab21529f819040c4ab36df0"
    assert struct.unpack_from("<IIHHQ", value, 28) == (BS, 1, 64, 26, 24)
    assert value[48:144] == ROOT + NAMES[0].hash + NAMES[1].hash
    assert value[144:234] == b"f" * 64 + b"octavo-kv/3 torch.bfloat16"
    assert struct.unpack_from("<4I", value, 234) == TOKENS[4:8]
    assert value[250:] == PAYLOAD


@given(st.data())
def test_what_is_written_comes_back(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 4, 16]))
    form = PageFormat(
        data.draw(st.text(max_size=70)), data.draw(st.text(max_size=20)), size, data.draw(st.integers(0, 99))
    )
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=2 * size, max_size=2 * size))
    payload = data.draw(st.binary(min_size=form.page_bytes, max_size=form.page_bytes))
    for name in names_of(root(form.fingerprint, size), tuple(tokens), size):
        value = form.encode(name, payload)
        assert len(value) == form.value_bytes
        assert form.decode(value, name) == payload
        assert form.read(value) == (name, payload)


@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    value = bytearray(FORMAT.encode(NAMES[1], PAYLOAD))
    at = data.draw(st.integers(0, 8 * len(value) - 1))
    value[at // 8] ^= 1 << at % 8
    fault(bytes(value))
    with pytest.raises(PageInvalid):
        FORMAT.read(bytes(value))


@pytest.mark.parametrize("length", [0, 5, 8, 27, 28, 143, 144, 200, 249, 273])
def test_no_shortened_one_passes(length: int) -> None:
    assert fault(FORMAT.encode(NAMES[1], PAYLOAD)[:length]) is Fault.TRUNCATED


def test_nor_one_that_goes_on() -> None:
    assert fault(FORMAT.encode(NAMES[1], PAYLOAD) + b"\0") is Fault.TRUNCATED


@given(st.binary(max_size=400))
def test_nor_anything_else(value: bytes) -> None:
    with pytest.raises(PageInvalid):
        FORMAT.read(value)
    with pytest.raises(PageInvalid):
        FORMAT.read(MAGIC + value)


OTHER_TENANT = names_of(root("f" * 64, BS, "other"), TOKENS, BS)[1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda form, name: (replace(form, fingerprint="g" * 64), name), Fault.FINGERPRINT),
        (lambda form, name: (replace(form, layout="octavo-kv/3 torch.float32"), name), Fault.LAYOUT),
        (lambda form, name: (form, OTHER_TENANT), Fault.PLACE),
        (lambda form, name: (form, NAMES[2]), Fault.PLACE),
        (lambda form, name: (form, name._replace(position=2)), Fault.PLACE),
        (lambda form, name: (form, name._replace(tokens=(1, 2, 3, 4))), Fault.PLACE),
        (lambda form, name: (form, name._replace(root=OTHER_TENANT.root)), Fault.PLACE),
        (lambda form, name: (form, name._replace(parent=OTHER_TENANT.parent)), Fault.PLACE),
    ],
)
def test_one_that_is_sound_but_another(
    change: Callable[[PageFormat, PageName], tuple[PageFormat, PageName]], expected: Fault
) -> None:
    form, name = change(FORMAT, NAMES[1])
    assert fault(form.encode(name, PAYLOAD)) is expected


def test_one_of_another_size() -> None:
    small, large = replace(FORMAT, page_bytes=23), replace(FORMAT, block_size=8, page_bytes=24)
    assert fault(small.encode(NAMES[1], PAYLOAD[:23])) is Fault.LAYOUT
    assert fault(large.encode(NAMES[1]._replace(tokens=TOKENS[:8]), PAYLOAD)) is Fault.LAYOUT
    for name, payload in ((NAMES[1], PAYLOAD[1:]), (NAMES[1]._replace(tokens=(1,)), PAYLOAD)):
        with pytest.raises(ValueError, match="a page has"):
            FORMAT.encode(name, payload)


def test_another_schema_is_told_apart_before_all_else() -> None:
    value = bytearray(FORMAT.encode(NAMES[1], PAYLOAD))
    value[8] = 2
    assert fault(bytes(value)) is Fault.SCHEMA


def test_without_a_prompt_to_compare_with_the_chain_is_checked() -> None:
    """As a warm join reads pages: tokens, parent and hash must belong together, and only the first continues a root."""
    wrong = [
        NAMES[1]._replace(tokens=(1, 2, 3, 4)),
        NAMES[1]._replace(parent=BlockHash(b"p" * 32)),
        NAMES[1]._replace(hash=NAMES[2].hash),
        NAMES[1]._replace(position=0),
        NAMES[0]._replace(position=1),
    ]
    for name in wrong:
        with pytest.raises(PageInvalid) as caught:
            FORMAT.read(FORMAT.encode(name, PAYLOAD))
        assert caught.value.fault is Fault.PLACE
