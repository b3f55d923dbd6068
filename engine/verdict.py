"""The judgement of one run against the reference: pure functions of tokens and of what replays computed.

Right runs differ by rounding only. How much that is, is measured: the reference's own path added up in another order, as
P ranks would, and in float64. The farthest that one of these lies from the plain order is the floor; two right runs, each
no farther than that from the truth, are at most twice as far from each other.
T rows, C vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as List
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lockstep.engine.record import TARGET, Array, Forward, Logits, Plain, Record, Script

IDENTICAL, TIE, DIVERGED, DRAFT_DIVERGED = "identical", "tie", "DIVERGED", "DRAFT DIVERGED"
TWO_RUNS = 2.0  # each may lie a floor away from the truth, to opposite sides


@dataclass
class Spread:
    """Differences of rows: their median and maximum. Faults of every row move the first, of few rows the second."""

    median: float = 0.0
    maximum: float = 0.0

    @classmethod
    def of(cls, differences: Iterable[Array]) -> Spread:
        rows = np.concatenate([np.atleast_1d(d) for d in differences] or [np.zeros(1)])
        if not len(rows):
            return cls()
        rows = np.where(np.isnan(rows), np.inf, rows)
        return cls(float(np.median(rows)), float(rows.max()))

    def widest(self, other: Spread) -> Spread:
        return Spread(max(self.median, other.median), max(self.maximum, other.maximum))

    def within(self, floor: Spread) -> bool:
        return self.median <= TWO_RUNS * floor.median and self.maximum <= TWO_RUNS * floor.maximum


@dataclass
class Batch:
    """What is known of one replayed batch of the run that is judged. `others` hold the floor's other orders."""

    script: Script
    prompts: list[int]  # lengths
    first_request: int
    rounds: list[list[dict[str, Any]]]
    run: Record
    base: Record
    plain: Plain
    others: list[tuple[Record, Plain]]


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
class Where:
    """The first boundary outside the floor, in the order of execution."""

    boundary: str
    layer: str
    causes: list[str]
    difference: Spread
    floor: Spread
    forward: int
    request: int
    row_position: int


@dataclass
class Judgement:
    verdict: str
    differences: list[Difference] = field(default_factory=list)
    where: Where | None = None
    logits: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    tokens: List[list[int]], reference: List[list[int]], batches: List[Batch], columns: List[int], eps: float
) -> Judgement:
    """`tokens` and `reference` are the generated ones; `eps` is the spacing of the run's dtype at one."""
    column = {token: i for i, token in enumerate(columns)}
    layers = [row for row in compare_boundaries(batches, eps)]
    target_logits, logit_floor = _target_logits(batches)
    where = _where(batches, layers, drafts=False)
    differences = [
        d
        for batch in batches
        for d in _differences(batch, tokens, reference, column, TWO_RUNS * logit_floor.maximum)
    ]
    drafts = _drafts(batches, column, layers)
    logits = {"difference": asdict(target_logits), "floor": asdict(logit_floor)}
    shown = [r for r in layers]
    result = Judgement(IDENTICAL, differences, None, logits, drafts, shown)
    broken = [d for d in differences if not d.tie]
    if broken or where or not target_logits.within(logit_floor):
        result.verdict, result.where = DIVERGED, where
        result.why = "tokens differ by more than rounding" if broken else "values differ by more than rounding"
    elif drafts.get("broken"):
        result.verdict, result.where = DRAFT_DIVERGED, _where(batches, layers, drafts=True)
        result.why = str(drafts["broken"])
    elif differences:
        result.verdict = TIE
    return result


def first_differences(tokens: List[list[int]], reference: List[list[int]]) -> dict[int, int]:
    """request -> first generated position at which it differs."""
    found = {}
    for request, (mine, theirs) in enumerate(zip(tokens, reference, strict=True)):
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            found[request] = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return found


# ------------------------------------------------------------------------------------------ activations at boundaries
def compare_boundaries(batches: List[Batch], eps: float) -> list[dict[str, Any]]:
    """Per boundary, in the order of execution: the run's spread from the base, the floor, whether it is within."""
    names: dict[str, None] = {}
    for model_first in (True, False):
        for batch in batches:
            for forward in batch.base.forwards:
                if (forward.model == TARGET) is model_first:
                    names |= dict.fromkeys(forward.values)
    rows = []
    for name in names:
        spread = Spread.of(d for b in batches for d in _distances(b.run, b.base, name))
        floor = Spread.of([np.array([eps * _largest(batches, name)])])
        for i in range(len(batches[0].others)):
            floor = floor.widest(Spread.of(d for b in batches for d in _distances(b.others[i][0], b.base, name)))
        row = {"boundary": name, "difference": asdict(spread), "floor": asdict(floor)}
        rows.append(row | {"within": spread.within(floor)})
    return rows


def _distances(record: Record, base: Record, name: str) -> Iterable[Array]:
    """[T] of each forward that has the boundary: the farthest feature on the farthest rank."""
    for mine, theirs in zip(record.forwards, base.forwards, strict=True):
        if name in theirs.values and name in mine.values:
            yield distance(mine.values[name], theirs.values[name])


def distance(mine: Array, theirs: Array) -> Array:
    gap: Array = np.abs(mine - theirs).max(axis=(0, 2))
    return gap


def _largest(batches: List[Batch], name: str) -> float:
    largest = [np.abs(f.values[name]).max(initial=0.0) for b in batches for f in b.base.forwards if name in f.values]
    return float(max(largest, default=0.0))


def _where(batches: List[Batch], layers: list[dict[str, Any]], *, drafts: bool) -> Where | None:
    for row in layers:
        if row["within"] or row["boundary"].startswith("mtp.") is not drafts:
            continue
        name, spread, floor = row["boundary"], Spread(**row["difference"]), Spread(**row["floor"])
        limit = TWO_RUNS * (floor.maximum if spread.maximum > TWO_RUNS * floor.maximum else floor.median)
        for batch in batches:
            for i, (mine, theirs) in enumerate(zip(batch.run.forwards, batch.base.forwards, strict=True)):
                if name not in theirs.values:
                    continue
                gap = distance(mine.values[name], theirs.values[name])
                bad = np.flatnonzero(~(gap <= limit))
                if len(bad):
                    at = int(bad[0])
                    causes = batch.run.causes.get(name, [])
                    place = i, int(mine.request[at]), int(mine.position[at])
                    return Where(name, layer_of(name), causes, spread, floor, *place)
    return None


def layer_of(boundary: str) -> str:
    """`layers.3` of `layers.3.attention.out`, `mtp.0` of `mtp.0.exit`, else the boundary itself."""
    parts = boundary.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdecimal() else boundary


# -------------------------------------------------------------------------------------------------------------- tokens
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
    """The run's distance from the plain forward's logits, and the floor: how far the plain forward's other orders are."""
    gaps: list[Array] = []
    for batch in batches:
        rows = committed_logits(batch)
        for i, plain in enumerate(batch.plain.target):
            mine = [rows.get((batch.first_request + i, g)) for g in range(len(plain.best))]
            pairs = [(m, p) for m, p in zip(mine, plain.columns, strict=True) if m is not None]
            gaps += [np.array([np.abs(m - p).max() for m, p in pairs])] if pairs else []
    floor = Spread()
    for i in range(len(batches[0].others)):
        floor = floor.widest(Spread.of(d for b in batches for d in _plain_distances(b.others[i][1].target, b.plain.target)))
    for batch in batches:  # the cached path's own rounding, which is another order too
        floor = floor.widest(Spread.of(_base_distances(batch)))
    return Spread.of(gaps), floor


def _plain_distances(mine: list[Logits], theirs: list[Logits]) -> Iterable[Array]:
    for a, b in zip(mine, theirs, strict=True):
        yield np.abs(a.columns - b.columns).max(-1)


def _base_distances(batch: Batch) -> Iterable[Array]:
    for other, _ in batch.others:
        for mine, theirs in zip(other.forwards, batch.base.forwards, strict=True):
            if theirs.model == TARGET and mine.logits is not None and theirs.logits is not None:
                yield np.abs(mine.logits.columns - theirs.logits.columns).max(-1)


# -------------------------------------------------------------------------------------------------------------- drafts
def _drafts(batches: List[Batch], column: dict[int, int], layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the run drafts what the reference's path would draft on the same rounds, and why not."""
    if not any(f.model != TARGET for b in batches for f in b.base.forwards):
        return {}
    mine = [_draft_logits(b.run, b.base) for b in batches]
    spread = Spread.of(d for per_batch in mine for d in per_batch)
    floor = Spread()
    for i in range(len(batches[0].others)):
        floor = floor.widest(Spread.of(d for b in batches for d in _draft_logits(b.others[i][0], b.base)))
        floor = floor.widest(Spread.of(d for b in batches for d in _first_drafts(b.others[i][1], b.plain)))
    limit = TWO_RUNS * floor.maximum
    unlikely = sum(gap > limit for b in batches for gap in _chosen_gaps(b, column))
    against_plain = sum(gap > limit for b in batches for gap in _first_draft_gaps(b, column))
    expected, drafted, accepted = _acceptance(batches)
    outside = [row["boundary"] for row in layers if row["boundary"].startswith("mtp.") and not row["within"]]
    broken = ""
    if outside:
        broken = f"the draft path leaves the floor at {outside[0]}"
    elif not spread.within(floor):
        broken = "draft logits differ by more than rounding"
    elif unlikely or against_plain:
        broken = f"{max(unlikely, against_plain)} drafts are not what the reference's path would draft"
    return {
        "broken": broken,
        "difference": asdict(spread),
        "floor": asdict(floor),
        "drafted": drafted,
        "accepted": accepted,
        "reference_accepted": expected,
    }


def _draft_logits(record: Record, base: Record) -> Iterable[Array]:
    for mine, theirs in zip(record.forwards, base.forwards, strict=True):
        if theirs.model != TARGET and mine.logits is not None and theirs.logits is not None:
            yield np.abs(mine.logits.columns - theirs.logits.columns).max(-1)


def _first_drafts(mine: Plain, theirs: Plain) -> Iterable[Array]:
    if mine.first_drafts is not None and theirs.first_drafts is not None:
        yield from _plain_distances(mine.first_drafts, theirs.first_drafts)


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


def _first_draft_gaps(batch: Batch, column: dict[int, int]) -> Iterable[float]:
    """The same for the first draft of each round, by the plain forward, which remembers nothing."""
    if batch.plain.first_drafts is None:
        return
    for rounds, plain in zip(batch.rounds, batch.plain.first_drafts, strict=True):
        committed = 1
        for r in rounds:
            if r["drafts"] and committed - 1 < len(plain.value):
                logits = plain.columns[committed - 1, column[r["drafts"][0]]]
                yield float(plain.value[committed - 1] - logits)
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
