"""What becomes of a line whose call failed."""

from __future__ import annotations

import grpc
import pytest

from gateway.batch.verdicts import Again, judge, request_id

Code = grpc.StatusCode


def test_what_there_is_no_room_for_waits_as_told_and_without_end() -> None:
    for failures in (1, 10_000):
        assert judge(Code.RESOURCE_EXHAUSTED, 2.5, ended=False, jobs=1, failures=failures) == Again(2.5, new_job=False)
    assert judge(Code.RESOURCE_EXHAUSTED, 0.0, ended=False, jobs=1, failures=1) == Again(0.5, new_job=False)


def test_what_will_never_fit_is_its_result() -> None:
    assert judge(Code.RESOURCE_EXHAUSTED, None, ended=False, jobs=1, failures=1) is None


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED])
def test_what_no_gateway_takes_waits_without_end(code: grpc.StatusCode) -> None:
    pauses = [judge(code, None, ended=False, jobs=1, failures=failures) for failures in (1, 2, 3, 6, 10_000)]
    assert pauses == [Again(pause, new_job=False) for pause in (0.5, 1.0, 2.0, 10.0, 10.0)]


def test_a_job_that_found_no_worker_is_made_anew_three_times_in_all() -> None:
    assert judge(Code.UNAVAILABLE, None, ended=True, jobs=1, failures=1) == Again(0.5, new_job=True)
    assert judge(Code.UNAVAILABLE, None, ended=True, jobs=2, failures=1) == Again(0.5, new_job=True)
    assert judge(Code.UNAVAILABLE, None, ended=True, jobs=3, failures=1) is None


def test_a_job_that_was_cancelled_is_made_anew() -> None:
    assert judge(Code.CANCELLED, None, ended=True, jobs=1, failures=1) == Again(0.0, new_job=True)
    assert judge(Code.CANCELLED, None, ended=True, jobs=3, failures=3) is None
    assert judge(Code.CANCELLED, None, ended=False, jobs=1, failures=1) is None


@pytest.mark.parametrize("code", [Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.INTERNAL, Code.DATA_LOSS])
@pytest.mark.parametrize("ended", [True, False])
def test_what_is_wrong_with_the_request_is_its_result(code: grpc.StatusCode, ended: bool) -> None:
    assert judge(code, None, ended=ended, jobs=1, failures=1) is None


def test_ids_follow_from_batch_and_line() -> None:
    assert [request_id("batch_a", 7, job) for job in range(3)] == ["batch_a.7", "batch_a.7.1", "batch_a.7.2"]
