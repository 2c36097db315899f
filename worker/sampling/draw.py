"""The choosing of one token: what the engine asks the sampler, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from worker.matching import Mask
    from worker.params import SamplingParams
    from worker.sampling.penalties import TokenCounts

    Logits = torch.Tensor | npt.NDArray[np.float32]
    """``[rows, vocabulary]``, float32."""

NON_FINITE: Final = "non-finite logits"
NOTHING_LEFT: Final = "no token can be chosen: all that the model leaves possible are banned"


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen. Several may be drawn from one row, one for each choice of a request."""

    row: int
    """Of the logits."""
    params: SamplingParams
    choice: int
    position: int
    """The token's index among its choice's output tokens."""
    counts: TokenCounts | None = None
    """What the prompt and the output have, for the penalties; None when there are none."""
    banned: frozenset[int] = frozenset()
    """Tokens that can't be chosen here: end tokens before ``min_tokens``. Few."""
    logprobs: int | None = None
    """As in ``worker.sequence.Request``."""
    allowed: Mask | None = field(default=None, compare=False)
    """The only tokens that can be chosen here; None: any. Covers the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, float32) at one position, by the model's own logits: before bias, penalties,
    temperature and anything else that a request asks for. The same bits whatever ran beside it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, likeliest first, the lower id first among equals. Whether the token itself is one of them
    is a matter of its likelihood."""


class Drawn(NamedTuple):
    """A chosen token, or the reason why there is none."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str = ""
    """Without a token: what was wrong, for the caller to read."""
    finite: bool = True
    """False: the row was not made of numbers, so what it was made from is in doubt too."""


@dataclass(frozen=True, slots=True)
class Score:
    """A token of a prompt whose log-probability is wanted."""

    row: int
    """Of the logits: those after the token before it."""
    token_id: int
    top: int
    """How many of the likeliest tokens are wanted beside it."""


class Sampler(Protocol):
    """Implemented by ``worker.sampling.sampler``. Both calls only read the logits, float32 ``[rows, vocabulary]``."""

    def draw(self, logits: Logits, draws: Sequence[Draw]) -> list[Drawn]:
        """Choose a token for each draw. A draw's result depends on its own row and fields only."""

    def score(self, logits: Logits, scores: Sequence[Score]) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens. NaN where the row has a NaN or +inf."""
