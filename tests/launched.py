"""What tests of launchers share: a command to run, the environment it runs in, and what it may leave on this host."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_world import alive

ROOT = Path(__file__).parent.parent
FULL = "LOCKSTEP_ALL_FAULTS" in os.environ  # make test-faults: every launcher, rank, place and fault
RUN = ["--prompt-ids", "5,7,9", "--prompt-ids", "50,96,3,4,11", "--max-new-tokens", "12", "--ignore-eos"]
LAUNCH = [sys.executable, "-m", "lockstep.cli", "launch"]
HAS = {
    "deepspeed": importlib.util.find_spec("deepspeed") is not None,
    "mpi": importlib.util.find_spec("mpi4py") is not None and Path(sys.executable).with_name("mpiexec").exists(),
}
MARK = "LOCKSTEP_TEST_RUN"
LISTENS = "0A"  # in /proc/net/tcp


def need(name: str) -> None:
    """Skip where a launcher or a comm layer is not installed."""
    if not HAS.get(name.removesuffix("-shm"), True):
        pytest.skip(f"{name} is not installed here")


def environment(**more: str) -> dict[str, str]:
    """Of a shell that is no rank. Ranks find this repository and its tests."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {k: v for k, v in os.environ.items() if k not in drop} | {"PYTHONPATH": path} | more


@dataclass
class Traces:
    """What a run with this `environment` leaves on this host: every process that it starts inherits the mark.

    Others may use the host meanwhile, so a port counts only if no process that is not the run's listens there.
    """

    folder: Path  # for temporary files; must be empty
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._shared, self._ports = set(os.listdir("/dev/shm")), set(_listening())

    @property
    def environment(self) -> dict[str, str]:
        return environment(TMPDIR=str(self.folder), **{MARK: self.mark})

    def processes(self) -> set[int]:
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone, or another user's
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes() and alive(int(folder.name)):
                    found.add(int(folder.name))
        return found

    def left(self) -> list[str]:
        """Processes, temporary files, shared memory and listening ports, in words; empty as it should be."""
        ours = self.processes()
        files = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*")]
        shared = sorted(set(os.listdir("/dev/shm")) - self._shared)
        now = _listening()
        new = {now[port]: port for port in now.keys() - self._ports}
        others = {inode for inode, pid in _owners(set(new)).items() if pid not in ours}
        return [
            *(f"process {pid}" for pid in ours),
            *(f"file {name}" for name in files),
            *(f"/dev/shm/{name}" for name in shared),
            *(f"port {port}" for inode, port in new.items() if inode not in others),
        ]

    def settled(self, seconds: float = 5.0) -> list[str]:
        """What is left after a while."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def _listening() -> dict[int, str]:
    """TCP ports on which this user's processes listen, and the numbers of their sockets."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, user, _, inode, *_ = line.split()
                if state == LISTENS and int(user) == os.getuid():
                    found[int(local.rpartition(":")[2], 16)] = inode
    return found


def _owners(sockets: set[str]) -> dict[str, int]:
    """The process that holds each of these sockets, where one is found."""
    owners = {}
    for pid, target in _open_files() if sockets else ():
        match = re.fullmatch(r"socket:\[(\d+)\]", target)
        if match and match[1] in sockets:
            owners[match[1]] = pid
    return owners


def _open_files() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for link in folder.iterdir():
                with contextlib.suppress(OSError):
                    yield int(folder.parent.name), os.readlink(link)
