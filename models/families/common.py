"""Fields that several families spell the same way."""

from __future__ import annotations

from typing import Any

from lockstep.models.config import Dense, Layer, MoE, Rope, Router, Yarn

# DeepSeek's MTP block: a decoder layer numbered on from the model's own, with its extra parts beside it.
NUMBERED_MTP = (
    ("embed_tokens.", "layers.{n}.embed_tokens."),
    ("enorm.", "layers.{n}.enorm."),
    ("hnorm.", "layers.{n}.hnorm."),
    ("eh_proj.", "layers.{n}.eh_proj."),
    ("norm.", "layers.{n}.shared_head.norm."),
    ("head.", "layers.{n}.shared_head.head."),
    ("block.", "layers.{n}."),
)

# Qwen's MTP blocks: layers of their own, behind one projection and before one norm that they share.
QWEN_MTP = (
    ("embed_tokens.", "mtp.embed_tokens."),
    ("enorm.", "mtp.pre_fc_norm_embedding."),
    ("hnorm.", "mtp.pre_fc_norm_hidden."),
    ("eh_proj.", "mtp.fc."),
    ("norm.", "mtp.norm."),
    ("head.", "mtp.lm_head."),
    ("block.", "mtp.layers.{i}."),
)


def rope(raw: dict[str, Any], dim: int, *, interleaved: bool) -> Rope:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as files released before 2026 have it."""
    fields = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = float(fields.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind == "default":
        return Rope(dim, theta, interleaved)
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} is not one of default, yarn")
    original = int(fields["original_max_position_embeddings"])
    factor = fields.get("factor") or raw["max_position_embeddings"] / original
    yarn = Yarn(
        factor=float(factor),
        original_max_position=original,
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        mscale=float(fields.get("mscale") or 0),
        mscale_all_dim=float(fields.get("mscale_all_dim") or 0),
        attention_factor=fields.get("attention_factor"),
        truncate=bool(fields.get("truncate", True)),
    )
    return Rope(dim, theta, interleaved, yarn)


def partial_dim(raw: dict[str, Any], head_dim: int, default: float) -> int:
    """How many features of a head the rotary embedding turns."""
    fields = raw.get("rope_parameters") or {}
    factor = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor", default))
    return int(head_dim * factor)


def sigmoid_moe(raw: dict[str, Any]) -> MoE:
    """DeepSeek-V3's experts: sigmoid scores, a selection bias, the best groups first, a shared expert."""
    router = Router(
        experts=raw["n_routed_experts"],
        top_k=raw["num_experts_per_tok"],
        groups=raw.get("n_group") or 1,
        top_groups=raw.get("topk_group") or 1,
        normalise=raw.get("norm_topk_prob", True),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
    )
    scoring = raw.get("scoring_func", "sigmoid")
    if scoring != "sigmoid" or raw.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError(f"scoring_func {scoring!r} with topk_method {raw.get('topk_method')!r} is not supported")
    return MoE(router, raw["moe_intermediate_size"], raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0))


def layers(raw: dict[str, Any], mixer: Any, first: int, count: int) -> tuple[Layer, ...]:
    """`count` layers from number `first` on, dense or with experts as `mlp_layer_types` says for each.

    Without it, or past its end, they are dense below `first_k_dense_replace`.
    """
    dense, moe = Dense(raw["intermediate_size"]), sigmoid_moe(raw)
    start, every = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
    named = flags(raw, "mlp_layer_types", {"dense": False, "sparse": True})

    def has_experts(number: int) -> bool:
        return named[number] if number < len(named) else number >= start and number % every == 0

    return tuple(Layer(mixer, moe if has_experts(number) else dense) for number in range(first, first + count))


def flags(raw: dict[str, Any], field: str, meaning: dict[str, bool]) -> list[bool]:
    """What the names of a list of them mean; [] where the config has no such list."""
    names = list(raw.get(field) or ())
    for name in names:
        if name not in meaning:
            raise ValueError(f"{field} {name!r} is not one of {', '.join(meaning)}")
    return [meaning[name] for name in names]


def check_activation(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; it must be silu")


def dtype(raw: dict[str, Any]) -> str:
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32")


def fp8_block(raw: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where config.json has no quantization_config."""
    fields = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if not fields:
        return None
    method, form, block = (
        fields.get("quant_method"),
        fields.get("fmt", "e4m3"),
        fields.get("weight_block_size", [128, 128]),
    )
    if method != "fp8" or form != "e4m3":
        raise ValueError(f"quant_method {method!r} with fmt {form!r} is not supported; it must be fp8 with e4m3")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ValueError(f"weight_block_size {block!r} is not supported; it must be two numbers, like [128, 128]")
    return block[0], block[1]
