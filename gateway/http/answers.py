"""What has come of one HTTP request's answers, and what is told of it: piece by piece, or whole. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gateway.http import logprobs
from gateway.http.tool_calls import CallReader, ToolCall
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.http.logprobs import BytesOf
    from gateway.http.translate import Wanted

FINGERPRINT: Final = 16
"""Characters of a worker's fingerprint that are told."""
_REASONS: Final = {inference_pb2.STOP: "stop", inference_pb2.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with. `first`: its first token; None unless log-probabilities are wanted."""

    text: str
    first: int | None = None


@dataclass(slots=True)
class Piece:
    """What is new of one answer."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    first: int | None = None
    """A token before `tokens` that nothing was before."""
    finish: str | None = None

    def add(self, other: Piece) -> None:
        """Goes on with a later one."""
        self.text += other.text
        self.calls += other.calls
        self.tokens += other.tokens
        self.first = other.first if self.first is None else self.first
        self.finish = other.finish

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.tokens or self.finish)


class Choice:
    """One answer as it comes."""

    def __init__(self, index: int, wanted: Wanted) -> None:
        self.index = index
        self.begun = False
        """Whether any of it was told."""
        self.called = 0
        """Calls that were told."""
        self.offset = 0
        """Characters of the tokens that were told with their log-probabilities."""
        self.whole = Piece()
        self._wanted = wanted
        self._reader = CallReader(alone=wanted.must_call) if wanted.tools else None
        self._called = False
        self.fed = False
        """Whether any of it has come."""

    def feed(self, chunk: inference_pb2.Chunk, echo: Echo | None, scored: list[inference_pb2.TokenLogprobs]) -> Piece:
        """What a chunk brings. `scored`: the prompt's tokens but the first, where they are wanted."""
        piece = Piece(finish=_REASONS.get(chunk.finish))
        if not self.fed and echo is not None:
            piece.text, piece.first = echo.text, echo.first
            piece.tokens += scored
        self.fed = True
        if self._wanted.output:
            piece.tokens += chunk.logprobs
            self._say(piece, chunk.text)
        elif piece.finish:
            piece.finish = "length"
        return piece

    def _say(self, piece: Piece, text: str) -> None:
        if self._reader is None:
            piece.text += text
            return
        for found in self._reader.read(text) + (self._reader.end() if piece.finish else []):
            if isinstance(found, str):
                piece.text += found
            elif self._wanted.parallel_calls or not self._called:
                self._called = True
                piece.calls.append(found)
        if self._called and piece.finish == "stop":
            piece.finish = "tool_calls"


class Answers:
    """All answers of one request: n to each prompt. Set `id`, `model` and `bytes_of` before the first is taken."""

    def __init__(self, wanted: Wanted, created: int) -> None:
        """``created``: Unix time in seconds."""
        self.id = ""
        self.model = ""
        self.fingerprint = ""
        """Of who answers, once that is known: what has the same one gives the same bits."""
        self.bytes_of: BytesOf = {}
        """Needed for log-probabilities alone."""
        self.echoes: dict[int, Echo] = {}
        """By the prompt's number."""
        self.cancelled: inference_pb2.Chunk | None = None
        """The end of an answer that somebody cancelled."""
        self._wanted = wanted
        self._created = created
        self._choices = [Choice(index, wanted) for index in range(len(wanted.requests) * wanted.n)]
        self._scored: dict[int, list[inference_pb2.TokenLogprobs]] = {}
        self._held: dict[int, list[inference_pb2.Chunk]] = {}
        self._usage = [inference_pb2.Usage() for _ in wanted.requests]
        """Of each prompt for itself, as responses of different prompts may be taken by different threads at a time."""

    def take(self, prompt: int, response: inference_pb2.GenerateResponse) -> list[tuple[Choice, Piece]]:
        """What a response brings to answers to a prompt, by its number."""
        self._usage[prompt].MergeFrom(response.usage)
        pieces = []
        for chunk in self._in_order(prompt, response.chunks):
            if chunk.finish == inference_pb2.CANCELLED:
                self.cancelled = chunk
            if chunk.finish not in (inference_pb2.CANCELLED, inference_pb2.ERROR):
                choice = self._choices[prompt * self._wanted.n + chunk.choice]
                if chunk.prompt_logprobs:
                    self._scored[prompt] = list(chunk.prompt_logprobs)
                pieces.append((choice, choice.feed(chunk, self.echoes.get(prompt), self._scored.get(prompt, []))))
        return pieces

    def _in_order(self, prompt: int, chunks: Sequence[inference_pb2.Chunk]) -> Sequence[inference_pb2.Chunk]:
        """What the prompt's tokens are worth comes with the first answer, and all answers begin with it."""
        if not (self._wanted.echo and self._wanted.logprobs) or self._choices[prompt * self._wanted.n].fed:
            return chunks
        held = self._held.setdefault(prompt, [])
        held += chunks
        if all(chunk.choice for chunk in held):
            return ()
        return sorted(self._held.pop(prompt), key=lambda chunk: bool(chunk.choice))

    def keep(self, pieces: list[tuple[Choice, Piece]]) -> None:
        """For ``whole``."""
        for choice, piece in pieces:
            choice.whole.add(piece)

    def events(self, pieces: list[tuple[Choice, Piece]]) -> list[dict[str, Any]]:
        """What a stream tells of these."""
        return [self._body([self._part(choice, piece)], stream=True) for choice, piece in pieces if piece]

    def last_event(self) -> dict[str, Any] | None:
        """What a stream tells after all else, if it was asked to."""
        return {**self._body([], stream=True), "usage": self._used()} if self._wanted.include_usage else None

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        whole = [self._whole(choice) for choice in self._choices]
        return {**self._body(whole, stream=False), "usage": self._used()}

    def _body(self, choices: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self._wanted.chat else "text_completion"
        body = {
            "id": ("chatcmpl-" if self._wanted.chat else "cmpl-") + self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            **({"system_fingerprint": f"fp_{self.fingerprint[:FINGERPRINT]}"} if self.fingerprint else {}),
            "choices": choices,
        }
        return {**body, "usage": None} if stream and self._wanted.include_usage else body

    def _part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if not self._wanted.chat:
            return self._completion(choice, piece)
        delta: dict[str, Any] = {} if choice.begun else {"role": "assistant"}
        if piece.text or not choice.begun:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in self._calls(choice, piece)]
        choice.begun = True
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": piece.finish}
        if piece.tokens:
            part["logprobs"] = logprobs.of_chat(piece.tokens, self.bytes_of)
        return part

    def _whole(self, choice: Choice) -> dict[str, Any]:
        piece = choice.whole
        if not self._wanted.chat:
            return self._completion(choice, piece)
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [call for _, call in self._calls(choice, piece)]
        told = logprobs.of_chat(piece.tokens, self.bytes_of) if self._wanted.logprobs else None
        return {"index": choice.index, "message": message, "logprobs": told, "finish_reason": piece.finish}

    def _completion(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        told = None
        if self._wanted.logprobs:
            told, choice.offset = logprobs.of_completion(
                piece.tokens, self.bytes_of, first=piece.first, offset=choice.offset
            )
        return {"index": choice.index, "text": piece.text, "logprobs": told, "finish_reason": piece.finish}

    def _calls(self, choice: Choice, piece: Piece) -> list[tuple[int, dict[str, Any]]]:
        """Each with its number."""
        told = []
        for call in piece.calls:
            number = choice.called
            choice.called += 1
            function = {"name": call.name, "arguments": call.arguments}
            told.append(
                (number, {"id": f"call_{self.id}-{choice.index}-{number}", "type": "function", "function": function})
            )
        return told

    def _used(self) -> dict[str, Any]:
        prompts = sum(used.prompt_tokens for used in self._usage)
        told = sum(used.completion_tokens for used in self._usage) if self._wanted.output else 0
        return {
            "prompt_tokens": prompts,
            "completion_tokens": told,
            "total_tokens": prompts + told,
            "prompt_tokens_details": {"cached_tokens": sum(used.cached_tokens for used in self._usage)},
        }
