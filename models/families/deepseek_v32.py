"""DeepSeek-V3.2 (DeepSeek-AI, 2025): DeepSeek-V3 with an indexer in every layer, whose RoPE pairs halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.models.config import MLA, Config, Indexer, Layer
from lockstep.models.families import deepseek_v3


def config(raw: dict[str, Any]) -> Config:
    return sparse(raw, "deepseek_v32", interleaved=False, selects=[True] * raw["num_hidden_layers"])


def sparse(raw: dict[str, Any], family: str, *, interleaved: bool, selects: Sequence[bool]) -> Config:
    """DeepSeek-V3 with an indexer in the layers that select for themselves; MTP blocks always do."""
    base = deepseek_v3.config(raw)
    if raw["q_lora_rank"] is None:
        raise ValueError("q_lora_rank is null, but the indexer reads the compressed query")
    if len(selects) != len(base.layers) or not selects[0]:
        raise ValueError(f"{len(selects)} indexer types for {len(base.layers)} layers, of which the first must be full")
    indexer = Indexer(
        heads=raw["index_n_heads"], dim=raw["index_head_dim"], top_k=raw["index_topk"], interleaved=interleaved
    )

    def selecting(layer: Layer) -> Layer:
        assert isinstance(layer.mixer, MLA)
        return replace(layer, mixer=replace(layer.mixer, indexer=indexer))

    return replace(
        base,
        family=family,
        layers=tuple(selecting(layer) if s else layer for layer, s in zip(base.layers, selects, strict=True)),
        mtp=tuple(selecting(layer) for layer in base.mtp),
    )
