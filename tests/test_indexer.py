"""Sparse attention: the indexer's choice of keys, its cache, and who reuses a selection (DeepSeek-V3.2, GLM-5, 5.2).

test_matrix.py walks both families over every strategy; what only they have is here. Contexts are longer than top_k.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import YARN, cached
from oracle import TrueFloat64, oracle
from runs import expected, job, outcome, run
from torch import Tensor
from transformers import GlmMoeDsaConfig

from lockstep.comm.group import Group
from lockstep.comm.strategy import EXITS
from lockstep.engine.draft import Drafter
from lockstep.engine.run import load_for, sequences_of
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.engine.speculate import Batch
from lockstep.models import attention
from lockstep.models.attention import attend
from lockstep.models.cache import Cache, KVCache
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.config import MLA, MoE
from lockstep.models.families import deepseek_v32, glm_moe_dsa
from lockstep.models.indexer import best
from lockstep.models.rows import Rows, Selection

CPU = torch.device("cpu")
close = torch.testing.assert_close
LONG = tuple(torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(7)).tolist())
PROMPTS = (LONG[:21], LONG[30:31], LONG[20:26])

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", {"overrides": {"rope_scaling": YARN, "index_topk": 4}}),
    "shared layers": (
        "glm_moe_dsa",
        {"layers": 4, "overrides": {"indexer_types": ["full", "shared", "shared", "full"], "rms_norm_eps": 1e-5}},
    ),
    "own drafts": ("glm_moe_dsa", {"overrides": {"index_share_for_mtp_iteration": False}}),
    "two blocks": ("glm_moe_dsa", {"mtp_layers": 2}),
}


def folder_of(variant: str) -> Path:
    family, options = VARIANTS[variant]
    return cached(family, **options)


# ------------------------------------------------------------------------------------------ whole runs, and the oracle
@pytest.mark.parametrize("k", (1, 2, 3, 4))
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_equal_the_oracle(ranks: Any, variant: str, k: int) -> None:
    folder = folder_of(variant)
    want = expected(folder, k, prompts=PROMPTS)
    got = outcome(ranks(1).run(run, job(folder, prompts=PROMPTS, draft_tokens=k, prefill_chunk=4))[0])
    assert got == want
    if k == 3:  # the rounds of a batch differ in what they accept, so a selection of the wrong sequence or row shows
        assert any(len({a for _, a in both}) > 1 for both in zip(*(rounds for _, rounds, _ in got), strict=False))
        alone = [outcome(ranks(1).run(run, job(folder, prompts=[p], draft_tokens=k))[0])[0] for p in PROMPTS]
        assert alone == want


@pytest.mark.parametrize("spec", ("tp", "sp-early", *(f"sp-late:{way}" for way in EXITS)))
@pytest.mark.parametrize("variant", ("deepseek_v32", "shared layers"))
def test_two_ranks_equal_the_oracle(ranks: Any, variant: str, spec: str) -> None:
    folder = folder_of(variant)
    results = ranks(2).run(run, job(folder, spec, prompts=PROMPTS, tp=2, draft_tokens=3, prefill_chunk=4))
    assert outcome(results[0]) == expected(folder, 3, prompts=PROMPTS)
    assert outcome(results[1]) == outcome(results[0])


def test_four_ranks_equal_the_oracle(ranks: Any) -> None:
    folder = folder_of("shared layers")
    work = job(folder, "sp-late:gather-sum", prompts=PROMPTS, tp=4, draft_tokens=4)
    assert outcome(ranks(4).run(run, work)[0]) == expected(folder, 4, prompts=PROMPTS)


@pytest.mark.parametrize("variant", ("deepseek_v32", "shared layers"))
def test_teacher_forced_logits_in_float32(variant: str) -> None:
    folder = folder_of(variant)
    for dtype, atol in (("float32", 1e-4), ("float64", 1e-10)):
        batch = batch_of(Group.local(), folder, (LONG,), dtype=dtype)
        with torch.inference_mode():
            hidden = batch._forward([list(LONG)], "prefill").rows("test")
        logits = batch.model.lm_head.logits(hidden)
        close(logits, oracle(folder, getattr(torch, dtype)).logits(LONG), rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------------------- the caches
def batch_of(group: Group, folder: Path, prompts: Any, spec: str = "tp", k: int = 0, dtype: str = "float64") -> Batch:
    """Sequences of up to 30 new tokens, prompts not read yet."""
    work = job(folder, spec, prompts=prompts, draft_tokens=k, dtype=dtype, tp=group.size, max_new_tokens=30)
    checkpoint = open_checkpoint(folder)
    model = load_for(work, checkpoint, group, lambda event: None).model
    return Batch(model, Settings(group, work.strategy, k, prefill_chunk=4), sequences_of(work, checkpoint))


def prefill(batch: Batch) -> tuple[list[Cache], Drafter]:
    """Read the prompts; the target's cache and the MTP blocks', and who drafts."""
    list(batch.prefill())
    assert batch.drafter is not None
    return [batch.cache, *batch.drafter.caches], batch.drafter


@torch.inference_mode()
def forced_rounds(group: Group, folder: Path, spec: str, truth: list[tuple[int, ...]]) -> list[tuple[list[int], float]]:
    """Five rounds of three drafts, of which sequence b accepts (round + b) mod 4. Of each round: how many were
    accepted, and how far any cached key is from that of a fresh prefill of what is committed."""
    batch = batch_of(group, folder, PROMPTS, spec, k=3)
    caches, drafter = prefill(batch)
    propose, out = drafter.propose, []
    for number in range(5):

        def drafts(sequences: list[Sequence], number: int = number) -> list[list[int]]:
            propose(sequences)
            right = [truth[b][len(s.generated) :][:3] for b, s in enumerate(sequences)]
            return [[(t + (i >= (number + b) % 4)) % 97 for i, t in enumerate(r)] for b, r in enumerate(right)]

        drafter.propose = drafts  # type: ignore[method-assign]
        batch.round()
        committed = [Sequence(s.request, tuple(s.tokens[:-1]), s.limit, s.eos) for s in batch.sequences]
        fresh, _ = prefill(Batch(batch.model, batch.settings, committed))
        differences = [apart(ours, theirs) for ours, theirs in zip(caches, fresh, strict=True)]
        out.append(([s.rounds[-1].accepted for s in batch.sequences], max(differences)))
    return out


def apart(ours: Cache, fresh: Cache) -> float:
    """The most by which any key of `ours` differs, over the rows it counts."""
    assert min(ours.lengths) > 0
    return max(
        float((a[b, :, :n] - f[b, :, :n]).abs().max())
        for mine, theirs in zip(ours.layers, fresh.layers, strict=True)
        for a, f in zip(keys(mine), keys(theirs), strict=True)
        for b, n in enumerate(ours.lengths)
    )


def keys(layer: Any) -> list[Tensor]:
    return [layer.keys] + ([layer.index.keys] if layer.index is not None else [])


@pytest.mark.parametrize("size,spec", ((1, "tp"), (2, "sp-late")))
@pytest.mark.parametrize("variant", ("deepseek_v32", "shared layers"))
def test_caches_after_rounds_are_those_of_a_fresh_prefill(ranks: Any, variant: str, size: int, spec: str) -> None:
    folder = folder_of(variant)
    truth = [oracle(folder).greedy(prompt, 28) for prompt in PROMPTS]
    for rounds in ranks(size).run(forced_rounds, folder, spec, truth):
        assert [accepted for accepted, _ in rounds] == [[(n + b) % 4 for b in range(3)] for n in range(5)]
        assert max(difference for _, difference in rounds) < 1e-10


def test_keys_are_written_where_a_selection_is_reused() -> None:
    """The first recycled row gets the same input with and without sharing: so the same key in the index (CASES B13)."""
    written = []
    for folder in (cached("glm_moe_dsa"), folder_of("own drafts")):
        batch = batch_of(Group.local(), folder, PROMPTS, k=3)
        with torch.inference_mode():
            (_, cache), drafter = prefill(batch)
            first = [len(s.tokens) - 1 for s in batch.sequences]
            drafter.propose(batch.sequences)
        layer: Any = cache.layers[0]
        written.append(torch.stack([layer.index.keys[b, 0, n : n + 2] for b, n in enumerate(first)]))
    close(written[0][:, 0], written[1][:, 0], rtol=0, atol=1e-12)
    assert all(key.abs().max() > 0 for key in written[0].flatten(0, 1))  # step 2 wrote its own as well


def test_layers_that_share_keep_no_index() -> None:
    batch = batch_of(Group.local(), folder_of("shared layers"), PROMPTS)
    layers: Any = batch.cache.layers
    assert [layer.index is not None for layer in layers] == [True, False, False, True]
    assert layers[0].num_bytes() == layers[1].num_bytes() * (16 + 8 + 16) // (16 + 8)
    before = layers[0].index.keys
    layers[0].select(torch.tensor([2, 0]))
    close(layers[0].index.keys, before[[2, 0]])


# ------------------------------------------------------------------------------------------------------- the selection
@pytest.mark.parametrize("scale", (1.0, 1e-3))  # rows so small that the epsilon of the key norm counts
@pytest.mark.parametrize("variant", ("deepseek_v32", "shared layers"))
def test_an_indexer_selects_what_transformers_does(variant: str, scale: float) -> None:
    reference = oracle(folder_of(variant))
    theirs = reference.model.model.layers[0].self_attn.indexer
    batch = batch_of(Group.local(), folder_of(variant), (LONG,))
    ours: Any = batch.model.layers[0].self_attn.indexer  # type: ignore[union-attr]
    x, compressed = torch.randn(40, 64, dtype=torch.float64) * scale, torch.randn(40, 24, dtype=torch.float64)
    with torch.inference_mode(), TrueFloat64():
        angles = reference.model.model.rotary_emb(x, torch.arange(40)[None])
        mask = torch.full((40, 40), -1e300, dtype=torch.float64).triu(1)[None]
        indices = theirs(x[None], compressed[None], angles, mask, None)[0]
        step = batch.settings.step(Rows([40], [0], CPU))
        batch.model.turn(step, torch.float64)
        slots = ours(x, compressed, step.rows, ours.new_cache(1, 40)).slots
    want = [sorted(i for i in row if i <= number) for number, row in enumerate(indices.tolist())]
    assert [[slot for slot in row if slot >= 0] for row in slots.tolist()] == want


def test_the_best_are_the_first_of_a_stable_sort() -> None:
    gen = torch.Generator().manual_seed(1)
    for count in (1, 3, 8):
        scores = torch.randint(0, 4, (3, 20, 25), generator=gen).double()  # many equals
        own = torch.randint(0, 25, (3, 20, 1), generator=gen)
        seen = torch.arange(25) <= own
        chosen = best(scores, seen, count)
        order = scores.masked_fill(~seen, -1).sort(dim=-1, descending=True, stable=True).indices
        for b in range(3):
            for q in range(20):
                want = sorted(order[b, q, : min(count, int(own[b, q]) + 1)].tolist())
                assert chosen[b, q].tolist() == want + [-1] * (count - len(want))


@pytest.mark.parametrize("counts,starts", (([2, 2], [40, 30]), ([3, 1, 0], [50, 0, 9]), ([30], [5])))
def test_gathering_and_masking_give_the_same(counts: list[int], starts: list[int], monkeypatch: Any) -> None:
    rows = Rows(counts, starts, CPU)
    cache = KVCache(len(counts), 60, 2, 6, 5, dtype=torch.float64, device=CPU)
    cache.keys.normal_()
    assert cache.own_values is not None
    cache.own_values.normal_()
    query = torch.randn(rows.total, 4, 6, dtype=torch.float64)
    slots = torch.full((rows.total, 7), -1)
    for row, own in enumerate(rows.slots.tolist()):
        picked = torch.randperm(own + 1)[:7]
        slots[row, : len(picked)] = picked
    results = []
    for cost in (0, 1 << 40):
        monkeypatch.setattr(attention, "GATHER_COST", cost)
        results.append(attend(query, cache, rows, 0.3, Selection(slots)))
    want = torch.stack([by_hand(query[i], cache, int(rows.sequence[i]), slots[i]) for i in range(rows.total)])
    close(results[0], want)
    close(results[1], want)


def by_hand(query: Tensor, cache: KVCache, sequence: int, slots: Tensor) -> Tensor:
    assert cache.own_values is not None
    picked = slots[slots >= 0]
    heads = []
    for n in range(4):
        weights = (cache.keys[sequence, n // 2, picked] @ query[n] * 0.3).softmax(-1)
        heads.append(weights @ cache.own_values[sequence, n // 2, picked])
    return torch.stack(heads)


def test_a_long_sequence_is_scored_in_parts(monkeypatch: Any) -> None:
    """Many scores at once are split by rows; the result stays."""
    folder = folder_of("shared layers")
    results = []
    for most in (1 << 24, 3000):
        monkeypatch.setattr(attention, "MAX_SCORES", most)
        batch = batch_of(Group.local(), folder, (LONG, LONG[:9]))
        with torch.inference_mode():
            results.append(batch._forward([list(LONG), list(LONG[:9])], "prefill").rows("test"))
    close(results[0], results[1], rtol=0, atol=1e-12)


def selections(group: Group, folder: Path, spec: str) -> list[list[list[int]]]:
    """What each layer's rows attended to in one forward over LONG, in float32."""
    batch = batch_of(group, folder, (LONG,), spec, dtype="float32")
    seen: list[list[list[int]]] = []
    for block in batch.model.layers:
        block.self_attn.register_forward_hook(  # type: ignore[union-attr]
            lambda module, inputs, out: seen.append(inputs[1].selection.slots.tolist())
        )
    with torch.inference_mode():
        batch._forward([list(LONG)], "prefill")
    return seen


def test_every_rank_selects_the_same(ranks: Any) -> None:
    folder = folder_of("shared layers")
    for spec in ("tp", "sp-late"):
        first, second = ranks(2).run(selections, folder, spec)
        assert first == second
        assert first[0] == first[1] == first[2] != first[3]  # two shared layers after the first
        for layer in first:
            for row, slots in enumerate(layer):
                picked = [slot for slot in slots if slot >= 0]
                assert picked == sorted(set(picked))
                assert len(picked) == min(8, row + 1)
                assert picked[-1] <= row


def test_the_indexer_moves_nothing(ranks: Any) -> None:
    """Its weights are whole on every rank, so sparse attention has the collectives of dense attention."""
    works = [job(cached(f, draft="never"), "sp-late", tp=2, draft_tokens=2) for f in ("deepseek_v3", "deepseek_v32")]
    dense, sparse = (ranks(2).run(run, work)[0]["ledger"] for work in works)
    assert dense == sparse


def test_weights_of_the_scores_stay_wide() -> None:
    batch = batch_of(Group.local(), folder_of("shared layers"), (LONG,), dtype="bfloat16")
    indexer: Any = batch.model.layers[0].self_attn.indexer  # type: ignore[union-attr]
    assert (indexer.weights_proj.weight.dtype, indexer.wk.weight.dtype) == (torch.float32, torch.bfloat16)
    with torch.inference_mode():
        assert batch._forward([list(LONG)], "prefill").rows("test").isfinite().all()


# ----------------------------------------------------------------------------------------------------- the translation
RAW = {"num_hidden_layers": 9}


@pytest.mark.parametrize(
    "fields",
    (
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSSFSFSSF"},
        {"index_topk_pattern": ["full", "shared"] + ["full"] * 7},
        {"indexer_types": ["full", "shared", "shared"] * 3, "index_topk_freq": 4},
    ),
)
def test_which_layers_select_is_what_transformers_says(fields: dict[str, Any]) -> None:
    theirs = GlmMoeDsaConfig(**RAW, **fields).indexer_types
    assert ["full" if s else "shared" for s in glm_moe_dsa.selects(RAW | fields)] == theirs


def test_translation() -> None:
    raw = open_checkpoint(cached("glm_moe_dsa")).raw
    config = glm_moe_dsa.config(raw | {"mlp_layer_types": ["sparse", "dense", "sparse"]})
    assert [isinstance(layer.ffn, MoE) for layer in (*config.layers, *config.mtp)] == [True, False, True, True]
    indexers = [layer.mixer.indexer for layer in (*config.layers, *config.mtp) if isinstance(layer.mixer, MLA)]
    assert [i is not None for i in indexers] == [True, True, False, True]
    assert config.shares_draft_selection
    assert config.family == "glm_moe_dsa"
    for rope, family in ((True, glm_moe_dsa), (False, deepseek_v32)):
        mixer = family.config({k: v for k, v in raw.items() if k != "indexer_rope_interleave"}).layers[0].mixer
        assert isinstance(mixer, MLA) and mixer.indexer is not None
        assert mixer.indexer.interleaved is rope
    assert not glm_moe_dsa.config(raw | {"index_share_for_mtp_iteration": None}).shares_draft_selection


@pytest.mark.parametrize(
    "fields,words",
    (
        ({"indexer_types": ["shared", "full", "full"]}, "first"),
        ({"indexer_types": ["full", "full"]}, "3 layers"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"indexer_types": ["full", "half", "full"]}, "half"),
        ({"mlp_layer_types": ["dense", "moe", "sparse"]}, "moe"),
    ),
)
def test_impossible_configs_are_refused(fields: dict[str, Any], words: str) -> None:
    raw = open_checkpoint(cached("glm_moe_dsa")).raw
    with pytest.raises(ValueError, match=words):
        glm_moe_dsa.config(raw | fields)
