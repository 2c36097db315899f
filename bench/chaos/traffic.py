"""What clients send: payloads of all sorts, the same for the same seed, each answered in one way only.

Greedy, or sampled with a seed of their own: so an answer that was asked for without faults is the right one for ever.
Prompts share beginnings, so that caches, and routing by what they hold, take part.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Final

from octavo.v1 import inference_pb2

GREEDY: Final = "greedy"
SEEDED: Final = "seeded"
_TALE: Final = (
    "a book whose sheets are folded into eight leaves holds the pages of many readers and binds them into one while "
    "rivers run under bridges of stone and old maps name towns that nobody has seen"
)


@dataclass(frozen=True, slots=True)
class Payload:
    """A request without an id. ``expect``: the status that is right, for bad ones."""

    request: inference_pb2.GenerateRequest
    kind: str
    expect: str = ""

    @property
    def n(self) -> int:
        return max(self.request.n, 1)

    @property
    def digest(self) -> str:
        """The same for all requests with this payload."""
        return hashlib.sha256(self.request.SerializeToString(deterministic=True)).hexdigest()[:16]

    def named(self, request_id: str) -> inference_pb2.GenerateRequest:
        """A copy with an id."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.request_id = request_id
        return request


def payloads(seed: int, count: int, *, tokens: tuple[int, int] = (8, 96)) -> list[Payload]:
    """Half of them greedy, half seeded; ``tokens``: the least and the most that an answer may be allowed."""
    numbers = random.Random(f"traffic/{seed}")
    beginnings = [_words(numbers, 60) for _ in range(3)]
    return [_payload(numbers, index, beginnings, tokens) for index in range(count)]


def _payload(numbers: random.Random, index: int, beginnings: list[str], tokens: tuple[int, int]) -> Payload:
    kind = (GREEDY, SEEDED)[index % 2]
    request = inference_pb2.GenerateRequest(
        # The number makes all of them different, also where the words happen to be the same.
        text=f"{numbers.choice((*beginnings, ''))} {index}: {_words(numbers, numbers.randint(2, 40))}",
        n=numbers.choice((1, 1, 1, 2, 3)),
        priority=numbers.choice((0, 0, 0, 5)),
    )
    request.stopping.max_tokens = numbers.randint(*tokens)
    request.stopping.ignore_eos = numbers.random() < 0.7
    if numbers.random() < 0.2:
        request.stopping.stop.extend([numbers.choice(("\n\n", " the", "."))])
        request.stopping.include_stop = numbers.random() < 0.5
    if numbers.random() < 0.2:
        request.logprobs = 2
    sampling = request.sampling
    sampling.temperature = 0.0
    if kind == SEEDED:
        sampling.temperature, sampling.seed = numbers.choice((0.7, 1.0)), numbers.getrandbits(32)
        sampling.top_p = numbers.choice((0.9, 1.0))
    if numbers.random() < 0.3:
        sampling.frequency_penalty, sampling.presence_penalty = 0.4, 0.2
    if numbers.random() < 0.2:
        sampling.repetition_penalty = 1.2
    return Payload(request, kind)


def bad_payloads() -> list[Payload]:
    """Each to be refused, with the status that is right."""
    no_prompt = inference_pb2.GenerateRequest()
    no_tokens = inference_pb2.GenerateRequest(text="x")
    no_tokens.stopping.max_tokens = 0
    too_hot = inference_pb2.GenerateRequest(text="x")
    too_hot.sampling.temperature = 1000.0
    too_many = inference_pb2.GenerateRequest(text="x", n=1000)
    unknown_token = inference_pb2.GenerateRequest()
    unknown_token.token_ids.ids.append(2**31)
    return [
        Payload(request, "bad", "INVALID_ARGUMENT")
        for request in (no_prompt, no_tokens, too_hot, too_many, unknown_token)
    ]


def _words(numbers: random.Random, count: int) -> str:
    return " ".join(numbers.choices(_TALE.split(), k=count))
