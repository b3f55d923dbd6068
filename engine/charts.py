"""The charts of a report as SVG, drawn by matplotlib. Colours are CSS variables: a page may be light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.engine import wording as w
from lockstep.engine.report import QUANTILES, by_kind

SERIES = [f"#0a00{i:02x}" for i in range(10)]  # stand-ins, replaced by var(--series-i)
INK, GRID = "#0b0000", "#0c0000"
VARIABLES = {c: f"var(--series-{i})" for i, c in enumerate(SERIES)} | {INK: "var(--ink)", GRID: "var(--grid)"}
WIDTH = 9.2  # inches
Row = dict[str, Any]


def draw(rows: Sequence[Row]) -> dict[str, str]:
    """Title -> SVG of every chart that the rows have numbers for."""
    ran = [row for row in rows if row.get("speed")]
    charts = {
        "Where the time goes, per generated token": _time(ran),
        "Accepted drafts by position": _acceptance([r for r in ran if r["draft_tokens"]]),
        "Bytes per generated token, by boundary": _bytes([r for r in ran if r["collectives"]]),
        "Time between tokens": _latency(ran, "token_gap_s"),
        "Time to the first token": _latency(ran, "first_token_s"),
    }
    return {title: svg for title, svg in charts.items() if svg}


def boundaries(row: Row) -> str:
    """How far a run is from the reference's path at each boundary, and the floor."""
    layers = row.get("boundaries") or []
    if not layers:
        return ""
    figure, axes = _axes(2.6)
    names = [layer["boundary"] for layer in layers]
    smallest = min((v for x in layers for v in (x["difference"]["maximum"], x["floor"]["maximum"]) if v > 0), default=1)
    for values, color, label in (("floor", SERIES[1], "rounding floor x 2"), ("difference", SERIES[3], row["label"])):
        scale = 2.0 if values == "floor" else 1.0
        heights = [_finite(scale * layer[values]["maximum"], smallest) for layer in layers]
        axes.plot(range(len(names)), heights, color=color, label=label, drawstyle="steps-mid", linewidth=1.6)
    outside = [i for i, layer in enumerate(layers) if not layer["within"]]
    if outside:
        axes.axvline(outside[0], color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(names[outside[0]], (outside[0], 1.0), xycoords=("data", "axes fraction"), fontsize=8, color=INK,
                      xytext=(3, 2), textcoords="offset points")  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("largest difference")
    axes.set_xticks(*_ticks(names))
    axes.grid(axis="x", visible=False)
    _legend(axes)
    return _svg(figure)


def _ticks(names: list[str]) -> tuple[list[int], list[str]]:
    """Where each layer begins, as far as there is room for its name."""
    places: list[int] = []
    for i, name in enumerate(names):
        new = i == 0 or _layer(name) != _layer(names[i - 1])
        if new and (not places or i - places[-1] >= len(names) / 16):
            places.append(i)
    return places, [_layer(names[i]) for i in places]


def _time(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    figure, axes = _axes(0.8 + 0.34 * len(rows))
    left = np.zeros(len(rows))
    for i, (key, label) in enumerate((("compute_s", "computing"), ("transfer_s", "moving"), ("wait_s", "waiting"))):
        per_token = [1000 * np.mean([p[key] for p in row["parts"]]) / _tokens(row) for row in rows]
        axes.barh(range(len(rows)), per_token, left=left, color=SERIES[i], label=label, height=0.62)
        left = left + np.array(per_token)
    _names(axes, rows)
    axes.set_xlabel("ms, mean of the ranks")
    _legend(axes)
    return _svg(figure)


def _acceptance(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    figure, axes = _axes(2.6)
    groups: dict[tuple[float, ...], list[str]] = {}
    for row in rows:  # equal lines would hide each other
        rates = tuple(np.nan if p["rate"] is None else p["rate"] for p in row["acceptance"]["per_position"])
        groups.setdefault(rates, []).append(row["label"])
    most = max(len(rates) for rates in groups)
    width = 0.8 / len(groups)
    for i, (rates, labels) in enumerate(groups.items()):
        places = np.arange(len(rates)) + 1 + (i - (len(groups) - 1) / 2) * width
        axes.bar(places, rates, width * 0.92, color=SERIES[i % len(SERIES)], label=_shortened(labels))
    axes.set_xticks(range(1, most + 1), [f"draft {i}" for i in range(1, most + 1)])
    axes.set_ylim(0, 1)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(axes)
    return _svg(figure)


def _bytes(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    figure, axes = _axes(0.8 + 0.34 * len(rows))
    totals = [by_kind(row["collectives"]) for row in rows]
    order = sorted({k for t in totals for k in t}, key=lambda kind: -max(t.get(kind, 0) for t in totals))
    shown = order[: len(SERIES) - 1]
    left = np.zeros(len(rows))
    for i, kind in enumerate([*shown, *(["others"] if len(order) > len(shown) else [])]):
        kinds = order[len(shown) :] if kind == "others" else [kind]
        values = [sum(t.get(k, 0) for k in kinds) / _tokens(row) for t, row in zip(totals, rows, strict=True)]
        axes.barh(range(len(rows)), values, left=left, color=SERIES[i], label=kind, height=0.62)
        left = left + np.array(values)
    _names(axes, rows)
    axes.xaxis.set_major_formatter(lambda value, _: w.size(value))
    _legend(axes, columns=3)
    return _svg(figure)


def _latency(rows: Sequence[Row], name: str) -> str:
    rows = [row for row in rows if row["latency"][name]]
    if not rows:
        return ""
    figure, axes = _axes(0.6 + 0.34 * len(rows))
    for i, row in enumerate(rows):
        q = dict(zip(QUANTILES, (1000 * v for v in row["latency"][name]), strict=True))
        axes.hlines(i, q[0.05], q[0.95], color=SERIES[0], linewidth=2)
        axes.hlines(i, q[0.25], q[0.75], color=SERIES[0], linewidth=9)
        axes.plot([q[0.5]], [i], marker="|", markersize=13, markeredgewidth=2, color=INK)
    _names(axes, rows)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms: 5 to 95 %, 25 to 75 %, median")
    return _svg(figure)


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(GRID)
    axes.tick_params(colors=INK, length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(axis="both", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _names(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def _legend(axes: Any, columns: int = 4) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, labelcolor=INK, fontsize=8, borderpad=0.2
    )


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 9}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r"#0[abc]00[0-9a-f]{2}", lambda found: VARIABLES.get(found[0], found[0]), svg)


def _tokens(row: Row) -> float:
    """Generated tokens of the counted run."""
    return max(float(row["tokens"]), 1.0)


def _finite(value: float, smallest: float) -> float:
    return max(min(value, 1e30), smallest / 3)


def _layer(boundary: str) -> str:
    parts = boundary.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].isdecimal() else parts[0]


def _shortened(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} with the same counts"
