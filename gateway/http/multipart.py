"""Forms with files (multipart/form-data), as their bytes come. Pure: it holds no more than a head or a delimiter."""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING, Final

from gateway.http.problems import Failed, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HEAD: Final = 8192
"""Bytes of a part's head."""
MAX_PARTS: Final = 32
MAX_BOUNDARY: Final = 70


@dataclass(frozen=True, slots=True)
class Field:
    """A part begins."""

    name: str
    filename: str | None
    """None: it is no file."""


class Form:
    """``feed`` it with all that comes, then ``end``. All raise Failed for what is no form."""

    def __init__(self, content_type: str) -> None:
        """Of the request."""
        told = _parsed(content_type)
        boundary = told.get_param("boundary")
        if told.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
            limit = "must be multipart/form-data, with a boundary"
            raise Failed(Problem(415, f"content-type is {content_type[:64]!r}: {limit}"))
        if len(boundary) > MAX_BOUNDARY or not boundary.isascii():
            raise Failed(Problem(400, f"the form's boundary must have at most {MAX_BOUNDARY} ASCII characters"))
        self._delimiter = b"\r\n--" + boundary.encode()
        self._held = b"\r\n"  # the first delimiter may have no line before it
        self._step = self._preamble
        self._parts = 0
        self._ended = False

    def feed(self, data: bytes) -> Iterator[Field | bytes]:
        """What has come: parts' beginnings, and what is in them."""
        self._held += data
        while True:
            found = self._step()
            if found is None:
                return
            if found != b"":
                yield found

    def end(self) -> None:
        """Nothing else comes."""
        if not self._ended:
            raise _broken("it ends in the middle of a part")

    def _preamble(self) -> Field | bytes | None:
        _, found, rest = self._held.partition(self._delimiter)
        if not found:
            self._held = self._held[1 - len(self._delimiter) :]
            return None
        self._held, self._step = rest, self._behind
        return b""

    def _data(self) -> Field | bytes | None:
        data, found, rest = self._held.partition(self._delimiter)
        if found:
            self._held, self._step = rest, self._behind
            return data
        # What may be the beginning of a delimiter waits for the rest.
        whole = max(0, len(self._held) + 1 - len(self._delimiter))
        data, self._held = self._held[:whole], self._held[whole:]
        return data or None

    def _behind(self) -> Field | bytes | None:
        """Behind a delimiter: another part, or the end."""
        if len(self._held) < 2:
            return None
        if self._held.startswith(b"--"):
            self._ended, self._step = True, self._epilogue
            return b""
        if not self._held.startswith(b"\r\n"):
            raise _broken("a delimiter must end its line")
        self._step = self._head
        return b""

    def _head(self) -> Field | bytes | None:
        head, found, rest = self._held.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD:
            raise _broken(f"a part's head must have at most {MAX_HEAD} bytes")
        if not found:
            return None
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it must have at most {MAX_PARTS} parts")
        self._held, self._step = rest, self._data
        return _field(head)

    def _epilogue(self) -> Field | bytes | None:
        self._held = b""
        return None


def _field(head: bytes) -> Field:
    for line in head.decode(errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            told = Message()
            told["content-disposition"] = value.strip()
            field = told.get_param("name", header="content-disposition")
            if isinstance(field, str):
                return Field(field, told.get_filename())
    raise _broken("a part has no name")


def _parsed(content_type: str) -> Message:
    told = Message()
    told["content-type"] = content_type
    return told


def _broken(why: str) -> Failed:
    return Failed(Problem(400, f"the form is broken: {why}"))
