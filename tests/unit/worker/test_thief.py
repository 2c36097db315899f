"""What a free worker finds out before it asks for a job, and what it asks for then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.block_hash import chain, root
from kvstore.client import Broker, BrokerConfig
from kvstore.help import Call
from kvstore.keys import GROUP
from kvstore.prefix_index import short
from kvstore.registry import WorkerInfo
from octavo.v1 import job_pb2
from worker.intake import Intake
from worker.journal import Journal
from worker.rates import UNMEASURED, Rates
from worker.stealing import Stealing

if TYPE_CHECKING:
    from collections.abc import Sequence

CALL = Call("w0", 5.0, 0.5)
PROMPT = range(100, 140)
HASHES = [short(each) for each in chain(root("f", 4), PROMPT, 4)]


class Server(Broker):
    """Answers the scripts of a theft, without a server behind it."""

    def __init__(self, *moves: int) -> None:
        super().__init__(BrokerConfig("redis://unused"))
        self.moves = [*moves]
        self.waiting: dict[str, Sequence[int]] = {}
        """Prompts, by entry."""
        self.peeked: list[list[str]] = []
        """Of each look, which entries were known."""
        self.held: list[dict[str, int]] = []
        """Of each theft, what it was told."""

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        if name == "peek":
            assert args[:3] == [self.keys.prefix, "w0", GROUP]
            known = [*args[6:]]
            self.peeked.append(known)
            jobs = {entry: job_pb2.Job(prompt_token_ids=prompt) for entry, prompt in self.waiting.items()}
            return [[entry.encode(), job.SerializeToString()] for entry, job in jobs.items() if entry not in known]
        assert name == "steal"
        self.held.append(dict(zip(args[9::2], args[10::2], strict=True)))
        return self.moves.pop(0)


def thief(server: Server, offered: set[bytes], *, free: bool = True) -> Stealing:
    info = WorkerInfo(id="w1", incarnation="i", model="m", fingerprint="f", block_size=4)
    rates = Rates(UNMEASURED)
    intake = Intake(server, "w1", "i", Journal("w1"), rates, 4)
    return Stealing(server, info, intake, rates, lambda: free, lambda: None, offered)


async def test_each_job_is_looked_at_once_until_one_is_taken() -> None:
    server, offered = Server(0, 0, 1, 0), {*HASHES[:5]}
    stealing = thief(server, offered)
    server.waiting = {"1-0": PROMPT, "2-0": range(50), "3-0": PROMPT[:9]}
    assert not await stealing._take(CALL)
    server.waiting["4-0"] = PROMPT[:8]
    assert not await stealing._take(CALL)
    assert await stealing._take(CALL)
    offered |= {*HASHES}  # its prompt
    del server.waiting["3-0"]
    assert not await stealing._take(CALL)
    assert server.peeked == [[], ["1-0", "2-0", "3-0"], ["1-0", "2-0", "3-0", "4-0"], []]
    first = {"1-0": 20, "3-0": 8}
    assert server.held == [first, first | {"4-0": 8}, first | {"4-0": 8}, {"1-0": 40, "4-0": 8}]


async def test_who_holds_nothing_looks_at_nothing() -> None:
    server = Server(1)
    server.waiting = {"1-0": PROMPT}
    assert await thief(server, set())._take(CALL)
    assert (server.peeked, server.held) == ([], [{}])


async def test_who_is_not_free_any_more_after_the_look_asks_for_nothing() -> None:
    server = Server()
    server.waiting = {"1-0": PROMPT}
    assert not await thief(server, {*HASHES}, free=False)._take(CALL)
    assert (len(server.peeked), server.held) == (1, [])


class Threads(set[bytes]):
    """Notes who asks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: set[threading.Thread] = set()

    def __contains__(self, each: object) -> bool:
        self.seen.add(threading.current_thread())
        return super().__contains__(each)


@pytest.mark.parametrize(("length", "aside"), [(4096, False), (4100, True)])
async def test_long_prompts_are_hashed_beside_the_loop(length: int, aside: bool) -> None:
    server = Server(0)
    server.waiting = {"1-0": range(length)}
    offered = Threads(short(each) for each in chain(root("f", 4), range(length), 4))
    assert not await thief(server, offered)._take(CALL)
    assert server.held == [{"1-0": length}]
    assert (threading.main_thread() not in offered.seen) == aside
