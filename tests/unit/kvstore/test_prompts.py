"""A job's prompt as bytes."""

from __future__ import annotations

import pytest

from kvstore.block_hash import encode
from kvstore.prompts import encoded, give
from octavo.v1 import job_pb2

TOKENS = [0, 1, 127, 128, 49_151, 2**31, 2**32 - 1]


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40, 4095, 4096, 20_000])
def test_a_prompt_that_is_given_as_bytes_is_the_one_that_is_given_as_numbers(length: int) -> None:
    """Lengths of one byte, of two and of three among them."""
    tokens = (TOKENS * (length // len(TOKENS) + 1))[:length]
    job = job_pb2.Job(request_id="r", cache_salt="s", n=2)
    give(job, tokens)
    assert job == job_pb2.Job(request_id="r", cache_salt="s", n=2, prompt_token_ids=tokens)
    assert list(job.prompt_token_ids) == tokens
    assert encoded(job) == encode(tokens) == b"".join(each.to_bytes(4, "little") for each in tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        give(job_pb2.Job(), [token])
