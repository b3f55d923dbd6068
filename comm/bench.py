"""How long collectives take: latency and bandwidth per collective, size, type and algorithm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.comm.torch_wire import CallsWire
from lockstep.comm.wire import Wire
from lockstep.comm.wiring import COLLECTIVES

BUDGET_S = 20.0  # of one case; it stops early rather than go on with what is slow


@dataclass(frozen=True)
class Plan:
    """What to measure: `sizes` are bytes of the whole value; `calls` per case, after `warmup` more."""

    collectives: tuple[str, ...] = COLLECTIVES
    sizes: tuple[int, ...] = (1024, 16_384, 262_144, 4_194_304)
    dtypes: tuple[str, ...] = ("float32",)
    algorithms: tuple[str, ...] = ("native", "exchange")
    calls: int = 100
    warmup: int = 10


def measure(group: Group, emit: Callable[[Any], None], plan: Plan) -> list[dict[str, Any]]:
    """One row per case, the same number of calls on all ranks; the times are rank 0's. The target of a run."""
    rows: list[dict[str, Any]] = []
    if group.transport is None:
        return rows
    wire = group.transport.wire
    for name in plan.dtypes:
        for collective in plan.collectives:
            for size in plan.sizes if collective != "barrier" else (0,):
                for algorithm, tried in _wires(wire, collective, plan):
                    group.mark("bench", len(rows) + 1)
                    row = _case(group, tried, collective, size, getattr(torch, name), plan)
                    rows.append({"wire": wire.name, "algorithm": algorithm, "dtype": name} | row)
                    emit(rows[-1])
    return rows


def _wires(wire: Wire, collective: str, plan: Plan) -> Iterator[tuple[str, Wire]]:
    """The wire, with each algorithm that is behind this collective on it."""
    if isinstance(wire, CallsWire) and wire.has_choice(collective):
        yield from ((algorithm, wire.with_algorithm(algorithm)) for algorithm in plan.algorithms)
    else:
        yield "native", wire


def _case(group: Group, wire: Wire, collective: str, size: int, dtype: torch.dtype, plan: Plan) -> dict[str, Any]:
    call, num_bytes = _call(group, wire, collective, size, dtype)
    seconds: list[float] = []
    began = time.perf_counter()
    assert group.transport
    go_on = torch.ones(1, dtype=torch.int64, device=group.device)
    for i in range(plan.warmup + plan.calls):
        if i % 50 == 0 and i:  # one decision for all ranks
            go_on.fill_(time.perf_counter() - began < BUDGET_S)
            group.transport.broadcast(go_on, "bench")
            if not int(go_on):
                break
        _settle(group)
        start = time.perf_counter()
        call()
        _settle(group)
        if i >= plan.warmup:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    factor = {"all-reduce": 2.0}.get(collective, 1.0) * (group.size - 1) / group.size
    return {
        "collective": collective,
        "ranks": group.size,
        "bytes": num_bytes,
        "calls": len(seconds),
        "min_us": min(seconds) * 1e6,
        "median_us": median * 1e6,
        "p95_us": sorted(seconds)[int(0.95 * (len(seconds) - 1))] * 1e6,
        "gb_per_s": num_bytes / median / 1e9,
        "bus_gb_per_s": factor * num_bytes / median / 1e9,
    }


def _call(group: Group, wire: Wire, collective: str, size: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """What to time, and the bytes of the whole value: `size`, rounded up to whole rows of every rank."""
    ranks = group.size
    part = max(1, -(-size // (dtype.itemsize * ranks)))
    whole = torch.zeros(ranks * part, dtype=dtype, device=group.device)
    mine, ones = whole[:part].clone(), [part] * ranks
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: wire.all_reduce(whole),
        "reduce-scatter": lambda: wire.reduce_scatter(mine, whole),
        "all-gather": lambda: wire.all_gather(whole, mine),
        "all-to-all": lambda: wire.all_to_all(torch.empty_like(whole), whole, ones, ones),
        "broadcast": lambda: wire.broadcast(whole),
        "gather": lambda: wire.gather(mine),
        "barrier": wire.barrier,
    }
    return calls[collective], whole.nbytes if collective != "barrier" else 0


def _settle(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
