"""Two replays side by side: how far apart their rows are, against how far rounding alone takes them.

Right runs differ by rounding only, and how much that is, is measured: the reference's own path, added up in another
order (as P ranks would) and in float64. The farthest of these from the plain order is the floor. Two right runs, each
no farther than that from the truth, are at most twice as far from each other.
T rows, C vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lockstep.engine.record import TARGET, Array, Forward, Logits, Plain, Record, Script

TWO_RUNS = 2.0  # each may lie a floor away from the truth, to opposite sides
Pairs = list[tuple[Forward | None, Forward | None]]


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

    def __post_init__(self) -> None:
        self.pairs = pairs_of(self.run, self.base)

    def mismatch(self, drafts: bool) -> Forward | None:
        """The first forward that the run and the base did not both make, over the same rows."""
        unequal = (mine or theirs for mine, theirs in self.pairs if not same_rows(mine, theirs))
        return next((f for f in unequal if f is not None and (f.model != TARGET) is drafts), None)


def pairs_of(run: Record, base: Record) -> Pairs:
    """The forwards of both, by what had been decided before each; None where one has no such forward."""
    found: dict[tuple[int, str, int], list[Forward | None]] = {}
    for side, record in enumerate((base, run)):
        seen: dict[tuple[int, str], int] = {}
        for forward in record.forwards:
            key = forward.decided, forward.model
            seen[key] = seen.get(key, 0) + 1
            found.setdefault((*key, seen[key]), [None, None])[side] = forward
    return [(mine, theirs) for _, (theirs, mine) in sorted(found.items(), key=lambda item: item[0][0])]


def same_rows(mine: Forward | None, theirs: Forward | None) -> bool:
    if mine is None or theirs is None:
        return False
    same = (np.array_equal(getattr(mine, key), getattr(theirs, key)) for key in ("request", "position", "token"))
    return all(same)


def plain_distances(mine: list[Logits], theirs: list[Logits]) -> Iterable[Array]:
    for a, b in zip(mine, theirs, strict=True):
        yield np.abs(a.columns - b.columns).max(-1)


def logit_distances(pairs: Pairs, *, drafts: bool) -> Iterable[Array]:
    for mine, theirs in pairs:
        if mine and theirs and (mine.model != TARGET) is drafts and same_rows(mine, theirs):
            assert mine.logits is not None and theirs.logits is not None
            yield np.abs(mine.logits.columns - theirs.logits.columns).max(-1)


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
        spread = Spread.of(d for b in batches for d in distances(b.run, b.base, name))
        floor = Spread.of([np.array([eps * _largest(batches, name)])])
        for order in zip(*(b.others for b in batches), strict=True):
            gaps = (d for (record, _), b in zip(order, batches, strict=True) for d in distances(record, b.base, name))
            floor = floor.widest(Spread.of(gaps))
        row = {"boundary": name, "difference": asdict(spread), "floor": asdict(floor)}
        rows.append(row | {"within": spread.within(floor)})
    return rows


def distances(run: Record, base: Record, name: str) -> Iterable[Array]:
    """[T] of each forward that has the boundary: the farthest feature on the farthest rank."""
    for mine, theirs in pairs_of(run, base):
        if mine and theirs and name in theirs.values and name in mine.values and same_rows(mine, theirs):
            yield distance(mine.values[name], theirs.values[name])


def distance(mine: Array, theirs: Array) -> Array:
    gap: Array = np.abs(mine - theirs).max(axis=(0, 2))
    return gap


def _largest(batches: List[Batch], name: str) -> float:
    largest = [np.abs(f.values[name]).max(initial=0.0) for b in batches for f in b.base.forwards if name in f.values]
    return float(max(largest, default=0.0))


def first_outside(batches: List[Batch], layers: list[dict[str, Any]], *, drafts: bool) -> Where | None:
    """The first boundary outside the floor: the earliest forward that has one, and the first of that forward."""
    for batch in batches:
        wrong = batch.mismatch(drafts)
        if wrong is not None:
            number = next(i for i, pair in enumerate(batch.pairs) if wrong in (pair[0], pair[1]))
            name = f"{wrong.model}.rows"
            return Where(
                name, wrong.model, [], Spread(), Spread(), number, int(wrong.request[0]), int(wrong.position[0])
            )
    found: list[tuple[int, Where]] = []
    for row in layers:
        if not row["within"] and row["boundary"].startswith("mtp.") is drafts:
            found += _first_row_outside(batches, row)
    return min(found, key=lambda item: item[0])[1] if found else None


def _first_row_outside(batches: List[Batch], row: dict[str, Any]) -> list[tuple[int, Where]]:
    name, spread, floor = row["boundary"], Spread(**row["difference"]), Spread(**row["floor"])
    few = spread.maximum > TWO_RUNS * floor.maximum  # else it is the median that is outside
    limit = TWO_RUNS * (floor.maximum if few else floor.median)
    before = 0
    for batch in batches:
        for i, (mine, theirs) in enumerate(batch.pairs):
            if mine and theirs and name in mine.values and name in theirs.values:
                bad = np.flatnonzero(~(distance(mine.values[name], theirs.values[name]) <= limit))
                if len(bad):
                    request, position = int(mine.request[bad[0]]), int(mine.position[bad[0]])
                    causes = batch.run.causes.get(name, [])
                    return [(before + i, Where(name, layer_of(name), causes, spread, floor, i, request, position))]
        before += len(batch.pairs)
    return []


def layer_of(boundary: str) -> str:
    """`layers.3` of `layers.3.attention.out`, `mtp.0` of `mtp.0.exit`, else the boundary itself."""
    parts = boundary.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdecimal() else boundary
