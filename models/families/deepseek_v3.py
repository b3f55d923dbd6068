"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024): MLA, sigmoid routing in groups, MTP."""

from __future__ import annotations

from typing import Any

from lockstep.models.config import MLA, Config
from lockstep.models.families import common


def config(raw: dict[str, Any]) -> Config:
    common.check_activation(raw)
    rope = common.rope(raw, raw["qk_rope_head_dim"], interleaved=raw.get("rope_interleave", True))
    scale = (raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]) ** -0.5
    mixer = MLA(
        heads=raw["num_attention_heads"],
        q_lora=raw["q_lora_rank"],
        kv_lora=raw["kv_lora_rank"],
        nope=raw["qk_nope_head_dim"],
        rope=raw["qk_rope_head_dim"],
        value=raw["v_head_dim"],
        bias=raw.get("attention_bias", False),
        norm_eps=1e-6,
        softmax_scale=scale * (rope.yarn.softmax_scale() if rope.yarn else 1.0),
    )
    depth = raw["num_hidden_layers"]
    return Config(
        family="deepseek_v3",
        hidden=raw["hidden_size"],
        vocab=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        eps=raw["rms_norm_eps"],
        rope=rope,
        tied=raw.get("tie_word_embeddings", False),
        dtype=common.dtype(raw),
        layers=common.layers(raw, mixer, 0, depth),
        mtp=common.layers(raw, mixer, depth, raw.get("num_nextn_predict_layers") or 0),
        mtp_names=common.NUMBERED_MTP,
    )
