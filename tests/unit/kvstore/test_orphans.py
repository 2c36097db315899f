"""When a job is given up, and what its caller is told."""

from __future__ import annotations

import pytest

from kvstore.dead import MAX_DEAD, MAX_DEAD_BYTES, most_kept
from kvstore.jobs import JobState, Orphan
from octavo.v1 import job_pb2


@pytest.mark.parametrize(
    ("deaths", "attempt", "verdict"),
    [
        (0, 9, ""),
        (2, 9, ""),
        (3, 3, "3 workers died while they ran it"),
        (4, 10, "4 workers died while they ran it"),
        (0, 10, "10 workers ran it, and none came to its end"),
    ],
)
def test_a_job_is_doomed_by_three_deaths_or_ten_attempts(deaths: int, attempt: int, verdict: str) -> None:
    orphan = Orphan(
        worker="w0",
        incarnation="i",
        why="died",
        entry_id="1-0",
        job=job_pb2.Job(),
        attempt=attempt,
        next=(0,),
        ended=frozenset(),
        fingerprint="f",
        deaths=deaths,
        state=JobState.RUNNING,
        seen_ms=0,
    )
    assert orphan.doomed == bool(verdict)
    if verdict:
        assert orphan.verdict == verdict


def test_so_many_dead_are_kept_as_a_few_megabytes_hold() -> None:
    assert most_kept(b"") == most_kept(b"x" * 1000) == MAX_DEAD
    assert most_kept(b"x" * (MAX_DEAD_BYTES // 10)) == 10
    assert most_kept(b"x" * (MAX_DEAD_BYTES + 1)) == 1
