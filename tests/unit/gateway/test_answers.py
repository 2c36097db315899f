"""How long answers are expected to be."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.answers import FIRST_GUESS, MAX_MODELS, MEMORY, Answers
from octavo.v1 import inference_pb2, job_pb2


def job(model: str = "m", **stopping: Any) -> job_pb2.Job:
    return job_pb2.Job(model=model, stopping=inference_pb2.Stopping(**{"max_tokens": 1000, **stopping}))


def test_the_mean_is_of_each_model_and_the_guess_is_soon_forgotten() -> None:
    answers = Answers()
    assert answers.mean("m") == FIRST_GUESS
    answers.learn("m", 10)
    assert (answers.mean("m"), answers.mean("other")) == (10, FIRST_GUESS)
    answers.learn("m", 40)
    assert answers.mean("m") == 25
    for _ in range(10 * MEMORY):
        answers.learn("m", 7)
    assert answers.mean("m") == 7


def test_no_answer_is_expected_to_be_empty() -> None:
    answers = Answers()
    answers.learn("m", 0)
    assert answers.expected(job()) == 1


@pytest.mark.parametrize(
    ("stopping", "tokens"),
    [
        ({}, 50),
        ({"max_tokens": 20}, 20),
        ({"min_tokens": 80}, 80),
        ({"ignore_eos": True}, 1000),
        ({"ignore_eos": True, "stop": ["."]}, 50),
        ({"ignore_eos": True, "stop_token_ids": [3]}, 50),
    ],
)
def test_a_request_bounds_what_is_expected(stopping: dict[str, Any], tokens: int) -> None:
    answers = Answers()
    answers.learn("m", 50)
    assert answers.expected(job(**stopping)) == tokens


def test_models_that_come_and_go_leave_nothing_behind() -> None:
    answers = Answers()
    for index in range(MAX_MODELS + 1):
        answers.learn(f"m{index}", 5)
    assert answers.mean("m0") == FIRST_GUESS
    assert answers.mean("m1") == 5
