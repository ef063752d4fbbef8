"""What notebooks show of an object: a heading, facts, tables and bars. All text in it is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_MOST_ROWS = 20
_COLOURS = {
    "RUNNING": "#0b7285",
    "SUCCEEDED": "#2b8a3e",
    "FAILED": "#c92a2a",
    "WORKER_FAILED": "#c92a2a",
    "UNSCHEDULABLE": "#c92a2a",
    "KILLED": "#e67700",
    "lost": "#c92a2a",
}


def view(heading: str, facts: Mapping[str, object], *parts: str) -> str:
    """HTML of an object with that heading, its facts, those that are neither None nor empty, and further parts."""
    told = {name: value for name, value in facts.items() if value is not None and value != ""}
    rows = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{_cell(value)}</td></tr>'
        for name, value in told.items()
    )
    return f"<div><strong>{escape(heading)}</strong><table>{rows}</table>{''.join(parts)}</div>"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of the first rows; nothing when there are none."""
    if not rows:
        return ""
    head = "".join(f'<th style="text-align: left">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align: left">{_cell(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    left = len(rows) - _MOST_ROWS
    more = f"<div>… and {left:,} more</div>" if left > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def bar(done: float, total: float | None, text: str) -> str:
    """A bar as long as what is done of all, and a text behind it. Without a total, one that only says that it goes on."""
    extent = "" if total is None else f' value="{done:g}" max="{max(total, 1e-9):g}"'
    return f'<div><progress{extent} style="width: 20em"></progress> {escape(text)}</div>'


def _cell(value: object) -> str:
    text = "-" if value is None else str(value)
    colour = _COLOURS.get(text)
    return escape(text) if colour is None else f'<span style="color: {colour}">{escape(text)}</span>'
