"""A few passes of a model before it serves: how fast it is, until its own steps tell (``worker.rates``)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from worker.rates import LEAST_S, LEAST_SHARE, Measured
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.step import Runner

TIMES: Final = 3
"""Each pass is made so often, and the fastest counts: what holds one up is not the model."""
ENOUGH_S: Final = 0.1
"""Passes that took so long together are enough, and a longer prompt is only tried after one that took less: a slow
model is measured in seconds too."""
FIRST_PROMPT: Final = 32
SEQUENCES: Final = 8
"""Decoded together, at most."""


def measure(runner: Runner, *, most_tokens: int, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Rates of passes of at most ``most_tokens`` tokens, or as many as there is room for.

    Uses the first blocks, and copies into them what the last one holds: so all hold the same, if they did before.
    Raises what the runner raises; ValueError when it has no two blocks.
    """
    free = runner.num_blocks - 1
    if free < 1:
        raise ValueError("a pool of one block leaves nothing to measure with")
    prompt, limit = 0, min(most_tokens, free * runner.block_size)
    one = _fastest(runner, _decoding(runner, 1), clock)
    count = min(SEQUENCES, free, most_tokens)
    more = _fastest(runner, _decoding(runner, count), clock) - one if count > 1 else 0.0
    seconds = 0.0
    while prompt < limit and seconds < ENOUGH_S:
        prompt = min(max(2 * prompt, FIRST_PROMPT), limit)
        seconds = _fastest(runner, [_row(runner, 0, prompt)], clock)
    used = max(count, -(-prompt // runner.block_size))
    runner.copy_blocks([(free, block) for block in range(used)])
    return Measured(
        prefill_tok_s=prompt / max(seconds - one, LEAST_SHARE * seconds, LEAST_S),
        step_ms=1000 * max(one, LEAST_S),
        sequence_ms=1000 * max(more / max(count - 1, 1), LEAST_S),
    )


def _decoding(runner: Runner, count: int) -> list[StepRow]:
    """One token each, in a block of its own."""
    return [_row(runner, block, 1) for block in range(count)]


def _row(runner: Runner, first_block: int, tokens: int) -> StepRow:
    """A sequence's first tokens, and the logits after the last of them."""
    blocks = range(first_block, first_block - (-tokens // runner.block_size))
    return StepRow([(11 + 7 * index) % runner.vocab_size for index in range(tokens)], 0, [*blocks], 1)


def _fastest(runner: Runner, rows: Sequence[StepRow], clock: Callable[[], float]) -> float:
    """Seconds of the fastest pass. The first one also warms up whatever is to be warm."""
    taken: list[float] = []
    while len(taken) < TIMES and sum(taken) < ENOUGH_S:
        began = clock()
        float(runner.forward(rows)[0, 0])  # a device that works behind our back has to end for that
        taken.append(clock() - began)
    return min(taken)
