"""What a process tells of itself, read from its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.request import urlopen

from bench.path_figures import parse

if TYPE_CHECKING:
    from bench.path_figures import Values

SCRAPE_S: Final = 5.0


def scrape(address: str) -> Values:
    """A reading, from HOST:PORT. Blocks. OSError: the process is gone, or doesn't answer in time."""
    with urlopen(f"http://{address}/metrics", timeout=SCRAPE_S) as response:
        return parse(response.read().decode())
