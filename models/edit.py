"""A config.json changed before it is read: fewer layers, another dtype, FP8 or not. No torch here."""

from __future__ import annotations

import copy
from typing import Any

from lockstep.comm.errors import UsageError

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BY_LAYER = ("layer_types", "indexer_types", "index_topk_pattern")  # one entry per layer, the first ones stay


def truncate(raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The first `num_layers` decoder layers, to measure a model's real shapes in less memory; MTP layers stay.

    Dense layers come first in such models, and few: their share stays, at least one of each kind where there is room.
    """
    raw = copy.deepcopy(raw)
    text = raw.get("text_config") or raw
    depth = text.get("num_hidden_layers")
    if not isinstance(depth, int) or not 1 <= num_layers <= depth:
        raise UsageError(f"--num-layers {num_layers} is not between 1 and the {depth} of config.json")
    kinds = text.get("mlp_layer_types")
    dense = list(kinds).index("sparse") if kinds and "sparse" in kinds else text.get("first_k_dense_replace")
    if dense:
        kept = min(max(1, round(dense * num_layers / depth)), num_layers - 1) if num_layers < depth else dense
        if "first_k_dense_replace" in text:
            text["first_k_dense_replace"] = kept
        if kinds:
            text["mlp_layer_types"] = kinds[dense - kept :][:num_layers]
    for field in BY_LAYER:
        if text.get(field):
            text[field] = text[field][:num_layers]
    if text.get("mlp_only_layers"):
        text["mlp_only_layers"] = [i for i in text["mlp_only_layers"] if i < num_layers]
    text["num_hidden_layers"] = num_layers
    return raw


def with_dtype(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    for fields in _parts(raw):
        fields.pop("torch_dtype", None)
        fields["dtype"] = dtype
    return raw


def with_fp8(raw: dict[str, Any], fp8: bool) -> dict[str, Any]:
    """With a quantization_config, its own where it has one, or without."""
    raw = copy.deepcopy(raw)
    found = [part.pop("quantization_config") for part in _parts(raw) if part.get("quantization_config")]
    if fp8:
        raw["quantization_config"] = found[0] if found else FP8
    return raw


def _parts(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [raw, raw["text_config"]] if raw.get("text_config") else [raw]
