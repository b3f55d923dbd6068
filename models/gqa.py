"""Grouped-query attention with partial RoPE and optional query and key norms (GLM-4.5), and gated (Qwen3-Next).

T rows, H hidden, N query heads here, G key-value heads here, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.models.attention import attend
from lockstep.models.cache import KVCache
from lockstep.models.config import GQA
from lockstep.models.rope import rotate
from lockstep.models.rows import Rows
from lockstep.models.weights import Linear, RMSNorm, Shard


class GroupedQueryAttention(nn.Module):
    """[T, H] rows -> [T, H], this rank's heads' part of a sum over ranks."""

    def __init__(self, config: GQA, hidden: int, eps: float, zero_centred: bool, shard: Shard) -> None:
        super().__init__()
        self.config = config
        heads = shard.of(config.heads)
        # With fewer key-value heads than ranks each is held by several (CASES D8).
        kv = shard.of(config.kv_heads) if config.kv_heads >= shard.size else _shared_head(config, shard)
        self.heads, self.kv_heads = heads[1] - heads[0], kv[1] - kv[0]
        d, gated = config.head_dim, config.gated

        def project(count: int, part: tuple[int, int], width: int) -> Linear:
            return Linear(hidden, count * width, bias=config.bias, rows=[(part[0] * width, part[1] * width)])

        self.q_proj = project(config.heads, heads, 2 * d if gated else d)
        self.k_proj = project(config.kv_heads, kv, d)
        self.v_proj = project(config.kv_heads, kv, d)
        # GLM-4.5's output projection never has a bias.
        self.o_proj = Linear(config.heads * d, hidden, bias=config.bias and gated, cols=(heads[0] * d, heads[1] * d))
        self.q_norm = RMSNorm(d, eps, zero_centred) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, eps, zero_centred) if config.qk_norm else nn.Identity()

    def new_cache(self, batch: int, slots: int) -> KVCache:
        d, weight = self.config.head_dim, self.k_proj.weight
        return KVCache(batch, slots, self.kv_heads, d, d, dtype=weight.dtype, device=weight.device)

    def forward(self, x: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        assert rows.cos is not None and rows.sin is not None
        query, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).tensor_split([self.config.head_dim], -1)
        query = self.q_norm(query)
        key = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        value = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        cache.write(rows, rotate(key, rows.cos, rows.sin, interleaved=False), value)
        query = rotate(query, rows.cos, rows.sin, interleaved=False)
        out = attend(query, cache, rows, self.config.head_dim**-0.5)
        if self.config.gated:
            out = out * gate.sigmoid()
        y: Tensor = self.o_proj(out.flatten(1))
        return y


def _shared_head(config: GQA, shard: Shard) -> tuple[int, int]:
    head = shard.rank * config.kv_heads // shard.size
    return head, head + 1
