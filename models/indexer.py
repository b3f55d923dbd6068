"""The indexer of sparse attention (DeepSeek-V3.2, 2025, section 2): which cached keys each row attends to.

Score of a row and a key: the sum over small heads of weight x relu(query . key); the best `top_k` keys are selected.
Every rank holds all of it and selects for itself. Its input is the same REPLICATED rows everywhere, so the selections
are the same too; slicing it by head would need a sum of [T, S] scores over ranks, more than a layer moves otherwise.
The Hadamard transform and FP8 keys of the released kernel are left out: the one cancels, the other is a rounding.
T rows, B sequences, Q rows of a sequence, I heads, D head size, S slots, C slots selected for a row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.models import config as cfg
from lockstep.models.attention import Tile, tiles
from lockstep.models.cache import KVCache
from lockstep.models.rope import rotate
from lockstep.models.rows import Rows, Selection
from lockstep.models.weights import LayerNorm, Linear, wider


class Indexer(nn.Module):
    """Selects for rows [T, H], whose compressed attention queries are [T, q_lora]."""

    def __init__(self, config: cfg.Indexer, hidden: int, q_lora: int) -> None:
        super().__init__()
        self.config = config
        self.wq_b = Linear(q_lora, config.heads * config.dim)
        self.wk = Linear(hidden, config.dim)
        self.k_norm = LayerNorm(config.dim, 1e-6)
        self.weights_proj = Linear(hidden, config.heads, wide=True)

    def new_cache(self, batch: int, slots: int) -> KVCache:
        weight = self.wk.weight
        return KVCache(batch, slots, 1, self.config.dim, None, dtype=weight.dtype, device=weight.device)

    def forward(self, x: Tensor, compressed: Tensor, rows: Rows, cache: KVCache) -> Selection:
        """The rows' selection. Their keys are cached even where a final selection stands: later rows look for them."""
        cache.write(rows, self._turned(self.k_norm(self.wk(x))[:, None], rows), None)
        if rows.selection is not None and rows.selection.final:
            return rows.selection
        query = self._turned(self.wq_b(compressed).unflatten(-1, (self.config.heads, -1)), rows)
        weights = self.weights_proj(x) * (self.config.heads * self.config.dim) ** -0.5
        count = min(self.config.top_k, max(rows.length(b) for b in range(len(rows.counts))))
        chosen = [self._select(tile, query, weights, rows, cache, count) for tile in tiles(rows, self.config.heads)]
        return Selection(torch.cat(chosen))

    def _turned(self, x: Tensor, rows: Rows) -> Tensor:
        assert rows.cos is not None and rows.sin is not None
        return rotate(x, rows.cos, rows.sin, interleaved=self.config.interleaved)

    def _select(self, tile: Tile, query: Tensor, weights: Tensor, rows: Rows, cache: KVCache, count: int) -> Tensor:
        """`count` slots, or -1, of each row of one block."""
        own = tile.of(rows.slots)[..., None]
        if tile.length <= count:  # everything there is
            every = torch.arange(count, device=rows.device)
            return torch.where(every <= own, every, -1).flatten(0, 1)
        wide = wider(query.dtype)
        keys = cache.first(tile.part, tile.length)[0][:, 0].to(wide)  # [B, S, D]
        folded = tile.of(query).to(wide)  # [B, Q, I, D]
        scores = (folded.flatten(1, 2) @ keys.transpose(1, 2)).relu().unflatten(1, folded.shape[1:3])
        scores = (tile.of(weights)[:, :, None] @ scores)[:, :, 0]  # [B, Q, S]
        return best(scores, torch.arange(tile.length, device=rows.device) <= own, count).flatten(0, 1)


def best(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Slots [B, Q, count] of the largest scores [B, Q, S] among those seen, the lowest of equals; -1 if none is left.

    torch.topk promises no order of equals, but its values are certain: what exceeds the last of them is in, and of
    what equals it the lowest slots, as many as there is room for.
    """
    scores = scores.masked_fill(~seen, float("-inf"))
    last = scores.topk(count).values[..., -1:]
    above, equal = scores > last, (scores == last) & seen
    chosen = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    place = torch.where(chosen, chosen.cumsum(-1) - 1, count)
    slots = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    out = torch.full((*scores.shape[:2], count + 1), -1, dtype=torch.long, device=scores.device)
    return out.scatter_(-1, place, slots)[..., :count]
