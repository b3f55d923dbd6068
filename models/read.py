"""Regions of stored tensors, read a few rows at a time, FP8 ones with their scales.

Plain reads, no mapping: the pages of a mapped file count as this process's memory, and a slice of columns maps all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lockstep.models.fp8 import Scaled, dequantised
from lockstep.models.storage import ITEM_BYTES, Stored, damaged

CHUNK_ELEMENTS = 1 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}

Place = tuple[int | slice, ...]
Region = tuple[slice, ...]


class Source(Protocol):
    """Where the values of stored tensors come from."""

    def rows(self, stored: Stored, first: int, shape: tuple[int, ...]) -> Tensor:
        """Values [shape] from element `first` of a tensor on, good until the next call."""

    def close(self) -> None: ...


class Files:
    """Keeps one file open and one chunk in memory."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: io.BufferedReader | None = None
        self._chunk = bytearray()

    def rows(self, stored: Stored, first: int, shape: tuple[int, ...]) -> Tensor:
        item_bytes, dtype = ITEM_BYTES[stored.dtype], DTYPES[stored.dtype]
        num_bytes = math.prod(shape) * item_bytes
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if num_bytes > len(self._chunk):
            self._chunk = bytearray(num_bytes)
        if self._path != stored.file or self._file is None:
            self.close()
            self._path, self._file = stored.file, stored.file.open("rb")
        self._file.seek(stored.offset + first * item_bytes)
        if self._file.readinto(memoryview(self._chunk)[:num_bytes]) != num_bytes:
            raise damaged(stored.file, f"{stored.key} ends early")
        return torch.frombuffer(self._chunk, dtype=torch.uint8, count=num_bytes).view(dtype).view(shape)

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._file, self._path = None, None


class Reader:
    """Copies regions to where they are wanted. `block`: the rows and columns that share a scale in FP8 tensors.

    A region names the leading dimensions that it does not take whole.
    """

    def __init__(self, source: Source, block: tuple[int, int] | None = None) -> None:
        self.source, self.block = source, block or (1, 1)

    def into(self, target: Tensor, stored: Stored, region: Region) -> int:
        """Copy a region's values, which `target` has the shape of. Returns the bytes of it."""
        for place, values in self._values(stored, region, target.dtype):
            target[place].copy_(values)
        return target.nbytes

    def equals(self, target: Tensor, stored: Stored, region: Region) -> bool:
        """Whether `into` would change nothing."""
        values = self._values(stored, region, target.dtype)
        return all(torch.equal(target[place], part.to(target)) for place, part in values)

    def into_scaled(self, target: Scaled, place: Place, stored: Stored, region: Region) -> int:
        """Copy a region's FP8 numbers and scales as they are to `place` of a weight that stays FP8."""
        data, scale = target.data[place], target.scale[place]
        for part, numbers in self._blocks(stored, region):
            data[part].copy_(numbers)
        scale.copy_(self._scales(stored, region))
        return data.nbytes + scale.nbytes

    def _values(self, stored: Stored, region: Region, dtype: torch.dtype) -> Iterator[tuple[Place, Tensor]]:
        """Where in the region, and the values there, which are good until the next ones are asked for."""
        if stored.scale is None:
            yield from self._blocks(stored, region)
            return
        scales, columns = self._scales(stored, region), _whole(stored, region)[-1]
        for place, numbers in self._blocks(stored, region):
            yield place, dequantised(numbers, scales[place], self.block[1], columns.start % self.block[1], dtype)

    def _scales(self, stored: Stored, region: Region) -> Tensor:
        """The scales of a region for each of its rows: [..., rows, blocks of columns that it touches]."""
        assert stored.scale is not None
        *lead, rows, columns = _whole(stored, region)
        rows = slice(rows.start + stored.rows_before, rows.stop + stored.rows_before)
        touched = tuple(
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip((rows, columns), self.block, strict=True)
        )
        shape = [part.stop - part.start for part in (*lead, *touched)]
        scales = torch.empty(shape)
        for place, values in self._blocks(stored.scale, (*lead, *touched)):
            scales[place].copy_(values)
        block_of_row = torch.arange(rows.start, rows.stop) // self.block[0] - touched[0].start
        return scales[..., block_of_row, :]

    def _blocks(self, stored: Stored, region: Region) -> Iterator[tuple[Place, Tensor]]:
        return self._blocks_of(stored, stored.shape, 0, _whole(stored, region))

    def _blocks_of(
        self, stored: Stored, shape: tuple[int, ...], element: int, region: Region
    ) -> Iterator[tuple[Place, Tensor]]:
        """Of the part of a tensor that has `shape` and begins at `element`."""
        first, last = region[0].start, region[0].stop
        width = math.prod(shape[1:])
        if len(shape) > 2:
            for i in range(first, last):
                for place, rows in self._blocks_of(stored, shape[1:], element + i * width, region[1:]):
                    yield (i - first, *place), rows
            return
        step = max(1, CHUNK_ELEMENTS // max(width, 1))
        for start in range(first, last, step):
            count = min(step, last - start)
            rows = self.source.rows(stored, element + start * width, (count, *shape[1:]))
            yield (slice(start - first, start - first + count),), rows[(slice(None), *region[1:])]


def _whole(stored: Stored, region: Region) -> Region:
    """One slice per dimension, with both ends."""
    named = region + (slice(None),) * (len(stored.shape) - len(region))
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(named, stored.shape, strict=True))
