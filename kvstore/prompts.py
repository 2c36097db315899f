"""A job's prompt as bytes.

A job carries its token ids as they are hashed, so that they are encoded once and copied from then on: a message that
gives them one by one takes fifty times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.block_hash import TOKEN_BYTES, encode
from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTH_DELIMITED: Final = 2
_TAG: Final = job_pb2.Job.DESCRIPTOR.fields_by_name["prompt_token_ids"].number << 3 | _LENGTH_DELIMITED


def encoded(job: job_pb2.Job) -> bytes:
    """A job's prompt, as ``block_hash.encode`` makes it."""
    # A message of nothing else ends with these bytes; before them it has their tag and length.
    size = TOKEN_BYTES * len(job.prompt_token_ids)
    return job_pb2.Job(prompt_token_ids=job.prompt_token_ids).SerializeToString()[-size:] if size else b""


def give(job: job_pb2.Job, token_ids: Sequence[int]) -> None:
    """Adds token ids to a job's prompt. Raises OverflowError or ValueError when one does not fit u32."""
    data = encode(token_ids)
    job.MergeFromString(_varint(_TAG) + _varint(len(data)) + data)


def _varint(number: int) -> bytes:
    """As messages write lengths."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
