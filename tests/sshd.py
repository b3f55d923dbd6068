"""An sshd on each of the two hosts. Keys and settings are in a folder of the test's; the user's own are not read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts
from launched import environment
from test_world import wait_until

HOSTS = "127.0.0.1 localhost\n10.77.9.1 host-0\n10.77.9.2 host-1\n"
SERVER = """\
AuthorizedKeysFile {folder}/client.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
"""
CLIENT = """\
IdentityFile {folder}/client
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
LogLevel ERROR
"""
# All that the two hosts do not have in common, and what sshd wants to find.
BOOT = """\
hostname host-{i}
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs none /run
mkdir /run/sshd
exec {sshd} -D -f {folder}/server -h {folder}/host-{i}
"""


def need_ssh() -> None:
    for name, package in (("sshd", "openssh-server"), ("ssh", "openssh-client"), ("pdsh", "pdsh")):
        if not _program(name):
            pytest.skip(f"{name} is not installed here (Debian's {package})")


class SshHosts:
    """The hosts, each as one space of processes whose first is its sshd."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._folder = folder
        for name in ("client", "host-0", "host-1"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        public = [(folder / f"host-{i}.pub").read_text() for i in range(2)]
        (folder / "known_hosts").write_text("".join(f"host-{i} {key}" for i, key in enumerate(public)))
        (folder / "hosts").write_text(HOSTS)
        (folder / "server").write_text(SERVER.format(folder=folder))
        (folder / "client.config").write_text(CLIENT.format(folder=folder))
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"  # ssh takes no settings from its environment
        wrapper.write_text(f'#!/bin/sh\nexec {_program("ssh")} -F {folder}/client.config "$@"\n')
        wrapper.chmod(0o755)
        self._booted = [self._boot(i, name) for i, name in enumerate(hosts.names)]

    def __enter__(self) -> SshHosts:
        assert wait_until(lambda: all(self._first(i) for i in range(2)))
        assert wait_until(lambda: all(self._answers(i) for i in range(2)))
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._booted:
            process.kill()
            process.wait()

    def start(self, i: int, line: list[str], **more: str) -> subprocess.Popen[str]:
        """Run `line` on host i, as the child of what is returned."""
        path = f"{self._folder}/bin:{os.environ['PATH']}"
        return subprocess.Popen(
            ["nsenter", "--all", f"--target={self._first(i)}", f"--wdns={os.getcwd()}", *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(PATH=path, **more),
        )

    def signal(self, started: subprocess.Popen[str], number: signal.Signals) -> None:
        (child,) = children(started.pid)
        os.kill(child, number)

    def processes(self, i: int) -> dict[int, str]:
        """What runs on host i, apart from sshd: process numbers, as this process sees them, and command lines."""
        space = os.readlink(f"/proc/{self._first(i)}/ns/pid")
        return {
            pid: line for pid, line in _processes(space) if line and not line.startswith(("sshd", _program("sshd")))
        }

    def _boot(self, i: int, name: str) -> subprocess.Popen[bytes]:
        alone = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        boot = BOOT.format(i=i, folder=self._folder, sshd=_program("sshd"))
        return subprocess.Popen(["ip", "netns", "exec", name, *alone, "sh", "-ec", boot])

    def _first(self, i: int) -> int | None:
        return next(iter(children(self._booted[i].pid)), None)

    def _answers(self, i: int) -> bool:
        with self.start(0, ["ssh", f"host-{i}", "hostname"]) as process:
            return process.communicate()[0] == f"host-{i}\n"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") or ""


def _processes(space: str) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns" / "pid") == space:
                yield int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # gone since
            continue
