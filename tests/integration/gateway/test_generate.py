"""The main path: requests in, jobs in the broker, output back in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from gateway.config import MAX_MESSAGE_BYTES
from octavo.v1 import fleet_pb2, inference_pb2
from octavo.v1.inference_pb2 import Chat, ChatMessage, Route, Usage
from tests.integration.gateway.harness import Client, collect, failure, request, tokens
from tests.integration.gateway.scripted import CONTEXT, ScriptedWorker, chunk, train_tokenizer

if TYPE_CHECKING:
    from typing import Any

Code = grpc.StatusCode


async def test_an_answer_comes_in_order_with_route_first_and_usage_last(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    assert list(claim.job.prompt_token_ids) == [5, 6, 7]
    assert claim.remaining_ms is None
    await worker.commit(chunk(claim, 0, [10]))
    first = await call.read()
    await worker.commit(chunk(claim, 1, [11, 12]))
    second = await call.read()
    await worker.commit(chunk(claim, 3, [13], finish=inference_pb2.STOP))
    third = await call.read()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK
    assert [response.request_id for response in (first, second, third)] == ["r1"] * 3
    assert [list(response.chunks[0].token_ids) for response in (first, second, third)] == [[10], [11, 12], [13]]
    assert first.route == Route(worker="w0", cached_tokens=1, queue_ms=claim.queued_ms, prefill_ms=7)
    assert not second.HasField("route")
    assert [response.HasField("usage") for response in (first, second, third)] == [False, False, True]
    assert third.usage == Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=4, attempts=1)


async def test_a_request_without_an_id_gets_one_before_any_output(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request())
    (claim,) = await worker.claim()
    metadata = dict(await call.initial_metadata())
    assert metadata["octavo-request-id"] == claim.job.request_id
    assert len(claim.job.request_id) == 32
    await worker.answer(claim)
    assert tokens(await collect(call)) == [2, 3, 4]


async def test_a_job_is_fully_resolved(worker: ScriptedWorker, client: Client) -> None:
    """Two requests that set nothing: everything is filled in, and each draws a seed of its own."""
    calls = [client.generate(inference_pb2.GenerateRequest(text="a book")) for _ in range(2)]
    claims = await worker.claim(2)
    prompt = train_tokenizer().encode("a book").ids
    for claim in claims:
        assert list(claim.job.prompt_token_ids) == prompt
        assert claim.job.stopping.max_tokens == CONTEXT - len(prompt)
        assert (claim.job.sampling.temperature, claim.job.sampling.top_p) == (1.0, 1.0)
        await worker.answer(claim)
    assert claims[0].job.sampling.seed != claims[1].job.sampling.seed
    for call in calls:
        await collect(call)


async def test_chat_goes_through_the_template(worker: ScriptedWorker, client: Client) -> None:
    messages = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="a book?")]
    call = client.generate(request(chat=Chat(messages=messages)))
    (claim,) = await worker.claim()
    text = "<|start|>system\nbe brief<|end|>\n<|start|>user\na book?<|end|>\n<|start|>assistant\n"
    assert list(claim.job.prompt_token_ids) == train_tokenizer().encode(text).ids
    await worker.answer(claim)
    await collect(call)


async def test_what_the_template_refuses_is_the_clients_fault(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request(chat=Chat(messages=[ChatMessage(role="tool", content="x")])))
    message = "chat.messages is 1 messages: refused by the model's template: tools are not spoken here"
    assert await failure(call) == (Code.INVALID_ARGUMENT, message)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(max_tokens=0), "stopping.max_tokens is 0: must be at least 1"),
        (request(prompt=[5, 300]), "token_ids.ids[1] is 300: must be below the vocabulary's size, 300"),
        (
            request(prompt=[5] * CONTEXT, max_tokens=1),
            "prompt is 4096 tokens: must be at most 4095, as the context of 4096 holds prompt and answer; shorten it",
        ),
        (
            request(text="x" * 100_000),
            "text is 100000 bytes: must be at most 36864, as the context of 4096 tokens holds at most 9 bytes in each; "
            "shorten it",
        ),
        (request("a b"), "request_id is 'a b': must be 1 to 128 characters of [A-Za-z0-9._:-]"),
    ],
)
async def test_bad_input_is_refused_and_the_next_call_works(
    worker: ScriptedWorker, client: Client, bad: Any, message: str
) -> None:
    assert await failure(client.generate(bad)) == (Code.INVALID_ARGUMENT, message)
    assert [queue.undelivered for queue in await worker.jobs.queues()] == [0]
    call = client.generate(request(prompt=[5] * (CONTEXT - 1), max_tokens=1))
    (claim,) = await worker.claim()
    await worker.answer(claim, tokens=1)
    assert tokens(await collect(call)) == [2]


async def test_bytes_that_are_no_request_are_the_clients_fault(worker: ScriptedWorker, client: Client) -> None:
    raw = client.channel.unary_stream("/octavo.v1.Inference/Generate")
    for garbage in (b"\xff\xff\xff", b"\x0a\x02\xc3\x28", b"\x0a\x7fcut off"):
        code, message = await failure(raw(garbage))
        assert (code, message) == (
            Code.INVALID_ARGUMENT,
            f"request is {len(garbage)} bytes: must be a octavo.v1.GenerateRequest",
        )


async def test_a_message_over_the_limit_is_refused_with_a_clean_status(worker: ScriptedWorker, client: Client) -> None:
    """In words of ours, that say size and limit; from twice the limit on gRPC does not let it in."""
    long = request(text="x" * 5 * 1024 * 1024)
    told = f"request is {long.ByteSize()} bytes: must be at most 4194304 (4 MiB); send a shorter prompt"
    assert await failure(client.generate(long)) == (Code.INVALID_ARGUMENT, told)
    code, message = await failure(client.generate(request(text="x" * MAX_MESSAGE_BYTES)))
    assert code is Code.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in message
    call = client.generate(request())
    (claim,) = await worker.claim()
    await worker.answer(claim)
    assert tokens(await collect(call)) == [2, 3, 4]


async def test_models_are_found_by_name(worker: ScriptedWorker, client: Client) -> None:
    model = await client.get_model(inference_pb2.GetModelRequest())
    assert (model.name, model.context_length, model.vocab_size, model.workers) == ("tiny", CONTEXT, 300, 1)
    assert (model.fingerprint, model.block_size, model.dtype) == ("f" * 16, 16, "float32")
    unknown = (Code.NOT_FOUND, "model 'big' is not served; served: 'tiny'")
    assert await failure(client.generate(request(model="big"))) == unknown
    assert await failure(client.get_model(inference_pb2.GetModelRequest(name="big"))) == unknown


async def test_operators_see_workers_and_queues(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request())
    await call.initial_metadata()
    workers = (await client.list_workers(fleet_pb2.ListWorkersRequest())).workers
    assert [(each.id, each.model, each.state, each.context_length) for each in workers] == [
        ("w0", "tiny", "ready", CONTEXT)
    ]
    (queue,) = (await client.get_queues(fleet_pb2.GetQueuesRequest())).queues
    assert (queue.worker, queue.undelivered, queue.pending) == ("w0", 1, 0)
    assert queue.stream == worker.broker.keys.jobs("w0")
    (claim,) = await worker.claim()
    (queue,) = (await client.get_queues(fleet_pb2.GetQueuesRequest())).queues
    assert (queue.undelivered, queue.pending) == (0, 1)
    await worker.answer(claim)
    await collect(call)
    (queue,) = (await client.get_queues(fleet_pb2.GetQueuesRequest())).queues
    assert (queue.undelivered, queue.pending, queue.oldest_age_ms) == (0, 0, 0)


async def test_32_streams_at_once_each_get_their_own(worker: ScriptedWorker, client: Client) -> None:
    calls = [client.generate(request(f"r{index}", prompt=[index + 2])) for index in range(32)]
    collecting = [asyncio.create_task(collect(call)) for call in calls]
    claims = await worker.claim(32)
    for step in range(20):
        finish = inference_pb2.LENGTH if step == 19 else 0
        await worker.commit(
            *(chunk(claim, step, [(claim.job.prompt_token_ids[0] * 7 + step) % 300], finish=finish) for claim in claims)
        )
    for index, responses in enumerate(await asyncio.gather(*collecting)):
        assert tokens(responses) == [((index + 2) * 7 + step) % 300 for step in range(20)]
        assert responses[-1].chunks[-1].finish == inference_pb2.LENGTH
