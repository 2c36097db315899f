"""The sampler for logits in the CPU's memory: all of a step's tokens by one native kernel, see ``src/sampling.h``.

It goes by the rules of ``worker.sampling.sampler``, row by row instead of operation by operation: a row stays in a
core's cache until its token is known. Its ``exp`` isn't torch's, so that near an edge the two may differ.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np

from worker.kernels.native.library import address
from worker.sampling.draw import NON_FINITE, NOTHING_LEFT, Drawn, Score, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.kernels.native.library import Native
    from worker.params import SamplingParams
    from worker.sampling.draw import Draw, Logits

    Array = npt.NDArray[np.int64] | npt.NDArray[np.float64]

PICK: Final = struct.Struct("=4q Q2q d q 5d q2Q q2Q qQ Q")
"""``Pick`` of ``sampling.h``."""
MOST_TOP_K: Final = 2**62
FINE: Final = 0
NO_DRAW: Final = (0, 0, 0, 0.0, 0, 1.0, 0.0)
"""The middle of a pick whose token is given."""
NO_CHANGES: Final = (1.0, 0.0, 0.0, *(0,) * 9)
"""The end of a pick whose row is taken as it is."""
OUTCOMES: Final = {
    1: Drawn(None, error=NON_FINITE, finite=False),
    2: Drawn(None, error=NOTHING_LEFT),
}


class NativeSampler:
    """Implements ``worker.sampling.draw.Sampler``. One caller at a time, as its kernels have."""

    def __init__(self, native: Native) -> None:
        self._native = native

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of some results. It tells how the kernel computes ``exp`` and sums.

        A token alone in its block, and far likelier than those of the next, has a log-probability near 0. As a float32
        that shows every bit of the other block's sum.
        """
        logits = np.full((1024, 128), -np.inf, dtype=np.float32)
        logits[:, 0] = 0
        logits[:, 64:] = np.linspace(-9, -4, 64 * 1024, dtype=np.float32).reshape(64, 1024).T
        scored = self.score(logits, [Score(row, 0, 0) for row in range(len(logits))])
        return hashlib.sha256(np.array([one.logprob for one in scored], dtype=np.float32).tobytes()).hexdigest()

    def draw(self, logits: Logits, draws: Sequence[Draw]) -> list[Drawn]:
        """As ``worker.sampling.sampler.TorchSampler.draw``, from logits on the CPU."""
        tops = [draw.logprobs for draw in draws]
        starts = [0, *accumulate(count or 0 for count in tops)]
        kept: list[Array] = []  # what picks point to
        if any(draw.allowed is not None and 32 * len(draw.allowed) < logits.shape[1] for draw in draws):
            raise ValueError(f"what is allowed is not told of all tokens of the vocabulary's {logits.shape[1]}")
        picks = b"".join([_pick(draw, start, kept) for draw, start in zip(draws, starts, strict=False)])
        found = _sample(self._native, logits, [draw.row for draw in draws], picks, starts[-1])
        tokens = found.tokens.tolist()
        told: Sequence[TokenLogprobs | None] = [None] * len(draws)
        if any(count is not None for count in tops):
            told = found.told(tokens, starts, tops)
        return [
            Drawn(token, about) if outcome == FINE else OUTCOMES[outcome]
            for token, about, outcome in zip(tokens, told, found.outcomes.tolist(), strict=True)
        ]

    def score(self, logits: Logits, scores: Sequence[Score]) -> list[TokenLogprobs]:
        """As ``worker.sampling.sampler.TorchSampler.score``, from logits on the CPU."""
        width = logits.shape[1]
        if any(not 0 <= score.token_id < width for score in scores):
            raise ValueError(f"a token to be scored is none of the vocabulary's {width}")
        tops = [score.top for score in scores]
        starts = [0, *accumulate(tops)]
        picks = b"".join(
            [
                PICK.pack(score.row, score.token_id, score.top, start, *NO_DRAW, *NO_CHANGES)
                for score, start in zip(scores, starts, strict=False)
            ]
        )
        found = _sample(self._native, logits, [score.row for score in scores], picks, starts[-1])
        told = found.told([score.token_id for score in scores], starts, tops)
        return [one or TokenLogprobs(score.token_id, math.nan) for one, score in zip(told, scores, strict=True)]


def _pick(draw: Draw, top_start: int, kept: list[Array]) -> bytes:
    """A draw as the kernel reads it. Arrays that it points to are put into ``kept``, to be there until it has."""
    params = draw.params
    changes: tuple[float, ...] = NO_CHANGES
    if draw.banned or params.logit_bias or params.penalizes or draw.allowed is not None:
        changes = _changes(draw, params, kept)
    return PICK.pack(
        draw.row,
        -1,
        -1 if draw.logprobs is None else draw.logprobs,
        top_start,
        params.seed,
        draw.choice,
        draw.position,
        0.0 if params.greedy else params.temperature,
        params.top_k if params.top_k < MOST_TOP_K else 0,
        params.top_p,
        params.min_p,
        *changes,
    )


def _changes(draw: Draw, params: SamplingParams, kept: list[Array]) -> tuple[float, ...]:
    """What a request changes about the logits: penalties, then the arrays of biases, of what was said, of bans, and of
    what is allowed."""
    biased, bias = params.biases
    banned = np.array(list(draw.banned), dtype=np.int64)
    kept += (biased, bias, banned)
    seen = (0, 0, 0)
    if params.penalizes:
        assert draw.counts is not None
        ids, counts = draw.counts.ids, draw.counts.counts
        kept += (ids, counts)
        seen = (len(ids), ids.ctypes.data, counts.ctypes.data)
    return (
        *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        *(len(biased), biased.ctypes.data, bias.ctypes.data),
        *seen,
        *(len(banned), banned.ctypes.data),
        0 if draw.allowed is None else draw.allowed.ctypes.data,
    )


class _Sampling(ctypes.Structure):
    """``Sampling`` of ``sampling.h``."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("picks", ctypes.c_char_p),
        ("tokens", ctypes.c_void_p),
        ("outcomes", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("top_counts", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
    )


class _Found:
    """What the kernel writes; see ``Sampling`` there."""

    def __init__(self, count: int, tops: int) -> None:
        self.tokens, self.outcomes, self.top_counts = np.empty((3, count), dtype=np.int64)
        self.logprobs = np.empty(count, dtype=np.float32)
        self.top_ids = np.empty(tops, dtype=np.int64)
        self.top_logprobs = np.empty(tops, dtype=np.float32)

    def told(
        self, tokens: Sequence[int], starts: Sequence[int], tops: Sequence[int | None]
    ) -> list[TokenLogprobs | None]:
        """Of the tokens of which it is wanted and could be."""
        pairs = list(zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True))
        columns = (tokens, self.logprobs.tolist(), starts[:-1], self.top_counts.tolist(), self.outcomes.tolist(), tops)
        return [
            None if wanted is None or outcome != FINE else TokenLogprobs(token, own, tuple(pairs[start : start + some]))
            for token, own, start, some, outcome, wanted in zip(*columns, strict=True)
        ]


def _sample(native: Native, logits: Logits, rows: Sequence[int], picks: bytes, tops: int) -> _Found:
    count, width = logits.shape
    if rows and not (min(rows) >= 0 and max(rows) < count):
        raise ValueError(f"rows {min(rows)} to {max(rows)} are wanted of {count}")
    found = _Found(len(rows), tops)
    first, stride = _where(logits)
    native.call(
        "sample",
        _Sampling(
            logits=first,
            stride=stride,
            vocabulary=width,
            count=len(rows),
            picks=picks,
            tokens=found.tokens.ctypes.data,
            outcomes=found.outcomes.ctypes.data,
            logprobs=found.logprobs.ctypes.data,
            top_counts=found.top_counts.ctypes.data,
            top_ids=found.top_ids.ctypes.data,
            top_logprobs=found.top_logprobs.ctypes.data,
        ),
    )
    return found


def _where(logits: Logits) -> tuple[int, int]:
    """The address of the first logit, and how many numbers lie between the beginnings of two rows.

    Raises:
        ValueError: they aren't float32 in the CPU's memory, or a row's don't lie side by side.
    """
    if not isinstance(logits, np.ndarray):
        import torch  # whoever passes a tensor has loaded it

        return address(logits, torch.float32, *logits.shape), logits.stride(0)
    if logits.dtype != np.float32 or (logits.shape[1] > 1 and logits.strides[1] != logits.itemsize):
        raise ValueError(f"{logits.dtype} {list(logits.shape)} is no float32, or a row of it is not contiguous")
    return logits.ctypes.data, logits.strides[0] // logits.itemsize
