"""Pages that come back push out nothing that a waiting sequence will hit: it was here before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.engine_run import engine_of, finish_all, prompt_of, request, run, solo, step
from tests.unit.worker.test_paging import names, pages_of, paging, pool_of

if TYPE_CHECKING:
    from tests.unit.worker.engine_run import Answers
    from worker.engine import Engine

HIT, OTHER, COMING = prompt_of(8, 1), prompt_of(12, 2), prompt_of(24, 3)
WAITS = request("w", [*HIT, 9], max_tokens=4)


def crowded(num_blocks: int, answers: Answers, *, cache_blocks: int | None = None, **waits: object) -> Engine:
    """One that has cached, in the order of their use, the two blocks that a waiting sequence will hit and three others,
    while another sequence runs on two."""
    engine, _ = engine_of(num_blocks, max_running=1, paging=True, cache_blocks=cache_blocks)
    paging(engine).waiting = engine.waiting
    for name, prompt in (("h", HIT), ("o", OTHER)):
        run(engine, request(name, prompt, max_tokens=1))
    engine.add(request("r", prompt_of(5, 4), max_tokens=3))
    step(engine, answers)
    engine.add(request("w", [*HIT, 9], max_tokens=4, **waits))  # type: ignore[arg-type]
    assert len([*engine.waiting]) == 1
    return engine


def offered(engine: Engine, prompt: list[int]) -> list[bool]:
    return [paging(engine).offers(name.hash) for name in names(engine, prompt)]


def test_what_is_colder_stays_if_somebody_waits_for_it() -> None:
    answers: Answers = {}
    engine = crowded(8, answers)
    wanted, payloads = pages_of(COMING)
    assert pool_of(engine).free_count == 1
    assert paging(engine).adopt(wanted[:3], payloads) == 3
    engine.check_integrity()
    assert offered(engine, HIT) == [True, True]
    assert offered(engine, OTHER) == [True, False, False]
    answer = finish_all(engine, answers)["w", 0]
    assert answer.last.cached_tokens == 8
    assert answer.said == solo(WAITS).said


def test_no_more_is_taken_than_there_is_room_beside_it() -> None:
    engine = crowded(8, {})
    wanted, payloads = pages_of(COMING)
    assert paging(engine).adopt(wanted, payloads) == 4
    engine.check_integrity()
    assert offered(engine, HIT) == [True, True]
    assert offered(engine, OTHER) == [False] * 3
    assert pool_of(engine).free_count == 0
    assert paging(engine).adopt(wanted, payloads) == 4, "nor is one page taken for the next"


def test_the_limit_of_the_cache_costs_it_nothing_either() -> None:
    engine = crowded(16, {}, cache_blocks=5)
    wanted, payloads = pages_of(COMING)
    assert paging(engine).adopt(wanted, payloads) == 3
    engine.check_integrity()
    assert (offered(engine, HIT), offered(engine, OTHER)) == ([True, True], [False] * 3)
    assert pool_of(engine).cached_count == 5


@pytest.mark.parametrize(("scored", "stays"), [(None, True), (0, False)])
def test_one_whose_prompt_is_scored_hits_nothing_and_keeps_nothing(scored: int | None, stays: bool) -> None:
    engine = crowded(8, {}, prompt_logprobs=scored)
    wanted, payloads = pages_of(COMING)
    assert paging(engine).adopt(wanted[:3], payloads) == 3
    assert offered(engine, HIT) == [stays, stays]


def test_a_prefix_that_comes_back_is_spared_with_what_it_continues() -> None:
    """The waiting one hits the head of what comes."""
    engine = crowded(8, {})
    longer = [*HIT, *prompt_of(8, 5)]
    wanted, payloads = pages_of(longer)
    assert paging(engine).adopt(wanted, payloads) == 4
    engine.check_integrity()
    assert offered(engine, longer) == [True] * 4
