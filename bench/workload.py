"""What is sent: prompts and lengths, the same for the same seed."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from octavo.v1 import inference_pb2
from ops.demo_text import SYSTEM_PROMPT

PROMPT_KINDS = ("random", "text")
WORDS_PER_TOKEN = 0.75
"""Of English text, about: a client can't count tokens. What was really sent is in the answer's usage."""
FIRST_ID = 256
"""Random prompts leave out the ids below: in most vocabularies these are special tokens and single bytes."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`256`, or `32:512` for lengths drawn evenly from that range.

        Raises:
            ValueError: neither, or no positive lengths.
        """
        found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if found is None:
            raise ValueError(f"{text!r} is neither a number nor LOW:HIGH")
        low, high = int(found[1]), int(found[2] or found[1])
        if not 1 <= low <= high:
            raise ValueError(f"{text!r} is no range of positive lengths")
        return cls(low, high)

    def draw(self, numbers: random.Random) -> int:
        return numbers.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """How the requests of a run look. Lengths in tokens."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: int = 0
    """Tokens at the start of every prompt that are the same in all of a run; part of `prompt_tokens`."""
    kind: str = "random"
    """`random` token ids, or English `text` of about that many tokens."""
    seed: int = 0
    cache_salt: str = ""
    """Keeps a run from hitting what an earlier one left in the workers' caches."""

    def requests(self, count: int, vocab_size: int, stream: int) -> list[inference_pb2.GenerateRequest]:
        """`count` greedy requests that ignore the end of text. Each `stream` of a run has other prompts."""
        prefix = self._tokens(random.Random(f"{self.seed}/prefix"), self.shared_prefix, vocab_size)
        numbers = random.Random(f"{self.seed}/{stream}")
        made = []
        for _ in range(count):
            length = max(self.prompt_tokens.draw(numbers), self.shared_prefix + 1)
            tail = self._tokens(numbers, length - self.shared_prefix, vocab_size)
            request = inference_pb2.GenerateRequest(
                sampling=inference_pb2.Sampling(temperature=0.0),
                stopping=inference_pb2.Stopping(max_tokens=self.output_tokens.draw(numbers), ignore_eos=True),
                cache_salt=self.cache_salt,
            )
            if self.kind == "text":
                request.text = " ".join(str(word) for word in (*prefix, *tail))
            else:
                request.token_ids.ids.extend(int(token) for token in (*prefix, *tail))
            made.append(request)
        return made

    def _tokens(self, numbers: random.Random, count: int, vocab_size: int) -> list[int] | list[str]:
        if self.kind == "text":
            return _words(numbers, round(count * WORDS_PER_TOKEN)) if count else []
        first = min(FIRST_ID, vocab_size // 2)
        return [numbers.randrange(first, vocab_size) for _ in range(count)]


def _words(numbers: random.Random, count: int) -> list[str]:
    """At least one word; whole sentences in a random order, so that prompts of one length differ early."""
    sentences = re.split(r"(?<=\.)\s+", SYSTEM_PROMPT)
    words: list[str] = []
    while len(words) < count:
        words += numbers.choice(sentences).split()
    return words[: max(count, 1)]
