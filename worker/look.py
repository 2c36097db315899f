"""``python -m worker.look MODEL DTYPE DEVICE``: can a worker load that here? For a supervisor, which has no torch.

Ends with status 0, or with 1 and one line on stderr.
"""

from __future__ import annotations

import sys

from worker.model import loader
from worker.model.errors import ModelError


def main(model: str, dtype: str, device: str) -> None:
    """Raises SystemExit with the reason why not."""
    try:
        loader.look(model, dtype=dtype, device=device)
    except ModelError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
