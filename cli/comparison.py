"""A comparison on the terminal, within 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.engine import report_markdown as markdown
from lockstep.engine import wording as w

WIDTH = 100
STYLES = {"identical": "green", "reference": "green", "tie": "yellow", "refused": "yellow"}


def show(console: Console, document: dict[str, Any]) -> None:
    rows = document["rows"]
    print_to(console, _speed(rows))
    print_to(console, _cost([row for row in rows if row.get("speed")], document))
    told = [Text.assemble((row["label"], "bold"), ": ", text) for row in rows if (text := w.explanation(row))]
    if told:
        print_to(console, Text("\n").join(told))
    print_to(console, Text(w.setting(document), style="dim"))


def show_changes(console: Console, before: dict[str, Any], after: dict[str, Any]) -> None:
    table = _table("run", "verdict", "tokens/s", "change", "gap ms", "bytes/token", right=2)
    for change in markdown.changes(before, after):
        old, new = change["before"], change["after"]
        if old is None or new is None:
            table.add_row(change["label"], Text("only before" if new is None else "only after", style="dim"))
            continue
        table.add_row(
            change["label"],
            Text(markdown.arrow(w.verdict(old), w.verdict(new)), style=_style(new)),
            markdown.arrow(w.speed(old, "tokens_per_s"), w.speed(new, "tokens_per_s")),
            markdown.change_of(old, new, "tokens_per_s"),
            markdown.arrow(w.speed(old, "token_gap_s", 1000), w.speed(new, "token_gap_s", 1000)),
            markdown.arrow(w.traffic(old), w.traffic(new)),
        )
    print_to(console, table)


def _speed(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table("run", "verdict", "tokens/s", "vs reference", "first ms", "gap ms (p95)", "accepted", right=2)
    for row in rows:
        table.add_row(
            row["label"],
            Text(w.verdict(row), style=_style(row)),
            w.speed(row, "tokens_per_s"),
            w.ratio(row, "tokens_per_s"),
            w.speed(row, "first_token_s", 1000),
            w.gap(row),
            w.accepted(row),
        )
    return table


def _cost(rows: Sequence[dict[str, Any]], document: dict[str, Any]) -> Table:
    answers = any(row.get("accuracy") for row in document["rows"])
    titles = ("run", "calls/token", "bytes/token", "compute move wait", "decode tokens/s", "peak", *["right"] * answers)
    table = _table(*titles, right=1)
    for row in rows:
        cells = [
            row["label"],
            f"{row['per_token']['calls']:.1f}",
            w.traffic(row),
            w.split(row),
            w.speed(row, "decode_tokens_per_s"),
            w.memory(row),
        ]
        table.add_row(*cells, *[w.accuracy(row)] * answers)
    return table


def _table(*titles: str, right: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i >= right else "left", overflow="fold")
    return table


def _style(row: dict[str, Any]) -> str:
    return STYLES.get(w.verdict(row), "bold red")


def print_to(console: Console, shown: Table | Text) -> None:
    console.print(shown, width=min(WIDTH, console.width))
    console.print()
