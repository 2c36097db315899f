"""When a worker gets no more jobs because they fail there, and when it gets some again."""

from __future__ import annotations

from gateway.breaker import FAILURES, MAX_CIRCUITS, OPEN_S, Breaker


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    """With worker a refused."""
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        breaker.failed("a")
    return breaker


def test_five_failures_in_a_row_open_a_circuit() -> None:
    breaker = Breaker(Clock())
    for _ in range(4):
        breaker.failed("a")
    assert (breaker.refused(["a", "b"]), breaker.open) == ({}, 0)
    breaker.failed("a")
    assert breaker.refused(["a", "b"]) == {"a": "its last 5 jobs failed"}
    assert breaker.open == 1


def test_circuits_are_told_by_what_they_are() -> None:
    clock = Clock()
    breaker = opened(clock)
    breaker.failed("b")
    assert breaker.circuits == {"a": "open"}
    clock.now += OPEN_S
    assert breaker.circuits == {"a": "half-open"}
    breaker.begin("a")
    assert breaker.circuits == {"a": "half-open"}
    breaker.succeeded("a")
    assert breaker.circuits == {}


def test_a_success_between_them_begins_the_row_anew() -> None:
    breaker = Breaker(Clock())
    for _ in range(3):
        for _ in range(4):
            breaker.failed("a")
        breaker.succeeded("a")
    assert breaker.refused(["a", "b"]) == {}


def test_workers_are_told_apart() -> None:
    breaker = Breaker(Clock())
    for worker in ("a", "b") * 4:
        breaker.failed(worker)
    assert breaker.refused(["a", "b", "c"]) == {}


def test_the_last_able_worker_is_never_refused() -> None:
    breaker = opened(Clock())
    assert breaker.refused(["a"]) == {}
    for _ in range(5):
        breaker.failed("b")
    assert breaker.refused(["a", "b"]) == {}
    assert set(breaker.refused(["a", "b", "c"])) == {"a", "b"}
    assert breaker.refused([]) == {}


def test_after_a_while_one_job_at_a_time_is_on_trial() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += OPEN_S
    assert breaker.refused(["a", "b"]) == {}
    assert breaker.refused(["a", "b"], trials=False) == {"a": "its last 5 jobs failed"}
    trial = breaker.begin("a")
    assert trial
    assert breaker.refused(["a", "b"]) == {"a": "its last 5 jobs failed, and it is on trial"}
    assert not breaker.begin("a")
    breaker.release("a", trial)
    assert breaker.refused(["a", "b"]) == {}
    assert breaker.open == 1


def test_a_trial_that_succeeds_closes_the_circuit() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += OPEN_S
    trial = breaker.begin("a")
    breaker.succeeded("a")
    breaker.release("a", trial)
    assert (breaker.refused(["a", "b"]), breaker.open) == ({}, 0)
    assert not breaker.begin("a")


def test_a_trial_that_fails_opens_it_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += OPEN_S
    trial = breaker.begin("a")
    breaker.failed("a")
    breaker.release("a", trial)
    assert breaker.refused(["a", "b"]) == {"a": "its last 6 jobs failed"}
    clock.now += OPEN_S - 0.001
    assert breaker.refused(["a", "b"]) != {}
    clock.now += 0.001
    assert breaker.refused(["a", "b"]) == {}


def test_jobs_of_a_worker_that_works_are_no_trials() -> None:
    breaker = Breaker(Clock())
    assert not breaker.begin("a")
    breaker.failed("a")
    assert not breaker.begin("a")
    breaker.release("nobody", 1)


def test_what_is_remembered_is_bounded() -> None:
    breaker = opened(Clock())
    for number in range(MAX_CIRCUITS):
        breaker.failed(f"w{number}")
    assert breaker.open == 0


def test_the_first_token_of_a_trial_is_enough_and_what_fails_behind_it_opens_at_once() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += OPEN_S
    breaker.began("a", breaker.begin("a"))
    assert (breaker.refused(["a", "b"]), breaker.open) == ({}, 0)
    breaker.failed("a")
    assert (breaker.refused(["a", "b"]), breaker.open) == ({"a": "its last 5 jobs failed"}, 1)
    clock.now += OPEN_S
    trial = breaker.begin("a")
    breaker.began("a", trial)
    breaker.release("a", trial)
    breaker.succeeded("a")
    breaker.failed("a")
    assert (breaker.refused(["a", "b"]), breaker.open) == ({}, 0)


def test_tokens_of_jobs_that_are_on_no_trial_say_nothing() -> None:
    breaker = opened(Clock())
    for worker in ("a", "nobody"):
        breaker.began(worker, 0)
    assert (breaker.refused(["a", "b"]), breaker.open) == ({"a": "its last 5 jobs failed"}, 1)


def test_lives_that_are_over_are_forgotten() -> None:
    breaker = opened(Clock())
    breaker.failed("b")
    breaker.keep({"b", "c"})
    assert breaker.open == 0
    for _ in range(FAILURES - 1):
        breaker.failed("b")
    assert breaker.open == 1
    breaker.keep(())
    assert breaker.open == 0


def test_the_end_of_a_trial_that_is_over_says_nothing_of_the_next() -> None:
    """It had its token, another job failed behind it, and its caller leaves."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += OPEN_S
    first = breaker.begin("a")
    breaker.began("a", first)
    breaker.failed("a")
    clock.now += OPEN_S
    second = breaker.begin("a")
    breaker.release("a", first)
    assert breaker.refused(["a", "b"]) == {"a": "its last 5 jobs failed, and it is on trial"}
    breaker.began("a", first)
    assert breaker.open == 1
    breaker.began("a", second)
    assert breaker.open == 0
