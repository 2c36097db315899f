"""What clients recorded: one event for each thing that they did or saw, as JSON lines, in the order of time.

The lines are written as things happen, so that a run which is cut off leaves all that it saw until then. Times are
seconds on one clock of the recording process, from any beginning.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

LOAD: Final = "load"
PROBE: Final = "probe"
"""Sent after all faults are healed: must be served."""
BAD: Final = "bad"
"""Sent to be refused, see ``Invoked.expect``."""

GENERATE: Final = "generate"
ATTACH: Final = "attach"
"""A call that goes on with a request that was sent before."""
MERGED: Final = "merged"
"""All calls of the product's client for a request, as it made one answer of them."""
CANCEL: Final = "cancel"


class HistoryBroken(Exception):  # noqa: N818 - says what happened
    """Lines that no client of ours wrote: a field that is missing, an event of a request or call that never began."""


@dataclass(frozen=True, slots=True)
class Invoked:
    """A client decided to send a request."""

    event: ClassVar[str] = "invoked"
    request: str
    at: float
    digest: str
    """Names the payload: equal payloads have equal answers, whatever the request id."""
    kind: str
    """greedy or seeded."""
    n: int = 1
    role: str = LOAD
    deadline_s: float | None = None
    """From ``at``, for all calls together."""
    expect: str = ""
    """With role BAD: the status that is right."""


@dataclass(frozen=True, slots=True)
class _OfCall:
    """Something about one call of a request; calls of one request are numbered from 0."""

    request: str
    call: int
    at: float


@dataclass(frozen=True, slots=True)
class Called(_OfCall):
    """It began."""

    event: ClassVar[str] = "called"
    verb: str
    target: str
    """HOST:PORT of the gateway."""
    after: dict[int, int] = field(default_factory=dict)
    """By choice: the first token index that the client still lacks. Empty: all from the start."""


@dataclass(frozen=True, slots=True)
class Came(_OfCall):
    """A chunk."""

    event: ClassVar[str] = "came"
    choice: int
    start: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""
    """Name of the FinishReason; empty: it goes on."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Used(_OfCall):
    """The usage that a call told."""

    event: ClassVar[str] = "used"
    prompt: int
    cached: int
    completion: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Ended(_OfCall):
    """A call is over."""

    event: ClassVar[str] = "ended"
    status: str
    """Name of the gRPC status code."""
    message: str = ""
    retry_after_ms: int | None = None
    """Of the RetryInfo that came with the status."""
    cancelled: bool = False
    """Of a Cancel: it ended a live job."""


Event = Invoked | Called | Came | Used | Ended
_KINDS: Final[dict[str, type[Event]]] = {kind.event: kind for kind in (Invoked, Called, Came, Used, Ended)}


@dataclass(slots=True)
class Call:
    """One call, put together."""

    began: Called
    chunks: list[Came] = field(default_factory=list)
    usage: Used | None = None
    ended: Ended | None = None
    """None: it was still open when the recording stopped."""

    @property
    def status(self) -> str:
        return self.ended.status if self.ended else ""


@dataclass(slots=True)
class Request:
    """One request with all of its calls, in order."""

    invoked: Invoked
    calls: list[Call] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.invoked.request

    @property
    def streams(self) -> list[Call]:
        """The calls that bring output."""
        return [call for call in self.calls if call.began.verb != CANCEL]

    @property
    def cancelled_at(self) -> float | None:
        """When a Cancel was first sent, whatever became of it."""
        return min((call.began.at for call in self.calls if call.began.verb == CANCEL), default=None)


class Recorder:
    """Takes events, and writes each at once when there is a file to write to."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.events: list[Event] = []
        self._out = out

    def note(self, event: Event) -> None:
        self.events.append(event)
        if self._out is not None:
            self._out.write(to_line(event) + "\n")
            self._out.flush()


def to_line(event: Event) -> str:
    """One line of JSON, without its end."""
    return json.dumps({"event": event.event, **asdict(event)}, separators=(",", ":"))


def from_line(line: str) -> Event:
    """Inverse of ``to_line``. Raises HistoryBroken."""
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("event")]
        if "tokens" in values:
            values["tokens"] = tuple(int(token) for token in values["tokens"])
        if "after" in values:
            values["after"] = {int(choice): int(index) for choice, index in values["after"].items()}
        event = kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HistoryBroken(f"{line[:200]!r} is no event: {error!r}") from error
    _check_types(event)
    return event


_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
}


def _check_types(event: Event) -> None:
    for each in fields(event):
        wanted = _TYPES.get(str(each.type))
        value: Any = getattr(event, each.name)
        if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool)):
            raise HistoryBroken(f"{event.event}: {each.name} is {value!r}, not {each.type}")


def read(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a file. Raises HistoryBroken."""
    return (from_line(line) for line in lines if line.strip())


def gather(events: Iterable[Event]) -> dict[str, Request]:
    """The requests, by id, in the order in which they were sent. Raises HistoryBroken."""
    requests: dict[str, Request] = {}
    for event in events:
        if isinstance(event, Invoked):
            if event.request in requests:
                raise HistoryBroken(f"request {event.request} was sent twice under one id")
            requests[event.request] = Request(event)
            continue
        if event.request not in requests:
            raise HistoryBroken(f"{event.event}: request {event.request} was never sent")
        _add(requests[event.request], event)
    return requests


def _add(request: Request, event: Called | Came | Used | Ended) -> None:
    where = f"request {request.id}, call {event.call}"
    if isinstance(event, Called):
        if event.call != len(request.calls):
            raise HistoryBroken(f"{where}: the next call would be {len(request.calls)}")
        request.calls.append(Call(event))
        return
    if not 0 <= event.call < len(request.calls):
        raise HistoryBroken(f"{where}: it never began")
    call = request.calls[event.call]
    if call.ended is not None:
        raise HistoryBroken(f"{where}: {event.event} behind its end")
    match event:
        case Came():
            call.chunks.append(event)
        case Used():
            call.usage = event
        case Ended():
            call.ended = event
