"""A checkpoint folder, read by its headers only: config, tensor names, shapes, and which file holds each.

Nothing here imports torch or reads a weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lockstep.comm.errors import UsageError
from lockstep.models import families
from lockstep.models.config import Config

# Where engines and training codes put the decoder: the rest of a key is the same everywhere.
PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?")


@dataclass(frozen=True)
class Stored:
    """One tensor in a file, under the key it has there; or, of a stack of experts, the matrix at `place`."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    place: tuple[int, int] | None = None  # expert, first row

    def region(self, source: tuple[slice, ...]) -> tuple[int | slice, ...]:
        """Where the region `source` of this tensor lies in what the file has under `key`."""
        if self.place is None:
            return source
        expert, first = self.place
        start, stop, _ = (source[0] if source else slice(None)).indices(self.shape[0])
        return expert, slice(first + start, first + stop), *source[1:]


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    raw: dict[str, Any]
    config: Config
    generation: dict[str, Any]

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text: generation_config.json's where it names any, else config.json's."""
        for source in (self.generation, self.raw, self.raw.get("text_config") or {}):
            ids = source.get("eos_token_id")
            if ids is not None:
                return frozenset(ids if isinstance(ids, list) else [ids])
        return frozenset()

    def tensors(self) -> dict[str, Stored]:
        """Every tensor by its key without prefix. Raises UsageError naming a missing or damaged file."""
        found: dict[str, Stored] = {}
        for file in self._files():
            try:
                with safe_open(file, framework="numpy") as handle:
                    for key in handle.keys():  # noqa: SIM118 (the handle itself is not iterable)
                        part = handle.get_slice(key)
                        stored = Stored(file, key, tuple(part.get_shape()), part.get_dtype())
                        for name, tensor in _per_expert(PREFIX.sub("", key), stored):
                            if name in found:
                                raise UsageError(
                                    f"{file}: {key} stands for {name}, which {found[name].key} does already"
                                )
                            found[name] = tensor
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{file} is damaged or incomplete ({error}); download it again") from None
        return found

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(_json(index)["weight_map"].values()))
        elif (self.folder / "model.safetensors").exists():
            names = ["model.safetensors"]
        else:
            raise UsageError(f"{self.folder} has no model.safetensors and no model.safetensors.index.json")
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            raise UsageError(f"{self.folder} lacks {', '.join(missing)}, which {index.name} names; download it again")
        return [self.folder / name for name in names]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read a folder's configuration. Raises UsageError when it is not a checkpoint of a known family."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"model {folder} is not a folder; give a checkpoint folder, or the built-in model `demo`")
    file = folder / "config.json"
    if not file.exists():
        raise UsageError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
    raw = _json(file)
    generation = folder / "generation_config.json"
    return Checkpoint(folder, raw, families.read(raw, str(file)), _json(generation) if generation.exists() else {})


def _per_expert(name: str, stored: Stored) -> Iterator[tuple[str, Stored]]:
    """A tensor under its name; a stack of experts, gate rows over up rows, as the matrices that others store apart."""
    prefix, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj") or len(stored.shape) != 3:
        yield name, stored
        return
    experts, height, width = stored.shape
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    height //= len(parts)
    for expert in range(experts):
        for i, part in enumerate(parts):
            matrix = replace(stored, shape=(height, width), place=(expert, i * height))
            yield f"{prefix}.{expert}.{part}.weight", matrix


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file} holds no JSON object")
    return value
