"""/v1/files and /v1/batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import FileResponse, JSONResponse, Response

from gateway.batch import batches
from gateway.batch.batches import BatchUnknown
from gateway.batch.lines import MAX_BYTES
from gateway.errors import AdmissionError, shown
from gateway.http.batch_objects import batch_object, file_object, page
from gateway.http.fields import BatchFields
from gateway.http.problems import Failed, Problem
from gateway.http.translate import checked
from gateway.http.uploads import Uploads
from kvstore.batches import Batch, BatchState, Settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.auth import Caller
    from gateway.batch.files import Files
    from gateway.http.bodies import Bodies
    from gateway.http.desk import Desk

    Endpoint = Callable[..., Awaitable[Response]]

MAX_FILES: Final = 10_000
"""Of a tenant, that are kept; a list may have all of them at once."""
MAX_STORED: Final = 10 * 2**30
"""Bytes of them: with the last one it may be more."""
MAX_OPEN: Final = 100
"""Batches of a tenant that have not ended."""
MAX_BATCHES: Final = 100
"""In one part of a list."""
USUAL_BATCHES: Final = 20


class BatchApi:
    """What the paths do."""

    def __init__(self, desk: Desk, bodies: Bodies) -> None:
        self._desk = desk
        self._bodies = bodies
        self._uploads = Uploads(desk, MAX_BYTES)

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path, and who answers."""
        return [
            ("POST", "/v1/files", self.upload),
            ("GET", "/v1/files", self.files),
            ("GET", "/v1/files/{file_id}", self.file),
            ("DELETE", "/v1/files/{file_id}", self.delete),
            ("GET", "/v1/files/{file_id}/content", self.content),
            ("POST", "/v1/batches", self.create),
            ("GET", "/v1/batches", self.batches),
            ("GET", "/v1/batches/{batch_id}", self.batch),
            ("POST", "/v1/batches/{batch_id}/cancel", self.cancel),
        ]

    async def upload(self, request: Request) -> Response:
        """A file of requests, for a batch."""
        files = self._files(request)
        count, size = await self._desk.run(files.usage)
        if count >= MAX_FILES:
            raise _too_many("files", count, "delete some that are no longer needed")
        if size >= MAX_STORED:
            raise _too_many("bytes in files", size, "delete some that are no longer needed")
        return JSONResponse(file_object(await self._uploads.read(request, files)))

    async def files(self, request: Request) -> Response:
        """Those that were uploaded, and those that batches left."""
        found = await self._desk.run(self._files(request).all)
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise AdmissionError("order", shown(order), "must be asc or desc")
        told = [file_object(each) for each in found if purpose in (None, each.purpose)]
        told = told if order == "desc" else told[::-1]
        return JSONResponse(page(told, request.query_params, MAX_FILES, MAX_FILES))

    async def file(self, file_id: str, request: Request) -> Response:
        """What is known of one."""
        files = self._files(request)
        return JSONResponse(file_object(await self._desk.run(lambda: files.get(file_id))))

    async def delete(self, file_id: str, request: Request) -> Response:
        """Forgets one. A batch that was made of it goes on."""
        files = self._files(request)
        await self._desk.run(lambda: files.delete(file_id))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, file_id: str, request: Request) -> Response:
        """One, as it is."""
        files = self._files(request)
        path = await self._desk.run(lambda: files.content(file_id))
        return FileResponse(path, media_type="application/octet-stream")

    async def create(self, request: Request) -> Response:
        """A batch of an uploaded file."""
        settings = replace(await self._bodies.read(request, settings_of), tenant=_tenant(request))

        def created() -> Batch:
            place = self._desk.place
            if (count := place.store.open_of(settings.tenant)) >= MAX_OPEN:
                raise _too_many("batches that have not ended", count, "wait for one to end, or cancel some")
            return batches.adopt(place, settings)

        return JSONResponse(batch_object(await self._desk.run(created)))

    async def batches(self, request: Request) -> Response:
        """Those that were made of uploaded files, the latest first."""
        found = await self._desk.run(lambda: batches.every(self._desk.place.store))
        told = [batch_object(each) for each in found if _is_of(each, _tenant(request))]
        return JSONResponse(page(told, request.query_params, MAX_BATCHES, USUAL_BATCHES))

    async def batch(self, batch_id: str, request: Request) -> Response:
        """How far one is."""
        tenant = _tenant(request)
        return JSONResponse(batch_object(await self._desk.run(lambda: self._known(batch_id, tenant))))

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """Ends one; what is done is kept."""
        tenant = _tenant(request)

        def cancelled() -> Batch:
            if (state := self._known(batch_id, tenant).state).ended and state is not BatchState.CANCELLED:
                message = f"batch {batch_id} is {state}: only one that has not ended can be cancelled"
                raise Failed(Problem(409, message, code="batch_ended"))
            batches.cancel(self._desk.place.store, batch_id)
            return self._known(batch_id, tenant)

        return JSONResponse(batch_object(await self._desk.run(cancelled)))

    def _files(self, request: Request) -> Files:
        return self._desk.place.files(_tenant(request))

    def _known(self, batch_id: str, tenant: str) -> Batch:
        batch = batches.status(self._desk.place.store, batch_id)
        if not _is_of(batch, tenant):  # as if there were none
            raise BatchUnknown(batch_id)
        return batch


def _tenant(request: Request) -> str:
    """Whose key the request came with: whoever let it in has noted that."""
    caller: Caller = request.state.caller
    return caller.tenant


def _is_of(batch: Batch, tenant: str) -> bool:
    """Whether it is a tenant's, and was made of an uploaded file: others are of `octavo batch submit`."""
    return batch.settings.tenant == tenant and bool(batch.settings.input_file)


def settings_of(body: dict[str, Any]) -> Settings:
    """Of POST /v1/batches; nobody's yet. Raises AdmissionError."""
    fields = checked(BatchFields, body)
    if fields.output_expires_after is not None:
        raise AdmissionError("output_expires_after", "set", "is not taken here; delete the files, once they are read")
    return Settings(
        name=fields.input_file_id,
        metadata=fields.metadata or {},
        in_flight=0,
        input_file=fields.input_file_id,
        endpoint=fields.endpoint,
    )


def _too_many(what: str, count: int, advice: str) -> Failed:
    return Failed(Problem(429, f"there are {count} {what}, as many as there may be: {advice}", "rate_limit_error"))
