"""How changes of the prefix index are packed and parted. Pure."""

from __future__ import annotations

import pytest

from kvstore.block_hash import BlockHash
from kvstore.commits import calls
from kvstore.prefix_index import BATCH, HeldChange, batches, joined, pack, short
from octavo.v1 import inference_pb2, job_pb2


def hashes(count: int, first: int = 0) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "big") for number in range(first, first + count))


def test_a_short_hash_is_the_first_half() -> None:
    assert short(BlockHash(bytes(range(32)))) == bytes(range(16))
    assert short(short(BlockHash(bytes(range(32))))) == bytes(range(16))


def test_packed_hashes_keep_their_order() -> None:
    assert pack(hashes(3)) == b"".join(hashes(3))
    assert pack(()) == b""
    for wrong in (bytes(15), bytes(32), b""):
        with pytest.raises(ValueError, match="a hash in the prefix index has 16 bytes"):
            pack((*hashes(2), wrong))


def test_a_prompts_hashes_go_as_they_are() -> None:
    prompt = [BlockHash(bytes([number]) * 32) for number in range(3)]
    assert joined(prompt) == b"".join(prompt)
    assert joined([]) == b""
    with pytest.raises(ValueError, match="a hash of a block has 32 bytes"):
        joined([*prompt, BlockHash(bytes(16))])


def test_batches_are_full_but_the_last() -> None:
    assert batches(()) == []
    assert batches(hashes(BATCH)) == [pack(hashes(BATCH))]
    assert batches(hashes(BATCH + 1)) == [pack(hashes(BATCH)), pack(hashes(1, BATCH))]


def delivery(size: int) -> job_pb2.Delivery:
    return job_pb2.Delivery(request_id="r", attempt=1, chunk=inference_pb2.Chunk(token_ids=[1], text="x" * size))


def test_one_call_unless_there_is_much() -> None:
    change = HeldChange(hashes(2), hashes(1, 9))
    assert list(calls([], None)) == []
    assert list(calls([], HeldChange())) == [([], (b"", b""))]
    assert list(calls([], change)) == [([], (pack(change.added), pack(change.removed)))]
    ((batch, told),) = calls([delivery(1), delivery(2)], change)
    assert [len(each.chunk.text) for each, _ in batch] == [1, 2]
    assert told == (pack(change.added), pack(change.removed))
    ((batch, told),) = calls([delivery(1)], None)
    assert (len(batch), told) == (1, (b"", b""))


def test_much_goes_along_in_as_few_calls_as_it_takes() -> None:
    """Deliveries with the first of them: somebody waits for those."""
    change = HeldChange(hashes(BATCH + 1), hashes(2 * BATCH + 3, 10**6))
    parts = list(calls([delivery(1)], change))
    assert [len(batch) for batch, _ in parts] == [1, 0, 0]
    assert [len(added) // 16 for _, (added, _) in parts] == [BATCH, 1, 0]
    assert [len(removed) // 16 for _, (_, removed) in parts] == [BATCH, BATCH, 3]
    assert b"".join(added for _, (added, _) in parts) == pack(change.added)
    assert b"".join(removed for _, (_, removed) in parts) == pack(change.removed)
    few = list(calls([delivery(3_000_000) for _ in range(4)], HeldChange(hashes(1))))
    assert len(few) > 1
    assert sum(len(batch) for batch, _ in few) == 4
    assert [told for _, told in few] == [(pack(hashes(1)), b""), *[(b"", b"")] * (len(few) - 1)]
