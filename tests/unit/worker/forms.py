"""A form for the engine's tests: what may come next follows from all that was said, by a rule that is easy to check."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tests.unit.worker.engine_run import request
from tests.unit.worker.paged_model import EOS, VOCAB
from worker.matching import MatchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from worker.matching import Mask
    from worker.sequence import Request


@dataclass
class Thirds:
    """Implements ``worker.matching.Grammar``: of the model's tokens a third may come next, which one depends on all
    those before. The text may end after each fourth token, and must after ``length``."""

    length: int = 14
    breaks_at: int = -1
    """A mask after so many tokens can't be had."""
    masks: int = 0
    """So many were asked for."""

    def start(self) -> ThirdsMatcher:
        return ThirdsMatcher(self)

    def follows(self, said: Sequence[int]) -> set[int]:
        """What may come next, ends included."""
        some = (
            {token for token in range(4, VOCAB) if (token + sum(said)) % 3 == 0} if len(said) < self.length else set()
        )
        return some | {EOS} if said and len(said) % 4 == 0 else some

    def has(self, said: Sequence[int]) -> bool:
        """Whether some text of this form begins so."""
        return all(token in self.follows(said[:index]) for index, token in enumerate(said))


@dataclass
class ThirdsMatcher:
    form: Thirds
    said: list[int] = field(default_factory=list)

    def mask(self) -> Mask:
        self.form.masks += 1
        if len(self.said) == self.form.breaks_at or not self.form.has(self.said):
            raise MatchError("out of form")
        mask = np.zeros(VOCAB // 32, dtype=np.uint32)
        for token in self.form.follows(self.said):
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.said += token_ids
        return len(self.said) >= self.form.length


def formed(name: str, prompt: Sequence[int], form: Thirds | None = None, **fields: Any) -> Request:
    """A request whose answers have that form."""
    asked = request(name, prompt, **{"max_tokens": 40, "ignore_eos": False} | fields)
    return replace(asked, grammar=form or Thirds())
