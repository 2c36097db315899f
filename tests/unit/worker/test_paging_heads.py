"""What pages continue, as the pool knows it, and what is read of it though nothing evicts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.worker.engine_run import prompt_of, request, run
from tests.unit.worker.test_paging import MUCH, model_of, names, pages_of, paging, paging_engine, pool_of, spilled_by

if TYPE_CHECKING:
    from kvstore.block_hash import BlockHash
    from worker.engine import Engine


def chain(engine: Engine, prompt: list[int], blocks: int) -> tuple[BlockHash, ...]:
    return tuple(name.hash for name in names(engine, prompt)[:blocks])


def test_what_is_read_tells_what_it_continues_as_far_as_that_stays() -> None:
    engine, first = paging_engine(5), prompt_of(12, 1)
    run(engine, request("a", first, max_tokens=1))
    assert paging(engine).take_heads() == []
    engine.add(request("b", prompt_of(16, 2), max_tokens=1))
    assert [page.name.position for page in spilled_by(engine)] == [1, 2]
    assert paging(engine).take_heads() == [chain(engine, first, 1)]
    assert paging(engine).take_heads() == []


def test_what_is_not_read_tells_nothing() -> None:
    engine = paging_engine(5, leave=0)
    run(engine, request("a", prompt_of(12, 1), max_tokens=1))
    run(engine, request("b", prompt_of(16, 2), max_tokens=1))
    assert paging(engine).passed_over == 2
    assert paging(engine).take_heads() == []


def test_several_tails_tell_of_their_head_once() -> None:
    engine, head = paging_engine(8), prompt_of(8, 1)
    for seed in (2, 3):
        run(engine, request(f"t{seed}", [*head, *prompt_of(4, seed)], max_tokens=1))
    engine.add(request("c", prompt_of(24, 4), max_tokens=1))
    assert [page.name.position for page in spilled_by(engine)] == [2, 2]
    assert paging(engine).take_heads() == [chain(engine, head, 2)]


def test_what_comes_back_tells_what_it_continues() -> None:
    prompt = prompt_of(16, 3)
    wanted, payloads = pages_of(prompt)
    engine = paging_engine()
    assert paging(engine).adopt(wanted[:2], payloads[:2]) == 2
    assert paging(engine).take_heads() == []
    assert paging(engine).adopt(wanted[2:], payloads[2:]) == 4 - 2
    assert paging(engine).take_heads() == [chain(engine, prompt, 2)]
    assert paging(engine).adopt(wanted[2:], payloads[2:]) == 2, "it is there"
    assert paging(engine).take_heads() == []


def test_what_is_wanted_is_read_where_it_is_offered_still() -> None:
    engine, first, gone = paging_engine(8), prompt_of(12, 1), prompt_of(8, 2)
    run(engine, request("a", first, max_tokens=1))
    mine, theirs = names(engine, first), names(engine, gone)
    paging(engine).want([(mine[2].hash, 2), (mine[0].hash, 0), (theirs[1].hash, 1)])
    assert paging(engine).take_wanted() == []
    assert paging(engine).adopt([], []) == 0
    read = paging(engine).take_wanted()
    assert [page.name for page in read] == [mine[0], mine[2]]
    assert [model_of(engine).tokens_of(page.payload) for page in read] == [first[:4], first]
    assert (paging(engine).rescued, paging(engine).leave) == (2, MUCH - 2)
    assert paging(engine).adopt([], []) == 0
    assert paging(engine).take_wanted() == [], "once"
    assert pool_of(engine).cached_count == 3


def test_with_little_leave_the_heads_are_read() -> None:
    engine, first = paging_engine(8, leave=2), prompt_of(12, 1)
    run(engine, request("a", first, max_tokens=1))
    mine = names(engine, first)
    paging(engine).want([(name.hash, name.position) for name in reversed(mine)])
    paging(engine).adopt([], [])
    assert [page.name for page in paging(engine).take_wanted()] == mine[:2]
    assert paging(engine).leave == 0
