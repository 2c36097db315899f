"""What `octavo generate` prints: of whole answers, and of those that were cut off."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from ops.answer import plain
from ops.console import emit, emit_json, note

if TYPE_CHECKING:
    from octavo.v1 import inference_pb2
    from ops.answer import Answer


class Printer:
    """Shows one call's answer on stdout: its text as it comes, or JSON, or several answers each when it has ended.

    Prints nothing where there is nothing.
    """

    def __init__(self, answer: Answer, *, as_json: bool) -> None:
        self._answer = answer
        self._json = as_json
        self._open_line = False

    @property
    def _several(self) -> bool:
        return self._answer.n > 1

    def text(self, text: str) -> None:
        """Text that came to the first choice."""
        if text and not (self._json or self._several):
            self._open_line = True
            sys.stdout.write(text)
            sys.stdout.flush()

    def response(self, response: inference_pb2.GenerateResponse) -> None:
        """What has just been added to the answer."""
        if not self._several:
            return
        for chunk in response.chunks:
            if self._json:
                emit(json.dumps(chunk_as_dict(chunk)))
            elif chunk.finish:
                self._heading(chunk.choice)

    def aside(self, line: str) -> None:
        """A line for people, on stderr; on a terminal it does not go on behind the answer so far."""
        if self._open_line and sys.stdout.isatty():
            click.echo(err=True)
        note(line)

    def end(self) -> None:
        """The answer is whole."""
        if self._json:
            self._about()
        elif self._open_line:
            emit("")

    def cut(self, finish: str, error: str, *, even_empty: bool) -> None:
        """The answer ends here: all of it that has no end yet gets this one. `even_empty`: JSON is printed even if
        nothing has come."""
        shown = even_empty or self._answer.received
        ended = self._answer.cut(finish, error)
        if self._json and shown:
            if self._several:
                for index in ended:
                    emit(json.dumps({"choice": index, "finish": finish, "error": error}))
            self._about()
        elif self._several and not self._json:
            for index in ended:
                if self._answer.choices[index].text:
                    self._heading(index)
        elif self._open_line:
            emit("")

    def _about(self) -> None:
        if self._several:
            emit(json.dumps(self._answer.about()))
        else:
            emit_json(self._answer.as_dict())

    def _heading(self, index: int) -> None:
        choice = self._answer.choices[index]
        emit(f"--- choice {choice.index} of {self._answer.n} ({choice.finish})\n{choice.text}\n")


def chunk_as_dict(chunk: inference_pb2.Chunk) -> dict[str, Any]:
    """For the lines of `--json`: which choice, and what is new of it. Once a choice has `finish` it has ended; what
    ended it is named as in the JSON of one answer."""
    news = {name: value for name, value in plain(chunk).items() if value and name not in ("choice", "start")}
    told: dict[str, Any] = {"choice": chunk.choice, **news}
    if not chunk.finish:
        del told["finish"]
    if chunk.HasField("stop_token"):
        told["stop_token"] = chunk.stop_token
    return told
