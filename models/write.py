"""Write a dummy checkpoint to a folder, in the files and under the keys that such a model is released with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lockstep.comm.errors import UsageError
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.noise import Noise
from lockstep.models.read import CHUNK_ELEMENTS
from lockstep.models.stacks import together
from lockstep.models.storage import ITEM_BYTES, Stored, header

COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Output:
    """A tensor to write: the values of `parts`, one after the other."""

    key: str
    shape: tuple[int, ...]
    parts: list[Stored]

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write(
    checkpoint: Checkpoint,
    out: Path,
    *,
    max_shard_bytes: int,
    texts: Mapping[str, str] = MappingProxyType({}),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write a dummy checkpoint to the folder `out`, tensor by tensor. `progress(done, total)` counts bytes.

    Beside it go the other files of its source, and `texts` by file name where the source has none. The folder appears
    when it is complete. Raises UsageError where it exists, or does not fit the disk.
    """
    outputs = list(_outputs(checkpoint))
    total = sum(output.num_bytes for output in outputs)
    _check_room(out, total)
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True)
    try:
        names = _write_files(outputs, checkpoint, partial, max_shard_bytes, lambda done: progress(done, total))
        _write_json(partial / "config.json", checkpoint.raw)
        for name in COPIED:
            if (checkpoint.folder / name).is_file():
                shutil.copyfile(checkpoint.folder / name, partial / name)
        for name, text in texts.items():
            if not (partial / name).exists():
                (partial / name).write_text(text, encoding="utf-8")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / name for name in names]


def _check_room(out: Path, num_bytes: int) -> None:
    if out.exists():
        raise UsageError(f"{out} exists already, and nothing is overwritten; give another --out")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise UsageError(
            f"the checkpoint has {num_bytes / 1e9:.1f} GB, and {parent} has room for {free / 1e9:.1f} GB; "
            "use fewer --num-layers, or another --out"
        )


def _outputs(checkpoint: Checkpoint) -> Iterator[Output]:
    config, tensors = checkpoint.config, checkpoint.tensors().values()
    if config.stacked and config.fp8_block is None:  # a block of a stack could have rows of two matrices
        for key, shape, parts in together(tensors):
            yield Output(key, shape, parts)
        return
    for stored in tensors:
        yield Output(stored.key, stored.shape, [stored])
        if stored.scale is not None:
            yield Output(stored.scale.key, stored.scale.shape, [stored.scale])


def _write_files(
    outputs: list[Output], checkpoint: Checkpoint, folder: Path, max_shard_bytes: int, progress: Callable[[int], None]
) -> list[str]:
    shards = _sharded(outputs, max_shard_bytes)
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    names = names if count > 1 else ["model.safetensors"]
    noise, done = Noise(checkpoint.config), 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(header((output.key, output.dtype, output.shape) for output in shard))
            for stored in (part for output in shard for part in output.parts):
                size = math.prod(stored.shape)
                for first in range(0, size, CHUNK_ELEMENTS):
                    values = noise.rows(stored, first, (min(CHUNK_ELEMENTS, size - first),))
                    file.write(values.view(torch.uint8).numpy().data)
                    done += values.nbytes
                    progress(done)
    if count > 1:
        weight_map = {output.key: name for name, shard in zip(names, shards, strict=True) for output in shard}
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    return names


def _sharded(outputs: list[Output], max_shard_bytes: int) -> list[list[Output]]:
    """In order, as many to a file as fit; a larger one is alone."""
    shards: list[list[Output]] = [[]]
    room = max_shard_bytes
    for output in outputs:
        if shards[-1] and output.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(output)
        room -= output.num_bytes
    return shards


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
