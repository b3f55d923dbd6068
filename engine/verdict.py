"""The judgement of one run against the reference: pure functions of tokens and of what replays computed.

C vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lockstep.engine.drafted import judge_drafts
from lockstep.engine.record import TARGET, Array
from lockstep.engine.sidebyside import (
    TWO_RUNS,
    Batch,
    Spread,
    Where,
    compare_boundaries,
    first_outside,
    logit_distances,
    pairs_of,
    plain_distances,
)

IDENTICAL, TIE, DIVERGED, DRAFT_DIVERGED = "identical", "tie", "DIVERGED", "DRAFT DIVERGED"


@dataclass
class Difference:
    """Where a request leaves the reference (or its own plain forward), and whether rounding explains it."""

    request: int
    position: int  # among the generated tokens
    token: int
    reference_token: int
    margin: float
    logit_difference: float
    floor: float
    tie: bool


@dataclass
class Judgement:
    verdict: str
    differences: list[Difference] = field(default_factory=list)
    where: Where | None = None
    logits: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    def fault(self, verdict: str, where: Where | None, why: str) -> None:
        self.verdict, self.where, self.why = verdict, where, why

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    tokens: List[list[int]], reference: List[list[int]], batches: List[Batch], columns: List[int], eps: float
) -> Judgement:
    """`tokens` and `reference` are the generated ones; `eps` is the spacing of the run's dtype at one."""
    column = {token: i for i, token in enumerate(columns)}
    layers = compare_boundaries(batches, eps)
    moved, floor = _target_logits(batches)
    found = [_differences(batch, tokens, reference, column, TWO_RUNS * floor.maximum) for batch in batches]
    result = Judgement(IDENTICAL, [d for per_batch in found for d in per_batch], layers=layers)
    result.logits = {"difference": asdict(moved), "floor": asdict(floor)}
    result.drafts = judge_drafts(batches, column)
    target, draft = (first_outside(batches, layers, drafts=drafts) for drafts in (False, True))
    broken = next((d for d in result.differences if not d.tie), None)
    if broken:
        target = target or _after_the_last_boundary(broken, batches, moved, floor)
        result.fault(DIVERGED, target, "tokens differ by more than rounding")
    elif target or not moved.within(floor):
        result.fault(DIVERGED, target, "values differ by more than rounding")
    elif draft or result.drafts.get("broken"):
        result.fault(DRAFT_DIVERGED, draft, result.drafts["broken"] or "draft values differ by more than rounding")
    elif result.differences:
        result.verdict = TIE
    return result


def _after_the_last_boundary(broken: Difference, batches: List[Batch], moved: Spread, floor: Spread) -> Where | None:
    """Logits are right and the token is not: what moves them to the decision, or the decision, is wrong."""
    if not moved.within(floor) or not any(f.values for b in batches for f in b.run.forwards):
        return None
    causes = ["gather at head", "broadcast at decide"]
    return Where("head", "head", causes, moved, floor, -1, broken.request, broken.position)


def first_differences(tokens: List[list[int]], reference: List[list[int]]) -> dict[int, int]:
    """request -> first generated position at which it differs."""
    found = {}
    for request, (mine, theirs) in enumerate(zip(tokens, reference, strict=True)):
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            found[request] = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return found


def _differences(
    batch: Batch, tokens: List[list[int]], reference: List[list[int]], column: dict[int, int], floor: float
) -> list[Difference]:
    """Each request's first token that is not the reference's, and any that its own plain forward speaks against."""
    found = []
    differing = first_differences(tokens, reference)
    run_logits = committed_logits(batch)
    for i, plain in enumerate(batch.plain.target):
        request = batch.first_request + i
        mine, theirs = tokens[request], reference[request]
        chosen = plain.columns[np.arange(len(mine)), [column[t] for t in mine]]
        gap = plain.value - chosen
        against = np.flatnonzero(~(gap <= floor))
        places = {differing[request]} if request in differing else set()
        places |= {int(against[0])} if len(against) else set()
        for g in sorted(places):
            if g >= len(mine):
                found.append(Difference(request, g, -1, theirs[g], 0.0, 0.0, floor, False))
                continue
            other = theirs[g] if g < len(theirs) and mine[:g] == theirs[:g] else int(plain.best[g])
            margin = float(plain.value[g] - plain.second[g]) if other == plain.best[g] else float(abs(gap[g]))
            row = run_logits.get((request, g))
            both = [column[mine[g]]] + ([column[other]] if other in column else [])
            moved = float(np.abs(row[both] - plain.columns[g, both]).max()) if row is not None else float("inf")
            tie = margin <= floor and gap[g] <= floor and moved <= floor
            found.append(Difference(request, g, mine[g], other, margin, moved, floor, bool(tie)))
    return found


def committed_logits(batch: Batch) -> dict[tuple[int, int], Array]:
    """(request, generated position) -> the run's logits [C] from which that token was chosen."""
    found: dict[tuple[int, int], Array] = {}
    for forward in batch.run.forwards:
        if forward.model != TARGET or forward.logits is None:
            continue
        right: dict[int, bool] = {}
        for row, (request, position, token) in enumerate(
            zip(forward.request.tolist(), forward.position.tolist(), forward.token.tolist(), strict=True)
        ):
            i = request - batch.first_request
            tokens = batch.script.tokens[i]
            # A row counts as long as it and the rows before it in this forward hold committed tokens.
            ok = right.get(request, True) and position < len(tokens) and tokens[position] == token
            right[request] = ok
            generated = position + 1 - batch.prompts[i]
            if ok and generated >= 0:
                found[request, generated] = forward.logits.columns[row]
    return found


def _target_logits(batches: List[Batch]) -> tuple[Spread, Spread]:
    """The run's distance from the plain forward's logits, and how far that one's other orders are from it."""
    gaps: list[Array] = []
    for batch in batches:
        rows = committed_logits(batch)
        for i, plain in enumerate(batch.plain.target):
            for g, columns in enumerate(plain.columns):
                mine = rows.get((batch.first_request + i, g))
                gaps += [] if mine is None else [np.abs(mine - columns).max()]
    floor = Spread()
    for batch in batches:
        for record, other in batch.others:
            floor = floor.widest(Spread.of(plain_distances(other.target, batch.plain.target)))
            # The cached path's own rounding is another order too.
            floor = floor.widest(Spread.of(logit_distances(pairs_of(record, batch.base), drafts=False)))
    return Spread.of(gaps), floor
