"""Every fault of the field, put into one run of a comparison: the verdict is never `identical`, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import cached
from faults import FAULTS, put_in
from ranks import RankError
from runs import job
from test_faults import STRATEGIES, YARN_FAST, family_of

from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.engine import evidence, measure
from lockstep.engine.requests import Job
from lockstep.engine.verdict import DIVERGED, DRAFT_DIVERGED, IDENTICAL, TIE, Judgement

# fault -> the verdict, and the first boundary that is wrong; or what the engine says when it refuses to go on.
EXPECTED: dict[str, tuple[str, str]] = {
    "a1_exit_gather_missing": ("refused", "recycle takes a REPLICATED activation and was given a SHARDED one"),
    "a1_shard_called_full": ("refused", "cannot be a REPLICATED activation"),
    "a3_hidden_times_ranks": (DIVERGED, "norm"),
    "a3_reduce_after_gather": (DIVERGED, "exit"),
    "a4_layout_from_shape": ("refused", "cannot be a REPLICATED activation"),
    "a7_equal_shards": (DIVERGED, "embed"),
    "a9_shared_expert_sliced_on_shards": (DIVERGED, "layers.1.ffn.out"),
    "a10_shared_expert_per_rank": (DIVERGED, "layers.1.ffn.combine"),
    "a11_reduction_skipped": (DIVERGED, "layers.0.attention.out"),
    "a11_reduced_twice": (DIVERGED, "layers.0.attention.out"),
    "a14_full_rows_for_a_shard": ("refused", "layers.0.post_attention_layernorm adds a REPLICATED"),
    "a15_reduction_skipped_in_decode": (DIVERGED, "layers.1.ffn.combine"),
    "b1_pre_norm_recycled": (DRAFT_DIVERGED, "mtp.0.hidden"),
    "b2_norm_twice": (DRAFT_DIVERGED, "mtp.0.norm"),
    "b2_head_without_norm": (DRAFT_DIVERGED, "mtp.0.norm"),
    "b3_position_one_late": (DRAFT_DIVERGED, "mtp.0.rows"),
    "b4_token_not_shifted": (DRAFT_DIVERGED, "mtp.0.rows"),
    "b4_sampled_token_at_chunk_border": (DRAFT_DIVERGED, "mtp.0.rows"),
    "b6_target_cache_not_rewound": ("refused", "out of bounds"),
    "b6_draft_cache_not_filled": (DRAFT_DIVERGED, "mtp.0.rows"),
    "b7_rejected_rows_stay_in_the_state": (DIVERGED, "layers.0.attention.out"),
    "b7_inputs_not_restored": (DIVERGED, "layers.0.attention.out"),
    "b13_selection_not_carried": (DRAFT_DIVERGED, "mtp.0.attention.out"),
    "b14_selection_of_another_row": (DRAFT_DIVERGED, "mtp.0.attention.out"),
    "b10_lengths_not_advanced_per_sequence": ("refused", "cannot keep"),
    "b14_last_row_instead_of_last_accepted": (DRAFT_DIVERGED, "mtp.0.hidden"),
    "b16_draft_rope_unscaled": (DRAFT_DIVERGED, "mtp.0.attention.out"),
    "b17_rope_halves_for_pairs": (DIVERGED, "layers.0.attention.out"),
    "b20_hidden_overwritten": (DRAFT_DIVERGED, "mtp.0.hidden"),
}


# Faults of the draft path that the engine would have at any number of ranks.
SHARED = ("b14_last_row_instead_of_last_accepted", "b20_hidden_overwritten", "b6_draft_cache_not_filled")


def faulty(group: Group, target: Callable[..., Any], task: Any, fault: str | None) -> Any:
    """`target` as the ranks of a comparison run it, on an engine with the fault."""
    with put_in(fault, group), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "WARM_UP_TOKENS", 1)
        return target(group, lambda event: None, task)


def comparison(ranks: Any, fault: str | None, everywhere: bool = False) -> Judgement:
    """The verdict on a run of two ranks with the fault; `everywhere`: its one-rank replays have the fault too."""
    name, fields = STRATEGIES.get(fault or "", ("sp-late", {"exit": "gather-norm"}))
    work = job(folder_for(fault), resolve(name, **fields), tp=2, draft_tokens=3, max_new_tokens=8)
    return judgement_of(ranks, replace(work, prefill_chunk=4, dtype="float32", batch=3), fault, everywhere)


def judgement_of(ranks: Any, work: Job, fault: str | None = None, everywhere: bool = False) -> Judgement:
    def launch(target: Callable[..., Any], task: Any) -> Any:
        broken = everywhere or task.job.tp > 1
        return ranks(task.job.tp).run(faulty, target, task, fault if broken else None)[0]

    run = launch(measure.measure, measure.Task(work, counted=True))
    return evidence.judge(work, run, reference_tokens(work), launch)


def folder_for(fault: str | None) -> Path:
    # Random drafts depend on everything the block is given; aligned ones on little but the last token.
    draft = "random" if fault in ("b3_position_one_late", *SHARED) else "aligned"
    return cached(family_of(fault or ""), draft=draft, overrides=YARN_FAST)


@cache
def reference_tokens(work: Job) -> list[list[int]]:
    plain = replace(work, tp=1, draft_tokens=0, strategy=resolve("tp"))
    task = measure.Task(plain, counted=False)
    tokens: list[list[int]] = measure.measure(Group.local(), lambda event: None, task)["tokens"]
    return tokens


def test_without_a_fault_it_is_identical(ranks: Any) -> None:
    judgement = comparison(ranks, None)
    assert judgement.verdict == IDENTICAL and judgement.where is None
    assert judgement.drafts["accepted"] == judgement.drafts["reference_accepted"] != [0, 0, 0]
    assert {row["boundary"] for row in judgement.layers} >= {"embed", "layers.2.ffn.out", "norm", "mtp.0.exit"}


@pytest.mark.parametrize(
    "family,options,fields",
    (
        ("glm4_moe", {}, {"dtype": "float32"}),
        ("glm_moe_dsa", {}, {"dtype": "float32"}),
        ("qwen3_next", {}, {"dtype": "float32"}),
        ("deepseek_v3", {"mtp_layers": 2}, {"dtype": "float64", "draft_tokens": 4}),
        ("deepseek_v3", {"dtype": "bfloat16"}, {"dtype": "auto"}),
    ),
    ids=("glm4_moe", "glm_moe_dsa", "qwen3_next", "two MTP layers", "bfloat16"),
)
def test_right_runs_do_not_diverge(ranks: Any, family: str, options: Any, fields: dict[str, Any]) -> None:
    work = job(
        cached(family, **options), "sp-early", tp=2, **({"draft_tokens": 3, "batch": 3, "max_new_tokens": 10} | fields)
    )
    judgement = judgement_of(ranks, work)
    assert judgement.verdict in (IDENTICAL, TIE if fields["dtype"] == "auto" else IDENTICAL), judgement


@pytest.mark.parametrize("fault", [name for name in FAULTS if name[0] in "ab"])
def test_a_fault_in_one_run_is_found_and_placed(ranks: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, place = EXPECTED[fault]
    monkeypatch.setattr(evidence, "FLOAT64_BYTES", 0)  # a fault is far outside any floor, and this saves time
    if verdict == "refused":
        with pytest.raises(RankError, match=place):
            comparison(ranks, fault)
        return
    judgement = comparison(ranks, fault)
    assert judgement.where is not None, judgement
    assert (judgement.verdict, judgement.where.boundary) == (verdict, place)
    if place in ("exit", "embed") or (place.endswith((".combine", "attention.out")) and "skipped" not in fault):
        assert any(f" at {place}" in cause for cause in judgement.where.causes)


def test_a_decision_from_shards_out_of_order_is_placed_at_the_head(ranks: Any) -> None:
    """The logits are right, and what rank 0 makes of them is not (CASES D6)."""
    work = job(cached("deepseek_v3"), "tp", tp=2, draft_tokens=0, max_new_tokens=6, batch=3)

    def launch(target: Callable[..., Any], task: Any) -> Any:
        return ranks(task.job.tp).run(shards_out_of_order if task.job.tp > 1 else faulty, target, task, None)[0]

    run = launch(measure.measure, measure.Task(work, counted=True))
    judgement = evidence.judge(work, run, reference_tokens(work), launch)
    assert judgement.verdict == DIVERGED and judgement.where is not None
    assert judgement.where.boundary == "head" and "gather at head" in judgement.where.causes


def shards_out_of_order(group: Group, target: Callable[..., Any], task: Any, fault: None) -> Any:
    to_root = Group.to_root

    def reversed_shards(self: Group, rows: Any, at: str) -> Any:
        shards = to_root(self, rows, at)
        return shards[::-1] if shards and at == "head" else shards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "to_root", reversed_shards)
        return faulty(group, target, task, fault)


@pytest.mark.parametrize("fault", SHARED)
def test_a_fault_of_every_run_is_found_too(ranks: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached path is judged by a plain forward, so a fault that its own replay shares is no excuse."""
    monkeypatch.setattr(evidence, "FLOAT64_BYTES", 0)
    assert comparison(ranks, fault, everywhere=True).verdict == DRAFT_DIVERGED
