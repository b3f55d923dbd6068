"""The file that --json names: checked before a run, written after it, whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep.comm.errors import UsageError
from lockstep.engine import store
from lockstep.engine.requests import Committed

Decode = Callable[[Sequence[int]], str]


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
        store.write(path.resolve(), text)


class Finished:
    """FILE.partial.jsonl: what a run that does not come to its end leaves of the requests that did.

    One line per request, written when its last token is final. It is there from the first such request on, replaces
    what an earlier run has left, and is removed when the whole result is written.
    """

    def __init__(self, name: str | None, prompts: Sequence[Sequence[int]], decode: Decode | None) -> None:
        in_file = name not in (None, "-") and (not Path(str(name)).exists() or Path(str(name)).is_file())
        self._path = Path(f"{name}.partial.jsonl") if in_file else None
        self._prompts, self._decode = prompts, decode
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._file: IO[str] | None = None

    def on_event(self, event: object) -> None:
        if self._path is None or not isinstance(event, Committed):
            return
        tokens = self._tokens[event.request]
        tokens.extend(event.tokens)
        if event.finish_reason is not None:
            line = {
                "request": event.request,
                "prompt_ids": list(self._prompts[event.request]),
                "tokens": tokens,
                "text": self._decode(tokens) if self._decode else None,
                "finish_reason": event.finish_reason,
            }
            self._file = self._file or self._path.open("w", encoding="utf-8")
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def remove(self) -> None:
        """The whole result is on disk."""
        if self._file is not None and self._path is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
