"""How the numbers of a report read, in every renderer. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.engine.verdict import IDENTICAL

Row = dict[str, Any]
NONE = "-"


def verdict(row: Row) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    found = row["verdict"] or NONE
    return "reference" if row["is_reference"] and found == IDENTICAL else str(found)


def explanation(row: Row) -> str:
    """Why a row is not simply identical, in one sentence; empty where it is."""
    if row["status"] != "ok":
        return str(row["why"])
    parts = [row.get("verdict_why") or ""]
    where, first = row.get("where"), row.get("first_difference")
    if where:
        cause = f" ({', '.join(where['causes'])})" if where["causes"] else ""
        parts.append(f"first at {where['boundary']}{cause}")
    if first and first["tie"]:
        parts.append(f"{row['ties']} of {row['requests_different']} differing requests are ties within rounding")
    elif first:
        parts.append(
            f"request {first['request']}, token {first['position']}: {first['token_text']!r} for "
            f"{first['reference_token_text']!r}, margin {first['margin']:.3g} against a floor of {first['floor']:.3g}"
        )
    answers = row.get("accuracy")
    if answers and answers.get("only_here", 0) + answers.get("only_reference", 0):
        parts.append(
            f"{answers['right']} of {answers['of']} answers right, {answers['only_here']} of them only here and "
            f"{answers['only_reference']} only in the reference (p = {answers['p_value']:.2g})"
        )
    if not row.get("repeats_agree", True):
        parts.append("repetitions of this run gave different tokens")
    return "; ".join(p for p in parts if p)


def speed(row: Row, name: str, scale: float = 1.0) -> str:
    """The median of one clocked quantity."""
    value = row.get("speed", {}).get(name, {}).get("median")
    return NONE if value is None else number(value * scale)


def gap(row: Row) -> str:
    """Median milliseconds between tokens, and the 95th percentile."""
    middle, late = speed(row, "token_gap_s", 1000), speed(row, "token_gap_p95_s", 1000)
    return NONE if middle == NONE else f"{middle} ({late})"


def ratio(row: Row, name: str) -> str:
    """`1.24 (1.19-1.31)`: median and 95 % interval of the ratio to the reference."""
    found = row.get("speed", {}).get(name, {})
    if found.get("ratio") is None or row["is_reference"]:
        return NONE
    interval = "" if found["low"] is None else f" ({found['low']:.2f}-{found['high']:.2f})"
    return f"{found['ratio']:.2f}{interval}"


def accepted(row: Row) -> str:
    """Accepted at each position, of those drafted."""
    positions = row.get("acceptance", {}).get("per_position", [])
    return " ".join(NONE if p["rate"] is None else f"{p['rate']:.0%}" for p in positions) or NONE


def accuracy(row: Row) -> str:
    found = row.get("accuracy")
    return NONE if not found else f"{found['right']}/{found['of']}"


def memory(row: Row) -> str:
    """The largest rank's peak above what it had before the model was loaded."""
    ranks = row.get("memory")
    return size(max(m["peak_bytes"] - m["start_bytes"] for m in ranks)) if ranks else NONE


def traffic(row: Row) -> str:
    per_token = row.get("per_token")
    return NONE if not per_token or not per_token["bytes"] else size(per_token["bytes"])


def shares(row: Row) -> tuple[float, float, float] | None:
    """Computing, moving and waiting as shares of the time of prefill and rounds, over all ranks."""
    parts = row.get("parts")
    if not parts:
        return None
    totals = [sum(p[key] for p in parts) for key in ("compute_s", "transfer_s", "wait_s")]
    whole = sum(totals) or 1.0
    return totals[0] / whole, totals[1] / whole, totals[2] / whole


def split(row: Row) -> str:
    found = shares(row)
    return NONE if found is None else " ".join(f"{share:.0%}" for share in found)


def size(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def setting(document: Row) -> str:
    """What was compared, in one line."""
    s = document["settings"]
    return (
        f"{document['model']}, {s['prompts']} prompts, up to {s['max_new_tokens']} new tokens, batch {s['batch']}, "
        f"{s['dtype']} on {s['device']}{_between(document['rows'])}, {s['repeat']} repetitions; "
        f"reference {document['reference']}"
    )


def _between(rows: Sequence[Row]) -> str:
    """What moved bytes, and between which hosts if there were several."""
    wires = dict.fromkeys(row["wire"] for row in rows if row.get("wire"))
    hosts = dict.fromkeys(host for row in rows for host in row.get("hosts", ()))
    over = f", over {' and '.join(wires)}" if wires else ""
    return over + (f" between {', '.join(hosts)}" if len(hosts) > 1 else "")
