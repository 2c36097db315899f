"""The text of a whole answer at once: the rule that streamed text must agree with, in its plainest form."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.detokenize import TokenBytes
    from worker.params import StopParams


def cut(text: str, stop: Sequence[str], *, include_stop: bool = False) -> tuple[str, str]:
    """A text up to where it first ends in a stop string, and that string, the longest of several."""
    for end in range(len(text) + 1):
        matching = [one for one in stop if text[:end].endswith(one)]
        if matching:
            longest = max(matching, key=len)
            return (text[:end] if include_stop else text[: end - len(longest)]), longest
    return text, ""


def whole(
    tokens: TokenBytes,
    token_ids: Sequence[int],
    stopping: StopParams,
    *,
    strip: str = "",
    stop_token: int | None = None,
) -> tuple[str, str]:
    """Text and stop string of an answer of these tokens, ended by ``stop_token`` if there is one."""
    pieces = [tokens[token_id] for token_id in token_ids]
    whole_text = _stripped(b"".join(pieces).decode("utf-8", "replace"), strip)
    enough = len(pieces) >= stopping.min_tokens
    unsearched = _certain(pieces[: stopping.min_tokens], strip) if enough else len(whole_text)
    if stop_token is not None and stopping.include_stop:
        before = _certain(pieces, strip)
        text, match = cut(whole_text[unsearched:before], stopping.stop, include_stop=True)
        if not match:
            pieces.append(tokens[stop_token])
            return _stripped(b"".join(pieces).decode("utf-8", "replace"), strip), ""
    else:
        text, match = cut(whole_text[unsearched:], stopping.stop, include_stop=stopping.include_stop)
    return whole_text[:unsearched] + text, match


def _certain(pieces: Sequence[bytes], strip: str) -> int:
    """How many characters of the text these tokens settle."""
    return len(_stripped(codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces)), strip))


def _stripped(text: str, strip: str) -> str:
    start = 0
    while start < min(len(text), len(strip)) and text[start] == strip[start]:
        start += 1
    return text[start:]
