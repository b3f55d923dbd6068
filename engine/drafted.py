"""The judgement of the draft path, which verification hides: a broken one costs acceptance and no token."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import asdict
from typing import Any

import numpy as np

from lockstep.engine.record import TARGET, Array, Forward, Logits, Plain, Record, Script
from lockstep.engine.sidebyside import TWO_RUNS, Batch, Spread, logit_distances, pairs_of, plain_distances


def judge_drafts(batches: List[Batch], column: dict[int, int]) -> dict[str, Any]:
    """Whether the run drafts what the reference's path would draft on the same rounds, and why not."""
    if not any(f.model != TARGET for b in batches for f in b.base.forwards):
        return {}
    from_base = Spread.of(d for b in batches for d in logit_distances(b.pairs, drafts=True))
    first = [step for b in batches for step in _first_steps(b)]
    from_plain = Spread.of([np.array([np.abs(mine - p.columns[row]).max() for p, row, _, mine in first])])
    floor = Spread()
    for batch in batches:
        for record, plain in batch.others:
            floor = floor.widest(Spread.of(logit_distances(pairs_of(record, batch.base), drafts=True)))
            floor = floor.widest(Spread.of(_first_drafts(plain, batch.plain)))
    limit = TWO_RUNS * floor.maximum
    unlikely = sum(gap > limit for b in batches for gap in _chosen_gaps(b, column))
    unlikely += sum(p.value[row] - p.columns[row, column[draft]] > limit for p, row, draft, _ in first)
    expected, drafted, accepted = _acceptance(batches)
    spread, broken = from_base.widest(from_plain), ""
    if not spread.within(floor):
        broken = "draft logits differ by more than rounding"
    elif unlikely:
        broken = f"{unlikely} drafts are not what the reference's path would draft"
    return {
        "broken": broken,
        "difference": asdict(spread),
        "floor": asdict(floor),
        "drafted": drafted,
        "accepted": accepted,
        "reference_accepted": expected,
    }


def _first_drafts(mine: Plain, theirs: Plain) -> Iterable[Array]:
    if mine.first_drafts is not None and theirs.first_drafts is not None:
        yield from plain_distances(mine.first_drafts, theirs.first_drafts)


def draft_steps(record: Record, script: Script) -> list[tuple[Forward, list[int], list[int]]]:
    """(forward, its rows that gave a draft, the drafts as decided) of every draft step.

    A decision is about drafts when no forward of the target has come since the last decision.
    """
    steps = []
    by_decision: dict[int, list[Forward]] = {}
    for forward in record.forwards:
        by_decision.setdefault(forward.decided, []).append(forward)
    for decision, forwards in by_decision.items():
        if decision < len(script.decisions) and all(f.model != TARGET for f in forwards):
            last = forwards[-1]
            ends = [i for i, r in enumerate(last.request) if i + 1 == len(last.request) or last.request[i + 1] != r]
            steps.append((last, ends, script.decisions[decision]))
    return steps


def _chosen_gaps(batch: Batch, column: dict[int, int]) -> Iterable[float]:
    """How far below its best the base rates each draft that the run made."""
    for forward, rows, drafts in draft_steps(batch.base, batch.script):
        assert forward.logits is not None
        for row, draft in zip(rows, drafts, strict=True):
            yield float(forward.logits.value[row] - forward.logits.columns[row, column[draft]])


def _first_steps(batch: Batch) -> Iterable[tuple[Logits, int, int, Array]]:
    """The first draft of each round: the plain forward's logits and its row there, the draft, the run's logits [C]."""
    if batch.plain.first_drafts is None:
        return
    made: dict[int, list[Array]] = {}
    for forward, rows, _ in draft_steps(batch.run, batch.script):
        assert forward.logits is not None
        for row in rows:
            made.setdefault(int(forward.request[row]), []).append(forward.logits.columns[row])
    for i, (rounds, plain) in enumerate(zip(batch.rounds, batch.plain.first_drafts, strict=True)):
        steps, committed = iter(made.get(batch.first_request + i, [])), 1
        for r in rounds:
            logits = [step for _, step in zip(r["drafts"], steps, strict=False)]
            if logits and committed - 1 < len(plain.value):
                yield plain, committed - 1, r["drafts"][0], logits[0]
            committed += r["accepted"] + 1


def _acceptance(batches: List[Batch]) -> tuple[list[int], list[int], list[int]]:
    """Per draft position: accepted by the reference's own drafts on the same rounds; drafted; accepted in the run."""
    most = max((len(r["drafts"]) for b in batches for rounds in b.rounds for r in rounds), default=0)
    expected, drafted, accepted = [0] * most, [0] * most, [0] * most
    for batch in batches:
        own: dict[int, list[int]] = {}
        for forward, rows, _ in draft_steps(batch.base, batch.script):
            assert forward.logits is not None
            for row in rows:
                own.setdefault(int(forward.request[row]), []).append(int(forward.logits.best[row]))
        for i, rounds in enumerate(batch.rounds):
            proposals, committed = iter(own.get(batch.first_request + i, [])), batch.prompts[i] + 1
            tokens = batch.script.tokens[i]
            for r in rounds:
                theirs = [next(proposals) for _ in r["drafts"]]
                right = tokens[committed : committed + len(theirs)]
                for position in range(len(theirs)):
                    drafted[position] += 1
                    accepted[position] += r["accepted"] > position
                    expected[position] += theirs[: position + 1] == right[: position + 1]
                committed += r["accepted"] + 1
    return expected, drafted, accepted
