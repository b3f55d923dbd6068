"""The few statistics of a comparison. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
SEED = 20


def ratio_to(reference: Sequence[float], mine: Sequence[float]) -> dict[str, float | None]:
    """Median of the ratios of paired repetitions, with its 95 % bootstrap interval (None with fewer than three pairs).

    Repetitions are paired because they ran one after the other: what slowed one slowed the other.
    """
    pairs = np.array([m / r for r, m in zip(reference, mine, strict=False) if r > 0 and math.isfinite(m)])
    if not len(pairs):
        return {"ratio": None, "low": None, "high": None}
    if len(pairs) < 3:
        return {"ratio": float(np.median(pairs)), "low": None, "high": None}
    chosen = np.random.default_rng(SEED).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    low, high = np.quantile(np.median(pairs[chosen], axis=1), [0.025, 0.975])
    return {"ratio": float(np.median(pairs)), "low": float(low), "high": float(high)}


def quantile(values: Sequence[float], q: float) -> float | None:
    return float(np.quantile(np.array(values), q)) if len(values) else None


def median(values: Sequence[float]) -> float | None:
    return quantile(values, 0.5)


def mcnemar(mine: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Exact two-sided p-value that two paired sets of right and wrong answers are equally good (McNemar, 1947)."""
    only_mine = sum(a and not b for a, b in zip(mine, theirs, strict=True))
    only_theirs = sum(b and not a for a, b in zip(mine, theirs, strict=True))
    discordant = only_mine + only_theirs
    tail = sum(math.comb(discordant, i) for i in range(min(only_mine, only_theirs) + 1))
    return min(1.0, float(2 * tail / 2**discordant))
