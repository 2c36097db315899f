"""How `octavo top` looks, on terminals wide and narrow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.top_figures import Figures, View
from ops.top_lines import COLUMNS, lines

BUSY = Figures(
    *("w0", "ready", "", "m"),
    *(2, 1, 8),
    *(3, 2, 1.5),
    *(5, 3, 10),
    0.25,
    output_tok_s=1234.5,
    computed_tok_s=5000.0,
    hit_rate=0.75,
    step_ms=12.34,
    busy=0.5,
)
OPEN = replace(BUSY, worker="w1", circuit="open", undelivered=0, pending=0, oldest_s=0.0, hit_rate=None)
GONE = Figures("w2", "gone", "", "", 0, 0, 0, 2, 1, 4.0, 0, 0, 0, None)
TOTAL = replace(BUSY, worker="total", state="", running=4, max_running=16, heartbeat_age_s=None)
LEDGER = {"accepted": 1200, "finished": 1190, "failed": 0, "cancelled": 2, "expired": 0, "dead": 0, "in_flight": 8}
SHOWN = View((BUSY, OPEN, GONE), TOTAL, {**LEDGER, "missing": 0})


def texts(width: int = 200, height: int = 50, *, shown: View | None = SHOWN, trouble: str = "") -> list[str]:
    return [line.text for line in lines("octavo top: here", trouble, shown, width=width, height=height)]


def test_where_there_is_room_all_is_shown() -> None:
    assert texts() == [
        "octavo top: here",
        "worker  state         run  wait  queue  oldest     pool  hits  tok/s  computed/s     step  busy    beat",
        "w0      ready         2/8     1    3+2   1.5 s  50%+30%   75%  1,234       5,000  12.3 ms   50%  250 ms",
        "w1      ready, open   2/8     1    0+0       0  50%+30%     -  1,234       5,000  12.3 ms   50%  250 ms",
        "w2      gone            -     -    2+1   4.0 s        -     -      -           -        -     -       -",
        "total                4/16     1    3+2   1.5 s  50%+30%   75%  1,234       5,000  12.3 ms   50%       -",
        "ledger: accepted 1,200, finished 1,190, cancelled 2, in flight 8, adds up",
        "no jobs, as the last ones failed: w1 (open)",
    ]


@pytest.mark.parametrize("width", range(1, 121))
def test_no_line_is_wider_than_the_terminal_and_none_is_missing(width: int) -> None:
    told = texts(width)
    assert len(told) == len(texts())
    assert max(map(len, told)) <= width


def test_the_least_important_columns_go_first() -> None:
    ranked = [column.name for column in sorted(COLUMNS, key=lambda column: column.rank)]
    assert ranked[:4] == ["run", "state", "queue", "tok/s"]
    seen = []
    for width in range(120, 7, -1):
        names = texts(width)[1].split()[1:]
        assert set(names) == set(ranked[: len(names)])
        seen.append(len(names))
    assert (seen[0], seen[-1]) == (len(COLUMNS), 0)
    assert texts(30)[1:3] == ["worker  state         run", "w0      ready         2/8"]


def test_long_names_are_cut_where_there_is_no_room_for_them() -> None:
    long = replace(BUSY, worker="host-with-a-long-name-w0")
    shown = View((long,), TOTAL, SHOWN.ledger)
    assert texts(200, shown=shown)[2].startswith("host-with-a-long-name-w0  ready")
    assert texts(32, shown=shown)[1:3] == ["worker        state   run  queue", "host-with-a…  ready   2/8    3+2"]


def test_of_many_workers_the_first_ones_are_shown_and_the_rest_is_counted() -> None:
    many = replace(SHOWN, workers=tuple(replace(BUSY, worker=f"w{number:02}") for number in range(40)))
    told = texts(height=24, shown=many)
    assert len(told) == 24
    assert [line.split()[0] for line in told[2:21]] == [*(f"w{number:02}" for number in range(19))]
    assert told[21].startswith("total")
    assert told[22:] == ["... and 21 more workers", texts()[6]]
    exact = texts(height=44, shown=many)
    assert len(exact) == 44
    assert not any("more workers" in line for line in exact)


@pytest.mark.parametrize("height", range(1, 12))
def test_no_screen_is_too_low(height: int) -> None:
    assert len(texts(height=height)) == min(height, 8)


def test_what_is_wrong_is_told_and_is_red() -> None:
    told = lines("octavo top: here", "there: gone", replace(SHOWN, ledger={**LEDGER, "missing": 3}), width=99, height=9)
    assert (told[1].text, told[1].style) == ("there: gone", "red")
    assert [line.style for line in told[2:]] == ["bold", "", "red", "red", "bold", "red", "red"]
    assert "+3 MISSING" in told[7].text
    draining = replace(SHOWN, workers=(replace(BUSY, state="draining"),))
    assert lines("", "", draining, width=99, height=9)[2].style == "yellow"


def test_before_anything_was_read_there_is_only_the_trouble() -> None:
    assert texts(shown=None, trouble="nobody answers") == ["octavo top: here", "nobody answers"]
    assert texts(shown=None) == ["octavo top: here"]
