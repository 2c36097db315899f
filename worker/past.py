"""What a job has said already, as its token log has it: where a worker goes on that has not begun it, or whose own
output the broker has lost a part of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from octavo.v1 import job_pb2


class PastLost(ValueError):  # noqa: N818 (says what happened)
    """A log lacks tokens that were committed."""


class RolledBack(Enum):
    """What becomes of a job of whose output the broker has lost a part."""

    GOES_ON = auto()
    """From what is left."""
    NOT_OURS = auto()
    """It isn't run here any more, so that somebody else will go on with it, or this worker, once it is given the job
    again."""
    TOO_OFTEN = auto()
    """It is to be ended."""


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


class Gathered:
    """What a log says, of which page after page is added: only tokens and ends are kept."""

    def __init__(self, choices: int) -> None:
        """``choices``: how many the job has."""
        self._said: dict[int, list[int]] = {choice: [] for choice in range(choices)}
        self._ends: set[int] = set()

    def add(self, log: Iterable[job_pb2.Delivery]) -> None:
        """The next deliveries of the log."""
        for delivery in log:
            chunk = delivery.chunk
            own = self._said.get(chunk.choice)
            # Attempt 0 is an end from outside, which a job has not that goes on.
            if own is None or not delivery.attempt:
                continue
            if chunk.start <= len(own):
                own += chunk.token_ids[len(own) - chunk.start :]
                if chunk.finish:
                    self._ends.add(chunk.choice)

    def past(self, *, known: Mapping[int, int], ended: frozenset[int] | None) -> Past:
        """The past of the job whose log this was.

        ``known`` has of some choices, or of all, how many tokens are committed; of others, all that the log has are.
        Which have ``ended`` is known too, or told by the log. Raises PastLost when the log lacks something.
        """
        for choice, count in known.items():
            if len(self._said.get(choice, ())) < count:
                raise PastLost("the broker lost a part of this job's output")
        tokens = {choice: tuple(own[: known.get(choice)]) for choice, own in self._said.items()}
        return Past(tokens, frozenset(self._ends) if ended is None else ended)
