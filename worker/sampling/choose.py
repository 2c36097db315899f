"""Choosing one token from each of some rows of logits.

All functions take the rows' places in ``LogitRows``, and return a token id for each. Rows with nothing possible in them
must have been left out. ``uniform`` are random numbers in [0, 1), multiples of 2^-53.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from worker.sampling.likeliest import BOTTOM, edges_by_count, edges_by_share, settle, tokens_above
from worker.sampling.logit_rows import MOST
from worker.sampling.scan import BLOCK

if TYPE_CHECKING:
    from worker.sampling.likeliest import Flags, Likeliest
    from worker.sampling.logit_rows import LogitRows, Scales
    from worker.sampling.scan import Doubles, Floats, Ints

BELOW_ONE: Final = 1 - 2.0**-53

TRIES: Final = 4
"""How often a token is drawn from all before the distribution is cut."""

ABOUT: Final = 1 + 1e-5
"""By how much the mass of a block may be less than its tokens', from rounding."""


def likeliest(rows: LogitRows, wanted: Ints) -> Ints:
    """The token with the highest logit."""
    blocks: Ints = rows.maxima[wanted].argmax(axis=1)
    inside: Ints = rows.block(wanted, blocks).argmax(axis=1)
    return blocks * BLOCK + inside


def from_all(rows: LogitRows, wanted: Ints, scales: Scales, uniform: Doubles, masses: Doubles) -> Ints:
    """Invert the cumulative distribution over all tokens, in order of their ids: first the block, then the token.

    ``masses`` are the blocks'.
    """
    each, up_to = np.arange(len(wanted)), masses.cumsum(axis=1)
    target = uniform * up_to[:, -1]
    blocks = _first_above(up_to, target)
    mass = masses[each, blocks]
    share = np.minimum((target - (up_to[each, blocks] - mass)) / mass, BELOW_ONE)
    inside = scales.weights(rows.block(wanted, blocks), (slice(None), None)).cumsum(axis=1)
    return blocks * BLOCK + _first_above(inside, share * inside[:, -1])


@dataclass(frozen=True, slots=True)
class Restriction:
    """What of some rows' distributions is kept. All are arrays ``[rows]``; see ``worker.params``."""

    top_k: Ints
    """0 where it is off."""
    top_p: Doubles
    min_p: Doubles
    slots: Ints
    """Which of the sums are the row's, where ``of_all``."""

    @property
    def of_all(self) -> Flags:
        """Where ``top_p`` is a share of all, and not of what ``top_k`` leaves."""
        where: Flags = (self.top_k == 0) & (self.top_p < 1)
        return where

    def of(self, some: Ints) -> Restriction:
        """Of some of the rows."""
        return Restriction(self.top_k[some], self.top_p[some], self.min_p[some], self.slots[some])


def from_nucleus(
    rows: LogitRows, wanted: Ints, scales: Scales, uniforms: Doubles, masses: Doubles, restriction: Restriction
) -> Ints:
    """Draw from all, until what is drawn is among what ``top_p`` and ``min_p`` keep; ``top_k`` must be off.

    For shares that aren't small that takes few tries, and to see whether one token is kept is far less work than to
    find all that are. ``uniforms`` are ``[TRIES + 1, rows]``; the last one is for rows whose tries have all failed.
    """
    tokens = np.full(len(wanted), -1)
    for tries in (range(1), range(1, TRIES)):
        left = np.flatnonzero(tokens < 0)
        if not len(left):
            return tokens
        some = np.tile(left, len(tries))
        numbers = uniforms[tries.start : tries.stop, left].reshape(-1)
        drawn = from_all(rows, wanted[some], scales.of(some), numbers, masses[some])
        kept = _are_kept(rows, wanted[some], scales.of(some), masses[some], restriction.of(some), drawn)
        for fine, token in zip(kept.reshape(-1, len(left))[::-1], drawn.reshape(-1, len(left))[::-1], strict=True):
            tokens[left[fine]] = token[fine]
    left = np.flatnonzero(tokens < 0)
    if len(left):
        tokens[left] = from_likeliest(rows, wanted[left], scales.of(left), uniforms[-1, left], restriction.of(left))
    return tokens


def _are_kept(
    rows: LogitRows, wanted: Ints, scales: Scales, masses: Doubles, restriction: Restriction, tokens: Ints
) -> Flags:
    """Whether one token of each row is: ``top_p`` keeps those that have less than its share before them."""
    each, limits = np.arange(len(wanted)), restriction.top_p * masses.sum(axis=1)
    logits = rows.block(wanted, tokens // BLOCK)[each, tokens % BLOCK]
    own = np.floor(scales.weights(logits, slice(None)) * rows.unit)
    kept: Flags = own >= restriction.min_p * rows.unit
    # Blocks that have nothing as likely don't count. Mostly all of the others' mass is still within the share.
    at_most = np.einsum("ij,ij->i", masses, rows.maxima[wanted] >= logits[:, None])
    some = np.flatnonzero(kept & (at_most * ABOUT >= limits))
    if len(some):
        owners, ids, others = tokens_above(rows, wanted[some], np.nextafter(logits[some], BOTTOM))
        owners = some[owners]
        before = np.flatnonzero((others > logits[owners]) | (ids < tokens[owners]))
        owners = owners[before]
        weights = np.floor(scales.weights(others[before], owners) * rows.unit)
        kept[some] = np.bincount(owners, weights, minlength=len(wanted))[some] < limits[some]
    return kept


def from_likeliest(rows: LogitRows, wanted: Ints, scales: Scales, uniform: Doubles, restriction: Restriction) -> Ints:
    """Invert the cumulative distributions over what the restrictions leave, in order of likelihood."""
    tokens = np.zeros(len(wanted), dtype=np.int64)
    totals = np.zeros(len(wanted))
    some = np.flatnonzero(restriction.of_all)
    if len(some):
        totals[some] = rows.masses(restriction.slots[some]).sum(axis=1)

    def use(found: Likeliest, tried: Ints) -> Flags:
        kept, enough = _kept(found, scales.of(tried), restriction.of(tried), totals[tried], rows.unit)
        up_to = np.concatenate([[0], kept.cumsum()])
        before, total = up_to[found.starts], up_to[found.ends] - up_to[found.starts]
        chosen = np.searchsorted(up_to, before + (uniform[tried] * total).astype(np.int64), side="right") - 1
        tokens[tried[enough]] = found.ids[chosen[enough]]
        return enough

    settle(rows, wanted, _edges(rows, wanted, scales, restriction), use)
    return tokens


def _edges(rows: LogitRows, wanted: Ints, scales: Scales, restriction: Restriction) -> Floats:
    """Above which of the logits all is that is kept, probably."""
    top_k, top_p, min_p = restriction.top_k, restriction.top_p, restriction.min_p
    edges = np.full(len(wanted), BOTTOM)
    some = np.flatnonzero(top_k)
    if len(some):
        edges[some] = edges_by_count(rows, wanted[some], top_k[some])
    some = np.flatnonzero(restriction.of_all)
    if len(some):
        edges[some] = edges_by_share(rows, wanted[some], restriction.slots[some], 1 - top_p[some])
    some = np.flatnonzero((min_p > 0) & ((top_k == 0) | (top_p == 1)))
    if len(some):
        least = rows.highest[wanted[some]] + (np.log(min_p[some]) - 1e-5) * scales.temperatures[some]
        edges[some] = np.maximum(edges[some], np.maximum(least, -MOST).astype(np.float32))
    return edges


def _kept(
    found: Likeliest, scales: Scales, restriction: Restriction, totals: Doubles, unit: float
) -> tuple[Ints, Flags]:
    """The masses of the tokens found, with 0 for what isn't kept, and for which rows nothing else is kept.

    The latter holds if what was found reaches beyond the edge of any one restriction; but ``top_p``'s isn't known
    before ``top_k``'s, for it is a share of what that leaves. ``totals`` are the masses of all, where ``of_all``.
    """
    owners, starts = found.owners, found.starts
    some_k, some_p, least = restriction.top_k > 0, restriction.top_p < 1, restriction.min_p * unit
    masses = (scales.weights(found.logits, owners) * unit).astype(np.int64)
    past_k = starts + np.where(some_k, restriction.top_k, len(masses))
    kept = np.where(np.arange(len(masses)) < past_k[owners], masses, 0)
    up_to = np.concatenate([[0], kept.cumsum()])
    found_k = up_to[found.ends] - up_to[starts]
    limits = np.where(some_p, restriction.top_p * np.where(some_k, found_k, totals), np.inf)
    before = up_to[:-1] - up_to[starts][owners]
    kept[(before >= limits[owners]) | (masses < least[owners])] = 0
    below = scales.weights(found.edges, slice(None)) * unit < least
    enough = (some_k & (found.ends >= past_k)) | (~some_k & (found_k >= limits)) | (~(some_k & some_p) & below)
    return kept, enough | (found.edges == BOTTOM)


def _first_above(up_to: Doubles, target: Doubles) -> Ints:
    """Index of the first running total above the target, ``[rows]``.

    There is one: a random number is at most 1 - 2^-53, and so its share of the last total, even rounded, is below it.
    What has no weight doesn't raise the total and is never first.
    """
    first: Ints = (up_to > target[:, None]).argmax(axis=1)
    return first
