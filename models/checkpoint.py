"""A checkpoint folder, read by its headers only: config, tensor names, shapes, and which file holds each.

Nothing here imports torch or reads a weight.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.comm.errors import UsageError
from lockstep.models import dummy, edit, families, scales, stacks
from lockstep.models.config import Config
from lockstep.models.storage import Stored, read_header

# Where engines and training codes put the decoder: the rest of a key is the same everywhere.
PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?")


@dataclass(frozen=True)
class Checkpoint:
    """A folder's configuration and tensors; with `dummy_seed` these are random numbers (models/dummy.py)."""

    folder: Path
    raw: dict[str, Any]
    config: Config
    generation: dict[str, Any]
    dummy_seed: int | None = None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text: generation_config.json's where it names any, else config.json's."""
        for source in (self.generation, self.raw, self.raw.get("text_config") or {}):
            ids = source.get("eos_token_id")
            if ids is not None:
                return frozenset(ids if isinstance(ids, list) else [ids])
        return frozenset()

    def tensors(self) -> dict[str, Stored]:
        """Every tensor by its key without prefix, FP8 ones with their scales.

        Raises UsageError naming a missing or damaged file.
        """
        if self.dummy_seed is not None:
            return dummy.tensors(self.config, self.raw, self.folder / "config.json", self.dummy_seed)
        found: dict[str, Stored] = {}
        for file in self._files():
            for stored in read_header(file):
                name = PREFIX.sub("", stored.key)
                if name in found:
                    raise UsageError(f"{file}: {stored.key} stands for {name}, which {found[name].key} does already")
                found[name] = stored
        return stacks.apart(scales.join(found), self.config.fp8_block)

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            weight_map = _json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise UsageError(f"{index} names no files (weight_map); download it again")
            names = sorted(set(weight_map.values()))
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
    return _opened(folder, read_config(folder), None)


def open_dummy(
    path: str | Path,
    *,
    num_layers: int | None = None,
    dtype: str | None = None,
    fp8: bool | None = None,
    seed: int = 0,
) -> Checkpoint:
    """A checkpoint of random weights, for a config.json or a folder that has one. None leaves what is there."""
    path = Path(path)
    raw = read_config(path)
    if num_layers is not None:
        raw = edit.truncate(raw, num_layers)
    if dtype is not None:
        raw = edit.with_dtype(raw, dtype)
    if fp8 is not None:
        raw = edit.with_fp8(raw, fp8)
    return _opened(path if path.is_dir() else path.parent, raw, seed)


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json, given as its folder or itself. Raises UsageError."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        problem = f"{path} has no config.json" if path.is_dir() else f"{path} does not exist"
        raise UsageError(f"{problem}; give the folder of a Hugging Face checkpoint")
    return _json(file)


def _opened(folder: Path, raw: dict[str, Any], dummy_seed: int | None) -> Checkpoint:
    generation = folder / "generation_config.json"
    config = families.read(raw, str(folder / "config.json"))
    return Checkpoint(folder, raw, config, _json(generation) if generation.exists() else {}, dummy_seed)


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file} holds no JSON object")
    return value
