"""A comparison as Markdown, short enough for a pull request: the table first, then only what needs words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.engine import wording as w

HEADER = (
    "run",
    "verdict",
    "tokens/s",
    "vs reference",
    "first token ms",
    "token gap ms (p95)",
    "accepted",
    "bytes/token",
    "peak",
)


def render(document: dict[str, Any]) -> str:
    rows = [
        (
            f"`{row['label']}`",
            _verdict(row),
            w.speed(row, "tokens_per_s"),
            w.ratio(row, "tokens_per_s"),
            w.speed(row, "first_token_s", 1000),
            w.gap(row),
            w.accepted(row),
            w.traffic(row),
            w.memory(row),
            *([w.accuracy(row)] if _has_answers(document) else []),
        )
        for row in document["rows"]
    ]
    header = (*HEADER, *(["right"] if _has_answers(document) else []))
    words = [f"- `{row['label']}`: {text}" for row in document["rows"] if (text := w.explanation(row))]
    lines = ["### Before (reference) and after", "", *table(header, rows), "", f"{w.setting(document)}."]
    return "\n".join([*lines, *([""] if words else []), *words]) + "\n"


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Two results side by side: the rows that both have, and those that one has alone."""
    old = {row["label"]: row for row in before["rows"]}
    new = {row["label"]: row for row in after["rows"]}
    return [{"label": label, "before": old.get(label), "after": new.get(label)} for label in {**old, **new}]


def render_changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    rows = []
    for change in changes(before, after):
        old, new = change["before"], change["after"]
        if old is None or new is None:
            rows.append((f"`{change['label']}`", "only before" if new is None else "only after", *["-"] * 5))
            continue
        rows.append(
            (
                f"`{change['label']}`",
                arrow(w.verdict(old), w.verdict(new)),
                arrow(w.speed(old, "tokens_per_s"), w.speed(new, "tokens_per_s")),
                change_of(old, new, "tokens_per_s"),
                arrow(w.speed(old, "token_gap_s", 1000), w.speed(new, "token_gap_s", 1000)),
                arrow(w.traffic(old), w.traffic(new)),
                arrow(w.memory(old), w.memory(new)),
            )
        )
    header = ("run", "verdict", "tokens/s", "change", "token gap ms", "bytes/token", "peak")
    lines = ["### Before and after", "", *table(header, rows), ""]
    return "\n".join([*lines, f"Before: {w.setting(before)}.", "", f"After: {w.setting(after)}."]) + "\n"


def change_of(old: dict[str, Any], new: dict[str, Any], name: str) -> str:
    a, b = (row.get("speed", {}).get(name, {}).get("median") for row in (old, new))
    return "-" if not a or not b else f"{b / a - 1:+.1%}"


def arrow(old: str, new: str) -> str:
    return old if old == new else f"{old} -> {new}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows)]


def _verdict(row: dict[str, Any]) -> str:
    text = w.verdict(row)
    return f"**{text}**" if text.isupper() or row["status"] != "ok" else text


def _has_answers(document: dict[str, Any]) -> bool:
    return any(row.get("accuracy") for row in document["rows"])
