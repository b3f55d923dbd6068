"""Weights that stay FP8 in memory, and the product that takes them and plain ones alike.

A checkpoint has a scale per block of rows and columns. A rank's part, or a parameter made of several tensors, rarely
begins at a block's border, so here every row has its own scales (3 % more memory with blocks of 128), and only the
first block of columns may be cut.
O output features, I input features, S blocks of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scaled:
    """`data` [..., O, I] in FP8, times `scale` [..., O, S] by row and block; products are in `dtype`.

    Blocks have `block` columns; `cut` columns of the first one are not here.
    """

    data: Tensor
    scale: Tensor
    block: int
    cut: int
    dtype: torch.dtype

    @classmethod
    def empty(cls, shape: torch.Size, block: int, cut: int, dtype: torch.dtype, device: torch.device) -> Scaled:
        num_blocks = -(-(cut + shape[-1]) // block)
        data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty((*shape[:-1], num_blocks), dtype=torch.float32, device=device)
        return cls(data, scale, block, cut, dtype)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    def __getitem__(self, index: int) -> Scaled:
        """One expert's weight."""
        return Scaled(self.data[index], self.scale[index], self.block, self.cut, self.dtype)

    def num_bytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dense(self) -> Tensor:
        return dequantised(self.data, self.scale, self.block, self.cut, self.dtype)


def dequantised(data: Tensor, scale: Tensor, block: int, cut: int, dtype: torch.dtype) -> Tensor:
    """`data` [..., O, I] times its scales, rounded once, to `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    factors = scale.to(wide).repeat_interleave(block, -1)[..., cut : cut + data.shape[-1]]
    return factors.mul_(data.to(wide)).to(dtype)


def dense(weight: Tensor | Scaled) -> Tensor:
    return weight.dense() if isinstance(weight, Scaled) else weight


def product(x: Tensor, weight: Tensor | Scaled, bias: Tensor | None = None) -> Tensor:
    """`x` [T, I] times the transpose of `weight` [O, I]. A scaled weight is made dense for each product."""
    return F.linear(x, dense(weight), bias)
