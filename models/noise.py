"""The numbers of a dummy checkpoint: windows of one short random sequence, repeated without end.

A tensor's element number i is number `offset` + i of the sequence, scaled to the tensor's law. The sequence's length
is a prime, so the rows of a matrix are windows that all differ.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from lockstep.models import dummy
from lockstep.models.config import Config
from lockstep.models.read import DTYPES
from lockstep.models.storage import Stored

LENGTH = 2**19 - 1


class Noise:
    """Rows of dummy tensors, as read.Files gives those of stored ones."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # 24 random bits each: the same numbers whatever torch's own generators become.
        state = torch.arange(LENGTH, dtype=torch.int64)
        for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
            state = ((state ^ (state >> shift)) * factor) & 0xFFFFFFFF
        self._unit = (state >> 8).to(torch.float32) / 2**23 - 1.0  # [-1, 1)
        self._scaled = functools.lru_cache(maxsize=16)(self._scale)

    def rows(self, stored: Stored, first: int, shape: tuple[int, ...]) -> Tensor:
        """Values [shape] from element `first` of a tensor on."""
        if stored.dtype == dummy.FP8:
            sequence = self._scaled(0.0, dummy.FP8_MAX, stored.dtype)
        else:
            sequence = self._scaled(*dummy.law(stored.key, stored.shape, self._config), stored.dtype)
        start, left, parts = (stored.offset + first) % LENGTH, math.prod(shape), []
        while left:
            parts.append(sequence[start : start + left])
            left -= parts[-1].shape[0]
            start = 0
        return (parts[0] if len(parts) == 1 else torch.cat(parts) if parts else sequence[:0]).view(shape)

    def close(self) -> None:
        pass

    def _scale(self, mean: float, half_width: float, dtype: str) -> Tensor:
        return (self._unit * half_width + mean).to(DTYPES[dtype])
