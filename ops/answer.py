"""What a client of the gateway makes of a stream: answers, checked as they come, and how they are told as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping


class BrokenStream(Exception):  # noqa: N818
    """What a server sent breaks the service's promises: a gap, a repeat, no end or a second one."""


@dataclass(slots=True)
class Choice:
    """One of the answers that a call produces, so far."""

    index: int = 0
    start: int = 0
    """Of its tokens those before are not asked for."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    """Name of the FinishReason; empty until the end."""
    stop_match: str = ""
    stop_token: int | None = None
    error: str = ""
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)

    @property
    def following(self) -> int:
        """Index of the next token."""
        return self.start + len(self.token_ids)

    def add(self, chunk: inference_pb2.Chunk) -> None:
        """Takes in one of its chunks.

        Raises:
            BrokenStream: token indexes that are not contiguous, or output after the end.
        """
        if self.finish:
            raise BrokenStream(f"choice {self.index}: a chunk after the terminal one")
        if chunk.start != self.following:
            raise BrokenStream(f"choice {self.index}: a chunk starts at {chunk.start}, expected {self.following}")
        self.token_ids.extend(chunk.token_ids)
        self.text += chunk.text
        self.logprobs.extend(chunk.logprobs)
        if chunk.finish:
            self.finish = inference_pb2.FinishReason.Name(chunk.finish)
            self.stop_match = chunk.stop_match
            self.stop_token = chunk.stop_token if chunk.HasField("stop_token") else None
            self.error = chunk.error

    def as_dict(self) -> dict[str, Any]:
        """For `--json`. What ended it, and log-probabilities, only where there are any."""
        told: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, "finish": self.finish}
        if self.stop_match:
            told["stop_match"] = self.stop_match
        if self.stop_token is not None:
            told["stop_token"] = self.stop_token
        if self.error:
            told["error"] = self.error
        return told | ({"logprobs": [plain(each) for each in self.logprobs]} if self.logprobs else {})


@dataclass(slots=True)
class Answer:
    """What one call produced so far, of one choice or several. Times are seconds since the call was made."""

    request_id: str = ""
    n: int = 1
    """Where the service tells how many choices there are, as it does of an Attach, that is right."""
    after: Mapping[int, int] = field(default_factory=dict)
    """By choice: the first token that is asked for; 0 for those that are not in it."""
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    route: inference_pb2.Route | None = None
    usage: inference_pb2.Usage | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    total_s: float | None = None

    def __post_init__(self) -> None:
        self.choices = [Choice(index, self.after.get(index, 0)) for index in range(self.n)]

    @property
    def received(self) -> bool:
        """Whether anything has come."""
        return any(each.token_ids or each.finish for each in self.choices)

    @property
    def text(self) -> str:
        """Of the first choice, as the next ones."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish(self) -> str:
        return self.choices[0].finish

    @property
    def error(self) -> str:
        return self.choices[0].error

    def add(self, response: inference_pb2.GenerateResponse, elapsed_s: float) -> str:
        """Takes one response in and returns the text that it brought to the first choice.

        Raises:
            BrokenStream: as ``Choice.add``, or a choice that was not asked for.
        """
        self.request_id = self.request_id or response.request_id
        if response.choices > self.n:
            new = range(self.n, response.choices)
            self.choices += [Choice(index, self.after.get(index, 0)) for index in new]
            self.n = response.choices
        before = len(self.text)
        for chunk in response.chunks:
            if chunk.choice >= self.n:
                raise BrokenStream(f"{self.request_id}: a chunk of choice {chunk.choice}, of {self.n}")
            try:
                self.choices[chunk.choice].add(chunk)
            except BrokenStream as error:
                raise BrokenStream(f"{self.request_id}: {error}") from None
            self.prompt_logprobs.extend(chunk.prompt_logprobs)
            if chunk.token_ids:
                self.first_token_s = elapsed_s if self.first_token_s is None else self.first_token_s
                self.last_token_s = elapsed_s
        if response.HasField("route"):
            self.route = response.route
        if response.HasField("usage"):
            self.usage = response.usage
        return self.text[before:]

    def end(self, elapsed_s: float) -> None:
        """Notes the end of the call.

        Raises:
            BrokenStream: a choice has no terminal chunk.
        """
        self.total_s = elapsed_s
        if open_ones := [each.index for each in self.choices if not each.finish]:
            name = self.request_id or "the call"
            raise BrokenStream(f"{name} ended without a terminal chunk of choice {', '.join(map(str, open_ones))}")

    def cut(self, finish: str, error: str) -> list[int]:
        """Ends the choices that have no end: the call is over for a reason that came in no chunk. Which they are."""
        cut = [each for each in self.choices if not each.finish]
        for each in cut:
            each.finish, each.error = finish, error
        return [each.index for each in cut]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between output tokens after the first, of the longest choice; None with fewer than two."""
        longest = max(len(each.token_ids) for each in self.choices)
        if self.first_token_s is None or self.last_token_s is None or longest < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (longest - 1)

    def about(self) -> dict[str, Any]:
        """For `--json`: all but the choices."""
        told: dict[str, Any] = {
            "request_id": self.request_id,
            "usage": plain(self.usage) if self.usage is not None else None,
            "route": plain(self.route) if self.route is not None else None,
            "timings": {
                "first_token_s": self.first_token_s,
                "seconds_per_token": self.seconds_per_token,
                "total_s": self.total_s,
            },
        }
        return told | ({"prompt_logprobs": [plain(e) for e in self.prompt_logprobs]} if self.prompt_logprobs else {})

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, with the first choice."""
        return {"request_id": self.request_id, **self.choices[0].as_dict(), **self.about()}


def plain(message: Any) -> dict[str, Any]:
    """A protobuf message as a dict: the .proto's field names in its order, every field present, 64-bit numbers as
    numbers."""
    fields = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _in_order(message.DESCRIPTOR, fields)


def _in_order(descriptor: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The library puts fields that are not set last."""
    told: dict[str, Any] = {}
    for each in descriptor.fields:
        if each.name not in values:
            continue
        value = values[each.name]
        if each.cpp_type in (each.CPPTYPE_INT64, each.CPPTYPE_UINT64):
            value = [int(one) for one in value] if isinstance(value, list) else int(value)
        elif each.message_type is not None and not each.message_type.GetOptions().map_entry:
            kind = each.message_type
            value = [_in_order(kind, one) for one in value] if isinstance(value, list) else _in_order(kind, value)
        told[each.name] = value
    return told
