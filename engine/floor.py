"""Another legitimate order of summation: one rank adds up as P ranks would, rounding where they round.

What differs between two right runs is this and nothing else, so it measures how far two right runs may lie apart.
T rows, P parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.comm.shard import Range, Shard, shard_range
from lockstep.models.experts import Experts, loop
from lockstep.models.fp8 import product
from lockstep.models.model import Model
from lockstep.models.weights import Linear


def split_sums(model: Model, parts: int) -> None:
    """Cut every contraction that `parts` ranks would cut, and every product's rows as they would be sharded.

    Weights that stay FP8 keep their contractions whole.
    """
    with torch.device("meta"):
        shards = [Model(model.config, model.placement, Shard(p, parts), len(model.mtp)) for p in range(parts)]
    cut = [dict(shard.named_modules()) for shard in shards]
    for name, layer in model.named_modules():
        theirs = [modules[name] for modules in cut if name in modules]
        if isinstance(layer, Linear):
            layer.forward = _linear(layer, [t.cols for t in theirs if isinstance(t, Linear)])  # type: ignore[method-assign, assignment]
        elif isinstance(layer, Experts) and isinstance(layer.gate_up, Tensor):
            layer.forward = _experts(layer, [t for t in theirs if isinstance(t, Experts)])  # type: ignore[method-assign, assignment]


def _linear(layer: Linear, cols: list[Range]) -> Callable[[Tensor], Tensor]:
    whole, weight, parts = layer.forward, layer.weight, len(cols)
    if len(set(cols)) == 1 or not isinstance(weight, Tensor):

        def by_rows(x: Tensor) -> Tensor:
            sizes = [b - a for a, b in (shard_range(x.shape[0], p, parts) for p in range(parts))]
            return torch.cat([whole(rows) for rows in x.split(sizes)])

        return by_rows

    def by_columns(x: Tensor) -> Tensor:
        biases = [layer.bias] + [None] * (parts - 1)
        return _add_up([product(x[:, a:b], weight[:, a:b], bias) for (a, b), bias in zip(cols, biases, strict=True)])

    return by_columns


def _experts(layer: Experts, shards: list[Experts]) -> Callable[[Tensor, Tensor, Tensor, str], Tensor]:
    gate_up, down = layer.gate_up, layer.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)

    def of_shard(x: Tensor, weights: Tensor, ids: Tensor, shard: Experts) -> Tensor:
        (first, last), (a, b) = shard.owned, shard.part
        wide = gate_up[first:last].unflatten(1, (2, -1))[:, :, a:b].flatten(1, 2)
        return loop(x, weights, ids - first, wide, down[first:last, :, a:b])  # type: ignore[arg-type]

    def in_parts(x: Tensor, weights: Tensor, ids: Tensor, kernel: str) -> Tensor:
        return _add_up([of_shard(x, weights, ids, shard) for shard in shards])

    return in_parts


def _add_up(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
