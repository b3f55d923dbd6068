"""A comparison as one HTML file that needs nothing else: no script, no font and no picture from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from lockstep.comm.strategy import CHOICES
from lockstep.engine import charts, wording
from lockstep.engine.verdict import IDENTICAL, TIE

TEMPLATE = Path(__file__).with_name("report.html.j2")


def render(document: dict[str, Any]) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=Lenient)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        document=document,
        title=f"Lockstep comparison: {document['model']}",
        setting=wording.setting(document),
        w=wording,
        tone=_tone,
        fields=tuple(CHOICES),
        answers=any(row.get("accuracy") for row in document["rows"]),
        charts=charts.draw(document["rows"]),
        boundaries=charts.boundaries,
    )


class Lenient(jinja2.StrictUndefined):
    """A row that did not run lacks its numbers: it may be asked whether it has them, and nothing more."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return False


def _tone(row: dict[str, Any]) -> str:
    if row["status"] == "refused":
        return "warn"
    if row["status"] == "failed":
        return "bad"
    return {IDENTICAL: "good", TIE: "warn"}.get(row["verdict"], "bad" if row["verdict"] else "")
