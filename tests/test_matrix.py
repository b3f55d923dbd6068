"""Families x strategies x exits x placements x ranks x drafts: tokens, drafts and accepted counts equal the oracle's.

The lists come from the code, so a new family or strategy cannot be left out.
"""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import cached
from runs import PROMPTS, every_strategy, expected, job, label, outcome, run

from lockstep.comm.strategy import resolve
from lockstep.models.families import FAMILIES

STRATEGIES = every_strategy()
# One model_type of each translation: another name of the same model is seen under two ranks.
MODELS = tuple({file: family for family, file in FAMILIES.items()}.values())


@pytest.mark.parametrize("case", STRATEGIES, ids=label)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks(ranks: Any, family: str, case: tuple[str, dict[str, str]]) -> None:
    folder = cached(family)
    strategy = resolve(case[0], **case[1])
    for k in (0, 3):
        results = ranks(2).run(run, job(folder, strategy, tp=2, draft_tokens=k, prefill_chunk=4))
        assert outcome(results[0]) == expected(folder, k)
        assert outcome(results[1]) == outcome(results[0])


@pytest.mark.parametrize("case", STRATEGIES, ids=label)
@pytest.mark.parametrize("family", MODELS)
def test_four_ranks(ranks: Any, family: str, case: tuple[str, dict[str, str]]) -> None:
    """Eight experts on four ranks, vocabulary 97 on four ranks, fewer rows than ranks in every decode step."""
    folder = cached(family)
    results = ranks(4).run(run, job(folder, resolve(case[0], **case[1]), tp=4, draft_tokens=3, max_new_tokens=8))
    assert outcome(results[0]) == expected(folder, 3, max_new=8)


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("family", MODELS)
def test_every_draft_length(ranks: Any, family: str, k: int) -> None:
    folder = cached(family)
    want = expected(folder, k)
    assert outcome(ranks(1).run(run, job(folder, draft_tokens=k, prefill_chunk=4))[0]) == want
    assert outcome(ranks(1).run(run, job(folder, "sp-late", draft_tokens=k))[0]) == want
    if k == 3:
        alone = [outcome(ranks(1).run(run, job(folder, draft_tokens=k, prompts=[p]))[0])[0] for p in PROMPTS]
        assert alone == want


@pytest.mark.parametrize("k", (1, 2, 4, 8))
def test_draft_lengths_on_two_ranks(ranks: Any, k: int) -> None:
    folder = cached("deepseek_v3")
    work = job(folder, resolve("sp-late:gather-norm", head="argmax"), tp=2, draft_tokens=k)
    assert outcome(ranks(2).run(run, work)[0]) == expected(folder, k)


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("k", (1, 2, 3, 5))
@pytest.mark.parametrize("mtp_layers", (2, 3))
def test_several_mtp_layers(ranks: Any, mtp_layers: int, k: int, size: int) -> None:
    folder = cached("deepseek_v3", mtp_layers=mtp_layers)
    work = job(folder, "sp-late" if size > 1 else "tp", tp=size, draft_tokens=k, prefill_chunk=4)
    assert outcome(ranks(size).run(run, work)[0]) == expected(folder, k)


@pytest.mark.parametrize("draft,rate", (("always", 1.0), ("never", 0.0)))
@pytest.mark.parametrize("family", MODELS)
def test_rigged_acceptance(ranks: Any, family: str, draft: str, rate: float) -> None:
    """Exactly 100 % and exactly 0 %, at every draft position."""
    folder = cached(family, draft=draft)
    for size, strategy in ((1, "tp"), (2, "sp-late:gather-sum")):
        result = ranks(size).run(run, job(folder, strategy, tp=size, draft_tokens=4, max_new_tokens=11))[0]
        assert outcome(result) == expected(folder, 4, max_new=11)
        counts = result["acceptance"]["per_position"]
        assert [c["accepted"] for c in counts] == [rate * c["drafted"] for c in counts]
        assert result["acceptance"]["drafted"] > 0


@pytest.mark.parametrize(
    "extra", ({"dense": "replicated", "shared": "replicated"}, {"dense": "sliced", "shared": "sliced"})
)
@pytest.mark.parametrize("name", ("tp", "sp-chunk", "sp-early", "sp-late", "sp-dense"))
def test_dense_and_shared_weights(ranks: Any, name: str, extra: dict[str, str]) -> None:
    """The shared expert joins each row's sum once, wherever its weights lie (CASES A9, A10)."""
    folder = cached("deepseek_v3")
    work = job(folder, resolve(name, **extra), tp=2, draft_tokens=2, max_new_tokens=8)
    assert outcome(ranks(2).run(run, work)[0]) == expected(folder, 2, max_new=8)


@pytest.mark.parametrize("exit_name", ("gather-pair", "gather-sum", None))
def test_pre_norm_recycling(ranks: Any, exit_name: str | None) -> None:
    folder = cached("glm4_moe")
    strategy = resolve("sp-late", exit=exit_name) if exit_name else resolve("tp")
    work = job(folder, strategy, tp=2, draft_tokens=4, recycle="pre-norm")
    want = expected(folder, 4, recycle="pre-norm")
    assert outcome(ranks(2).run(run, work)[0]) == want != expected(folder, 4)
