"""What only rank 0 does may take long, and what never comes back to Python has an end all the same."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from launched import environment

from lockstep.comm.delivery import deliver
from lockstep.comm.group import Group
from lockstep.comm.supervise import RankFailed
from lockstep.comm.world import run


def slow(group: Group, emit: Any, seconds: float, fails: bool) -> str:
    def work() -> None:
        time.sleep(seconds)
        if fails:
            raise ValueError("no room")
        emit("written")

    deliver(group, work)
    return "done"


def test_who_waits_for_a_delivery_is_told_that_it_goes_on() -> None:
    told: list[Any] = []
    assert run(slow, 3, args=(5.0, False), timeout_s=2.0, on_event=lambda *event: told.append(event)) == "done"
    assert told == [(0, "written")]
    assert run(slow, 1, args=(0.0, False)) == "done"


def test_a_delivery_that_fails_is_rank_0_s_failure() -> None:
    with pytest.raises(RankFailed, match="rank 0: ValueError: no room"):
        run(slow, 2, args=(0.5, True), timeout_s=20.0)


def test_what_does_not_come_back_in_time_is_killed_with_a_word() -> None:
    code = "import ctypes, sys; from lockstep.comm.overdue import killed_after\n"
    code += "with killed_after(float(sys.argv[1]), 'too late'): ctypes.PyDLL(None).sleep(int(sys.argv[2]))\n"
    code += "print('in time')"  # PyDLL: nothing else of Python runs meanwhile
    for seconds, sleep, expected in (
        ("0.5", "60", (-9, "", "lockstep: too late\n")),
        ("60", "1", (0, "in time\n", "")),
    ):
        line = [sys.executable, "-c", code, seconds, sleep]
        ran = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=50)
        assert (ran.returncode, ran.stdout, ran.stderr) == expected
