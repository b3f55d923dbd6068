"""Write a dummy checkpoint to a folder, in the files and under the keys that such a model is released with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.errors import UsageError
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.noise import Noise
from lockstep.models.read import CHUNK_ELEMENTS
from lockstep.models.storage import ITEM_BYTES, Stored, header

COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Progress = Callable[[int, int], None]


def write(checkpoint: Checkpoint, out: Path, max_shard_bytes: int, progress: Progress) -> list[Path]:
    """Write a dummy checkpoint to the folder `out`, tensor by tensor. `progress(done, total)` counts bytes.

    The folder appears when it is complete. Raises UsageError where it exists, or does not fit the disk.
    """
    tensors = list(_stored(checkpoint))
    total = sum(num_bytes(stored) for stored in tensors)
    check(out, total)
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True)
    try:
        files = _write_files(tensors, checkpoint, partial, max_shard_bytes, lambda done: progress(done, total))
        _write_json(partial / "config.json", checkpoint.raw)
        for name in COPIED:
            if (checkpoint.folder / name).is_file():
                shutil.copyfile(checkpoint.folder / name, partial / name)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / file for file in files]


def check(out: Path, num_bytes: int) -> None:
    """Raises UsageError where `write` could not write there."""
    if out.exists():
        raise UsageError(f"{out} exists already, and nothing is overwritten; give another --out")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise UsageError(
            f"the checkpoint has {num_bytes / 1e9:.1f} GB, and {parent} has room for {free / 1e9:.1f} GB; "
            "use fewer --num-layers, or another --out"
        )


def num_bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * ITEM_BYTES[stored.dtype]


def _stored(checkpoint: Checkpoint) -> Iterator[Stored]:
    for stored in checkpoint.tensors().values():
        yield stored
        if stored.scale is not None:
            yield stored.scale


def _write_files(
    tensors: list[Stored], checkpoint: Checkpoint, folder: Path, max_shard_bytes: int, progress: Callable[[int], None]
) -> list[str]:
    shards: list[list[Stored]] = [[]]
    room = max_shard_bytes
    for stored in tensors:
        if shards[-1] and num_bytes(stored) > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(stored)
        room -= num_bytes(stored)
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    names = names if count > 1 else ["model.safetensors"]
    noise, done = Noise(checkpoint.config), 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(header([(stored.key, stored.dtype, stored.shape) for stored in shard]))
            for stored in shard:
                size = math.prod(stored.shape)
                for first in range(0, size, CHUNK_ELEMENTS):
                    part = noise.rows(stored, first, (min(CHUNK_ELEMENTS, size - first),))
                    file.write(part.contiguous().view(torch.uint8).numpy().data)
                    done += part.nbytes
                    progress(done)
    if count > 1:
        weight_map = {stored.key: name for name, shard in zip(names, shards, strict=True) for stored in shard}
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    return names


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
