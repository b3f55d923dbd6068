"""Two hosts: network namespaces with a link, and with host names and process numbers of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from test_launchers import RUN, environment, need

from lockstep.cli import app
from lockstep.comm import launchers
from lockstep.comm.launchers import Plan, hosts_of

pytestmark = pytest.mark.skipif("LOCKSTEP_MULTIHOST" not in os.environ, reason="make test-multihost, as root")
LINK = "lockstep"


class Hosts:
    """host-0 at 10.77.9.1 and host-1 at 10.77.9.2, whose link is named as below in both."""

    def __init__(self) -> None:
        self.names = [f"lockstep-{os.getpid()}-{i}" for i in range(2)]

    def __enter__(self) -> Hosts:
        for name in self.names:
            _ip("netns", "add", name)
        ends = [["name", LINK, "netns", name] for name in self.names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, name in enumerate(self.names):
            _ip("-n", name, "addr", "add", f"10.77.9.{i + 1}/24", "dev", LINK)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", LINK, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            _ip("netns", "del", name)

    def start(self, i: int, line: list[str], **more: str) -> subprocess.Popen[str]:
        """Run `line` on host i. Killing what is returned kills all that it has started."""
        alone = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        named = ["sh", "-c", f'hostname host-{i}; exec "$@"', "sh"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[i], *alone, *named, *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(GLOO_SOCKET_IFNAME=LINK, **more),
        )

    def both(self, launcher: str, *command: str, timeout: float = 240, **more: str) -> list[tuple[int, str, str]]:
        """Launch the command's two ranks, one on each host: exit code, output and errors of both."""
        launch = [sys.executable, "-m", "lockstep.cli", "launch", "--launcher", launcher, "--nnodes", "2"]
        meet = ["--master-addr", "10.77.9.1", "--master-port", "29511"]
        lines = [[*launch, "--node-rank", str(i), *meet, "--", *command] for i in range(2)]
        started = [self.start(i, line, **more) for i, line in enumerate(lines)]
        try:
            results = []
            for process in started:
                out, err = process.communicate(timeout=timeout)
                results.append((process.returncode, out, err))
            return results
        finally:
            for process in started:
                process.kill()
                process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoints.cached("deepseek_v3")


@pytest.mark.parametrize(("launcher", "comm"), [("torchrun", "torch"), ("deepspeed", "deepspeed")])
def test_two_hosts_give_the_result_of_one(hosts: Hosts, model: Path, tmp_path: Path, launcher: str, comm: str) -> None:
    need(launcher)
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    command = ["generate", str(model), *RUN, "--tp", "2", "--strategy", "sp-late"]
    assert app.main([*command, "--json", str(here)]) == 0
    results = hosts.both(launcher, *command, "--comm", comm, "--json", str(there))
    assert [code for code, _, _ in results] == [0, 0], results
    one, two = (json.loads(file.read_text()) for file in (here, there))
    del one["timings"], two["timings"]
    assert one == two


TIMEOUT_S = 8.0
SLACK_S = 15.0  # for the launchers to notice, on a machine with other work
LOST = [
    ("torchrun", 2, 1, "verify", "kill"),
    ("torchrun", 2, 1, "draft", "stop"),
    ("torchrun", 2, 0, "exit", "stop"),
    ("torchrun", 2, 1, "load", "kill"),
    ("torchrun", 4, 3, "prefill", "kill"),
    ("torchrun", 4, 2, "verify", "stop"),
    ("torchrun", 2, 1, "load", "sleep"),
    ("deepspeed", 2, 1, "exit", "kill"),
    ("deepspeed", 2, 1, "verify", "stop"),
]
# When the launcher has ended, how it did; and later what is left beside the shell, which is process 1 of the host.
THEN_LOOK = """
"$@"
echo "ended $? at $(date +%s.%N)"
sleep 4
for p in /proc/[0-9]*; do [ $p = /proc/1 ] || echo "left: $(tr '\\0' ' ' < $p/cmdline)"; done
"""


@pytest.mark.parametrize(("launcher", "ranks", "culprit", "place", "how"), LOST)
def test_a_lost_rank_is_named_by_the_other_host_and_both_launchers_end(
    hosts: Hosts, model: Path, tmp_path: Path, launcher: str, ranks: int, culprit: int, place: str, how: str
) -> None:
    need(launcher)
    pids, struck, file = tmp_path / "pids", tmp_path / "struck", tmp_path / "result.json"
    pids.mkdir()
    command = ("generate", str(model), *RUN, "--strategy", "sp-late", "--json", str(file), "--tp", str(ranks))
    command += ("--timeout", f"{TIMEOUT_S:g}")
    sabotage = {"SABOTAGE": f"{culprit}:{place}:{how}", "SABOTAGE_PIDS": str(pids), "SABOTAGE_STRUCK": str(struck)}
    started = []
    try:
        for i in range(2):
            meet = {"node_rank": i, "master_addr": "10.77.9.1", "master_port": 29513}
            line = launchers.command(Plan(launcher, ranks, command, hosts_of(ranks, None, 2), **meet))  # type: ignore[arg-type]
            argv = ["saboteur" if word == launchers.MODULE else word for word in line.argv]
            started.append(hosts.start(i, ["sh", "-c", THEN_LOOK, "sh", *argv], **line.environment, **sabotage))
        results = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    elsewhere = 1 - culprit * 2 // ranks
    says = {"kill": "has ended: last seen", "stop": "is stopped:", "sleep": "is behind:"}[how]
    at = r"\S+ at mtp\.0\.exit" if place == "exit" else r"\S+ at \S+"
    stage = "(draft|verify)" if place == "exit" else place
    last = rf"on host-{1 - elsewhere} in {stage}(, round 2)?, (in|after) collective \d+ \({at}\) \("
    told = "\n".join(line for _, err in results for line in err.splitlines() if line.startswith("lockstep: "))
    assert re.search(rf"^lockstep: .*rank {culprit} {says} {last}", results[elsewhere][1], re.MULTILINE), told
    for i, (out, _) in enumerate(results):
        assert "left:" not in out
        code, when = re.findall(r"ended (\d+) at (\S+)", out)[-1]
        took = float(when) - struck.stat().st_mtime
        print(f"host-{i}: exit code {code} after {took:.1f} s")
        assert code != "0"
        assert took < TIMEOUT_S + 5 + SLACK_S
    assert not file.exists()


def test_a_dead_link_ends_both_hosts_in_time_and_names_the_other(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    launch = ["-m", "lockstep.cli", "launch", "--nnodes", "2", "--master-addr", "10.77.9.1", "--master-port", "29512"]
    command = ["generate", str(model), *RUN[:-3], "--max-new-tokens", "110", "--ignore-eos", "--tp", "2"]
    file = tmp_path / "result.json"
    command += ["--timeout", "10", "--json", str(file), "--draft-tokens", "0", "--check-ranks"]
    started = [hosts.start(i, [sys.executable, *launch, "--node-rank", str(i), "--", *command]) for i in range(2)]
    try:
        assert started[0].stdout
        started[0].stdout.read(8)  # the first tokens
        _ip("-n", hosts.names[0], "link", "set", LINK, "down")
        cut = time.monotonic()
        results = [(*process.communicate(timeout=120), process.returncode) for process in started]
        took = time.monotonic() - cut
    finally:
        _ip("-n", hosts.names[0], "link", "set", LINK, "up")
        for process in started:
            process.kill()
            process.wait()
    for i, (_, err, code) in enumerate(results):
        assert code != 0
        told = re.search(rf"rank {1 - i} on host-{1 - i} did not answer, or the link to it is dead; (.*)", err)
        assert told, err
        assert re.match(rf"this rank waited on host-{i} in [a-z]+, round \d+, in collective \d+ \([a-z-]+ at ", told[1])
    assert took < 10 + 5 + 20
    assert not file.exists()


def test_a_slow_link_shows_in_the_benchmark(hosts: Hosts, tmp_path: Path) -> None:
    def seconds_per_mb(file: Path) -> float:
        bench = ["comm-bench", "--tp", "2", "--collectives", "all-gather", "--sizes", "1000000", "--calls", "10"]
        results = hosts.both("torchrun", *bench, "--json", str(file))
        assert [code for code, _, _ in results] == [0, 0], results
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        return float(min(row["min_us"] for row in rows)) / 1e6

    fast = seconds_per_mb(tmp_path / "fast.json")
    limit = ["root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "400ms"]
    for name in hosts.names:
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", LINK, *limit], check=True)
    try:
        slow = seconds_per_mb(tmp_path / "slow.json")
    finally:
        for name in hosts.names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", LINK, "root"], check=True)
    print(f"all-gather of 1 MB: {fast * 1e3:.1f} ms, at 80 Mbit/s {slow * 1e3:.1f} ms")
    assert slow > 0.04 > fast  # half of it, 4 Mbit, must cross the link: 50 ms
