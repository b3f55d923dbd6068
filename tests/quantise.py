"""Checkpoints in block FP8, made from others: each chosen tensor as 8-bit numbers and a scale per block."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from checkpoints import copy, read, set_config, write
from torch import Tensor

FP8_MAX = 448.0
BODY = r"(proj|in_proj_\w+|wq_b|wk)(\.weight)?$"  # what is released in FP8: neither router, norms, embeddings nor head
MTP = r"layers\.3\.|^mtp\."


def quantise(
    folder: Path,
    chosen: str = BODY,
    *,
    but: str = "eh_proj",
    block: tuple[int, int] = (16, 16),
    scales: torch.dtype = torch.float32,
) -> Path:
    """Edits the checkpoint in place: the keys that `chosen` finds and `but` does not become FP8."""
    tensors = read(folder)
    for key in [k for k in tensors if re.search(chosen, k) and not re.search(but, k)]:
        tensors[key], tensors[f"{key}_scale_inv"] = blocks_of(tensors[key], block, scales)
    write(folder, tensors)
    return set_config(
        folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    )


def blocks_of(weight: Tensor, block: tuple[int, int], scales: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, cols = weight.shape[-2:]
    size = (*weight.shape[:-2], -(-rows // block[0]), -(-cols // block[1]))
    scale = torch.empty(size, dtype=torch.float32)
    for i in range(size[-2]):
        for j in range(size[-1]):
            part = weight[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[..., i, j] = part.abs().amax((-2, -1)) / FP8_MAX
    scale = scale.log2().ceil().exp2().to(scales) if scales == torch.float8_e8m0fnu else scale.to(scales)
    return (weight / spread(scale, block, weight)).to(torch.float8_e4m3fn), scale


def spread(scale: Tensor, block: tuple[int, int], weight: Tensor) -> Tensor:
    """A scale for every element."""
    wide = scale.double().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : weight.shape[-2], : weight.shape[-1]]


def dequantised(folder: Path, to: Path, block: tuple[int, int] = (16, 16)) -> Path:
    """A copy without FP8, in float64, where numbers times scales are exact."""
    copy(folder, to)
    tensors = read(folder)
    for key in [k for k in tensors if k.endswith("_scale_inv")]:
        scale, weight = tensors.pop(key), tensors[key.removesuffix("_scale_inv")]
        tensors[key.removesuffix("_scale_inv")] = weight.double() * spread(scale, block, weight)
    write(to, tensors)
    return set_config(to, quantization_config=...)
