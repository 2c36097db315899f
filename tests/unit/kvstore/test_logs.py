"""How lines of the log look, and that what is about a job names it and tells nothing of what it was asked."""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from kvstore.logs import JSON, TEXT, Ends, JsonLines, TextLines, about, note, noted

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
SECRETS = {
    "prompt",
    "text",
    "payload",
    "messages",
    "message",
    "token_ids",
    "chunk",
    "job",
    "request",
    "url",
    "password",
}
"""What holds words of callers, or of their keys."""


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("gateway.ending", logging.WARNING, "ending.py", 7, message, arguments, None)
    made.created = 1796074684.0129
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_line_of_json_says_all_in_ascii() -> None:
    lines = JsonLines(role="gateway", incarnation="00ff")
    told = lines.format(record("job %s ended:\nnot so: ü", "r1", **about("r1")))
    assert told.isascii()
    assert "\n" not in told
    assert json.loads(told) == {
        "time": "2026-11-30T21:38:04.012Z",
        "level": "WARNING",
        "logger": "gateway.ending",
        "message": "job r1 ended:\nnot so: ü",
        "role": "gateway",
        "incarnation": "00ff",
        "request_id": "r1",
    }
    assert "request_id" not in json.loads(lines.format(record("draining: %d running", 3)))


def test_a_traceback_is_a_field_of_its_line() -> None:
    try:
        raise ValueError("what")
    except ValueError:
        told = json.loads(JsonLines().format(record("it fails", exc_info=sys.exc_info())))
    assert told["message"] == "it fails"
    assert told["exception"].startswith("Traceback (most recent call last):\n")
    assert told["exception"].endswith("\nValueError: what")


def test_a_line_of_text_has_the_id_once() -> None:
    lines = TextLines()
    assert lines.format(record("job %s ended", "r1", **about("r1"))).endswith(" WARNING gateway.ending: job r1 ended")
    assert lines.format(record("internal error 1a", **about("r1"))).endswith(": internal error 1a (request r1)")
    assert lines.format(record("draining")).endswith(": draining")


def test_an_error_tells_which_request_it_ended() -> None:
    error = ValueError("x")
    assert noted(error) == {}
    error.add_note("made of glass")
    note(error, "r1")
    note(error, "r2")
    assert noted(error) == {"request_id": "r2"}


def test_what_ends_a_process_is_told_as_its_log_is(caplog: pytest.LogCaptureFixture) -> None:
    for form, said in ((TEXT, "Error: the broker is away\n"), (JSON, "")):

        @click.command()
        def command(form: str = form) -> None:
            raise Ends("the broker is away", form)

        ran = CliRunner().invoke(command)
        assert (ran.exit_code, ran.output) == (1, said)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [("CRITICAL", "the broker is away")]


def calls(source: str) -> Iterator[ast.Call]:
    """Those that log."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and re.fullmatch(r"(self\._)?(logger|log)", ast.unparse(node.func.value))
        ):
            yield node


def names(call: ast.Call) -> set[str]:
    """What its arguments are called: of `orphan.request_id`, `request_id`. What `shown_url` makes is no secret."""
    arguments = [each for each in call.args if not ast.unparse(each).startswith("shown_url(")]
    told = [each for argument in arguments for each in ast.walk(argument)]
    inner = {id(each.value) for each in told if isinstance(each, ast.Attribute)}
    found = {each.attr for each in told if isinstance(each, ast.Attribute) and id(each) not in inner}
    return found | {each.id for each in told if isinstance(each, ast.Name) and id(each) not in inner}


def faults(source: str) -> list[str]:
    """Lines that name a job in their words alone, or that may tell what somebody has said."""
    wrong = []
    for call in calls(source):
        named = {keyword.arg for keyword in call.keywords}
        if ("request_id" in names(call) and "extra" not in named) or names(call) & SECRETS:
            wrong.append(ast.unparse(call))
    return wrong


@pytest.mark.parametrize("package", ["kvstore", "gateway", "worker"])
def test_lines_about_jobs_name_them_and_tell_no_secrets(package: str) -> None:
    sources = [path.read_text() for path in sorted((ROOT / package).rglob("*.py"))]
    assert sum(len(list(calls(source))) for source in sources) > 5
    assert [fault for source in sources for fault in faults(source)] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("logger.info('job %s', request_id)", True),
        ("logger.info('job %s', orphan.request_id)", True),
        ("logger.info('job %s', *(orphan.request_id, 1))", True),
        ("logger.info('job %s', orphan.request_id, extra=about(orphan.request_id))", False),
        ("log.warning('it asked %r', request.prompt)", True),
        ("log.warning('it asked %r', job)", True),
        ("logger.error('%s', error, extra=noted(error))", False),
        ("self._logger.error('%s', self._what)", False),
        ("metrics.info(request_id)", False),
        ("logger.log(level, 'broker at %s', shown_url(config.url))", False),
        ("logger.log(level, 'broker at %s', config.url)", True),
    ],
)
def test_the_rule_sees_what_it_should(line: str, wrong: bool) -> None:
    assert bool(faults(line)) is wrong
