"""docs/failures.md and docs/wire.md say what the code does: statuses and bounds."""

from __future__ import annotations

import re
from pathlib import Path

import grpc

from gateway import admission
from gateway.config import MAX_BODY_BYTES, MAX_REQUEST_BYTES
from gateway.errors import Status
from gateway.http.problems import problem_of
from kvstore import limits

DOCS = Path(__file__).parents[3] / "docs"


def test_statuses_by_grpc_are_those_by_http() -> None:
    rows = re.findall(r"^\| ([A-Z_]+), (\d+) \| (.{10,}?) \|", (DOCS / "failures.md").read_text(), re.MULTILINE)
    assert len(rows) == 11
    for name, number, _ in rows:
        assert problem_of(Status(grpc.StatusCode[name], "x"), chat=True).status == int(number), name


def test_bounds_are_those_of_the_code() -> None:
    table = (DOCS / "wire.md").read_text().partition("## Bounds")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([a-z].+?) \| (.+?) \|$", table, re.MULTILINE))
    assert rows == {
        "what": "at most",
        "choices of a request (`n`)": str(limits.MAX_CHOICES),
        "stop strings, stop tokens": f"{limits.MAX_STOPS} of {limits.MAX_STOP_BYTES} bytes, {limits.MAX_STOP_TOKENS}",
        "biased tokens": str(limits.MAX_BIASES),
        "log-probabilities beside each token": str(limits.MAX_TOP),
        "messages, tools of a chat": f"{admission.MAX_MESSAGES}, {admission.MAX_TOOLS}",
        "schema or expression of a structure": f"{limits.MAX_STRUCTURE_BYTES // 1024} KiB, and a second to compile",
        "request by gRPC, body by HTTP": f"{MAX_REQUEST_BYTES // 2**20} MiB, {MAX_BODY_BYTES // 2**20} MiB",
        "request id, caller, cache salt": f"{limits.MAX_REQUEST_ID} characters, 64 characters, "
        f"{limits.MAX_SALT_BYTES} bytes",
        "prompt and answer together": "`context_length` of `GetModel`",
        "output of an ended job is kept": "ten minutes",
    }
    assert admission.CALLER.fullmatch("a" * 64)
    assert not admission.CALLER.fullmatch("a" * 65)
