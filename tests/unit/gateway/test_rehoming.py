"""Which worker goes on with a job whose own is gone."""

from __future__ import annotations

import pytest

from gateway.breaker import FAILURES
from gateway.rehoming import heirs
from kvstore.errors import BrokerError, BrokerUnreachable
from kvstore.orphans import Rehomed, Target
from kvstore.registry import Load, WorkerInfo

from .orphaned_world import World, orphan, worker


async def test_a_quiet_fleet_costs_one_look() -> None:
    world = World(worker("w0"))
    assert await world.run() == {}
    assert (world.looks, world.moves) == (0, [])


@pytest.mark.parametrize(
    ("said", "ended", "prefill"),
    [
        ((0,), (), 8),
        ((7,), (), 15),
        ((3, 0, 4), (), 15),
        ((3, 9, 4), (1,), 15),
    ],
)
async def test_what_was_said_is_charged_as_to_be_computed(
    said: tuple[int, ...], ended: tuple[int, ...], prefill: int
) -> None:
    """40 tokens of prompt, of which the worker has two blocks, and those of the choices that go on."""
    world = World(worker("w0"))
    world.held = {"w0": 2}
    assert await world.run(orphan(said=said, ended=frozenset(ended))) == {Rehomed.MOVED: 1}
    assert world.moves == [("r", Target("w0", "w0-1", prefill, 32))]


@pytest.mark.parametrize(("said", "predicted"), [(0, 0), (1, 32)])
async def test_a_prompt_whose_own_logprobs_are_still_wanted_is_computed_as_a_whole(said: int, predicted: int) -> None:
    world = World(worker("w0"))
    world.held, world.scored = {"w0": 2}, True
    await world.run(orphan(said=[said]))
    assert world.moves == [("r", Target("w0", "w0-1", 40 + said - predicted, predicted))]


async def test_jobs_go_by_cost_and_count_for_each_other() -> None:
    """w0 is idle and w1 nearly so: eight equal prompts are not all for one of them, but what they share is."""
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(1, 90, 0, 1)}
    orphans = [orphan(f"r{number}", prompt=10) for number in range(8)]
    assert await world.run(*orphans) == {Rehomed.MOVED: 8}
    assert world.targets()["r0"] == "w0"
    assert world.promised == [0] * 8  # of less than a block nothing is promised
    world.moves.clear()
    await world.run(*(orphan(f"r{number}", prompt=4000) for number in range(2)))
    assert world.targets() == {"r0": "w0", "r1": "w0"}
    assert world.promised[-2:] == [1, 2]


async def test_suspects_of_one_death_go_at_once_where_none_must_be_alone() -> None:
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(5, 9000, 9000, 5)}
    world.suspects = {"w0"}
    assert await world.run(*(orphan(f"s{number}", deaths=1) for number in range(3))) == {Rehomed.MOVED: 3}
    assert [(request_id, target and target.worker) for request_id, target in world.moves] == [
        ("s0", "w0"),
        *((f"s{number}", "w1") for number in range(3)),
    ]


async def test_suspects_of_two_deaths_come_last_and_one_at_a_worker() -> None:
    world = World(worker("w0"), worker("w1"), worker("w2"))
    world.loads = {"w1": Load(5, 9000, 9000, 5), "w2": Load(9, 90000, 90000, 9)}
    suspects = [orphan(f"s{number}", deaths=2) for number in range(4)]
    assert await world.run(*suspects, orphan("r0")) == {Rehomed.MOVED: 4, Rehomed.WAITING: 1}
    # What the last one finds everywhere costs it no look at the index: it says only that it could run somewhere.
    assert world.moves == [
        ("r0", Target("w0", "w0-1", 40, 0)),
        ("s0", Target("w0", "w0-1", 8, 32)),
        *((f"s{number}", Target(f"w{number}", f"w{number}-1", 40, 0)) for number in (1, 2)),
        ("s3", Target("w0", "w0-1", 40, 0)),
    ]


async def test_a_suspect_goes_where_no_other_one_is_whoever_moved_that() -> None:
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(5, 9000, 9000, 5)}
    world.suspects = {"w0"}
    assert await world.run(orphan("a", deaths=2), orphan("r0")) == {Rehomed.MOVED: 2}
    assert [(request_id, target and target.worker) for request_id, target in world.moves] == [
        ("r0", "w0"),
        ("a", "w0"),
        ("a", "w1"),
    ]


async def test_suspects_wait_for_the_only_worker_and_take_turns() -> None:
    world = World(worker("w0"))
    suspects = [orphan("a", deaths=2), orphan("b", deaths=2, said=[3, 4], ended=frozenset({0}))]
    assert await world.run(*suspects) == {Rehomed.MOVED: 1, Rehomed.WAITING: 1}
    assert world.moves == [("a", Target("w0", "w0-1", 40, 0)), ("b", Target("w0", "w0-1", 44, 0))]
    world.suspects.clear()
    assert await world.run(suspects[1]) == {Rehomed.MOVED: 1}


async def test_what_no_worker_is_to_run_again_is_given_up() -> None:
    world = World(worker("w0"))
    assert await world.run(orphan("a", deaths=3, fruitless=3), orphan("b", fruitless=10), orphan("c", deaths=2)) == {
        Rehomed.DEAD: 2,
        Rehomed.MOVED: 1,
    }
    assert world.moves[0] == ("b", None)
    assert world.moves[-1] == ("a", None)


@pytest.mark.parametrize(
    "other",
    [
        worker("w0", model="another"),
        worker("w0", state="draining"),
        worker("w0", context_length=89),
        worker("dead"),
    ],
)
async def test_without_a_worker_that_could_run_it_a_job_waits(other: WorkerInfo) -> None:
    """An other model's, one that drains, one whose context is too short, and the very life that has lost it."""
    world = World(other)
    assert await world.run(orphan()) == {Rehomed.WAITING: 1}
    assert (world.moves, world.read) == ([("r", None)], [])


async def test_what_a_draining_worker_runs_is_for_its_own_kind() -> None:
    """It may end it itself, so that nobody has to go on with other bits."""
    world = World(worker("strange", fingerprint="g"))
    await world.run(orphan(why="is draining"))
    assert world.moves == [("r", None)]
    world = World(worker("strange", fingerprint="g"), worker("kin"))
    await world.run(orphan(why="is draining"))
    assert world.targets() == {"r": "kin"}


async def test_a_worker_that_came_back_under_its_name_takes_its_own_jobs() -> None:
    back = WorkerInfo(id="dead", incarnation="dead-2", model="m", fingerprint="f", context_length=90)
    world = World(back)
    await world.run(orphan())
    assert world.moves == [("r", Target("dead", "dead-2", 40, 0))]


def test_the_same_bits_first_then_the_tokenizer_that_most_have() -> None:
    kin, others = worker("w0"), [worker("w1", fingerprint="g"), worker("w2", fingerprint="h")]
    strange = worker("w3", fingerprint="i", tokenizer="u")
    assert heirs(orphan(), [*others, kin, strange]) == [kin]
    assert heirs(orphan(), [strange, *others]) == others
    assert list(heirs(orphan(), [])) == []


async def test_a_worker_whose_jobs_fail_gets_none_of_them() -> None:
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(0, 0, 9000, 0)}
    for _ in range(FAILURES):
        world.placing.breaker.failed("w0-1")
    await world.run(orphan())
    assert world.targets() == {"r": "w1"}


async def test_what_somebody_else_has_moved_leaves_nothing_behind() -> None:
    world = World(worker("w0"))
    world.answer = Rehomed.STALE
    assert await world.run(orphan("a"), orphan("b", deaths=2)) == {Rehomed.STALE: 2}
    world.gone, world.moves = {"a"}, []
    assert await world.run(orphan("a")) == {Rehomed.STALE: 1}
    assert world.moves == []


async def test_a_broker_that_fails_ends_the_round_and_what_was_done_is_known() -> None:
    world = World(worker("w0"))
    world.broken = {"b": BrokerUnreachable("lost")}
    with pytest.raises(BrokerUnreachable):
        await world.run(orphan("a"), orphan("b"), orphan("c"))
    assert [request_id for request_id, _ in world.moves] == ["a", "b"]
    assert world.done == {Rehomed.MOVED: 1}


async def test_one_that_can_not_be_moved_holds_up_no_other_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(worker("w0"))
    world.broken = {"a": BrokerError("a key of another type")}
    for _ in range(2):
        assert await world.run(orphan("a"), orphan("b")) == {Rehomed.MOVED: 1}
    assert await world.run(orphan("b")) == {Rehomed.MOVED: 1}
    assert caplog.messages == ["job a of worker dead can't be moved"]
    assert await world.run(orphan("a")) == {}
    assert len(caplog.messages) == 2


async def test_a_worker_whose_stream_is_none_keeps_nobody_from_the_others() -> None:
    """It reads nothing, so it seems to be idle, and the best place for each of them."""
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(jobs=5, sequences=5, tokens=5000, prefill=5000)}
    world.streamless = {"w0"}
    assert await world.run(orphan("a"), orphan("b", deaths=2)) == {Rehomed.MOVED: 2}
    assert [target.worker for _, target in world.moves if target] == ["w0", "w1"] * 2
    world.streamless = {"w0", "w1"}
    assert await world.run(orphan("a")) == {Rehomed.WAITING: 1}


async def test_a_round_without_orphans_costs_no_look_at_the_fleet() -> None:
    """Whatever is known of it: there are four rounds a second."""
    world = World(worker("w0"))
    for _ in range(FAILURES):
        world.placing.breaker.failed("w0-1")
    assert await world.run() == {}
    assert world.looks == 0


async def test_a_round_that_takes_long_leaves_the_rest_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.rehoming.ROUND_S", -1.0)
    world = World(worker("w0"))
    assert await world.run(orphan("a")) == {}
