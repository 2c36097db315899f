"""How `octavo top` looks: lines that fit a terminal's width and height. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ops.ledger import ENDS
from ops.show import age
from ops.top_figures import GONE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ops.top_figures import Figures, View

GAP: Final = "  "
SHORTEST_NAME: Final = 8
"""Of a worker, where the terminal is narrow."""
UNKNOWN: Final = "-"


class Line(NamedTuple):
    """One line of the screen."""

    text: str
    style: str = ""
    """As rich has it."""


class Column(NamedTuple):
    """One figure of each worker. Where there is no room, those of the highest ``rank`` go first."""

    name: str
    rank: int
    cell: Callable[[Figures], str]


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f}%"


def _state(row: Figures) -> str:
    return f"{row.state}, {row.circuit}" if row.circuit else row.state


def _pool(row: Figures) -> str:
    if not row.blocks_total:
        return UNKNOWN
    return f"{_percent(row.blocks_used / row.blocks_total)}+{_percent(row.blocks_cached / row.blocks_total)}"


def _step(row: Figures) -> str:
    return UNKNOWN if row.step_ms is None else f"{row.step_ms:.1f} ms"


COLUMNS: Final = (
    Column("state", 1, _state),
    Column("run", 0, lambda row: f"{row.running}/{row.max_running}" if row.max_running else UNKNOWN),
    Column("wait", 5, lambda row: str(row.waiting) if row.state != GONE else UNKNOWN),
    Column("queue", 2, lambda row: f"{row.undelivered}+{row.pending}"),
    Column("oldest", 6, lambda row: age(round(1000 * row.oldest_s))),
    Column("pool", 4, _pool),
    Column("hits", 7, lambda row: _percent(row.hit_rate)),
    Column("tok/s", 3, lambda row: _number(row.output_tok_s)),
    Column("computed/s", 9, lambda row: _number(row.computed_tok_s)),
    Column("step", 8, _step),
    Column("busy", 10, lambda row: _percent(row.busy)),
    Column("beat", 11, lambda row: UNKNOWN if row.heartbeat_age_s is None else age(round(1000 * row.heartbeat_age_s))),
)


def lines(heading: str, trouble: str, shown: View | None, *, width: int, height: int) -> list[Line]:
    """The whole screen. ``heading``: where it is from; ``trouble``: what keeps it from being newer, or did so lately.
    Of more workers than there is room for, the first ones."""
    told = [Line(_cut(heading, width), "bold")]
    if trouble:
        told.append(Line(_cut(trouble, width), "red"))
    if shown is None:
        return told[:height]
    below = _below(shown, width)
    room = height - len(told) - len(below) - 2  # the columns' names and the totals
    rows = list(shown.workers)
    left = len(rows) - max(room, 0)
    if left > 0:
        rows = rows[: max(room - 1, 0)]
        below.insert(0, Line(_cut(f"... and {len(shown.workers) - len(rows)} more workers", width), "dim"))
    names, *cells, totals = _table([*rows, shown.total], width)
    told.append(Line(names, "bold"))
    told += [Line(text, _style(row)) for text, row in zip(cells, rows, strict=True)]
    told.append(Line(totals, "bold"))
    return [*told, *below][:height]


def _below(shown: View, width: int) -> list[Line]:
    ledger = shown.ledger
    parts = [f"accepted {ledger['accepted']:,}"]
    parts += [f"{name.replace('_', ' ')} {ledger[name]:,}" for name in (*ENDS, "in_flight") if ledger[name]]
    missing = ledger["missing"]
    parts.append(f"{missing:+,} MISSING" if missing else "adds up")
    told = [Line(_cut(f"ledger: {', '.join(parts)}", width), "red" if missing else "")]
    circuits = [f"{row.worker} ({row.circuit})" for row in shown.workers if row.circuit]
    if circuits:
        told.append(Line(_cut(f"no jobs, as the last ones failed: {', '.join(circuits)}", width), "red"))
    return told


def _style(row: Figures) -> str:
    if row.state == GONE or row.circuit:
        return "red"
    return "" if row.state == "ready" else "yellow"


def _table(rows: Sequence[Figures], width: int) -> list[str]:
    """Names of columns, then a line for each row: as many columns as fit."""
    cells = {column: [column.name, *(column.cell(row) for row in rows)] for column in COLUMNS}
    wide = {column: max(map(len, told)) for column, told in cells.items()}
    names = ["worker", *(row.worker for row in rows)]
    longest = max(map(len, names))
    columns = list(COLUMNS)

    def room() -> int:
        """For workers' names."""
        return width - sum(len(GAP) + wide[column] for column in columns)

    while columns and room() < min(longest, SHORTEST_NAME):
        columns.remove(max(columns, key=lambda column: column.rank))
    size = max(1, min(longest, room()))
    told = [_cut(name, size).ljust(size) for name in names]
    for column in columns:
        aligned = str.ljust if column.rank == 1 else str.rjust
        told = [f"{line}{GAP}{aligned(cell, wide[column])}" for line, cell in zip(told, cells[column], strict=True)]
    return [line.rstrip() for line in told]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"[:width]
