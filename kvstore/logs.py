"""How gateways and workers log: a line for people, or a JSON object for machines; what is about a job names it."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, Any, Final

import click

TEXT: Final = "text"
JSON: Final = "json"
FORMATS: Final = (TEXT, JSON)
_FIELD: Final = "request_id"
_NOTE: Final = "request "


def about(request_id: str) -> dict[str, str]:
    """The ``extra`` of a line about a job."""
    return {_FIELD: request_id}


def note(error: BaseException, request_id: str) -> None:
    """Has an error say which request it ended, for who logs it further up."""
    error.add_note(f"{_NOTE}{request_id}")


def noted(error: BaseException) -> dict[str, str]:
    """The ``extra`` of a line about an error that ended a request; empty where none was noted."""
    notes = [each for each in getattr(error, "__notes__", ()) if each.startswith(_NOTE)]
    return about(notes[-1].removeprefix(_NOTE)) if notes else {}


class TextLines(logging.Formatter):
    """Time, level, logger and message; and the job's id, where the message does not have it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's
        told, request_id = super().formatMessage(record), _id_of(record)
        return told if request_id in record.message else f"{told} ({_NOTE}{request_id})"


class JsonLines(logging.Formatter):
    """One JSON object in ASCII on each line: time (UTC), level, logger, message, what is the same for the whole
    process, request_id where a line is about one, and exception, a traceback, where there was one."""

    def __init__(self, **process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = divmod(int(1000 * record.created), 1000)
        told = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        if request_id := _id_of(record):
            told[_FIELD] = request_id
        if record.exc_info and record.exc_info[0] is not None:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


class Ends(click.ClickException):
    """What ends a process: told as all else that it logs."""

    def __init__(self, message: str, form: str) -> None:
        super().__init__(message)
        self._form = form

    def show(self, file: IO[Any] | None = None) -> None:
        if self._form == JSON:
            logging.getLogger("octavo").critical("%s", self.message)
        else:
            super().show(file)


def configure(form: str, **process: str) -> None:
    """Sends what a process logs to stderr. ``form``: one of FORMATS; ``process``: what every JSON object is to have."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(**process) if form == JSON else TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _id_of(record: logging.LogRecord) -> str:
    return str(getattr(record, _FIELD, ""))
