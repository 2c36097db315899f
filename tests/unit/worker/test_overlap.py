"""How much of a waiting prompt this worker would find in its cache, before it takes the job."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import chain, root
from kvstore.prefix_index import short
from kvstore.stealing import Waiting
from octavo.v1 import job_pb2
from tests.unit.worker.engine_run import engine_over, request, step
from tests.unit.worker.paged_model import VOCAB, PagedModel
from worker.held import Held
from worker.overlap import KNOWN_S, Overlaps, held_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worker.step import Output

PROMPT = range(100, 140)
EMPTY = root("f", 4)
HASHES = [short(each) for each in chain(EMPTY, PROMPT, 4)]


def waiting(entry: str, prompt: Sequence[int], *, salt: str = "", prompt_logprobs: int | None = None) -> Waiting:
    job = job_pb2.Job(request_id=entry, prompt_token_ids=prompt, cache_salt=salt, prompt_logprobs=prompt_logprobs)
    return Waiting(entry, job)


class Counting(set[bytes]):
    """Counts what it is asked for."""

    asked = 0

    def __contains__(self, each: object) -> bool:
        self.asked += 1
        return super().__contains__(each)


@pytest.mark.parametrize("blocks", range(11))
def test_whole_blocks_from_the_beginning_on(blocks: int) -> None:
    assert held_tokens(PROMPT, EMPTY, 4, {*HASHES[:blocks]}) == 4 * blocks


@pytest.mark.parametrize(("length", "held"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_a_partly_filled_block_is_none(length: int, held: int) -> None:
    assert held_tokens(PROMPT[:length], EMPTY, 4, {*HASHES}) == held


def test_nothing_is_hashed_behind_the_first_hole() -> None:
    offered = Counting({*HASHES[:3], *HASHES[4:]})
    assert held_tokens(PROMPT, EMPTY, 4, offered) == 12
    assert offered.asked == 4


def test_other_beginnings_are_other_prompts() -> None:
    assert held_tokens([99, *PROMPT[1:]], EMPTY, 4, {*HASHES}) == 0
    assert held_tokens([*PROMPT[:4], 99, *PROMPT[5:]], EMPTY, 4, {*HASHES}) == 4


def test_by_salt_and_not_where_the_whole_prompt_is_scored() -> None:
    salted = [short(each) for each in chain(root("f", 4, "tenant"), PROMPT, 4)]
    overlaps = Overlaps("f", 4, {*HASHES[:2], *salted[:5]})
    jobs = [
        waiting("1-0", PROMPT),
        waiting("2-0", PROMPT, salt="tenant"),
        waiting("3-0", PROMPT, salt="other"),
        waiting("4-0", PROMPT, prompt_logprobs=0),
        waiting("5-0", PROMPT[:5]),
    ]
    assert overlaps.look(jobs) == {"1-0": 8, "2-0": 20, "3-0": 0, "4-0": 0, "5-0": 4}
    assert Overlaps("g", 4, {*HASHES}).look(jobs[:1]) == {"1-0": 0}


def test_by_tenant() -> None:
    theirs = [short(each) for each in chain(root("f", 4, tenant="acme"), PROMPT, 4)]
    overlaps = Overlaps("f", 4, {*HASHES[:2], *theirs[:3]})
    jobs = [waiting(f"{number}-0", PROMPT) for number in range(3)]
    jobs[1].job.request_id, jobs[2].job.request_id = "acme/r", "other/r"
    assert overlaps.look(jobs) == {"0-0": 8, "1-0": 12, "2-0": 0}


def test_what_was_found_is_known_for_a_while_and_by_victim() -> None:
    """Two streams may have an entry of one name."""
    overlaps = Overlaps("f", 4, {*HASHES})
    overlaps.note("w0", {"1-0": 8, "2-0": 0}, 10.0)
    overlaps.note("w1", {"1-0": 4}, 10.5)
    assert overlaps.known("w0", 10.0 + KNOWN_S) == {"1-0": 8, "2-0": 0}
    assert overlaps.known("w1", 10.0 + KNOWN_S) == {"1-0": 4}
    assert overlaps.known("w0", 10.25 + KNOWN_S) == {}
    assert overlaps.known("w1", 10.25 + KNOWN_S) == {"1-0": 4}
    overlaps.note("w1", {"2-0": 12}, 10.5)
    overlaps.forget()
    assert overlaps.known("w1", 10.5) == {}


def test_who_offers_nothing_has_nothing_to_look_for() -> None:
    held: set[bytes] = set()
    overlaps = Overlaps("f", 4, held)
    assert not overlaps
    held.add(HASHES[0])
    assert overlaps


def prompts(dice: random.Random) -> Iterator[list[int]]:
    """Some that begin like earlier ones, of all lengths, among them whole blocks and exact repeats."""
    seen: list[list[int]] = []
    for _ in range(60):
        begin = dice.choice(seen)[: dice.randrange(33)] if seen and dice.random() < 0.8 else []
        more = [dice.randrange(4, VOCAB) for _ in range(dice.choice([0, 1, 3, 4, 8, 11]))]
        prompt = begin + more or [4]
        seen.append(prompt)
        yield prompt


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1, 4])
def test_the_engine_finds_just_what_was_said(size: int, seed: int) -> None:
    """Whatever is cached, evicted meanwhile and salted: as `steal` cuts it, for the last token is always computed."""
    engine, held, dice = engine_over(PagedModel(120 // size, size)), Held(), random.Random(seed)
    overlaps = Overlaps("paged model", size, held.offered)
    found: list[int] = []
    for number, prompt in enumerate(prompts(dice)):
        salt, scored = dice.choice(["", "", "tenant"]), dice.choice([None, None, None, 0])
        said = overlaps.look([waiting("1-0", prompt, salt=salt, prompt_logprobs=scored)])["1-0"]
        engine.add(request(f"r{number}", prompt, max_tokens=3, salt=salt, prompt_logprobs=scored))
        outputs: list[Output] = []
        while engine.has_work:
            result = step(engine)
            held.apply(result.events)
            outputs += result.outputs
        found.append(outputs[0].cached_tokens)
        assert found[-1] == min(said, len(prompt) - 1)
    assert len({*found}) >= 4
    assert engine.stats().evictions
