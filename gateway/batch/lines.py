"""The lines of a batch's file: what each asks for, and what is wrong with it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gateway.batch import bodies
from gateway.config import MAX_REQUEST_BYTES
from gateway.errors import AdmissionError, shown
from gateway.http.problems import in_openai

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from octavo.v1 import inference_pb2

MAX_LINES: Final = 50_000
MAX_BYTES: Final = 200 * 2**20
"""Of a file; both are OpenAI's bounds."""
MAX_ID: Final = 256
"""Characters of a line's id."""
MAX_TOLD: Final = 20
"""Lines whose errors are told, of one file."""
URLS: Final[Mapping[str, Callable[[Mapping[str, Any]], inference_pb2.GenerateRequest]]] = {
    "/v1/completions": bodies.completion,
    "/v1/chat/completions": bodies.chat_completion,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    number: int
    """From 1; empty lines count."""
    id: str
    url: str
    """Of a line in OpenAI's form; empty: it is in the short form."""
    request: inference_pb2.GenerateRequest
    """Without a request id."""

    @property
    def chat(self) -> bool:
        """Whether it asks for an answer to a chat, in OpenAI's form."""
        return self.url == "/v1/chat/completions"


class LineError(Exception):
    """A line that can't be run; its text says why."""


class FileError(Exception):
    """A file that is no batch; its text has a line for each thing that is wrong."""


def parse(number: int, raw: bytes) -> Line | None:
    """A line, with or without its end; None: it is empty. Raises LineError."""
    if not raw.strip():
        return None
    if len(raw) > MAX_REQUEST_BYTES:
        raise LineError(f"has {len(raw)} bytes: must have at most {MAX_REQUEST_BYTES} (4 MiB)")
    try:
        told = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise LineError(f"is no JSON: {str(error)[:200]}") from None
    if not isinstance(told, dict):
        raise LineError("must be a JSON object")
    try:
        return _openai(number, told) if "custom_id" in told or "body" in told else _short(number, told)
    except AdmissionError as error:
        message, _ = in_openai(str(error), chat="messages" in told.get("body", told))
        raise LineError(message) from None


def checked(lines: Iterable[bytes], endpoint: str = "") -> Iterator[tuple[bytes, Line]]:
    """Each line that is not empty, as it is and as it is meant; all are looked at before FileError is raised.
    `endpoint`: the url that each must have; empty: any, or none."""
    wrong: list[str] = []
    seen: dict[str, int] = {}
    size = 0
    for number, raw in enumerate(lines, 1):
        size += len(raw)
        try:
            if size > MAX_BYTES:
                raise LineError(f"is beyond {MAX_BYTES} bytes: split the file")
            if number > MAX_LINES:
                raise LineError(f"is beyond {MAX_LINES} lines: split the file")
            line = parse(number, raw)
            if line is not None and (first := seen.setdefault(line.id, number)) != number:
                raise LineError(f"id {shown(line.id)} is that of line {first} too: each must be another")
            if line is not None and endpoint and line.url != endpoint:
                raise LineError(f"url is {line.url or 'not set'}: must be the batch's endpoint, {endpoint}")
        except LineError as error:
            wrong.append(f"line {number}: {error}")
            if len(wrong) == MAX_TOLD or size > MAX_BYTES or number > MAX_LINES:
                wrong.append("what follows was not looked at")
                break
        else:
            if line is not None:
                yield raw, line
    if not seen and not wrong:
        wrong.append("there is no line in it")
    if wrong:
        raise FileError("\n".join(wrong))


def _openai(number: int, told: Mapping[str, Any]) -> Line:
    if extra := set(told) - {"custom_id", "method", "url", "body"}:
        raise LineError(f"{shown(min(extra))} is no part of a line: custom_id, method, url and body are")
    id_ = _id(told, "custom_id")
    if told.get("method", "POST") != "POST":
        raise LineError(f"method is {shown(str(told['method']))}: must be POST")
    url = told.get("url")
    if not isinstance(url, str) or url not in URLS:
        value = shown(url) if isinstance(url, str) else "not set"
        raise LineError(f"url is {value}: must be {' or '.join(URLS)}")
    if not isinstance(told.get("body"), dict):
        raise LineError("body must be a JSON object")
    return Line(number, id_, url, URLS[url](told["body"]))


def _short(number: int, told: Mapping[str, Any]) -> Line:
    id_ = _id(told, "id")
    return Line(number, id_, "", bodies.short({name: value for name, value in told.items() if name != "id"}))


def _id(told: Mapping[str, Any], name: str) -> str:
    id_ = told.get(name)
    if not isinstance(id_, str) or not 1 <= len(id_) <= MAX_ID:
        value = "not set" if id_ is None else shown(id_) if isinstance(id_, str) else type(id_).__name__
        raise LineError(f"{name} is {value}: must be text of 1 to {MAX_ID} characters")
    if not id_.isprintable():  # half a character could not be written
        raise LineError(f"{name} is {shown(id_)}: must have no characters that can't be printed")
    return id_
