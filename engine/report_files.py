"""A comparison's files: report.json, report.md, report.html, and the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.engine import report_html, report_markdown
from lockstep.engine.store import write as write_whole


def write(folder: Path, document: dict[str, Any], *, json_too: bool = True) -> list[Path]:
    """Draw and write all of them; what was written."""
    texts = {"report.md": report_markdown.render(document), "report.html": report_html.render(document)}
    if json_too:
        texts = {"report.json": json.dumps(document, indent=1) + "\n"} | texts
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def write_trace(folder: Path, runs: dict[str, list[Any]]) -> Path:
    from lockstep.engine.trace import chrome

    file = folder / "trace.json"
    write_whole(file, json.dumps(chrome(runs)))
    return file
