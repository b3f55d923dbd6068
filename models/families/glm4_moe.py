"""GLM-4.5 and 4.6 (Zhipu AI, 2025): grouped-query attention with partial RoPE, DeepSeek-V3's experts and MTP."""

from __future__ import annotations

from typing import Any

from lockstep.models.config import GQA, Config
from lockstep.models.families import common


def config(raw: dict[str, Any]) -> Config:
    common.check_activation(raw)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    mixer = GQA(
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=head_dim,
        bias=raw.get("attention_bias", False),
        qk_norm=raw.get("use_qk_norm", False),
    )
    depth = raw["num_hidden_layers"]
    return Config(
        family="glm4_moe",
        hidden=raw["hidden_size"],
        vocab=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        eps=raw["rms_norm_eps"],
        rope=common.rope(raw, common.partial_dim(raw, head_dim, 0.5), interleaved=False),
        tied=raw.get("tie_word_embeddings", False),
        dtype=common.dtype(raw),
        layers=common.layers(raw, mixer, 0, depth),
        mtp=common.layers(raw, mixer, depth, raw.get("num_nextn_predict_layers") or 0),
        mtp_names=common.NUMBERED_MTP,
    )
