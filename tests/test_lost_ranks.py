"""A rank that is killed or stopped under a launcher is named with its place; all end in time, and nothing is left.

Cases mostly wait, so several run at once. The output has a table of what was said (pytest -rP shows it).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import saboteur
from launched import FULL, RUN, Traces, environment, need
from rich.console import Console
from rich.table import Table
from test_world import alive

from lockstep.cli import app
from lockstep.comm import launchers
from lockstep.comm.launchers import Plan, command

TIMEOUT_S = 10.0
GRACE_S = 5.0
SLACK_S = 10.0  # for a machine with other work
LAUNCHER_S = 60.0  # for the launcher to end after its ranks
START_S = 400.0  # until the strike, on such a machine
AT_ONCE = 4


@dataclass(frozen=True)
class Case:
    launcher: str
    ranks: int
    culprit: int
    place: str
    how: str

    def __str__(self) -> str:
        return f"{self.launcher}-{self.ranks}-rank{self.culprit}-{self.place}-{self.how}"


ALL = [
    Case(launcher, ranks, culprit, place, how)
    for launcher in ("local", "torchrun", "deepspeed")
    for ranks in (2, 4)
    for place in saboteur.PLACES
    for culprit in range(ranks)
    for how in ("kill", "stop")
] + [Case("mpi", 2, culprit, place, how) for place in saboteur.PLACES for culprit, how in ((0, "kill"), (1, "stop"))]
FEW = [
    Case("local", 2, 1, "write", "kill"),
    Case("torchrun", 2, 0, "draft", "stop"),
    Case("torchrun", 2, 0, "write", "stop"),
    Case("torchrun", 2, 1, "write", "stop"),
    Case("deepspeed", 2, 1, "exit", "kill"),
    Case("deepspeed", 4, 2, "verify", "stop"),
    Case("mpi", 2, 0, "prefill", "kill"),
]
CASES = ALL if FULL else FEW
HERE = re.escape(socket.gethostname())
COLLECTIVE = r"collective \d+ \([a-z-]+ at \S+\)"
WHERE = {
    "load": rf"on {HERE} in load, (before its first collective|after {COLLECTIVE})",
    "prefill": rf"on {HERE} in prefill, in {COLLECTIVE}",
    "verify": rf"on {HERE} in verify, round \d+, in {COLLECTIVE}",
    "draft": rf"on {HERE} in draft, round \d+, in {COLLECTIVE}",
    "exit": rf"on {HERE} in (draft|verify), round \d+, in collective \d+ \([a-z-]+ at mtp\.0\.exit\)",
    "write": rf"on {HERE} in (end|write), round \d+, after {COLLECTIVE}",
}
BLAMED = re.compile(r"rank (\d+):? (?:has ended|was killed|is stopped|is behind|hangs)")
STATE = {"kill": "has ended|was killed by SIGKILL", "stop": "is stopped"}


@dataclass(frozen=True)
class Outcome:
    """`ranks_s` and `all_s`: from the strike to the end of the other ranks, and of everything."""

    code: int
    started: list[str]
    ranks_s: float
    all_s: float
    said: str
    err: str
    left: list[str]
    result: bool
    finished: list[dict[str, Any]]


def run(case: Case, model: Path, folder: Path) -> Outcome:
    notes, file, err = folder / "notes", folder / "result.json", folder / "err"
    notes.mkdir(parents=True)
    partial = Path(f"{file}.partial.jsonl")
    arguments = ["generate", str(model), *RUN, "--tp", str(case.ranks), "--strategy", "sp-late", "--json", str(file)]
    arguments += ["--batch", "1", "--timeout", f"{TIMEOUT_S:g}"]  # so the second request is struck, and the first done
    line = command(Plan(case.launcher, case.ranks, tuple(arguments)))
    sabotage = {"SABOTAGE": f"{case.culprit}:{case.place}:{case.how}", "SABOTAGE_NOTES": str(notes)}
    if case.place != "load":
        sabotage["SABOTAGE_AFTER"] = str(partial)
    traces = Traces(folder / "tmp")
    with err.open("w") as stream:
        process = subprocess.Popen(
            ["saboteur" if word == launchers.MODULE else word for word in line.argv],
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env=traces.environment | sabotage | line.environment,
        )
        ranks_s, all_s = _watch(process, case, notes, traces)
    text = err.read_text()
    said = re.search(rf"rank {case.culprit}:? (?P<how>{STATE[case.how]}).*?(?P<where>{WHERE[case.place]})", text)
    return Outcome(
        process.returncode,
        sorted(path.name for path in notes.iterdir()),
        ranks_s,
        all_s,
        f"{said['how']} {said['where']}" if said else "",
        text,
        traces.settled(),
        file.exists(),
        [json.loads(row) for row in partial.read_text().splitlines()] if partial.exists() else [],
    )


def _watch(process: subprocess.Popen[bytes], case: Case, notes: Path, traces: Traces) -> tuple[float, float]:
    """Wait for all to end, or end it: seconds from the strike to the end of the other ranks, and of everything."""
    others = [notes / f"rank-{rank}" for rank in range(case.ranks) if rank != case.culprit]
    struck, begun, ranks_s = notes / "struck", time.time(), 0.0
    while process.poll() is None or traces.processes():
        time.sleep(0.1)
        at = struck.stat().st_mtime if struck.exists() else time.time()
        if any(alive(int(note.read_text() or 0)) for note in others if note.exists()):
            ranks_s = time.time() - at
        if time.time() > max(at + 2 * (TIMEOUT_S + GRACE_S + LAUNCHER_S), begun + START_S):
            process.kill()
            for pid in traces.processes():
                os.kill(pid, signal.SIGKILL)
    return ranks_s, time.time() - at


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """case -> the future of its outcome; all cases that were selected run, some at once."""
    model, folder = checkpoints.cached("deepseek_v3"), tmp_path_factory.mktemp("lost")
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is sys.modules[__name__] and "case" in item.fixturenames
    ]
    pool = ThreadPoolExecutor(AT_ONCE)
    yield {case: pool.submit(run, case, model, folder / str(case)) for case in cases if _installed(case.launcher)}
    pool.shutdown(cancel_futures=True)


def _installed(launcher: str) -> bool:
    try:
        need(launcher)
    except pytest.skip.Exception:
        return False
    return True


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The requests as a run without a fault finishes them."""
    file = tmp_path_factory.mktemp("whole") / "result.json"
    assert app.main(["generate", str(checkpoints.cached("deepseek_v3")), *RUN, "--json", str(file)]) == 0
    requests = json.loads(file.read_text())["requests"]
    return [
        {"request": i} | {key: request[key] for key in ("prompt_ids", "tokens", "text", "finish_reason")}
        for i, request in enumerate(requests)
    ]


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    headings = "launcher", "P", "rank", "place", "how", "code", "ranks s", "all s", "on disk", "said"
    title = f"A lost rank, --timeout {TIMEOUT_S:g}: seconds from the strike to the end of other ranks, and of all"
    table = Table(*headings, box=None, title=title)
    yield table
    Console(width=220, markup=False).print(table)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_lost_rank_is_named_and_all_end(
    finished: list[dict[str, Any]], outcomes: dict[Case, Future[Outcome]], table: Table, case: Case
) -> None:
    need(case.launcher)
    got = outcomes[case].result()
    numbers = str(got.code), f"{got.ranks_s:.1f}", f"{got.all_s:.1f}", f"{len(got.finished)} of {len(finished)}"
    table.add_row(case.launcher, str(case.ranks), str(case.culprit), case.place, case.how, *numbers, got.said)
    assert got.started == [*(f"rank-{rank}" for rank in range(case.ranks)), "struck"], got.err
    assert got.code != 0
    assert got.said, got.err
    assert set(BLAMED.findall(got.err)) == {str(case.culprit)}, got.err
    assert got.left == []
    assert got.ranks_s < TIMEOUT_S * (case.how == "stop") + GRACE_S + SLACK_S
    assert got.all_s < got.ranks_s + LAUNCHER_S
    assert not got.result
    assert got.finished == finished[: {"load": 0, "write": 2}.get(case.place, 1)]


TOLD_TO_END = """
import os, signal, threading, time, types
from lockstep.comm.peers import Peers
peers = Peers.__new__(Peers)
peers._transport, peers._telling, peers._alarm, peers.others = types.SimpleNamespace(), threading.Lock(), None, []
peers.answer_sigterm()
peers._account = "rank 1 has ended"
peers.close()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_what_a_rank_has_found_out_is_said_though_the_launcher_ends_it_first() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGTERM, "lockstep: rank 1 has ended\n")
