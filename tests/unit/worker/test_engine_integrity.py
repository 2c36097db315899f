"""What `Engine.check_integrity` notices beyond the scheduler's and the pool's own accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.engine_run import engine_of, prompt_of, request
from worker.params import SamplingParams
from worker.sampling.draw import TokenLogprobs
from worker.scheduling.block import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.engine import Engine


def busy() -> Engine:
    """Two choices that have begun, and a prompt that is half done."""
    engine, _ = engine_of(token_budget=12)
    sampling = SamplingParams(seed=1, frequency_penalty=0.5)
    engine.add(request("a", prompt_of(6), n=2, sampling=sampling))
    engine.step()
    engine.add(request("b", prompt_of(30, seed=1), prompt_logprobs=0))
    engine.step()
    engine.check_integrity()
    return engine


def forget_choice(engine: Engine) -> None:
    del engine._choices[next(iter(engine._choices))]


def forget_request(engine: Engine) -> None:
    del engine._requests["b"]


def lose_choice(engine: Engine) -> None:
    del engine._requests["a"].choices[1]


def lose_sequence(engine: Engine) -> None:
    engine._scheduler.remove(engine._requests["a"].choices[0].sequence)


def swap_choices(engine: Engine) -> None:
    choices = engine._requests["a"].choices
    choices[0], choices[1] = choices[1], choices[0]


def fork_again(engine: Engine) -> None:
    engine._requests["a"].unforked = range(1, 2)


def fork_late(engine: Engine) -> None:
    engine._requests["a"].unforked = range(2, 3)


def score_twice(engine: Engine) -> None:
    engine._requests["b"].prompt_logprobs.append(TokenLogprobs(5, -1.0))


def count_twice(engine: Engine) -> None:
    counts = engine._requests["a"].choices[0].counts
    assert counts is not None
    counts.add(5)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (forget_choice, "the scheduler has"),
        (lose_sequence, "the scheduler has"),
        (forget_request, "requests and choices differ"),
        (lose_choice, "requests and choices differ"),
        (swap_choices, "is not choice"),
        (fork_again, "has choices"),
        (fork_late, "goes on without the other choices"),
        (score_twice, "log-probabilities of its prompt"),
        (count_twice, "other tokens than are counted"),
    ],
)
def test_accounts_that_disagree_are_noticed(tamper: Callable[[Engine], None], message: str) -> None:
    engine = busy()
    tamper(engine)
    with pytest.raises(IntegrityError, match=message):
        engine.check_integrity()
