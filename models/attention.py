"""Attention of new rows over their sequences' cached keys and values: the one core that every attention uses.

T rows, B sequences, Q rows of a sequence, N query heads here, G key-value heads here, K and D features, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.models.cache import KVCache
from lockstep.models.rows import Rows
from lockstep.models.weights import wider

# Above this many scores at once, sequences are taken one by one: padding them together would cost more than it saves.
MAX_SCORES = 1 << 24


def attend(query: Tensor, cache: KVCache, rows: Rows, scale: float) -> Tensor:
    """Causal softmax attention of `query` [T, N, K] over the slots up to each row's own -> [T, N, D]."""
    if rows.total == 0:
        return query.new_zeros(
            0, query.shape[1], (cache.keys if cache.own_values is None else cache.own_values).shape[-1]
        )
    longest = max(rows.length(b) for b, _, _ in rows.spans())
    if rows.uniform and query.shape[0] * query.shape[1] * longest <= MAX_SCORES:
        folded = query.unflatten(0, (len(rows.counts), -1))
        return _attend(folded, cache, slice(None), rows.slots.view(len(rows.counts), -1), longest, scale).flatten(0, 1)
    out = [
        _attend(query[None, a:z], cache, slice(b, b + 1), rows.slots[None, a:z], rows.length(b), scale)[0]
        for b, a, z in rows.spans()
    ]
    return torch.cat(out)


def _attend(query: Tensor, cache: KVCache, part: slice, slots: Tensor, length: int, scale: float) -> Tensor:
    """[B, Q, N, K] -> [B, Q, N, D]. Query heads of one key-value head are rows of one product."""
    keys = cache.keys[part, :, :length]
    values = keys if cache.own_values is None else cache.own_values[part, :, :length]
    batch, count, heads, _ = query.shape
    groups = keys.shape[1]
    query = (query * scale).unflatten(2, (groups, -1)).transpose(1, 2)  # [B, G, Q, N / G, K]
    shape = query.shape[:-1]
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, shape[2:4])  # [B, G, Q, N / G, S]
    unseen = torch.arange(length, device=slots.device) > slots[:, :, None]
    scores = scores.masked_fill(unseen[:, None, :, None], float("-inf"))
    weights = scores.to(wider(scores.dtype)).softmax(-1).to(query.dtype)
    out = (weights.flatten(2, 3) @ values).unflatten(2, shape[2:4])  # [B, G, Q, N / G, D]
    return torch.Tensor.reshape(out.transpose(1, 2), (batch, count, heads, -1))
