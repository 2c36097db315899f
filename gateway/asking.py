"""One request on its way through gateways: what a client asks for next, and when. ``client`` does the calls."""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from gateway.merged import Merged
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

PAUSE_S: Final = (0.05, 1.0)
"""Before the next call: the first pause, and the longest. Each is drawn from half of it to all of it."""
GREEDY: Final = 1e-5
"""Temperatures below it draw nothing."""
ACCEPTED: Final = "octavo-request-id"
"""Initial metadata of a call whose request the fleet has taken."""
RETRY_AFTER: Final = "retry-after-ms"
"""Trailing metadata of a call that may be tried again after so long."""


class Asking:
    """One request on its way through gateways."""

    def __init__(self, request: inference_pb2.GenerateRequest, gateways: int, timeout: float | None) -> None:
        self.request = request
        self.named = request.request_id
        """What the caller calls it: the job may have got another id meanwhile."""
        self.merged = Merged(max(request.n, 1))
        self.failures = 0
        """In a row, with nothing new between them."""
        self.dropped = False
        """It was cancelled by Client.cancel: no job is to be made of it any more."""
        self.given_up = False
        """The last error ends the request, though its job may go on."""
        self._gateways = gateways
        self._until = None if timeout is None else time.monotonic() + timeout
        self._taken = False
        """A gateway has taken it."""
        self._known = False
        """The same, and none has said since that nobody knows it."""
        self._may_run = False
        """A gateway may have taken it."""
        self._attaching = False
        self._watch = False
        self._trouble = ""
        self._failed_at = 0.0
        self._abandoned = False
        """The job has ended because a gateway, or another of its callers, took us for gone."""
        self._forsaken = 0
        """How many jobs have ended so in a row, with nothing new between them."""

    def check(self) -> None:
        """Before a call. Raises AioRpcError: CANCELLED or DEADLINE_EXCEEDED, when there is to be none."""
        if self.dropped and not self._known:
            raise failed(grpc.StatusCode.CANCELLED, "the request was cancelled")
        if self._until is not None and time.monotonic() >= self._until:
            self.given_up = self._may_run
            raise failed(grpc.StatusCode.DEADLINE_EXCEEDED, f"the deadline passed between two calls{self._trouble}")

    def call(self, stub: Any) -> Any:
        """The next call."""
        timeout = None if self._until is None else max(self._until - time.monotonic(), 0.001)
        self._attaching = self._known
        self.merged.begin(replay=not self._attaching)
        if not self._attaching:
            return stub.Generate(self.request, timeout=timeout)
        asked, after = self.request.request_id, self.merged.have
        attach = inference_pb2.AttachRequest(
            request_id=asked, after=after, watch=self._watch, caller=self.request.caller
        )
        return stub.Attach(attach, timeout=timeout)

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        """What is new in a response; None: nothing. Raises BrokenStream."""
        self._accepted()
        news = self.merged.take(self._less_abandoned(response))
        if news is not None:
            self.failures = self._forsaken = 0
            news.request_id = self.named
        return news

    def ended(self) -> bool:
        """Whether a call that ended well was the last one. If not, the job was ended as if nobody waited for it: the
        same request becomes another job. Raises BrokenStream, and AioRpcError where that job has ended so as well, and
        brought nothing new."""
        if not self._abandoned:
            self.merged.check_end()
        elif not self.merged.over:
            self.request.request_id = uuid.uuid4().hex
            self._known = self._abandoned = False
            self._forsaken += 1
            if self._forsaken > 1:
                raise failed(grpc.StatusCode.UNAVAILABLE, "the job was ended again as if its caller had left")
        return self.merged.over

    def after(self, error: grpc.aio.AioRpcError, patience_s: float, accept_s: float) -> float:
        """Seconds until the next call, after one that failed, or until the deadline. Raises the error where there is
        none."""
        code, wait = error.code(), retry_after(error)
        if any(key == ACCEPTED for key, _ in error.initial_metadata() or ()):
            self._accepted()
        if code is grpc.StatusCode.NOT_FOUND and self._attaching:
            self._known = False
            return 0.0
        busy = code is grpc.StatusCode.RESOURCE_EXHAUSTED and wait is not None
        # Whoever took it served its model: that will be known again.
        forgotten = code is grpc.StatusCode.NOT_FOUND and self._taken
        self._may_run = self._may_run or cut_off(error)
        if self.merged.over or not (busy or forgotten or cut_off(error)):
            # A deadline that passed here may not have reached a gateway that stands still.
            late = self._until is not None and code is grpc.StatusCode.DEADLINE_EXCEEDED
            self.given_up = late and not self.merged.over
            raise error
        now = time.monotonic()
        self._failed_at = self._failed_at if self.failures else now
        self.failures += 1
        pause = self._pause(wait or 0.0, busy=busy)
        patience = patience_s if self._taken else accept_s
        tired = self.failures >= self._gateways and now + pause > self._failed_at + patience
        late = self._until is not None and now + pause >= self._until
        # What no gateway has taken was refused, and that is what its caller should know.
        if tired or (late and busy and not self._taken):
            self.given_up = self._may_run
            raise error
        self._trouble = f"; the last one failed: {code.name}: {error.details()}"
        return pause if self._until is None else min(pause, max(self._until - now, 0.0))

    def _accepted(self) -> None:
        self._known = self._taken = self._may_run = True

    def _less_abandoned(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        if self.dropped or not any(chunk.abandoned for chunk in response.chunks):
            return response
        self._abandoned = True
        rest = inference_pb2.GenerateResponse(request_id=response.request_id)
        rest.chunks.extend(chunk for chunk in response.chunks if not chunk.abandoned)
        return rest

    def _pause(self, told: float, *, busy: bool) -> float:
        first, longest = PAUSE_S
        rounds = (self.failures - 1) // self._gateways
        pause = min(first * 2.0 ** min(rounds, 16), longest) * random.uniform(0.5, 1)
        # What one gateway says of itself does not hold for the others, unless it is full: they fill the same queues.
        if busy or self.failures % self._gateways == 0:
            pause = max(pause, told * random.uniform(1, 1.2))
        return pause


class Attaching(Asking):
    """A job that was asked for before, on its way to a reader who has tokens of it up to `after`: its payload is not
    known here, so it is never asked for again, and its end is what the fleet says. `watch`: it only looks on."""

    def __init__(self, request_id: str, after: Mapping[int, int], gateways: int, *, watch: bool) -> None:
        request = inference_pb2.GenerateRequest(request_id=request_id, detached=watch, caller=new_caller())
        super().__init__(request, gateways, None)
        self.merged = Merged(None, after)
        self._known = True
        self._watch = watch

    def after(self, error: grpc.aio.AioRpcError, patience_s: float, accept_s: float) -> float:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise error
        return super().after(error, patience_s, accept_s)

    def _less_abandoned(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        return response


def prepared(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    """The request with an id and, where it draws, a seed: whoever runs it, and however often, gives the same tokens."""
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.request_id = asked.request_id or uuid.uuid4().hex
    greedy = asked.sampling.HasField("temperature") and asked.sampling.temperature < GREEDY
    if not greedy and not asked.sampling.HasField("seed"):
        digest = hashlib.sha256(asked.request_id.encode()).digest()
        asked.sampling.seed = int.from_bytes(digest[:8], "big")
    return asked


def new_caller() -> str:
    """A name for one who asks, whatever calls it takes: no two have the same."""
    return uuid.uuid4().hex


def failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """An error of the client's own."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def cut_off(error: grpc.aio.AioRpcError) -> bool:
    """Whether it tells of the way to a gateway, or of what is behind it, and not of the request."""
    if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED):
        # The library's words for a connection that broke in the middle of a call.
        return any(words in (error.details() or "") for words in ("RST_STREAM", "Stream removed"))
    return error.code() is grpc.StatusCode.UNAVAILABLE


def retry_after(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds that a gateway asks to wait for; None: it does not say."""
    told = next((value for key, value in error.trailing_metadata() or () if key == RETRY_AFTER), "")
    try:
        return max(int(told), 0) / 1000
    except ValueError:
        return None
