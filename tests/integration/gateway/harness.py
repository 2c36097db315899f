"""A worker that does what the test says, on the real protocol, and a client for the real server."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc.aio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.config import GatewayConfig
from gateway.server import Gateway
from gateway.tasks import Tasks
from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.errors import BrokerError
from kvstore.jobs import Claim, Commit, Jobs
from kvstore.registry import ModelCard, Registry, WorkerInfo, new_incarnation
from octavo.v1 import fleet_pb2_grpc, inference_pb2, inference_pb2_grpc, job_pb2
from octavo.v1.inference_pb2 import GenerateRequest, GenerateResponse, Sampling, Stopping, TokenIds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from gateway.server import Ready
    from kvstore.client import Broker

CONTEXT = 4096
VOCAB = 300
"""A little more than the tokenizer has, as in models whose embedding is padded."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('tools are not spoken here') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def train_tokenizer() -> Tokenizer:
    """A small byte-level BPE with two control tokens, ids 0 and 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a book whose sheets are folded into eight leaves"], trainer)
    return tokenizer


def tiny_card(fingerprint: str = "f" * 16, *, template: str = TEMPLATE) -> ModelCard:
    """What the scripted workers publish."""
    tokenizer = train_tokenizer()
    return ModelCard(
        fingerprint=fingerprint,
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        tokenizer_json=tokenizer.to_str().encode(),
        tokenizer_config=json.dumps({"eos_token": "<|end|>", "chat_template": template}).encode(),
    )


class ScriptedWorker:
    """One worker's life on the broker. The test claims jobs and commits chunks by hand."""

    def __init__(self, broker: Broker, worker: str = "w0", *, card: ModelCard | None = None, **info: Any) -> None:
        self.card = card or tiny_card()
        self.broker = broker
        self.jobs = Jobs(broker)
        self.registry = Registry(broker)
        self.info = WorkerInfo(
            id=worker,
            incarnation=new_incarnation(),
            fingerprint=self.card.fingerprint,
            tokenizer=self.card.tokenizer,
            **{"model": "tiny", "vocab_size": self.card.vocab_size, "context_length": CONTEXT, **info},
        )
        self.ended_outside: asyncio.Queue[str] = asyncio.Queue()
        self._reader = broker.blocking()
        self._bell = Doorbell(broker)
        self._tasks = Tasks()

    async def start(self) -> None:
        """Registers, publishes the model, and goes on breathing."""
        await self.registry.register(self.info)
        await self.registry.publish_model(self.card)
        await self._bell.open(self.broker.keys.channel(self.info.incarnation))
        self._tasks.spawn(self._breathe(), name="breathe")
        self._tasks.spawn(self._listen(), name="listen")

    async def die(self) -> None:
        """Stops breathing, as after SIGKILL."""
        await self._tasks.cancel()

    async def stop(self) -> None:
        """Leaves properly."""
        await self.die()
        await self._bell.close()
        await self._reader.aclose()
        await self.registry.leave(self.info.id, self.info.incarnation)

    async def claim(self, count: int = 1) -> list[Claim]:
        """Waits until `count` jobs have come, and owns them."""
        worker, incarnation = self.info.id, self.info.incarnation
        claims: list[Claim] = []
        async with asyncio.timeout(10):
            while len(claims) < count:
                entries = await self.jobs.next_entries(self._reader, worker, incarnation, count - len(claims), 500)
                claims += await self.jobs.claim(worker, incarnation, entries)
        return claims

    async def commit(self, *deliveries: job_pb2.Delivery) -> list[Commit]:
        """Commits one step."""
        return await self.jobs.commit(self.info.id, self.info.incarnation, deliveries)

    async def answer(self, claim: Claim, tokens: int = 3) -> None:
        """The whole answer of a job: `tokens` chunks of one token and an end."""
        for index in range(tokens):
            last = index == tokens - 1
            await self.commit(chunk(claim, index, [index + 2], finish=inference_pb2.STOP if last else 0))

    def serve(self, tokens: int = 3) -> None:
        """Answers every job from now on."""
        self._tasks.spawn(self._serve(tokens), name="serve")

    async def _serve(self, tokens: int) -> None:
        while True:
            worker, incarnation = self.info.id, self.info.incarnation
            entries = await self.jobs.next_entries(self._reader, worker, incarnation, 100, 500)
            for claim in await self.jobs.claim(worker, incarnation, entries):
                await self.answer(claim, tokens)

    async def told_to_drop(self) -> str:
        """The next request id that was ended from outside."""
        async with asyncio.timeout(5):
            return await self.ended_outside.get()

    async def _breathe(self) -> None:
        while True:
            with suppress(BrokerError):  # some tests stop the server
                await self.registry.renew(self.info)
            await asyncio.sleep(0.5)

    async def _listen(self) -> None:
        async for payload in self._bell:
            if payload is not RECONNECTED:
                self.ended_outside.put_nowait(payload.decode())


def chunk(
    claim: Claim,
    start: int,
    token_ids: Sequence[int],
    *,
    finish: int = 0,
    failure: int = 0,
    error: str = "",
    text: str | None = None,
) -> job_pb2.Delivery:
    """What a step gave for a claimed job: with a route on the first chunk and usage on the last."""
    prompt = len(claim.job.prompt_token_ids)
    shown = "".join(f"<{token}>" for token in token_ids) if text is None else text
    body = inference_pb2.Chunk(start=start, token_ids=token_ids, text=shown, finish=finish, error=error)
    delivery = job_pb2.Delivery(request_id=claim.job.request_id, attempt=claim.attempt, chunk=body, failure=failure)
    if start == 0:
        delivery.route.CopyFrom(
            inference_pb2.Route(worker="w0", cached_tokens=1, queue_ms=claim.queued_ms, prefill_ms=7)
        )
    if finish:
        delivery.usage.CopyFrom(
            inference_pb2.Usage(
                prompt_tokens=prompt, cached_tokens=1, completion_tokens=start + len(token_ids), attempts=claim.attempt
            )
        )
    return delivery


class Client:
    """Typed calls to one gateway."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])
        inference: Any = inference_pb2_grpc.InferenceStub(self.channel)
        fleet: Any = fleet_pb2_grpc.FleetStub(self.channel)
        self.generate = inference.Generate
        self.cancel = inference.Cancel
        self.get_model = inference.GetModel
        self.list_workers = fleet.ListWorkers
        self.get_queues = fleet.GetQueues


def request(
    request_id: str = "", *, prompt: Sequence[int] = (5, 6, 7), max_tokens: int = 16, **fields: Any
) -> GenerateRequest:
    """A plain request."""
    return GenerateRequest(
        request_id=request_id,
        **({} if {"text", "chat"} & set(fields) else {"token_ids": TokenIds(ids=prompt)}),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=max_tokens),
        **fields,
    )


async def collect(call: Any) -> list[GenerateResponse]:
    """All responses of a call that are left. Raises AioRpcError when it ends with another status than OK."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and message of a call, unary or streaming, that fails before it has written anything."""
    try:
        got = await (collect(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"the call succeeded: {got}")


def tokens(responses: Sequence[GenerateResponse]) -> list[int]:
    """Token ids of all chunks, whose indexes are contiguous from 0, with one terminal chunk at the very end."""
    ids: list[int] = []
    chunks = [each for response in responses for each in response.chunks]
    for each in chunks:
        assert each.start == len(ids)
        ids += each.token_ids
    assert [bool(each.finish) for each in chunks] == [False] * (len(chunks) - 1) + [True]
    return ids


@asynccontextmanager
async def running_gateway(broker: Broker, **settings: Any) -> AsyncIterator[tuple[Gateway, Ready, Client]]:
    """A gateway in this process, and a client of it."""
    config = broker.config
    fixed = {"grpc_port": 0, "grace_s": 0.2}
    gateway = Gateway(GatewayConfig(config.url, config.namespace, **{**fixed, **settings}))
    ready = await gateway.start()
    client = Client(ready.grpc)
    hurry = asyncio.Event()
    hurry.set()
    try:
        yield gateway, ready, client
    finally:
        await client.channel.close()
        await gateway.stop(hurry)
