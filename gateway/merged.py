"""Several calls for one job, read as one: no token missing, none twice, one end for each choice. Pure."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping


class BrokenStream(Exception):  # noqa: N818 - it says what happened
    """What a gateway sent breaks the service's promises: a gap, a repeat, no end or a second one."""


class Merged:
    """What several calls for one job have brought, as if it had been one call.

    A call that replays begins at the first token of each choice, another one at those that are missing. Each token that
    is replayed is compared with the one that came before: a job that was run anew may have given other bits.

    `n`: choices that the job has; None: the first response tells. `after`: tokens that its reader has had elsewhere, by
    choice; these are never replayed.
    """

    def __init__(self, n: int | None, after: Mapping[int, int] | None = None) -> None:
        self.have: Counter[int] = Counter(after or {})
        """By choice: how many of its tokens have come."""
        self.failed = False
        """Some choice has ended with ERROR."""
        self._n = n
        self._told: defaultdict[int, array[int]] = defaultdict(lambda: array("I"))
        """By choice: its tokens, as they came first."""
        self._chars: Counter[int] = Counter()
        self._ended: set[int] = set()
        self._routed = False
        self._used = False
        self.begin(replay=True)

    @property
    def over(self) -> bool:
        """Whether every choice has ended."""
        return self._n is not None and len(self._ended) == self._n

    def begin(self, *, replay: bool) -> None:
        """A new call."""
        self._next = Counter() if replay else Counter(self.have)
        self._said = Counter() if replay else Counter(self._chars)
        self._ended_here: set[int] = set()

    def check_end(self) -> None:
        """The call has ended well. Raises BrokenStream: without an end of some choice."""
        if self._n is None:
            raise BrokenStream("the call ended and did not say how many choices there are")
        if missing := [choice for choice in range(self._n) if choice not in self._ended]:
            raise BrokenStream(f"the call ended without a terminal chunk of choice {', '.join(map(str, missing))}")

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        """What is new in a response; None: nothing. Raises BrokenStream."""
        news = inference_pb2.GenerateResponse(request_id=response.request_id)
        if response.choices and self._n is None:
            self._n = news.choices = response.choices
        news.chunks.extend(new for chunk in response.chunks if (new := self._new(chunk)) is not None)
        if response.HasField("route") and not self._routed:
            self._routed = True
            news.route.CopyFrom(response.route)
        if response.HasField("usage") and not self._used:
            self._used = True
            news.usage.CopyFrom(response.usage)
        return news if news.chunks or news.HasField("route") or news.HasField("usage") else None

    def _new(self, chunk: inference_pb2.Chunk) -> inference_pb2.Chunk | None:
        """What of a chunk has not come before, in its place."""
        self._check(chunk)
        choice, size = chunk.choice, len(chunk.token_ids)
        self._next[choice] += size
        self._said[choice] += len(chunk.text)
        if choice in self._ended:
            return None
        tokens = max(self._next[choice] - self.have[choice], 0)
        chars = max(self._said[choice] - self._chars[choice], 0)
        if not (tokens or chars or chunk.finish):
            return None
        new = inference_pb2.Chunk()
        new.CopyFrom(chunk)
        new.start = self.have[choice]
        new.text = chunk.text[len(chunk.text) - chars :]
        if known := size - tokens:
            del new.token_ids[:known]
            del new.logprobs[:known]
            del new.prompt_logprobs[:]
        self._told[choice].extend(new.token_ids)
        self.have[choice] += tokens
        self._chars[choice] += chars
        if chunk.finish:
            self._ended.add(choice)
            self.failed = self.failed or chunk.finish == inference_pb2.ERROR
        return new

    def _check(self, chunk: inference_pb2.Chunk) -> None:
        choice, following = chunk.choice, self._next[chunk.choice]
        if choice >= (self._n or 0):
            raise BrokenStream(f"a chunk of choice {choice}, of {self._n or 'no number'}")
        if choice in self._ended_here:
            raise BrokenStream(f"choice {choice}: a chunk after the terminal one")
        if chunk.token_ids and chunk.start != following:
            raise BrokenStream(f"choice {choice}: a chunk starts at {chunk.start}, expected {following}")
        told = self._told[choice][following : following + len(chunk.token_ids)]
        for index, (had, now) in enumerate(zip(told, chunk.token_ids, strict=False), following):
            if had != now:
                another = "the job was run anew and gave another answer"
                raise BrokenStream(f"choice {choice}: token {index} is {now} and was {had} before: {another}")
        if chunk.finish:
            self._ended_here.add(choice)
            whole = chunk.finish in (inference_pb2.STOP, inference_pb2.LENGTH)
            last, have = following + len(chunk.token_ids), self.have[choice]
            if whole and choice not in self._ended and last < have:
                raise BrokenStream(f"choice {choice} ends after {last} tokens, of which {have} had come")
