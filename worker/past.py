"""What a job has said already, as its token log has it: where a worker goes on that has not begun it, or whose own
output the broker has lost a part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from octavo.v1 import job_pb2


class PastLost(ValueError):  # noqa: N818 (says what happened)
    """A log lacks tokens that were committed."""


@dataclass(frozen=True, slots=True)
class Past:
    """The beginning of a job's output."""

    said: Mapping[int, tuple[int, ...]]
    """Tokens of each choice, those included that have none."""
    ended: frozenset[int]
    """Choices that have ended."""

    def __bool__(self) -> bool:
        """Whether anything was told."""
        return bool(self.ended) or any(self.said.values())

    @property
    def longest(self) -> tuple[int, ...]:
        """What the open choice has said that has said most."""
        return max((said for choice, said in self.said.items() if choice not in self.ended), key=len, default=())


def past_of(
    log: Iterable[job_pb2.Delivery], choices: int, *, known: Mapping[int, int], ended: frozenset[int] | None
) -> Past:
    """The past of a job with so many choices.

    ``known`` has of some choices, or of all, how many tokens are committed; of others, all that the log has are. Which
    have ``ended`` is known too, or told by the log. Raises PastLost when the log lacks something.
    """
    said: dict[int, list[int]] = {choice: [] for choice in range(choices)}
    ends: set[int] = set()
    for delivery in log:
        chunk = delivery.chunk
        # Attempt 0 is an end from outside, which a job has not that goes on.
        if chunk.choice >= choices or not delivery.attempt:
            continue
        own = said[chunk.choice]
        if chunk.start <= len(own):
            own += chunk.token_ids[len(own) - chunk.start :]
            if chunk.finish:
                ends.add(chunk.choice)
    for choice, count in known.items():
        if len(said.get(choice, ())) < count:
            raise PastLost("the broker lost a part of this job's output")
    tokens = {choice: tuple(own[: known.get(choice)]) for choice, own in said.items()}
    return Past(tokens, frozenset(ends) if ended is None else ended)
