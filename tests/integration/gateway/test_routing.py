"""Where jobs go, and what is told of it: workers that publish what they hold, on a real broker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from gateway.prefixes import Index
from kvstore.block_hash import chain, root
from kvstore.page_dir import DirPages
from kvstore.page_store import PageLimits, PageRef, StoredPage
from kvstore.prefix_index import HeldChange, PrefixIndex, short
from kvstore.registry import Load
from octavo.v1 import fleet_pb2, inference_pb2
from tests.integration.gateway.harness import answers, collect, fleet, request, running_gateway
from tests.integration.gateway.scripted import ScriptedWorker, chunk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gateway.server import Gateway
    from kvstore.client import Broker
    from kvstore.jobs import Claim
    from octavo.v1 import job_pb2

PROMPT = [*range(2, 52)]
"""50 tokens: three full blocks."""


async def offer(worker: ScriptedWorker, prompt: Sequence[int], salt: str = "") -> None:
    """The worker's pool holds the full blocks of this prompt from now on."""
    size = worker.info.block_size
    hashes = chain(root(worker.info.fingerprint, size, salt), prompt, size)
    held = HeldChange(added=tuple(short(each) for each in hashes))
    await worker.jobs.commit(worker.info.id, worker.info.incarnation, [], held)


def first(claim: Claim, worker: ScriptedWorker, cached: int) -> job_pb2.Delivery:
    """The job's first delivery, which says what was found in the cache."""
    delivery = chunk(claim, 0, [2])
    delivery.route.cached_tokens, delivery.route.worker = cached, worker.info.id
    return delivery


def shown(gateway: Gateway, name: str, **labels: str) -> float | None:
    return gateway.metrics.registry.get_sample_value(name, labels)


async def loads(worker: ScriptedWorker) -> Load:
    return (await worker.registry.loads([worker.info]))[worker.info.id]


async def explained(client: Any, request_id: str) -> fleet_pb2.ExplainResponse:
    found: fleet_pb2.ExplainResponse = await client.explain(fleet_pb2.ExplainRequest(request_id=request_id))
    return found


async def test_a_job_goes_to_the_holder_of_its_prefix_and_all_is_told(broker: Broker) -> None:
    other, holder = ScriptedWorker(broker, "w0"), ScriptedWorker(broker, "w1", prefill_tok_s=100.0)
    for worker in (other, holder):
        await worker.start()
    await offer(holder, PROMPT)
    async with running_gateway(broker) as (gateway, _, client):
        call = client.generate(request("r1", prompt=PROMPT))
        await call.initial_metadata()
        assert await loads(holder) == Load(jobs=1, tokens=66, prefill=2, sequences=1)
        before = await explained(client, "r1")
        assert (before.worker, before.state, before.started, before.cached_tokens) == ("w1", "queued", False, 0)
        (claim,) = await holder.claim()
        await holder.commit(first(claim, holder, 48))
        assert await loads(holder) == Load(jobs=1, tokens=66, prefill=0, sequences=1)
        await holder.commit(chunk(claim, 1, [3], finish=inference_pb2.STOP))
        responses = await collect(call)
        route = responses[0].route
        assert (route.worker, route.predicted_cached_tokens, route.cached_tokens) == ("w1", 48, 48)
        assert answers(responses, 1) == [[2, 3]]
        after = await explained(client, "r1")
        assert (after.state, after.started, after.attempt) == ("ended", True, 1)
        assert (after.prompt_tokens, after.cached_tokens) == (50, 48)
        assert (after.route.policy, after.route.index, after.route.prompt_tokens) == ("prefix", "exact", 50)
        assert [(each.worker, each.held_tokens, each.verdict) for each in after.route.candidates] == [
            ("w0", 0, "costlier"),
            ("w1", 48, "chosen"),
        ]
        assert [each.prefill_s for each in after.route.candidates] == [0.5, 0.02]
        assert shown(gateway, "octavo_predictions_total", outcome="equal") == 1
        assert shown(gateway, "octavo_predicted_cached_tokens_total") == 48
        assert shown(gateway, "octavo_cached_tokens_total") == 48
        assert shown(gateway, "octavo_prefix_index", state="exact") == 1
        assert shown(gateway, "octavo_prefix_index", state="fallback") == 0
    for worker in (other, holder):
        await worker.stop()


@pytest.mark.parametrize(("found", "outcome"), [(16, "less"), (49, "more")])
async def test_predictions_that_did_not_come_true_are_counted(broker: Broker, found: int, outcome: str) -> None:
    worker = ScriptedWorker(broker)
    await worker.start()
    await offer(worker, PROMPT)
    async with running_gateway(broker) as (gateway, _, client):
        call = client.generate(request(prompt=PROMPT))
        (claim,) = await worker.claim()
        await worker.commit(first(claim, worker, found), chunk(claim, 1, [3], finish=inference_pb2.STOP))
        await collect(call)
        assert shown(gateway, "octavo_predictions_total", outcome=outcome) == 1
        assert shown(gateway, "octavo_predictions_total", outcome="equal") == 0
    await worker.stop()


async def test_a_burst_of_equal_prompts_goes_where_the_first_went(broker: Broker) -> None:
    """Nobody holds the prefix yet, but who got the first will."""
    workers = [ScriptedWorker(broker, f"w{index}", prefill_tok_s=1000.0, sequence_ms=0.01) for index in range(4)]
    async with fleet(broker, *workers) as client:
        prompts = [[*range(2, 290), 2 + index] for index in range(6)]
        calls = []
        for index, prompt in enumerate(prompts):
            calls.append(client.generate(request(f"r{index}", prompt=prompt)))
            # Accepted. While a submission is on its way its charge may count twice, and send the next one elsewhere.
            await calls[-1].initial_metadata()
        found = [await explained(client, f"r{index}") for index in range(6)]
        assert len({each.worker for each in found}) == 1
        held = [each.route.candidates[each.route.chosen].held_tokens for each in found]
        assert sorted(held) == [0, *[288] * 5]
        (worker,) = [each for each in workers if each.info.id == found[0].worker]
        worker.serve()
        for call in calls:
            assert answers(await collect(call), 1) == [[2, 3, 4]]
        # It has answered and published nothing, so that nobody holds the prefix: what was promised is forgotten.
        call = client.generate(request("late", prompt=prompts[0]))
        await call.initial_metadata()
        late = await explained(client, "late")
        assert [each.held_tokens for each in late.route.candidates] == [0, 0, 0, 0]
        call.cancel()


async def test_an_abandoned_job_promises_nothing(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    async with fleet(broker, worker) as client:
        call = client.generate(request("r1", prompt=PROMPT))
        await call.initial_metadata()
        call.cancel()
        async with asyncio.timeout(10):  # soon: the gateway is about to learn that its caller has left
            while await predicted(client, worker):
                pass


async def predicted(client: Any, worker: ScriptedWorker) -> int:
    """What a short-lived call with the prompt is told to find."""
    call = client.generate(request(prompt=PROMPT))
    (claim,) = await worker.claim()
    await worker.answer(claim)
    return int((await collect(call))[0].route.predicted_cached_tokens)


async def test_salts_keep_prefixes_apart_and_scored_prompts_are_computed(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    await worker.start()
    await offer(worker, PROMPT, salt="ours")
    async with running_gateway(broker) as (_, _, client):
        expected: list[tuple[dict[str, Any], int]] = [
            ({"cache_salt": "ours"}, 48),
            ({"cache_salt": "ours", "prompt": PROMPT[:48]}, 47),
            ({"cache_salt": "ours", "prompt": PROMPT[:47]}, 32),
            ({"cache_salt": "theirs"}, 0),
            ({"cache_salt": "ours", "prompt_logprobs": 0}, 0),
            ({}, 0),
        ]
        for fields, tokens in expected:
            call = client.generate(request(**{"prompt": PROMPT, **fields}))
            (claim,) = await worker.claim()
            await worker.answer(claim)
            assert (await collect(call))[0].route.predicted_cached_tokens == tokens, fields
    await worker.stop()


async def test_what_a_dead_incarnation_held_counts_for_nobody(broker: Broker) -> None:
    dead = ScriptedWorker(broker, "w0")
    await dead.start()
    await offer(dead, PROMPT)
    await dead.die()
    reborn = ScriptedWorker(broker, "w0")
    async with fleet(broker, reborn) as client:
        assert await predicted(client, reborn) == 0
        await offer(reborn, PROMPT)
        assert await predicted(client, reborn) == 48
    await dead.stop()


async def test_a_part_of_the_index_that_is_repaired_is_told(broker: Broker) -> None:
    workers = [ScriptedWorker(broker, "w0", index="exact"), ScriptedWorker(broker, "w1", index="degraded")]
    for worker in workers:
        await worker.start()
        worker.serve()
    async with running_gateway(broker) as (gateway, _, client):
        await collect(client.generate(request("r1")))
        assert (await explained(client, "r1")).route.index == "degraded"
        assert shown(gateway, "octavo_prefix_index", state="degraded") == 1
        listed = await client.list_workers(fleet_pb2.ListWorkersRequest())
        assert [each.index for each in listed.workers] == ["exact", "degraded"]
    for worker in workers:
        await worker.stop()


async def test_without_the_index_jobs_go_by_load(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer in time. The promise alone still counts."""

    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(PrefixIndex, "match", hangs)
    workers = [ScriptedWorker(broker, f"w{index}", prefill_tok_s=100.0) for index in range(2)]
    for worker in workers:
        await worker.start()
    await offer(workers[0], PROMPT)
    async with running_gateway(broker) as (gateway, _, client):
        calls = [client.generate(request(f"r{index}", prompt=[index + 2] * 50)) for index in range(4)]
        for call in calls:
            await call.initial_metadata()
        found = [await explained(client, f"r{index}") for index in range(4)]
        # On busy cores what is promised may count twice for a moment, beside what a heartbeat tells of it.
        assert {each.worker for each in found} == {"w0", "w1"}
        assert {each.route.index for each in found} == {Index.FALLBACK}
        assert shown(gateway, "octavo_prefix_index", state="fallback") == 1
        for worker in workers:
            worker.serve()
        for call in calls:
            assert answers(await collect(call), 1) == [[2, 3, 4]]
    for worker in workers:
        await worker.stop()


@pytest.mark.parametrize(
    ("policy", "went"), [("round-robin", ["w0", "w1", "w2", "w0"]), ("least-loaded", None), ("random", None)]
)
async def test_policies_are_chosen_at_the_start(broker: Broker, policy: str, went: list[str] | None) -> None:
    workers = [ScriptedWorker(broker, f"w{index}") for index in range(3)]
    async with fleet(broker, *workers, policy=policy) as client:
        for worker in workers:
            await offer(worker, PROMPT)
            worker.serve()
        for index in range(4):
            await collect(client.generate(request(f"r{index}", prompt=PROMPT)))
        found = [await explained(client, f"r{index}") for index in range(4)]
        assert {each.route.policy for each in found} == {policy}
        assert went is None or [each.worker for each in found] == went
        held = {each.held_tokens for each in found[0].route.candidates}
        assert held == {48}, "what is expected is told under every policy"


async def test_workers_with_blocks_of_other_sizes_are_asked_by_their_own_hashes(broker: Broker) -> None:
    workers = [ScriptedWorker(broker, f"w{index}", block_size=8 << index) for index in range(3)]
    async with fleet(broker, *workers) as client:
        for worker in workers:
            await offer(worker, PROMPT)
            worker.serve()
        await collect(client.generate(request("r1", prompt=PROMPT)))
        candidates = (await explained(client, "r1")).route.candidates
        assert [each.held_tokens for each in candidates] == [48, 48, 32]


async def test_pages_in_the_store_count_for_those_who_would_fetch_them(broker: Broker, tmp_path: Path) -> None:
    rates = {"prefill_tok_s": 100.0, "fetch_tok_s": 1000.0}
    fetcher, computer = ScriptedWorker(broker, "w0", **rates), ScriptedWorker(broker, "w1", prefill_tok_s=100.0)
    store = DirPages(tmp_path, PageLimits(budget=1 << 20, ttl_s=60))
    hashes = chain(root(fetcher.info.fingerprint, 16), PROMPT, 16)
    await store.put(fetcher.info.fingerprint, [StoredPage(PageRef(each, 0), b"page") for each in hashes])
    async with fleet(broker, fetcher, computer, pages=f"dir:{tmp_path}") as client:
        fetcher.serve()
        responses = await collect(client.generate(request("r1", prompt=PROMPT)))
        assert responses[0].route.predicted_cached_tokens == 48
        chosen, other = (await explained(client, "r1")).route.candidates
        assert (chosen.worker, chosen.held_tokens, chosen.stored_tokens, chosen.fetch_s) == ("w0", 0, 48, 0.048)
        assert (other.stored_tokens, other.prefill_s, other.verdict) == (0, 0.5, "costlier")
    await store.close()


async def test_an_attached_call_is_told_what_was_expected_and_counts_for_nothing(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    await worker.start()
    await offer(worker, PROMPT)
    worker.serve()
    async with running_gateway(broker) as (gateway, _, client):
        for _ in range(2):
            responses = await collect(client.generate(request("r1", prompt=PROMPT)))
            assert responses[0].route.predicted_cached_tokens == 48
        assert shown(gateway, "octavo_predicted_cached_tokens_total") == 48
    await worker.stop()
