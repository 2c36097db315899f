"""Files and batches as OpenAI's API has them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.batch.files import StoredFile, output_id
from gateway.errors import AdmissionError
from gateway.http.batch_objects import batch_object, file_object, page
from gateway.http.batches import settings_of
from kvstore.batches import Batch, BatchState, Progress, Settings

SETTINGS = Settings(name="f", total=5, input_file="file-1", endpoint="/v1/completions", metadata={"a": "b"})
BODY = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


def test_a_file() -> None:
    assert file_object(StoredFile("file-1", "x.jsonl", "batch", 7, 3)) == {
        "id": "file-1",
        "object": "file",
        "bytes": 3,
        "created_at": 7,
        "filename": "x.jsonl",
        "purpose": "batch",
        "status": "processed",
        "expires_at": None,
    }


def test_a_batch_that_has_ended() -> None:
    progress = Progress(done=4, failed=1)
    told = batch_object(Batch("b", BatchState.COMPLETED, SETTINGS, progress, 1_999, 2_999, 3_999))
    assert (told["status"], told["created_at"], told["in_progress_at"], told["completed_at"]) == ("completed", 1, 2, 3)
    assert told["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
    assert told["output_file_id"] == output_id("b", failed=False)
    assert told["error_file_id"] == output_id("b", failed=True)
    assert (told["metadata"], told["errors"], told["cancelled_at"]) == ({"a": "b"}, None, None)


@pytest.mark.parametrize(
    ("state", "total", "status"),
    [
        (BatchState.QUEUED, 0, "validating"),
        (BatchState.RUNNING, 0, "validating"),
        (BatchState.RUNNING, 5, "in_progress"),
        (BatchState.QUEUED, 5, "in_progress"),  # resumed
        (BatchState.CANCELLING, 5, "cancelling"),
        (BatchState.CANCELLED, 5, "cancelled"),
        (BatchState.FAILED, 5, "failed"),
    ],
)
def test_states(state: BatchState, total: int, status: str) -> None:
    settings = Settings(total=total, input_file="file-1", endpoint="/v1/completions")
    told = batch_object(Batch("b", state, settings, Progress(done=1)))
    assert told["status"] == status
    there = state is BatchState.CANCELLED
    assert (told["output_file_id"], told["error_file_id"]) == (output_id("b", failed=False) if there else None, None)


def test_what_is_wrong_with_a_file_is_told_line_by_line() -> None:
    error = "line 2: is no JSON\nwhat follows was not looked at"
    told = batch_object(Batch("b", BatchState.FAILED, SETTINGS, error=error))
    assert told["errors"] == {
        "object": "list",
        "data": [
            {"code": "invalid_line", "line": 2, "message": "line 2: is no JSON", "param": None},
            {"code": "failed", "line": None, "message": "what follows was not looked at", "param": None},
        ],
    }


def test_lists_come_in_parts() -> None:
    told = [{"id": name} for name in "abc"]

    def part(**query: str) -> tuple[list[Any], bool]:
        found = page(told, query, 100, 2)
        assert (found["first_id"], found["last_id"]) == (
            (found["data"][0]["id"], found["data"][-1]["id"]) if found["data"] else (None, None)
        )
        return [each["id"] for each in found["data"]], found["has_more"]

    assert part() == (["a", "b"], True)
    assert part(after="b") == (["c"], False)
    assert part(after="c") == ([], False)
    assert part(limit="3") == (["a", "b", "c"], False)
    for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"after": "z"}):
        with pytest.raises(AdmissionError):
            part(**query)


def test_what_a_batch_is_made_of() -> None:
    assert settings_of({**BODY, "metadata": {"a": "b"}}) == Settings(
        name="file-1", in_flight=0, input_file="file-1", endpoint="/v1/completions", metadata={"a": "b"}
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_batches_that_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(AdmissionError) as refused:
        settings_of({**BODY, **change})
    assert refused.value.field == field
