"""`lockstep launch`: start a command's ranks with torchrun, deepspeed, mpiexec or ourselves, and leave none behind."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from lockstep.cli import options
from lockstep.cli.exit_codes import RANK_FAILED, Codes
from lockstep.comm import launchers
from lockstep.comm.errors import UsageError

GRACE_S = 5.0
PATIENCE_S = 30.0  # deepspeed ends what it has started over ssh
PR_SET_CHILD_SUBREAPER = 36
NEEDS = {"deepspeed": "deepspeed", "mpi": "mpi4py"}


def command(
    arguments: options.CommandLine,
    launcher: options.Launcher = "torchrun",
    hostfile: options.Hostfile = None,
    nnodes: options.NumNodes = None,
    node_rank: options.NodeRank = None,
    master_addr: options.MasterAddr = None,
    master_port: options.MasterPort = None,
    dry_run: options.DryRun = False,
) -> None:
    """Start a command's ranks with a launcher: lockstep launch --launcher deepspeed -- generate demo --tp 2"""
    ranks = launchers.ranks_of(arguments)
    hosts = launchers.hosts_of(ranks, hostfile, nnodes)
    plan = launchers.Plan(launcher, ranks, tuple(arguments), hosts, node_rank, master_addr, master_port)
    line = launchers.command(plan, devices=_devices(launcher, arguments))
    if dry_run:
        settings = [f"{name}={shlex.quote(value)}" for name, value in line.environment.items()]
        unset = [f"-u {name}" for name in line.without if name in os.environ]
        typer.echo(" ".join([*(["env", *unset] if unset else []), *settings, shlex.join(line.argv)]))
        return
    missing = NEEDS.get(launcher)
    if missing and importlib.util.find_spec(missing) is None:
        raise UsageError(f"--launcher {launcher} needs {missing}; pip install 'lockstep-decode[{launcher}]'")
    if plan.over_ssh and shutil.which("pdsh") is None:
        raise UsageError(
            "--launcher deepspeed needs pdsh to reach other hosts; install it, or run this on each, with --node-rank"
        )
    raise typer.Exit(run(line))


def run(line: launchers.Command) -> int:
    """Run it to its end; 0, or the exit code of the rank that failed first.

    Whatever happens, nothing that it started is left on this host.
    """
    if sys.platform == "linux":
        # What the launcher leaves behind when it dies becomes our child, and not init's.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    codes = Codes()
    environment = {k: v for k, v in os.environ.items() if k not in line.without} | line.environment | codes.environment
    sys.stdout.flush()
    started: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        for process in started:
            _forward(process, number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        started.append(process := subprocess.Popen(line.argv, env=environment, start_new_session=True))
        for number in received:  # before it was there
            _forward(process, number)
        code = _wait(process, received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _end_children()
        cause = codes.cause()
        codes.close()
    if code and received:
        return 128 + received[0]
    return cause if code else 0


def _wait(process: subprocess.Popen[bytes], received: list[int]) -> int:
    """Its exit code. After a signal it has PATIENCE_S to end, after a second one no more."""
    until = math.inf
    while True:
        try:
            return process.wait(0.25)
        except subprocess.TimeoutExpired:
            until = min(until, time.monotonic() + PATIENCE_S) if received else until
            if time.monotonic() > until or len(received) > 1:
                return RANK_FAILED


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _forward(process: subprocess.Popen[bytes], number: int) -> None:
    """To the whole group: a signal to deepspeed alone leaves its ranks running."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def _end_children() -> None:
    """End what is left of the launcher's processes: TERM, and KILL after the grace."""
    deadline = time.monotonic() + GRACE_S
    number = signal.SIGTERM
    while left := list(_children()):
        for pid in left:
            try:
                os.kill(pid, number)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                continue
        number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
        time.sleep(0.05)


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").glob("*/children") if sys.platform == "linux" else ():
        yield from map(int, task.read_text().split())


def _devices(launcher: str, arguments: list[str]) -> str | None:
    """CUDA_VISIBLE_DEVICES, where it matters: for deepspeed with ranks on CUDA devices."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if launcher != "deepspeed" or not given or launchers.option(arguments, "--device") == "cpu":
        return None
    import torch

    return given if torch.cuda.is_available() else None
