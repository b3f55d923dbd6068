"""Runs of the engine inside ranks, and what the oracle says they must give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oracle import oracle

from lockstep.comm.group import Group
from lockstep.comm.strategy import CHOICES, NAMED, R, Strategy, resolve
from lockstep.engine.requests import Job
from lockstep.engine.run import generate

PROMPTS = ((5, 77, 13, 60, 2, 9, 33), (3,), (8, 9, 1, 2, 3, 4, 5, 6, 7))


def every_strategy() -> list[tuple[str, dict[str, str]]]:
    """Every named strategy with every exit, placement of experts and dispatch that it can have."""
    cases: list[tuple[str, dict[str, str]]] = []
    for name, (stream, _, ffn_in) in NAMED.items():
        exits = [{}] if stream == R else [{"exit": e} for e in CHOICES["exit"]]
        experts = (
            [{"experts": e} for e in CHOICES["experts"]]
            if ffn_in == R
            else [{"dispatch": d} for d in CHOICES["dispatch"]]
        )
        cases += [(name, a | b) for a in exits for b in experts]
    return cases


def label(case: tuple[str, dict[str, str]]) -> str:
    return "-".join((case[0], *case[1].values()))


def job(folder: Path, strategy: Strategy | str = "tp", *, prompts: Any = PROMPTS, **fields: Any) -> Job:
    chosen = resolve(strategy) if isinstance(strategy, str) else strategy
    return Job(str(folder), tuple(map(tuple, prompts)), chosen, **({"max_new_tokens": 12, "dtype": "float64"} | fields))


def run(group: Group, work: Job) -> dict[str, Any]:
    """On every rank: the job's result without what a clock says."""
    group.ledger.clear()
    result = generate(group, lambda event: None, work)
    del result["timings"]
    return result


def outcome(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Tokens, rounds and finish reason per request."""
    return [
        (tuple(q["tokens"]), tuple((tuple(r["drafts"]), r["accepted"]) for r in q["rounds"]), q["finish_reason"])
        for q in result["requests"]
    ]


def expected(
    folder: Path,
    k: int,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    max_new: int = 12,
    eos: Sequence[int] = (),
    max_position: int | None = None,
    recycle: str = "post-norm",
) -> list[tuple[Any, ...]]:
    reference = oracle(folder)
    out = []
    for prompt in prompts:
        g = reference.speculative(prompt, max_new, k, eos, max_position, recycle)
        out.append((g.tokens, g.rounds, g.finish_reason))
    return out
