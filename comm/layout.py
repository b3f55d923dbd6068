"""An activation knows its layout: which part of the full value this rank holds.

T tokens of the full value, P ranks, c = ceil(T / P).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.errors import LayoutError


class Layout(enum.Enum):
    """What one rank holds of a value of T rows."""

    REPLICATED = "replicated"  # all T rows, final
    SHARDED = "sharded"  # rows [r*c, (r+1)*c) that exist: a tail rank may hold fewer than c, or none
    PARTIAL = "partial"  # all T rows of a sum over ranks that is not finished

    def __str__(self) -> str:
        return self.name


REPLICATED, SHARDED, PARTIAL = Layout.REPLICATED, Layout.SHARDED, Layout.PARTIAL


@dataclass(frozen=True, slots=True)
class Activation:
    """`data` [rows here, ...] of a value of `tokens` rows, in `layout`.

    The layout is never inferred from a shape: with T = 1 or T = P a shard and the full rows look alike
    (vllm-project/vllm#50681).
    """

    data: Tensor
    layout: Layout
    tokens: int

    def __post_init__(self) -> None:
        rows = self.data.shape[0]
        fits = rows <= self.tokens if self.layout is SHARDED else rows == self.tokens
        if not fits:
            raise LayoutError(f"{rows} rows cannot be a {self.layout} activation of {self.tokens} tokens")

    def expect(self, layout: Layout, at: str) -> Tensor:
        """The data, if the layout is the one that the code at boundary `at` is written for."""
        if self.layout is not layout:
            raise LayoutError(f"{at} takes a {layout} activation and was given a {self.layout} one")
        return self.data

    def rowwise(self, function: Callable[[Tensor], Tensor], at: str) -> Activation:
        """Apply a function that treats each row by itself. An unfinished sum has no rows to apply it to."""
        if self.layout is PARTIAL:
            raise LayoutError(f"{at} applies a row-wise function to a PARTIAL activation; convert it first")
        return Activation(function(self.data), self.layout, self.tokens)

    def add(self, other: Activation, at: str) -> Activation:
        """Sum of two activations of the same value shape and layout."""
        self._same_as(other, at, "adds")
        return Activation(self.data + other.data, self.layout, self.tokens)

    def beside(self, other: Activation, at: str) -> Activation:
        """The two values' features side by side, [rows, W1 + W2]."""
        self._same_as(other, at, "puts side by side")
        return Activation(torch.cat((self.data, other.data), -1), self.layout, self.tokens)

    def split(self, width: int) -> tuple[Activation, Activation]:
        """Undo `beside`: the first `width` features, and the rest."""
        first, rest = self.data[..., :width], self.data[..., width:]
        return Activation(first, self.layout, self.tokens), Activation(rest, self.layout, self.tokens)

    def _same_as(self, other: Activation, at: str, verb: str) -> None:
        if self.layout is not other.layout or self.tokens != other.tokens:
            raise LayoutError(
                f"{at} {verb} a {self.layout} activation of {self.tokens} tokens "
                f"and a {other.layout} one of {other.tokens}"
            )
