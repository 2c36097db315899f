"""Tenants share a worker by tokens, whoever came first with however much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.scheduling import make, names, sequence, step
from worker.scheduling import shares
from worker.sequence import Sequence

if TYPE_CHECKING:
    from worker.scheduling.scheduler import Scheduler


def arrive(
    scheduler: Scheduler, tenant: str, *numbers: int, max_tokens: int = 100, priority: int = 0, n: int = 1
) -> list[Sequence]:
    """Prompts of four tokens, named by tenant and number."""
    made = []
    for number in numbers:
        name = f"{tenant or '-'}{number}"
        start = 1000 * ord(name[0]) + 10 * number
        prompt = range(start, start + 4)
        made.append(sequence(name, prompt, tenant=tenant, max_tokens=max_tokens, priority=priority, n=n))
        scheduler.add(made[-1])
    return made


def test_who_comes_with_little_passes_who_came_with_much() -> None:
    scheduler = make(max_running=1)
    arrive(scheduler, "a", *range(6))
    arrive(scheduler, "b", 0, 1)
    assert names(scheduler.waiting) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


@pytest.mark.parametrize(
    "kinds",
    [
        {"a": (8, 10, 12), "b": (8, 10, 2)},
        {"a": (8, 10, 24), "b": (8, 10, 8), "c": (8, 10, 2)},
        {"a": (40, 4, 12), "b": (4, 40, 12), "c": (8, 8, 6)},
    ],
)
def test_tenants_are_served_alike_however_much_they_ask_for(kinds: dict[str, tuple[int, int, int]]) -> None:
    """Each always has a number of requests there, of a size: tokens of the prompt, of the answer, and how many."""
    served = serve(kinds, steps=300)
    assert max(served.values()) < 1.15 * min(served.values())


def test_who_comes_late_has_its_share_from_then_on() -> None:
    """Neither less, as others have more there, nor more, as they have had more so far."""
    kinds = {"a": (8, 10, 20), "b": (8, 10, 20), "c": (8, 10, 2)}
    before, after = serve(kinds, steps=150, late="c"), serve(kinds, steps=300, late="c", since=150)
    assert before["c"] == 0
    gained = {tenant: after[tenant] - before[tenant] for tenant in kinds}
    assert max(gained.values()) < 1.15 * min(gained.values())


def serve(kinds: dict[str, tuple[int, int, int]], *, steps: int, late: str = "", since: int = 1000) -> dict[str, float]:
    """What each was served, as parts of a step. `late` comes when so many steps are over."""
    scheduler, live, number = make(num_blocks=300, max_running=4), dict[str, list[Sequence]](), 0
    served = dict.fromkeys(kinds, 0.0)
    for at in range(steps):
        for tenant, (prompt, answer, there) in kinds.items():
            own = live.setdefault(tenant, [])
            while len(own) < there and (tenant != late or at >= since):
                number += 1
                start = 1000 * number
                own.append(
                    sequence(f"{tenant}{number}", range(start, start + prompt), tenant=tenant, max_tokens=answer)
                )
                scheduler.add(own[-1])
        step(scheduler)
        for tenant, own in live.items():
            for each in [each for each in own if each.num_output == each.request.stopping.max_tokens]:
                scheduler.remove(each)
                own.remove(each)
                served[tenant] += each.num_prompt / 32 + each.num_output / 4
    return served


def test_it_is_tokens_that_are_shared() -> None:
    scheduler = make(max_running=1)
    arrive(scheduler, "a", *range(2), max_tokens=100)
    arrive(scheduler, "b", *range(12), max_tokens=9)
    waiting = names(scheduler.waiting)
    assert waiting[0] == "a0"
    assert waiting.index("a1") - waiting.index("b0") == 11  # 11 times 9 + 4 tokens, about
    assert [each for each in waiting if each[0] == "b"] == [f"b{number}" for number in range(12)]


@pytest.mark.parametrize("tenant", ["", "a"])
def test_one_alone_is_served_in_order(tenant: str) -> None:
    scheduler = make(max_running=1)
    arrive(scheduler, tenant, *range(9))
    assert names(scheduler.waiting) == [f"{tenant or '-'}{number}" for number in range(9)]


def test_what_is_nobodys_arrives_when_it_does() -> None:
    scheduler = make(max_running=1)
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "", *range(3))
    assert names(scheduler.waiting) == ["a0", "-0", "-1", "-2", "a1"]


def test_priorities_count_among_a_tenants_own() -> None:
    scheduler = make(max_running=1)
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "a", 2, priority=7)
    assert names(scheduler.waiting) == ["a2", "a0", "a1"]


def test_what_was_not_taken_is_given_back() -> None:
    """Each asks for a hundred tokens and ends after two."""
    scheduler = make(max_running=1)
    for number in range(8):
        (each,) = arrive(scheduler, "a", number)
        for _ in range(2):
            step(scheduler)
        scheduler.remove(each)
        scheduler.remove(each)  # whoever says it twice gets nothing twice
    arrive(scheduler, "a", 8)
    arrive(scheduler, "b", 0)
    assert names(scheduler.waiting) == ["a8", "b0"]


@pytest.mark.parametrize("forked", [False, True])
def test_choices_are_charged_and_given_back_together(forked: bool) -> None:
    scheduler = make(max_running=4)
    (leader,) = arrive(scheduler, "a", 0, n=4)
    arrive(scheduler, "b", *range(4))
    arrive(scheduler, "a", 1)
    assert names(scheduler.waiting) == ["a0", "b0", "b1", "b2", "b3", "a1"]
    family = [leader]
    if forked:
        schedule = scheduler.schedule()
        for entry in schedule.entries:
            scheduler.complete(entry)
            if entry.sequence is not leader:
                entry.sequence.tokens.append(7)
        family += scheduler.fork(leader, range(1, 4))
    for each in family:
        scheduler.remove(each)
    scheduler.remove(next(each for each in (*scheduler.waiting, *scheduler.running) if each.request.request_id == "a1"))
    arrive(scheduler, "a", 2)
    arrive(scheduler, "c", 0)
    assert [name for name in names(scheduler.waiting) if name[0] in "ac"] == ["a2", "c0"]


def test_what_one_did_while_it_was_alone_is_not_held_against_it() -> None:
    """It has kept the worker as busy as can be, with prompts and answers."""
    scheduler = make(num_blocks=64, max_running=4, token_budget=8)
    live: list[Sequence] = []
    for number in range(200):
        live += arrive(scheduler, "a", number, max_tokens=6)
        step(scheduler)
        for each in [each for each in live if each.num_output >= 6]:
            scheduler.remove(each)
            live.remove(each)
    for each in live:
        scheduler.remove(each)
    arrive(scheduler, "a", 200)
    arrive(scheduler, "b", 0)
    assert names(scheduler.waiting) == ["a200", "b0"]


def test_of_many_those_are_forgotten_that_have_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "KNOWN", 2)
    scheduler = make(max_running=2)
    arrive(scheduler, "z", 0)
    for number, tenant in enumerate("abcd"):
        (each,) = arrive(scheduler, tenant, number)
        step(scheduler)
        scheduler.remove(each)
    arrive(scheduler, "e", *range(3))
    assert set(scheduler._shares._accounts) == {"z", "e"}


def test_a_tenants_answers_are_taken_to_be_as_long_as_its_last() -> None:
    """All may have a hundred tokens; those of one have ten, and of the other thirty."""
    scheduler = make(num_blocks=400, max_running=2)
    arrive(scheduler, "z", 0)  # so that there is no idle moment
    for number in range(24):
        for tenant, tokens in (("a", 10), ("b", 30)):
            (each,) = arrive(scheduler, tenant, number)
            while each.num_output < tokens:
                step(scheduler)
            scheduler.remove(each)
    answers = {tenant: account.answer for tenant, account in scheduler._shares._accounts.items()}
    assert (round(answers["a"], -1), round(answers["b"], -1)) == (20, 40)


def test_a_priority_moves_nobody_else_back() -> None:
    """Its sequence comes in long before it would; who comes then begins where the others are."""
    scheduler = make(max_running=1)
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "a", 2, priority=7)
    step(scheduler)
    assert names(scheduler.running) == ["a2"]
    arrive(scheduler, "b", 0)
    assert names(scheduler.waiting) == ["a0", "b0", "a1"]
