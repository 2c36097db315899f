"""Files and batches, as OpenAI's API tells of them. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from gateway.batch.files import output_id
from gateway.errors import AdmissionError, shown
from kvstore.batches import BatchState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.batch.files import StoredFile
    from kvstore.batches import Batch

_LINE: Final = re.compile(r"line (\d+): ")
_PUBLISHED: Final = (BatchState.COMPLETED, BatchState.CANCELLED)


def file_object(file: StoredFile) -> dict[str, Any]:
    """A file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_s,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "expires_at": None,
    }


def batch_object(batch: Batch) -> dict[str, Any]:
    """A batch that was made of an uploaded file."""
    at, state, settings = batch.progress, batch.state, batch.settings
    there = state in _PUBLISHED
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": settings.endpoint,
        "errors": _errors(batch.error) if state is BatchState.FAILED else None,
        "input_file_id": settings.input_file,
        "completion_window": "24h",
        "status": _status(batch),
        "output_file_id": output_id(batch.id, failed=False) if there and at.done else None,
        "error_file_id": output_id(batch.id, failed=True) if there and at.failed else None,
        "created_at": batch.created_ms // 1000,
        "in_progress_at": batch.started_ms // 1000 or None,
        "expires_at": None,
        "finalizing_at": None,
        "completed_at": _ended(batch, BatchState.COMPLETED),
        "failed_at": _ended(batch, BatchState.FAILED),
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": _ended(batch, BatchState.CANCELLED),
        "request_counts": {"total": settings.total, "completed": at.done, "failed": at.failed},
        "metadata": dict(settings.metadata) or None,
    }


def page(objects: Sequence[dict[str, Any]], query: Mapping[str, str], most: int, usual: int) -> dict[str, Any]:
    """A part of a list: behind the object that `after` names, `limit` of them. Raises AdmissionError."""
    limit, after = _limit(query.get("limit"), most, usual), query.get("after")
    start = 0
    if after:
        places = [place for place, each in enumerate(objects) if each["id"] == after]
        if not places:
            raise AdmissionError("after", shown(after), "must be the id of one that the list has")
        start = places[0] + 1
    part = list(objects[start : start + limit])
    ends = {"first_id": part[0]["id"], "last_id": part[-1]["id"]} if part else {"first_id": None, "last_id": None}
    return {"object": "list", "data": part, **ends, "has_more": start + limit < len(objects)}


def _limit(told: str | None, most: int, usual: int) -> int:
    if told is None:
        return usual
    if not (told.isascii() and told.isdigit() and len(told) < 10 and 1 <= int(told) <= most):
        raise AdmissionError("limit", shown(told), f"must be 1 to {most}")
    return int(told)


def _status(batch: Batch) -> str:
    if batch.state in (BatchState.QUEUED, BatchState.RUNNING):
        return "in_progress" if batch.settings.total else "validating"
    return str(batch.state)


def _ended(batch: Batch, state: BatchState) -> int | None:
    return batch.ended_ms // 1000 if batch.state is state else None


def _errors(told: str) -> dict[str, Any]:
    """A line for each thing that is wrong."""
    data = []
    for line in told.splitlines():
        found = _LINE.match(line)
        number = int(found[1]) if found else None
        code = "invalid_line" if found else "failed"
        data.append({"code": code, "line": number, "message": line, "param": None})
    return {"object": "list", "data": data}
