"""Routed experts on one rank: weights, and the kernels that can multiply by them.

T rows, K experts per row, E experts here, I expert width here, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.fp8 import Scaled, product
from lockstep.models.weights import Piece, wider

Weights = nn.Parameter | Scaled


class Experts(nn.Module):
    """Experts [first, last) of the model, each whole or a slice [a, b) of its width.

    `gate_up` [E, 2I, H] has an expert's gate rows, then its up rows; `down` is [E, H, I].
    """

    def __init__(
        self, hidden: int, inter: int, num_experts: int, owned: tuple[int, int], part: tuple[int, int]
    ) -> None:
        super().__init__()
        self.hidden, self.inter, self.num_experts, self.owned, self.part = hidden, inter, num_experts, owned, part
        count, width = owned[1] - owned[0], part[1] - part[0]
        self.gate_up: Weights = nn.Parameter(torch.empty(count, 2 * width, hidden), requires_grad=False)
        self.down: Weights = nn.Parameter(torch.empty(count, hidden, width), requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, kernel: str) -> Tensor:
        """[T, H] rows with routing [T, K] -> [T, H]: what the experts here add to the rows' sums."""
        return KERNELS[kernel].run(x, weights, ids - self.owned[0], self.gate_up, self.down)

    scalable_parameters = ("gate_up", "down")

    def pieces(self) -> Iterator[Piece]:
        columns = slice(*self.part)
        width = self.part[1] - self.part[0]
        wide, tall = (self.inter, self.hidden), (self.hidden, self.inter)
        for here, expert in enumerate(range(*self.owned)):
            gate, up, down = names_of(expert)
            yield Piece(gate, "gate_up", wide, (columns,), (here, slice(0, width)))
            yield Piece(up, "gate_up", wide, (columns,), (here, slice(width, 2 * width)))
            yield Piece(down, "down", tall, (slice(None), columns), (here,))


def names_of(expert: int) -> tuple[str, str, str]:
    return f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight", f"{expert}.down_proj.weight"


def loop(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Weights, down: Weights) -> Tensor:
    """One product per expert that was hit, its rows sorted together. Reads only the weights it needs."""
    num_experts, top_k = gate_up.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts).argsort(stable=True)
    counts = torch.bincount(flat[(flat >= 0) & (flat < num_experts)], minlength=num_experts).tolist()
    out = torch.zeros(x.shape, dtype=wider(x.dtype), device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = order[start : start + count]
            rows = pairs // top_k
            y = _mlp(x[rows], gate_up[expert], down[expert])
            out.index_add_(0, rows, y * weights.flatten()[pairs, None].to(out.dtype))
            start += count
    return out.to(x.dtype)


def dense(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Weights, down: Weights) -> Tensor:
    """Every expert on every row, weighted by zero where it was not chosen: the plain form, the reference."""
    num_experts = gate_up.shape[0]
    out = torch.zeros(x.shape, dtype=wider(x.dtype), device=x.device)
    for expert in range(num_experts):
        weight = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        out += _mlp(x, gate_up[expert], down[expert]) * weight.to(out.dtype)
    return out.to(x.dtype)


def _mlp(x: Tensor, gate_up: Tensor | Scaled, down: Tensor | Scaled) -> Tensor:
    gate, up = product(x, gate_up).chunk(2, -1)
    return product(F.silu(gate) * up, down)


@dataclass(frozen=True)
class Kernel:
    """One way to run routed experts, and what it takes."""

    run: Callable[[Tensor, Tensor, Tensor, Weights, Weights], Tensor]
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    min_rows: int = 0


ALL_DTYPES = ("float32", "bfloat16", "float16", "float64")
KERNELS = {
    "loop": Kernel(loop, ALL_DTYPES, ("cpu", "cuda")),
    "dense": Kernel(dense, ALL_DTYPES, ("cpu", "cuda")),
}
