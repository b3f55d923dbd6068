"""`lockstep comm-bench`: what collectives cost here, by size, type, algorithm and library."""

from __future__ import annotations

from typing import Any

from lockstep.cli import jsonfile, options
from lockstep.comm.errors import UsageError
from lockstep.comm.wiring import ALGORITHMS, COLLECTIVES

ALL = ",".join(COLLECTIVES)


def command(
    tp: options.Tp = None,
    collectives: options.Collectives = ALL,
    sizes: options.Sizes = "1024,16384,262144,4194304",
    dtypes: options.Dtypes = "float32",
    calls: options.Calls = 100,
    comm: options.Comm = "torch",
    comm_algorithm: options.CommAlgorithm = "auto",
    device: options.Device = "auto",
    timeout: options.Timeout = 60.0,
    json_file: options.JsonFile = None,
    traceback: options.Traceback = False,
) -> None:
    """Measure latency and bandwidth of each collective on P ranks: a table, and JSON for other tools.

    With --comm-algorithm auto, both algorithms where there is a choice.
    """
    from lockstep.cli import launch

    num_ranks = launch.ranks(tp or (2 if launch.alone() else None))
    if num_ranks == 1:
        raise UsageError("one rank moves nothing; use --tp 2 or more")
    wiring = launch.wiring(comm, comm_algorithm, log=False, check=False)
    names = _listed("--collectives", collectives, COLLECTIVES)
    types = _listed("--dtypes", dtypes, [name for name in options.DTYPES if name != "auto"])
    if json_file is not None:
        jsonfile.check(json_file)
    where = launch.device(device, num_ranks)

    from lockstep.comm.bench import Plan, measure

    algorithms = tuple(name for name in ALGORITHMS if name != "auto") if comm_algorithm == "auto" else (comm_algorithm,)
    plan = Plan(names, _sizes(sizes), types, algorithms, calls)
    rows = launch.start(measure, (plan,), num_ranks, where, timeout, lambda rank, event: None, wiring)
    if not launch.is_root():
        return
    _show(rows, to_stdout=json_file != "-")
    if json_file is not None:
        jsonfile.write({"ranks": num_ranks, "device": where, "comm": comm, "rows": rows}, json_file)


def _listed(flag: str, given: str, known: Any) -> tuple[str, ...]:
    names = tuple(name for name in given.split(",") if name)
    for name in names:
        options.one_of(flag, known)(name)
    if not names:
        raise UsageError(f"{flag} names nothing; use {', '.join(known)}")
    return names


def _sizes(given: str) -> tuple[int, ...]:
    sizes = given.split(",")
    if not all(size.isdecimal() and 0 < int(size) <= 1 << 32 for size in sizes):
        raise UsageError(f"--sizes {given!r} must be numbers of bytes, like 1024,65536")
    return tuple(map(int, sizes))


def _show(rows: list[dict[str, Any]], *, to_stdout: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("collective", "type", "algorithm"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes", "min us", "median us", "p95 us", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        names = row["collective"], row["dtype"], row["algorithm"]
        times = (f"{row[key]:.1f}" for key in ("min_us", "median_us", "p95_us"))
        table.add_row(*names, str(row["bytes"]), *times, f"{row['gb_per_s']:.3f}")
    table.caption = f"{rows[0]['wire']}, {rows[0]['ranks']} ranks, {rows[0]['calls']} calls each" if rows else None
    Console(stderr=not to_stdout, highlight=False).print(table)
