"""When a job is given up, and what its caller is told."""

from __future__ import annotations

import pytest

from kvstore.dead import MAX_DEAD, MAX_DEAD_BYTES, most_kept
from kvstore.jobs import JobState, Orphan


@pytest.mark.parametrize(
    ("deaths", "fruitless", "verdict"),
    [
        (0, 9, ""),
        (2, 9, ""),
        (3, 3, "3 workers died while they ran it"),
        (3, 2, ""),
        (4, 0, "4 workers died while they ran it"),
        (4, 10, "4 workers died while they ran it"),
        (0, 10, "10 workers in a row ran it, and none got a token of it"),
    ],
)
def test_a_job_is_doomed_by_deaths_three_without_a_token_or_four_or_by_ten_attempts_without_one(
    deaths: int, fruitless: int, verdict: str
) -> None:
    """However often it has been run."""
    orphan = Orphan(
        worker="w0",
        incarnation="i",
        why="died",
        entry_id="1-0",
        request_id="r",
        model="m",
        prompt_tokens=3,
        longest=10,
        attempt=100,
        next=(0,),
        ended=frozenset(),
        fingerprint="f",
        deaths=deaths,
        fruitless=fruitless,
        state=JobState.RUNNING,
        seen_ms=0,
        waited_ms=0,
    )
    assert orphan.doomed == bool(verdict)
    if verdict:
        assert orphan.verdict == verdict


def test_so_many_dead_are_kept_as_a_few_megabytes_hold() -> None:
    assert most_kept(b"") == most_kept(b"x" * 1000) == MAX_DEAD
    assert most_kept(b"x" * (MAX_DEAD_BYTES // 10)) == 10
    assert most_kept(b"x" * (MAX_DEAD_BYTES + 1)) == 1
