"""Every fault of the field, put in on purpose, is seen: a conversion raises, or what the engine says changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import cached
from faults import FAULTS, put_in
from oracle import oracle
from runs import PROMPTS, job, outcome

from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.engine.draft import Drafter
from lockstep.engine.run import generate
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.engine.speculate import Batch
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.load import load
from lockstep.models.weights import Shard

YARN = {
    "rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
YARN_FAST = {"rope_parameters": YARN}
# Which strategy a fault needs to matter; the others are seen under any.
STRATEGIES = {
    "a10_shared_expert_per_rank": ("tp", {"shared": "replicated"}),
    "a11_reduction_skipped": ("tp", {}),
    "a11_reduced_twice": ("tp", {}),
    "b1_pre_norm_recycled": ("sp-late", {"exit": "gather-pair"}),
    "b2_head_without_norm": ("tp", {}),
}


def probe(group: Group, folder: Path, strategy: Any, fault: str | None, eos: int) -> Any:
    """Outcome of a generation, and teacher-forced hidden rows [T, H] of the target; or the error's text."""
    work = job(folder, strategy, tp=group.size, draft_tokens=3, prefill_chunk=4, max_new_tokens=16)
    try:
        with put_in(fault, group), torch.inference_mode():
            result = outcome(generate(group, lambda event: None, work))
            loaded = load(
                open_checkpoint(folder), strategy.placement, Shard(group.rank, group.size),
                draft_tokens=1, dtype=torch.float64, device=group.device,
            )  # fmt: skip
            settings = Settings(group, strategy)
            cache = loaded.model.new_cache(1, 16)
            tokens = torch.tensor(PROMPTS[0])
            rows = cache.rows([len(tokens)], group.device)
            hidden = loaded.model(tokens, settings.step(rows), cache).rows("probe")
            ends = Sequence(0, (1,), 100, frozenset([eos]))
            return result, hidden, ends.cut([2, eos, 3, 4])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def family_of(fault: str) -> str:
    """One that has what the fault breaks."""
    if "selection" in fault:
        return "glm_moe_dsa"
    return "qwen3_next" if fault.startswith("b7") else "deepseek_v3"


@pytest.mark.parametrize(
    "family,fault",
    [
        ("deepseek_v3", None),
        ("qwen3_next", None),
        ("glm_moe_dsa", None),
        *((family_of(fault), fault) for fault in FAULTS),
    ],
)
def test_every_fault_is_seen(ranks: Any, family: str, fault: str | None) -> None:
    folder = cached(family, draft="random" if fault == "b3_position_one_late" else "aligned", overrides=YARN_FAST)
    name, fields = STRATEGIES.get(fault or "", ("sp-late", {"exit": "gather-norm"}))
    answers = ranks(2).run(probe, folder, resolve(name, **fields), fault, 7)
    reference = oracle(folder)
    right = [reference.speculative(p, 16, 3) for p in PROMPTS]
    want = [(g.tokens, g.rounds, g.finish_reason) for g in right]
    seen = []
    for answer in answers:
        if isinstance(answer, str):
            seen.append(answer)
            continue
        result, hidden, cut = answer
        near = hidden.shape == reference.hidden(PROMPTS[0]).shape and torch.allclose(
            hidden, reference.hidden(PROMPTS[0]), atol=1e-6
        )
        seen.append("" if result == want and near and cut == ([2, 7], "stop") else "differs")
    assert (seen == ["", ""]) is (fault is None), seen
    print(fault, "->", seen[0] or seen[1])


def test_padding_is_inert(ranks: Any) -> None:
    """What lies in padding rows reaches nothing: NaN there changes no result (CASES A5)."""
    folder = cached("deepseek_v3")
    clean, dirty = (ranks(4).run(padded_with, folder, value) for value in (0.0, float("nan")))
    assert [torch.equal(a, b) for a, b in zip(clean, dirty, strict=True)] == [True] * 4
    assert all(h.isfinite().all() for h in dirty)


def padded_with(group: Group, folder: Path, value: float) -> torch.Tensor:
    from lockstep.comm import group as module

    original = module._padded

    def filled(data: torch.Tensor, rows: int) -> torch.Tensor:
        out = data.new_full((rows, *data.shape[1:]), value)
        out[: data.shape[0]] = data
        return out

    module._padded = filled
    try:
        strategy = resolve("sp-late:gather-pair")
        loaded = load(
            open_checkpoint(folder), strategy.placement, Shard(group.rank, group.size),
            draft_tokens=1, dtype=torch.float64, device=group.device,
        )  # fmt: skip
        hidden = []
        with torch.inference_mode():
            for count in (1, 2, 3, 4, 5, 7):
                cache = loaded.model.new_cache(1, 8)
                step = Settings(group, strategy).step(cache.rows([count], group.device))
                hidden.append(loaded.model(torch.tensor(PROMPTS[0][:count]), step, cache).rows("test"))
        return torch.cat(hidden)
    finally:
        module._padded = original


@pytest.mark.parametrize("accepts", ((0, 1, 2, 3), (3, 0, 0), (2, 2, 1, 0, 3)))
@pytest.mark.parametrize("k,mtp_layers", ((3, 1), (4, 2)))
def test_caches_hold_the_committed_tokens_only(accepts: tuple[int, ...], k: int, mtp_layers: int) -> None:
    """Forced accept counts, another one for each sequence: caches and drafts equal a fresh prefill (CASES B6, B10)."""
    folder = cached("deepseek_v3", mtp_layers=mtp_layers)
    reference = oracle(folder)
    group, strategy = Group.local(), resolve("tp")
    loaded = load(
        open_checkpoint(folder), strategy.placement, Shard(0, 1),
        draft_tokens=k, dtype=torch.float64, device=group.device,
    )  # fmt: skip
    settings = Settings(group, strategy, draft_tokens=k, prefill_chunk=4)

    def fresh(tokens: tuple[int, ...]) -> Batch:
        batch = Batch(loaded.model, settings, [Sequence(0, tokens, 64, frozenset())])
        with torch.inference_mode():
            list(batch.prefill())
        return batch

    batch = Batch(loaded.model, settings, [Sequence(i, p, 64, frozenset()) for i, p in enumerate(PROMPTS)])
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        list(batch.prefill())
        for turn in range(len(accepts)):
            forced = []
            for b, s in enumerate(batch.sequences):
                n = accepts[(turn + b) % len(accepts)]
                truth = list(reference.greedy(s.tokens, k))
                forced.append(truth[:n] + [(t + 1) % 97 for t in truth[n:]])

            def stub(self: Drafter, sequences: Any, forced: Any = forced, propose: Any = Drafter.propose) -> Any:
                drafted = propose(self, sequences)
                want = [list(reference.draft(s.tokens, k).tokens) for s in sequences]
                assert drafted == want, "the true drafts, made from caches that forced rounds left"
                return forced

            with patch.context() as one_round:
                one_round.setattr(Drafter, "propose", stub)
                batch.round()
            for b, s in enumerate(batch.sequences):
                again = fresh(tuple(s.tokens[:-1]))
                held = len(s.tokens) - 1
                assert batch.cache.lengths[b] == held
                for ours, theirs in zip(batch.cache.layers, again.cache.layers, strict=True):
                    torch.testing.assert_close(ours.keys[b, :, :held], theirs.keys[0, :, :held], atol=1e-10, rtol=0)
                for ours, theirs in zip(batch.drafter.caches, again.drafter.caches, strict=True):
                    rows = min(ours.lengths[b], theirs.lengths[0])
                    assert rows >= held - k - 1 - mtp_layers
                    torch.testing.assert_close(
                        ours.layers[0].keys[b, :, :rows], theirs.layers[0].keys[0, :, :rows], atol=1e-10, rtol=0
                    )
