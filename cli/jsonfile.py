"""The file that --json names: checked before a run, written after it, whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lockstep.comm.errors import UsageError


def check(name: str) -> None:
    """Raises UsageError where `write` could not write."""
    path = Path(name)
    if name == "-":
        return
    if path.is_dir():
        raise UsageError(f"--json {name} is a folder; give the path of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--json {name} cannot be written; give a file in a folder that exists and is yours")


def write(document: dict[str, Any], name: str) -> None:
    """To standard output for `-`. A reader of a file never sees half of it."""
    text = json.dumps(document) + "\n"
    path = Path(name)
    if name == "-":
        sys.stdout.write(text)
    elif path.exists() and not path.is_file():  # a pipe or a device
        path.write_text(text, encoding="utf-8")
    else:
        path = path.resolve()
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
