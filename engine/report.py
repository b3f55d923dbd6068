"""A comparison as one JSON document (its schema: docs/report.md): from outcomes to numbers, for renderers to lay out.

No torch here.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from lockstep.engine.compare import Outcome, Plan, Result
from lockstep.engine.prompts import is_right
from lockstep.engine.stats import mcnemar, median, quantile, ratio_to
from lockstep.engine.verdict import DIVERGED, DRAFT_DIVERGED

SCHEMA = "lockstep-comparison/1"
CONTEXT_TOKENS = 40
QUANTILES = [round(q, 2) for q in np.linspace(0, 1, 21)]
Values = Callable[[Result], float | None]

# What is clocked: name -> one repetition's value.
SPEEDS: dict[str, Values] = {
    "tokens_per_s": lambda run: run["timings"]["tokens_per_s"],
    "decode_tokens_per_s": lambda run: run["timings"]["decode_tokens_per_s"],
    "prefill_s": lambda run: run["timings"]["prefill_s"],
    "first_token_s": lambda run: median(run["first_token_s"]),
    "token_gap_s": lambda run: median(run["token_gaps_s"]),
    "token_gap_p95_s": lambda run: quantile(run["token_gaps_s"], 0.95),
}


@dataclass(frozen=True)
class Texts:
    """How to show tokens and judge answers: the model's name, each prompt's answer, and a decoder if there is one."""

    model: str
    answers: Sequence[str | None]
    decode: Callable[[Sequence[int]], str] | None = None

    def of(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens) if self.decode else " ".join(map(str, tokens))


def build(plan: Plan, outcomes: Sequence[Outcome], texts: Texts) -> dict[str, Any]:
    """The document, with the exit code that it means."""
    reference = next(o for o in outcomes if o.cell == plan.reference)
    job = plan.job
    fields = ("max_new_tokens", "batch", "prefill_chunk", "recycle", "ignore_eos", "device")
    return {
        "schema": SCHEMA,
        "lockstep": _version("lockstep-decode"),
        "torch": _version("torch"),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"system": platform.system(), "processor": _processor(), "cores": os.cpu_count()},
        "model": texts.model,
        "settings": {name: getattr(job, name) for name in fields}
        | {"prompts": len(job.prompts), "repeat": plan.repeat, "dtype": _dtype(outcomes, job.dtype)}
        | {"comm": plan.wiring.comm, "comm_algorithm": plan.wiring.algorithm},
        "reference": plan.reference.label,
        "rows": [_row(outcome, reference, texts, job.prompts) for outcome in outcomes],
        "exit_code": exit_code(outcomes),
    }


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 all fine, 1 something diverged, 3 some run failed or could not run."""
    verdicts = {o.judgement["verdict"] for o in outcomes if o.judgement}
    if verdicts & {DIVERGED, DRAFT_DIVERGED}:
        return 1
    return 3 if any(o.status != "ok" for o in outcomes) else 0


def _row(outcome: Outcome, reference: Outcome, texts: Texts, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    cell = outcome.cell
    row: dict[str, Any] = {
        "label": cell.label,
        "name": cell.name,
        "tp": cell.tp,
        "draft_tokens": cell.draft_tokens,
        "status": outcome.status,
        "why": outcome.why,
        "is_reference": cell == reference.cell,
        "strategy": cell.strategy.as_dict(),
        "verdict": None,
    }
    if not outcome.runs:
        return row
    counted = outcome.runs[0]
    row |= {
        "effective": counted["effective"],
        "hosts": counted["hosts"],
        "wire": counted["wire"],
        "speed": {name: _speed(outcome, reference, value) for name, value in SPEEDS.items()},
        "latency": _latency(outcome.runs),
        "tokens": sum(map(len, counted["tokens"])),
        "parts": counted["parts"],
        "collectives": _collectives(counted),
        "per_token": _per_token(counted),
        "memory": counted["memory"],
        "weights_bytes": counted["weights_bytes"],
        "acceptance": _acceptance(counted["acceptance"]),
        "accuracy": _accuracy(outcome, reference, texts),
        "repeats_agree": all(run["tokens"] == counted["tokens"] for run in outcome.runs),
        "notes": counted["notes"],
    }
    if outcome.judgement and reference.runs:
        row |= _judgement(outcome.judgement, counted, reference.runs[0], texts, prompts)
    return row


def _clocked(outcome: Outcome) -> list[Result]:
    """The repetitions that are only clocked; the counted one where there is no other."""
    runs = outcome.runs or []
    return runs[1:] or runs


def _speed(outcome: Outcome, reference: Outcome, value: Values) -> dict[str, Any]:
    mine, theirs = ([value(run) for run in _clocked(o)] for o in (outcome, reference))
    pairs = [(m, r) for m, r in zip(mine, theirs, strict=False) if m is not None and r is not None]
    values = [m for m in mine if m is not None]
    return {"values": values, "median": median(values)} | ratio_to([r for _, r in pairs], [m for m, _ in pairs])


def _latency(runs: Sequence[Result]) -> dict[str, list[float]]:
    """Quantiles 0, 5, ... 100 % over all clocked repetitions."""
    out = {}
    for name, key in (("first_token_s", "first_token_s"), ("token_gap_s", "token_gaps_s")):
        values = [v for run in (runs[1:] or runs) for v in run[key]]
        out[name] = [float(v) for v in np.quantile(values, QUANTILES)] if values else []
    return out


def _collectives(run: Result) -> list[dict[str, Any]]:
    """The ledger's rows, with the time of each."""
    times = {(t["boundary"], t["collective"]): t for t in run["collectives"]}
    rows = []
    for entry in run["ledger"]:
        timed = times.get((entry["boundary"], entry["collective"]), {})
        rows.append(entry | {key: timed.get(key) for key in ("transfer_s", "wait_s")})
    return rows


def _per_token(run: Result) -> dict[str, float]:
    tokens = max(sum(map(len, run["tokens"])), 1)
    return {key: sum(entry[key] for entry in run["ledger"]) / tokens for key in ("calls", "bytes", "wire_bytes")}


def by_kind(collectives: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Bytes per kind of boundary: `layers.*.attention.out` stands for every layer's, `mtp.*` for all of drafting."""
    totals: Counter[str] = Counter()
    for row in collectives:
        parts = ["*" if part.isdecimal() else part for part in row["boundary"].split(".")]
        totals["mtp.*" if parts[0] == "mtp" else ".".join(parts)] += row["bytes"]
    return dict(totals)


def _acceptance(acceptance: Result) -> Result:
    """With rates: of all drafts at a position, and of those whose predecessors were all accepted."""
    before, positions = acceptance["rounds"], []
    for position in acceptance["per_position"]:
        drafted, accepted = position["drafted"], position["accepted"]
        # A draft counts only if those before it were accepted; of these, some rounds had no room for another.
        reached = min(before, drafted)
        positions.append(position | {"rate": _share(accepted, drafted), "conditional": _share(accepted, reached)})
        before = accepted
    return acceptance | {"per_position": positions}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _accuracy(outcome: Outcome, reference: Outcome, texts: Texts) -> dict[str, Any] | None:
    """Answers right, and McNemar's exact p-value that the reference is as good."""
    if texts.decode is None or not any(a is not None for a in texts.answers) or not outcome.runs:
        return None
    mine = _right(outcome.runs[0], texts)
    out: dict[str, Any] = {"right": sum(mine), "of": len(mine), "rate": sum(mine) / len(mine), "p_value": None}
    if reference.runs:
        theirs = _right(reference.runs[0], texts)
        out |= {
            "p_value": mcnemar(mine, theirs),
            "only_here": sum(a and not b for a, b in zip(mine, theirs, strict=True)),
            "only_reference": sum(b and not a for a, b in zip(mine, theirs, strict=True)),
        }
    return out


def _right(run: Result, texts: Texts) -> list[bool]:
    return [
        is_right(texts.of(tokens), answer)
        for tokens, answer in zip(run["tokens"], texts.answers, strict=True)
        if answer is not None
    ]


def _judgement(
    judgement: Result, run: Result, reference: Result, texts: Texts, prompts: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    differences = judgement["differences"]
    worst = next((d for d in differences if not d["tie"]), differences[0] if differences else None)
    return {
        "verdict": judgement["verdict"],
        "verdict_why": judgement["why"],
        "requests_different": len({d["request"] for d in differences}),
        "ties": sum(d["tie"] for d in differences),
        "first_difference": worst and worst | _around(worst, run, reference, texts, prompts),
        "where": judgement["where"],
        "logits": judgement["logits"],
        "drafts": judgement["drafts"],
        "boundaries": judgement["layers"],
    }


def _around(
    difference: Result, run: Result, reference: Result, texts: Texts, prompts: Sequence[tuple[int, ...]]
) -> dict[str, str]:
    """The text before a difference, and how it goes on here and in the reference."""
    request, place = difference["request"], difference["position"]
    mine, theirs = run["tokens"][request], reference["tokens"][request]
    before = [*prompts[request], *mine[:place]]
    return {
        "text_before": texts.of(before[-CONTEXT_TOKENS:]),
        "text_here": texts.of(mine[place : place + CONTEXT_TOKENS]),
        "text_reference": texts.of(theirs[place : place + CONTEXT_TOKENS]) if theirs[:place] == mine[:place] else "",
        "token_text": texts.of([difference["token"]]) if difference["token"] >= 0 else "",
        "reference_token_text": texts.of([difference["reference_token"]]),
    }


def _dtype(outcomes: Sequence[Outcome], asked: str) -> str:
    return next((o.runs[0]["effective"]["dtype"] for o in outcomes if o.runs), asked)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            return next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
