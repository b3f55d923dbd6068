"""Qwen3.5 (Qwen team, 2026), its text model: Qwen3-Next with separate projections in its delta nets.

Released files describe it in `text_config`, beside a vision model that is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.models.config import Config
from lockstep.models.families import qwen3_next


def config(raw: dict[str, Any]) -> Config:
    text = raw | (raw.get("text_config") or {})
    if not text.get("attn_output_gate", True):
        raise ValueError("attn_output_gate false is not supported; it must be true")
    # Its router always normalises; positions of text are the same in all sections of the rotary embedding.
    text["norm_topk_prob"] = True
    num_mtp = text.get("mtp_num_hidden_layers", 1)
    return replace(qwen3_next.translate(text, "qwen3_5_moe", num_mtp=num_mtp, packed=False), stacked=True)
