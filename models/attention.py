"""Attention of new rows over their sequences' cached keys and values: the one core that every attention uses.

T rows, B sequences, Q rows of a sequence, N query heads here, G key-value heads here, K and D features, S slots,
C slots selected for a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.models.cache import KVCache
from lockstep.models.rows import Rows, Selection
from lockstep.models.weights import wider

# Above this many scores at once, sequences are taken one by one (padding them together would cost more than it saves),
# and a long one's rows in parts.
MAX_SCORES = 1 << 24
# Copying a key to the row that selected it costs about as much as letting that row score two keys more.
GATHER_COST = 2


@dataclass(frozen=True)
class Tile:
    """Rows `first` to `last` as one block [B, Q]: Q rows of each of the sequences `part`, over `length` slots."""

    part: slice
    batch: int
    first: int
    last: int
    length: int

    def of(self, values: Tensor) -> Tensor:
        """The block's part of a value per row: [T, ...] -> [B, Q, ...]."""
        count = (self.last - self.first) // self.batch
        return values[self.first : self.last].reshape(self.batch, count, *values.shape[1:])


def tiles(rows: Rows, heads: int) -> Iterator[Tile]:
    """The rows in blocks that are scored at once: all of them, or a sequence at a time where their counts differ.

    `heads` is how many scores a row has for each slot.
    """
    longest = max(rows.length(b) for b in range(len(rows.counts)))
    if rows.uniform and rows.total * heads * longest <= MAX_SCORES:
        yield Tile(slice(None), len(rows.counts), 0, rows.total, longest)
        return
    for b, first, last in rows.spans():
        length = rows.length(b)
        step = max(1, MAX_SCORES // (heads * length))
        for start in range(first, last, step):
            yield Tile(slice(b, b + 1), 1, start, min(start + step, last), length)


def attend(query: Tensor, cache: KVCache, rows: Rows, scale: float, selection: Selection | None = None) -> Tensor:
    """Softmax attention of `query` [T, N, K] over the selected slots, by default all up to each row's own -> [T, N, D].

    Few rows gather the keys that are theirs; many share one product with all keys, and what is not theirs is masked.
    """
    out = []
    for tile in tiles(rows, query.shape[1]):
        block = tile.of(query)
        chosen = None if selection is None else tile.of(selection.slots)
        if chosen is None:
            seen = torch.arange(tile.length, device=rows.device) <= tile.of(rows.slots)[..., None]
            done = _attend(block, *cache.first(tile.part, tile.length), seen, scale)
        elif GATHER_COST * chosen[0].numel() > tile.length:
            done = _attend(block, *cache.first(tile.part, tile.length), _marked(chosen, tile.length), scale)
        else:
            seen = chosen.flatten(0, 1)[:, None] >= 0
            done = _attend(block.flatten(0, 1)[:, None], *cache.at(tile.part, chosen), seen, scale)
        out.append(done.flatten(0, 1))
    return torch.cat(out)


def _marked(slots: Tensor, length: int) -> Tensor:
    """[B, Q, C] slots, -1 for none -> [B, Q, S] whether a slot is among them."""
    seen = torch.zeros(*slots.shape[:2], length + 1, dtype=torch.bool, device=slots.device)
    return seen.scatter_(-1, torch.where(slots < 0, length, slots), True)[..., :length]


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[B, Q, N, K] over [B, G, S, K], where seen [B, Q, S] -> [B, Q, N, D].

    Query heads of one key-value head are rows of one product.
    """
    batch, count, heads, _ = query.shape
    groups = keys.shape[1]
    query = (query * scale).unflatten(2, (groups, -1)).transpose(1, 2)  # [B, G, Q, N / G, K]
    shape = query.shape[:-1]
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, shape[2:4])  # [B, G, Q, N / G, S]
    scores = scores.masked_fill(~seen[:, None, :, None], float("-inf"))
    weights = scores.to(wider(scores.dtype)).softmax(-1).to(query.dtype)
    out = (weights.flatten(2, 3) @ values).unflatten(2, shape[2:4])  # [B, G, Q, N / G, D]
    return torch.Tensor.reshape(out.transpose(1, 2), (batch, count, heads, -1))
