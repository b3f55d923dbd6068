"""Stopping, limits, batches and decisions of the speculative loop."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import cached, change, copy, set_config
from oracle import oracle
from runs import PROMPTS, expected, job, outcome, run

from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.engine import run as engine_run
from lockstep.engine.requests import Committed, Job, Progress
from lockstep.engine.run import generate, sequences_of
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.engine.speculate import Batch
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.load import load
from lockstep.models.weights import Shard, Vocabulary


def here(work: Job) -> list[tuple[Any, ...]]:
    return outcome(run(Group.local(), work))


@pytest.mark.parametrize("max_new", (1, 2, 3, 5, 6))
@pytest.mark.parametrize("draft", ("always", "aligned"))
def test_never_more_than_asked(draft: str, max_new: int) -> None:
    """An accepted run and its bonus token are clamped (CASES C2); a round drafts no token that could not stay."""
    folder = cached("deepseek_v3", draft=draft)
    got = here(job(folder, draft_tokens=4, max_new_tokens=max_new))
    assert got == expected(folder, 4, max_new=max_new)
    assert [(len(tokens), reason) for tokens, _, reason in got] == [(max_new, "length")] * len(PROMPTS)


@pytest.mark.parametrize("offset", range(9))
def test_eos_inside_an_accepted_run(tmp_path: Path, offset: int) -> None:
    """Cut after the first EOS wherever it falls among drafts that were all right (CASES C1)."""
    source = cached("glm4_moe", draft="always", seed=1)
    eos = oracle(source).greedy(PROMPTS[0], 9)[offset]
    folder = set_config(copy(source, tmp_path / "m"), eos_token_id=[eos, 96])
    got = here(job(folder, draft_tokens=3, max_new_tokens=9))
    assert got == expected(source, 3, max_new=9, eos=[eos, 96])
    assert got[0][0][-1] == eos and got[0][0].count(eos) == 1 and got[0][2] == "stop"
    ignored = here(job(folder, draft_tokens=3, max_new_tokens=9, ignore_eos=True))
    assert ignored == expected(source, 3, max_new=9)


def test_a_drafted_eos_that_the_target_rejects_ends_nothing(tmp_path: Path) -> None:
    """Only committed tokens end a request (CASES C3)."""
    source = cached("deepseek_v3", draft="never")
    plain = oracle(source).speculative(PROMPTS[0], 12, 3)
    rejected = {d for drafts, n in plain.rounds for d in drafts[n:]} - set(plain.tokens)
    folder = set_config(copy(source, tmp_path / "m"), eos_token_id=sorted(rejected))
    assert rejected and here(job(folder, draft_tokens=3, prompts=PROMPTS[:1]))[0][0] == plain.tokens


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("room", (1, 2, 4))
def test_the_context_ends(ranks: Any, tmp_path: Path, room: int, size: int) -> None:
    """Near max_position each sequence drafts less, and stops there (CASES C14, D3)."""
    source = cached("deepseek_v3")
    longest = max(map(len, PROMPTS)) + room
    folder = set_config(copy(source, tmp_path / "m"), max_position_embeddings=longest)
    work = job(folder, "sp-late" if size > 1 else "tp", tp=size, draft_tokens=4, max_new_tokens=40)
    got = outcome(ranks(size).run(run, work)[0])
    assert got == expected(source, 4, max_new=40, max_position=longest)
    assert {len(p) + len(tokens) for p, (tokens, _, _) in zip(PROMPTS, got, strict=True)} == {longest}


@pytest.mark.parametrize("chunk", (1, 2, 3, 4, 8, 9, 100))
def test_prefill_chunks(chunk: int) -> None:
    folder = cached("deepseek_v3", mtp_layers=2)
    assert here(job(folder, draft_tokens=3, prefill_chunk=chunk)) == expected(folder, 3)


@pytest.mark.parametrize("batch", (1, 2, 3))
def test_batch_mates_change_nothing(batch: int) -> None:
    folder = cached("glm4_moe")
    prompts = (*PROMPTS, (96,), (1, 2))
    got = here(job(folder, draft_tokens=3, batch=batch, prompts=prompts))
    assert got == expected(folder, 3, prompts=prompts)


def noisy(group: Group, work: Job) -> list[tuple[Any, ...]]:
    """Rank 1 computes slightly other logits."""
    logits = Vocabulary.logits

    def perturbed(self: Vocabulary, hidden: torch.Tensor) -> torch.Tensor:
        y = logits(self, hidden)
        return y + 1e-7 * torch.randn(y.shape, generator=torch.Generator().manual_seed(y.shape[0])).to(y)

    try:
        if group.rank == 1:
            Vocabulary.logits = perturbed  # type: ignore[method-assign]
        return outcome(run(group, work))
    finally:
        Vocabulary.logits = logits  # type: ignore[method-assign]


@pytest.mark.parametrize("head", ("gather", "argmax"))
def test_ranks_never_decide_apart(ranks: Any, tmp_path: Path, head: str) -> None:
    """Equal rows in both vocabulary shards and noise on one rank: ranks still agree and end (CASES D1, D2)."""
    folder = change(copy(cached("deepseek_v3"), tmp_path / "m"), "lm_head.weight", lambda w: w[:49].repeat(2, 1)[:97])
    work = job(folder, resolve("sp-late", head=head), tp=2, draft_tokens=3)
    first, second = ranks(2).run(noisy, work)
    assert first == second and [len(tokens) for tokens, _, _ in first] == [12] * 3


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("head", ("gather", "argmax"))
def test_the_lowest_of_equal_ids_wins(ranks: Any, tmp_path: Path, head: str, size: int) -> None:
    """Across shard borders too, and where the last shard is short (CASES D6)."""
    twins = lambda w: w[:49].repeat(2, 1)[:97]  # noqa: E731
    folder = change(copy(cached("deepseek_v3"), tmp_path / "m"), "lm_head.weight", twins)
    change(folder, "model.layers.3.shared_head.head.weight", twins)
    got = outcome(ranks(size).run(run, job(folder, resolve("tp", head=head), tp=size, draft_tokens=2))[0])
    assert got == expected(folder, 2)
    assert max(t for tokens, rounds, _ in got for t in (*tokens, *(d for ds, _ in rounds for d in ds))) < 49


def switched(group: Group, folder: Path, prefill: Any, decode: Any) -> list[tuple[Any, ...]]:
    loaded = load(
        open_checkpoint(folder), decode.placement, Shard(group.rank, group.size),
        draft_tokens=3, dtype=torch.float64, device=group.device,
    )  # fmt: skip
    settings = Settings(group, prefill, draft_tokens=3)
    sequences = [Sequence(i, p, len(p) + 12, frozenset()) for i, p in enumerate(PROMPTS)]
    batch = Batch(loaded.model, settings, list(sequences))
    with torch.inference_mode():
        list(batch.prefill())
        turn = 0
        while batch.sequences:
            chosen = dataclasses.replace(settings, strategy=(decode, prefill)[turn % 2])
            batch.settings = batch.drafter.settings = chosen
            batch.round()
            turn += 1
    return outcome({"requests": [engine_run._request(s) for s in sequences]})


def test_the_strategy_belongs_to_a_forward(ranks: Any) -> None:
    """One load, another strategy in prefill and in every other round (CASES A15)."""
    folder = cached("deepseek_v3")
    full = resolve("tp", experts="owned", dense="replicated", shared="replicated")
    for answer in ranks(2).run(switched, folder, full, resolve("sp-late")):
        assert answer == expected(folder, 3)


def test_events_tell_what_is_committed() -> None:
    folder = cached("deepseek_v3")
    events: list[Any] = []
    result = generate(Group.local(), events.append, job(folder, draft_tokens=3, batch=2))
    commits = [e for e in events if isinstance(e, Committed)]
    for i, request in enumerate(result["requests"]):
        mine = [e for e in commits if e.request == i]
        assert [t for e in mine for t in e.tokens] == request["tokens"]
        assert [e.accepted for e in mine[1:]] == [r["accepted"] for r in request["rounds"]]
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + ["length"]
    prefills = [(e.done, e.total) for e in events if isinstance(e, Progress) and e.stage == "prefill"]
    first, rest = sum(map(len, PROMPTS[:2])), sum(map(len, PROMPTS[2:]))
    assert prefills == [(first, first), (rest, rest)]  # a batch of two, then one of one, in a chunk each
    loads = [e for e in events if isinstance(e, Progress) and e.stage == "load"]
    assert loads[-1].done >= loads[-1].total > 0


def test_sum_of_parts() -> None:
    """Counts add up: tokens = first + accepted + one per round; per-position counts fall."""
    folder = cached("deepseek_v3")
    result = run(Group.local(), job(folder, draft_tokens=3, max_new_tokens=20))
    acceptance = result["acceptance"]
    tokens = sum(len(q["tokens"]) for q in result["requests"])
    assert tokens == len(PROMPTS) + acceptance["accepted"] + acceptance["rounds"]
    counts = acceptance["per_position"]
    assert sum(c["accepted"] for c in counts) == acceptance["accepted"]
    assert all(a["accepted"] >= b["accepted"] and a["drafted"] >= b["drafted"] for a, b in itertools.pairwise(counts))


def test_generation_config_names_the_end(tmp_path: Path) -> None:
    """generation_config.json's eos ids where it has any, else config.json's; one id or a list."""
    folder = set_config(copy(cached("deepseek_v3"), tmp_path / "m"), eos_token_id=4)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_ids == {4}
    assert sequences_of(job(folder), checkpoint)[0].eos == {4}
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert open_checkpoint(folder).eos_ids == {7, 8}
