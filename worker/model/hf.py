"""Any decoder-only transformers model, run on paged K/V through the library's attention interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.model.loader import ModelFiles, Progress
    from worker.step import StepRow


class HfRunner:
    """A model with its pages. Implements `worker.step.Runner`."""

    fingerprint: str
    """SHA-256 (hex) of all that decides the bits of a page: weights, configuration, dtype, device class, layout."""
    vocab_size: int
    block_size: int
    num_blocks: int

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Runs one step; returns float32 logits [rows with sample=True, vocab_size], in order."""
        raise NotImplementedError


def load(files: ModelFiles, *, num_blocks: int, block_size: int, progress: Progress) -> HfRunner:
    """Loads the weights and allocates ``num_blocks`` blocks of ``block_size`` positions.

    Raises:
        ModelError: tensors missing, unexpected or of another shape; a model that can't run on pages.
    """
    raise NotImplementedError
