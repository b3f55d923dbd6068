"""`lockstep report`: draw a comparison again, or set two side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.cli import options
from lockstep.comm.errors import UsageError


def command(results: options.Results, markdown: options.Markdown = None, traceback: options.Traceback = False) -> None:
    """Draw a comparison's reports again, or set two comparisons side by side: before and after a change."""
    from rich.console import Console

    from lockstep.cli import comparison
    from lockstep.engine import report_files, report_markdown

    if len(results) > 2:
        raise UsageError(f"{len(results)} results were given: give one to draw it again, or two to compare")
    documents = [_read(path) for path in results]
    console = Console(highlight=False)
    files = []
    if len(documents) == 2:
        comparison.show_changes(console, *documents)
    else:
        path = results[0]
        files = report_files.write(path if path.is_dir() else path.parent, documents[0], json_too=False)
        comparison.show(console, documents[0])
    if markdown is not None:
        render = report_markdown.render_changes if len(documents) == 2 else report_markdown.render
        files.append(_written(markdown, render(*documents)))
    if files:
        console.print(f"written: {', '.join(str(file) for file in files)}", soft_wrap=True)


def _written(file: Path, text: str) -> Path:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--markdown {file} cannot be written: {error.strerror}") from None
    return file


def _read(path: Path) -> dict[str, Any]:
    from lockstep.engine.report import SCHEMA

    file = path / "report.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        unfinished = " (its comparison has not finished: go on with compare --resume)" if path.is_dir() else ""
        raise UsageError(f"{file} does not exist{unfinished}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise UsageError(f"{file} is no comparison that this version reads: its schema is {found!r}, not {SCHEMA!r}")
    return dict(document)
