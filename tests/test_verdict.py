"""The rules of the verdict on made-up numbers: what is a tie, what is outside the floor, and what comes first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.engine.record import TARGET, Array, Forward, Logits, Plain, Record, Script
from lockstep.engine.sidebyside import Batch, Spread
from lockstep.engine.verdict import DIVERGED, IDENTICAL, TIE, Judgement, judge

PROMPT = 2  # tokens
COLUMNS = (0, 1, 2, 3)
REFERENCE = [0, 1, 2]
FLOOR = 0.01


def logits_of(rows: Array) -> Logits:
    two = np.sort(rows, -1)[:, ::-1]
    return Logits(rows, rows.argmax(-1), two[:, 0], two[:, 1])


def judgement(tokens: list[int], true: Array, moved: Array | float = 0.0, values: Array | None = None) -> Judgement:
    """On a run of one request that chose `tokens` where the plain forward has the logits `true` [3, 4].

    The run's own logits are `moved` from those, and its values at boundary `b` are `values`; the base's are zero.
    """
    whole = [3, 3, *tokens]

    def record(shift: Array | float, at_b: Array) -> Record:
        position = np.arange(len(whole) - 1)
        rows = np.concatenate([np.zeros((PROMPT - 1, 4)), true + shift])
        request, token = np.zeros(len(position), int), np.array(whole[:-1])
        return Record([Forward(TARGET, 0, request, position, token, logits_of(rows), {"b": at_b[None]})])

    zero = np.zeros((4, 2))
    other = record(FLOOR, zero + FLOOR), Plain([logits_of(true + FLOOR)], None)
    batch = Batch(
        script=Script(0, [[0]], [whole], values=True), prompts=[PROMPT], first_request=0, rounds=[[]],
        run=record(moved, zero if values is None else values), base=record(0.0, zero),
        plain=Plain([logits_of(true)], None), others=[other],
    )  # fmt: skip
    return judge([tokens], [REFERENCE], [batch], list(COLUMNS), eps=1e-7)


def margins(*gaps: float) -> Array:
    """Logits in which REFERENCE[i] is best, and token 3 is gaps[i] below it."""
    rows = np.full((3, 4), -5.0)
    for i, gap in enumerate(gaps):
        rows[i, REFERENCE[i]], rows[i, 3] = 0.0, -gap
    return rows


def test_equal_tokens_and_values_are_identical() -> None:
    assert judgement(REFERENCE, margins(1, 1, 1)).verdict == IDENTICAL


def test_another_token_within_the_floor_is_a_tie() -> None:
    found = judgement([0, 3, 2], margins(1, 1.5 * FLOOR, 1), moved=0.5 * FLOOR)
    (difference,) = found.differences
    assert found.verdict == TIE and (difference.position, difference.token, difference.reference_token) == (1, 3, 1)
    assert difference.margin == pytest.approx(1.5 * FLOOR) and difference.floor == pytest.approx(2 * FLOOR)


def test_another_token_with_a_margin_beyond_the_floor_diverged() -> None:
    found = judgement([0, 3, 2], margins(1, 3 * FLOOR, 1))
    assert found.verdict == DIVERGED and found.why == "tokens differ by more than rounding"


def test_a_close_margin_is_no_tie_where_the_logits_moved_more() -> None:
    """The reference's two best are close, but the run is at neither for rounding's sake."""
    moved = np.zeros((3, 4))
    moved[1, 3] = 3 * FLOOR
    found = judgement([0, 3, 2], margins(1, 1.5 * FLOOR, 1), moved=moved)
    assert found.verdict == DIVERGED and [d.tie for d in found.differences] == [False]


def test_a_later_token_that_its_own_prefix_speaks_against_diverged() -> None:
    found = judgement([0, 3, 3], margins(1, 1.5 * FLOOR, 1))
    assert found.verdict == DIVERGED and [(d.position, d.tie) for d in found.differences] == [(1, True), (2, False)]


def test_a_text_that_ends_early_diverged() -> None:
    assert judgement([0, 1], margins(1, 1, 1)[:2]).verdict == DIVERGED


@pytest.mark.parametrize(
    "rows,verdict",
    (
        ([1.9, 1.9, 1.9, 1.9], IDENTICAL),
        ([2.1, 0.0, 0.0, 0.0], DIVERGED),  # one row, once
        ([0.0, 0.0, 0.0, float("nan")], DIVERGED),
    ),
)
def test_values_at_a_boundary(rows: list[float], verdict: str) -> None:
    values = np.array([[FLOOR * r, 0.0] for r in rows])
    found = judgement(REFERENCE, margins(1, 1, 1), values=values)
    assert found.verdict == verdict
    assert (found.where is None) is (verdict == IDENTICAL)
    if found.where:
        assert (found.where.boundary, found.where.row_position) == ("b", int(np.argmax(~(np.array(rows) <= 1.9))))


def test_a_shift_of_every_row_is_seen_below_the_largest_difference() -> None:
    """The floor has one row that rounding took far, such as another expert; all rows a little off are still a fault."""
    floor = Spread.of([np.array([0.001] * 9 + [1.0])])
    assert Spread.of([np.array([0.002] * 9 + [1.9])]).within(floor)
    assert not Spread.of([np.array([0.003] * 10)]).within(floor)


def test_spread_of_nothing_is_nothing() -> None:
    empty: Any = []
    assert Spread.of(empty) == Spread(0.0, 0.0)
