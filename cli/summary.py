"""What a finished run comes to, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from lockstep.cli.inputs import Prompt
from lockstep.comm.strategy import CHOICES
from lockstep.engine.prompts import Decode, is_right


def table(result: dict[str, Any], prompts: Sequence[Prompt], decode: Decode | None) -> Table:
    """The effective strategy, speed, acceptance, traffic and notes of what `generate` returned."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for label, value in lines(result, prompts, decode):
        grid.add_row(label, Text(value))
    if result["ledger"]:
        grid.add_row("", _traffic(result))
    for note in result["notes"]:
        grid.add_row("note", Text(note))
    return grid


def lines(result: dict[str, Any], prompts: Sequence[Prompt], decode: Decode | None) -> list[tuple[str, str]]:
    """A label and a sentence each."""
    effective, requests, timings = result["effective"], result["requests"], result["timings"]
    run = {k: effective[k] for k in ("tp", "dtype", "device", "draft_tokens")}
    fields = ", ".join(f"{k} {effective[k]}" for k in CHOICES)
    shown = [
        ("strategy", f"{effective['name']}: {fields}"),
        ("run", f"tp {run['tp']}, {run['dtype']}, {run['device']}, {_count(run['draft_tokens'], 'draft')} per round"),
        ("weights", _weights(effective)),
        ("speed", _speed(timings, len(requests))),
    ]
    if run["draft_tokens"]:
        shown.append(("accepted", _acceptance(result["acceptance"])))
    answers = [(r, p.answer) for r, p in zip(requests, prompts, strict=True) if p.answer is not None]
    if answers and decode:
        right = sum(is_right(decode(r["tokens"]), answer) for r, answer in answers)
        shown.append(("answers", f"{right} of {len(answers)} right"))
    shown.append(("moved", _totals(result)))
    return shown


def _weights(effective: dict[str, Any]) -> str:
    source = "random" if effective["load_format"] == "dummy" else "the checkpoint's"
    kept = {"keep": ", FP8 kept", "dequantise": ", FP8 dequantised"}.get(effective["weights"], "")
    return f"{source}{kept}, {_count(effective['layers'], 'layer')}, experts by {effective['expert_kernel']}"


def _speed(timings: dict[str, Any], requests: int) -> str:
    seconds, rate = timings["prefill_s"] + timings["decode_s"], timings["tokens_per_s"]
    per_second = "" if rate is None else f": {rate:.1f} tokens/s"
    return f"{_count(timings['tokens'], 'token')} of {_count(requests, 'request')} in {seconds:.2f} s{per_second}"


def _acceptance(acceptance: dict[str, Any]) -> str:
    if acceptance["mean_accepted"] is None:
        return "no round had room for a draft"
    rates = [f"{p['accepted'] / p['drafted']:.0%}" if p["drafted"] else "-" for p in acceptance["per_position"]]
    return f"{acceptance['mean_accepted']:.2f} drafts per round on average; by position {', '.join(rates)}"


def _totals(result: dict[str, Any]) -> str:
    rows, tokens = result["ledger"], max(_num_tokens(result), 1)
    if not rows:
        return "nothing: there is one rank"
    calls, payload, wire = (sum(row[key] for row in rows) / tokens for key in ("calls", "bytes", "wire_bytes"))
    return f"{calls:.1f} collectives and {_bytes(payload)} per token ({_bytes(wire)} sent by each rank)"


def _traffic(result: dict[str, Any]) -> Table:
    """Per token, boundaries of the same kind together: `layers.*.attention.out` stands for every layer's."""
    tokens = max(_num_tokens(result), 1)
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for row in result["ledger"]:
        parts = ["*" if part.isdecimal() else part for part in row["boundary"].split(".")]
        key = ".".join(parts), row["collective"]
        calls[key] += row["calls"]
        sizes[key] += row["bytes"]
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("boundary", "collective"):
        grid.add_column(name)
    for name in ("calls/token", "bytes/token"):
        grid.add_column(name, justify="right")
    for (boundary, collective), num_calls in calls.items():
        size = sizes[boundary, collective]
        grid.add_row(boundary, collective, f"{num_calls / tokens:.2f}", _bytes(size / tokens))
    return grid


def _num_tokens(result: dict[str, Any]) -> int:
    return int(result["timings"]["tokens"])


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
