"""``python -m worker.look MODEL DTYPE DEVICE``: can a worker load that here? For a supervisor, which has no torch.

Ends with status 0, or with 1 and one line on stderr.
"""

from __future__ import annotations

import sys

from worker.model import simulated
from worker.model.errors import ModelError


def look(model: str, *, dtype: str, device: str) -> None:
    """Raises ModelError where the model is not there, or is of no kind that can be loaded here: without reading it, so
    at once."""
    if simulated.is_simulated(model):
        simulated.look(model, dtype=dtype, device=device)
        return
    from worker.model import loader  # takes a second, because it brings torch and transformers along

    loader.look(model, dtype=dtype, device=device)


def main(model: str, dtype: str, device: str) -> None:
    """Raises SystemExit with the reason why not."""
    try:
        look(model, dtype=dtype, device=device)
    except ModelError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
