"""Ranks on two hosts: the same result as on one, and a dead link ends both."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from hosts import LINK, Hosts, ip
from test_launchers import RUN, need

from lockstep.cli import app

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
        assert f"rank {1 - i} on host-{1 - i} did not answer, or the link to it is dead" in err, err
    assert took < 10 + 5 + 20
    assert not file.exists()
