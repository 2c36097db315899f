"""Hashes of a prompt, as workers of each kind know them."""

from __future__ import annotations

import pytest

from gateway.prefixes import MOST_TOKENS, SHORT, PromptHashes
from kvstore.block_hash import chain, root
from kvstore.registry import WorkerInfo
from octavo.v1 import job_pb2


def worker(fingerprint: str = "f", block_size: int = 16) -> WorkerInfo:
    return WorkerInfo("w", "i", "m", fingerprint, block_size=block_size)


@pytest.mark.parametrize("length", [1, 15, 16, 50, SHORT, SHORT + 17])
async def test_hashes_are_those_of_the_worker(length: int) -> None:
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=range(length), cache_salt="ours"))
    kinds = [worker(), worker("g"), worker(block_size=8)]
    await hashes.prepare(kinds)
    for each in kinds:
        start = root(each.fingerprint, each.block_size, "ours")
        assert hashes.of(each) == chain(start, range(length), each.block_size)


async def test_what_is_there_is_not_computed_again() -> None:
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=range(50)))
    await hashes.prepare([worker()])
    first = hashes.of(worker())
    await hashes.prepare([worker(), worker("g")])
    assert hashes.of(worker()) is first
    assert len(hashes.of(worker("g"))) == 3


async def test_of_a_huge_prompt_the_beginning_is_looked_for() -> None:
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=[7] * (MOST_TOKENS + 64)))
    await hashes.prepare([worker(block_size=64)])
    assert len(hashes.of(worker(block_size=64))) == MOST_TOKENS // 64
