"""Where a process's time goes: for each part of its work, how often it was done and the seconds that took.

Plain sums without a lock, as some parts are done once for every token: to add to one costs a fifth of a microsecond.
They are shown as Prometheus summaries, whose sums and counts only ever grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.core import SummaryMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric


class Spent(NamedTuple):
    """What one part has taken so far."""

    times: int
    seconds: float


NOTHING: Final = Spent(0, 0.0)


class Parts:
    """Written by one thread, read by any."""

    def __init__(self, *names: str) -> None:
        """``names``: parts that are told of before they are done for the first time."""
        self._spent = dict.fromkeys(names, NOTHING)

    def add(self, part: str, seconds: float) -> None:
        """The part was done once more."""
        times, before = self._spent.get(part, NOTHING)
        self._spent[part] = Spent(times + 1, before + seconds)

    def read(self) -> dict[str, Spent]:
        """All parts, as of now."""
        return dict(self._spent)


class PartsCollector(Collector):
    """Parts as one summary with a label."""

    def __init__(self, name: str, text: str, label: str, parts: Parts) -> None:
        """``name`` and ``text`` of the metric; ``label``: what a part is called there."""
        self._name, self._text, self._label = name, text, label
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the endpoint's thread."""
        family = SummaryMetricFamily(self._name, self._text, labels=(self._label,))
        for part, spent in sorted(self._parts.read().items()):
            family.add_metric((part,), count_value=spent.times, sum_value=spent.seconds)
        return (family,)
