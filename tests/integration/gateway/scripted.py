"""A worker that does what the test says, on the real protocol."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.tasks import Tasks
from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.errors import BrokerError
from kvstore.jobs import Claim, Commit, Jobs
from kvstore.registry import DRAINING, ModelCard, Registry, WorkerInfo, new_incarnation
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    async def drain(self) -> None:
        """Takes no new jobs from now on; goes on breathing."""
        self.info = replace(self.info, state=DRAINING)
        await self.registry.renew(self.info)

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

    async def claim_all(self) -> list[Claim]:
        """Owns what has come, all at once; it may be nothing."""
        worker, incarnation = self.info.id, self.info.incarnation
        entries = await self.jobs.next_entries(self._reader, worker, incarnation, 100, 500)
        return await self.jobs.claim(worker, incarnation, entries)

    async def commit(self, *deliveries: job_pb2.Delivery) -> list[Commit]:
        """Commits one step."""
        return (await self.jobs.commit(self.info.id, self.info.incarnation, deliveries)).outcomes

    async def answer(self, claim: Claim, tokens: int = 3) -> None:
        """The whole answer of a job: `tokens` chunks of one token and an end; less when the job was ended meanwhile."""
        for index in range(tokens):
            last = index == tokens - 1
            step = chunk(claim, index, [index + 2], finish=inference_pb2.STOP if last else 0)
            if await self.commit(step) == [Commit.FENCED]:
                return

    def serve(self, tokens: int = 3) -> None:
        """Answers every job from now on."""
        self._tasks.spawn(self._serve(tokens), name="serve")

    async def _serve(self, tokens: int) -> None:
        while True:
            for claim in await self.claim_all():
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
    choice: int = 0,
    used: int | None = None,
) -> job_pb2.Delivery:
    """What a step gave for a choice of a claimed job: with a route on the job's first chunk, and usage on the last of
    each choice (`used`: output tokens of all choices so far)."""
    prompt = len(claim.job.prompt_token_ids)
    shown = "".join(f"<{token}>" for token in token_ids) if text is None else text
    body = inference_pb2.Chunk(choice=choice, start=start, token_ids=token_ids, text=shown, finish=finish, error=error)
    delivery = job_pb2.Delivery(request_id=claim.job.request_id, attempt=claim.attempt, chunk=body, failure=failure)
    if start == choice == 0:
        delivery.route.CopyFrom(
            inference_pb2.Route(
                worker="w0",
                predicted_cached_tokens=claim.predicted,
                cached_tokens=1,
                queue_ms=claim.queued_ms,
                prefill_ms=7,
            )
        )
    if finish:
        total = start + len(token_ids) if used is None else used
        delivery.usage.CopyFrom(
            inference_pb2.Usage(prompt_tokens=prompt, cached_tokens=1, completion_tokens=total, attempts=claim.attempt)
        )
    return delivery
