"""Ranks that stay do one step after another, on as many of them as a step has; the others wait as long as it takes."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest
import torch
from launched import environment, need

from lockstep.comm import clock
from lockstep.comm.crew import Crew
from lockstep.comm.group import Group
from lockstep.comm.launchers import Plan, command
from lockstep.comm.layout import PARTIAL, REPLICATED, Activation
from lockstep.comm.supervise import RankFailed
from lockstep.comm.wiring import Wiring
from lockstep.comm.world import run

SIZES = (4, 1, 3, 2, 3, 1, 4)
OPTIONS: dict[str, Any] = {"timeout_s": 30.0, "device": "cpu", "wiring": Wiring()}


def add_up(group: Group, emit: Any, first: int) -> tuple[int, list[float], int, int]:
    """Size, the sum over ranks of `first` + rank, and how often the ledger and the heartbeat have counted it."""
    emit("adding")
    x = Activation(torch.full((1, 1), float(first + group.rank)), PARTIAL, 1)
    total = group.convert(x, REPLICATED, "sum").data.flatten().tolist()
    number = group.transport.pulse.read().sequence if group.transport else 1
    return group.size, total, sum(row["calls"] for row in group.ledger.rows()), number


def steps(group: Group) -> Any:
    crew, told = Crew(group), list[Any]()
    if group.rank:
        return crew.serve()
    with crew:
        done = [crew.call(add_up, p, args=(10,), on_event=lambda *e: told.append(e), **OPTIONS) for p in SIZES]
    return done, told


def test_each_step_has_a_group_of_its_size(ranks: Any) -> None:
    (done, told), *others = ranks(4).run(steps)
    assert done == [(p, [float(10 * p + sum(range(p)))], int(p > 1), 1) for p in SIZES]
    assert told == [(0, "adding")] * len(SIZES)
    assert others == [None] * 3


def say_steps(group: Group, emit: Any) -> None:
    done = steps(group)
    if done:
        print([tuple(step) for step in done[0]])


def test_mpi_has_groups_of_every_size_too() -> None:
    need("mpi")
    line = command(Plan("mpi", 4, ("crew",))).argv
    run_steps = "import test_crew, lockstep.comm.world as w; from lockstep.comm.wiring import Wiring\n"
    run_steps += "w.run_as_rank(test_crew.say_steps, wiring=Wiring('mpi'))"
    ran = subprocess.run(
        [*line[: line.index("-m")], "-m", "mpi4py", "-c", run_steps],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
    )
    expected = [(p, [float(10 * p + sum(range(p)))], int(p > 1), 1) for p in SIZES]
    assert ran.stdout.splitlines() == [str(expected)], ran.stderr


def long_step(group: Group, emit: Any, sleep_s: float, event: Any) -> str:
    for _ in range(10):
        time.sleep(sleep_s / 10)
        if event:
            emit(event)
    return "done"


def one_long_step(group: Group, emit: Any, size: int, sleep_s: float, event: Any) -> Any:
    crew = Crew(group)
    if group.rank:
        return crew.serve()
    with crew:
        return crew.call(long_step, size, args=(sleep_s, event), **(OPTIONS | {"timeout_s": 2.0}))


@pytest.mark.parametrize("size", [1, 2])
def test_who_waits_is_told_that_the_others_still_work(size: int) -> None:
    assert run(one_long_step, 3, args=(size, 5.0, "alive"), timeout_s=2.0) == "done"


def test_who_waits_gives_a_silent_rank_up() -> None:
    with pytest.raises(RankFailed, match="broadcast at idle"):
        run(one_long_step, 3, args=(1, 30.0, None), timeout_s=2.0, grace_s=1.0)


def fail(group: Group, emit: Any) -> None:
    if group.rank == 1:
        os._exit(9)
    time.sleep(60)


def one_rank_fails(group: Group, emit: Any) -> Any:
    crew = Crew(group)
    if group.rank:
        return crew.serve()
    with crew:
        return crew.call(fail, 2, **OPTIONS)


def test_a_rank_that_fails_ends_all() -> None:
    with pytest.raises(RankFailed, match="rank 1: ended with exit code 9"):
        run(one_rank_fails, 3, timeout_s=30.0, grace_s=1.0)


def skewed(group: Group, seconds: float) -> Any:
    """The clocks' offsets where rank r's is `seconds` * r ahead, on hosts of their own."""
    real = time.perf_counter_ns
    before, group.hosts = group.hosts, tuple(f"host-{r}" for r in range(group.size))
    time.perf_counter_ns = lambda: real() + int(1e9 * seconds * group.rank)
    try:
        found = clock.offsets(group)
    finally:
        time.perf_counter_ns, group.hosts = real, before
    return None if found is None else found.tolist()


def test_clocks_of_other_hosts_are_found(ranks: Any) -> None:
    found, *others = ranks(3).run(skewed, 5.0)
    assert found == pytest.approx([0, 5e9, 10e9], abs=2e8)  # half of the quickest round trip, on a busy machine
    assert others == [None, None]


def test_ranks_of_one_host_share_a_clock(ranks: Any) -> None:
    assert ranks(2).run(clock.offsets)[0].tolist() == [0, 0]
