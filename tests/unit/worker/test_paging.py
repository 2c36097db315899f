"""Blocks that leave a pool as pages, and pages that come back: which blocks, in which order, in whose place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.page import names_of
from tests.unit.worker.engine_run import BS, engine_of, finish_all, prompt_of, request, run, solo, step
from tests.unit.worker.paged_model import NAN, PagedModel
from worker.scheduling.block import EventKind
from worker.step import NotFinite

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstore.page import PageName
    from tests.unit.worker.engine_run import Answers
    from worker.engine import Engine
    from worker.paging import Paging
    from worker.scheduling.block_pool import BlockPool
    from worker.step import Spilled, StepRow

MUCH = 99


def paging_engine(num_blocks: int = 16, *, leave: int = MUCH, cache_blocks: int | None = None) -> Engine:
    engine, _ = engine_of(num_blocks, paging=True, cache_blocks=cache_blocks)
    paging(engine).leave = leave
    return engine


def paging(engine: Engine) -> Paging:
    assert engine.paging is not None
    return engine.paging


def names(engine: Engine, prompt: Sequence[int], salt: str = "") -> list[PageName]:
    return names_of(engine.root_of(salt), tuple(prompt), BS)


def spilled_by(engine: Engine) -> list[Spilled]:
    """All that leaves the pool until there is no work any more."""
    found: list[Spilled] = []
    while engine.has_work:
        found += step(engine).spilled
    return found


def pages_of(prompt: Sequence[int]) -> tuple[list[PageName], list[bytes]]:
    """The pages of a prompt, as another worker would have left them."""
    engine = paging_engine(64)
    run(engine, request("a", [*prompt, 9], max_tokens=1))
    wanted = names(engine, prompt)
    return wanted, [page.payload for page in paging(engine).read(wanted)]


def pool_of(engine: Engine) -> BlockPool:
    return engine._scheduler.pool


def model_of(engine: Engine) -> PagedModel:
    memory = paging(engine)._memory
    assert isinstance(memory, PagedModel)
    return memory


def shared(*engines: Engine) -> None:
    """Their models know each other's digests."""
    for engine in engines[1:]:
        model_of(engine).made = model_of(engines[0]).made


def test_what_is_evicted_is_read_before_it_is_written_over() -> None:
    engine, first, second = paging_engine(5), prompt_of(12, 1), prompt_of(16, 2)
    run(engine, request("a", first, max_tokens=1))
    engine.add(request("b", second, max_tokens=1))
    found = spilled_by(engine)
    # Five blocks: two are free, the others go from the tail on, all in one step. They are told head first.
    assert [page.name for page in found] == names(engine, first)[1:]
    assert [model_of(engine).tokens_of(page.payload) for page in found] == [first[:8], first[:12]]
    assert paging(engine).rescued == 2
    assert pool_of(engine).cached_count == 5


def test_without_leave_nothing_is_read_and_with_little_the_heads_are() -> None:
    for leave, expected in ((0, []), (1, [1]), (2, [1, 2])):
        engine, first = paging_engine(5, leave=leave), prompt_of(12, 1)
        run(engine, request("a", first, max_tokens=1))
        engine.add(request("b", prompt_of(16, 2), max_tokens=1))
        assert [page.name.position for page in spilled_by(engine)] == expected
        assert paging(engine).passed_over == 2 - len(expected)


def test_what_the_limit_of_the_cache_evicts_is_read_in_the_next_step() -> None:
    engine, first = paging_engine(16, cache_blocks=1), prompt_of(12, 1)
    engine.add(request("a", first, max_tokens=1))
    assert spilled_by(engine) == []
    engine.add(request("b", [5], max_tokens=1))
    found = spilled_by(engine)
    assert [page.name for page in found] == names(engine, first)[1:]
    assert [model_of(engine).tokens_of(page.payload) for page in found] == [first[:8], first[:12]]


def test_a_prefix_that_comes_back_is_hit_and_changes_nothing() -> None:
    prompt = prompt_of(14, 3)
    wanted, payloads = pages_of(prompt)
    engine = paging_engine()
    source = paging_engine(64)
    shared(source, engine)
    run(source, request("a", [*prompt, 9], max_tokens=1))
    assert paging(engine).adopt(wanted, payloads) == 3
    assert [*paging(engine).cached()] == wanted
    assert [event.kind for event in engine.take_events()] == [EventKind.STORED] * 3
    answer = run(engine, request("b", [*prompt, 7, 8]))[0]
    assert answer.last.cached_tokens == 12
    assert answer.said == solo(request("b", [*prompt, 7, 8])).said
    assert paging(engine).adopted == 3


def test_what_is_offered_already_is_not_written() -> None:
    prompt = prompt_of(12, 3)
    engine = paging_engine()
    run(engine, request("a", [*prompt[:8], 9], max_tokens=1))
    wanted = names(engine, prompt)
    junk = [bytes(model_of(engine).page_bytes)] * 3
    before = [page.payload for page in paging(engine).read(wanted)]
    assert paging(engine).adopt(wanted[:2], junk[:2]) == 2
    assert [page.payload for page in paging(engine).read(wanted)] == before
    assert paging(engine).adopted == 0
    assert paging(engine).adopt(wanted, junk) == 3
    assert [page.payload for page in paging(engine).read(wanted)] == [*before, junk[2]]


def test_only_what_continues_an_offered_prefix_is_taken() -> None:
    wanted, payloads = pages_of(prompt_of(16, 3))
    engine = paging_engine()
    assert paging(engine).adopt(wanted[1:], payloads[1:]) == 0
    assert paging(engine).adopt(wanted[:1], payloads[:1]) == 1
    assert paging(engine).adopt(wanted[2:], payloads[2:]) == 0
    assert paging(engine).adopt(wanted[1:], payloads[1:]) == 3
    engine.check_integrity()


def test_pages_in_a_wrong_order_or_of_wrong_names_end_the_prefix() -> None:
    wanted, payloads = pages_of(prompt_of(16, 3))
    other_root = wanted[1]._replace(root=names(paging_engine(), prompt_of(4), "other")[0].root)
    for wrong, taken in (
        ([wanted[0], wanted[2], wanted[1]], 1),
        ([wanted[0], wanted[0]], 1),
        ([wanted[0], other_root], 1),
        ([wanted[0], wanted[1]._replace(position=2)], 1),
        ([wanted[0], wanted[1]._replace(tokens=(1, 2))], 1),
        ([wanted[0]._replace(position=1)], 0),
    ):
        engine = paging_engine()
        assert paging(engine).adopt(wrong, payloads) == taken
        engine.check_integrity()
    engine = paging_engine()
    paging(engine).adopt(wanted[:1], payloads[:1])
    assert paging(engine).adopt([other_root], payloads) == 0
    assert paging(engine).adopt([], []) == 0
    engine.check_integrity()


def test_pages_take_the_place_of_what_is_colder_and_never_of_their_own_head() -> None:
    """The head is the least recently used, and still the pages that continue it don't push it out."""
    wanted, payloads = pages_of(prompt_of(16, 3))
    engine, other = paging_engine(6), prompt_of(16, 4)
    paging(engine).adopt(wanted[:1], payloads[:1])
    run(engine, request("b", other, max_tokens=1))
    assert pool_of(engine).free_count == 1
    assert paging(engine).adopt(wanted[1:], payloads[1:]) == 3
    engine.check_integrity()
    assert paging(engine).cached() == [*wanted, *names(engine, other)[:2]]
    # What had to go was read before it was written over, and is told with the next step.
    engine.add(request("c", [5], max_tokens=1))
    found = step(engine).spilled
    assert [model_of(engine).tokens_of(page.payload) for page in found[:2]] == [other[:12], other[:16]]


def test_without_eviction_only_free_blocks_are_used() -> None:
    wanted, payloads = pages_of(prompt_of(16, 3))
    engine, other = paging_engine(6), prompt_of(16, 4)
    run(engine, request("b", other, max_tokens=1))
    assert paging(engine).adopt(wanted, payloads, evict=False) == 2
    assert paging(engine).adopt(wanted[2:], payloads[2:], evict=False) == 0
    assert paging(engine).cached() == [*wanted[:2], *names(engine, other)]


@pytest.mark.parametrize(("cache_blocks", "taken"), [(0, 0), (1, 1), (3, 3), (9, 4)])
@pytest.mark.parametrize("evict", [True, False])
def test_no_more_is_taken_than_may_be_cached(cache_blocks: int, taken: int, evict: bool) -> None:
    wanted, payloads = pages_of(prompt_of(16, 3))
    engine = paging_engine(16, cache_blocks=cache_blocks)
    assert paging(engine).adopt(wanted, payloads, evict=evict) == taken
    assert paging(engine).cached() == wanted[:taken]
    engine.check_integrity()


def test_running_sequences_keep_their_blocks() -> None:
    wanted, payloads = pages_of(prompt_of(16, 3))
    engine = paging_engine(5)
    asked = request("b", prompt_of(10, 4), max_tokens=6)
    engine.add(asked)
    answers: Answers = {}
    step(engine, answers)
    assert paging(engine).adopt(wanted, payloads) == 2
    engine.check_integrity()
    assert finish_all(engine, answers)["b", 0].said == solo(asked).said


def test_a_sequence_that_computes_what_comes_back_takes_either() -> None:
    prompt = prompt_of(40, 3)
    wanted, payloads = pages_of(prompt)
    engine, _ = engine_of(64, paging=True, token_budget=8)
    source = paging_engine(64)
    shared(source, engine)
    run(source, request("a", [*prompt, 9], max_tokens=1))
    asked = request("b", [*prompt, 7, 8])
    engine.add(asked)
    answers: Answers = {}
    step(engine, answers)
    assert paging(engine).adopt(wanted, payloads) == 10
    engine.check_integrity()
    assert finish_all(engine, answers)["b", 0].said == solo(asked).said
    assert pool_of(engine).stored == 10 + 2


def test_a_runner_that_fails_costs_pages_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, payloads = pages_of(prompt_of(16, 3))
    engine, first = paging_engine(5), prompt_of(12, 1)

    def broken(*_: object) -> list[bytes]:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(PagedModel, "write_blocks", broken)
    assert paging(engine).adopt(wanted, payloads) == 0
    engine.check_integrity()
    assert pool_of(engine).free_count == 5
    monkeypatch.setattr(PagedModel, "read_blocks", broken)
    engine.add(request("a", first, max_tokens=1))
    result = step(engine)
    assert [repr(failure) for failure in result.failures] == ["MemoryError('no room for a copy')"]
    asked = request("b", prompt_of(16, 2), max_tokens=1)
    engine.add(asked)
    result = step(engine)
    assert (len(result.failures), result.spilled, len(result.outputs)) == (1, (), 1)
    assert paging(engine).passed_over == 2
    assert paging(engine).read(wanted) == []


def test_prefixes_in_doubt_are_told() -> None:
    engine = paging_engine()
    prompt = prompt_of(8, 1)
    run(engine, request("a", [*prompt, 9], max_tokens=1))
    engine.add(request("b", [*prompt, NAN], max_tokens=1))
    result = step(engine)
    assert result.doubted == tuple(name.hash for name in names(engine, prompt))
    assert paging(engine).doubted == {*result.doubted}
    assert step_until_idle(engine) == ()


def test_prefixes_in_doubt_are_told_of_a_chunk_that_asked_for_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model raises then. What was hit may be to blame, so all of it goes, and nobody else's."""
    engine, _ = engine_of(32, token_budget=8, paging=True)
    prompt, other = prompt_of(8, 1), prompt_of(8, 2)
    run(engine, request("a", [*prompt, 9], max_tokens=1))
    run(engine, request("o", [*other, 9], max_tokens=1))
    forward = PagedModel.forward

    def refusing(model: PagedModel, rows: Sequence[StepRow]) -> torch.Tensor:
        if any(not row.logits for row in rows):
            raise NotFinite("the keys or values of a chunk are not finite")
        return forward(model, rows)

    monkeypatch.setattr(PagedModel, "forward", refusing)
    engine.add(request("b", [*prompt, *prompt_of(12, 3)], max_tokens=1))
    result = step(engine)
    assert [output.error for output in result.outputs] == ["NotFinite: the keys or values of a chunk are not finite"]
    assert result.doubted == tuple(name.hash for name in names(engine, prompt))
    assert [paging(engine).offers(names(engine, each)[1].hash) for each in (prompt, other)] == [False, True]


def step_until_idle(engine: Engine) -> tuple[object, ...]:
    engine.add(request("z", [5], max_tokens=1))
    return step(engine).doubted


def test_an_engine_without_memory_pages_nothing() -> None:
    engine, _ = engine_of(5)
    assert engine.paging is None
    run(engine, request("a", prompt_of(12, 1), max_tokens=1))
    engine.add(request("b", prompt_of(16, 2), max_tokens=1))
    assert step(engine).spilled == ()
