"""Results on disk, each written when it is finished and kept with the description of what was asked. No torch here."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.comm.errors import UsageError
from lockstep.engine.requests import Job

RESULTS = "results"


class Store:
    """Results in `folder`/results. Without `resume` a folder that already has results is refused."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.folder, self._results = folder, folder / RESULTS
        if not resume and self._results.is_dir() and any(self._results.iterdir()):
            raise UsageError(f"{folder} holds the results of a comparison: go on with --resume, or name another --out")
        try:
            self._results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {folder} cannot be made: {error.strerror}") from None

    def get(self, name: str, description: dict[str, Any]) -> Any | None:
        """The finished result called `name`, if it is of exactly this description."""
        try:
            kept = json.loads(self._file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return kept.get("result") if isinstance(kept, dict) and kept.get("description") == description else None

    def put(self, name: str, description: dict[str, Any], result: Any) -> None:
        write(self._file(name), json.dumps({"description": description, "result": result}))

    def _file(self, name: str) -> Path:
        return self._results / f"{re.sub(r'[^A-Za-z0-9@+.-]', '_', name)}.json"


def write(file: Path, text: str) -> None:
    """Whole or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def describe(job: Job, **more: Any) -> dict[str, Any]:
    """What a result depends on, as JSON. The model's files stand for their contents by size and time."""
    fields = asdict(job)
    fields["prompts"] = hashlib.sha256(json.dumps(job.prompts).encode()).hexdigest()
    fields["model_files"] = [
        [f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(Path(job.model).iterdir()) if f.is_file()
    ]
    described: dict[str, Any] = json.loads(json.dumps(fields | more))
    return described
