"""Regions of stored tensors, read a few rows at a time.

Plain reads, no mapping: the pages of a mapped file count as this process's memory, and a slice of columns maps all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lockstep.models.storage import ITEM_BYTES, Stored, damaged

CHUNK_BYTES = 4 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Place = tuple[int | slice, ...]


class Reader:
    """Keeps one file open and one chunk in memory."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: io.BufferedReader | None = None
        self._chunk = bytearray(CHUNK_BYTES)

    def into(self, target: Tensor, stored: Stored, region: tuple[slice, ...]) -> None:
        """Copy a region, which `target` has the shape of. A dimension that `region` does not name is whole."""
        for place, rows in self._blocks(stored, region):
            target[place].copy_(rows)

    def equals(self, target: Tensor, stored: Stored, region: tuple[slice, ...]) -> bool:
        """Whether `into` would change nothing."""
        return all(torch.equal(target[place], rows.to(target)) for place, rows in self._blocks(stored, region))

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._file, self._path = None, None

    def _blocks(self, stored: Stored, region: tuple[slice, ...]) -> Iterator[tuple[Place, Tensor]]:
        """Where in the region, and the values there, which are valid until the next one is asked for."""
        whole = region + (slice(None),) * (len(stored.shape) - len(region))
        return self._blocks_of(stored, stored.shape, stored.offset, whole)

    def _blocks_of(
        self, stored: Stored, shape: tuple[int, ...], offset: int, region: tuple[slice, ...]
    ) -> Iterator[tuple[Place, Tensor]]:
        first, last, _ = region[0].indices(shape[0])
        row = math.prod(shape[1:]) * ITEM_BYTES[stored.dtype]
        if len(shape) > 2:
            for i in range(first, last):
                for place, rows in self._blocks_of(stored, shape[1:], offset + i * row, region[1:]):
                    yield (i - first, *place), rows
            return
        step = max(1, CHUNK_BYTES // max(row, 1))
        for start in range(first, last, step):
            count = min(step, last - start)
            rows = self._rows(stored, offset + start * row, (count, *shape[1:]))
            yield (slice(start - first, start - first + count),), rows[(slice(None), *region[1:])]

    def _rows(self, stored: Stored, offset: int, shape: tuple[int, ...]) -> Tensor:
        num_bytes = math.prod(shape) * ITEM_BYTES[stored.dtype]
        if num_bytes == 0:
            return torch.empty(shape, dtype=DTYPES[stored.dtype])
        if num_bytes > len(self._chunk):
            self._chunk = bytearray(num_bytes)
        if self._path != stored.file or self._file is None:
            self.close()
            self._path, self._file = stored.file, stored.file.open("rb")
        self._file.seek(offset)
        if self._file.readinto(memoryview(self._chunk)[:num_bytes]) != num_bytes:
            raise damaged(stored.file, f"{stored.key} ends early")
        return torch.frombuffer(self._chunk, dtype=DTYPES[stored.dtype], count=math.prod(shape)).view(shape)
