"""The numbers of a dummy checkpoint: windows of one short random sequence, repeated without end.

A tensor's element number i is number `offset` + i of the sequence, scaled to the tensor's law. The sequence's length
is a prime, so the rows of a matrix are windows that all differ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.models import dummy
from lockstep.models.config import Config
from lockstep.models.read import DTYPES
from lockstep.models.storage import Stored

LENGTH = 2**19 - 1
BLOCK = 2**16  # numbers made at once: what they are made from is as large again, several times


class Noise:
    """Rows of dummy tensors, as read.Files gives those of stored ones; it keeps one chunk in memory too."""

    def __init__(self, config: Config) -> None:
        self._config, self._unit, self._chunk = config, _unit(), torch.empty(0)

    def rows(self, stored: Stored, first: int, shape: tuple[int, ...]) -> Tensor:
        """Values [shape] from element `first` of a tensor on, good until the next call."""
        law = (0.0, dummy.FP8_MAX) if stored.dtype == dummy.FP8 else dummy.law(stored.key, stored.shape, self._config)
        mean, half_width = law
        dtype, count = DTYPES[stored.dtype], math.prod(shape)
        if self._chunk.dtype != dtype or len(self._chunk) < count:
            self._chunk = torch.empty(count, dtype=dtype)
        values, filled = self._chunk[:count], 0
        while filled < count:
            start = (stored.offset + first + filled) % LENGTH
            part = self._unit[start : start + min(BLOCK, count - filled)]
            values[filled : filled + len(part)] = part * half_width + mean
            filled += len(part)
        return values.view(shape)

    def close(self) -> None:
        pass


def _unit() -> Tensor:
    """[LENGTH] numbers in [-1, 1) of 24 random bits each: the same whatever torch's own generators become."""
    unit = torch.empty(LENGTH)
    for start in range(0, LENGTH, BLOCK):
        state = torch.arange(start, min(start + BLOCK, LENGTH))
        for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
            state = ((state ^ (state >> shift)) * factor) & 0xFFFFFFFF
        unit[start : start + BLOCK] = (state >> 8).to(torch.float32) / 2**23 - 1.0
    return unit
