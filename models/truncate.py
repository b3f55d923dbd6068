"""A configuration with fewer layers, to measure a model's real shapes in less memory. No torch here."""

from __future__ import annotations

import copy
from typing import Any

from lockstep.comm.errors import UsageError

BY_LAYER = ("layer_types", "indexer_types", "index_topk_pattern")  # one entry per layer, the first ones stay


def truncate(raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """config.json with the first `num_layers` decoder layers; MTP layers stay.

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
