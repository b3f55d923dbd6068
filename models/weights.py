"""The layers that own weights. Each knows which region of which checkpoint tensors it holds on this rank.

T rows, I input features, O output features, H hidden, V vocabulary, E experts here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.shard import Range, Shard, shard_range
from lockstep.models.fp8 import Scaled, product


@dataclass(frozen=True)
class Piece:
    """The region `source` of a stored tensor of `shape`, and the place in a parameter that it fills.

    `name` is the tensor's, below the layer's own name in the checkpoint.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[int | slice, ...] = ()


def whole(name: str, parameter: Tensor) -> Piece:
    """All of a stored tensor that has the parameter's name and shape."""
    return Piece(name, name, tuple(parameter.shape), ())


class Linear(nn.Module):
    """`x @ weight.T + bias`, holding the `rows` (outputs) and `cols` (inputs) of the whole weight; None is all.

    A `wide` one is kept in float32 or wider whatever the model's dtype, and computes in it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        rows: Sequence[Range] | None = None,
        cols: Range | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.whole = (outputs, inputs)
        self.rows, self.cols = tuple(rows or [(0, outputs)]), cols or (0, inputs)
        height, width = sum(b - a for a, b in self.rows), self.cols[1] - self.cols[0]
        self.weight: nn.Parameter | Scaled = nn.Parameter(torch.empty(height, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(height), requires_grad=False) if bias else None
        self.wide_parameters = ("weight", "bias") if wide else ()
        # The bias of a product whose inputs are split belongs to the sum, so one rank adds it.
        self.adds_bias = self.cols[0] == 0

    def forward(self, x: Tensor) -> Tensor:
        if self.wide_parameters:
            x = x.to(self.weight.dtype)
        return product(x, self.weight, self.bias if self.adds_bias else None)

    scalable_parameters = ("weight",)

    def pieces(self) -> Iterator[Piece]:
        done = 0
        for a, b in self.rows:
            into = slice(done, done + b - a)
            yield Piece("weight", "weight", self.whole, (slice(a, b), slice(*self.cols)), (into,))
            if self.bias is not None:
                yield Piece("bias", "bias", self.whole[:1], (slice(a, b),), (into,))
            done = into.stop


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 or wider.

    The weight of a `zero_centred` one is stored less 1; it multiplies before the result is narrowed, the other after.
    """

    def __init__(self, width: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, zero_centred
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(wider(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centred:
            return (wide * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return wide.to(x.dtype) * self.weight

    def pieces(self) -> Iterator[Piece]:
        yield whole("weight", self.weight)


class LayerNorm(nn.Module):
    """Layer norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def pieces(self) -> Iterator[Piece]:
        yield whole("weight", self.weight)
        yield whole("bias", self.bias)


class Vocabulary(nn.Module):
    """This rank's rows [V_here, H] of an embedding or of an LM head; the last rank may hold fewer (CASES D7)."""

    def __init__(self, vocab: int, hidden: int, shard: Shard) -> None:
        super().__init__()
        self.vocab, self.chunk = vocab, -(-vocab // shard.size)
        self.first, self.last = shard_range(vocab, shard.rank, shard.size)
        self.weight = nn.Parameter(torch.empty(self.last - self.first, hidden), requires_grad=False)

    @property
    def here(self) -> slice:
        return slice(self.first, self.last)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, H], zero where another rank holds the id: a part of a sum over ranks."""
        here = (tokens >= self.first) & (tokens < self.last)
        if self.last == self.first:
            return self.weight.new_zeros(tokens.shape[0], self.weight.shape[1])
        rows = F.embedding(torch.where(here, tokens - self.first, 0), self.weight)
        return rows * here[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V_here]."""
        return F.linear(hidden, self.weight)

    def pieces(self) -> Iterator[Piece]:
        yield Piece("weight", "weight", (self.vocab, self.weight.shape[1]), (self.here,))


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms, softmax and routing: float32, or float64 where the model is float64."""
    return torch.promote_types(dtype, torch.float32)
