"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over a compressed KV cache.

The cache holds one row per token, the normed latent and the rotated shared key, [kv_lora + rope]. The up-projections
of keys and values are absorbed into the query and the output, so a cached row is never expanded. An indexer makes the
attention sparse, in this layer and in those after it that have none.
T rows, H hidden, N heads here, L kv_lora, R rope features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.models.attention import attend
from lockstep.models.cache import KVCache
from lockstep.models.config import MLA
from lockstep.models.fp8 import dense
from lockstep.models.indexer import Indexer
from lockstep.models.rope import rotate
from lockstep.models.rows import Rows
from lockstep.models.weights import Linear, RMSNorm, Shard


class LatentAttention(nn.Module):
    """[T, H] rows -> [T, H], this rank's heads' part of a sum over ranks."""

    def __init__(self, config: MLA, hidden: int, interleaved: bool, shard: Shard) -> None:
        super().__init__()
        self.config, self.interleaved = config, interleaved
        heads = shard.of(config.heads)
        self.heads = heads[1] - heads[0]

        def of_heads(width: int) -> list[tuple[int, int]]:
            return [(heads[0] * width, heads[1] * width)]

        key = config.nope + config.rope
        self.indexer: Indexer | None = None
        if config.q_lora is None:
            self.q_proj = Linear(hidden, config.heads * key, rows=of_heads(key))
        else:
            self.q_a_proj = Linear(hidden, config.q_lora, bias=config.bias)
            self.q_a_layernorm = RMSNorm(config.q_lora, config.norm_eps)
            self.q_b_proj = Linear(config.q_lora, config.heads * key, rows=of_heads(key))
            if config.indexer is not None:
                self.indexer = Indexer(config.indexer, hidden, config.q_lora)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora + config.rope, bias=config.bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora, config.norm_eps)
        up = config.nope + config.value
        self.kv_b_proj = Linear(config.kv_lora, config.heads * up, rows=of_heads(up))
        self.o_proj = Linear(config.heads * config.value, hidden, bias=config.bias, cols=of_heads(config.value)[0])

    def new_cache(self, batch: int, slots: int) -> KVCache:
        width = self.config.kv_lora + self.config.rope
        weight = self.kv_b_proj.weight
        index = self.indexer.new_cache(batch, slots) if self.indexer is not None else None
        return KVCache(batch, slots, 1, width, None, dtype=weight.dtype, device=weight.device, index=index)

    def forward(self, x: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        c = self.config
        assert rows.cos is not None and rows.sin is not None
        latent, key = self.kv_a_proj_with_mqa(x).split((c.kv_lora, c.rope), -1)
        key = rotate(key[:, None], rows.cos, rows.sin, interleaved=self.interleaved)
        cache.write(rows, torch.cat((self.kv_a_layernorm(latent)[:, None], key), -1), None)

        if c.q_lora is None:
            query = self.q_proj(x)
        else:
            compressed = self.q_a_layernorm(self.q_a_proj(x))
            query = self.q_b_proj(compressed)
            if self.indexer is not None:
                assert cache.index is not None
                rows.selection = self.indexer(x, compressed, rows, cache.index)
        nope, rope = query.unflatten(-1, (self.heads, -1)).split((c.nope, c.rope), -1)
        rope = rotate(rope, rows.cos, rows.sin, interleaved=self.interleaved)
        up = dense(self.kv_b_proj.weight).unflatten(0, (self.heads, -1))  # [N, nope + value, L]
        absorbed = torch.bmm(nope.transpose(0, 1), up[:, : c.nope]).transpose(0, 1)  # [T, N, L]
        out = attend(torch.cat((absorbed, rope), -1), cache, rows, c.softmax_scale, rows.selection)[..., : c.kv_lora]
        out = torch.bmm(out.transpose(0, 1), up[:, c.nope :].transpose(1, 2)).transpose(0, 1)  # [T, N, value]
        y: Tensor = self.o_proj(out.flatten(1))
        return y
