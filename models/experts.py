"""Routed experts on one rank: weights, and the kernels that can multiply by them.

T rows, K experts per row, E experts here, I expert width here, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
        return RUN[kernel](x, weights, ids - self.owned[0], self.gate_up, self.down)

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
    """One product per expert that was hit, over its rows. Reads only the weights it needs."""
    routes = Routes(ids, gate_up.shape[0])
    rows = x[routes.rows]
    y = torch.zeros_like(rows)
    start = 0
    for expert, count in enumerate(routes.counts.tolist()):
        if count:
            part = slice(start, start + count)
            y[part] = _mlp(rows[part], gate_up[expert], down[expert])
            start += count
    return routes.sums(y, weights)


def grouped(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Weights, down: Weights) -> Tensor:
    """One product over all experts' rows. Nothing is read back from the device."""
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "models/kernels.py refuses weights that stay FP8"
    routes = Routes(ids, gate_up.shape[0])
    ends = routes.counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[routes.rows], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    # Past the last group are rows of experts that lie elsewhere, with any numbers.
    return routes.sums(y.masked_fill(routes.elsewhere[:, None], 0), weights)


class Routes:
    """The T x K pairs of row and expert, sorted by expert; those of experts that are not here come last."""

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        flat = ids.flatten()
        expert = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
        order = expert.argsort(stable=True)
        self.rows = order // ids.shape[1]
        self.elsewhere = expert[order] == num_experts
        self.counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
        self.counts = self.counts.index_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))[:num_experts]
        self._place = torch.empty_like(order)  # of each pair in the order
        self._place[order] = torch.arange(order.shape[0], device=ids.device)

    def sums(self, y: Tensor, weights: Tensor) -> Tensor:
        """Each row's sum over its experts, [T, H], of `y` [T * K, H] in sorted order; the same bits at every run."""
        wide = wider(y.dtype)
        place = self._place.view(weights.shape)
        return F.embedding_bag(place, y.to(wide), per_sample_weights=weights.to(wide), mode="sum").to(y.dtype)


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


RUN: dict[str, Callable[[Tensor, Tensor, Tensor, Weights, Weights], Tensor]] = {
    "loop": loop,
    "grouped": grouped,
    "dense": dense,
}  # what each takes: models/kernels.py
