"""Activations, not only tokens: logits and drafts' logits against transformers and the MTP reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import cached
from oracle import oracle
from runs import PROMPTS, job, run

from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.engine.draft import Drafter
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.engine.speculate import Batch
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.families import FAMILIES
from lockstep.models.load import load
from lockstep.models.weights import Shard, Vocabulary

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
LONG = tuple((i * 37 + 11) % 97 for i in range(40))


def model_of(folder: Any, dtype: torch.dtype, draft_tokens: int = 0) -> Any:
    strategy = resolve("tp")
    return load(
        open_checkpoint(folder), strategy.placement, Shard(0, 1),
        draft_tokens=draft_tokens, dtype=dtype, device=torch.device("cpu"),
    ).model  # fmt: skip


@pytest.mark.parametrize("dtype,close", ((torch.float64, 1e-10), (torch.float32, 1e-4)), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_forced_logits(family: str, dtype: torch.dtype, close: float) -> None:
    folder = cached(family, draft="random")
    model, settings = model_of(folder, dtype), Settings(Group.local(), resolve("tp"))
    cache = model.new_cache(1, len(LONG))
    seen: list[torch.Tensor] = []
    settings = Settings(Group.local(), resolve("tp"), watch=lambda at, x: seen.append(x.data) if at == "exit" else None)
    with torch.inference_mode():
        parts = []
        for start in range(0, len(LONG), 16):
            part = torch.tensor(LONG[start : start + 16])
            out = model(part, settings.step(cache.rows([len(part)], torch.device("cpu"))), cache)
            parts.append(model.lm_head.logits(out.rows("test")))
    torch.testing.assert_close(torch.cat(parts), oracle(folder, dtype).logits(LONG), atol=close, rtol=0)


@pytest.mark.parametrize(
    "overrides", ({"rope_parameters": YARN}, {"q_lora_rank": None}, {"attention_bias": True}), ids=str
)
def test_variants_of_mla(overrides: dict[str, Any]) -> None:
    folder = cached("deepseek_v3", draft="random", overrides=overrides)
    model, settings = model_of(folder, torch.float64), Settings(Group.local(), resolve("tp"))
    cache = model.new_cache(1, len(LONG))
    with torch.inference_mode():
        out = model(torch.tensor(LONG), settings.step(cache.rows([len(LONG)], torch.device("cpu"))), cache)
        logits = model.lm_head.logits(out.rows("test"))
    torch.testing.assert_close(logits, oracle(folder).logits(LONG), atol=1e-10, rtol=0)


@pytest.mark.parametrize("mtp_layers,k", ((1, 4), (2, 5)))
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_logits(family: str, mtp_layers: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft step's logits, from a cache that was filled in chunks, equal the uncached reference's."""
    folder = cached(family, draft="random", mtp_layers=mtp_layers)
    model = model_of(folder, torch.float64, k)
    settings = Settings(Group.local(), resolve("tp"), draft_tokens=k, prefill_chunk=5)
    batch = Batch(model, settings, [Sequence(0, LONG[:23], 60, frozenset())])
    seen: list[torch.Tensor] = []
    logits, propose = Vocabulary.logits, Drafter.propose
    with torch.inference_mode():
        list(batch.prefill())
        tokens = tuple(batch.sequences[0].tokens)
        monkeypatch.setattr(Vocabulary, "logits", lambda self, h: seen.append(logits(self, h)) or seen[-1])
        drafts = propose(batch.drafter, batch.sequences)
    reference = oracle(folder).draft(tokens, k)
    assert drafts == [list(reference.tokens)]
    torch.testing.assert_close(torch.cat(seen), reference.logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("size", (1, 2))
def test_every_dtype_runs(ranks: Any, size: int, dtype: str) -> None:
    """The same strategy gives the same tokens with and without drafts up to rounding; here: it runs and ends."""
    folder = cached("deepseek_v3")
    result = ranks(size).run(run, job(folder, "sp-late", tp=size, draft_tokens=2, dtype=dtype))[0]
    assert result["effective"]["dtype"] == dtype
    assert [len(q["tokens"]) for q in result["requests"]] == [12] * len(PROMPTS)
