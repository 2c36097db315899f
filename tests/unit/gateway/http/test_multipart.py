"""Forms, however their bytes are cut."""

from __future__ import annotations

import pytest

from gateway.http import multipart
from gateway.http.multipart import Field, Form
from gateway.http.problems import Failed

KIND = 'multipart/form-data; boundary="bo"'
FORM = (
    b'--bo\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--bo\r\nx: y\r\ncontent-disposition: form-data; name=file; filename="\xc3\xa4.jsonl"\r\n\r\n'
    b'a\r\n--b\r\n-bo\r\n\r\n--bo\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n--bo--\r\nwhatever'
)


def read(data: bytes, size: int) -> list[tuple[Field, bytes]]:
    """Each part with what is in it, where so many bytes come at once."""
    form, found = Form(KIND), list[tuple[Field, bytes]]()
    for start in range(0, len(data), size):
        for event in form.feed(data[start : start + size]):
            if isinstance(event, Field):
                found.append((event, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + event)
    form.end()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_a_form_in_pieces(size: int) -> None:
    assert read(FORM, size) == [
        (Field("purpose", None), b"batch"),
        (Field("file", "ä.jsonl"), b"a\r\n--b\r\n-bo\r\n"),
        (Field("empty", None), b""),
    ]


def test_what_comes_before_the_first_part_is_passed_over() -> None:
    assert read(b"hello\r\n" + FORM, 5) == read(FORM, 5)


def test_it_holds_no_more_than_a_delimiter_of_a_file() -> None:
    form = Form(KIND)
    events = list(form.feed(FORM[: FORM.index(b"a\r\n--b\r\n-bo")] + b"x" * 100_000))
    assert sum(len(each) for each in events[-1:] if isinstance(each, bytes)) >= 100_000 - 6
    assert len(form._held) < 7


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 415),
        ("multipart/form-data", 415),
        ("multipart/form-data; boundary=" + "x" * 71, 400),
        ("multipart/form-data; boundary=é", 400),
    ],
)
def test_content_types_that_are_refused(kind: str, status: int) -> None:
    with pytest.raises(Failed) as refused:
        Form(kind)
    assert refused.value.problem.status == status


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "it ends in the middle of a part"),
        (FORM[:-14], "it ends in the middle of a part"),
        (b"--boX\r\n", "a delimiter must end its line"),
        (b"--bo\r\nx: y\r\n\r\n", "a part has no name"),
        (b"--bo\r\n" + b"x" * 9000, "a part's head must have at most 8192 bytes"),
    ],
)
def test_what_is_no_form(data: bytes, told: str) -> None:
    with pytest.raises(Failed) as refused:
        read(data, 4096)
    assert refused.value.problem.message == f"the form is broken: {told}"


def test_a_form_has_so_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "MAX_PARTS", 2)
    with pytest.raises(Failed, match="it must have at most 2 parts"):
        read(FORM, 4096)
