"""Files that clients send: to disk as they come, within bounds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gateway.batch.files import INPUT
from gateway.errors import shown
from gateway.http.bodies import READ_S, check_head, discard, too_large
from gateway.http.multipart import Field, Form
from gateway.http.problems import Failed, Problem

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from gateway.batch.files import Files, NewFile, StoredFile
    from gateway.http.desk import Desk

AT_ONCE: Final = 4
"""Files that are taken at the same time. The others' senders wait."""
AROUND: Final = 64 * 1024
"""Bytes that a form may have besides its file."""
BLOCK: Final = 1 << 20
"""Bytes that are written at once."""
MAX_FIELD: Final = 256
"""Bytes of a field that is no file."""
LONGEST_S: Final = 900.0
"""How long all of a file may take to come; nothing at all may come for ``READ_S``."""
DISCARDED: Final = 4
"""Times the limit that is read of a refused one, and thrown away: most clients look for an answer only behind it."""
DISCARD_S: Final = 120.0


@dataclass(slots=True)
class _Form:
    """What of a form has come."""

    file: NewFile
    filename: str | None = None
    """None: there was no file yet."""
    fields: dict[str, bytearray] = field(default_factory=dict)
    pending: bytearray = field(default_factory=bytearray)
    """Of the file, not yet written."""
    part: str = ""

    def take(self, event: Field | bytes, limit: int) -> None:
        """Raises Failed."""
        if isinstance(event, Field):
            self.part = event.name
            if event.name != "file":
                self.fields[event.name] = bytearray()
            elif self.filename is not None:
                raise Failed(Problem(400, "file is there twice: must be one file", param="file"))
            else:
                self.filename = event.filename or "file"
        elif self.part == "file":
            self.pending += event
            if self.file.size + len(self.pending) > limit:
                raise too_large("file", limit)
        elif len(self.fields[self.part]) + len(event) <= MAX_FIELD:
            self.fields[self.part] += event
        else:
            message = f"{self.part[:64]} has more than {MAX_FIELD} bytes: must have at most as many"
            raise Failed(Problem(400, message, param=self.part[:64]))

    def check(self) -> None:
        """Whether it is all that an upload must be. Raises Failed."""
        purpose = self.fields.pop("purpose", None)
        if purpose is None or purpose != INPUT.encode():
            told = "not set" if purpose is None else shown(purpose.decode(errors="replace"))
            raise Failed(Problem(400, f"purpose is {told}: must be {INPUT!r}", param="purpose"))
        if other := next((name for name in self.fields if name.startswith("expires_after")), None):
            message = f"{other[:64]} is set: is not taken here; delete the file when it is no longer needed"
            raise Failed(Problem(400, message, param=other[:64]))
        if self.filename is None:
            raise Failed(Problem(400, "file is not set: a file is needed", param="file"))


class Uploads:
    """Takes files of at most `limit` bytes."""

    def __init__(self, desk: Desk, limit: int) -> None:
        self._desk = desk
        self._limit = limit
        self._room = asyncio.Semaphore(AT_ONCE)

    async def read(self, request: Request, files: Files) -> StoredFile:
        """The file that a form brings, kept among these. Raises Failed, OSError."""
        parts = request.stream()
        try:
            check_head(request, "multipart/form-data", self._limit + AROUND)
            form = Form(request.headers["content-type"])
            async with self._room:
                return await self._taken(form, parts, files)
        except Failed:
            if "expect" not in request.headers:  # else it waits to be told whether to send it
                await discard(parts, DISCARDED * self._limit, DISCARD_S)
            raise

    async def _taken(self, form: Form, parts: AsyncGenerator[bytes, None], files: Files) -> StoredFile:
        new = await self._desk.run(files.new)
        try:
            got = _Form(new)
            async with asyncio.timeout(LONGEST_S):
                await self._receive(form, got, parts)
            form.end()
            got.check()
            await self._write(got)
            name = got.filename or ""
            return await self._desk.run(lambda: new.keep(name, INPUT, int(time.time())))
        except TimeoutError:
            message = f"nothing of the file came for {READ_S:g} s, or not all within {LONGEST_S:g} s"
            raise Failed(Problem(408, message, headers={"connection": "close"})) from None
        finally:
            await self._desk.run(new.drop)

    async def _receive(self, form: Form, got: _Form, parts: AsyncGenerator[bytes, None]) -> None:
        while True:
            async with asyncio.timeout(READ_S):
                part = await anext(parts, None)
            if part is None:
                return
            for event in form.feed(part):
                got.take(event, self._limit)
            if len(got.pending) >= BLOCK:
                await self._write(got)

    async def _write(self, got: _Form) -> None:
        data, got.pending = got.pending, bytearray()
        await self._desk.run(lambda: got.file.write(data))
