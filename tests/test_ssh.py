"""`lockstep launch --launcher deepspeed --hostfile F` reaches the other host over ssh, and leaves nothing there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from hosts import LINK, Hosts
from launched import RUN, need
from sshd import SshHosts, need_ssh
from test_world import wait_until

from lockstep.cli import app

pytestmark = pytest.mark.skipif("LOCKSTEP_MULTIHOST" not in os.environ, reason="make test-multihost, as root")
ENDLESS = ["--prompt-ids", "5,7,9"] * 200 + ["--batch", "1", "--max-new-tokens", "30", "--ignore-eos"]

SETTINGS = {"OMP_NUM_THREADS": "2", "TORCH_NOT_READ": 'a  "b" $HOME, 100%h'}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    need("deepspeed")
    need_ssh()
    with Hosts() as hosts, SshHosts(hosts, tmp_path_factory.mktemp("ssh")) as reached:
        yield reached


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoints.cached("deepseek_v3")


def start(hosts: SshHosts, folder: Path, command: list[str], **more: str) -> subprocess.Popen[str]:
    """`lockstep launch` on host 0, for both."""
    (folder / "hostfile").write_text("host-0 slots=1\nhost-1 slots=1\n")
    launch = ["-m", "lockstep.cli", "launch", "--launcher", "deepspeed", "--hostfile", str(folder / "hostfile"), "--"]
    return hosts.start(0, [sys.executable, *launch, *command, "--tp", "2"], GLOO_SOCKET_IFNAME=LINK, **more)


def test_over_ssh_the_result_is_that_of_one_host(hosts: SshHosts, model: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here.json", tmp_path / 'it\'s "there" in $HOME, 100%h `pwd`.json'
    command = ["generate", str(model), *RUN, "--strategy", "sp-late"]
    assert app.main([*command, "--tp", "2", "--json", str(here)]) == 0
    with start(hosts, tmp_path, [*command, "--json", str(there)]) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "host-0: " not in out  # pdsh's
    one, two = (json.loads(file.read_text()) for file in (here, there))
    del one["timings"], two["timings"]
    assert one == two
    assert wait_until(lambda: not hosts.processes(0) and not hosts.processes(1))


@pytest.mark.parametrize("how", ["kill rank 1", "stop rank 1", "SIGINT"])
def test_over_ssh_nothing_is_left_on_either_host(hosts: SshHosts, model: Path, tmp_path: Path, how: str) -> None:
    file = tmp_path / "result.json"
    command = ["generate", str(model), *ENDLESS, "--json", str(file), "--timeout", "20"]
    with start(hosts, tmp_path, command, **SETTINGS) as process:
        try:
            assert wait_until(lambda: file.with_name("result.json.partial.jsonl").exists(), 120)
            ranks = [rank(hosts, i) for i in range(2)]
            see_what_it_got(ranks[1])
            if how == "SIGINT":
                hosts.signal(process, signal.SIGINT)
            else:
                os.kill(ranks[1], signal.SIGKILL if how == "kill rank 1" else signal.SIGSTOP)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 if how == "SIGINT" else process.returncode, err
    assert how == "SIGINT" or re.search(r"lockstep: .*rank 1 (has ended|is stopped).*on host-1 in [a-z]+, ", err), err
    assert wait_until(lambda: not hosts.processes(0) and not hosts.processes(1), 30)
    assert not file.exists()


def rank(hosts: SshHosts, i: int) -> int:
    begins = f"{sys.executable} -u -m lockstep.cli generate"
    return min(pid for pid, line in hosts.processes(i).items() if line.startswith(begins))  # not what it has forked


def see_what_it_got(pid: int) -> None:
    there = Path(f"/proc/{pid}")
    environ = dict(line.split("=", 1) for line in (there / "environ").read_text().split("\0") if line)
    assert (SETTINGS | {"GLOO_SOCKET_IFNAME": LINK}).items() <= environ.items()
    assert (there / "cwd").readlink() == Path.cwd()
