"""What replays hand to the verdict: rows of numbers, and which rows they are. No torch here.

T rows of a forward, R ranks, F features kept, C vocabulary columns kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

BASE, SPLIT, FLOAT64 = "base", "split", "float64"
TARGET = "target"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Script:
    """One batch of a run: its number, what was decided in it, and each request's tokens, prompt and all."""

    batch: int
    decisions: list[list[int]]
    tokens: list[list[int]]
    values: bool  # whether to keep every boundary's activations too


@dataclass
class Logits:
    """Of the rows of one forward: the kept columns [T, C], the best id [T], its value and the runner-up's."""

    columns: Array
    best: Array
    value: Array
    second: Array


@dataclass
class Forward:
    """One pass of the target or of an MTP block: whose rows (request, position and token, [T] each), and its logits.

    `decided` is how many decisions had been taken before it.
    """

    model: str
    decided: int
    request: Array
    position: Array
    token: Array
    logits: Logits | None = None
    values: dict[str, Array] = field(default_factory=dict)  # boundary -> [R or 1, T, F]


@dataclass
class Record:
    """What one replay of one batch computed. `causes`: the collectives since the boundary before, per boundary."""

    forwards: list[Forward] = field(default_factory=list)
    causes: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Plain:
    """The whole sequences in one forward without any cache or draft: logits of each request's generated tokens.

    `first_drafts` are the first MTP block's, over the same rows: what a first draft would be after each token.
    """

    target: list[Logits]
    first_drafts: list[Logits] | None
