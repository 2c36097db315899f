"""Uploads, as they come: no sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import ClientDisconnect, Request

from gateway.batch.files import Files
from gateway.http import uploads as module
from gateway.http.problems import Failed
from gateway.http.uploads import AROUND, Uploads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT = 100


class Desk:
    """Stands where that of files and batches does. Nothing takes a thread."""

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


class Sender:
    """A client that sends what it is told to, as far as it is read."""

    def __init__(self, *parts: bytes, length: int | None = None, end: bool = True) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for part in parts:
            self.messages.put_nowait({"type": "http.request", "body": part, "more_body": True})
        if end:
            self.messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        head = [(b"content-type", b"multipart/form-data; boundary=bo")]
        if length is not None:
            head.append((b"content-length", str(length).encode()))
        self.request = Request({"type": "http", "headers": head}, self.messages.get)


def part(name: str, content: bytes, filename: str = "") -> bytes:
    told = f'; filename="{filename}"' if filename else ""
    return f'--bo\r\nContent-Disposition: form-data; name="{name}"{told}\r\n\r\n'.encode() + content + b"\r\n"


def left(folder: Path) -> list[Path]:
    return list(folder.iterdir())


PURPOSE, END = part("purpose", b"batch"), b"--bo--\r\n"


@pytest.fixture
def uploads() -> Uploads:
    return Uploads(Desk(), LIMIT)  # type: ignore[arg-type]


async def test_a_file_comes_in_parts_before_or_behind_its_purpose(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 7)
    content = bytes(range(LIMIT))
    for form in (PURPOSE + part("file", content, "a.jsonl"), part("file", content, "a.jsonl") + PURPOSE):
        form += END
        sender = Sender(*(form[at : at + 9] for at in range(0, len(form), 9)))
        told = await uploads.read(sender.request, Files(tmp_path))
        assert (told.filename, told.purpose, told.bytes) == ("a.jsonl", "batch", LIMIT)
        assert (tmp_path / told.id / "content").read_bytes() == content


@pytest.mark.parametrize(
    ("form", "status", "told"),
    [
        (PURPOSE + part("file", b"x" * (LIMIT + 1)), 413, "the file is too large: must have at most 100 bytes"),
        (part("file", b"x"), 400, "purpose is not set: must be 'batch'"),
        (part("purpose", b"vision") + part("file", b"x"), 400, "purpose is 'vision': must be 'batch'"),
        (PURPOSE, 400, "file is not set: a file is needed"),
        (PURPOSE + part("file", b"x") * 2, 400, "file is there twice: must be one file"),
        (part("purpose", b"x" * 257), 400, "purpose has more than 256 bytes"),
        (PURPOSE + part("expires_after[seconds]", b"9") + part("file", b"x"), 400, "expires_after[seconds] is set"),
    ],
)
async def test_what_is_refused_leaves_nothing(
    uploads: Uploads, tmp_path: Path, form: bytes, status: int, told: str
) -> None:
    sender = Sender(form + END, b"more")
    with pytest.raises(Failed) as refused:
        await uploads.read(sender.request, Files(tmp_path))
    assert refused.value.problem.status == status
    assert refused.value.problem.message.startswith(told)
    assert left(tmp_path) == []
    assert sender.messages.empty(), "the rest is read, so that the client sees why"


async def test_what_says_that_it_is_too_long_is_refused_before_any_of_it_is_kept(
    uploads: Uploads, tmp_path: Path
) -> None:
    with pytest.raises(Failed) as refused:
        await uploads.read(Sender(PURPOSE, length=LIMIT + AROUND + 1).request, Files(tmp_path))
    assert refused.value.problem.status == 413
    assert left(tmp_path) == []


async def test_a_client_that_sends_nothing_more_or_leaves_keeps_nothing(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_S", 0.01)
    with pytest.raises(Failed) as refused:
        await uploads.read(Sender(PURPOSE, end=False).request, Files(tmp_path))
    assert refused.value.problem.status == 408
    sender = Sender(PURPOSE, end=False)
    sender.messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(ClientDisconnect):
        await uploads.read(sender.request, Files(tmp_path))
    assert left(tmp_path) == []


async def test_so_many_are_taken_at_once(uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    senders = [Sender(PURPOSE, end=False) for _ in range(module.AT_ONCE + 1)]
    reading = [asyncio.create_task(uploads.read(each.request, Files(tmp_path))) for each in senders]
    async with asyncio.timeout(5):
        while any(not each.messages.empty() for each in senders[:-1]):  # noqa: ASYNC110 (nothing to await)
            await asyncio.sleep(0)
    assert not senders[-1].messages.empty()
    for sender in senders:
        for data in (part("file", b"x") + END, b""):
            sender.messages.put_nowait({"type": "http.request", "body": data, "more_body": bool(data)})
    async with asyncio.timeout(5):
        assert {each.bytes for each in await asyncio.gather(*reading)} == {1}
