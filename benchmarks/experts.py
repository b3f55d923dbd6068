"""Time the expert kernels against each other and against the machine's limit, over numbers of rows.

    python benchmarks/experts.py [--experts 64 --top-k 8 --hidden 1024 --inter 256] [--dtype float32] [--json FILE]

Kernels take turns, so that what else the machine does falls on all alike; a ratio is the median of the ratios of
neighbours. The limit of a row count is what the weights of the experts that are hit take to be read once, or what
their multiplications take, whichever is longer, at the best rates that this machine shows here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.models.experts import RUN
from lockstep.models.kernels import KERNELS

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DENSE_UP_TO = 64  # it multiplies every row by every expert


def seconds(function: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Rates:
    """The best that the machine has shown: bytes read per second by a product with one row, operations per second."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.device = device
        self.matrix = torch.randn(4096, 8192, device=device).to(dtype)
        self.square = self.matrix[:2048, :2048].contiguous()
        self.read = self.multiply = 0.0

    def look_again(self) -> None:
        row = self.matrix[:1]
        for _ in range(3):
            spent = seconds(lambda: F.linear(row, self.matrix), self.device)
            self.read = max(self.read, self.matrix.nbytes / spent)
            spent = seconds(lambda: F.linear(self.square, self.square), self.device)
            self.multiply = max(self.multiply, 2 * 2048**3 / spent)


def measure(args: argparse.Namespace, rows: int, rates: Rates) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    gate_up = (torch.randn(args.experts, 2 * args.inter, args.hidden, device=args.device) * args.hidden**-0.5).to(dtype)
    down = (torch.randn(args.experts, args.hidden, args.inter, device=args.device) * args.inter**-0.5).to(dtype)
    x = torch.randn(rows, args.hidden, device=args.device).to(dtype)
    weights = torch.rand(rows, args.top_k, device=args.device)
    names = [
        name
        for name, kernel in KERNELS.items()
        if args.dtype in kernel.dtypes[args.device] and (name != "dense" or rows <= DENSE_UP_TO)
    ]
    times: dict[str, list[float]] = {name: [] for name in names}
    hits = []
    for turn in range(args.repeat + 1):
        # Other experts in every turn, or a few that fit a cache would be read once.
        ids = torch.rand(rows, args.experts, device=args.device).topk(args.top_k).indices
        for name in names:
            spent = seconds(partial(RUN[name], x, weights, ids, gate_up, down), args.device)
            if turn:  # the first warms up
                times[name].append(spent)
        hits.append(ids.unique().numel())
        rates.look_again()
    multiplying = 2 * rows * args.top_k * 3 * args.hidden * args.inter / rates.multiply
    reading = [hit * (gate_up[0].nbytes + down[0].nbytes) / rates.read for hit in hits[1:]]
    limits = [max(seconds, multiplying) for seconds in reading]
    return {
        "rows": rows,
        "hit": round(statistics.mean(hits)),
        "limit_ms": statistics.median(limits) * 1e3,
        "limited_by": "reading" if statistics.median(reading) > multiplying else "multiplying",
        "ms": {name: min(spent) * 1e3 for name, spent in times.items()},
        "share_of_limit": {
            name: max(limit / taken for limit, taken in zip(limits, spent, strict=True))
            for name, spent in times.items()
        },
        "ratio_to_loop": {
            name: statistics.median(a / b for a, b in zip(spent, times["loop"], strict=True))
            for name, spent in times.items()
        },
    }


def line(result: dict[str, Any]) -> str:
    cells = [f"{result['rows']:>5} {result['hit']:>4} {result['limit_ms']:>9.2f} {result['limited_by']:<11}"]
    for name in KERNELS:
        if name in result["ms"]:
            share, ratio = result["share_of_limit"][name], result["ratio_to_loop"][name]
            cells.append(f"{result['ms'][name]:>9.2f} {share:>5.0%} {ratio:>6.2f}")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 64), ("top-k", 8), ("hidden", 1024), ("inter", 256), ("repeat", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)
    rates = Rates(getattr(torch, args.dtype), args.device)
    print(f"{args.experts} experts of width {args.inter}, {args.top_k} per row, hidden {args.hidden}, {args.dtype}")
    print("per kernel: best ms, best share of the limit, ratio to loop (median of neighbours, lower is faster)")
    kernels = " | ".join(f"{name:>22}" for name in KERNELS)
    print(f"{'rows':>5} {'hit':>4} {'limit ms':>9} {'set by':<11} | {kernels}")
    results = []
    for rows in args.rows:
        results.append(measure(args, rows, rates))
        print(line(results[-1]), flush=True)
    print(f"limit: {rates.read / 1e9:.1f} GB/s read, {rates.multiply / 1e9:.0f} GFLOP/s")
    if args.json:
        args.json.write_text(json.dumps({"read": rates.read, "multiply": rates.multiply, "results": results}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
