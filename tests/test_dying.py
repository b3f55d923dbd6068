"""A rank that dies, stops or fails at any stage is named with its place; the others end in time, and nothing is left.

The output has a table of what was said (pytest -rP shows it).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import checkpoints
import pytest
import saboteur
from rich.console import Console
from rich.table import Table
from test_world import children

from lockstep.comm import strategy as strategies
from lockstep.comm.supervise import RankFailed
from lockstep.comm.world import run
from lockstep.engine.requests import Job
from lockstep.engine.run import generate

TIMEOUT_S = 3.0
GRACE_S = 5.0
SLACK_S = 6.0  # for a machine with other work


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(
        model=str(checkpoints.cached("deepseek_v3")),
        prompts=((5, 7, 9), (50, 96, 3, 4, 11)),
        strategy=strategies.resolve("sp-late"),
        max_new_tokens=12,
        draft_tokens=2,
        tp=2,
        ignore_eos=True,
    )


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table("ranks", "culprit", "place", "how", "seconds", "said", "last seen", box=None)
    yield table
    Console(width=200).print(table)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = children(), set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    yield
    assert (children(), set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before


WHERE = {
    "load": r"in load, before its first collective",
    "prefill": r"in prefill, in collective \d+ \([a-z-]+ at \S+\)",
    "verify": r"in verify, round 2, in collective \d+ \([a-z-]+ at \S+\)",
    "draft": r"in draft, round 2, in collective \d+ \([a-z-]+ at \S+\)",
    "exit": r"in (draft|verify), round 2, in collective \d+ \([a-z-]+ at mtp\.0\.exit\)",
    "write": r"in end, round \d+, after collective \d+",
}
SAYS = {
    "kill": "was killed by SIGKILL",
    "stop": "is stopped",
    "raise": "ValueError: sabotage",
    "sleep": "hangs or is far behind",
    "memory": "MemoryError: cannot allocate 99 GiB",
}
FULL = "LOCKSTEP_ALL_FAULTS" in os.environ  # every rank of 2 and 4 stopped at every place too
CASES = [
    *((2, culprit, place, "kill") for place in saboteur.PLACES for culprit in (0, 1)),
    *((2, culprit % 2, place, "stop") for culprit, place in enumerate(saboteur.PLACES)),
    (2, 1, "verify", "raise"),
    (2, 0, "draft", "memory"),
    (2, 0, "verify", "sleep"),
    (4, 3, "draft", "kill"),
    (4, 2, "verify", "stop"),
]
ALL = [
    (size, culprit, place, how)
    for size in (2, 4)
    for place in saboteur.PLACES
    for culprit in range(size)
    for how in ("kill", "stop", "raise", "sleep")
]


@pytest.mark.parametrize(("size", "culprit", "place", "how"), ALL if FULL else CASES)
def test_a_lost_rank_is_named_with_its_place(
    job: Job, table: Table, size: int, culprit: int, place: str, how: str
) -> None:
    rank = _Rank()
    was = saboteur.sabotage(rank, culprit, place, how)
    started = time.monotonic()
    try:
        with pytest.raises(RankFailed, match=rf"{SAYS[how]}.*; last seen on \S+ {WHERE[place]}") as failed:
            run(rank.then(generate), size, args=(replace(job, tp=size),), timeout_s=TIMEOUT_S, grace_s=GRACE_S)
    finally:
        saboteur.restore(was)
    took = time.monotonic() - started
    said = failed.value.message.partition(" (by hand")[0].partition(": no word")[0].partition(": rank")[0]
    table.add_row(str(size), str(culprit), place, how, f"{took:.1f}", said, failed.value.where)
    assert failed.value.rank == culprit
    assert took < TIMEOUT_S + GRACE_S + SLACK_S


class _Rank:
    """Which rank this process is, once it has become one."""

    number = -1

    def __call__(self) -> int:
        return self.number

    def then(self, target: Any) -> Any:
        def with_number(group: Any, emit: Any, *args: Any) -> Any:
            self.number = group.rank
            return target(group, emit, *args)

        return with_number
