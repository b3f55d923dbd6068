"""Another legitimate order of summation: one rank adds up as P ranks would, rounding where they round.

What differs between two right runs is this and nothing else, so it measures how far two right runs may lie apart.
T rows, P parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.comm.layout import shard_range
from lockstep.models.experts import KERNELS, Experts
from lockstep.models.model import Model
from lockstep.models.weights import Linear, Shard


def split_sums(model: Model, parts: int) -> None:
    """Cut every contraction that `parts` ranks would cut, and every product's rows as they would be sharded."""
    with torch.device("meta"):
        shards = [Model(model.config, model.placement, Shard(p, parts), len(model.mtp)) for p in range(parts)]
    cut = [dict(shard.named_modules()) for shard in shards]
    for name, layer in model.named_modules():
        theirs = [modules[name] for modules in cut if name in modules]
        if isinstance(layer, Linear):
            layer.forward = _linear(layer, [t.cols for t in theirs if isinstance(t, Linear)], parts)  # type: ignore[method-assign, assignment]
        elif isinstance(layer, Experts):
            layer.forward = _experts(layer, [t for t in theirs if isinstance(t, Experts)])  # type: ignore[method-assign, assignment]


def _linear(layer: Linear, cols: list[tuple[int, int]], parts: int) -> Callable[[Tensor], Tensor]:
    if len(set(cols)) == 1:

        def by_rows(x: Tensor) -> Tensor:
            sizes = [b - a for a, b in (shard_range(x.shape[0], p, parts) for p in range(parts))]
            return torch.cat([F.linear(rows, layer.weight, layer.bias) for rows in x.split(sizes)])

        return by_rows

    def by_columns(x: Tensor) -> Tensor:
        biases = [layer.bias] + [None] * (parts - 1)
        sums = [F.linear(x[:, a:b], layer.weight[:, a:b], bias) for (a, b), bias in zip(cols, biases, strict=True)]
        return _add_up(sums)

    return by_columns


def _experts(layer: Experts, shards: list[Experts]) -> Callable[[Tensor, Tensor, Tensor, str], Tensor]:
    def of_shard(x: Tensor, weights: Tensor, ids: Tensor, kernel: str, shard: Experts) -> Tensor:
        (first, last), (a, b) = shard.owned, shard.part
        gate_up = layer.gate_up[first:last].unflatten(1, (2, -1))[:, :, a:b].flatten(1, 2)
        return KERNELS[kernel].run(x, weights, ids - first, gate_up, layer.down[first:last, :, a:b])

    def in_parts(x: Tensor, weights: Tensor, ids: Tensor, kernel: str) -> Tensor:
        return _add_up([of_shard(x, weights, ids, kernel, shard) for shard in shards])

    return in_parts


def _add_up(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
