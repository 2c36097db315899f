"""A job of several choices ends choice by choice."""

from __future__ import annotations

from octavo.v1 import inference_pb2, job_pb2
from tests.unit.worker.test_journal import make_claim, make_output
from worker.journal import Journal
from worker.sequence import Finish


def test_a_job_runs_until_its_last_choice_has_ended() -> None:
    journal = Journal("w0")
    journal.open(make_claim(n=3), now=0.0)
    assert journal.open_choices == 3
    deliveries = [journal.record(make_output(choice=choice), now=1.0) for choice in (0, 2, 1)]
    assert [one is not None and one.HasField("route") for one in deliveries] == [True, False, False]
    for turn, choice in enumerate((1, 0, 2)):
        last = journal.record(make_output(choice=choice, start=1, finish=Finish.LENGTH, completion_tokens=2), now=2.0)
        assert last is not None
        # The tokens of all choices so far.
        assert last.usage == inference_pb2.Usage(
            prompt_tokens=3, cached_tokens=2, completion_tokens=4 + turn, attempts=1
        )
        assert last.chunk.choice == choice
        assert journal.open_choices == 2 - turn
        assert ("r1" in journal.running) == (turn < 2)


def test_failing_a_job_ends_the_choices_that_are_open() -> None:
    journal = Journal("w0")
    journal.open(make_claim(n=3), now=0.0)
    journal.record(make_output(choice=0, token_ids=(1, 2)), now=1.0)
    journal.record(make_output(choice=1, finish=Finish.STOP), now=1.0)
    deliveries = journal.fail("r1", job_pb2.FAILURE_DEADLINE, "too late")
    assert [one.chunk for one in deliveries] == [
        inference_pb2.Chunk(choice=0, start=2, finish=inference_pb2.ERROR, error="too late"),
        inference_pb2.Chunk(choice=2, start=0, finish=inference_pb2.ERROR, error="too late"),
    ]
    usage = inference_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=3, attempts=1)
    assert [one.usage for one in deliveries] == [usage] * 2
    assert {one.failure for one in deliveries} == {job_pb2.FAILURE_DEADLINE}
    assert journal.running == {}
    assert journal.fail("r1", job_pb2.FAILURE_DEADLINE, "too late") == []


def test_a_job_is_kept_until_redis_has_taken_the_end_of_every_choice() -> None:
    journal = Journal("w0")
    journal.open(make_claim(n=3), now=0.0)
    ends = []
    for choice in (0, 1, 2):
        end = journal.record(make_output(choice=choice, finish=Finish.STOP), now=1.0)
        assert end is not None
        ends.append(end)
        if choice == 0:  # taken while the others go on
            assert not journal.settle(end, "1-0")
    assert journal.holds(make_claim(n=3))
    assert not journal.settle(ends[1], "1-0")
    assert not journal.settle(ends[1], "1-0")
    assert journal.holds(make_claim(n=3))
    assert journal.settle(ends[2], "1-0")
    assert not journal.holds(make_claim(n=3))
    assert not journal.settle(ends[2], "1-0")


def test_the_end_of_a_lost_job_settles_nothing_of_the_one_that_has_its_id_now() -> None:
    """Redis came back empty and was given the job once more: both are first attempts."""
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    old = journal.record(make_output(finish=Finish.STOP), now=1.0)
    journal.open(make_claim(entry="2-0"), now=2.0)
    new = journal.record(make_output(finish=Finish.STOP), now=3.0)
    assert old is not None
    assert new is not None
    assert not journal.settle(old, "1-0")
    assert journal.holds(make_claim(entry="2-0"))
    assert journal.roll_back("r1", 1, "1-0", {0: 0}, since=0) is None
    assert journal.settle(new, "2-0")


def test_the_end_of_another_attempt_settles_nothing() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    old = journal.record(make_output(finish=Finish.STOP), now=1.0)
    journal.open(make_claim(attempt=2), now=2.0)
    new = journal.record(make_output(finish=Finish.STOP), now=3.0)
    assert old is not None
    assert new is not None
    assert not journal.settle(old, "1-0")
    assert journal.holds(make_claim(attempt=2))
    assert journal.settle(new, "1-0")
