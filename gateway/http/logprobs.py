"""Log-probabilities as OpenAI's API tells them: in one way with completions, in another one with chats. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.v1.inference_pb2 import TokenLogprob, TokenLogprobs

LEAST: Final = -9999.0
"""What stands for minus infinity, which JSON has no number for."""


class BytesOf(Protocol):
    """The bytes of each token."""

    def __getitem__(self, token_id: int, /) -> bytes: ...


def of_chat(tokens: Sequence[TokenLogprobs], bytes_of: BytesOf) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = [
        {**_told(each, bytes_of), "top_logprobs": [_told(other, bytes_of) for other in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def of_completion(
    tokens: Sequence[TokenLogprobs], bytes_of: BytesOf, *, first: int | None, offset: int
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of a completion whose text goes on at `offset`, in characters, and where it goes on next.
    `first`: a token before the others that nothing was before, so that it has no probability."""
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        nonlocal offset
        for name, value in zip(told, (text, logprob, top, offset), strict=True):
            told[name].append(value)
        offset += len(text)

    if first is not None:
        add(_text(bytes_of[first]), None, None)
    for each in tokens:
        text, logprob = _text(bytes_of[each.token_id]), max(each.logprob, LEAST)
        top: dict[str, float] = {}
        for other in each.top:
            # Of several tokens with one text the likeliest, which comes first.
            top.setdefault(_text(bytes_of[other.token_id]), max(other.logprob, LEAST))
        top.setdefault(text, logprob)
        add(text, logprob, top)
    return told, offset


def _told(token: TokenLogprobs | TokenLogprob, bytes_of: BytesOf) -> dict[str, Any]:
    data = bytes_of[token.token_id]
    return {"token": _text(data), "logprob": max(token.logprob, LEAST), "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
