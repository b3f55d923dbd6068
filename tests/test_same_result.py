"""Every launcher and comm layer gives the same result, timings apart, and leaves nothing on this host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from launched import FULL, LAUNCH, RUN, Traces, environment, need

from lockstep.cli import app
from lockstep.comm import deepspeed_wire
from lockstep.comm.errors import UsageError
from lockstep.comm.wiring import COMMS

STRATEGY = ["--strategy", "sp-chunk", "--dispatch", "all-to-all"]  # has every collective but reduce-scatter
FEW = [
    ("local", "deepspeed", 2),
    ("local", "deepspeed-shm", 2),
    ("torchrun", "torch", 2),
    ("deepspeed", "deepspeed", 2),
    ("mpi", "mpi", 2),
]
ALL = [
    (launcher, comm, ranks)
    for ranks in (2, 4)
    for launcher in ("local", "torchrun", "deepspeed", "mpi")
    for comm in COMMS
    if comm != "mpi" or launcher == "mpi"
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What ranks of our own give over gloo, by their number."""
    return {ranks: _here(tmp_path_factory.mktemp("here") / "result.json", ranks) for ranks in (2, 4)}


def _here(file: Path, ranks: int) -> dict[str, Any]:
    assert app.main(_command(file, ranks)) == 0
    return _result(file)


def _command(file: Path, ranks: int) -> list[str]:
    model = str(checkpoints.cached("deepseek_v3"))
    return ["generate", model, *RUN, *STRATEGY, "--tp", str(ranks), "--json", str(file)]


def _result(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    del found["timings"]
    return found


@pytest.fixture(scope="module")
def operator() -> str:
    """Why DeepSpeed's shared-memory operator does not work here; empty where it does. Compiles it, for minutes."""
    try:
        deepspeed_wire.probe(deepspeed_wire.PROBE_S)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("launcher", "comm", "ranks"), ALL if FULL else FEW)
def test_every_launcher_and_comm_gives_the_same_result(
    expected: dict[int, dict[str, Any]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    launcher: str,
    comm: str,
    ranks: int,
) -> None:
    need(launcher)
    need(comm)
    if comm == "deepspeed-shm" and (reason := request.getfixturevalue("operator")):
        pytest.skip(reason)
    traces, file = Traces(tmp_path / "tmp"), tmp_path / "result.json"
    line = [*LAUNCH, "--launcher", launcher, "--", *_command(file, ranks), "--comm", comm]
    ran = subprocess.run(line, capture_output=True, text=True, env=traces.environment, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert _result(file) == expected[ranks]
    assert traces.settled() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "tmp"]


def test_ranks_that_are_checked_give_the_same_result(expected: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    line = [*LAUNCH, "--launcher", "torchrun", "--", *_command(file, 2), "--check-ranks"]
    ran = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert _result(file) == expected[2]


def test_ninja_is_found_beside_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    deepspeed_wire._find_ninja()
    assert shutil.which("ninja") == str(tmp_path / "ninja")
