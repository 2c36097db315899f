"""What a request changes about the model's logits: bias, penalties, and what can't be chosen. Of the first two, and of
bans, only the tokens named are touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from worker.sampling.logit_rows import MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.sampling.draw import Draw
    from worker.sampling.scan import Doubles, Ints


def adjusts(draw: Draw) -> bool:
    """Whether a draw is from other logits than the model's."""
    return bool(draw.banned or draw.params.logit_bias) or draw.params.penalizes or draw.allowed is not None


def adjust(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Change ``logits``, float32 ``[draws, any width above the vocabulary's]``, each row for its draw.

    Sums are taken in float64 and rounded to what float32 has between its infinities, so that neither makes a token
    impossible or certain: only -inf in the model's logits, or a ban, is impossible.
    """
    biases = [draw.params.biases for draw in draws]
    places, _ = _places(logits, [ids for ids, _ in biases])
    if len(places):
        old = _taken(logits, places)
        _put(logits, places, old, old + np.concatenate([values for _, values in biases]))
    seen = [draw.counts if draw.params.penalizes else None for draw in draws]
    assert all(counts is not None for draw, counts in zip(draws, seen, strict=True) if draw.params.penalizes)
    places, repeats = _places(logits, [_NO_IDS if counts is None else counts.ids for counts in seen])
    if len(places):
        counts = np.concatenate([one.counts for one in seen if one is not None])
        old = _taken(logits, places)
        _put(logits, places, old, _penalized(old, counts, draws, repeats))
    width = logits.shape[1]
    banned = [[token_id for token_id in draw.banned if token_id < width] for draw in draws]
    places, _ = _places(logits, [np.array(ids, dtype=np.int64) for ids in banned])
    if len(places):
        logits.view(-1).index_fill_(0, torch.from_numpy(places).to(logits.device), -torch.inf)
    for row, draw in zip(logits, draws, strict=True):
        if draw.allowed is not None:
            # A word's lowest byte comes first on all machines that torch runs on.
            others = np.unpackbits(~draw.allowed.view(np.uint8), count=width, bitorder="little").view(np.bool_)
            row.masked_fill_(torch.from_numpy(others).to(row.device), -torch.inf)


_NO_IDS: Final[Ints] = np.empty(0, dtype=np.int64)


def _penalized(old: Doubles, counts: Ints, draws: Sequence[Draw], repeats: Ints) -> Doubles:
    params = [draw.params for draw in draws]
    repetition = np.repeat([each.repetition_penalty for each in params], repeats)
    presence = np.repeat([each.presence_penalty for each in params], repeats)
    frequency = np.repeat([each.frequency_penalty for each in params], repeats)
    with np.errstate(over="ignore"):
        new: Doubles = np.where(old > 0, old / repetition, old * repetition)
        new -= frequency * counts + presence * (counts > 0)
    return new


def _places(logits: torch.Tensor, ids: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Where tokens are in the flat matrix, and how many each row has."""
    repeats = np.array([len(each) for each in ids])
    return np.concatenate(ids) + np.repeat(np.arange(len(ids)) * logits.shape[1], repeats), repeats


def _taken(logits: torch.Tensor, places: Ints) -> Doubles:
    taken = logits.view(-1).index_select(0, torch.from_numpy(places).to(logits.device))
    return taken.cpu().numpy().astype(np.float64)


def _put(logits: torch.Tensor, places: Ints, old: Doubles, new: Doubles) -> None:
    fitting: npt.NDArray[np.float32] = np.where(old > -np.inf, np.clip(new, -MOST, MOST), old).astype(np.float32)
    values = torch.from_numpy(fitting).to(logits.device)
    logits.view(-1).index_copy_(0, torch.from_numpy(places).to(logits.device), values)
