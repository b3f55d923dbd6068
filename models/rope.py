"""Rotary position embedding (Su et al., 2021), plain or stretched by YaRN.

T rows, D head features. Angles are computed in float32, as the engines that train and serve these models do:
a wider angle would be another model at long positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.models.config import Rope, Yarn


class RotaryTable:
    """cos and sin for rows at given positions."""

    def __init__(self, config: Rope, device: torch.device) -> None:
        self.config = config
        frequencies = 1.0 / config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim)
        if config.yarn:
            frequencies = _stretch(frequencies, config, config.yarn)
        self.frequencies = frequencies.to(device)
        self.scale = config.yarn.table_scale() if config.yarn else 1.0

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[T] positions -> cos and sin [T, dim / 2]."""
        angles = positions[:, None].float() * self.frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the first 2 * cos.shape[-1] features of `x` [T, heads, D]; the rest pass.

    Interleaved pairs are written back as two halves: keys and queries alike, so their products are the same.
    """
    width = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * width], x[..., 2 * width :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :width], turned[..., width:])
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def _stretch(frequencies: Tensor, rope: Rope, yarn: Yarn) -> Tensor:
    """Interpolate the low frequencies, keep the high ones, ramp in between (YaRN, section 3.2)."""

    def dimension(turns: float) -> float:
        ratio = yarn.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0, 1)
    return frequencies / yarn.factor * (1 - keep) + frequencies * keep
