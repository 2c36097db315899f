"""What a sequence has said so far, as the penalties need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class TokenCounts:
    """How often each token is in a sequence's output, and which tokens its prompt has."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self.counts: dict[int, int] = dict.fromkeys(prompt, 0)
        """Of every token in the prompt or the output: how often the output has it."""
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """The output has one more token."""
        self.counts[token_id] = self.counts.get(token_id, 0) + 1
