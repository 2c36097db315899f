"""What the checker says: violations of invariants, each with a name of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

INVARIANTS: Final[dict[str, str]] = {
    "I1": "every accepted request ends in exactly one terminal event per choice, in time, and nothing follows it",
    "I2": "token indexes are 0..n-1 without gap or repeat, in streams and logs; the text is that of the tokens",
    "I3": "greedy and seeded answers are those of the run without faults, token for token",
    "I4": "nothing is left in the broker: no entry, no pending one, no live job, no charge, no key that never expires",
    "I5": "of every pool free + cached + used blocks are all blocks, and an idle worker uses none",
    "I6": "gauges return to 0, counters never go down, hits are at most queries",
    "I7": "errors are of the right class, a good request is taken in time, and the next one is served",
}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One violation."""

    invariant: str
    name: str
    """Of the kind of violation: short, the same for all of its kind."""
    where: str
    """Whose it is: a request, a worker, a key."""
    says: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.name}: {self.where}: {self.says}"


def told(findings: Iterable[Finding], most: int = 20) -> str:
    """For people: how many of each kind, then the first ``most`` of them, then what the broken invariants say."""
    found = sorted(findings)
    if not found:
        return "no violation"
    kinds = Counter((each.invariant, each.name) for each in found)
    lines = [f"{len(found)} violations: " + ", ".join(f"{count} x {' '.join(kind)}" for kind, count in kinds.items())]
    lines += [f"  {each}" for each in found[:most]]
    if len(found) > most:
        lines.append(f"  ... and {len(found) - most} more")
    lines += [f"  {name}: {INVARIANTS[name]}" for name in sorted({each.invariant for each in found})]
    return "\n".join(lines)
