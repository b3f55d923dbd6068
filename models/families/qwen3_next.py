"""Qwen3-Next (Qwen team, 2025): three delta nets to one attention, gated both; softmax routing, gated shared expert."""

from __future__ import annotations

from typing import Any

from lockstep.models.config import GQA, Config, DeltaNet, Dense, Layer, MoE, Router
from lockstep.models.families import common


def config(raw: dict[str, Any]) -> Config:
    # The released config.json does not count its MTP layers; there is one.
    return translate(raw, "qwen3_next", num_mtp=raw.get("num_nextn_predict_layers", 1), packed=True)


def translate(raw: dict[str, Any], family: str, *, num_mtp: int, packed: bool) -> Config:
    common.check_activation(raw)
    moe, dense = experts(raw), Dense(raw.get("intermediate_size", 0))
    attention = GQA(
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        bias=raw.get("attention_bias", False),
        qk_norm=True,
        gated=True,
    )
    delta_net = DeltaNet(
        key_heads=raw["linear_num_key_heads"],
        value_heads=raw["linear_num_value_heads"],
        key_dim=raw["linear_key_head_dim"],
        value_dim=raw["linear_value_head_dim"],
        taps=raw["linear_conv_kernel_dim"],
        packed=packed,
    )
    mixers: dict[str, GQA | DeltaNet] = {"linear_attention": delta_net, "full_attention": attention}
    every, without = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return Config(
        family=family,
        hidden=raw["hidden_size"],
        vocab=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        eps=raw["rms_norm_eps"],
        rope=common.rope(raw, common.partial_dim(raw, attention.head_dim, 0.25), interleaved=False),
        tied=raw.get("tie_word_embeddings", False),
        dtype=common.dtype(raw),
        layers=tuple(
            Layer(mixers[kind], moe if (i + 1) % every == 0 and i not in without else dense)
            for i, kind in enumerate(layer_types(raw))
        ),
        mtp=(Layer(attention, moe),) * num_mtp,
        mtp_names=common.QWEN_MTP,
        ignored=("visual.",),
        renamed=(("mlp.shared_experts.", "mlp.shared_expert."),),
        zero_centred=True,
    )


def experts(raw: dict[str, Any]) -> MoE:
    router = Router(
        experts=raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        groups=1,
        top_groups=1,
        normalise=raw.get("norm_topk_prob", True),
        scale=1.0,
        scoring="softmax",
    )
    return MoE(router, raw["moe_intermediate_size"], raw["shared_expert_intermediate_size"], shared_gate=True)


def layer_types(raw: dict[str, Any]) -> list[str]:
    depth, interval = raw["num_hidden_layers"], raw.get("full_attention_interval", 4)
    kinds = raw.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(depth)
    ]
    unknown = sorted(set(kinds) - {"full_attention", "linear_attention"})
    if unknown or len(kinds) != depth:
        raise ValueError(
            f"layer_types must be {depth} times linear_attention or full_attention, not {len(kinds)} times "
            f"{', '.join(sorted(set(kinds)))}"
        )
    return list(kinds)
