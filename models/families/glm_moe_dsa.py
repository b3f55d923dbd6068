"""GLM-5 and 5.2 (Zhipu AI, 2026): DeepSeek-V3.2, where layers may share a selection, and draft steps too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.models.config import Config
from lockstep.models.families import common, deepseek_v32


def config(raw: dict[str, Any]) -> Config:
    interleaved = raw.get("indexer_rope_interleave", True)
    base = deepseek_v32.sparse(raw, "glm_moe_dsa", interleaved=interleaved, selects=selects(raw))
    return replace(base, shares_draft_selection=bool(raw.get("index_share_for_mtp_iteration")))


def selects(raw: dict[str, Any]) -> list[bool]:
    """Per layer, whether it selects for itself: by name, by a pattern, or every so many layers after the first few."""
    meaning = {"full": True, "shared": False, "F": True, "S": False}
    named = common.flags(raw, "indexer_types", meaning) or common.flags(raw, "index_topk_pattern", meaning)
    if named:
        return named
    every, first = max(raw.get("index_topk_freq") or 1, 1), raw.get("index_skip_topk_offset", 2)
    return [max(i - first + 1, 0) % every == 0 for i in range(raw["num_hidden_layers"])]
