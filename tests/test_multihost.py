"""Ranks on two hosts: the same result as on one, and a dead link ends both."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from hosts import LINK, Hosts, ip
from launched import RUN, need

from lockstep.cli import app
from lockstep.comm import launchers
from lockstep.comm.launchers import Plan, hosts_of

pytestmark = pytest.mark.skipif("LOCKSTEP_MULTIHOST" not in os.environ, reason="make test-multihost, as root")


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
    notes, file = tmp_path / "notes", tmp_path / "result.json"
    notes.mkdir()
    command = ("generate", str(model), *RUN, "--strategy", "sp-late", "--json", str(file), "--tp", str(ranks))
    command += ("--timeout", f"{TIMEOUT_S:g}")
    sabotage = {"SABOTAGE": f"{culprit}:{place}:{how}", "SABOTAGE_NOTES": str(notes)}
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
        took = float(when) - (notes / "struck").stat().st_mtime
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
        ip("-n", hosts.names[0], "link", "set", LINK, "down")
        cut = time.monotonic()
        results = [(*process.communicate(timeout=120), process.returncode) for process in started]
        took = time.monotonic() - cut
    finally:
        ip("-n", hosts.names[0], "link", "set", LINK, "up")
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
